"""From ragged samples to padded or packed micro-batches, shared out over ranks.

A plan is a pure function of the lengths, so all ranks make the same one. Ranks get about equally many tokens and
exactly equally many micro-batches (sharded models need matching collectives); padding is on the right, and this is the
only place where tokens are shifted against the logits that predict them. Packing changes what the model computes on,
never what the loss sees: results return to one row a sample.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.data.records import SampleBatch

MicroBatchPlan = list[list[list[int]]]
"""Rank -> micro-batch -> rows of the batch; a rank short of work has empty micro-batches at its end."""


@dataclass(frozen=True)
class MicroBatchLimits:
    """How much a micro-batch may hold."""

    max_tokens: int | None
    """Padded tokens, or real ones where samples are packed; None: any number."""
    max_samples: int
    """Counts only where `max_tokens` is None."""
    packed: bool = False
    """Samples stand one behind the other in a single row, without padding."""


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray, world_size: int, limits: MicroBatchLimits
) -> MicroBatchPlan:
    """Share samples over ranks and micro-batches.

    A sample longer than the budget has a micro-batch to itself. The largest micro-batches come first, so that a batch
    too large for the device fails at once. Padded, rows of similar length meet; packed, those that fill the budget.
    """
    ranks = _balanced(lengths, world_size)
    if limits.packed and limits.max_tokens is not None:
        by_rank = [_fill_tightly(rows, lengths, limits.max_tokens) for rows in ranks]
    else:
        by_rank = [_fill(rows, lengths, limits) for rows in ranks]
    count = max(1, max(len(micro_batches) for micro_batches in by_rank))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in by_rank]


def _balanced(lengths: Sequence[int] | np.ndarray, world_size: int) -> list[list[int]]:
    """Rows of each rank, longest first: each row goes to the rank with the fewest tokens so far."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(row)
        heapq.heappush(loads, (load + int(lengths[row]), rank))
    return ranks


def _fill(rows: list[int], lengths: Sequence[int] | np.ndarray, limits: MicroBatchLimits) -> list[list[int]]:
    """Cut rows (longest first) into micro-batches; the first row of each sets its width."""
    max_tokens = limits.max_tokens
    micro_batches: list[list[int]] = []
    for row in rows:
        if micro_batches:
            current = micro_batches[-1]
            limit = limits.max_samples if max_tokens is None else max_tokens // max(1, int(lengths[current[0]]))
            if len(current) < limit:
                current.append(row)
                continue
        micro_batches.append([row])
    return micro_batches


def _fill_tightly(rows: list[int], lengths: Sequence[int] | np.ndarray, max_tokens: int) -> list[list[int]]:
    """Put rows (longest first) where the least room remains: best fit decreasing, at most 11/9 of the fewest possible
    micro-batches and one more (Johnson, 1973)."""
    micro_batches: list[list[int]] = []
    by_room: list[tuple[int, int]] = []
    for row in rows:
        length = int(lengths[row])
        place = bisect_left(by_room, (length, -1))
        if place < len(by_room):
            room, number = by_room.pop(place)
            micro_batches[number].append(row)
        else:
            room, number = max_tokens, len(micro_batches)
            micro_batches.append([row])
        insort(by_room, (room - length, number))
    return [micro_batches[number] for _, number in by_room]


@dataclass(frozen=True)
class Packing:
    """What tells the samples of a row apart."""

    position_ids: Tensor
    """int64 ``[1, tokens]``, from 0 in each sample."""
    boundaries: Tensor
    """int32 ``[samples + 1]``: where samples begin, and the end of the last one. None is empty."""
    longest: int
    """Tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, device: torch.device) -> Packing:
        """Of samples one behind the other; those without tokens do not count."""
        lengths = np.asarray(lengths, dtype=np.int64)
        lengths = lengths[lengths > 0]
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        boundaries = np.concatenate([[0], ends]).astype(np.int32)
        return cls(
            torch.from_numpy(positions)[None].to(device), torch.from_numpy(boundaries).to(device), int(lengths.max())
        )

    def model_arguments(self) -> dict[str, Any]:
        """What a model of transformers calls these."""
        return {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


@dataclass(frozen=True)
class MicroBatch:
    """Tensors on the trainer's device; `positions` of the logits predict the tokens of `targets`.

    The model computes on padded rows, or on one packed row; objectives see one row a sample in either case.
    """

    input_ids: Tensor
    """int64 ``[rows, width]``, padded on the right with 0. Attention is causal, so padding is seen by padding only.
    Packed: ``[1, tokens]``."""
    positions: Tensor
    """int64 ``[kept]``: the logits needed, one range for all rows. Each predicts the token after its position. Packed:
    of the targets asked for only, at least one."""
    targets: Tensor
    """int64 ``[rows, kept]``; packed ``[1, positions]``."""
    mask: Tensor
    """bool ``[rows, kept]``: targets asked for. All false in the stand-in for an empty micro-batch."""
    fields: dict[str, Tensor]
    """Further values: per token of the targets ``[rows, kept]``, per sample ``[rows]``."""
    packing: Packing | None = None
    """None: rows are padded."""

    def model_arguments(self) -> dict[str, Any]:
        """What a model of transformers is called with; default positions and the causal mask fit right padding."""
        packed = {} if self.packing is None else self.packing.model_arguments()
        return {"input_ids": self.input_ids, "use_cache": False, **packed}

    def by_sample(self, values: Tensor) -> Tensor:
        """What was computed for `targets`, as ``[rows, kept]``; 0 where a packed row has no such target."""
        if self.packing is None:
            return values
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


def build_micro_batch(
    batch: SampleBatch,
    rows: Sequence[int],
    wanted: np.ndarray,
    field_names: Sequence[str],
    device: torch.device,
    sample_fields: Sequence[str] = (),
    packed: bool = False,
) -> MicroBatch:
    """Pad or pack the rows and align everything with the logits.

    ``wanted`` bool ``[total_tokens]`` says whose log-probabilities are needed (never first tokens, which nothing
    predicts); logits outside the range of positions with a wanted target are not kept. No rows give a stand-in of one
    row of two tokens that asks for nothing.
    """
    needed = {name: batch.tokens[name] for name in ("token_ids", *field_names)} | {"wanted": wanted}
    per_sample = {name: batch.per_sample[name] for name in sample_fields}
    whole = SampleBatch(batch.lengths, needed, per_sample)
    part = whole.select(rows) if rows else _stand_in(whole)
    width = max(2, int(part.lengths.max()))
    mask = part.padded("wanted", False, width)[:, 1:]
    kept = _range_of_true(np.logical_or.reduce(mask, axis=0))

    def aligned(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[:, kept])).to(device)

    fields = {
        **{name: aligned(part.padded(name, 0, width)[:, 1:]) for name in field_names},
        **{name: torch.from_numpy(values).to(device) for name, values in part.per_sample.items()},
    }
    if packed:
        return _packed(part, aligned(mask), fields, device)
    input_ids = part.padded("token_ids", 0, width).astype(np.int64)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.arange(kept.start, kept.stop, device=device),
        targets=aligned(input_ids[:, 1:]),
        mask=aligned(mask),
        fields=fields,
    )


def _packed(part: SampleBatch, mask: Tensor, fields: dict[str, Tensor], device: torch.device) -> MicroBatch:
    """``mask`` and ``fields`` have one row a sample; its true places, row by row, are the wanted tokens in order."""
    ids, lengths = part.tokens["token_ids"].astype(np.int64), part.lengths
    if not len(ids):
        ids, lengths = np.zeros(2, dtype=np.int64), np.array([2])
    targets = np.flatnonzero(part.tokens["wanted"])
    if not len(targets):
        # The loss needs some graph; `by_sample` leaves this result out.
        targets = np.array([len(ids) - 1])
    return MicroBatch(
        input_ids=torch.from_numpy(ids)[None].to(device),
        positions=torch.from_numpy(np.maximum(targets - 1, 0)).to(device),
        targets=torch.from_numpy(ids[targets])[None].to(device),
        mask=mask,
        fields=fields,
        packing=Packing.of(lengths, device),
    )


def predicted_tokens(batch: SampleBatch) -> np.ndarray:
    """bool ``[total_tokens]``: every token but the first of each sample."""
    predicted = np.ones(int(batch.lengths.sum()), dtype=bool)
    predicted[batch.offsets[:-1][batch.lengths > 0]] = False
    return predicted


def scatter_to_tokens(
    values: np.ndarray, mask: np.ndarray, batch: SampleBatch, rows: Sequence[int], out: np.ndarray
) -> None:
    """Write a micro-batch's ``values`` ``[rows, kept]`` into ``out`` ``[total_tokens]``, first tokens excepted.

    ``mask`` ``[rows, kept]`` must be that of `predicted_tokens`.
    """
    offsets = batch.offsets
    for position, row in enumerate(rows):
        out[offsets[row] + 1 : offsets[row + 1]] = values[position][mask[position]]


def _stand_in(batch: SampleBatch) -> SampleBatch:
    """One sample of two tokens, all zeros."""
    return SampleBatch(
        lengths=np.array([2], dtype=np.int64),
        tokens={name: np.zeros(2, dtype=values.dtype) for name, values in batch.tokens.items()},
        per_sample={name: np.zeros(1, dtype=values.dtype) for name, values in batch.per_sample.items()},
    )


def _range_of_true(columns: np.ndarray) -> slice:
    """The smallest range with all true columns; the first column if there are none (the loss needs some graph)."""
    indices = np.flatnonzero(columns)
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 1)
