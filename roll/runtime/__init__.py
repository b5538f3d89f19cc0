"""The processes of a run, on Ray: workers, devices, locks and deadlines."""
