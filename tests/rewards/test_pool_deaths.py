"""Deaths that a test cannot bring about in a real Ray, such as that by its memory monitor; Ray's part is simulated."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayTaskError

from roll.configs.rewards import RewardConfig
from roll.rewards.base import RewardFailed, RewardInput, RewardOutput
from roll.rewards.pool import RewardCounts, RewardPool, Verdict
from tests.runtime.references import Reference

MEMORY = OutOfMemoryError("Memory on the node was 15.28GB used / 16.00GB limit (0.955)\nGeneral advice")


class SimulatedRay:
    """Starts actors that judge each response with 1, until they are killed or a response is deadly."""

    def __init__(self, death: Exception) -> None:
        self.death = death
        self.deadly: list[str] = []
        """Responses, each of which kills once."""
        self.odd: list[str] = []
        """Responses, each of which makes the call raise once; the actor lives on."""
        self.first_unanswered: int | None = None
        """Number of an actor's call, from 1, that never gets an answer."""
        self.actors: list[SimpleNamespace] = []

    def remote(self, body: type) -> SimulatedRay:
        return self

    def options(self, **options: object) -> SimpleNamespace:
        return SimpleNamespace(remote=self._start)

    def kill(self, actor: SimpleNamespace, no_restart: bool) -> None:
        actor.is_dead = True

    def _start(self, *args: object) -> SimpleNamespace:
        actor = SimpleNamespace(is_dead=False, calls=0)
        actor.__ray_ready__ = SimpleNamespace(remote=lambda: self._answer(actor, None))
        actor.judge = SimpleNamespace(remote=lambda records: self._judge(actor, records))
        self.actors.append(actor)
        return actor

    def _judge(self, actor: SimpleNamespace, records: list[RewardInput]) -> Reference:
        actor.calls += 1
        for record in records:
            if record.response_text in self.deadly:
                self.deadly.remove(record.response_text)
                actor.is_dead = True
            if record.response_text in self.odd:
                self.odd.remove(record.response_text)
                error = RayTaskError("judge", "traceback", OSError("no space left"))
                return self._answer(actor, error.as_instanceof_cause())
        if actor.calls == self.first_unanswered:
            return Reference(asyncio.get_running_loop().create_future())
        return self._answer(actor, [Verdict("judged", RewardOutput(1.0, {})) for _ in records])

    def _answer(self, actor: SimpleNamespace, answer: object) -> Reference:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if actor.is_dead:
            future.set_exception(self.death)
        elif isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return Reference(future)


def simulated_ray(death: Exception, monkeypatch: pytest.MonkeyPatch) -> SimulatedRay:
    simulated = SimulatedRay(death)
    monkeypatch.setattr(ray, "remote", simulated.remote)
    monkeypatch.setattr(ray, "kill", simulated.kill)
    return simulated


def judged(response: str) -> RewardInput:
    return RewardInput("train.jsonl:1", "prompt", response, None, "test")


def run(use, **settings):
    async def main():
        pool = RewardPool("test", RewardConfig(**{"verifier": "exact", "num_workers": 2, "max_retries": 1} | settings))
        async with asyncio.timeout(60):
            await pool.start()
            try:
                return await use(pool)
            finally:
                await pool.shutdown()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "death", [MEMORY, NodeDiedError("its node died"), ActorDiedError(), ObjectLostError("0", None, "")]
)
def test_a_process_that_is_gone_is_replaced_and_takes_no_later_call(death, monkeypatch):
    simulated = simulated_ray(death, monkeypatch)
    simulated.deadly = ["deadly"]

    async def use(pool: RewardPool) -> RewardCounts:
        outputs = await pool.score([judged("a"), judged("deadly")])
        assert [output.score for output in outputs] == [1.0, 1.0]
        lost = next(actor for actor in simulated.actors if actor.is_dead)
        calls = lost.calls
        for _ in range(4):
            await asyncio.gather(*(pool.score([judged("a"), judged("b")]) for _ in range(4)))
        assert lost.calls == calls, "the place of the dead process is the one that looks idle"
        return pool.counts

    assert run(use).restarts == 1
    assert all(actor.is_dead for actor in simulated.actors)


def test_a_response_that_takes_all_memory_fails_alone_and_is_told_why(monkeypatch):
    simulated = simulated_ray(MEMORY, monkeypatch)
    simulated.deadly = ["deadly"] * 9

    async def use(pool: RewardPool) -> str:
        with pytest.raises(RewardFailed) as failed:
            await pool.score([judged("deadly")])
        assert (await pool.score([judged("a")]))[0].score == 1.0
        return str(failed.value)

    assert "ran low on memory (15.28GB used / 16.00GB)" in run(use)


def test_processes_that_die_at_the_same_time_are_all_counted(monkeypatch):
    simulated = simulated_ray(MEMORY, monkeypatch)
    simulated.deadly = ["deadly 1", "deadly 2"]

    async def use(pool: RewardPool) -> RewardCounts:
        await asyncio.gather(*(pool.score([judged(each)]) for each in tuple(simulated.deadly)))
        return pool.counts

    counts = run(use)
    assert (counts.restarts, counts.errors) == (2, 2)
    assert len(simulated.actors) == 4


@pytest.mark.parametrize("verifier", ["exact", "tests.rewards.sample_verifiers:async_answer"])
def test_an_error_in_a_living_process_is_the_verdict_on_its_call_alone(verifier, monkeypatch):
    simulated = simulated_ray(MEMORY, monkeypatch)
    simulated.odd = ["odd", "very odd", "very odd"]

    async def use(pool: RewardPool) -> RewardCounts:
        calls = [pool.score([judged(each), judged("good")]) for each in ("odd", "very odd", "fine")]
        odd, very_odd, fine = await asyncio.gather(*calls, return_exceptions=True)
        assert [len(odd), len(fine)] == [2, 2]
        assert isinstance(very_odd, RewardFailed) and "OSError: no space left" in str(very_odd)
        return pool.counts

    assert run(use, verifier=verifier).restarts == 0
    assert len(simulated.actors) == 2


@pytest.mark.parametrize("turns", range(12))
def test_a_shutdown_waits_for_no_further_attempt(turns, monkeypatch):
    simulated = simulated_ray(MEMORY, monkeypatch)
    simulated.odd = ["odd"]
    simulated.first_unanswered = 2

    async def use(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score([judged("odd")]))
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):  # a call may last longer
            await pool.shutdown()
            await asyncio.wait([scoring])
        assert scoring.cancelled() or isinstance(scoring.exception(), RewardFailed)

    run(use, num_workers=1)
