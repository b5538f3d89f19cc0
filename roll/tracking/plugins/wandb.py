"""Weights & Biases, online or into a folder that `wandb sync` uploads.

Metrics are drawn over a value called ``step``, not over wandb's own counter. That counter only grows, and would refuse
the steps that a resumed run repeats. The library's recording of the machine, the sources and the console is turned off;
only metrics and configuration are reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.tracking.plugins.process import Ending, TrackerPlugIn, TrackerRun, flat_summary, made

STEP = "step"


@dataclass
class WandbOptions:
    """Options below `tracker_kwargs.wandb`."""

    project: str = field(default="roll", metadata={"help": "The project."})
    name: str | None = field(default=None, metadata={"help": "Name of the run. Default: `exp_name`."})
    entity: str | None = field(default=None, metadata={"help": "User or team. Default: that of the key."})
    group: str | None = field(default=None, metadata={"help": "Runs shown together."})
    tags: list[str] = field(default_factory=list, metadata={"help": "Labels."})
    notes: str | None = field(default=None, metadata={"help": "A longer description."})
    mode: Literal["online", "offline"] = field(
        default="online",
        metadata={"help": "`online` needs `WANDB_API_KEY`; `offline` writes to the run's folder, for `wandb sync`."},
    )


class WandbPlugIn(TrackerPlugIn):
    """The `TrackerPlugIn` of Weights & Biases."""

    Options: ClassVar[type] = WandbOptions
    package: ClassVar[str] = "wandb"
    install: ClassVar[str] = "pip install 'roll[wandb]'"

    def __init__(self, run: TrackerRun, options: WandbOptions) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # it would report its own failures to its makers, offline too
        import wandb

        self._run = wandb.init(
            project=options.project,
            name=options.name or run.name,
            entity=options.entity,
            group=options.group,
            tags=options.tags,
            notes=options.notes,
            mode=options.mode,
            dir=made(run.folder),
            id=run.id,
            resume="allow",
            config=run.config,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
            ),
        )
        self._where = (self._run.url or run.folder) if options.mode == "online" else self._run.dir
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    @staticmethod
    def secret(options: WandbOptions) -> str | None:
        return "WANDB_API_KEY" if options.mode == "online" else None

    @staticmethod
    def mode(options: WandbOptions) -> str:
        return options.mode

    @property
    def where(self) -> str:
        return self._where

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values: dict[str, Any] = {**metrics, STEP: step}
        self._run.log(values)

    def finish(self, ending: Ending) -> None:
        self._run.summary.update(flat_summary(ending.summary))
        self._run.finish(exit_code=ending.exit_code)
