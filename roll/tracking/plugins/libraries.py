"""wandb, swanlab and trackio as plug-in trackers. Each library is imported only in its own process.

The libraries' own recording of the machine, the source code and the console is turned off, so that only metrics and the
configuration are sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from roll.distribution import install_command
from roll.tracking.plugins.process import Ending, TrackerPlugIn, TrackerRun, flat_summary


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class WandbOptions:
    """Options below `tracker_kwargs.wandb`."""

    project: str = _option("roll", "The project.")
    name: str | None = _option(None, "Name of the run. Default: `exp_name`.")
    entity: str | None = _option(None, "User or team. Default: that of the key.")
    group: str | None = _option(None, "Runs shown together.")
    tags: list[str] = field(default_factory=list, metadata={"help": "Labels."})
    notes: str | None = _option(None, "A longer description.")
    mode: Literal["online", "offline"] = _option(
        "online", "`online` needs `WANDB_API_KEY`; `offline` writes to the run's folder, for `wandb sync`."
    )


class WandbPlugIn(TrackerPlugIn):
    """Weights & Biases, online or in a folder that `wandb sync` uploads.

    The x axis is a metric named ``step`` instead of wandb's own step counter, which never decreases and would reject
    the steps that a resumed run repeats.
    """

    Options: ClassVar[type] = WandbOptions
    package: ClassVar[str] = "wandb"
    install: ClassVar[str] = install_command("wandb")

    def __init__(self, run: TrackerRun, options: WandbOptions) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # otherwise wandb reports its own errors, even offline
        import wandb

        Path(run.folder).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=options.project,
            name=options.name or run.name,
            entity=options.entity,
            group=options.group,
            tags=options.tags,
            notes=options.notes,
            mode=options.mode,
            dir=run.folder,
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
        self.where = (self._run.url or run.folder) if options.mode == "online" else self._run.dir
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def secret(options: WandbOptions) -> str | None:
        return "WANDB_API_KEY" if options.mode == "online" else None

    @staticmethod
    def mode(options: WandbOptions) -> str:
        return options.mode

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def finish(self, ending: Ending) -> None:
        self._run.summary.update(flat_summary(ending.summary))
        self._run.finish(exit_code=ending.exit_code)


@dataclass
class SwanlabOptions:
    """Options below `tracker_kwargs.swanlab`."""

    project: str = _option("roll", "The project.")
    name: str | None = _option(None, "Name of the experiment. Default: `exp_name`.")
    workspace: str | None = _option(None, "User or organisation. Default: that of the key.")
    group: str | None = _option(None, "Experiments shown together.")
    tags: list[str] = field(default_factory=list, metadata={"help": "Labels."})
    description: str | None = _option(None, "A longer description.")
    mode: Literal["online", "offline", "local"] = _option(
        "online",
        "`online` needs `SWANLAB_API_KEY`; `offline` writes to the run's folder, for `swanlab sync`; "
        "`local` too, for SwanLab's own viewer.",
    )


class SwanlabPlugIn(TrackerPlugIn):
    """SwanLab, in its cloud, or in a folder for `swanlab sync` or SwanLab's own viewer.

    SwanLab has no summary, so the summary at the end of a run is added to the configuration shown there.
    """

    Options: ClassVar[type] = SwanlabOptions
    package: ClassVar[str] = "swanlab"
    install: ClassVar[str] = install_command("swanlab")

    def __init__(self, run: TrackerRun, options: SwanlabOptions) -> None:
        import swanlab

        Path(run.folder).mkdir(parents=True, exist_ok=True)
        settings = swanlab.Settings
        nothing = {"hardware": False, "runtime": False, "requirements": False, "git": False, "monitor": False}
        self._run: Any = swanlab.init(
            project=options.project,
            name=options.name or run.name,
            workspace=options.workspace,
            group=options.group,
            tags=options.tags,
            description=options.description,
            mode=options.mode,
            log_dir=run.folder,
            id=run.id,
            resume="allow",
            config=run.config,
            settings=settings(
                interactive=False, probe=settings.Probe(**nothing), terminal=settings.Terminal(proxy_type="none")
            ),
        )
        self.where = (self._run.url or run.folder) if options.mode == "online" else run.folder

    @staticmethod
    def secret(options: SwanlabOptions) -> str | None:
        return "SWANLAB_API_KEY" if options.mode == "online" else None

    @staticmethod
    def mode(options: SwanlabOptions) -> str:
        return options.mode

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, ending: Ending) -> None:
        states = {"success": "success", "failed": "crashed", "interrupted": "aborted"}
        self._run.config.update(flat_summary(ending.summary))
        self._run.finish(state=states[ending.status], error=ending.error if ending.status == "failed" else None)


@dataclass
class TrackioOptions:
    """Options below `tracker_kwargs.trackio`."""

    project: str = _option("roll", "The project.")
    name: str | None = _option(None, "Name of the run, before the letters of its id. Default: `exp_name`.")
    group: str | None = _option(None, "Runs shown together.")
    dir: str | None = _option(
        None, "Folder of the database. Default: `TRACKIO_DIR`, or the library's own, shared by all runs."
    )
    space_id: str | None = _option(None, "A Space to send metrics to; needs `HF_TOKEN`. Default: nothing is sent.")


class TrackioPlugIn(TrackerPlugIn):
    """Trackio: a database on this machine that `trackio show` opens, or a Hugging Face Space if one is configured.

    Trackio identifies runs by name. The name therefore contains the first letters of the run's id, so that a resumed
    run finds its own record. Trackio has neither a summary nor an exit code, so the end of the run is sent as an alert.
    """

    Options: ClassVar[type] = TrackioOptions
    package: ClassVar[str] = "trackio"
    install: ClassVar[str] = install_command("trackio")

    def __init__(self, run: TrackerRun, options: TrackioOptions) -> None:
        if options.dir is not None:
            Path(options.dir).mkdir(parents=True, exist_ok=True)
            os.environ["TRACKIO_DIR"] = options.dir
        if options.space_id is None:
            # Otherwise trackio would ask the hub for the user, or send metrics to an address in these variables.
            os.environ["HF_HUB_OFFLINE"] = "1"
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID"):
                os.environ.pop(variable, None)
        import trackio

        self._alert_levels = trackio.AlertLevel
        self._run = trackio.init(
            project=options.project,
            name=f"{options.name or run.name}-{run.id[:6]}",
            group=options.group,
            space_id=options.space_id,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = options.space_id or str(trackio.utils.TRACKIO_DIR)

    @staticmethod
    def secret(options: TrackioOptions) -> str | None:
        return None if options.space_id is None else "HF_TOKEN"

    @staticmethod
    def mode(options: TrackioOptions) -> str:
        return "local" if options.space_id is None else f"Space {options.space_id}"

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
