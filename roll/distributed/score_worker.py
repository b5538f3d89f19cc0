"""The process of one copy of a reward model."""

from __future__ import annotations

from collections.abc import Sequence

from roll.distributed.worker import Worker
from roll.strategies.score import build_score_strategy
from roll.strategies.score.base import Conversation, Scored, ScorerSetup, ScoreStrategy


class ScoreWorker(Worker):
    """Worker of one copy of a reward model: runs a `ScoreStrategy`."""

    _strategy: ScoreStrategy

    async def start(self, strategy_name: str, setup: ScorerSetup, strategy_cls: str | None = None) -> None:
        """Load the model."""
        await self.in_thread(self._start, strategy_name, setup, strategy_cls)

    def _start(self, strategy_name: str, setup: ScorerSetup, strategy_cls: str | None) -> None:
        self.set_threads()
        self._strategy = build_score_strategy(strategy_name, setup, strategy_cls)

    async def score(self, conversations: Sequence[Conversation]) -> list[Scored]:
        """Return the scores in the order of the conversations."""
        return await self.in_thread(self._strategy.score, conversations)

    async def offload_states(self) -> None:
        """Move the device's tensors to host memory."""
        await self.in_thread(self._strategy.offload_states)

    async def load_states(self) -> None:
        """Undo `offload_states`."""
        await self.in_thread(self._strategy.load_states)
