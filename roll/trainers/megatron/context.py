"""Context parallelism: each rank of a group computes two chunks of every row, in megatron-core's order.

A row, or each sample of a packed row, has two chunks per rank. Rank r computes chunk r from the start and chunk r from
the end, so that causal attention costs all ranks the same. Transformer Engine's attention exchanges keys and values
between the ranks. Results of all positions are gathered, so each rank computes the loss of whole rows, and its backward
pass begins with the gradient of its own positions. The sum of gradients over all ranks is therefore the gradient of the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from roll.trainers.context_parallel import gather_results
from roll.trainers.step import MicroBatch


def own_input(micro_batch: MicroBatch, group: dist.ProcessGroup) -> Tensor:
    """Return the token ids at the positions that this rank computes, int64 ``[rows, width / ranks]``.

    The width, and the length of each sample of a packed row, must be a multiple of twice the number of ranks."""
    return micro_batch.input_ids[:, own_positions(micro_batch, group)]


def own_positions(micro_batch: MicroBatch, group: dist.ProcessGroup) -> Tensor | slice:
    """Return the positions that this rank computes: all, or int64 ``[width / ranks]``."""
    return slice(None) if group.size() == 1 else shared_positions(micro_batch, group.size())[group.rank()]


def shared_positions(micro_batch: MicroBatch, ranks: int) -> Tensor:
    """Return the positions that each rank computes, int64 ``[ranks, width / ranks]``."""
    ids, packing = micro_batch.input_ids, micro_batch.packing
    ends = [0, ids.shape[1]] if packing is None else packing.boundaries.tolist()
    samples = [torch.arange(start, end).view(2 * ranks, -1) for start, end in pairwise(ends)]
    parts = [part for chunks in samples for part in (chunks[:ranks], chunks[ranks:].flip(0))]
    return torch.cat(parts, dim=1).to(ids.device)


@dataclass(frozen=True)
class OwnTargets:
    """The targets of a micro-batch that this rank predicts. All ranks have equally many; surplus ones repeat."""

    positions: Tensor
    """int64 ``[own]``: their places among the positions that this rank computes."""
    targets: Tensor
    """int64 ``[rows, own]``: token ids to predict."""
    places: Tensor | None
    """int64 ``[kept]``: place of each target of the micro-batch in the ranks' joined results. None: no other rank."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, micro_batch: MicroBatch, group: dist.ProcessGroup) -> OwnTargets:
        """Return this rank's targets. The width must be a multiple as for `own_input`."""
        ranks = group.size()
        if ranks == 1:
            return cls(micro_batch.positions, micro_batch.targets, None, group)
        kept = micro_batch.positions
        everyones = shared_positions(micro_batch, ranks)
        width = everyones.shape[1]
        order = everyones.flatten().argsort()[kept]  # place of each kept position in the ranks' joined positions
        owners, local = order // width, order % width
        found = [torch.nonzero(owners == rank)[:, 0] for rank in range(ranks)]
        most = max(map(len, found))
        places = torch.empty_like(kept)
        for rank, indices in enumerate(found):
            places[indices] = rank * most + torch.arange(len(indices), device=kept.device)
        mine = found[group.rank()]
        mine = torch.cat([mine, mine.new_zeros(most - len(mine))])
        # A surplus target is the first one of the micro-batch, at any position: its result is not used.
        return cls(local[mine], micro_batch.targets[:, mine], places, group)

    def gathered(self, results: Tensor) -> Tensor:
        """Return the results of all targets, ``[rows, kept]``, from those of each rank, ``[rows, own]``. Collective."""
        if self.places is None:
            return results
        return gather_results(results, self.group).movedim(0, 1).flatten(1)[:, self.places]
