"""The folder of published weights that travel as files, and its cleanup.

Each process of a run writes into a folder of its own. It never meets the files of a process that was killed before it,
or that is still dying on another host. The next process of the run deletes those first: everything in the run's own
folder, and under `weight_update.checkpoint_dir` the folder that a note in the run's folder names.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from pathlib import Path

from roll.tracking.files import write_atomically
from roll.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)

_WRITTEN = ("version-*", ".version-*.unfinished")
"""Patterns of what `transports.checkpoint` writes. Nothing else is deleted in a folder that others may write into."""


def claim_weight_folder(run: RunDirectory, shared: str | None, label: str) -> Path:
    """Return a folder for this process alone, which is not made yet, and delete what earlier processes left behind.

    The folder is under ``shared`` (`weight_update.checkpoint_dir`) if given, else in the run's own. The caller must
    hold the run.
    """
    clear_weight_folder(run)
    own = uuid.uuid4().hex[:8]
    if shared is None:
        return run.weights.absolute() / own
    folder = Path(shared).absolute() / f"{label.replace('/', '-')}-{run.root.absolute().name}-{own}"
    write_atomically(run.weights_note, json.dumps({"run": str(run.root.absolute()), "folder": str(folder)}))
    return folder


def clear_weight_folder(run: RunDirectory) -> None:
    """Delete all published weights of the run."""
    shutil.rmtree(run.weights, ignore_errors=True)
    folder = _noted_folder(run)
    if folder is not None:
        for pattern in _WRITTEN:
            for path in folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("published weights stay in %s: %s", folder, error)
    try:
        run.weights_note.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s stays, though nothing is there any more: %s", run.weights_note, error)


def _noted_folder(run: RunDirectory) -> Path | None:
    """Return the noted folder; None for a note that was copied from another run, which may be alive."""
    try:
        note = json.loads(run.weights_note.read_text())
        return Path(note["folder"]) if note["run"] == str(run.root.absolute()) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as damage:
        logger.warning("%s is damaged, so weights of an earlier process may stay behind: %r", run.weights_note, damage)
        return None
