"""Errors of workers. Each one names the worker and the cause."""

from __future__ import annotations


class PlacementError(RuntimeError):
    """The cluster does not have the devices that the run needs."""


class WorkerDied(RuntimeError):
    """A worker process ended. ``worker`` is its name, such as ``actor_infer/0``."""

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(f"worker {worker} died: {cause}")
        self.worker = worker
        self.cause = cause


class WorkerFailed(RuntimeError):
    """A call raised inside a worker.

    The message carries the original error; the traceback is in the worker's log. ``error_type`` is the name of the
    original error's class.
    """

    def __init__(self, worker: str, method: str, cause: str, error_type: str) -> None:
        super().__init__(f"{worker}.{method} failed: {cause}")
        self.worker = worker
        self.method = method
        self.cause = cause
        self.error_type = error_type


class WritingStuck(TimeoutError):
    """A worker's file has not grown for too long. ``progress`` names the file and how much of it is written."""

    def __init__(self, worker: str, progress: object, seconds: float) -> None:
        super().__init__(
            f"worker {worker} has written nothing for {seconds:g} s (stall_timeout_seconds): {progress}; is its file "
            "system still there?"
        )
        self.worker = worker


class WorkerTimeout(TimeoutError):
    """A call did not return within its deadline."""

    def __init__(self, worker: str, method: str, seconds: float) -> None:
        super().__init__(f"{worker}.{method} did not return within {seconds:g} s")
        self.worker = worker
        self.method = method
