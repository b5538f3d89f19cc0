"""Prompts of the teacher's own: the teacher scores the policy's responses behind other prompts than the policy saw.

The response tokens are the same, at other positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from roll.data.records import SampleBatch
from roll.pipeline.preflight import Prepared, RLVRPlan

if TYPE_CHECKING:
    from roll.pipeline.algorithm import TrainingBatch


def teacher_prompts(prepared: Prepared) -> Mapping[str, np.ndarray]:
    """Return the teacher's prompts by prompt id; empty if the teacher sees the policy's prompts."""
    plan = prepared.rollouts
    return plan.teacher_prompts if isinstance(plan, RLVRPlan) else {}


def seen_by_teacher(batch: TrainingBatch, prompts: Mapping[str, np.ndarray]) -> SampleBatch:
    """Return the batch for the teacher's forward pass: ``batch.data`` itself if ``prompts`` is empty."""
    if not prompts:
        return batch.data
    return with_prompts(batch.data, [prompts[group.prompt.prompt_id] for group in batch.groups for _ in group.samples])


def with_prompts(data: SampleBatch, prompts: Sequence[np.ndarray]) -> SampleBatch:
    """Return the sampled tokens of each sample behind another prompt (int32 ``[prompt]`` each)."""
    sampled = data.tokens["response_mask"]
    counts = np.add.reduceat(sampled, data.offsets[:-1], dtype=np.int64)
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    mask = np.repeat(np.tile([False, True], len(prompts)), np.stack([lengths, counts], axis=1).ravel())
    token_ids = np.empty(len(mask), dtype=np.int32)
    token_ids[~mask], token_ids[mask] = np.concatenate(prompts), data.tokens["token_ids"][sampled]
    return SampleBatch(lengths + counts, {"token_ids": token_ids, "response_mask": mask})


def on_samples(data: SampleBatch, values: np.ndarray, seen: SampleBatch) -> np.ndarray:
    """Map token values of the teacher's batch ``seen`` to ``data``: ``[total_tokens]``, 0 for prompt tokens."""
    if seen is data:
        return values
    found = np.zeros(int(data.lengths.sum()), dtype=values.dtype)
    found[data.tokens["response_mask"]] = values[seen.tokens["response_mask"]]
    return found
