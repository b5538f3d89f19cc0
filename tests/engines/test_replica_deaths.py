"""What becomes of requests, weights and the run when replicas die, get stuck or cannot come back."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from roll.engines import worker as infer_worker
from roll.engines.base import EngineFailed, TokenChunk
from roll.engines.pool import FETCHED_AT_ONCE
from roll.engines.replica import PROGRESS_SECONDS
from roll.engines.worker import InferWorker
from roll.rollout.clock import run_virtual
from roll.runtime.pool import Pace
from roll.runtime.workers import WorkerDied, WorkerFailed, WorkerTimeout
from tests.runtime.local_engines import LOAD_SECONDS, START_SECONDS, LocalPool, request


def assert_whole(completion, tokens):
    """Every token once, in order, with its own log-probability, versions never falling."""
    assert completion.token_ids.tolist() == list(range(tokens))
    assert completion.logprobs.tolist() == [-number for number in range(tokens)]
    assert len(completion.versions) == tokens
    assert (np.diff(completion.versions) >= 0).all()
    assert completion.finish_reason == "length"


def test_tokens_that_were_fetched_before_a_death_are_kept(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = asyncio.create_task(local.pool.generate(request(tokens=12)))
            await asyncio.sleep(8.5)
            local.handles[0].kill()
            completion = await running
            assert_whole(completion, 12)
            kept = local.pool.resumed_tokens
            assert 8 - PROGRESS_SECONDS <= kept <= 8
            (again,) = local.handles[1].engine.seen
            assert again.prompt_token_ids.tolist() == [1, 2, *range(kept)]
            assert (again.first_token_index, again.sampling.max_new_tokens) == (kept, 12 - kept)
            assert (local.pool.reissued, local.pool.completed) == (1, 1)

    run_virtual(scenario())


def test_of_many_replicas_tokens_are_fetched_of_a_few_at_a_time_and_kept(monkeypatch):
    async def scenario():
        replicas, looks = 4 * FETCHED_AT_ONCE, 20
        async with LocalPool(monkeypatch, replicas=replicas) as local:
            carried, progress = Counter(), InferWorker.progress

            async def counted(worker, known=None):
                seen, chunks = await progress(worker, known)
                carried[worker.identity.rank] += sum(len(chunk.token_ids) for chunk in chunks.values())
                asked.append(asyncio.get_running_loop().time())
                fetched.extend([asked[-1]] if known is not None else [])
                return seen, chunks

            asked, fetched, turns = [], [], []
            take_turn = Pace.turn

            async def turn(pace):
                turns.append(pace)
                await take_turn(pace)

            monkeypatch.setattr(Pace, "turn", turn)
            monkeypatch.setattr(InferWorker, "progress", counted)
            running = [asyncio.create_task(local.pool.generate(request(f"r{i}", 60))) for i in range(replicas)]
            await asyncio.sleep(looks * PROGRESS_SECONDS + 1)
            assert len(asked) == replicas * looks, "each engine gives a sign of life at each look"
            assert len(turns) == len(asked) and len(set(turns)) == 1, "all at one pace"
            assert max(Counter(fetched).values()) <= FETCHED_AT_ONCE
            assert local.pool.tokens_seen >= replicas * (looks - 1) * PROGRESS_SECONDS, "all tokens are counted"
            assert all(carried[rank] <= looks * PROGRESS_SECONDS for rank in range(replicas)), "each travels once"
            local.handles[5].kill()
            for each in running:
                assert_whole(await each, 60)
            kept = local.pool.resumed_tokens
            assert looks * PROGRESS_SECONDS - 4 * PROGRESS_SECONDS - 1 <= kept <= looks * PROGRESS_SECONDS + 1

    run_virtual(scenario())


def test_an_engine_whose_results_come_is_not_asked_for_a_sign_of_life_until_they_stop(monkeypatch):
    async def scenario():
        replicas, seconds = 4 * FETCHED_AT_ONCE, 40
        async with LocalPool(monkeypatch, replicas=replicas) as local:
            asked, progress = Counter(), InferWorker.progress

            async def counted(worker, known=None):
                asked[worker.identity.rank, known is not None] += 1
                return await progress(worker, known)

            async def one_after_the_other(name):
                for number in range(seconds):
                    await local.pool.generate(request(f"{name}-{number}", 1), sticky_key=name)

            monkeypatch.setattr(InferWorker, "progress", counted)
            await asyncio.gather(*(one_after_the_other(f"r{index}") for index in range(replicas)))
            assert not any(count for (_, fetches), count in asked.items() if not fetches)
            assert sum(asked.values()) >= FETCHED_AT_ONCE * (seconds / PROGRESS_SECONDS - 2), "tokens are still fetched"
            asked.clear()
            await asyncio.sleep(4 * PROGRESS_SECONDS)
            assert all(asked[rank, False] + asked[rank, True] >= 2 for rank in range(replicas))

    run_virtual(scenario())


def test_a_response_is_decoded_where_it_was_made_also_if_two_engines_made_it(monkeypatch):
    class Numbers:
        def decode(self, token_ids, skip_special_tokens):
            assert skip_special_tokens
            return " ".join(map(str, token_ids))

    async def scenario():
        monkeypatch.setattr(infer_worker, "load_tokenizer", lambda model: Numbers())
        async with LocalPool(monkeypatch) as local:
            decoded = replace(request("decoded", 12), with_text=True)
            running = [asyncio.create_task(local.pool.generate(each)) for each in (decoded, request("plain", 12))]
            await asyncio.sleep(8.5)
            local.handles[0].kill()
            completion, plain = await asyncio.gather(*running)
            assert local.pool.resumed_tokens > 0
            assert completion.text == " ".join(map(str, range(12))) and plain.text is None

    run_virtual(scenario())


def test_a_response_that_is_given_up_is_not_decoded(monkeypatch):
    class Nobody:
        def decode(self, token_ids, skip_special_tokens):
            raise AssertionError("nobody reads it")

    async def scenario():
        monkeypatch.setattr(infer_worker, "load_tokenizer", lambda model: Nobody())
        async with LocalPool(monkeypatch) as local:
            given_up = asyncio.create_task(local.pool.generate(replace(request(tokens=12), with_text=True)))
            await asyncio.sleep(3.5)
            given_up.cancel()
            await asyncio.sleep(2)
            assert local.pool.abandoned_tokens == 4

    run_virtual(scenario())


def test_without_a_tokenizer_beside_the_model_the_response_comes_back_without_text(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            completion = await local.pool.generate(replace(request(), with_text=True))
            assert_whole(completion, 4)
            assert completion.text is None

    run_virtual(scenario())


@pytest.mark.parametrize("in_flight", ["keep", "resume"])
@pytest.mark.parametrize("first_death", np.arange(0.25, 14, 1.5))
@pytest.mark.parametrize("second_death", [0.0, 3.3, 9.0])
def test_nothing_is_lost_whenever_replicas_die_around_an_update(monkeypatch, in_flight, first_death, second_death):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, in_flight=in_flight, max_restarts=5) as local:
            lengths = [1, 3, 9, 14, 20, 6]
            running = [
                asyncio.create_task(local.pool.generate(request(f"r{index}", length), min_version=0))
                for index, length in enumerate(lengths)
            ]

            async def deaths():
                await asyncio.sleep(first_death)
                local.handles[0].kill()
                await asyncio.sleep(second_death)
                local.handles[1].kill()

            dying = asyncio.create_task(deaths())
            await asyncio.sleep(6)
            await local.publish(1)
            for completion, length in zip(await asyncio.gather(*running), lengths, strict=True):
                assert_whole(completion, length)
            await dying
            await asyncio.sleep(START_SECONDS + 2 * LOAD_SECONDS)
            assert local.pool.restarts == 2
            assert not local._running.done()
            last = await asyncio.gather(*(local.pool.generate(request(f"l{i}", 2), min_version=1) for i in range(4)))
            assert all(completion.versions.tolist() == [1, 1] for completion in last)

    run_virtual(scenario())


def test_a_response_never_goes_on_with_older_weights_than_it_has_seen(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local:
            running = asyncio.create_task(local.pool.generate(request(tokens=20), min_version=0))
            await asyncio.sleep(1)
            slow = local.handles[1].engine
            prepare = slow.prepare_weights

            async def prepare_late(buckets, version):
                """It goes on with the older weights meanwhile."""
                await asyncio.sleep(10)
                return await prepare(buckets, version)

            slow.prepare_weights = prepare_late
            publishing = asyncio.create_task(local.publish(1))
            await asyncio.sleep(LOAD_SECONDS + 2 * PROGRESS_SECONDS)
            assert local.handles[0].engine.version == 1 and slow.version == 0
            local.handles[0].kill()
            completion = await running
            assert_whole(completion, 20)
            assert completion.versions[local.pool.resumed_tokens - 1] == 1, "it had seen the newer weights"
            await publishing

    run_virtual(scenario())


def test_tokens_that_arrive_after_the_death_are_not_added_to_those_of_the_next_attempt(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            engine = local.handles[0].engine
            progress = engine.progress

            async def late_progress(known):
                await asyncio.sleep(1.5)
                return await progress(known)

            engine.progress = late_progress
            running = asyncio.create_task(local.pool.generate(request(tokens=30)))
            await asyncio.sleep(7.2)
            engine.fail_next = EngineFailed("out of device memory")
            assert_whole(await running, 30)
            assert local.pool.restarts == 1

    run_virtual(scenario())


def test_a_response_that_was_complete_when_its_engine_died_is_not_asked_for_again(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            engine, worker = local.handles[0].engine, local.handles[0].worker

            async def ended(known):
                tokens = np.arange(3, dtype=np.int32)
                last = TokenChunk(tokens, -tokens.astype(np.float32), np.zeros(3, dtype=np.int32), "stop")
                return {name: last for name in engine.running}

            async def nothing(wait_seconds):
                await asyncio.Event().wait()

            engine.progress, worker.collect = ended, nothing
            running = asyncio.create_task(local.pool.generate(request(tokens=9)))
            await asyncio.sleep(PROGRESS_SECONDS + 1)
            local.handles[0].kill()
            completion = await asyncio.wait_for(running, 1)
            assert (completion.finish_reason, completion.token_ids.tolist()) == ("stop", [0, 1, 2])
            assert (local.pool.reissued, local.pool.resumed_tokens) == (0, 3)

    run_virtual(scenario())


def test_an_episode_moves_with_its_tokens_and_stays_where_it_went(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local:
            other = asyncio.create_task(local.pool.generate(request("other", 40)))
            await asyncio.sleep(0.1)
            running = asyncio.create_task(local.pool.generate(request("turn", 9), sticky_key="episode"))
            await asyncio.sleep(5)
            local.handles[1].kill()
            assert_whole(await running, 9)
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            await local.pool.generate(request("next turn", 2), sticky_key="episode")
            homes = [handle for handle in local.handles if any("next" in s.request_id for s in handle.engine.seen)]
            assert homes == [local.handles[0]], "it is the busier one, but has the episode's prefix"
            assert_whole(await other, 40)

    run_virtual(scenario())


def test_what_ended_before_an_engine_failed_is_delivered(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            worker = local.handles[0].worker
            short = asyncio.create_task(local.pool.generate(request("short", 3)))
            await asyncio.sleep(0)
            running = asyncio.create_task(local.pool.generate(request("long", 9)))
            await asyncio.sleep(2.5)
            failure = EngineFailed("out of device memory")
            # Both in one turn of the event loop: the end of one request, and the failure.
            asyncio.get_running_loop().call_later(0.5, lambda: setattr(worker, "_failure", failure))
            assert_whole(await short, 3)
            assert_whole(await running, 9)
            assert local.pool.reissued == 1, "the one that had ended is not among them"

    run_virtual(scenario())


def test_an_engine_stuck_in_a_step_is_replaced_although_its_process_answers(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            running = asyncio.create_task(local.pool.generate(request(tokens=12)))
            await asyncio.sleep(6.5)
            local.handles[0].engine.stuck.set()
            assert_whole(await asyncio.wait_for(running, 48), 12)
            assert local.pool.restarts == 1
            assert local.pool.resumed_tokens >= 4
            assert "did not answer for 20 s (actor_infer.silence_timeout_seconds)" in local.events[0]

    run_virtual(scenario())


def test_an_engine_that_is_silent_while_it_takes_weights_is_left_alone(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:
            engine = local.handles[0].engine
            load = engine.load_weights

            async def slow_load(version):
                progress, engine.progress = engine.progress, hang
                await asyncio.sleep(70)
                engine.progress = progress
                return await load(version)

            async def hang(known):
                await asyncio.Event().wait()

            engine.load_weights = slow_load
            await asyncio.sleep(19)
            await local.publish(1)
            await asyncio.sleep(100)
            assert local.pool.restarts == 0

    run_virtual(scenario())


def test_an_engine_stuck_at_an_update_is_replaced_and_the_update_goes_on(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, publish_timeout_seconds=15.0) as local:
            running = [asyncio.create_task(local.pool.generate(request(f"r{index}", 9))) for index in range(4)]
            await asyncio.sleep(5.5)
            local.handles[0].engine.stuck.set()
            await local.publish(1)
            assert local.handles[1].engine.version == 1
            for each in running:
                assert_whole(await each, 9)
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert local.handles[2].engine.version == 1
            assert local.pool.restarts == 1
            assert "load_weights did not end within 15 s (weight_update.timeout_seconds)" in local.events[0]

    run_virtual(scenario())


def test_an_engine_that_fails_at_an_update_is_replaced(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch) as local:

            async def partly(version):
                raise EngineFailed("weights of version 1 were only partly loaded")

            local.handles[0].engine.load_weights = partly
            await local.publish(1)
            completion = await local.pool.generate(request(), min_version=1)
            assert completion.versions.tolist() == [1] * 4
            assert "only partly loaded" in local.events[0]

    run_virtual(scenario())


@pytest.mark.parametrize("method", ["create", "start", "load_weights"])
def test_a_replica_that_keeps_dying_ends_the_run_with_its_cause(monkeypatch, method):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, max_restarts=2) as local:
            local.prepare_next = lambda handle: setattr(handle, "dies_at", method)
            local.handles[0].kill()
            await asyncio.wait([local._running], timeout=60)
            failure = local._running.exception().exceptions[0]
            assert isinstance(failure, WorkerDied) and failure.worker == "actor_infer/0"
            assert len(local.events) == 2

    run_virtual(scenario())


def test_a_replica_that_fails_to_start_is_tried_again_and_then_ends_the_run(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, max_restarts=2) as local:

            def refuse(handle):
                async def start(spec):
                    raise MemoryError("no device memory left")

                handle.worker.start = start

            local.prepare_next = refuse
            local.handles[0].kill()
            await asyncio.wait([local._running], timeout=60)
            failure = local._running.exception().exceptions[0]
            assert isinstance(failure, WorkerFailed) and "no device memory left" in str(failure)
            assert len(local.handles) == 3

    run_virtual(scenario())


def test_a_replica_that_does_not_come_back_in_time_ends_the_run(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, start_timeout_seconds=30.0) as local:

            def hang(handle):
                async def start(spec):
                    await asyncio.Event().wait()

                handle.worker.start = start

            local.prepare_next = hang
            local.handles[0].kill()
            await asyncio.wait([local._running], timeout=31)
            failure = local._running.exception().exceptions[0]
            assert isinstance(failure, WorkerTimeout) and "actor_infer/0.start" in str(failure)

    run_virtual(scenario())


def test_requests_that_wait_for_a_replica_do_not_delay_an_update(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local:
            waiting = [
                asyncio.create_task(local.pool.generate(request(f"w{index}", 3), min_version=1)) for index in range(50)
            ]
            await asyncio.sleep(5)
            clock = asyncio.get_running_loop().time
            started = clock()
            await local.publish(1)
            assert clock() - started == pytest.approx(2 * LOAD_SECONDS)
            for each in waiting:
                assert (await each).versions.tolist() == [1, 1, 1]

    run_virtual(scenario())
