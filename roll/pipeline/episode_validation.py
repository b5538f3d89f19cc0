"""Validation in environments: a fixed set of seeds, one pinned policy version.

It runs inside the stage that publishes weights, so no newer version can arrive before it ends. A group whose
environments keep failing is left out, counted and reported. If no group is left, the validation fails.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roll.agentic.episode import Episode
from roll.pipeline.episodes import EpisodeRollout, EpisodesFailed, EpisodeTask, as_group
from roll.pipeline.validation import ValidationResult, check_versions


class EpisodeValidator:
    """Plays the validation set."""

    def __init__(
        self,
        tasks: Sequence[EpisodeTask],
        rollout: EpisodeRollout,
        *,
        attempts: int,
        timeout_seconds: float,
        on_event: Callable[[str], None],
    ) -> None:
        """Create the validator; ``attempts``: tries per group whose episodes fail."""
        self._tasks = tasks
        self._rollout = rollout
        self._attempts = attempts
        self._timeout_seconds = timeout_seconds
        self._on_event = on_event

    async def run(self, version: int) -> ValidationResult:
        """Play every group and measure the version.

        Raises `TimeoutError` at the deadline, `MixedVersions` if the weights changed meanwhile, and `EpisodesFailed` if
        no group could be played.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                played = await self._play_all()
        except TimeoutError:
            raise TimeoutError(
                f"validation of version {version} did not end within {self._timeout_seconds:g} s "
                "(validation.timeout_seconds)"
            ) from None
        groups = [as_group(index, self._tasks[index], episodes) for index, episodes in played.items()]
        check_versions(groups, version)
        episodes = [episode for group in played.values() for episode in group]
        return ValidationResult(version, self._metrics(played), groups, episodes)

    async def _play_all(self) -> dict[int, list[Episode]]:
        """Return the episodes of each group that could be played, by the group's position."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._play(index, task)) for index, task in enumerate(self._tasks)]
        outcomes = {index: task.result() for index, task in enumerate(running)}
        played = {index: outcome for index, outcome in outcomes.items() if isinstance(outcome, list)}
        failures = [outcome for outcome in outcomes.values() if isinstance(outcome, EpisodesFailed)]
        if failures:
            self._on_event(f"validation: {len(failures)} of {len(outcomes)} groups failed; the first: {failures[0]}")
        if not played:
            raise failures[0]
        return played

    async def _play(self, index: int, task: EpisodeTask) -> list[Episode] | EpisodesFailed:
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._rollout.play(index, task)
            except EpisodesFailed as failed:
                if attempt == self._attempts:
                    return failed
        raise AssertionError("a validation needs at least one attempt")

    def _metrics(self, played: Mapping[int, list[Episode]]) -> dict[str, float]:
        by_tag: dict[str, list[list[Episode]]] = defaultdict(list)
        for index, episodes in played.items():
            by_tag[self._tasks[index].tag].append(episodes)
        metrics: dict[str, float] = {}
        for tag, groups in sorted(by_tag.items()):
            episodes = [episode for group in groups for episode in group]
            asked = sum(task.tag == tag for task in self._tasks)
            metrics |= {f"val/{tag}/{name}": value for name, value in mean_metrics(episodes).items()}
            metrics |= {
                f"val/{tag}/score": float(np.mean([episode.score for episode in episodes])),
                f"val/{tag}/failed_groups": float(asked - len(groups)),
            }
            metrics |= {f"val/{tag}/{name}": value for name, value in success_metrics(groups).items()}
        return metrics


def success_metrics(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Return the share of successes and of groups with at least one; empty if the environments report no success."""
    said = [[each.success for each in group if each.success is not None] for group in groups]
    said = [group for group in said if group]
    if not said:
        return {}
    return {
        "accuracy": float(np.mean([success for group in said for success in group])),
        "best_of_group": float(np.mean([max(group) for group in said])),
    }


def mean_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean of each metric over the episodes that have it."""
    names = sorted({name for episode in episodes for name in episode.metrics})
    return {
        name: float(np.mean([episode.metrics[name] for episode in episodes if name in episode.metrics]))
        for name in names
    }
