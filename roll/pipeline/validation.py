"""Validation: a fixed set of prompts, one pinned policy version, a budget of its own.

It runs inside the stage that publishes weights, so no newer version can arrive before it ends.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.agentic.episode import Episode
from roll.data.records import Group, Prompt
from roll.pipeline.rollout_function import RolloutFunction


@dataclass
class ValidationResult:
    """Metrics of a validation by name, and the groups behind them."""

    version: int
    metrics: dict[str, float]
    groups: list[Group]
    episodes: Sequence[Episode] = ()
    """All episodes that were played, if the validation set is one of environments."""


class MixedVersions(AssertionError):
    """A validation saw tokens of a version other than the one it measures."""


def check_versions(groups: Sequence[Group], version: int) -> None:
    """Raise `MixedVersions` unless every sampled token is of this version."""
    for group in groups:
        for sample in group.samples:
            seen = set(np.unique(sample.versions[sample.response_mask]).tolist())
            if seen - {version}:
                raise MixedVersions(f"validation of version {version} saw tokens of versions {sorted(seen)}")


class PromptValidator:
    """Runs a validation set of prompts."""

    def __init__(
        self, prompts: Sequence[Prompt], rollout: RolloutFunction, *, batch_size: int, timeout_seconds: float
    ) -> None:
        self._prompts = prompts
        self._rollout = rollout
        self._prompts_at_once = max(1, batch_size // rollout.samples_per_group)
        self._timeout_seconds = timeout_seconds

    async def run(self, version: int) -> ValidationResult:
        """Generate and judge every prompt.

        Raises `TimeoutError` at the deadline and `MixedVersions` if the weights changed meanwhile.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                groups = await self._run_all()
        except TimeoutError:
            raise TimeoutError(
                f"validation of version {version} did not end within {self._timeout_seconds:g} s "
                "(validation.timeout_seconds)"
            ) from None
        check_versions(groups, version)
        return ValidationResult(version, self._metrics(groups), groups)

    async def _run_all(self) -> list[Group]:
        slots = asyncio.Semaphore(self._prompts_at_once)

        async def one(index: int, prompt: Prompt) -> Group:
            async with slots:
                return await self._rollout(index, prompt)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(index, prompt)) for index, prompt in enumerate(self._prompts)]
        return [task.result() for task in running]

    def _metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        by_domain: dict[str, list[Group]] = defaultdict(list)
        for group in groups:
            by_domain[group.prompt.domain].append(group)
        metrics: dict[str, float] = {}
        for domain, members in sorted(by_domain.items()):
            samples = [sample for group in members for sample in group.samples]
            metrics[f"val/{domain}/accuracy"] = float(np.mean([sample.score for sample in samples]))
            metrics[f"val/{domain}/best_of_group"] = float(np.mean([group.scores.max() for group in members]))
            metrics[f"val/{domain}/response_length"] = float(np.mean([sample.response_tokens for sample in samples]))
        return metrics
