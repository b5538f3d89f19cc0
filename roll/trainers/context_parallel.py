"""Context parallelism of `fsdp2_train`: ranks of a group split the positions of every row (Ulysses, arXiv 2309.14509).

All ranks of a context group take the same micro-batch, and each computes on its slice of the positions. Attention needs
whole rows, so before it an all-to-all gives each rank all positions of its share of the heads, and another one
afterwards gives its positions of all heads back. The results of the head are gathered, so each rank of the group
computes the same loss of whole rows, and its backward pass begins with the gradient of its own slice. Summing gradients
over all ranks therefore gives the gradient of the batch, as without context groups.

Before training, the model is tested: does it give the results of whole rows when it is split? If not, it is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from roll.trainers.model import HfForward
from roll.trainers.packing import (
    COARSE_TOLERANCE,
    KNOWN_LAYERS,
    TOLERANCES,
    batch_dependent_positions,
    hidden_states,
    packed_eager,
    packed_sdpa,
    relative_difference,
)
from roll.trainers.step import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.trainers.base import TrainerSetup

ULYSSES = "roll_ulysses"
"""Name under which the attention of context groups is registered with transformers."""
INNER = {"sdpa": packed_sdpa, "eager": packed_eager}
"""``attn_implementation`` -> attention over the whole rows of a share of the heads."""


@dataclass(frozen=True)
class ContextGroup:
    """The place of a rank in a mesh of data-parallel ranks x context ranks."""

    size: int
    rank: int
    group: dist.ProcessGroup
    """Ranks that split the positions of the same rows."""
    data: dist.ProcessGroup
    """Ranks that have the same slice of different rows."""

    @classmethod
    def join(cls, device: str, world_size: int, size: int) -> ContextGroup:
        """Form groups of adjacent ranks. Collective. Raises ``ValueError`` if ``size`` does not divide the ranks."""
        if world_size % size:
            raise ValueError(f"context_parallel_size is {size}, which does not divide {world_size} ranks")
        mesh = init_device_mesh(device, (world_size // size, size), mesh_dim_names=("data", "context"))
        return cls(size, mesh.get_local_rank("context"), mesh.get_group("context"), mesh.get_group("data"))

    def slice_of(self, micro_batch: MicroBatch) -> ContextSlice:
        """Return this rank's slice of a micro-batch, whose rows are padded to a multiple of the group's size."""
        whole = micro_batch.widened(self.size)
        rows, width = whole.input_ids.shape
        own = width // self.size
        first = self.rank * own
        device, packing = whole.input_ids.device, whole.packing
        positions = torch.arange(width, device=device)[None] if packing is None else packing.position_ids
        owners = (micro_batch.positions // own).cpu()
        counts = torch.bincount(owners, minlength=self.size).tolist()
        begin = sum(counts[: self.rank])
        mine = slice(begin, begin + counts[self.rank])
        routing = whole.routing
        if routing is not None:
            places = torch.arange(rows * width, device=device).view(rows, width)[:, first : first + own]
            routing = routing.at(places.flatten())
        # All ranks compute equally many results; those that fill up are not gathered.
        filler = max(counts) - counts[self.rank]
        return ContextSlice(
            input_ids=whole.input_ids[:, first : first + own],
            positions=functional.pad(micro_batch.positions[mine] - first, (0, filler)),
            targets=functional.pad(micro_batch.targets[:, mine], (0, filler)),
            mask=micro_batch.mask,
            fields=micro_batch.fields,
            packing=packing,
            rows=micro_batch.rows,
            routing=routing,
            position_ids=positions[:, first : first + own].expand(rows, own),
            counts=counts,
        )

    def gathered(self, values: Tensor, counts: list[int]) -> Tensor:
        """Return the results of all slices, ``[rows, sum of counts]``, from those of each rank, ``[rows, largest]``."""
        parts = gather_results(values, self.group)
        return torch.cat([part[:, :count] for part, count in zip(parts.unbind(), counts, strict=True)], dim=1)


@dataclass(frozen=True, kw_only=True)
class ContextSlice(MicroBatch):
    """A rank's slice of the positions of a micro-batch. `packing` has the boundaries in whole rows."""

    position_ids: Tensor
    """int64 ``[rows, own width]``: positions within the samples."""
    counts: list[int]
    """Number of wanted positions in each rank's slice."""

    def model_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for a transformers model."""
        return {**super().model_arguments(), "position_ids": self.position_ids}

    def by_sample(self, values: Tensor) -> Tensor:
        """Return the values as they are: only those of whole rows can be put back into samples."""
        return values


class ContextForward(HfForward):
    """Forward pass with rows split over a context group. Every rank returns the results of whole rows."""

    def __init__(self, context: ContextGroup, *arguments: Any, **settings: Any) -> None:
        self.context = context
        super().__init__(*arguments, **settings)

    def outputs(self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, ...]:
        own = self.context.slice_of(micro_batch)
        if self.kind == "value":
            return (self._whole(micro_batch, own, super().values(own)),)
        results = super().outputs(own, temperature, entropy_gradient)
        return tuple(self._whole(micro_batch, own, values) for values in results)

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        own = self.context.slice_of(micro_batch)
        return self._whole(micro_batch, own, super().logprobs(own, temperature))

    def values(self, micro_batch: MicroBatch) -> Tensor:
        own = self.context.slice_of(micro_batch)
        return self._whole(micro_batch, own, super().values(own))

    def routing_counts(self) -> np.ndarray:
        counts = torch.from_numpy(super().routing_counts())
        dist.all_reduce(counts, group=self.context.group)
        return counts.numpy()

    def _whole(self, micro_batch: MicroBatch, own: ContextSlice, values: Tensor) -> Tensor:
        return micro_batch.by_sample(self.context.gathered(values, own.counts))


class _AllToAll(torch.autograd.Function):
    """Send block i of the first dimension to rank i of the group. The gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def gather_results(results: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the results of all ranks of the group, ``[ranks, *results]``. Collective.

    Every rank computes the same loss from them, so the gradient of its own results is enough."""
    gathered: Tensor = _Gather.apply(results, group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank = group.rank()
        parts = [torch.empty_like(results, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, results.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.rank], None


def ulysses(context: ContextGroup, inner: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function for transformers: ``inner`` over whole rows, on a share of the heads."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        def whole_rows(tensor: Tensor) -> Tensor:
            # [rows, heads, own, size] -> [ranks, rows, heads of one rank, own, size] -> [rows, own heads, width, size]
            blocks = tensor.unflatten(1, (context.size, -1)).movedim(1, 0)
            return _AllToAll.apply(blocks, context.group).movedim(0, 2).flatten(2, 3)

        attended, _ = inner(module, *map(whole_rows, (query, key, value)), attention_mask, **settings)
        # [rows, width, own heads, size] -> [ranks, rows, own, own heads, size] -> [rows, own, heads, size]
        blocks = attended.unflatten(1, (context.size, -1)).movedim(1, 0)
        return _AllToAll.apply(blocks, context.group).movedim(0, 2).flatten(2, 3), None

    return attend


def install_context_parallel(model: PreTrainedModel, setup: TrainerSetup, context: ContextGroup) -> None:
    """Let the model attend across its context group. Collective. Raises ``ValueError`` if it cannot be split.

    The model must be unsharded, on the CPU and without dropout. It is run on a few tokens as a test.
    """
    from transformers import AttentionInterface

    chosen = setup.model_args.attn_implementation
    if chosen not in INNER:
        raise _refusal(model, f"attn_implementation {chosen!r} does not take split rows; write 'sdpa'")
    text = model.config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS
    if unknown:
        raise _refusal(model, f"layers of the kind {', '.join(sorted(unknown))} need whole rows")
    if batch_dependent_positions(text.to_dict()):
        raise _refusal(model, "its positions depend on the longest position of a pass")
    width = 2 * context.size + 1
    # These ids exist in any vocabulary.
    ids = torch.arange(width)[None] * 5 % min(text.vocab_size, 1000)
    whole = MicroBatch(ids, torch.arange(width), ids, torch.ones(1, width, dtype=torch.bool), {})
    expected = hidden_states(model, **whole.model_arguments())
    AttentionInterface.register(ULYSSES, torch.compiler.disable(ulysses(context, INNER[chosen])))
    model.set_attn_implementation(ULYSSES)
    own = context.slice_of(whole)
    try:
        found = hidden_states(model, **own.model_arguments())
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refusal(model, f"it fails on split rows ({error})") from error
    first = context.rank * own.input_ids.shape[1]
    expected = expected[:, first : first + found.shape[1]]
    difference = relative_difference(found[:, : expected.shape[1]], expected)
    if not difference <= TOLERANCES.get(model.dtype, COARSE_TOLERANCE):
        raise _refusal(model, f"its results change in split rows (by {difference:.1g}, relative)")


def _refusal(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        f"context_parallel_size: {type(model).__name__} cannot be split by position: {reason}; "
        "write `context_parallel_size: 1`"
    )
