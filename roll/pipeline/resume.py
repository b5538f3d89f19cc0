"""Resumption of an interrupted run: where it resumes, and if this configuration may resume it.

The newest whole checkpoint counts; damaged ones are reported and passed over. Records in the run directory of later
steps are moved aside, so that metrics, samples and checkpoints tell one history. They are not deleted: the run has yet
to show that it can start, and the user may have named the wrong checkpoint.
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
"""Number of moved-aside versions of metrics, samples and timelines that are kept, newest first."""


@dataclass(frozen=True)
class ResumePoint:
    """The state from which a run resumes."""

    run: RunDirectory
    checkpoint: Checkpoint | None
    """None: there is none yet. The run restarts at step 0, with the groups already rolled out for it."""
    chosen: bool = False
    """True if the user named this checkpoint, whatever the run did after it."""
    notes: list[str] = field(default_factory=list)
    """Messages to the user: changes of the configuration, damaged checkpoints."""

    @property
    def step(self) -> int:
        """Number of completed training steps."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def last_record(self) -> int:
        """Last step of the metrics that count. -1: the run restarts and measures its first version again."""
        return -1 if self.checkpoint is None else self.checkpoint.step

    def has_ended(self, max_steps: int) -> bool:
        """Return True if all steps of the run are done already."""
        if self.chosen or self.step >= max_steps:
            return self.step >= max_steps
        return is_model_only(self.run, max_steps) and model_damage(self.run, max_steps) is None

    @property
    def progress(self) -> RolloutProgress:
        """Progress from which the rollouts resume; their start if there is no checkpoint."""
        return RolloutProgress.at_start() if self.checkpoint is None else self.checkpoint.state.progress

    @property
    def memory(self) -> dict[str, Any]:
        """State of the reward moments and the KL controller; empty if there is no checkpoint."""
        return {} if self.checkpoint is None else dict(self.checkpoint.state.memory)

    def role(self, name: str) -> Path | None:
        """Return the folder of the training state from which a role resumes; None if there is no checkpoint."""
        return None if self.checkpoint is None else self.checkpoint.role(name)


def find_resume_point(config: PipelineConfig, source: str) -> ResumePoint | None:
    """Return the point where `resume_from_checkpoint` resumes; None for a new run.

    ``source``: fingerprint of the items that groups are made of. Raises `ConfigError` if there is nothing to resume
    where the configuration says so, or if this configuration may not resume it.
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
    """Find the point again once this process holds the run. Another process may have continued it until then."""
    return _point(point.run, point.step if point.chosen else None, config, source)


def is_model_only(run: RunDirectory, step: int) -> bool:
    """Return True if the folder of this step has no state, as at the end of a run without `save_steps`."""
    folder = checkpoint_folder(run.checkpoints, step)
    return folder.is_dir() and not (folder / STATE).is_dir()


def model_damage(run: RunDirectory, step: int) -> str | None:
    """Return what is wrong with the model of this step; None if nothing is."""
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
    """Move aside everything in the run's folder that came after the step from which it resumes.

    The newest ``keep_abandoned`` of the abandoned checkpoints stay (0: all). If the process is killed here, the next
    one completes the work.
    """
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
    """Save lines that are taken out of a file, unless a process that was killed had saved the same lines."""
    before = _put_aside_before(path)
    if not before or before[-1].read_text(encoding="utf-8") != lines:
        write_atomically(_next_aside(path), lines)


def _put_aside_before(path: Path) -> list[Path]:
    """Return `metrics-before.jsonl`, `metrics-before-2.jsonl`, ...: oldest first."""
    return sorted(path.parent.glob(f"{path.stem}-before*{path.suffix}"), key=_number)


def _next_aside(path: Path) -> Path:
    before = _put_aside_before(path)
    number = f"-{_number(before[-1]) + 1}" if before else ""
    return path.with_name(f"{path.stem}-before{number}{path.suffix}")


def _number(aside: Path) -> int:
    match = re.fullmatch(r".*-before-(\d+)", aside.stem)
    return int(match[1]) if match else 1


def _named_run(config: PipelineConfig) -> tuple[RunDirectory | None, int | None]:
    """Return the run and the step that the user wants; None, None for a run that has not begun.

    Raises `FileNotFoundError` if the configuration names a run that does not exist, and `ConfigError` if `output_dir`
    names another folder.
    """
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
    if not run.config.exists():  # the run was interrupted at its very beginning
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
