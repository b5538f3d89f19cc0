"""The pool of replicas against deaths, aborts, publications and sleep, in every awkward order."""

import asyncio

import pytest

from roll.engines.base import EngineFailed
from roll.engines.replica import RequestError
from roll.engines.worker import ABORT_SECONDS
from roll.rollout.clock import run_virtual
from roll.runtime.workers import WorkerFailed
from tests.runtime import local_engines
from tests.runtime.local_engines import LOAD_SECONDS, START_SECONDS, TOKEN_SECONDS, LocalPool, request


async def cancel(task):
    task.cancel()
    await asyncio.wait([task])


def test_a_retry_is_never_answered_with_the_tokens_of_its_aborted_first_try(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            first = asyncio.create_task(local.pool.generate(request("train-0-0"), min_version=0))
            await asyncio.sleep(2.5)
            await local.publish(1)
            await cancel(first)
            completion = await local.pool.generate(request("train-0-0"), min_version=1)
            assert completion.request_id == "train-0-0"
            assert completion.finish_reason == "length"
            assert completion.versions.tolist() == [1, 1, 1, 1]

    run_virtual(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_a_cancelled_request_does_not_go_on_in_the_engine_however_early_it_is_cancelled(monkeypatch, turns):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            task = asyncio.create_task(local.pool.generate(request(tokens=1000)))
            for _ in range(turns):
                await asyncio.sleep(0)
            await cancel(task)
            await asyncio.sleep(2)
            assert not local.handles[0].engine.running
            assert not local.handles[0].worker._tasks

    run_virtual(scenario())


def test_what_was_sampled_of_a_request_that_is_given_up_is_counted(monkeypatch):
    """Also what an engine had made of it that has died since, as far as it was known."""

    async def scenario():
        async with LocalPool(monkeypatch) as local:
            given_up, other = (asyncio.create_task(local.pool.generate(request(name, 9))) for name in "ab")
            await asyncio.sleep(3.5)
            local.handles[0].kill()
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 2.5)
            (again,) = (each for name, each in local.handles[1].engine.running.items() if name.startswith("a#"))
            await cancel(given_up)
            await other
            kept = again.request.first_token_index
            assert kept > 0 and len(again.versions) > 0
            assert local.pool.abandoned_tokens == kept + len(again.versions)

    run_virtual(scenario())


def test_a_result_that_comes_when_its_request_is_given_up_is_counted(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            task = asyncio.create_task(local.pool.generate(request(tokens=3)))
            await asyncio.sleep(0.5)
            replica = local.pool._replicas["actor_infer/0"]
            deliver = replica._deliver

            def delivered(ended):
                deliver(ended)
                task.cancel()

            replica._deliver = delivered
            await asyncio.wait([task])
            assert task.cancelled() and local.pool.abandoned_tokens == 3 and local.pool.completed == 0

    run_virtual(scenario())


def test_an_abort_just_behind_its_request_ends_it_at_once(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            worker = local.handles[0].worker
            both = (worker.submit([request(tokens=1000)]), worker.abort(["r"]))
            await asyncio.wait_for(asyncio.gather(*both), TOKEN_SECONDS + 0.1)
            assert not worker._tasks and not local.handles[0].engine.running

    run_virtual(scenario())


@pytest.mark.parametrize("error", [None, EngineFailed("out of order")])
def test_a_request_that_its_engine_does_not_abort_is_cancelled(monkeypatch, error):
    async def scenario():
        async with LocalPool(monkeypatch) as local:

            async def ignore(names):
                if error is not None:
                    raise error

            engine, worker = local.handles[0].engine, local.handles[0].worker
            engine.abort = ignore
            task = asyncio.create_task(local.pool.generate(request(tokens=1000)))
            await asyncio.sleep(2)
            await cancel(task)
            await asyncio.sleep(ABORT_SECONDS + 0.1)
            assert not worker._tasks and not worker._counted and not engine.running

    run_virtual(scenario())


def test_requests_that_end_one_after_the_other_all_come_back(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local, asyncio.timeout(20):
            lengths = [1, 2, 3, 3, 12]
            running = [local.pool.generate(request(f"r{index}", length)) for index, length in enumerate(lengths)]
            assert [len(completion.token_ids) for completion in await asyncio.gather(*running)] == lengths

    run_virtual(scenario())


def test_requests_of_a_dead_replica_are_issued_again_and_it_comes_back_with_the_present_weights(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            await local.publish(1)
            running = [asyncio.create_task(local.pool.generate(request(f"r{index}"))) for index in range(3)]
            await asyncio.sleep(1.5)
            local.handles[0].kill()
            completions = await asyncio.gather(*running)
            assert [completion.versions.tolist() for completion in completions] == [[1] * 4] * 3
            assert (local.pool.restarts, local.pool.reissued) == (1, 3)
            assert "actor_infer/0" in local.events[0]

    run_virtual(scenario())


def test_a_replica_that_restarts_during_a_publication_serves_the_new_version_only(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local:
            local.handles[1].kill()
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS / 2)  # it is loading version 0
            await local.publish(1)
            completions = await asyncio.gather(
                *(local.pool.generate(request(f"r{index}"), min_version=1) for index in range(4))
            )
            assert {version for each in completions for version in each.versions.tolist()} == {1}
            assert [handle.engine.version for handle in local.handles] == [1, 0, 1]

    run_virtual(scenario())


def test_an_engine_that_cannot_go_on_is_replaced_like_a_dead_one_and_nothing_is_lost(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = [asyncio.create_task(local.pool.generate(request(f"r{index}"))) for index in range(3)]
            await asyncio.sleep(1.5)
            local.handles[0].engine.fail_next = EngineFailed("out of device memory")
            completions = await asyncio.gather(*running)
            assert all(completion.finish_reason == "length" for completion in completions)
            assert local.pool.restarts == 1
            assert "out of device memory" in local.events[0]

    run_virtual(scenario())


def test_a_request_that_cannot_be_handed_over_fails_at_once(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:

            async def refuse(requests):
                raise RuntimeError("cannot be read")

            local.handles[0].worker.submit = refuse
            with pytest.raises(RequestError, match="cannot be read"):
                await asyncio.wait_for(local.pool.generate(request()), 5)

    run_virtual(scenario())


@pytest.mark.parametrize("slept_after", [0.0, 0.5, START_SECONDS - 0.5, START_SECONDS + 0.5, START_SECONDS + 3])
@pytest.mark.parametrize("awake_after", [0.25, LOAD_SECONDS, 20.0])
def test_devices_may_change_hands_at_any_moment_of_a_restart(monkeypatch, slept_after, awake_after):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = asyncio.create_task(local.pool.generate(request()))
            await asyncio.sleep(1)
            local.handles[0].kill()
            await asyncio.sleep(slept_after)
            await local.pool.offload_states()
            assert all(handle.engine.asleep for handle in local.handles[1:])
            await asyncio.sleep(awake_after)
            assert all(handle.engine.asleep for handle in local.handles[1:])
            await local.pool.load_states()
            assert (await running).finish_reason == "length"
            assert not local._running.done(), local._running.exception()
            moves = local.handles[1].engine.moves
            assert moves in ([], ["sleep", "wake"])

    run_virtual(scenario())


def test_an_engine_that_dies_while_its_devices_are_lent_out_starts_when_they_are_back(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = asyncio.create_task(local.pool.generate(request()))
            await asyncio.sleep(1)
            await local.pool.offload_states()
            local.handles[0].kill()
            await asyncio.sleep(1000)
            assert len(local.handles) == 1
            await local.pool.load_states()
            assert (await running).finish_reason == "length"
            assert local.pool.restarts == 1 and local.handles[1].engine.moves == []

    run_virtual(scenario())


def test_a_replica_that_dies_on_its_way_to_sleep_is_not_taken_for_live(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = asyncio.create_task(local.pool.generate(request()))
            await asyncio.sleep(1)

            def die_at_sleep(handle):
                handle.dies_at = "sleep" if len(local.handles) == 2 else None

            local.prepare_next = die_at_sleep
            local.handles[0].kill()
            await asyncio.sleep(1)
            await local.pool.offload_states()
            await asyncio.sleep(60)
            await local.pool.load_states()
            assert (await running).finish_reason == "length"
            assert local.pool.restarts == 2

    run_virtual(scenario())


def test_a_late_report_of_a_death_does_not_hit_the_successor(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            first = local.pool._replicas["actor_infer/0"]
            local.handles[0].kill()
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            late = asyncio.create_task(first.generate(request("late")))
            await asyncio.wait([late])
            assert (await asyncio.wait_for(local.pool.generate(request()), 10)).finish_reason == "length"

    run_virtual(scenario())


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_its_engine_has_lost_fails_with_the_name_of_the_replica_and_leaves_it(monkeypatch, begun):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            engine = local.handles[0].engine
            neighbour = asyncio.create_task(local.pool.generate(request("neighbour", tokens=100)))
            lost = asyncio.create_task(local.pool.generate(request("lost", tokens=200)))
            if begun:
                await asyncio.sleep(20)
            engine.stalled.add("lost")
            assert len((await neighbour).token_ids) == 100
            ended = asyncio.get_running_loop().time()
            with pytest.raises(RequestError, match=r"actor_infer/0, request lost#\d: no new token for 50 s"):
                await lost
            assert 50 <= asyncio.get_running_loop().time() - ended <= 55
            await asyncio.sleep(2)
            assert not engine.running

    run_virtual(scenario())


def test_a_request_whose_cache_was_taken_back_is_not_lost_while_its_neighbours_go_on(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            engine = local.handles[0].engine
            neighbours = [asyncio.create_task(local.pool.generate(request(f"r{index}", 300))) for index in range(2)]
            preempted = asyncio.create_task(local.pool.generate(request("preempted", 40)))
            await asyncio.sleep(20)
            engine.stalled.add("preempted")
            await asyncio.gather(*neighbours)
            engine.stalled.clear()
            assert len((await preempted).token_ids) == 40
            assert local.pool.tokens_seen >= 600

    run_virtual(scenario())


def test_neither_a_long_response_nor_one_that_is_queued_for_long_is_lost(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            local.handles[0].engine.slots = asyncio.Semaphore(1)
            running = [asyncio.create_task(local.pool.generate(request(f"r{index}", 300))) for index in range(3)]
            assert [len(completion.token_ids) for completion in await asyncio.gather(*running)] == [300] * 3

    run_virtual(scenario())


def test_a_replica_that_drains_gets_no_more_requests(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, in_flight="drain") as local:
            long = [asyncio.create_task(local.pool.generate(request(f"long{index}", 30))) for index in range(2)]
            short = [asyncio.create_task(local.pool.generate(request(f"short{index}", 3))) for index in range(4)]
            update = asyncio.create_task(local.publish(1))
            await asyncio.sleep(10)  # the first one waits for its long request alone
            first, second = (handle.engine for handle in local.handles)
            assert len(first.running) == 1 and len(second.running) == 1
            later = [asyncio.create_task(local.pool.generate(request(f"later{index}", 3))) for index in range(5)]
            await asyncio.sleep(1)
            assert len(first.running) == 1 and len(second.running) == 6
            await asyncio.gather(update, *long, *short, *later)

    run_virtual(scenario())


@pytest.mark.parametrize(("in_flight", "share"), [("keep", 0.25), ("resume", 0.125)])
def test_replicas_change_side_by_side_and_no_more_than_the_share_stand_still(monkeypatch, in_flight, share):
    async def scenario():
        monkeypatch.setattr(local_engines, "LOAD_SECONDS", 4.0)
        async with LocalPool(monkeypatch, replicas=64, in_flight=in_flight, max_unavailable=share) as local:
            most = 0

            async def look():
                nonlocal most
                while True:
                    await asyncio.sleep(0.25)
                    still = [handle for handle in local.handles if not handle.engine.going.is_set()]
                    most = max(most, len(still))
                    assert len(still) <= 64 * share

            looking = asyncio.create_task(look())
            began = asyncio.get_running_loop().time()
            await local.publish(1)
            assert asyncio.get_running_loop().time() - began == pytest.approx(4 / share, abs=0.1)
            assert most == 64 * share and not looking.done()
            looking.cancel()
            assert {handle.engine.version for handle in local.handles} == {1}

    run_virtual(scenario())


def test_replicas_are_asked_for_their_statistics_side_by_side(monkeypatch):
    """An answer may wait for an engine's step, and a training step waits for all answers."""

    async def scenario():
        async with LocalPool(monkeypatch, replicas=8) as local:

            async def slow(method, *args, timeout):
                await asyncio.sleep(2)
                return {"running": 0}

            with monkeypatch.context() as patched:
                for handle in local.handles:
                    patched.setattr(handle, "call", slow)
                began = asyncio.get_running_loop().time()
                told = await local.pool.stats()
                assert asyncio.get_running_loop().time() - began == pytest.approx(2, abs=0.1)
            assert [each["name"] for each in told] == [handle.name for handle in local.pool.handles()]

    run_virtual(scenario())


def test_time_that_the_engines_sleep_does_not_count_against_a_request(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = asyncio.create_task(local.pool.generate(request(tokens=40)))
            await asyncio.sleep(20)
            await local.pool.offload_states()
            await asyncio.sleep(1000)
            await local.pool.load_states()
            assert len((await running).token_ids) == 40

    run_virtual(scenario())


def test_too_many_deaths_end_the_pool_with_the_last_cause(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, max_restarts=1) as local:
            for index in range(2):
                local.handles[index].kill()
                await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert "killed by the test" in str(local._running.exception().exceptions[0])

    run_virtual(scenario())


def test_a_failed_load_ends_the_publication_with_its_cause(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:

            async def mismatch(buckets, version):
                raise ValueError("tensor 'lm_head' has another shape")

            local.handles[0].engine.prepare_weights = mismatch
            with pytest.raises(WorkerFailed, match=r"actor_infer/0\.load_weights.*lm_head"):
                await local.publish(1)

    run_virtual(scenario())


def test_an_ended_episode_is_forgotten_by_the_router(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local:
            for episode in range(20):
                await local.pool.generate(request(), sticky_key=episode)
                local.pool.forget(episode)
            assert local.pool._router._sticky == {}

    run_virtual(scenario())


async def waits(task) -> bool:
    await asyncio.sleep(1)
    return not task.done()


def test_the_next_but_one_version_is_gathered_when_every_replica_has_left_its_half(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local:
            publishing = asyncio.create_task(local.publish(1))
            await asyncio.sleep(LOAD_SECONDS + 0.5)  # the second replica is loading
            gathering = asyncio.create_task(local.pool.buffers.acquire(2))
            assert await waits(gathering)
            await publishing
            assert await gathering == 0

    run_virtual(scenario())


def test_engines_that_copy_let_go_at_once(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, in_place=False) as local:
            await local.publish(1)
            await local.publish(2)
            async with asyncio.timeout(1):
                assert local.pool.buffers.buffer_of(2) == await local.pool.buffers.acquire(2)
                await local.pool.buffers.acquire(3)

    run_virtual(scenario())


@pytest.mark.parametrize("dies_after", [0.5, LOAD_SECONDS / 2 + 0.5, LOAD_SECONDS, LOAD_SECONDS + 0.5])
def test_a_replica_that_dies_during_a_publication_blocks_no_later_one(monkeypatch, dies_after):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local, asyncio.timeout(500):
            publishing = asyncio.create_task(local.publish(1))
            await asyncio.sleep(dies_after)
            local.handles[0].kill()
            await publishing
            for version in (2, 3, 4):
                await local.publish(version)
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert [handle.engine.version for handle in local.handles[1:]] == [4, 4]
            assert (await local.pool.generate(request(), min_version=4)).versions.tolist() == [4] * 4

    run_virtual(scenario())


def test_a_replica_that_is_already_gone_when_its_turn_comes_holds_nothing(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local, asyncio.timeout(500):
            publishing = asyncio.create_task(local.publish(1))
            await asyncio.sleep(0.5)
            local.handles[1].kill()  # the publication will come to it later
            await publishing
            for version in (2, 3):
                await local.publish(version)
            assert local.pool.buffers.has(3) and not local.pool.buffers.has(1)

    run_virtual(scenario())


def test_with_a_single_buffer_a_replica_that_restarts_while_it_is_written_waits_for_the_next_publication(monkeypatch):
    async def scenario():
        single = {"in_place": False, "dual_buffer": False}
        async with LocalPool(monkeypatch, replicas=2, **single) as local, asyncio.timeout(500):
            assert await local.pool.buffers.acquire(1) == 0
            local.handles[0].kill()
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert local.handles[2].calls["start"] == 1 and local.handles[2].calls["load_weights"] == 0
            served = asyncio.create_task(local.pool.generate(request(), min_version=1))
            assert await waits(served)
            await local.publish(1)
            assert (await served).versions.tolist() == [1] * 4
            assert local.handles[2].engine.version == 1

    run_virtual(scenario())


def test_with_a_single_buffer_a_restart_between_publications_loads_what_is_there(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, in_place=False, dual_buffer=False) as local, asyncio.timeout(500):
            local.handles[0].kill()
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS / 2)  # the new one is loading version 0
            gathering = asyncio.create_task(local.pool.buffers.acquire(1))
            await asyncio.sleep(LOAD_SECONDS / 4)
            assert not gathering.done()
            assert await gathering == 0
            assert (await local.pool.generate(request())).versions.tolist() == [0] * 4

    run_virtual(scenario())


def test_a_replica_that_keeps_a_version_serves_who_wants_it_and_then_catches_up(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=3, pinned_replicas=1) as local, asyncio.timeout(500):
            pool = local.pool
            long = [asyncio.create_task(pool.generate(request(f"long{index}", 40))) for index in range(2)]
            await asyncio.sleep(1)
            episode = await pool.generate(request("turn-0"), sticky_key="episode")
            await pool.generate(request("other-0"), sticky_key="other")
            pool.pin()
            (kept,) = pool._pinned.names
            assert kept == "actor_infer/2", "the least loaded one"
            for version in (1, 2, 3):
                await local.publish(version)
            assert [handle.engine.version for handle in local.handles] == [3, 3, 0]
            both = [pool.generate(request(f"r{index}"), pinned=index % 2 == 0) for index in range(6)]
            assert [done.versions.tolist() for done in await asyncio.gather(*both)] == [[0] * 4, [3] * 4] * 3
            # Its replica is the kept one; its next turn goes to another, with newer weights.
            assert episode.versions.tolist() == [0] * 4
            assert (await pool.generate(request("turn-1"), sticky_key="episode")).versions.tolist() == [3] * 4
            await pool.unpin()
            assert [handle.engine.version for handle in local.handles] == [3] * 3
            assert local.handles[2].calls["load_weights"] == 2, "versions between the two are left out"
            await asyncio.gather(*long)
            await local.publish(4)
            assert [handle.engine.version for handle in local.handles] == [4] * 3
            assert not pool.buffers.has(0) and not pool.buffers.has(3)

    run_virtual(scenario())


def test_with_a_single_buffer_a_kept_version_is_there_for_a_restart_and_the_next_one_may_be_written(monkeypatch):
    async def scenario():
        single = {"in_place": False, "dual_buffer": False, "pinned_replicas": 1}
        async with LocalPool(monkeypatch, replicas=2, **single) as local, asyncio.timeout(500):
            pool = local.pool
            pool.pin()
            for version in (1, 2):
                await local.publish(version)
            local.handles[0].kill()
            assert (await pool.generate(request(), pinned=True)).versions.tolist() == [0] * 4
            assert pool._replicas["actor_infer/0"].version == 0
            await pool.buffers.acquire(3)  # 2 is gone, so the replica cannot catch up with it
            await pool.unpin()
            assert pool._replicas["actor_infer/0"].version == 0
            served = asyncio.create_task(pool.generate(request("newer"), min_version=2))
            assert (await served).versions.tolist() == [2] * 4
            await local.publish(3)
            assert [pool._replicas[f"actor_infer/{index}"].version for index in range(2)] == [3, 3]

    run_virtual(scenario())


def test_one_version_is_kept_at_a_time(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, pinned_replicas=1) as local:
            with pytest.raises(RuntimeError, match="no replica keeps a version"):
                await local.pool.unpin()
            local.pool.pin()
            with pytest.raises(RuntimeError, match="kept at a time"):
                local.pool.pin()

    run_virtual(scenario())


def test_results_leave_the_engine_together_after_a_hundredth_of_their_time_at_most(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            clock = asyncio.get_running_loop().time
            began, arrived = clock(), {}

            async def arrive(number, length):
                await local.pool.generate(request(f"r{number}", length))
                arrived[length] = clock() - began

            lengths = [3, *range(301, 316), *range(301, 316), 600]
            running = [asyncio.create_task(arrive(number, length)) for number, length in enumerate(lengths)]
            await asyncio.sleep(300)
            before = local.handles[0].calls["collect"]
            await asyncio.sleep(20)
            assert local.handles[0].calls["collect"] - before <= 12, "30 results in calls of four, and empty ones"
            await asyncio.gather(*running)
            assert all(length <= arrived[length] <= 1.011 * length for length in lengths)
            assert arrived[600] == pytest.approx(600), "the last one waits for nobody"

    run_virtual(scenario())


def test_requests_that_are_made_shortly_one_after_the_other_leave_in_one_call(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = []
            for number in range(8):
                running.append(asyncio.create_task(local.pool.generate(request(f"r{number}"))))
                await asyncio.sleep(0)
            await asyncio.gather(*running)
            assert local.handles[0].calls["submit"] == 1

    run_virtual(scenario())


def test_requests_that_are_made_during_a_submission_leave_together_when_it_has_ended(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            worker, left = local.handles[0].worker, []
            submit = worker.submit

            async def slow(requests):
                left.append([each.request_id.partition("#")[0] for each in requests])
                await asyncio.sleep(1.0)
                await submit(requests)

            monkeypatch.setattr(worker, "submit", slow)
            running = []
            for number in range(6):
                running.append(asyncio.create_task(local.pool.generate(request(f"r{number}"))))
                await asyncio.sleep(0.3)
            running.pop().cancel()
            await asyncio.gather(*running)
            assert left == [["r0"], ["r1", "r2", "r3"], ["r4"]], "and r5 was cancelled before it left"

    run_virtual(scenario())
