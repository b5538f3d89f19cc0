"""Ray: the processes of a run, their devices, locks and deadlines."""
