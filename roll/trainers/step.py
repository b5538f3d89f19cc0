"""One optimizer step, independent of any engine: ragged samples become micro-batches, and a loss over the whole batch.

Which tokens count and the loss's divisors are decided once for the whole batch and equal on all ranks, so a trainer
only has to run its micro-batches and add up. A plan of micro-batches is a pure function of the lengths, so all ranks
make the same one. Ranks get nearly equally many tokens and exactly equally many micro-batches, because sharded models
need matching collectives. Padding is on the right. Only this module shifts tokens against the logits that predict them.
Packing changes what the model computes on, never what the loss sees: results return to one row per sample.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.aggregation import LossNormalizers
from roll.algorithms.metrics import TRAINED_SEQUENCES, TRAINED_TOKENS, PartMetrics, combine
from roll.algorithms.objective import PolicyObjective, SupervisedObjective, ValueObjective
from roll.data.records import SampleBatch
from roll.trainers.base import MicroBatchLimits


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray, world_size: int, limits: MicroBatchLimits
) -> list[list[list[int]]]:
    """Split samples over ranks and micro-batches. Return rows of the batch: rank -> micro-batch -> rows.

    A rank short of work has empty micro-batches at its end. A sample longer than the budget has a micro-batch to
    itself. The largest micro-batches come first, so that a batch too large for the device fails at once. When padding,
    rows of similar length share a micro-batch; when packing, rows that fill the budget do.
    """
    ranks = _balanced(lengths, world_size, limits)
    if limits.packed and limits.max_tokens is not None:
        by_rank = [_fill_tightly(rows, lengths, limits.max_tokens) for rows in ranks]
    else:
        by_rank = [_fill(rows, lengths, limits) for rows in ranks]
    count = max(1, max(len(micro_batches) for micro_batches in by_rank))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in by_rank]


EVEN_ENOUGH = 1.00005
"""Tokens of the rank that has most, over the mean of all, with which a plan is not improved."""


def _balanced(lengths: Sequence[int] | np.ndarray, world_size: int, limits: MicroBatchLimits) -> list[list[int]]:
    """Return the rows of each rank, longest first: of some ways the one with the fewest micro-batches, if these are of
    so many rows, and then with the fewest tokens on the rank that has most. Many rows are dealt evenly by the first way
    already, and the others, which take longer, are left out."""

    def cost(ranks: list[list[int]]) -> tuple[int, int]:
        rows = max(map(len, ranks)) if limits.max_tokens is None else 0
        return -(-rows // limits.max_samples), max(sum(int(lengths[row]) for row in rows) for rows in ranks)

    greedy = _greedy(lengths, world_size)
    micro_batches, tokens = cost(greedy)
    rows_each = -(-len(lengths) // world_size) if limits.max_tokens is None else 0
    even = micro_batches == -(-rows_each // limits.max_samples)
    if even and tokens * world_size <= EVEN_ENOUGH * sum(map(int, lengths)):
        return greedy
    ways = [greedy, _differenced(lengths, world_size, equal_counts=False)]
    if limits.max_tokens is None:
        ways.append(_differenced(lengths, world_size, equal_counts=True))
    return min(ways, key=cost)


def _differenced(lengths: Sequence[int] | np.ndarray, world_size: int, equal_counts: bool) -> list[list[int]]:
    """Split rows by the largest differencing method (Karmarkar and Karp, 1982).

    It begins with a partial split for each row, and joins the two with the largest difference between their ranks,
    the largest part of the one with the smallest of the other, until one is left. For ``equal_counts`` it begins with
    a row for each rank.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    size = world_size if equal_counts else 1
    splits: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), size)):
        parts = [(int(lengths[row]), [row]) for row in order[start : start + size]]
        parts += [(0, [])] * (size - len(parts))
        splits.append((_negative_difference(parts, world_size), number, parts))
    heapq.heapify(splits)
    number = len(splits)
    while len(splits) > 1:
        (*_, one), (*_, other) = heapq.heappop(splits), heapq.heappop(splits)
        parts = _joined_splits(one, other, world_size)
        heapq.heappush(splits, (_negative_difference(parts, world_size), number, parts))
        number += 1
    found = [rows for _, rows in splits[0][2]] if splits else []
    found += [[] for _ in range(world_size - len(found))]
    return [sorted(rows, key=lambda row: (-lengths[row], row)) for rows in found]


def _joined_splits(
    one: list[tuple[int, list[int]]], other: list[tuple[int, list[int]]], world_size: int
) -> list[tuple[int, list[int]]]:
    """Join two splits, which are the parts (load, rows) of their first ranks, largest first; other ranks are empty."""
    alone, other_alone = world_size - len(other), world_size - len(one)
    pairs = zip(one[alone:], reversed(other[other_alone:]), strict=True)
    joined = [(load + other_load, rows + other_rows) for (load, rows), (other_load, other_rows) in pairs]
    return sorted(one[:alone] + joined + other[:other_alone], key=lambda part: -part[0])


def _negative_difference(parts: list[tuple[int, list[int]]], world_size: int) -> int:
    return (parts[-1][0] if len(parts) == world_size else 0) - parts[0][0]


def _greedy(lengths: Sequence[int] | np.ndarray, world_size: int) -> list[list[int]]:
    """Give each row, longest first, to the rank with the fewest tokens so far."""
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
    """Put each row (longest first) where the least room remains.

    This is best fit decreasing: at most 11/9 of the fewest possible micro-batches, plus one (Johnson, 1973).
    """
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
    """Boundaries and positions of the samples in a packed row."""

    position_ids: Tensor
    """int64 ``[1, tokens]``, counted from 0 in each sample."""
    boundaries: Tensor
    """int32 ``[samples + 1]``: the start of each sample, and the end of the last one. No sample is empty."""
    longest: int
    """Length of the longest sample in tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, device: torch.device) -> Packing:
        """Return the packing of samples that stand one behind the other; samples without tokens do not count."""
        lengths = np.asarray(lengths, dtype=np.int64)
        lengths = lengths[lengths > 0]
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        boundaries = np.concatenate([[0], ends]).astype(np.int32)
        return cls(
            torch.from_numpy(positions)[None].to(device), torch.from_numpy(boundaries).to(device), int(lengths.max())
        )

    def model_arguments(self) -> dict[str, Any]:
        """Return these values under the argument names of transformers' models."""
        return {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


PICTURE_FIELDS = ("latents", "prompts")
"""Fields of samples from which the log-probabilities of pictures are computed."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors on the trainer's device; the logits at `positions` predict the tokens of `targets`.

    The model computes on padded rows, or on one packed row. Objectives see one row per sample in either case.
    """

    input_ids: Tensor
    """int64 ``[rows, width]``, padded on the right with 0, which only padding sees. Packed: ``[1, tokens]``."""
    positions: Tensor
    """int64 ``[kept]``: positions of the logits needed, one range for all rows. Each predicts the token after its
    position. Packed: only those of the wanted targets, at least one."""
    targets: Tensor
    """int64 ``[rows, kept]``; packed ``[1, positions]``."""
    mask: Tensor
    """bool ``[rows, kept]``: wanted targets. All false in the stand-in for an empty micro-batch."""
    fields: dict[str, Tensor]
    """Further values: ``[rows, kept]`` for a value per target token, ``[rows]`` for a value per sample."""
    packing: Packing | None = None
    """None if rows are padded."""
    rows: Sequence[int] = ()
    """Rows of the batch; none for a stand-in."""
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Of pictures, the `PICTURE_FIELDS`, one row per sample; their targets are the numbers of denoising steps."""

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments for a transformers model. Default positions and the causal mask fit right padding."""
        packed = {} if self.packing is None else self.packing.model_arguments()
        return {"input_ids": self.input_ids, "use_cache": False, **packed}

    def by_sample(self, values: Tensor) -> Tensor:
        """Return values of `targets` as ``[rows, kept]``, one row per sample. Positions without a target get 0."""
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

    ``wanted`` bool ``[total_tokens]`` marks the tokens whose log-probabilities are needed (never first tokens, which
    nothing predicts). Logits outside the range of positions with a wanted target are not kept. Without rows, returns a
    stand-in of one row of two tokens and no wanted target.
    """
    needed = {name: batch.tokens[name] for name in ("token_ids", *field_names)} | {"wanted": wanted}
    of_pictures = [name for name in PICTURE_FIELDS if name in batch.per_sample]
    per_sample = {name: batch.per_sample[name] for name in (*sample_fields, *of_pictures)}
    whole = SampleBatch(batch.lengths, needed, per_sample)
    part = whole.select(rows) if rows else _stand_in(whole)
    width = max(2, int(part.lengths.max()))
    mask = part.padded("wanted", False, width)[:, 1:]
    columns = np.flatnonzero(mask.any(axis=0))
    # Without a wanted token the first column is kept: the loss needs some graph.
    kept = slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 1)

    def aligned(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[:, kept])).to(device)

    fields = {
        **{name: aligned(part.padded(name, 0, width)[:, 1:]) for name in field_names},
        **{name: torch.from_numpy(part.per_sample[name]).to(device) for name in sample_fields},
    }
    if packed:
        return _packed(part, aligned(mask), fields, device, rows)
    input_ids = part.padded("token_ids", 0, width).astype(np.int64)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.arange(kept.start, kept.stop, device=device),
        targets=aligned(input_ids[:, 1:]),
        mask=aligned(mask),
        fields=fields,
        rows=rows,
        pictures={name: part.per_sample[name] for name in of_pictures},
    )


def _packed(
    part: SampleBatch, mask: Tensor, fields: dict[str, Tensor], device: torch.device, rows: Sequence[int]
) -> MicroBatch:
    """Build a packed micro-batch. ``mask`` and ``fields`` have one row per sample; the true places of the mask, row by
    row, are the wanted tokens in order."""
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
        rows=rows,
    )


def predicted_tokens(batch: SampleBatch) -> np.ndarray:
    """Return bool ``[total_tokens]``: True for every token but the first of each sample."""
    predicted = np.ones(int(batch.lengths.sum()), dtype=bool)
    predicted[batch.offsets[:-1][batch.lengths > 0]] = False
    return predicted


def results_by_token(
    batch: SampleBatch,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    packed: bool,
    compute: Callable[[Iterator[MicroBatch]], Iterable[Tensor]],
) -> np.ndarray:
    """Return what ``compute`` yields for the targets (``[rows, kept]``) of each micro-batch, at the targets' places.

    Returns float32 ``[total_tokens]``, without gradients; 0 at the first token of a sample, which nothing predicts, and
    at samples that are not among ``rows``.
    """
    wanted = predicted_tokens(batch)
    micro_batches = (build_micro_batch(batch, part, wanted, (), device, packed=packed) for part in rows)
    found, offsets = np.zeros(len(wanted), dtype=np.float32), batch.offsets
    with torch.no_grad():
        # On a pipeline stage without logits there are no results.
        for part, results in zip(rows, compute(micro_batches), strict=False):
            for row, values in zip(part, results.cpu().numpy(), strict=bool(part)):  # a stand-in has no row here
                # All tokens but the first are targets, and padding is on the right.
                found[offsets[row] + 1 : offsets[row + 1]] = values[: max(0, batch.lengths[row] - 1)]
    return found


def _stand_in(batch: SampleBatch) -> SampleBatch:
    """Return one sample of two tokens, all zeros."""
    return SampleBatch(
        lengths=np.array([2], dtype=np.int64),
        tokens={name: np.zeros(2, dtype=values.dtype) for name, values in batch.tokens.items()},
        per_sample={
            name: np.zeros((1, *values.shape[1:]), dtype=values.dtype) for name, values in batch.per_sample.items()
        },
    )


Objective = PolicyObjective | ValueObjective | SupervisedObjective


@dataclass(frozen=True)
class TrainingStep:
    """An objective and the batch that it is computed on."""

    batch: SampleBatch
    objective: Objective
    fields: list[str]
    """Names of per-token fields that micro-batches carry."""
    wanted: np.ndarray
    """bool ``[total_tokens]``: response tokens that some position predicts."""
    normalizers: LossNormalizers
    is_empty: bool
    """True if no token is left to train on: an update would be momentum and weight decay only."""
    first_logprobs: np.ndarray | None = None
    """float32 ``[total_tokens]``: filled in with the log-probabilities of this rank's response tokens, if an objective
    of one pass is to report them; else 0."""
    is_first: bool = True
    """False if other parts of the batch came before."""
    is_last: bool = True
    """False if other parts of the batch follow."""

    @classmethod
    def of(cls, batch: SampleBatch, objective: Objective, is_part: bool = False) -> TrainingStep:
        """Return the step that trains ``objective`` on the response tokens in the batch's ``loss_mask``, if it has one.

        If the batch ``is_part`` of one whose totals are not known yet, losses are sums. Raises ``ValueError`` if the
        batch lacks a field.
        """
        fields = list(objective.token_fields)
        missing = [name for name in ["token_ids", "response_mask", *fields] if name not in batch.tokens]
        missing += [name for name in objective.sample_fields if name not in batch.per_sample]
        if missing:
            there = ", ".join(sorted([*batch.tokens, *batch.per_sample]))
            raise ValueError(f"the batch lacks {', '.join(missing)}; it has {there}")
        if "loss_mask" in batch.tokens:
            fields.append("loss_mask")
        wanted = batch.tokens["response_mask"].astype(bool) & predicted_tokens(batch)
        trained = wanted & batch.tokens["loss_mask"] if "loss_mask" in fields else wanted
        owner = np.repeat(np.arange(len(batch)), batch.lengths)
        lengths = np.bincount(owner[trained], minlength=len(batch)).tolist()
        shares = batch.per_sample["episode_shares"].tolist() if "episode_shares" in objective.sample_fields else None
        normalizers = objective.normalizers(lengths, shares)
        is_empty = normalizers.tokens == 0
        if is_part:
            normalizers = LossNormalizers.unknown(normalizers.max_response_length)
        one_pass = isinstance(objective, PolicyObjective) and objective.one_pass
        first_logprobs = np.zeros(len(wanted), np.float32) if one_pass else None
        return cls(batch, objective, fields, wanted, normalizers, is_empty, first_logprobs)

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the entropy is trained on, not only a metric. A value model has none."""
        return isinstance(self.objective, PolicyObjective) and self.objective.needs_entropy_gradient

    def micro_batches(
        self, rows: Sequence[Sequence[int]], device: torch.device, packed: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield a micro-batch for each list of rows, made when it is asked for."""
        for part in rows:
            yield build_micro_batch(
                self.batch, part, self.wanted, self.fields, device, self.objective.sample_fields, packed
            )

    def loss(self, micro_batch: MicroBatch, *outputs: Tensor) -> tuple[Tensor, PartMetrics]:
        """Return a micro-batch's contribution to the loss of the batch (0-d, with gradient) and to its metrics.

        ``outputs`` are the model's results for the targets, in the order in which the objective takes them.
        """
        fields = micro_batch.fields
        about = (micro_batch.mask, self.normalizers, fields, fields.get("loss_mask"))
        if isinstance(self.objective, ValueObjective):
            (values,) = outputs
            return self.objective(values, *about)
        logprobs, entropy = outputs
        if self.first_logprobs is not None:
            starts, ends = self.batch.offsets[:-1], self.batch.offsets[1:]
            spans = [starts[row] + np.flatnonzero(self.wanted[starts[row] : ends[row]]) for row in micro_batch.rows]
            places = np.concatenate([np.zeros(0, dtype=np.int64), *spans])
            self.first_logprobs[places] = logprobs.detach()[micro_batch.mask].float().cpu().numpy()
        return self.objective(logprobs, entropy, *about)


def combined_metrics(parts: Sequence[PartMetrics], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Return metrics of the batch from the parts of all ranks that split it (default: all ranks). Collective."""
    return parts[0].from_vectors(*_combined(parts, group))


def combined_sums(
    parts: Sequence[PartMetrics], objective: Objective, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, float], float]:
    """Return `combined_metrics` of a batch whose losses are sums, and what divides them. Collective.

    The divisor is 0 if no token was trained on.
    """
    sums, maxima = _combined(parts, group)
    named = parts[0].named(sums)
    tokens, sequences = named[TRAINED_TOKENS], named[TRAINED_SEQUENCES]
    divisor = tokens if objective.loss_agg_mode == "token-mean" else sequences
    return parts[0].from_vectors(sums, maxima, divisor or 1.0), divisor


def _combined(parts: Sequence[PartMetrics], group: dist.ProcessGroup | None) -> tuple[list[float], list[float]]:
    sums, maxima = (vector.cpu() for vector in combine(parts))
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    return sums.tolist(), maxima.tolist()
