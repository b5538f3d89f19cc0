"""Batches of a reward model, what dies on the way, and devices that others want; the processes are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from roll.configs.rewards import RewardConfig, RewardModelConfig
from roll.configs.roles import ModelArguments
from roll.rewards.base import RewardFailed, RewardInput, RewardOutput
from roll.rewards.model import Scored, ScorerSetup
from roll.rewards.model_pool import ScorePool, ScoreSettings
from roll.rollout.clock import run_virtual
from roll.runtime.locks import DeviceLock
from roll.runtime.workers import WorkerDied, WorkerFailed, WorkerTimeout
from roll.tracking.waits import WaitBoard, acting

ROLE = "rewards.chat"
T = TypeVar("T")
TICK = 0.001
"""Seconds of virtual time, after which something is looked at again."""


class Process:
    """A `WorkerHandle` of a model whose score is the response's length. ``deadly`` responses end it."""

    def __init__(self, machine: Machine, index: int) -> None:
        self.machine = machine
        self.index = index
        self.name = f"{ROLE}/{index}"
        self.alive = True
        self.poisoned = False
        """Whether each of its calls fails from now on."""

    async def create(self, timeout: float) -> None:
        assert len(self.machine.deaths) == len(self.machine.killed), "the one before still has the device's memory"
        self.machine.started.append(self.index)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        await asyncio.sleep(0)
        machine = self.machine
        if not self.alive:
            raise WorkerDied(f"{ROLE}/{self.index}", "gone")
        if method == "start":
            if machine.failed_starts:
                machine.failed_starts -= 1
                raise WorkerFailed(f"{ROLE}/{self.index}", "start", "ValueError: no head", "ValueError")
            return None
        if method != "score":
            machine.moves.append(method)
            return None
        return await self.score(args[0])

    async def score(self, conversations: list[list[dict[str, str]]]) -> list[Scored]:
        machine = self.machine
        responses = [conversation[-1]["content"] for conversation in conversations]
        machine.calls.append(responses)
        machine.prompts += [conversation[:-1] for conversation in conversations]
        await machine.may_score.wait()
        for fault in machine.faults:
            if fault in responses and machine.faults[fault]:
                what = machine.faults[fault].pop()
                if what == "breaks the pool":
                    raise ZeroDivisionError("a slip")
                if what == "hangs":
                    raise WorkerTimeout(f"{ROLE}/{self.index}", "score", 1)
                if what == "poisons":
                    self.poisoned = True
                else:
                    self.alive = False
                    raise WorkerDied(f"{ROLE}/{self.index}", "killed")
        if self.poisoned:
            raise WorkerFailed(self.name, "score", "AcceleratorError: device-side assert", "AcceleratorError")
        return [
            Scored(problem="it is too long") if response == "long" else Scored(len(response), 5, len(response) > 8)
            for response in responses
        ]

    def kill(self) -> None:
        self.alive = False
        self.machine.killed.append(self.index)

    async def end(self) -> None:
        self.kill()
        while self.machine.slow_deaths:
            await asyncio.sleep(0)
            self.machine.slow_deaths -= 1
        self.machine.deaths.append(self.index)


class Machine:
    """Where the processes run, and what happened there."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.killed: list[int] = []
        self.deaths: list[int] = []
        """The kills that somebody waited for."""
        self.slow_deaths = 0
        self.calls: list[list[str]] = []
        self.prompts: list[list[dict[str, str]]] = []
        self.moves: list[str] = []
        self.failed_starts = 0
        self.faults: dict[str, list[str]] = {}
        """Response -> what it does to its process, each once."""
        self.may_score = asyncio.Event()
        self.may_score.set()
        self.processes: list[Process] = []

    def start(self, index: int) -> Process:
        self.processes.append(Process(self, index))
        return self.processes[-1]


def run(
    use: Callable[[ScorePool, Machine, DeviceLock], Awaitable[T]],
    *,
    wait: float = 0.02,
    replicas: int = 1,
    retries: int = 2,
    batch: int = 4,
    failed_starts: int = 0,
    board: WaitBoard | None = None,
) -> T:
    async def main() -> T:
        with acting("start", board or WaitBoard()):
            return await used()

    async def used() -> T:
        machine, lock = Machine(), DeviceLock([ROLE, "actor_train"])
        machine.failed_starts = failed_starts
        setup = ScorerSetup("model", ModelArguments(), RewardModelConfig(), batch, "cpu")
        reward = RewardConfig(verifier="reward_model", timeout_seconds=1.0, max_retries=retries)
        settings = ScoreSettings(reward, setup, wait, 1.0)
        pool = ScorePool(ROLE, machine.start, replicas, settings, lock, lambda event: None)
        async with asyncio.timeout(10):
            try:
                await pool.start()
                return await use(pool, machine, lock)
            finally:
                await pool.shutdown()
                assert all(not process.alive for process in machine.processes)

    return run_virtual(main())


def group(*responses: str) -> list[RewardInput]:
    return [RewardInput(f"p:{responses[0]}", "text", response) for response in responses]


def scores(outputs: list[RewardOutput]) -> list[float]:
    return [output.score for output in outputs]


def test_a_group_without_responses_gets_no_scores_and_waits_for_nothing():
    async def use(pool, machine, lock):
        return await pool.score([]), machine.calls

    assert run(use) == ([], [])


def test_groups_share_a_batch_and_get_their_own_scores():
    async def use(pool, machine, lock):
        answers = await asyncio.gather(*(pool.score(group("a" * n, "b" * (n + 1))) for n in (1, 2, 3, 4)))
        return [scores(answer) for answer in answers], machine.calls

    answers, calls = run(use)
    assert answers == [[1, 2], [2, 3], [3, 4], [4, 5]]
    assert calls == [["a", "bb", "aa", "bbb"], ["aaa", "bbbb", "aaaa", "bbbbb"]]


def test_without_a_wait_each_group_is_scored_by_itself():
    async def use(pool, machine, lock):
        await asyncio.gather(*(pool.score(group(letter)) for letter in "abc"))
        return machine.calls

    assert run(use, wait=0) == [["a"], ["b"], ["c"]]


def test_the_prompt_is_given_as_a_conversation():
    async def use(pool, machine, lock):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        await pool.score([RewardInput("p", "rendered", "r", messages=messages)])
        await pool.score([RewardInput("p", "rendered", "r")])
        return machine.prompts

    first, second = run(use)
    assert [message["content"] for message in first] == ["s", "u"]
    assert second == [{"role": "user", "content": "rendered"}]


def test_metrics_and_totals_tell_of_truncation():
    async def use(pool, machine, lock):
        return await pool.score(group("a", "a" * 9)), pool.counts

    outputs, counts = run(use)
    assert [output.metrics["truncated_left"] for output in outputs] == [0, 1]
    assert (counts.samples, counts.calls, counts.truncated, counts.restarts) == (2, 1, 1, 0)


def test_a_response_without_a_score_fails_its_group_only():
    async def use(pool, machine, lock):
        calls = pool.score(group("x", "long")), pool.score(group("ab"))
        bad, good = await asyncio.gather(*calls, return_exceptions=True)
        return bad, scores(good), machine.calls

    bad, good, calls = run(use)
    assert isinstance(bad, RewardFailed) and all(words in str(bad) for words in (ROLE, "p:x", "too long"))
    assert good == [2] and len(calls) == 1


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_lost_process_is_replaced_and_its_groups_are_scored_again(fault):
    async def use(pool, machine, lock):
        machine.faults = {"x": [fault]}
        answers = await asyncio.gather(pool.score(group("x")), pool.score(group("ab")))
        return [scores(answer) for answer in answers], machine, pool.counts

    answers, machine, counts = run(use, retries=0)
    assert answers == [[1], [2]]
    assert machine.calls == [["x", "ab"], ["x"], ["ab"]]  # each by itself, for one may be guilty
    assert machine.started == [0, 0] and 0 in machine.killed and counts.restarts == 1


def test_a_group_that_kills_its_process_each_time_fails_and_takes_no_other_along():
    async def use(pool, machine, lock):
        machine.faults = {"x": ["dies"] * 9}
        bad, good = await asyncio.gather(pool.score(group("x")), pool.score(group("ab")), return_exceptions=True)
        return bad, scores(good), pool.counts.restarts, scores(await pool.score(group("abc")))

    bad, good, restarts, later = run(use, retries=1)
    assert isinstance(bad, RewardFailed)
    assert all(words in str(bad) for words in (ROLE, "p:x", "2 attempts", "killed"))
    assert (good, later, restarts) == ([2], [3], 3)


def test_a_model_that_does_not_load_ends_the_start_with_its_cause():
    async def use(pool, machine, lock):
        raise AssertionError("it did not start")

    with pytest.raises(ExceptionGroup) as caught:
        run(use, failed_starts=1)
    assert "no head" in str(caught.value.exceptions[0])


def test_a_process_that_cannot_be_replaced_fails_its_groups_and_later_ones_try_again():
    async def use(pool, machine, lock):
        machine.faults, machine.failed_starts = {"x": ["dies"]}, 1
        with pytest.raises(RewardFailed, match="no head"):
            await pool.score(group("x"))
        return scores(await pool.score(group("x")))

    assert run(use, retries=1) == [1]


def test_a_start_that_fails_is_tried_again_as_often_as_a_call():
    async def use(pool, machine, lock):
        machine.faults, machine.failed_starts = {"x": ["dies"]}, 2
        return scores(await pool.score(group("x")))

    assert run(use, retries=3) == [1]


def test_a_process_that_fails_a_group_by_itself_is_replaced_for_its_device_may_be_at_fault():
    async def use(pool, machine, lock):
        machine.faults = {"x": ["poisons"]}
        answers = await asyncio.gather(pool.score(group("x")), pool.score(group("ab")))
        return [scores(answer) for answer in answers], pool.counts.restarts, machine.calls

    answers, restarts, calls = run(use, retries=1)
    assert answers == [[1], [2]] and restarts == 1
    assert calls == [["x", "ab"], ["x"], ["x"], ["ab"]]


def test_a_process_is_gone_before_its_successor_loads_a_model():
    async def use(pool, machine, lock):
        machine.faults, machine.slow_deaths = {"x": ["hangs"]}, 3
        await pool.score(group("x"))
        return machine.started, list(machine.deaths)

    assert run(use) == ([0, 0], [0])


def test_a_pool_that_broke_down_says_why_to_all_who_come_later(caplog):
    async def use(pool, machine, lock):
        machine.faults = {"x": ["breaks the pool"]}
        with pytest.raises(RewardFailed, match="broke down: ZeroDivisionError"):
            await pool.score(group("x"))
        with pytest.raises(RewardFailed, match=r"no longer running: ZeroDivisionError: a slip"):
            await pool.score(group("y"))

    run(use)
    assert any("broke down" in record.message and record.exc_info for record in caplog.records)


def test_its_processes_are_actors_of_their_own_and_nobody_who_started_them_waits():
    board = WaitBoard()

    async def use(pool, machine, lock):
        async with lock.hold("actor_train"):
            asking = asyncio.create_task(pool.score(group("x")))
            while not lock.contended:
                await asyncio.sleep(TICK)
            waits, holdings = board.waits(), board.holdings()
        await asking
        return waits, holdings, pool.handles() == machine.processes

    waits, holdings, all_there = run(use, board=board)
    assert [(wait.who, wait.on) for wait in waits] == [(f"{ROLE}/0", f"devices/actor_train+{ROLE}")]
    assert [(each.who, each.on) for each in holdings if each.on == ROLE] == [(f"{ROLE}/0", ROLE)]
    assert all_there


def test_replicas_work_at_the_same_time():
    async def use(pool, machine, lock):
        machine.may_score.clear()
        calls = [asyncio.create_task(pool.score(group(letter * 2))) for letter in "ab"]
        while len(machine.calls) < 2:
            await asyncio.sleep(TICK)
        machine.may_score.set()
        return [scores(await call) for call in calls]

    assert run(use, replicas=2, wait=0) == [[2], [2]]


def test_devices_go_to_who_waits_between_two_batches_and_come_back():
    async def use(pool, machine, lock):
        machine.may_score.clear()
        calls = [asyncio.create_task(pool.score(group(letter))) for letter in "abc"]
        while not machine.calls:
            await asyncio.sleep(TICK)

        async def train() -> list[list[str]]:
            async with lock.hold("actor_train"):
                return list(machine.calls)

        training = asyncio.create_task(train())
        while not lock.contended:
            await asyncio.sleep(TICK)
        machine.may_score.set()
        seen = await training
        await asyncio.gather(*calls)
        return seen, machine.calls, machine.moves

    seen, calls, moves = run(use, wait=0)
    assert seen == [["a"]] and calls == [["a"], ["b"], ["c"]]
    assert moves == ["offload_states", "load_states"]


def test_a_process_that_died_off_its_devices_is_replaced_when_it_is_needed():
    async def use(pool, machine, lock):
        machine.processes[0].alive = False
        async with lock.hold("actor_train"):
            assert pool.counts.restarts == 1
        return scores(await pool.score(group("abc"))), machine.started

    assert run(use) == ([3], [0, 0])


def test_a_caller_that_went_away_costs_nothing():
    async def use(pool, machine, lock):
        async with lock.hold("actor_train"):
            gone = asyncio.create_task(pool.score(group("gone")))
            await asyncio.sleep(0.05)
            gone.cancel()
            await asyncio.wait([gone])
        await pool.score(group("here"))
        return machine.calls

    assert run(use) == [["here"]]


def test_a_shutdown_cancels_who_waits():
    async def use(pool, machine, lock):
        machine.may_score.clear()
        waiting = [asyncio.create_task(pool.score(group(letter))) for letter in "ab"]
        while not machine.calls:
            await asyncio.sleep(TICK)
        await pool.shutdown()
        await asyncio.wait(waiting)
        with pytest.raises(RewardFailed, match="no longer"):
            await pool.score(group("late"))
        return all(task.cancelled() for task in waiting)

    assert run(use, wait=0)
