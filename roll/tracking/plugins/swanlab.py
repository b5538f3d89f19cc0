"""SwanLab, in its cloud or into a folder that `swanlab sync` uploads.

The library's own recording of the machine, the sources and the console is turned off. It has no summary, so the end of
the run goes to the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.tracking.plugins.process import Ending, TrackerPlugIn, TrackerRun, flat_summary, made

_STATES = {"success": "success", "failed": "crashed", "interrupted": "aborted"}


@dataclass
class SwanlabOptions:
    """Options below `tracker_kwargs.swanlab`."""

    project: str = field(default="roll", metadata={"help": "The project."})
    name: str | None = field(default=None, metadata={"help": "Name of the experiment. Default: `exp_name`."})
    workspace: str | None = field(default=None, metadata={"help": "User or organisation. Default: that of the key."})
    group: str | None = field(default=None, metadata={"help": "Experiments shown together."})
    tags: list[str] = field(default_factory=list, metadata={"help": "Labels."})
    description: str | None = field(default=None, metadata={"help": "A longer description."})
    mode: Literal["online", "offline", "local"] = field(
        default="online",
        metadata={
            "help": "`online` needs `SWANLAB_API_KEY`; `offline` writes to the run's folder, for `swanlab sync`; "
            "`local` too, for SwanLab's own viewer."
        },
    )


class SwanlabPlugIn(TrackerPlugIn):
    """The `TrackerPlugIn` of SwanLab."""

    Options: ClassVar[type] = SwanlabOptions
    package: ClassVar[str] = "swanlab"
    install: ClassVar[str] = "pip install 'roll[swanlab]'"

    def __init__(self, run: TrackerRun, options: SwanlabOptions) -> None:
        import swanlab

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
            log_dir=made(run.folder),
            id=run.id,
            resume="allow",
            config=run.config,
            settings=settings(
                interactive=False, probe=settings.Probe(**nothing), terminal=settings.Terminal(proxy_type="none")
            ),
        )
        self._where = (self._run.url or run.folder) if options.mode == "online" else run.folder

    @staticmethod
    def secret(options: SwanlabOptions) -> str | None:
        return "SWANLAB_API_KEY" if options.mode == "online" else None

    @staticmethod
    def mode(options: SwanlabOptions) -> str:
        return options.mode

    @property
    def where(self) -> str:
        return self._where

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, ending: Ending) -> None:
        self._run.config.update(flat_summary(ending.summary))
        self._run.finish(state=_STATES[ending.status], error=ending.error if ending.status == "failed" else None)
