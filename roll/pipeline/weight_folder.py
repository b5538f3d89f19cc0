"""Where published weights lie while they travel as files, and that none of them outlives its process for long.

Each process of a run writes into a folder of its own, so it never meets the files of one that was killed before it,
not even of one that is still dying on another host. Whoever goes on with the run deletes those first: in the run's own
folder all that is there, under `weight_update.checkpoint_dir` the folder that a note in the run's folder names.
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
"""What `transports.checkpoint` writes. Nothing else is deleted in a folder that others may write into."""


def claim_weight_folder(run: RunDirectory, shared: str | None, label: str) -> Path:
    """A folder that no other process writes into, not yet made: under ``shared`` (`weight_update.checkpoint_dir`) where
    given, else in the run's own. What earlier processes of the run left behind is deleted. To be called by the process
    that holds the run."""
    clear_weight_folder(run)
    own = uuid.uuid4().hex[:8]
    if shared is None:
        return run.weights.absolute() / own
    folder = Path(shared).absolute() / f"{label.replace('/', '-')}-{run.root.absolute().name}-{own}"
    write_atomically(run.weights_note, json.dumps({"run": str(run.root.absolute()), "folder": str(folder)}))
    return folder


def clear_weight_folder(run: RunDirectory) -> None:
    """Delete published weights of the run, wherever they are."""
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
    """None also for a note that came with a copy of another run's folder: that run may be alive."""
    try:
        note = json.loads(run.weights_note.read_text())
        return Path(note["folder"]) if note["run"] == str(run.root.absolute()) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as damage:
        logger.warning("%s is damaged, so weights of an earlier process may stay behind: %r", run.weights_note, damage)
        return None
