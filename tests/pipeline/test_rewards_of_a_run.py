"""Domains find their rewards, and what waits for a reward model is known; the model's processes are simulated."""

from __future__ import annotations

import asyncio

import pytest

from roll.configs.rewards import RewardConfig, RewardModelConfig
from roll.configs.roles import ModelArguments
from roll.doctor.diagnosis import wait_graph
from roll.pipeline.rlvr import Rewards
from roll.rewards.base import RewardInput
from roll.rewards.model import ScorerSetup
from roll.rewards.model_pool import ScorePool, ScoreSettings
from roll.rewards.pool import RewardPool
from roll.runtime.locks import DeviceLock
from roll.tracking.status import DriverStatus, RunStatus
from roll.tracking.waits import START, WaitBoard, acting, part
from tests.rewards.test_scoring import ROLE, Machine, group, scores


def status_of(board: WaitBoard) -> RunStatus:
    """As long after the waits began that they count."""
    waits, holdings = tuple(board.waits()), tuple(board.holdings())
    return RunStatus(DriverStatus(1, "host", 5), "running", 0, 10, 0, 100.0, waits=waits, holdings=holdings)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def lock() -> DeviceLock:
    return DeviceLock([ROLE, "actor_train"])


@pytest.fixture
def rewards(machine: Machine, lock: DeviceLock) -> Rewards:
    setup = ScorerSetup("model", ModelArguments(), RewardModelConfig(), 4, "cpu")
    settings = ScoreSettings(RewardConfig(verifier="reward_model", timeout_seconds=1.0), setup, 0, 1.0)
    model = ScorePool(ROLE, machine.start, 1, settings, lock, lambda event: None)
    return Rewards({"talk": "chat", "chat": "chat"}, {"chat": model})


def test_a_domain_is_judged_by_the_model_of_its_reward_which_counts(rewards, machine):
    async def scenario():
        await rewards.start()
        answers = [scores(await rewards.score(domain, group("ab", "abc"))) for domain in ("chat", "talk")]
        assert rewards.handles() == machine.processes
        await rewards.shutdown()
        return answers, rewards.metrics()

    answers, metrics = asyncio.run(scenario())
    assert answers == [[2, 3], [2, 3]]
    assert metrics == {f"rewards/chat/{name}": value for name, value in
                       {"samples": 4, "calls": 2, "restarts": 0, "truncated": 0}.items()}  # fmt: skip


@pytest.mark.tier("all")
def test_each_domain_is_judged_by_the_verifier_of_its_reward(local_ray):
    verifiers = {"exact": "exact", "length": "tests.rewards.sample_verifiers:length"}
    pools = {name: RewardPool(name, RewardConfig(verifier=verifier)) for name, verifier in verifiers.items()}
    rewards = Rewards({"sums": "exact", "essays": "length"}, pools)
    judged = [RewardInput("p:1", "prompt", "xyz", "xyz")]

    async def scenario():
        async with asyncio.timeout(100):
            await rewards.start()
            try:
                return [scores(await rewards.score(domain, judged)) for domain in ("sums", "essays")]
            finally:
                await rewards.shutdown()

    assert asyncio.run(scenario()) == [[1.0], [3.0]]


def test_verdicts_of_verifiers_are_counted_too_for_they_are_signs_of_movement():
    pool = RewardPool("sums", RewardConfig(verifier="exact"))
    metrics = Rewards({"sums": "sums"}, {"sums": pool}).metrics()
    names = {"calls", "samples", "errors", "timeouts", "restarts", "seconds"}
    assert metrics == {f"rewards/sums/{name}": 0.0 for name in names}


def test_a_model_that_waits_for_shared_devices_while_others_load_theirs_is_no_deadlock(rewards, lock):
    """The start waits for the trainer, which waits for devices that a reward model has, which is of the same start."""
    board = WaitBoard(clock=lambda: 0.0)
    loads = asyncio.Event()

    async def trainer():
        with part("actor_train"):
            async with lock.hold("actor_train"):
                await loads.wait()

    async def scenario():
        with acting(START, board):
            others = asyncio.create_task(trainer())
            while lock.holder != "actor_train":
                await asyncio.sleep(0)
            start = asyncio.create_task(rewards.start())
            while not lock.contended:
                await asyncio.sleep(0)
            found = wait_graph(status_of(board))
            loads.set()
            await asyncio.gather(start, others)
            await rewards.shutdown()
        return found

    graph = asyncio.run(scenario())
    assert graph.cycle() == []
    assert [edge.on for edge in graph.chain(f"{START}/{ROLE}")] == [lock.name, f"{START}/actor_train"]


def test_a_group_that_waits_for_scores_leads_to_the_process_that_makes_them(rewards, machine):
    board = WaitBoard(clock=lambda: 0.0)
    machine.may_score.clear()

    async def scenario():
        with acting(START, board):
            await rewards.start()
        with acting("group/1", board):
            asking = asyncio.create_task(rewards.score("talk", group("x")))
        while not machine.calls:
            await asyncio.sleep(0)
        found = wait_graph(status_of(board))
        machine.may_score.set()
        await asking
        await rewards.shutdown()
        return found

    graph = asyncio.run(scenario())
    assert [edge.on for edge in graph.chain("group/1")] == [ROLE, f"{ROLE}/0"]
    assert graph.of(START) == (), "who started the processes waits for nothing they do"
