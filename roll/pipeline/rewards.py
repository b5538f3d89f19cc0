"""The rewards of a run: verifiers and judges in processes without devices, reward models on the run's devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from roll.configs import derived
from roll.configs.device_mapping import parse_device_mapping
from roll.configs.schema import PipelineConfig, RewardConfig
from roll.distributed.group import WorkerHandle, start_worker
from roll.distributed.score_worker import ScoreWorker
from roll.distributed.scoring import ScorePool, ScoreSettings
from roll.pipeline.rollout_side import RunDevices
from roll.rewards.pool import RewardPool
from roll.rewards.records import RewardInput, RewardOutput
from roll.rewards.registry import route_domains
from roll.strategies.score.base import ScorerSetup
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import REWARD_MODEL, part, waiting

if TYPE_CHECKING:
    from roll.pipeline.preflight import Prepared


class Rewards:
    """All rewards of a run, by the domains they judge."""

    def __init__(self, routes: Mapping[str, str], verifiers: RewardPool, models: Mapping[str, ScorePool]) -> None:
        """Keep the pools. ``routes``: domain tag -> reward's name; ``models``: role -> pool of a reward model."""
        self._routes = routes
        self._verifiers = verifiers
        self._models = models

    async def start(self) -> None:
        """Start all processes. If one fails, `shutdown` ends those that have started."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._verifiers.start())
            for role, model in self._models.items():
                tasks.create_task(_start(role, model))

    async def score(self, domain: str, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Judge responses to prompts of one domain, usually those of one group; return the outputs in the same order.

        Raises `RewardFailed` if one of them cannot be judged.
        """
        name = self._routes[domain]
        model = self._models.get(f"{REWARD_MODEL}{name}")
        if model is not None:
            with waiting(f"{REWARD_MODEL}{name}", "scores"):
                return await model.score(records)
        with waiting(f"rewards/{name}", "a verdict"):
            return await self._verifiers.score(name, records)

    def handles(self) -> list[WorkerHandle]:
        """Return the current processes of reward models. The pool of the verifiers looks after its own."""
        return [handle for model in self._models.values() for handle in model.handles()]

    def metrics(self) -> dict[str, float]:
        """Return totals as ``rewards/<name>/<count>``: those of `ScoreCounts` (models) or `RewardCounts` (others)."""
        models = {role.removeprefix(REWARD_MODEL): asdict(model.counts) for role, model in self._models.items()}
        return {
            f"rewards/{reward}/{name}": float(value)
            for reward, counts in {**self._verifiers.counts(), **models}.items()
            for name, value in counts.items()
        }

    def busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """Return, by reward, the spans in which at least one of its processes worked; see `BusySpans`."""
        models = {role: model.busy.recent() for role, model in self._models.items()}
        return {**self._verifiers.busy_spans(), **models}

    async def shutdown(self) -> None:
        """End all processes."""
        await asyncio.gather(self._verifiers.shutdown(), *(model.shutdown() for model in self._models.values()))


async def _start(role: str, model: ScorePool) -> None:
    with part(role):
        await model.start()


def build_rewards(
    prepared: Prepared, run: RunDirectory, on_event: Callable[[str], None], devices: RunDevices
) -> Rewards:
    """Build the rewards that the configuration names. Starts nothing."""
    config = derived.rlvr(prepared.config)
    models = derived.reward_models(config)
    verifiers = {name: each for name, each in config.rewards.items() if f"{REWARD_MODEL}{name}" not in models}
    pools = {
        role: _score_pool(prepared, role, reward, str(run.logs.absolute()), on_event, devices)
        for role, reward in models.items()
    }
    return Rewards(route_domains(config.rewards), RewardPool(verifiers), pools)


def _score_pool(
    prepared: Prepared,
    role: str,
    reward: RewardConfig,
    log_dir: str,
    on_event: Callable[[str], None],
    devices: RunDevices,
) -> ScorePool:
    numbers = parse_device_mapping(reward.device_mapping)
    worker_class = prepared.worker_classes.get(role, ScoreWorker)

    def start(index: int) -> WorkerHandle:
        return start_worker(
            worker_class,
            devices.placement,
            role=role,
            rank=index,
            world_size=len(numbers),
            devices=[numbers[index]],
            log_dir=log_dir,
        )

    settings = score_settings(prepared.config, reward)
    return ScorePool(role, start, len(numbers), settings, devices.locks[role], on_event)


def score_settings(config: PipelineConfig, reward: RewardConfig) -> ScoreSettings:
    """Return the settings of a reward model from the configuration."""
    return ScoreSettings(
        strategy_name=reward.strategy_args.strategy_name,
        setup=ScorerSetup(
            model_path=derived.reward_model_path(config, reward),
            model_args=reward.model_args,
            config=reward.reward_model,
            batch_size=reward.infer_batch_size,
            device=config.cluster.device,
        ),
        wait_seconds=derived.batch_wait_seconds(config, reward),
        call_timeout_seconds=derived.reward_timeout(reward),
        start_timeout_seconds=config.cluster.worker_start_timeout_seconds,
        max_retries=reward.max_retries,
        strategy_cls=reward.strategy_args.strategy_cls,
    )
