"""The start of a run's plug-in trackers, with ids that stay the same after a resume."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from roll.tracking.files import write_atomically
from roll.tracking.plugins.contract import TrackerRun
from roll.tracking.plugins.process import TrackerProcess
from roll.tracking.plugins.registry import PLUG_INS, plug_in_class
from roll.tracking.run_directory import RunDirectory

_LETTERS = string.ascii_lowercase + string.digits
_ID_LENGTH = 21


def open_plug_ins(
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    run: RunDirectory,
    exp_name: str,
    config: dict[str, Any],
) -> list[TrackerProcess]:
    """Start the plug-ins among ``names``.

    ``options``: name -> keys of its `Options`, already checked. ``config``: the resolved configuration, secrets
    redacted.
    """
    chosen = [name for name in names if name in PLUG_INS]
    if not chosen:
        return []
    known = _read_ids(run)
    ids = {**known, **{name: _new_id() for name in chosen if name not in known}}
    write_atomically(run.tracker_ids, json.dumps(ids, indent=1) + "\n")
    return [
        TrackerProcess(
            name,
            PLUG_INS[name],
            TrackerRun(exp_name, ids[name], str((run.trackers / name).absolute()), name in known, config),
            asdict(plug_in_class(PLUG_INS[name]).Options(**options.get(name, {}))),
            run.logs / f"tracker_{name}.out",
        )
        for name in chosen
    ]


def _read_ids(run: RunDirectory) -> dict[str, str]:
    run.trackers.mkdir(exist_ok=True)
    return json.loads(run.tracker_ids.read_text()) if run.tracker_ids.exists() else {}


def _new_id() -> str:
    """Return an id that all of them accept: swanlab requires 21 such letters."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))
