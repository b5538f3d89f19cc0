"""Where an interrupted run goes on, and whether this configuration may.

The newest whole checkpoint counts; a damaged one is said to be so and passed over. What the run directory tells of
steps after it is taken out of the way, so that metrics, samples and checkpoints are those of one history. It is put
aside, not thrown away: the run has yet to show that it can start, and its owner may have named the wrong checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from roll.configs.changes import Change, changes
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.loader import load_config
from roll.configs.schema import PipelineConfig
from roll.pipeline.checkpoints import (
    STATE,
    Checkpoint,
    DamagedCheckpoint,
    abandon,
    check_model,
    checkpoint_folder,
    exported_steps,
    newest_whole,
    prune_abandoned,
    read_checkpoint,
    saved_steps,
)
from roll.pipeline.same_model import model_problems
from roll.rollout.journal import RolloutProgress
from roll.tracking.files import keep_lines, remove_partials, write_atomically
from roll.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)

KEY = "resume_from_checkpoint"
PUT_ASIDE_KEPT = 5
"""Of metrics, samples and timelines that were put aside, the newest so many stay."""


@dataclass(frozen=True)
class ResumePoint:
    """A run that goes on."""

    run: RunDirectory
    checkpoint: Checkpoint | None
    """None: there is none yet, and the run begins again at step 0, with what was rolled out for it."""
    chosen: bool = False
    """Its owner named this checkpoint, whatever the run did after it."""
    notes: list[str] = field(default_factory=list)
    """What its owner should read: changes of the configuration, damaged checkpoints."""

    @property
    def step(self) -> int:
        """Training steps behind it."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def last_record(self) -> int:
        """Last step of the metrics that count; -1: a run that begins again measures its first version again."""
        return -1 if self.checkpoint is None else self.checkpoint.step

    def has_ended(self, max_steps: int) -> bool:
        """Whether all its steps are done already."""
        if self.chosen or self.step >= max_steps:
            return self.step >= max_steps
        return is_model_only(self.run, max_steps) and model_damage(self.run, max_steps) is None

    @property
    def progress(self) -> RolloutProgress:
        """Where the rollouts go on; at their start if there is no checkpoint."""
        return RolloutProgress.at_start() if self.checkpoint is None else self.checkpoint.state.progress

    @property
    def memory(self) -> dict[str, Any]:
        """What the stages remember; nothing if there is no checkpoint."""
        return {} if self.checkpoint is None else dict(self.checkpoint.state.memory)

    def role(self, name: str) -> Path | None:
        """The training state that a role goes on from."""
        return None if self.checkpoint is None else self.checkpoint.role(name)


def find_resume_point(config: PipelineConfig, source: str) -> ResumePoint | None:
    """What `resume_from_checkpoint` means here; None for a new run. ``source``: fingerprint of what groups are made of.

    Raises `ConfigError` if there is nothing to go on from where the configuration says so, or it may not go on.
    """
    if config.resume_from_checkpoint is False:
        return None
    try:
        run, wanted = _named_run(config)
    except FileNotFoundError as error:
        remedy = "give the folder of a run or of one of its checkpoints (`.../checkpoints/step-<n>`), or `true`"
        raise ConfigError([ConfigProblem(KEY, str(error), remedy)]) from None
    return None if run is None else _point(run, wanted, config, source)


def look_again(point: ResumePoint, config: PipelineConfig, source: str) -> ResumePoint:
    """The same, once this process holds the run: until then another one may have gone on with it."""
    return _point(point.run, point.step if point.chosen else None, config, source)


def is_model_only(run: RunDirectory, step: int) -> bool:
    """Whether there is a folder of this step without a state: what a run without `save_steps` ends with."""
    folder = checkpoint_folder(run.checkpoints, step)
    return folder.is_dir() and not (folder / STATE).is_dir()


def model_damage(run: RunDirectory, step: int) -> str | None:
    """What is wrong with the model of this step."""
    try:
        check_model(checkpoint_folder(run.checkpoints, step))
    except DamagedCheckpoint as damage:
        return str(damage)
    return None


def _point(run: RunDirectory, wanted: int | None, config: PipelineConfig, source: str) -> ResumePoint:
    notes: list[str] = []
    checkpoint = _checkpoint(run.checkpoints, wanted, notes)
    if wanted is None and is_model_only(run, config.max_steps):
        damage = model_damage(run, config.max_steps)
        notes += [] if damage is None else [f"the last step is done again: {damage}"]
    problems = _change_problems(config, run, notes)
    if checkpoint is not None and checkpoint.state.source != source:
        problems.append(
            ConfigProblem(
                KEY,
                f"the checkpoint of step {checkpoint.step} counts other prompts or environments than these: a group's "
                "number would mean another one",
                "use the same data in the same order, or begin a new run from the checkpoint's model (`pretrain`)",
            )
        )
    if checkpoint is not None:
        problems += model_problems(config, checkpoint)
    if problems:
        raise ConfigError(problems)
    return ResumePoint(run, checkpoint, wanted is not None, notes)


def take_out_of_the_way(point: ResumePoint, keep_abandoned: int = 0) -> None:
    """Leave in the run's folder what happened up to the step that it goes on from. What came later is put aside; of
    abandoned checkpoints ``keep_abandoned`` stay (0: all). A process that is killed here is followed by one that does
    the rest."""
    run, last = point.run, point.last_record
    asides = [_next_aside(path) for path in (run.metrics, run.samples)]
    for replaced in (run.status, run.summary, run.config, run.metrics, run.samples, *asides):
        remove_partials(replaced)
    for later in exported_steps(run.checkpoints):
        if later > last:
            aside = abandon(run.checkpoints, later)
            logger.info("the checkpoint of step %d is no part of the run any more: %s", later, aside)
    prune_abandoned(run.checkpoints, keep_abandoned)
    for path in (run.metrics, run.samples):
        keep_lines(path, lambda record: record["step"] <= last, partial(_put_aside, path))
    if run.timeline.exists():
        os.replace(run.timeline, _next_aside(run.timeline))
    for path in (run.metrics, run.samples, run.timeline):
        for old in _put_aside_before(path)[:-PUT_ASIDE_KEPT]:
            old.unlink()


def _put_aside(path: Path, lines: str) -> None:
    """Keep lines that are taken out of a file, unless a process that was killed then has done so."""
    before = _put_aside_before(path)
    if not before or before[-1].read_text(encoding="utf-8") != lines:
        write_atomically(_next_aside(path), lines)


def _put_aside_before(path: Path) -> list[Path]:
    """`metrics-before.jsonl`, `metrics-before-2.jsonl`, ...: oldest first."""
    return sorted(path.parent.glob(f"{path.stem}-before*{path.suffix}"), key=_number)


def _next_aside(path: Path) -> Path:
    before = _put_aside_before(path)
    number = f"-{_number(before[-1]) + 1}" if before else ""
    return path.with_name(f"{path.stem}-before{number}{path.suffix}")


def _number(aside: Path) -> int:
    match = re.fullmatch(r".*-before-(\d+)", aside.stem)
    return int(match[1]) if match else 1


def _named_run(config: PipelineConfig) -> tuple[RunDirectory | None, int | None]:
    """The run, and the step that its owner wants; None, None for a run that is yet to begin. `FileNotFoundError` if
    there is no run where there should be one."""
    named = config.resume_from_checkpoint
    if named is True:
        if config.output_dir is None:
            return RunDirectory.latest(config.exp_name), None
        exists = RunDirectory(Path(config.output_dir)).metrics.exists()
        return (RunDirectory.existing(config.output_dir) if exists else None), None
    path = Path(str(named))
    checkpoint = re.fullmatch(r"step-(\d+)", path.name) if path.parent.name == "checkpoints" else None
    step = int(checkpoint[1]) if checkpoint else None
    run = RunDirectory.existing(path.parent.parent if checkpoint else path)
    if config.output_dir is not None and Path(config.output_dir).absolute() != run.root.absolute():
        message = f"{config.output_dir} is not the folder of the run that goes on, {run.root}"
        remedy = "remove the key: a resumed run goes on in its own folder"
        raise ConfigError([ConfigProblem("output_dir", message, remedy)])
    return run, step


def _checkpoint(folder: Path, wanted: int | None, notes: list[str]) -> Checkpoint | None:
    steps = saved_steps(folder)
    if wanted is not None and wanted not in steps:
        there = ", ".join(map(str, steps)) or "none"
        message = f"there is no checkpoint of step {wanted} to go on from; of these steps there are: {there}"
        raise ConfigError([ConfigProblem(KEY, message, "name one of these, or the folder of the run")])
    if wanted is not None:
        try:
            return read_checkpoint(checkpoint_folder(folder, wanted))
        except DamagedCheckpoint as damage:
            problem = ConfigProblem(KEY, str(damage), "name another checkpoint, or the folder of the run")
            raise ConfigError([problem]) from damage
    checkpoint, damages = newest_whole(folder)
    notes += [f"passed over: {damage}" for damage in damages]
    if checkpoint is None and steps:
        message = f"no checkpoint in {folder} is whole; " + "; ".join(notes)
        raise ConfigError([ConfigProblem(KEY, message, "begin a new run in another folder")])
    return checkpoint


def _change_problems(config: PipelineConfig, run: RunDirectory, notes: list[str]) -> list[ConfigProblem]:
    if not run.config.exists():  # it was interrupted in its first moment
        return []
    found = changes(load_config(run.config), config)
    notes += [f"changed: {change}" for change in found]
    problems = [_problem(change, "set it back, or begin a new run") for change in found if _is(change, "impossible")]
    if not config.accept_config_changes:
        remedy = "set it back, or say `accept_config_changes=true`"
        problems += [_problem(change, remedy) for change in found if _is(change, "needs confirmation")]
    return problems


def _is(change: Change, judgement: str) -> bool:
    return change.judgement == judgement


def _problem(change: Change, remedy: str) -> ConfigProblem:
    reason = f" ({change.reason})" if change.reason else ""
    return ConfigProblem(
        change.path, f"was {change.before!r} before the run was interrupted and is {change.after!r} now{reason}", remedy
    )
