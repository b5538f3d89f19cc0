"""Router replay in megatron-core: routers send tokens to the experts that the engine chose.

A router of megatron-core asks the object in its attribute ``router_replay`` for its choice. `ReplayedChoice` takes that
place in each router, and answers with the experts recorded for the micro-batch that is being computed. The routers of a
rank see the positions that it computes one after the other, each with all rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn

from roll.algorithms.routing import Routing
from roll.trainers.megatron.context import own_positions
from roll.trainers.step import MicroBatch


class ExpertReplay:
    """Recorded experts of the micro-batches of one trainer, for the routers of this rank."""

    def __init__(self, chunks: Sequence[nn.Module], device: torch.device, *, splits_positions: bool) -> None:
        """Set the choices of all routers. ``splits_positions``: tensor-parallel ranks route different positions."""
        self._splits_positions = splits_positions
        self._routing: Routing | None = None
        self._in_forward = self._learns = False
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        routers = [each for chunk in chunks for each in chunk.modules() if isinstance(each, TopKRouter)]
        self._choices = [ReplayedChoice(self, router.layer_number - 1) for router in routers]
        for router, choice in zip(routers, self._choices, strict=True):
            router.router_replay = choice

    def begin(self, *, learns: bool) -> None:
        """Begin to run micro-batches. ``learns``: with a backward pass, in which layers may be recomputed."""
        self._learns = learns
        for choice in self._choices:
            choice.to_recompute.clear()

    @contextmanager
    def forward(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Use the experts recorded for a micro-batch in its forward pass, which is within the block."""
        self._routing, self._in_forward = self._own(micro_batch), True
        try:
            yield
        finally:
            self._routing, self._in_forward = None, False

    def take_counts(self) -> np.ndarray:
        """Return and reset this rank's counts, as `roll.algorithms.routing.RouterReplay.take_counts` does."""
        counts = self._counts.cpu().numpy().copy()
        self._counts.zero_()
        return counts

    def routing_for(self, choice: ReplayedChoice) -> Routing | None:
        """Return the recorded experts of the tokens that a router chooses for now; None: it chooses by itself."""
        if not self._in_forward:
            # A recomputation. Each router's micro-batches go backward in the order in which they went forward.
            return choice.to_recompute.popleft()
        if self._learns and not torch.is_grad_enabled():
            choice.to_recompute.append(self._routing)
        return self._routing

    def count(self, differing: Tensor, routing: Routing) -> None:
        """Count a forward pass of a layer in training. ``differing``, bool ``[tokens]``: other experts than its own."""
        if self._learns and self._in_forward:
            self._counts += torch.stack([(differing & routing.known).sum(), routing.known.sum()])

    def _own(self, micro_batch: MicroBatch) -> Routing | None:
        """Return the recorded experts of the tokens in the order in which this rank's routers see them."""
        if micro_batch.routing is None:
            return None
        ids = micro_batch.input_ids
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        places = places[:, own_positions(micro_batch, parallel_state.get_context_parallel_group())].t()
        if self._splits_positions:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            places = places.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return micro_batch.routing.at(places.flatten())


class ReplayedChoice(RouterReplay):
    """The experts that one router sends tokens to: recorded ones where there are some, else those of its own choice."""

    def __init__(self, replay: ExpertReplay, layer: int) -> None:
        # The initialiser of the base would keep each instance in a list of the process.
        self._replay, self._layer = replay, layer
        self.to_recompute: deque[Routing | None] = deque()
        """Experts of micro-batches whose forward pass is to be computed again, the next one first."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the numbers of each token's experts, ``[tokens, topk]`` each."""
        compute: Any = default_compute_topk
        values, own = compute(scores, topk, num_groups, group_topk)
        routing = self._replay.routing_for(self)
        if routing is None:
            return values, own
        recorded = routing.experts[:, self._layer].long()
        if len(recorded) != len(scores):
            raise RuntimeError(f"experts of {len(recorded)} tokens are recorded; a router chooses for {len(scores)}")
        self._replay.count((own.sort(dim=-1).values != recorded.sort(dim=-1).values).any(dim=-1), routing)
        experts = torch.where(routing.known[:, None], recorded, own)
        return scores.gather(1, experts), experts
