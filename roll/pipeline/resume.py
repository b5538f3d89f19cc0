"""Resumption of an interrupted run: where it resumes, whether this configuration may resume it, and automatic restarts.

A run resumes from the newest undamaged checkpoint; damaged ones are reported and skipped. Records of later steps in the
run directory are moved aside, so that metrics, samples and checkpoints tell one history. They are not deleted, because
the run may fail to start, and the user may have named the wrong checkpoint. If the model to train is a local folder,
file headers show before loading whether the checkpoint belongs to it. For a model on a hub, the trainers check that.

Each changed key is classified. Most keys only affect how a run is executed and may change freely. Some affect what is
learned: changing them makes the rest of the run a different experiment, so the user must confirm it. A few determine
the meaning of numbers in a checkpoint and cannot change.

Failures are consecutive if no new checkpoint was made between them. So a long run may fail repeatedly as long as it
makes progress. Not restarted are interrupted runs, and runs whose configuration is rejected before the first attempt. A
later attempt that is rejected counts as a failure.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from roll.configs import derived
from roll.configs.errors import ConfigProblem, Problems, count, masked, shown
from roll.configs.loader import load_config
from roll.configs.plugins import problem
from roll.configs.roles import ADAPTER_KEYS
from roll.configs.run import PipelineConfig, RunConfig
from roll.pipeline.checkpoints import (
    STATE,
    Checkpoint,
    DamagedCheckpoint,
    DriverState,
    abandon,
    checkpoint_folder,
    exported_steps,
    model_damage,
    newest_whole,
    prune_abandoned,
    read_checkpoint,
    saved_steps,
)
from roll.pipeline.groups import is_filtered
from roll.rollout.journal import RolloutProgress
from roll.tracking.files import keep_lines, remove_partials, write_atomically
from roll.tracking.run_directory import RunDirectory
from roll.trainers.state import CheckpointFiles, SavedState, UnfitState

logger = logging.getLogger(__name__)

KEY = "resume_from_checkpoint"
PUT_ASIDE_KEPT = 5
"""Number of moved-aside versions to keep of metrics, samples and timeline; the newest are kept."""

IMPOSSIBLE = {
    "pipeline": "a checkpoint is of one pipeline",
    "seed": "it decides which group is made of what",
    "rollout_batch_size": "checkpoints count groups in batches of this size",
    "train_batch_size": "checkpoints count examples in batches of this size",
    **{f"actor_train.model_args.{key}": "adapters in a checkpoint are of this shape and scale" for key in ADAPTER_KEYS},
}
"""Key -> why it cannot change. Changed prompts or environments are detected by `Prepared.source`."""

HARMLESS = (
    # equal to whole-batch steps, up to rounding
    "actor_train.stream_groups",
    # computes what actor_train would
    "actor_logp*",
    # names, length and reports of the run
    "exp_name", "output_dir", "max_steps", "save_steps", "max_ckpt_to_keep", "eval_steps", "logging_steps",
    "console_output", "track_with*", "tracker_*", "num_logged_samples", "val_batch_size", "validation*",
    "val_env_manager*", "mismatch_alarm", "mismatch_action",
    # restarts and failure handling
    "resume_from_checkpoint", "accept_config_changes", "restarts*", "stall_timeout_seconds", "chaos*",
    "max_group_retries", "max_consecutive_refunds", "actor_infer.*timeout_seconds", "actor_infer.max_replica_restarts",
    # devices and processes
    "cluster*", "env_workers*", "actor_infer.num_gpus_per_engine",
    *(
        f"{role}.{key}"
        for role in ("actor_train", "actor_infer", "reference", "teacher", "critic")
        for key in (
            "device_mapping*", "strategy_args.strategy_name", "strategy_args.strategy_config*", "infer_batch_size",
            "use_dynamic_batching*", "max_tokens_per_microbatch*", "use_sequence_packing",
            "training_args.per_device_train_batch_size",
        )
    ),
    "rewards.*.num_workers", "rewards.*.max_retries", "rewards.*.device_mapping*", "rewards.*.infer_batch_size",
    "rewards.*.reward_model.batch_wait_seconds", "rewards.*.judge.base_url", "rewards.*.judge.api_key_env",
    "rewards.*.judge.max_concurrency", "rewards.*.judge.request_*",
    # weight transfer
    "weight_update.content", "weight_update.transport", "weight_update.dual_buffer", "weight_update.*bucket_size_mb",
    "weight_update.checkpoint_dir", "weight_update.timeout_seconds", "weight_update.canary*",
    "weight_update.max_unavailable", "weight_update.full_every",
)  # fmt: skip
"""Patterns of keys that affect how a run is executed, but not what it learns."""

AFTER_THE_ROLLOUT = (
    # trained models and losses
    "pretrain", "actor_train*", "reference*", "teacher*", "critic*", "value_clip", "old_logprobs",
    "train_infer_correction*", "distillation*", "allow_uncorrected_off_policy", "ppo_epochs", "loss_agg_mode",
    "use_kl_loss", "kl_*", "entropy_loss_coef",
    # rewards and advantages
    "reward_clip", "norm_mean_type", "norm_std_type", "length_penalty*", "repetition_penalty*", "max_len_mask",
    "difficulty_*", "zero_variance_mask", "adv_estimator_args*", "whiten_advantages", "advantage_clip",
    "add_token_level_kl", "init_kl_coef", "target_kl", "episode_reward_weight", "step_reward_weight",
    # asynchrony
    "async_generation_ratio", "max_staleness", "consumption", "staleness_policy", "weight_update*",
)  # fmt: skip
"""Patterns of keys that cannot change a finished group. (Changed prompts and models are detected elsewhere.)

If a key is missing here, a resumed run only repeats rollouts unnecessarily.
"""


@dataclass(frozen=True)
class Change:
    """A key whose value differs between two configurations."""

    path: str
    before: Any
    after: Any
    judgement: Literal["harmless", "needs confirmation", "impossible"]
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.path}: {shown(self.before)} -> {shown(self.after)} ({self.judgement}{reason})"


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """Return the keys in which two resolved configurations differ, sorted by path. Secrets are masked."""
    old, new = _everything(before), _everything(after)
    falls_back = _falls_back(before, after) or _falls_back(after, before)
    found = []
    for path in sorted(old.keys() | new.keys()):
        values = old.get(path), new.get(path)
        if values[0] == values[1]:
            continue
        if path in IMPOSSIBLE:
            found.append(Change(path, *values, "impossible", IMPOSSIBLE[path]))
        elif falls_back and path in derived.SYNCHRONOUS_KEYS:
            found.append(Change(path, *values, "harmless", "`restarts.synchronous_after` allows both"))
        elif path == "max_steps" and _rate_depends_on_length(after):
            found.append(Change(path, *values, "harmless", "the learning rates of the remaining steps follow it"))
        else:
            found.append(Change(path, *values, "harmless" if _matches(path, HARMLESS) else "needs confirmation"))
    return found


def _rate_depends_on_length(config: RunConfig) -> bool:
    """Return True if the schedule of a learning rate depends on the number of steps."""
    every = [role.training_args for role in derived.trained_roles(config).values()]
    return any(each.lr_scheduler_type != "constant" or (each.warmup_ratio and not each.warmup_steps) for each in every)


def _falls_back(config: RunConfig, other: RunConfig) -> bool:
    """Return True if ``other`` is the synchronous fallback of ``config`` (`restarts.synchronous_after`)."""
    if not isinstance(config, PipelineConfig) or config.restarts.synchronous_after is None:
        return False
    fallback = derived.synchronous(config)
    return all(vars(fallback)[key] == vars(other).get(key) for key in derived.SYNCHRONOUS_KEYS)


def rollout_settings(config: PipelineConfig) -> dict[str, Any]:
    """Return the keys that determine a finished group: how it is sampled, scored and filtered.

    Values are JSON-compatible. Secrets are masked.
    """
    leaves = _leaves(masked(asdict(config)))
    settings = {path: value for path, value in leaves if not _matches(path, (*HARMLESS, *AFTER_THE_ROLLOUT))}
    if derived.replays_routing(config):
        settings["actor_train.router_replay"] = True  # a group has its experts, or has not
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _everything(config: RunConfig) -> dict[str, Any]:
    """Return all keys, plus values that are derived from several of them.

    Devices and micro-batch sizes may change, but not the number of samples per optimizer step.
    """
    everything = dict(_leaves(masked(asdict(config))))
    for name, role in derived.trained_roles(config).items():
        if role.training_args.gradient_accumulation_steps is not None:
            everything[f"(samples of an optimizer step of {name})"] = derived.optimizer_batch_size(config, role)
    return everything


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


class Restarts:
    """Counts the consecutive failures of a run, and decides about restarts."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._newest_checkpoint = 0

    def after_failure(self, config: RunConfig, run: RunDirectory) -> tuple[RunConfig, str] | None:
        """Return the configuration of the next attempt and a message to the user; None if the run must end."""
        newest = self._count(run)
        settings = config.restarts
        # A run that failed after its last step would find nothing left to do, which must not count as success.
        if self._in_a_row > settings.max_in_a_row or newest >= config.max_steps:
            return None
        words = f"the run begins again after step {newest} {self._words(config)}"
        again = replace(config, resume_from_checkpoint=str(run.root))
        after = settings.synchronous_after
        if after is not None and self._in_a_row >= after:
            rollouts = derived.reinforcement(again)
            again = derived.synchronous(rollouts)
            words += (
                f"; after {count(after, 'failure')} in a row it goes on in synchronous mode: async_generation_ratio "
                f"{rollouts.async_generation_ratio:g} -> 0 for its remaining steps"
            )
        return again, words

    def in_place(self, config: RunConfig, run: RunDirectory) -> str | None:
        """Count a failure, and return a message to the user if only the trainers are to be restarted.

        Returns None, without counting, if the whole run must restart or end: at the second consecutive failure, because
        the first restart did not help; if the next attempt has another configuration; or if no restart is left.
        """
        before = self._in_a_row, self._newest_checkpoint
        newest = self._count(run)
        settings = config.restarts
        first = self._in_a_row == 1 <= settings.max_in_a_row and newest < config.max_steps
        if not first or settings.synchronous_after == 1:
            self._in_a_row, self._newest_checkpoint = before
            return None
        return f"the trainers begin again after step {newest} {self._words(config)}; engines and rollouts stay"

    def take_back(self) -> None:
        """Undo the count of `in_place`, because the trainers could not be restarted and the whole run restarts."""
        self._in_a_row -= 1

    def _count(self, run: RunDirectory) -> int:
        """Count a failure. Returns the step of the newest checkpoint."""
        checkpoint, _ = newest_whole(run.checkpoints)
        newest = 0 if checkpoint is None else checkpoint.step
        if newest > self._newest_checkpoint:
            self._in_a_row = 0
        self._newest_checkpoint = newest
        self._in_a_row += 1
        return newest

    def _words(self, config: RunConfig) -> str:
        settings = config.restarts
        return (
            f"in {settings.delay_seconds:g} s (restart {self._in_a_row} of {settings.max_in_a_row} without a new "
            "checkpoint)"
        )


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run resumes."""

    run: RunDirectory
    checkpoint: Checkpoint | None
    """None if there is no checkpoint yet. Then the run restarts at step 0, with its finished groups."""
    chosen: bool = False
    """True if the user named this checkpoint, which may not be the newest."""
    notes: list[str] = field(default_factory=list)
    """Messages to the user: changed keys, damaged checkpoints."""

    @property
    def state(self) -> DriverState:
        """Driver state to resume from; that of a new run if there is no checkpoint."""
        return DriverState(RolloutProgress.at_start(), "") if self.checkpoint is None else self.checkpoint.state

    @property
    def step(self) -> int:
        """Number of completed training steps."""
        return self.state.progress.steps_done

    @property
    def last_record(self) -> int:
        """Last step whose metrics are kept; -1 without a checkpoint, because step 0 is then recorded again."""
        return -1 if self.checkpoint is None else self.checkpoint.step

    def has_ended(self, max_steps: int) -> bool:
        """Return True if the run has already completed all steps."""
        if self.chosen or self.step >= max_steps:
            return self.step >= max_steps
        model = _model_without_state(self.run, max_steps)
        return model is not None and model_damage(model) is None


def find_resume_point(config: RunConfig, source: str) -> ResumePoint | None:
    """Return the point where the run resumes according to `resume_from_checkpoint`; None for a new run.

    ``source``: see `Prepared.source`. Raises `ConfigError` if there is nothing to resume in the configured place, or if
    this configuration may not resume it.
    """
    if config.resume_from_checkpoint is False:
        return None
    try:
        run, wanted = named_run(config)
    except FileNotFoundError as error:
        remedy = "give the folder of a run or of one of its checkpoints (`.../checkpoints/step-<n>`), or `true`"
        raise problem(KEY, str(error), remedy) from None
    return None if run is None else _point(run, wanted, config, source)


def look_again(point: ResumePoint, config: RunConfig, source: str) -> ResumePoint:
    """Find the resume point again after locking the run, since another process may have continued the run before."""
    return _point(point.run, point.step if point.chosen else None, config, source)


def _model_without_state(run: RunDirectory, step: int) -> Path | None:
    """Return a step's folder if it has a model but no training state (last step without `save_steps`)."""
    folder = checkpoint_folder(run.checkpoints, step)
    return folder if folder.is_dir() and not (folder / STATE).is_dir() else None


def _point(run: RunDirectory, wanted: int | None, config: RunConfig, source: str) -> ResumePoint:
    notes: list[str] = []
    checkpoint = _checkpoint(run.checkpoints, wanted, notes)
    last = _model_without_state(run, config.max_steps)
    if wanted is None and last is not None and (damage := model_damage(last)):
        notes.append(f"the last step is done again: {damage}")
    problems = Problems()
    _judge_changes(config, run, notes, problems)
    if checkpoint is not None and checkpoint.state.source != source:
        counted = "prompts or environments than these: a group's"
        if not isinstance(config, PipelineConfig):
            counted = "examples than these: an example's"
        message = f"the checkpoint of step {checkpoint.step} counts other {counted} number would mean another one"
        remedy = "use the same data in the same order, or begin a new run from the checkpoint's model (`pretrain`)"
        problems.add(KEY, message, remedy)
    if checkpoint is not None:
        problems.found += model_problems(config, checkpoint)
    problems.raise_any()
    return ResumePoint(run, checkpoint, wanted is not None, notes)


def take_out_of_the_way(point: ResumePoint, keep_abandoned: int = 0) -> None:
    """Move aside everything in the run directory that is later than the resume point.

    Keeps the newest ``keep_abandoned`` abandoned checkpoints (0: all). If the process is killed during this, the next
    one completes it.
    """
    run, last = point.run, point.last_record
    by_step = run.metrics, run.samples, run.groups
    asides = [_next_aside(path) for path in by_step]
    for replaced in (run.status, run.summary, run.config, *by_step, *asides):
        remove_partials(replaced)
    for later in exported_steps(run.checkpoints):
        if later > last:
            aside = abandon(run.checkpoints, later)
            logger.info("the checkpoint of step %d is no part of the run any more: %s", later, aside)
    prune_abandoned(run.checkpoints, keep_abandoned)
    for path in by_step:  # filtered groups stay until the journal has told which of them are generated again
        keep_lines(path, lambda record: record["step"] <= last or is_filtered(record), partial(_put_aside, path))
    if run.timeline.exists():
        os.replace(run.timeline, _next_aside(run.timeline))
    for path in (*by_step, run.timeline):
        for old in _put_aside_before(path)[:-PUT_ASIDE_KEPT]:
            old.unlink()


def _put_aside(path: Path, lines: str) -> None:
    """Save the lines removed from a file, unless an earlier, killed process has already saved the same lines."""
    before = _put_aside_before(path)
    if not before or before[-1].read_text(encoding="utf-8") != lines:
        write_atomically(_next_aside(path), lines)


def _put_aside_before(path: Path) -> list[Path]:
    """Return the moved-aside versions, `metrics-before.jsonl`, `metrics-before-2.jsonl`, ..., oldest first."""
    return sorted(path.parent.glob(f"{path.stem}-before*{path.suffix}"), key=_number)


def _next_aside(path: Path) -> Path:
    before = _put_aside_before(path)
    number = f"-{_number(before[-1]) + 1}" if before else ""
    return path.with_name(f"{path.stem}-before{number}{path.suffix}")


def _number(aside: Path) -> int:
    number = aside.stem.rpartition("-before-")[2]
    return int(number) if number.isdecimal() else 1


def named_run(config: RunConfig) -> tuple[RunDirectory | None, int | None]:
    """Return the run and the step that `resume_from_checkpoint` names; (None, None) for a new run.

    Raises `FileNotFoundError` if the named run does not exist, and `ConfigError` if `output_dir` is another folder.
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
        raise problem("output_dir", message, remedy)
    return run, step


def _checkpoint(folder: Path, wanted: int | None, notes: list[str]) -> Checkpoint | None:
    steps = saved_steps(folder)
    if wanted is not None and wanted not in steps:
        there = ", ".join(map(str, steps)) or "none"
        message = f"there is no checkpoint of step {wanted} to go on from; of these steps there are: {there}"
        raise problem(KEY, message, "name one of these, or the folder of the run")
    if wanted is not None:
        try:
            return read_checkpoint(checkpoint_folder(folder, wanted))
        except DamagedCheckpoint as damage:
            raise problem(KEY, str(damage), "name another checkpoint, or the folder of the run") from damage
    checkpoint, damages = newest_whole(folder)
    notes += [f"passed over: {damage}" for damage in damages]
    if checkpoint is None and steps:
        message = f"no checkpoint in {folder} is whole; " + "; ".join(notes)
        raise problem(KEY, message, "begin a new run in another folder")
    return checkpoint


def _judge_changes(config: RunConfig, run: RunDirectory, notes: list[str], problems: Problems) -> None:
    if not run.config.exists():  # the run was interrupted at its very beginning
        return
    found = changes(load_config(run.config), config)
    notes += [f"changed: {change}" for change in found]
    remedies = {"impossible": "set it back, or begin a new run"}
    if not config.accept_config_changes:
        remedies["needs confirmation"] = "set it back, or say `accept_config_changes=true`"
    for change in sorted(found, key=lambda change: change.judgement):  # the impossible ones first
        if change.judgement in remedies:
            reason = f" ({change.reason})" if change.reason else ""
            message = f"was {change.before!r} before the run was interrupted and is {change.after!r} now{reason}"
            problems.add(change.path, message, remedies[change.judgement])


_LAYER = re.compile(r"\.layers\.(\d+)\.")


def model_problems(config: RunConfig, checkpoint: Checkpoint) -> list[ConfigProblem]:
    """Return a problem for each trained role whose model does not fit its state in the checkpoint."""
    problems = []
    for name, role in derived.trained_roles(config).items():
        if not checkpoint.role(name).is_dir():
            message = f"the checkpoint of step {checkpoint.step} has no state of it: the run has trained without it"
            problems.append(ConfigProblem(name, message, "remove it, or begin a new run from the checkpoint's model"))
            continue
        path = Path(derived.model_path(config, role))
        if not path.is_dir():
            continue
        try:
            difference = _difference(path, SavedState(checkpoint.role(name)))
        except (UnfitState, FileNotFoundError) as unfit:
            difference = str(unfit)
        if difference is not None:
            key = f"{name}.model_args.model_name_or_path" if role.model_args.model_name_or_path else "pretrain"
            message = f"the checkpoint of step {checkpoint.step} cannot go on with {path}: {difference}"
            problems.append(ConfigProblem(key, message, "give the model that the run began with"))
    return problems


def _difference(folder: Path, state: SavedState) -> str | None:
    """Return the first difference in tensor shapes or in the number of layers, or None.

    Only tensors of the same name are compared: heads and experts may be named differently in files and in the model.
    """
    files, weights = CheckpointFiles(folder), sorted(state.weights())
    for weight in sorted(set(weights) - set(files.missing(weights))):
        there, here = state.shape(f"weight/{weight}"), files.shape(weight)
        if there != here:
            return f"that is another model: {weight} is {list(there)} in the checkpoint, {list(here)} in the model"
    trained, known = _layers(weights), _layers(files.names())
    # The files may have more layers: transformers ignores some, and others may have no adapter.
    return None if trained <= known else f"that is another model, of {known} layers, not {trained}"


def _layers(names: list[str]) -> int:
    return len({match[1] for match in map(_LAYER.search, names) if match})
