"""Canaries: the comparison itself, and when the pool makes it."""

import asyncio
import math

import numpy as np
import pytest
from local_engines import LOAD_SECONDS, START_SECONDS, LocalPool, request, scripted_scores

from roll.rollout.clock import run_virtual
from roll.weights.publisher import WeightsDiffer
from roll.weights.verify import CanaryScores, canary_metrics, compare_canaries

SEQUENCES = [np.array([3, 1, 2], dtype=np.int32), np.array([5, 4, 6, 7], dtype=np.int32)]


def canaries(version=0, tolerance=0.1):
    return CanaryScores(version, SEQUENCES, [scripted_scores(tokens, version) for tokens in SEQUENCES], tolerance)


def held(*changes):
    """The trainer's values with (sequence, place, difference) taken off."""
    values = [scripted_scores(tokens, 0) for tokens in SEQUENCES]
    for sequence, place, difference in changes:
        values[sequence][place] -= np.float32(difference)
    return values


def test_the_difference_is_trainer_minus_engine_over_all_tokens_but_the_first():
    found = compare_canaries("actor_infer/0", canaries(), held((0, 1, 0.25), (1, 3, -0.125), (0, 0, 99.0)))
    assert found.tolist() == [0.25, 0.0, 0.0, 0.0, -0.125]
    assert canary_metrics([found]) == {
        "mismatch/canary_mean": 0.125 / 5,
        "mismatch/canary_abs_mean": 0.375 / 5,
        "mismatch/canary_max": 0.25,
        "mismatch/canary_tokens": 5.0,
    }
    both = canary_metrics([found, np.array([-0.5, -0.5, 0.0, 0.0, 0.0])])
    assert list(both.values()) == [-0.0875, 0.1375, 0.5, 10.0]


def test_a_large_difference_is_named_with_engine_version_and_worst_sequence():
    with pytest.raises(WeightsDiffer) as caught:
        compare_canaries("actor_infer/1", canaries(version=0), held((0, 1, 0.5), (1, 2, 4.0)))
    text = str(caught.value)
    for part in ("actor_infer/1, version 0", "by 0.9 nats", "by 4 at most", "at most 0.1 allowed", "sequence 1"):
        assert part in text
    assert "[5, 4, 6, 7]: at place 2 the trainer has -6, the engine -10" in text
    assert "canary_tolerance" in text and "tied" in text


def test_a_difference_at_the_tolerance_is_allowed():
    compare_canaries("actor_infer/0", canaries(tolerance=0.1), held((0, 1, 0.5)))
    with pytest.raises(WeightsDiffer):
        compare_canaries("actor_infer/0", canaries(tolerance=0.0999), held((0, 1, 0.5)))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_what_is_not_finite_exceeds_every_tolerance(odd, side):
    values, trained = held(), canaries(tolerance=1e30)
    (values if side == "engine" else trained.logprobs)[1][2] = odd
    with pytest.raises(WeightsDiffer, match=r"sequence 1 .* at place 2"):
        compare_canaries("actor_infer/0", trained, values)


def test_scores_of_the_wrong_length_are_refused():
    with pytest.raises(WeightsDiffer, match=r"\[3, 4\] tokens came back as \[3, 3\]"):
        compare_canaries("actor_infer/0", canaries(), [values[:3] for values in held()])


def test_each_replica_is_compared_after_its_load_and_the_figures_are_over_all(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local:
            local.handles[1].engine.shift = 0.25
            loaded = await local.publish(1, canaries(1, tolerance=0.3))
            assert [handle.engine.scores_at for handle in local.handles] == [[1], [1]]
            metrics = canary_metrics(loaded.canaries)
            assert metrics["mismatch/canary_tokens"] == 10
            assert metrics["mismatch/canary_mean"] == pytest.approx(-0.125)
            assert metrics["mismatch/canary_max"] == 0.25
            assert (await local.publish(2)).canaries == []

    run_virtual(scenario())


def test_a_replica_that_catches_up_later_is_compared_and_the_next_update_tells(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, pinned_replicas=1) as local:
            await local.publish(1)
            local.pool.pin()
            assert len((await local.publish(2, canaries(2, tolerance=0.3))).canaries) == 1
            for handle in local.handles:
                handle.engine.shift = 0.25
            await local.pool.unpin()
            (late,) = (await local.publish(3)).canaries
            assert late == pytest.approx(-0.25) and (await local.publish(4)).canaries == []

    run_virtual(scenario())


def test_an_engine_that_computes_something_else_ends_the_publication_and_gets_no_request_for_it(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            local.handles[0].engine.shift = 0.5
            waiting = asyncio.create_task(local.pool.generate(request(), min_version=1))
            with pytest.raises(WeightsDiffer, match="actor_infer/0, version 1"):
                await local.publish(1, canaries(1))
            await asyncio.sleep(10)
            assert not waiting.done() and not local.handles[0].engine.seen
            waiting.cancel()

    run_virtual(scenario())


def test_running_requests_go_on_while_an_engine_is_compared(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            engine = local.handles[0].engine
            score = engine.score

            async def slow_score(token_ids):
                await asyncio.sleep(5)
                return await score(token_ids)

            engine.score = slow_score
            running = asyncio.create_task(local.pool.generate(request(tokens=10)))
            await asyncio.sleep(0.5)
            started = asyncio.get_running_loop().time()
            loaded = await local.publish(1, canaries(1))
            assert asyncio.get_running_loop().time() - started == pytest.approx(LOAD_SECONDS + 5)
            assert loaded.seconds["stall"] < LOAD_SECONDS + 1
            assert len(next(iter(engine.running.values())).versions) >= 4
            await running

    run_virtual(scenario())


def test_a_replica_that_comes_back_is_compared_too(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            await local.publish(1, canaries(1))
            local.handles[0].kill()
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert local.handles[1].engine.scores_at == [1]
            local.handles[1].kill()
            original = local._start_worker

            def shifted(index):
                handle = original(index)
                start = handle.worker.start

                async def start_shifted(spec):
                    await start(spec)
                    handle.engine.shift = 1.0

                handle.worker.start = start_shifted
                return handle

            local.pool._start_worker = shifted
            await asyncio.wait([local._running], timeout=20)
            failure = local._running.exception().exceptions[0]
            assert isinstance(failure, WeightsDiffer) and "actor_infer/0, version 1" in str(failure)

    run_virtual(scenario())
