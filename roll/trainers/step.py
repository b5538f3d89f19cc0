"""The parts of one optimizer step that all trainers share: micro-batches from ragged samples, and the batch-wide loss.

The trained tokens and the loss's divisors are determined once for the whole batch and are equal on all ranks, so a
trainer only runs its micro-batches and adds up their losses. The split into micro-batches is a pure function of the
lengths, so all ranks compute the same one. Ranks get nearly equal numbers of tokens and exactly equal numbers of
micro-batches, because sharded models need matching collectives. Padding is on the right. Only this module aligns
tokens with the logits that predict them. Packing affects the model's input only: the loss sees one row per sample.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from roll.algorithms.aggregation import LossNormalizers
from roll.algorithms.metrics import TRAINED_SEQUENCES, TRAINED_TOKENS, PartMetrics, combine
from roll.algorithms.objective import PolicyObjective, SupervisedObjective, ValueObjective
from roll.algorithms.routing import Routing
from roll.data.records import ROUTED, SampleBatch
from roll.trainers.base import MicroBatchLimits


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray, world_size: int, limits: MicroBatchLimits
) -> list[list[list[int]]]:
    """Split the samples over ranks and micro-batches. Return rank -> micro-batch -> rows (sample indices).

    All ranks get the same number of micro-batches; missing ones are empty and come last. A sample longer than the token
    limit gets a micro-batch of its own. The largest micro-batches come first, so that a batch too large for the device
    fails at once. Padded micro-batches hold samples of similar length; packed ones are filled up to the token limit.
    """
    ranks = _balanced(lengths, world_size, limits)
    if limits.packed and limits.max_tokens is not None:
        by_rank = [_fill_tightly(rows, lengths, limits.max_tokens) for rows in ranks]
    else:
        by_rank = [_fill(rows, lengths, limits) for rows in ranks]
    count = max(1, max(len(micro_batches) for micro_batches in by_rank))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in by_rank]


EVEN_ENOUGH = 1.00005
"""Ratio of the busiest rank's tokens to the mean over all ranks up to which a split counts as even."""


def _balanced(lengths: Sequence[int] | np.ndarray, world_size: int, limits: MicroBatchLimits) -> list[list[int]]:
    """Return the rows of each rank, longest first.

    Chooses the best of several splits: fewest micro-batches (if their size is limited in samples), then fewest tokens
    on the busiest rank. The greedy split is usually even for many rows; the slower methods are then skipped."""

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

    Starts from one partial split per row. Repeatedly merges the two splits with the largest difference between their
    ranks, pairing the largest parts of one with the smallest of the other. With ``equal_counts``, each initial split
    has one row per rank.
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
    """Merge two splits. A split lists the (load, rows) of its non-empty ranks, largest load first."""
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
    """Cut rows (longest first) into micro-batches. The first row of each determines its width."""
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
    """Put each row (longest first) into the fullest micro-batch that has room for it.

    This is best-fit decreasing: at most 11/9 of the fewest possible micro-batches, plus one (Johnson, 1973).
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
    """int64 ``[1, tokens]``: positions, restarting at 0 in each sample."""
    boundaries: Tensor
    """int32 ``[samples + 1]``: the start of each sample, then the end of the last one. No sample is empty."""
    longest: int
    """Length of the longest sample in tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, device: torch.device) -> Packing:
        """Return the packing of concatenated samples with these lengths; empty samples are left out."""
        lengths = np.asarray(lengths, dtype=np.int64)
        lengths = lengths[lengths > 0]
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        boundaries = np.concatenate([[0], ends]).astype(np.int32)
        return cls(
            torch.from_numpy(positions)[None].to(device), torch.from_numpy(boundaries).to(device), int(lengths.max())
        )

    def model_arguments(self) -> dict[str, Any]:
        """Return these values as keyword arguments for a transformers model."""
        return {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


REFERENCE_MEANS = "reference_means"
"""Field of samples with the reference's mean of each recorded denoising step; see `ForwardStrategy.step_means`."""
MEANS = "means"
"""Field of samples with the mean of each recorded denoising step when it was sampled; see `Sample.means`."""
PROMPT_PICTURES = "prompt_pictures"
"""Field of samples with the pictures of their prompts, for vision-language models; see `SampleBatch`."""
PICTURE_FIELDS = ("latents", "prompts", MEANS, REFERENCE_MEANS)
"""Fields of samples from which an image model's log-probabilities and divergences are computed."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one micro-batch on the trainer's device. The logits at `positions` predict the tokens in `targets`.

    The model's input is padded rows or one packed row. Objectives see one row per sample in either case.
    """

    input_ids: Tensor
    """int64 ``[rows, width]``, padded on the right with 0 (attention is causal). Packed: ``[1, tokens]``."""
    positions: Tensor
    """int64 ``[kept]``: positions whose logits are needed, one range for all rows; each predicts the next token.
    Packed: only the positions that predict wanted targets, at least one."""
    targets: Tensor
    """int64 ``[rows, kept]``: token ids to predict. Packed: ``[1, positions]``."""
    mask: Tensor
    """bool ``[rows, kept]``: wanted targets. All false in the dummy of an empty micro-batch."""
    fields: dict[str, Tensor]
    """Inputs of the objective: ``[rows, kept]`` for per-token fields, ``[rows]`` for per-sample fields."""
    packing: Packing | None = None
    """Sample boundaries of a packed row; None if rows are padded."""
    rows: Sequence[int] = ()
    """Sample indices in the batch; none in a dummy."""
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The `PICTURE_FIELDS` of an image model, one row per sample. Its targets are denoising step numbers."""
    routing: Routing | None = None
    """Recorded experts of the tokens in `input_ids`, if the batch has them."""
    prompt_pictures: Sequence[Sequence[np.ndarray]] | None = None
    """Pictures of each row's prompt. None: no prompt of the whole batch has any."""

    def model_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for a transformers model.

        Padding is on the right, so the model's default positions and causal mask are correct."""
        packed = {} if self.packing is None else self.packing.model_arguments()
        return {"input_ids": self.input_ids, "use_cache": False, **packed}

    def by_sample(self, values: Tensor) -> Tensor:
        """Return per-target values as ``[rows, kept]``, one row per sample; 0 at positions without a target."""
        if self.packing is None:
            return values
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)

    def widened(self, multiple: int, sample_multiple: int = 1) -> MicroBatch:
        """Return the micro-batch with input padded on the right to a multiple of ``multiple`` positions.

        In a packed row, each sample is first padded to a multiple of ``sample_multiple``; the positions that are then
        missing are one more sample. Nothing is recorded of the experts of added positions.
        """
        ids, routing = self.input_ids, self.routing
        if self.packing is None:
            padded = functional.pad(ids, (0, -ids.shape[1] % multiple))
            if routing is not None:
                places = torch.arange(padded.numel(), device=ids.device).view(padded.shape)[:, : ids.shape[1]]
                routing = routing.spread(places.flatten(), padded.numel())
            return replace(self, input_ids=padded, routing=routing)
        lengths = self.packing.boundaries.diff().cpu().numpy()
        padding = -lengths % sample_multiple
        missing = -int((lengths + padding).sum()) % multiple
        shifts = np.repeat(np.cumsum(padding) - padding, lengths)
        places = torch.from_numpy(np.arange(len(shifts)) + shifts).to(ids.device)
        row = ids.new_zeros(1, ids.shape[1] + int(padding.sum()) + missing)
        row[:, places] = ids
        packing = Packing.of([*(lengths + padding), missing], ids.device)
        routing = None if routing is None else routing.spread(places, row.numel())
        return replace(self, input_ids=row, positions=places[self.positions], packing=packing, routing=routing)


def build_micro_batch(
    batch: SampleBatch,
    rows: Sequence[int],
    wanted: np.ndarray,
    field_names: Sequence[str],
    device: torch.device,
    sample_fields: Sequence[str] = (),
    packed: bool = False,
) -> MicroBatch:
    """Pad or pack the samples ``rows`` of the batch, and align all fields with the logits.

    ``wanted``, bool ``[total_tokens]``, marks the tokens whose log-probabilities are needed (never a sample's first
    token, which no logit predicts). Only the range of positions with a wanted target is kept. If ``rows`` is empty,
    returns a dummy micro-batch: one row of two tokens, with no wanted target.
    """
    routed = [ROUTED] if ROUTED in batch.tokens else []
    needed = {name: batch.tokens[name] for name in ("token_ids", *field_names, *routed)} | {"wanted": wanted}
    of_pictures = [name for name in PICTURE_FIELDS if name in batch.per_sample]
    of_prompts = batch.per_sample.get(PROMPT_PICTURES)
    per_sample = {name: batch.per_sample[name] for name in (*sample_fields, *of_pictures)}
    whole = SampleBatch(batch.lengths, needed, per_sample)
    part = whole.select(rows) if rows else _stand_in(whole)
    width = max(2, int(part.lengths.max()))
    mask = part.padded("wanted", False, width)[:, 1:]
    columns = np.flatnonzero(mask.any(axis=0))
    # Without a wanted token the first column is kept: the backward pass needs a graph.
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
        routing=_routing(part, device, width, rows) if routed else None,
        prompt_pictures=None if of_prompts is None else [of_prompts[row] for row in rows] or [()],
    )


def _routing(part: SampleBatch, device: torch.device, width: int | None, rows: Sequence[int]) -> Routing:
    """Return the recorded experts of all tokens of a micro-batch. ``width``: that of padded rows; None: packed."""
    # Nothing is recorded of a sample's last token, nor of a dummy's.
    known = np.full(int(part.lengths.sum()), bool(rows))
    known[part.offsets[1:][part.lengths > 0] - 1] = False
    experts = part.tokens[ROUTED]
    if width is not None:
        flat = SampleBatch(part.lengths, {ROUTED: experts, "known": known})
        experts, known = flat.padded(ROUTED, 0, width), flat.padded("known", False, width)
        experts, known = experts.reshape(-1, *experts.shape[2:]), known.ravel()
    return Routing(torch.from_numpy(experts).to(device), torch.from_numpy(known).to(device))


def _packed(
    part: SampleBatch, mask: Tensor, fields: dict[str, Tensor], device: torch.device, rows: Sequence[int]
) -> MicroBatch:
    """Build a packed micro-batch. ``mask`` and ``fields`` have one row per sample; the true entries of ``mask``, row by
    row, are the wanted tokens in order."""
    ids, lengths = part.tokens["token_ids"].astype(np.int64), part.lengths
    routing = _routing(part, device, None, rows) if ROUTED in part.tokens else None
    if not len(ids):
        ids, lengths, routing = np.zeros(2, dtype=np.int64), np.array([2]), None
    targets = np.flatnonzero(part.tokens["wanted"])
    if not len(targets):
        # The backward pass needs a graph; `by_sample` leaves this result out.
        targets = np.array([len(ids) - 1])
    return MicroBatch(
        input_ids=torch.from_numpy(ids)[None].to(device),
        positions=torch.from_numpy(np.maximum(targets - 1, 0)).to(device),
        targets=torch.from_numpy(ids[targets])[None].to(device),
        mask=mask,
        fields=fields,
        packing=Packing.of(lengths, device),
        rows=rows,
        routing=routing,
    )


def predicted_tokens(batch: SampleBatch) -> np.ndarray:
    """Return bool ``[total_tokens]``: True for every token except the first of each sample."""
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
    """Run ``compute`` over micro-batches of the given rows, and return its results in the token order of the batch.

    ``compute`` yields a tensor ``[rows, kept]`` per micro-batch: one value per target. Returns float32
    ``[total_tokens]``, without gradients; 0 at the first token of each sample and in samples that are not in ``rows``.
    """
    wanted = predicted_tokens(batch)
    micro_batches = (build_micro_batch(batch, part, wanted, (), device, packed=packed) for part in rows)
    found, offsets = np.zeros(len(wanted), dtype=np.float32), batch.offsets
    with torch.no_grad():
        # A pipeline stage without logits yields no results, hence strict=False.
        for part, results in zip(rows, compute(micro_batches), strict=False):
            for row, values in zip(part, results.cpu().numpy(), strict=bool(part)):  # a dummy has no row here
                # All tokens but the first are targets, and padding is on the right.
                found[offsets[row] + 1 : offsets[row + 1]] = values[: max(0, batch.lengths[row] - 1)]
    return found


def _stand_in(batch: SampleBatch) -> SampleBatch:
    """Return a dummy batch with the same fields: one sample of two tokens, all zeros."""
    return SampleBatch(
        lengths=np.array([2], dtype=np.int64),
        tokens={name: np.zeros((2, *values.shape[1:]), dtype=values.dtype) for name, values in batch.tokens.items()},
        per_sample={
            name: np.zeros((1, *values.shape[1:]), dtype=values.dtype) for name, values in batch.per_sample.items()
        },
    )


Objective = PolicyObjective | ValueObjective | SupervisedObjective


@dataclass(frozen=True)
class TrainingStep:
    """An objective and the batch that it is computed on, for one optimizer step."""

    batch: SampleBatch
    objective: Objective
    fields: list[str]
    """Names of the per-token fields to include in micro-batches."""
    wanted: np.ndarray
    """bool ``[total_tokens]``: response tokens, except a sample's first token, which no logit predicts."""
    normalizers: LossNormalizers
    is_empty: bool
    """True if no token is left to train on. An update would then apply momentum and weight decay only."""
    first_logprobs: np.ndarray | None = None
    """float32 ``[total_tokens]``: output buffer for the log-probabilities of this rank's response tokens (0 elsewhere),
    if the objective is one-pass (uses them as the proximal ones); otherwise None."""
    is_first: bool = True
    """False if earlier parts of the batch have been accumulated already."""
    is_last: bool = True
    """False if more parts of the batch follow."""
    magnitude: float = 1.0
    """How many times larger than a mean the loss may be: of a part, which is a sum, the divisor that would make it a
    mean."""

    @classmethod
    def of(cls, batch: SampleBatch, objective: Objective, is_part: bool = False) -> TrainingStep:
        """Return the step that trains on the batch's response tokens, restricted to its ``loss_mask`` if it has one.

        ``is_part``: the batch is part of a larger one whose totals are not known yet, so losses are sums instead of
        means. Raises ``ValueError`` if the batch lacks a field.
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
        is_empty, magnitude = normalizers.tokens == 0, 1.0
        if is_part:
            divisor = normalizers.tokens if objective.loss_agg_mode == "token-mean" else normalizers.sequences
            magnitude = float(divisor)
            normalizers = LossNormalizers.unknown(normalizers.max_response_length)
        one_pass = isinstance(objective, PolicyObjective) and objective.one_pass
        first_logprobs = np.zeros(len(wanted), np.float32) if one_pass else None
        return cls(batch, objective, fields, wanted, normalizers, is_empty, first_logprobs, magnitude=magnitude)

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the entropy is part of the loss, not only a metric. False for a value model."""
        return isinstance(self.objective, PolicyObjective) and self.objective.needs_entropy_gradient

    def micro_batches(
        self, rows: Sequence[Sequence[int]], device: torch.device, packed: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield a micro-batch for each list of rows, built lazily."""
        for part in rows:
            yield build_micro_batch(
                self.batch, part, self.wanted, self.fields, device, self.objective.sample_fields, packed
            )

    def loss(self, micro_batch: MicroBatch, *outputs: Tensor) -> tuple[Tensor, PartMetrics]:
        """Return a micro-batch's contribution to the loss of the batch (0-d, with gradient) and to its metrics.

        ``outputs`` are the model's results per target, ``[rows, kept]``: (values,) or (log-probabilities, entropies),
        and of an image model with a reference its KL divergences.
        """
        fields = micro_batch.fields
        if isinstance(self.objective, ValueObjective):
            (values,) = outputs
            return self.objective(values, micro_batch.mask, self.normalizers, fields, fields.get("loss_mask"))
        logprobs, entropy, *divergences = outputs
        if divergences:
            fields = {**fields, "reference_kl": divergences[0]}
        if self.first_logprobs is not None:
            starts, ends = self.batch.offsets[:-1], self.batch.offsets[1:]
            spans = [starts[row] + np.flatnonzero(self.wanted[starts[row] : ends[row]]) for row in micro_batch.rows]
            places = np.concatenate([np.zeros(0, dtype=np.int64), *spans])
            self.first_logprobs[places] = logprobs.detach()[micro_batch.mask].float().cpu().numpy()
        return self.objective(logprobs, entropy, micro_batch.mask, self.normalizers, fields, fields.get("loss_mask"))


def combined_metrics(parts: Sequence[PartMetrics], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Return the batch's metrics, combined over the ranks of ``group``, which split the batch (default: all ranks).
    Collective."""
    return parts[0].from_vectors(*_combined(parts, group))


def combined_sums(
    parts: Sequence[PartMetrics], objective: Objective, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, float], float]:
    """Return `combined_metrics` of a batch whose losses are sums, and the divisor that makes them means. Collective.

    The divisor is the number of trained tokens or sequences, depending on the loss aggregation; 0 if there are none.
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
