"""The folder of a run, and the paths in it.

A run claims its folder when it creates it, so two runs never share a folder, and results of an earlier run are never
overwritten.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path, PurePath

from roll.tracking.files import naming, write_atomically

_logger = logging.getLogger(__name__)


class RunExists(FileExistsError):
    """The chosen folder already holds a run."""


class RunUnusable(OSError):
    """The folder of a run cannot be written."""


class RunDirectory:
    """The paths of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        """The resolved configuration, secrets redacted."""
        self.metrics = root / "metrics.jsonl"
        """One JSON object per training step."""
        self.timeline = root / "timeline.json"
        """States of stages and workers over time, for Perfetto."""
        self.samples = root / "samples.jsonl"
        """Readable rollouts."""
        self.groups = root / "groups.jsonl"
        """Lengths and times of all groups."""
        self.pictures = root / "samples"
        """Images of the readable rollouts."""
        self.summary = root / "summary.json"
        """Status and results of the run."""
        self.status = root / "status.json"
        """Current activity of the run."""
        self.chaos = root / "chaos.jsonl"
        """Record of the injected faults."""
        self.checkpoints = root / "checkpoints"
        self.journal = root / "journal"
        """Journal of the rollouts."""
        self.weights = root / "weights"
        """Weights for the engines, if they are sent as files."""
        self.weights_note = root / "weights.json"
        """Path of the folder for such weights, if another one is configured."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard event files."""
        self.trackers = root / "trackers"
        """One folder per plug-in tracker."""
        self.tracker_ids = self.trackers / "ids.json"
        """The run's id in each plug-in tracker."""
        self.episodes = root / "episodes"
        """Validation episodes for a human reader."""
        self.logs = root / "logs"
        """Logs of driver and workers."""
        self._lock = root / ".lock"

    @classmethod
    def create(
        cls, output_dir: str | None, exp_name: str, now: datetime | None = None, base: Path | str = "output"
    ) -> RunDirectory:
        """Create and claim the folder of a new run: ``output_dir`` if given, else ``<base>/<exp_name>/<now>``.

        In the second case, the link ``<base>/<exp_name>/latest`` points to it. Raises `RunExists` if ``output_dir`` has
        a run already, `ValueError` for an ``exp_name`` that leads out of ``base``, and `OSError` with the path if the
        folder cannot be created.
        """
        if output_dir is not None:
            root = Path(output_dir)
            with naming(root):
                root.mkdir(parents=True, exist_ok=True)
        else:
            root = _make_timed_folder(Path(base) / _checked_name(exp_name), now or datetime.now())
        run = cls(root)
        try:
            # If two runs start at once in one folder, one of them fails here.
            with naming(run.metrics):
                run.metrics.touch(exist_ok=False)
        except FileExistsError as error:
            raise RunExists(
                f"{root} already holds a run ({run.metrics.name} exists). Choose another output_dir, or move or delete "
                "that folder; without output_dir each run gets a folder of its own."
            ) from error
        with naming(root):
            run.checkpoints.mkdir(exist_ok=True)
            run.logs.mkdir(exist_ok=True)
        if output_dir is None:
            point_latest_to(root)
        return run

    @staticmethod
    def reserve(exp_name: str, base: Path | str = "output") -> Path:
        """Create the folder of a run that starts later, as `create` without ``output_dir`` does, and return it.

        The run claims it as its ``output_dir``. Raises `ValueError` and `OSError` as `create` does.
        """
        return _make_timed_folder(Path(base) / _checked_name(exp_name), datetime.now())

    @classmethod
    def existing(cls, root: Path | str) -> RunDirectory:
        """Return the folder of a run to resume. Raises `FileNotFoundError` if it holds no run."""
        run = cls(Path(root))
        if not run.metrics.is_file():
            raise FileNotFoundError(f"{root} holds no run: there is no {run.metrics.name}")
        return run

    @classmethod
    def latest(cls, exp_name: str, base: Path | str = "output") -> RunDirectory | None:
        """Return the last run of ``exp_name`` that was started without an ``output_dir``; None if there is none."""
        link = Path(base) / _checked_name(exp_name) / "latest"
        return cls.existing(link.resolve()) if link.exists() else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run for this process during a block.

        Raises `RunExists` if another process is using the run, and `RunUnusable` if its folder cannot be written.
        """
        try:
            lock = open(self._lock, "ab")
        except OSError as error:
            raise RunUnusable(f"cannot write to {self.root}: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunExists(f"another process works on the run in {self.root}: end it first") from None
            yield

    def write_config(self, text: str) -> None:
        """Save the resolved configuration. The caller has redacted its secrets."""
        write_atomically(self.config, text)

    def is_held(self) -> bool:
        """Return True if a process is using the run, as tested with a shared lock that is released at once."""
        try:
            with open(self._lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def _checked_name(exp_name: str) -> str:
    parts = PurePath(exp_name).parts
    if not parts or ".." in parts or PurePath(exp_name).is_absolute() or "\0" in exp_name:
        raise ValueError(f"exp_name {exp_name!r} is no folder name: use letters, digits, '-', '_' and '/'")
    return exp_name


def _make_timed_folder(parent: Path, now: datetime) -> Path:
    """Create a folder named after the time. Two runs started within one second get different folders."""
    stamp = now.strftime("%Y-%m-%d_%H-%M-%S")
    root = parent / stamp
    with naming(root):
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(2):
            try:
                root.mkdir()
                break
            except FileExistsError:
                root = parent / f"{stamp}_{attempt}"
    return root


def point_latest_to(root: Path) -> None:
    """Replace the link ``latest`` in one step, so that it always points to a folder. A failure is only logged."""
    link = root.parent / "latest"
    fresh = root.parent / f".latest.{root.name}"
    try:
        os.symlink(root.name, fresh)
        os.replace(fresh, link)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        _logger.warning("cannot point %s to %s: %s", link, root.name, error)
