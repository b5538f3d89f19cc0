"""Batches in parts: processing the groups of a step before the last one has finished.

Parts pass through the stages one after the other. Reference, teacher, critic and `actor_logp` process a part as soon as
it arrives (but at ratio 0 without streaming they wait for the batch, since nothing there may depend on timing). With
`actor_train.stream_groups` the trainer also computes the loss of each part and accumulates gradients; after the last
part it divides by the totals of the batch and updates. The result is the optimizer step of the whole batch, up to
rounding: all sums are over tokens, and a group's advantages depend on that group only, which is checked for every batch
before its update.

A part is at least 1/32 of the batch, and has at least one sample for each rank of every role that processes it. A role
that is busy takes all parts that have come in the meantime as one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from roll.algorithms.advantages.base import AdvantageEstimator
from roll.algorithms.correction import Correction, SecondMomentRejection
from roll.algorithms.objective import PolicyObjective
from roll.configs import derived
from roll.configs.roles import COMPARED_ROLES
from roll.configs.run import AgenticConfig, PipelineConfig
from roll.data.records import Group, SampleBatch

if TYPE_CHECKING:
    from roll.pipeline.algorithm import TrainingBatch

PARTS_PER_BATCH = 32
"""Maximum number of parts per batch."""
WORKING_ON_PARTS: list[str] = [*COMPARED_ROLES, "critic", "actor_logp"]
"""Roles that can process a batch in parts even if the trainer does not stream."""
WHOLE_BATCH_MOMENTS = ("batch", "tag", "running")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""Tolerance between advantages computed for a part and for the batch; covers only the order of summation."""


class AdvantagesNeedBatch(RuntimeError):
    """An estimator gave a group different advantages in its batch than in a part of it. No update was made."""


def obstacles(
    config: PipelineConfig,
    estimator: AdvantageEstimator,
    correction: Correction | None,
    objective: PolicyObjective | None,
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why groups cannot be trained on before their batch is complete, each with a remedy."""
    present = derived.present_roles(config)
    for role in ("actor_train", *WORKING_ON_PARTS):
        if role in present and derived.shares_devices(config, role):
            yield f"{role} takes turns with other roles on its devices", f"give `{role}` devices of its own"
    steps = derived.optimizer_steps_per_step(config, config.actor_train)
    if steps > 1:
        yield f"{steps} optimizer steps are taken on each batch", "take one: `ppo_epochs: 1`, no accumulation steps"
    elif isinstance(config, AgenticConfig) and config.actor_train.training_args.gradient_accumulation_steps is not None:
        # An episode may be several samples, so only the whole batch determines the number of optimizer steps.
        yield "accumulation steps cut a batch by its samples", "remove `gradient_accumulation_steps`"
    if estimator.requirements.whitens:
        yield f"{estimator.name} gives advantages the moments of the whole batch", "use grpo, rloo or another estimator"
    if config.whiten_advantages:
        yield "whitening takes the moments of the whole batch", "remove `whiten_advantages`"
    for key in ("norm_mean_type", "norm_std_type"):
        if vars(config)[key] in WHOLE_BATCH_MOMENTS:
            yield f"`{key}: {vars(config)[key]}` looks at other groups", f"set `{key}` to group or none"
    if correction is not None and correction.normalize:
        yield "the correction's weights are normalised over the whole batch", "remove `normalize`"
    if correction is not None and any(isinstance(each, SecondMomentRejection) for each in correction.reject):
        yield "the correction rejects by the second moment of the whole batch", "remove `second_moment`"
    if correction is not None and correction.reject and objective is not None and objective.by_episode:
        reason = "what the correction rejects in one sample of an episode changes the weight of its others"
        yield reason, "set `loss_agg_mode: token-mean`, or remove `reject`"
    if objective is not None and objective.requirements.select is not None:
        yield f"{objective.pg_variant} selects tokens of the whole batch", "use another `pg_variant`"
    if config.stages:
        yield "stages of your own take whole batches", "remove `stages`"


def least_groups(config: PipelineConfig, streams: bool) -> int:
    """Return the minimum number of groups to process together: those of a batch, or of a part."""
    roles = derived.present_roles(config)
    by_part = [role for role in WORKING_ON_PARTS if role in roles and not derived.shares_devices(config, role)]
    if streams:
        by_part.append("actor_train")
    elif config.async_generation_ratio == 0:
        by_part = []  # timing would decide which groups share a forward pass, which changes low-order bits
    if config.stages or not by_part:
        return config.rollout_batch_size
    ranks = max(derived.data_parallel_ranks(roles[name]) for name in by_part)
    least = max(config.rollout_batch_size / PARTS_PER_BATCH, ranks / derived.group_size(config))
    return min(config.rollout_batch_size, math.ceil(least))


@dataclass
class PartsOfBatch:
    """Collects the parts of a batch in a stage that needs the whole batch."""

    parts: list[TrainingBatch] = field(default_factory=list)

    def add(self, part: TrainingBatch) -> TrainingBatch | None:
        """Add a part. After the last one, return the whole batch, sorted by group id; otherwise None."""
        self.parts.append(part)
        if not part.complete:
            return None
        parts, self.parts = self.parts, []
        return part if len(parts) == 1 else joined(parts)


async def join(parts: list[TrainingBatch]) -> TrainingBatch:
    """Return consecutive parts of a batch as one part, or as the rest of the batch if the last one completes it."""
    last = parts[-1]
    if last.untrained is None:
        return await asyncio.to_thread(joined, parts)
    return replace(last, untrained=await asyncio.to_thread(joined, [*parts[:-1], last.untrained]))


def joined(parts: list[TrainingBatch]) -> TrainingBatch:
    """Return the batch made of these parts, sorted by group id. All parts share the same metrics."""
    made: list[tuple[Group, SampleBatch]] = []
    for part in parts:
        made += zip(part.groups, part.data.split([len(group.samples) for group in part.groups]), strict=True)
    made.sort(key=lambda each: each[0].group_id)
    data = SampleBatch.concatenated([samples for _, samples in made])
    return replace(parts[-1], groups=[group for group, _ in made], data=data)


@dataclass
class StreamedStep:
    """Record of a streamed training step: what the trainer was given, and what it computed, by group id."""

    advantages: dict[int, np.ndarray] = field(default_factory=dict)
    """Advantages that the trainer used, float32 ``[tokens of the group]``."""
    proximal: dict[int, np.ndarray] = field(default_factory=dict)
    """Log-probabilities from before the update, float32 ``[tokens of the group]``, if the loss needs them."""

    def note_advantages(self, part: TrainingBatch) -> None:
        """Record the advantages of a part that is given to the trainer."""
        self.advantages |= by_group(part, part.data.tokens["advantages"])

    def check(self, batch: TrainingBatch, estimator: AdvantageEstimator) -> None:
        """Compare with the advantages of the whole batch. Raises `AdvantagesNeedBatch` if those of a group differ."""
        wanted = by_group(batch, batch.data.tokens["advantages"])
        for group_id, given in self.advantages.items():
            if not np.allclose(given, wanted[group_id], equal_nan=True, **TOLERANCE):
                raise AdvantagesNeedBatch(
                    f"training step {batch.step}: the advantages of group {group_id} depend on other groups, so "
                    f"`adv_estimator: {estimator.name}` needs the whole batch; set `actor_train.stream_groups: false`"
                )


def by_group(batch: TrainingBatch, values: np.ndarray) -> dict[int, np.ndarray]:
    """Split a token field ``[total_tokens]`` of a batch by group id."""
    ends = batch.data.offsets[np.cumsum([len(group.samples) for group in batch.groups])]
    parts = np.split(values, ends[:-1])
    return {group.group_id: part for group, part in zip(batch.groups, parts, strict=True)}


def in_order(batch: TrainingBatch, values: Mapping[int, np.ndarray]) -> np.ndarray:
    """Concatenate values by group id to a token field ``[total_tokens]`` of a batch: the inverse of `by_group`."""
    return np.concatenate([values[group.group_id] for group in batch.groups])
