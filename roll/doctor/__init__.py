"""`roll doctor`: who waits for whom in a run, and what became of it."""
