"""Parts of a picture run that wait without computing, as if a device computed: the engine, the trainer, a reward.

Named in configurations as `_waiting_pictures:Name`, the engine as `strategy_cls`; this folder must be importable.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from PIL.Image import Image

from roll.data.records import SampleBatch
from roll.engines.pictures import DiffusersInferStrategy
from roll.trainers.step import Objective
from roll.trainers.worker import TrainPlan, TrainWorker

STEP_SECONDS = 0.1
"""Wait of one denoising step of all the pictures that are drawn at a time."""
TRAIN_SECONDS = 7.0
"""Wait of one training step."""
JUDGE_SECONDS = 0.11
"""Wait of one picture's reward. Pictures are judged one at a time."""

_judge = asyncio.Lock()
_arrived = 0


class WaitingSampler(DiffusersInferStrategy):
    """The engine, with a wait after each denoising step."""

    def _build_engine(self) -> Any:
        engine = super()._build_engine()
        step = engine.step

        def waiting_step(admit: bool = True) -> None:
            before = engine.generated_tokens
            step(admit)
            if engine.generated_tokens > before:
                time.sleep(STEP_SECONDS)

        engine.step = waiting_step
        return engine


class WaitingTrainer(TrainWorker):
    """The trainer, with a wait after each training step."""

    async def train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        """Train, and wait."""
        metrics = await super().train(batch, objective, plan)
        await asyncio.sleep(TRAIN_SECONDS)
        return metrics


async def brightness(image: Image, together: int = 1) -> float:
    """Return the mean of a picture's pixels, from 0 to 1, after a wait.

    No picture is judged before ``together`` pictures are there: with 1 each is when it comes, with the number of
    pictures of a training step all are after the last one was drawn. One process has to judge all pictures of a run.
    """
    global _arrived
    last = (_arrived // together + 1) * together
    _arrived += 1
    while _arrived < last:
        await asyncio.sleep(0.005)
    async with _judge:
        await asyncio.sleep(JUDGE_SECONDS)
    return float(np.asarray(image).mean()) / 255
