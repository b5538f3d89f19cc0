"""Context parallelism: each rank of a group computes two chunks of every row, in megatron-core's order.

A row has two chunks per rank. Rank r computes chunk r from the start and chunk r from the end, so that causal attention
costs all ranks the same. Transformer Engine's attention exchanges keys and values between the ranks. Results of all
positions are gathered, so each rank computes the loss of whole rows, and its backward pass begins with the gradient of
its own positions. The sum of gradients over all ranks is therefore the gradient of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from roll.trainers.context_parallel import gather_results
from roll.trainers.step import MicroBatch


def own_positions(width: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the positions that this rank computes, int64 ``[width / ranks]``.

    ``width`` must be a multiple of twice the number of ranks."""
    return _positions_of(width, group.size(), device)[group.rank()]


def _positions_of(width: int, ranks: int, device: torch.device) -> Tensor:
    """Return the positions of all ranks, int64 ``[ranks, width / ranks]``."""
    chunks = torch.arange(width, device=device).view(2 * ranks, -1)
    return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], dim=1)


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
    def of(cls, micro_batch: MicroBatch, width: int, group: dist.ProcessGroup) -> OwnTargets:
        """Return this rank's targets. ``width`` is the number of positions that each rank computes."""
        ranks = group.size()
        if ranks == 1:
            return cls(micro_batch.positions, micro_batch.targets, None, group)
        kept = micro_batch.positions
        everyones = _positions_of(width * ranks, ranks, kept.device)
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
