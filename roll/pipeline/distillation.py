"""A teacher that sees more than the policy: the same responses behind prompts of its own.

The tokens of the responses stay what they are. Their places change on the way to the teacher and back.
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
    """Return the prompts that the teacher sees, by the ids of the policy's; none if it sees the same."""
    plan = prepared.rollouts
    return plan.teacher_prompts if isinstance(plan, RLVRPlan) else {}


def seen_by_teacher(batch: TrainingBatch, prompts: Mapping[str, np.ndarray]) -> SampleBatch:
    """Return what the teacher's forward pass gets; nothing is copied if it sees the policy's ``prompts``."""
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
    """Bring the values of tokens of ``seen`` back to the sampled tokens of ``data``: ``[total_tokens]``, else 0."""
    if seen is data:
        return values
    found = np.zeros(int(data.lengths.sum()), dtype=values.dtype)
    found[data.tokens["response_mask"]] = values[seen.tokens["response_mask"]]
    return found
