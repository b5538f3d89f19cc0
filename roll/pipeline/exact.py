"""`roll check --exact`: compares a run with a plain loop, and reports the first tensor in which they differ.

The plain loop uses the same engine, trainer, rewards and algorithms, one after the other: no scheduler, no stages, no
weight transfer between processes. At ratio 0, on CPUs with `hf_infer`, both compute the same bits. Elsewhere the
low-order bits depend on what else is computed in the same batch. The size of a difference then distinguishes rounding
from a bug.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from roll.algorithms.metrics import mean_over_updates
from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.errors import Problems, count
from roll.configs.roles import COMPARED_ROLES
from roll.configs.run import ChaosConfig, InsertedStage, PipelineConfig, PromptConfig
from roll.data.records import Group, SampleBatch
from roll.engines.base import Completion, GenerateRequest, InferStrategy
from roll.pipeline.algorithm import TrainingBatch, add_advantages, add_correction, select_tokens
from roll.pipeline.context import RunContext
from roll.pipeline.distillation import on_samples, seen_by_teacher, teacher_prompts
from roll.pipeline.preflight import Prepared, prepare_rollouts
from roll.pipeline.roles import build_side, engine_spec, role_locks, trainer_setup
from roll.pipeline.rollouts import Generator, has_score_variance
from roll.pipeline.stages import publication_due, train_plan
from roll.rollout.scheduler import GroupRequest
from roll.runtime.placement import Placement, free_port, ray_session
from roll.tracking.run_directory import RunDirectory
from roll.trainers.base import TrainerSetup, build_forward_strategy, build_trainer
from roll.trainers.model import save
from roll.trainers.state import CheckpointFiles
from roll.trainers.step import REFERENCE_MEANS
from roll.trainers.worker import optimizer_batches
from roll.weights.buckets import pack_buckets

if TYPE_CHECKING:
    from roll.trainers.trainer import ForwardStrategy, TrainStrategy

Strategy = TypeVar("Strategy", bound="ForwardStrategy")

NOTES = "exact"
"""Folder, within the run directory, of the recorded tensors; also the name of the stage that records them."""
_BUCKET_BYTES = 64 * 2**20
ORDER = (
    "token_ids", "latents", "means", "behaviour_logprobs", "versions", "routed_experts", "scores", "rewards",
    "reference_logprobs", "reference_means", "teacher_logprobs", "values", "advantages", "returns",
    "proximal_logprobs", "correction_weights", "loss_mask",
    "critic/loss", "critic/grad_norm", "actor/loss", "actor/grad_norm",
)  # fmt: skip
"""Names of the compared values of a training step, in the order in which they are computed."""


@dataclass(frozen=True)
class Difference:
    """The first tensor in which run and plain loop differ."""

    where: str
    """``step 2``, or ``the model after step 3``."""
    name: str
    differing: int
    size: int
    largest: float
    """Largest absolute difference; NaN if the shapes differ."""

    def __str__(self) -> str:
        if math.isnan(self.largest):
            return f"{self.where}: `{self.name}` has another shape"
        share = f"{self.differing:,} of {count(self.size, 'value')}"
        return f"{self.where}: `{self.name}` differs in {share}, by at most {self.largest:.3g}"


def exact_config(config: PipelineConfig, steps: int) -> PipelineConfig:
    """Return the configuration of a short run at ratio 0 that records its tensors.

    Raises `ConfigError` for settings that the plain loop does not support.
    """
    problems = Problems()
    if config.stages:
        problems.add("stages", "the plain loop has the built-in stages only", "remove them for this comparison")
    if config.actor_logp is not None and not derived.logp_is_trainer(config):
        message = "the plain loop has one trainer, which computes on whole batches; actor_logp sums in another order"
        problems.add("actor_logp", message, "remove this section for this comparison")
    for name, role in derived.present_roles(config).items():
        devices = len(parse_device_mapping(role.device_mapping))
        if name != "actor_infer" and devices > 1:
            message = f"the plain loop has one process, and {devices} ranks sum in another order"
            problems.add(f"{name}.device_mapping", message, "name one device for this comparison")
    problems.raise_any()
    changes: dict[str, Any] = {
        "exp_name": f"{config.exp_name}-{NOTES}",
        "output_dir": None,
        "max_steps": steps,
        "critic_warmup": min(config.critic_warmup, steps),
        "save_steps": 0,
        "eval_steps": 0,
        "resume_from_checkpoint": False,
        "track_with": [],
        "tracker_kwargs": {},
        "chaos": ChaosConfig(),
        "stages": {NOTES: InsertedStage(use=f"{__name__}:note", before="param_update")},
    }
    if isinstance(config, PromptConfig):
        changes["validation"] = None
    return replace(derived.synchronous(config), **changes)


async def note(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Stage that records the tensors of this step in the run directory."""
    arrays: dict[str, Any] = contents(batch)
    await asyncio.to_thread(np.savez, _notes_of(run.recorder.run, batch.step), **arrays)
    return batch


def _notes_of(run: RunDirectory, step: int) -> Path:
    """Return the file with the recorded tensors of a step (from 0). Creates its folder."""
    folder = run.root / NOTES
    folder.mkdir(exist_ok=True)
    return folder / f"step-{step + 1}.npz"


def contents(batch: TrainingBatch) -> dict[str, np.ndarray]:
    """Return the values of a step by the names in `ORDER`."""
    found = {**batch.data.tokens, **batch.data.per_sample, **batch.metrics}
    return {name: np.asarray(found[name]) for name in ORDER if name in found}


def compared_with_plain_loop(config: PipelineConfig, run: RunDirectory) -> Difference | None:
    """Return the `first_difference` of a finished run of `exact_config`. Connects to the run's cluster."""
    with ray_session(config.cluster):
        return asyncio.run(first_difference(prepare_rollouts(config), run))


async def first_difference(prepared: Prepared, run: RunDirectory) -> Difference | None:
    """Repeat a run of `exact_config` as a plain loop. Return the first tensor that differs, or None."""
    loop, steps = PlainLoop(prepared, run), prepared.config.max_steps
    await loop.start()
    try:
        for step in range(steps):
            mine = contents(await loop.step(step))
            with np.load(_notes_of(run, step)) as noted:
                difference = _first(f"step {step + 1}", ORDER, noted.get, mine.get)
            if difference is not None:
                return difference
        model = run.root / NOTES / "model"
        save(loop.trainer, str(model))
        theirs, own = CheckpointFiles(run.checkpoints / f"step-{steps}"), CheckpointFiles(model)
        names = sorted({*theirs.names(), *own.names()})
        return _first(f"the model after step {steps}", names, partial(_tensor, theirs), partial(_tensor, own))
    finally:
        await loop.close()


class PlainLoop:
    """Generates, scores, trains and copies the weights to the engine, all in this process and strictly in sequence."""

    def __init__(self, prepared: Prepared, run: RunDirectory) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._placement = Placement(prepared.config.cluster)
        self._run = run

    async def start(self) -> None:
        """Load all models, and start the reward or environment workers."""
        config, prepared = self._config, self._prepared
        await self._placement.reserve()
        self._side = build_side(prepared, self._placement, role_locks(config), self._run, print)
        await self._side.workers.start()
        torch.set_num_threads(self._placement.place([0]).cpu_threads)
        self._engine = engine_spec(config, "object_store").build(config.cluster.device)
        await self._engine.start()
        roles = derived.present_roles(config)
        self.trainer = self._load(build_trainer, "actor_train")
        await self._hand_over(0)
        self._critic = self._load(build_trainer, "critic") if "critic" in roles else None
        self._compared = {role: self._load(build_forward_strategy, role) for role in COMPARED_ROLES if role in roles}
        self._rollout = self._side.rollout(_Direct(self._engine))
        self._requests = (
            GroupRequest(group_id, item, start_version=0, attempt=1)
            for group_id, item in enumerate(self._side.source())
        )

    async def step(self, step: int) -> TrainingBatch:
        """Take one training step, and load the new weights into the engine if due."""
        config, prepared = self._config, self._prepared
        temperature = config.actor_infer.generating_args.temperature
        batch = TrainingBatch.from_groups(step, await self._groups(step))
        data = batch.data
        for role in COMPARED_ROLES:
            if role == "reference" and derived.picture_sampling(config) is not None:
                self._add_reference_means(data)
                continue
            seen = data if role != "teacher" else seen_by_teacher(batch, teacher_prompts(prepared))
            if derived.is_base(config, role):
                logprobs = self.trainer.base_log_probs(seen, temperature)
            elif derived.is_policy(config, role):
                logprobs = self.trainer.log_probs(seen.unrouted(), temperature)
            elif role in self._compared:
                logprobs = self._compared[role].log_probs(seen, temperature)
            else:
                continue
            data.tokens[f"{role}_logprobs"] = on_samples(data, logprobs, seen)
        if self._critic is not None:
            data.tokens["values"] = self._critic.values(data)
        add_advantages(batch, prepared.advantages)
        if self._critic is not None:
            self._train("critic", self._critic, batch)
        if step + 1 > config.critic_warmup:
            objective = prepared.objective
            if prepared.correction is not None or "proximal_logprobs" in objective.token_fields:
                data.tokens["proximal_logprobs"] = self.trainer.log_probs(data, temperature)
            if prepared.correction is not None:
                add_correction(batch, prepared.correction, objective)
            select_tokens(batch, objective, config.seed)
            self._train("actor", self.trainer, batch)
        if publication_due(config, step + 1):
            await self._hand_over(step + 1)
        return batch

    def _add_reference_means(self, data: SampleBatch) -> None:
        """Add the reference's means of the denoising steps, if there is a reference."""
        if derived.is_base(self._config, "reference"):
            data.per_sample[REFERENCE_MEANS] = self.trainer.base_step_means(data)
        elif "reference" in self._compared:
            data.per_sample[REFERENCE_MEANS] = self._compared["reference"].step_means(data)

    async def close(self) -> None:
        """Shut down all models and workers."""
        await self._side.workers.shutdown()
        await self._engine.shutdown()
        for strategy in (self.trainer, self._critic, *self._compared.values()):
            if strategy is not None:
                strategy.shutdown()
        self._placement.release()

    async def _groups(self, step: int) -> list[Group]:
        """Return the groups of a step. Groups that the configured filter rejects are replaced by the next ones."""
        kept: list[Group] = []
        while missing := self._config.rollout_batch_size - len(kept):
            requests = [replace(next(self._requests), start_version=step) for _ in range(missing)]
            made = await asyncio.gather(*(self._rollout(request) for request in requests))
            kept += [group for group in made if self._config.group_filter == "none" or has_score_variance(group)]
        return kept

    def _load(self, build: Callable[[str, TrainerSetup, str | None], Strategy], role: str) -> Strategy:
        setup = trainer_setup(self._config, role)
        setup = replace(setup, master_port=free_port(), device=self._config.cluster.device)
        chosen = setup.config.strategy_args
        strategy = build(chosen.strategy_name, setup, chosen.strategy_cls)
        strategy.initialize()
        return strategy

    def _train(self, name: Literal["actor", "critic"], trainer: TrainStrategy, batch: TrainingBatch) -> None:
        prepared, data = self._prepared, batch.data
        plan = train_plan(self._config, "critic" if name == "critic" else "actor_train", batch)
        objective = prepared.value_objective if name == "critic" else prepared.objective
        updates = [
            trainer.train_step(data.select(rows), objective, plan.temperature)
            for rows in optimizer_batches(len(data), plan, self._config.seed)
        ]
        batch.metrics.update({f"{name}/{key}": value for key, value in mean_over_updates(updates).items()})

    async def _hand_over(self, version: int) -> None:
        dtype = getattr(torch, self._config.actor_infer.model_args.dtype)
        weights, uncast = self.trainer.published(self._config.weight_update.content, dtype)
        buckets = pack_buckets(weights, _BUCKET_BYTES, float_dtype=dtype, uncast=uncast)
        await self._engine.prepare_weights(buckets, version)
        await self._engine.pause("keep")
        await self._engine.load_weights(version)
        await self._engine.resume()


class _Direct(Generator):
    """A `Generator` that passes requests straight to one engine."""

    def __init__(self, engine: InferStrategy) -> None:
        self._engine = engine

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        return await self._engine.generate(request)

    def forget(self, sticky_key: str) -> None:
        pass


def _first(
    where: str,
    names: Iterable[str],
    theirs: Callable[[str], np.ndarray | None],
    mine: Callable[[str], np.ndarray | None],
) -> Difference | None:
    """Return the first difference in the order of ``names``. ``theirs``: values of the run; ``mine``: of the loop."""
    for name in names:
        their, own = theirs(name), mine(name)
        if their is None and own is None:
            continue
        if their is None or own is None or their.shape != own.shape:
            return Difference(where, name, 0, 0, math.nan)
        if their.tobytes() != own.tobytes():
            apart = np.abs(their.astype(np.float64) - own.astype(np.float64))
            return Difference(where, name, int((apart != 0).sum()), apart.size, float(apart.max()))
    return None


def _tensor(files: CheckpointFiles, name: str) -> np.ndarray | None:
    return None if files.missing([name]) else files.read(name).float().numpy()
