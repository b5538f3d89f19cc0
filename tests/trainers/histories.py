"""What is done with a trainer to see whether its state is all there is of it: train, save, go on; restore, go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from roll.algorithms.objective import PolicyObjective
from roll.data.records import SampleBatch
from roll.trainers.state import SavedState, UnfitState, write_state
from roll.trainers.trainer import TrainStrategy
from tests.trainers.tiny_models import weights_of

History = tuple[list[dict[str, float]], dict[str, np.ndarray]]
"""Metrics of steps, and the weights after them."""


@dataclass(frozen=True)
class Histories:
    """Histories of trainers of one model; methods are work for `ranks.Job`."""

    make_batch: Callable[[int], SampleBatch]
    """By the number of the step."""
    objective: PolicyObjective

    def trained(self, trainer: TrainStrategy, steps: list[int]) -> History:
        metrics = [trainer.train_step(self.make_batch(step), self.objective, 0.9) for step in steps]
        return metrics, weights_of(trainer)

    def save_and_go_on(self, trainer: TrainStrategy, folder: str) -> History:
        """The state before the first update goes into ``folder/fresh``, that after two into ``folder``."""
        write_state(Path(folder, "fresh"), trainer.setup.rank, trainer.snapshot())
        self.trained(trainer, [0])
        self._skip_updates(trainer)
        self.trained(trainer, [1])
        snapshot = trainer.snapshot()
        results = self.trained(trainer, [2, 3])
        write_state(Path(folder), trainer.setup.rank, snapshot)
        return results

    def go_on(self, trainer: TrainStrategy, folder: str) -> History:
        """Where the state in the folder was taken."""
        trainer.restore(SavedState(Path(folder)))
        return self.trained(trainer, [2, 3])

    def _skip_updates(self, trainer: TrainStrategy) -> None:
        """Two steps whose gradients are not finite: the schedule goes on, the weights do not."""
        for value in (np.nan, np.inf):
            batch = self.make_batch(9)
            batch.tokens["advantages"][np.flatnonzero(batch.tokens["response_mask"])[3]] = value
            assert trainer.train_step(batch, self.objective, 0.9)["skipped_updates"] == 1.0


def refuse(trainer: TrainStrategy, folder: str) -> str:
    """Why the state in the folder is none of this trainer."""
    with pytest.raises(UnfitState) as refusal:
        trainer.restore(SavedState(Path(folder)))
    return str(refusal.value)


def assert_equal_to_the_bit(found: History, expected: History) -> None:
    (found_metrics, found_weights), (metrics, weights) = found, expected
    assert found_metrics == metrics
    assert found_weights.keys() == weights.keys()
    assert all(np.array_equal(found_weights[key], weight) for key, weight in weights.items())


def assert_alike(found: History, expected: History) -> None:
    """Float32, summed in another order: all within rounding."""
    _assert_metrics_alike(found, expected, rtol=1e-4)
    for key, weight in expected[1].items():
        np.testing.assert_allclose(found[1][key], weight, rtol=1e-4, atol=2e-5, err_msg=key)


def assert_alike_in_bfloat16(found: History, expected: History) -> None:
    """Single weights with small gradients go other ways; all together stay near. Two updates without the saved moments
    are 0.019 away."""
    _assert_metrics_alike(found, expected, rtol=5e-2)
    away = sum(np.square(found[1][key] - weight).sum() for key, weight in expected[1].items())
    assert away < 0.004**2 * sum(np.square(weight).sum() for weight in expected[1].values())


def _assert_metrics_alike(found: History, expected: History, rtol: float) -> None:
    for found_step, step in zip(found[0], expected[0], strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert found_step[key] == pytest.approx(step[key], rel=rtol), key
    assert found[1].keys() == expected[1].keys()
