"""Trackio: a database on this machine that `trackio show` opens, or a Hugging Face Space if one is named.

Its runs are found by name. The name therefore carries the first letters of the run's id, and a resumed run finds its
own. It has neither summary nor exit code, so the end of the run is an alert. The library's recording of the machine is
turned off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from roll.tracking.plugins.process import Ending, TrackerPlugIn, TrackerRun, flat_summary, made

_LETTERS_OF_ID = 6


@dataclass
class TrackioOptions:
    """Options below `tracker_kwargs.trackio`."""

    project: str = field(default="roll", metadata={"help": "The project."})
    name: str | None = field(
        default=None, metadata={"help": "Name of the run, before the letters of its id. Default: `exp_name`."}
    )
    group: str | None = field(default=None, metadata={"help": "Runs shown together."})
    dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the database. Default: `TRACKIO_DIR`, or the library's own, shared by all runs."},
    )
    space_id: str | None = field(
        default=None, metadata={"help": "A Space to send metrics to; needs `HF_TOKEN`. Default: nothing is sent."}
    )


class TrackioPlugIn(TrackerPlugIn):
    """The `TrackerPlugIn` of Trackio."""

    Options: ClassVar[type] = TrackioOptions
    package: ClassVar[str] = "trackio"
    install: ClassVar[str] = "pip install 'roll[trackio]'"

    def __init__(self, run: TrackerRun, options: TrackioOptions) -> None:
        if options.dir is not None:
            os.environ["TRACKIO_DIR"] = made(options.dir)
        if options.space_id is None:
            # Otherwise it would ask the hub for the user, or send metrics to the address in a leftover variable.
            os.environ["HF_HUB_OFFLINE"] = "1"
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID"):
                os.environ.pop(variable, None)
        import trackio

        self._alert_levels = trackio.AlertLevel
        self._run = trackio.init(
            project=options.project,
            name=f"{options.name or run.name}-{run.id[:_LETTERS_OF_ID]}",
            group=options.group,
            space_id=options.space_id,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._where = options.space_id or str(trackio.utils.TRACKIO_DIR)

    @staticmethod
    def secret(options: TrackioOptions) -> str | None:
        return None if options.space_id is None else "HF_TOKEN"

    @staticmethod
    def mode(options: TrackioOptions) -> str:
        return "local" if options.space_id is None else f"Space {options.space_id}"

    @property
    def where(self) -> str:
        return self._where

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, ending: Ending) -> None:
        level = self._alert_levels.INFO if ending.status == "success" else self._alert_levels.ERROR
        self._run.alert(
            title=f"the run ended: {ending.status}",
            text=json.dumps(flat_summary(ending.summary), ensure_ascii=False),
            level=level,
        )
        self._run.finish()
