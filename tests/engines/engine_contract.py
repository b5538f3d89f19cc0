"""What every engine that computes in processes of its own promises: tests for `test_vllm_engine.py`, and for
`test_sglang_engine.py` with SGLang's stand-in (tests/engines/sglang_stand_in says what that shows) and, where
SGLang and a GPU are, with SGLang itself. Each of the two files has a fixture ``engine``, and what is its alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import numpy as np
import pytest
import torch

from roll.weights.buckets import WeightMismatch, pack_buckets, tensor_checksum
from tests.engines.engine_checks import full_scores, logits_of, scores_over_caches
from tests.engines.engines import PROMPT, begun, still_there
from tests.engines.vllm_helpers import EOS, LETTERS, MAX_LENGTH, VOCABULARY, buckets_of, request


@pytest.fixture
def published(engine):
    """The engine, holding the first model's weights."""
    engine.publish(engine.model)
    return engine


def test_a_response_has_its_tokens_logprobs_versions_and_reason(published):
    strategy = published.strategy

    async def scenario():
        return await asyncio.gather(
            *(strategy.generate(request(str(i), 60, seed=i)) for i in range(40)),
            strategy.generate(request("long", 20, seed=1, ignore_eos=True)),
        )

    *free, forced = published.run(scenario)
    for completion in [*free, forced]:
        count = len(completion.token_ids)
        assert count == len(completion.logprobs) == len(completion.versions)
        assert set(completion.versions) == {published.version}
        published.assert_close(completion.logprobs, full_scores(published.model, PROMPT, completion))
    assert {completion.finish_reason for completion in free} == {"stop", "length"}
    for completion in free:
        assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")
        assert EOS not in completion.token_ids[:-1]
        assert len(completion.token_ids) == 60 or completion.finish_reason == "stop"
    assert (len(forced.token_ids), forced.finish_reason) == (20, "length")


def test_equal_seeds_sample_equal_tokens_and_different_ones_do_not(published):
    strategy = published.strategy

    async def scenario():
        return [await strategy.generate(request("a", 30, seed=seed, ignore_eos=True)) for seed in (7, 7, 8)]

    first, again, other = published.run(scenario)
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()


def test_greedy_takes_the_most_probable_token_and_records_certainty(published):
    completion = published.run(published.strategy.generate, request("a", 20, temperature=0.0, ignore_eos=True))
    tokens = [*PROMPT, *completion.token_ids.tolist()]
    assert logits_of(published.model, tokens)[2:-1].argmax(-1).tolist() == tokens[3:]
    assert not completion.logprobs.any()


def test_a_response_ends_at_the_longest_sequence(published):
    completion = published.run(published.strategy.generate, request("a", 10_000, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (MAX_LENGTH - 3, "length")


def test_a_stream_gives_what_generate_gives(published):
    strategy = published.strategy

    async def scenario():
        chunks = [chunk async for chunk in strategy.stream(request("a", 30, seed=3))]
        return chunks, await strategy.generate(request("a", 30, seed=3))

    chunks, completion = published.run(scenario)
    assert len(chunks) > 1
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [completion.finish_reason]
    for name in ("token_ids", "logprobs", "versions"):
        joined = np.concatenate([getattr(chunk, name) for chunk in chunks])
        np.testing.assert_array_equal(joined, getattr(completion, name))


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(published):
    strategy = published.strategy
    free = [published.run(strategy.generate, request("free", 40, seed=seed)) for seed in range(20)]
    seed, whole = next((seed, each) for seed, each in enumerate(free) if len(each.token_ids) == 40)
    text = "".join(LETTERS[token] for token in whole.token_ids)
    stop = text[20:22]
    stopped = published.run(strategy.generate, request("a", 40, seed=seed, stop_strings=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == whole.token_ids[: text.index(stop) + 2].tolist()
    assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.token_ids)
    assert strategy.stats()["running"] == 0


def test_a_stop_string_is_seen_over_the_seam_of_a_continued_response(published):
    continued = dict(prompt=PROMPT, seed=1, first_token_index=1)
    free = published.run(published.strategy.generate, request("free", 30, **continued))
    first = int(free.token_ids[0])
    stop = LETTERS[7] + LETTERS[first]
    completion = published.run(published.strategy.generate, request("a", 30, stop_strings=(stop,), **continued))
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([first], "stop")


def test_aborted_requests_end_with_their_tokens_and_queued_ones_without(published):
    strategy, places = published.strategy, published.places
    names = [f"r{i}" for i in range(places)]

    async def scenario():
        running = [
            asyncio.create_task(strategy.generate(request(name, 180, seed=i, ignore_eos=True)))
            for i, name in enumerate(names)
        ]
        queued = asyncio.create_task(strategy.generate(request("queued", 180)))
        await begun(strategy, running, 8)
        assert strategy.stats()["waiting"] == 1
        await strategy.abort(["queued", "r3", "unknown"])
        ended = await asyncio.gather(queued, running[3])
        cancelled = running.pop(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        again = await strategy.generate(request("r0", 4, ignore_eos=True))
        still_there(strategy, places - 2)
        others = strategy.stats()["running"]
        await strategy.abort(names)
        await asyncio.gather(*running)
        return (*ended, again, others)

    queued, aborted, again, others = published.run(scenario)
    assert (len(queued.token_ids), queued.finish_reason) == (0, "abort")
    assert aborted.finish_reason == "abort"
    assert 8 <= len(aborted.token_ids) == len(aborted.versions) == len(aborted.logprobs) < 180
    assert len(again.token_ids) == 4
    assert others == places - 2
    stats = strategy.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)


def test_an_abort_is_heeded_however_early_it_comes(published):
    strategy = published.strategy

    async def scenario(turns):
        task = asyncio.create_task(strategy.generate(request("a", 180, ignore_eos=True)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await strategy.abort(["a"])
        return await task

    for turns in range(1, 10):
        completion = published.run(scenario, turns)
        assert completion.finish_reason == "abort" and len(completion.token_ids) < 180
    assert strategy._requests.gate._free == published.places


def test_a_bad_request_fails_alone(published):
    strategy = published.strategy
    bad = [
        request("empty", prompt=()),
        request("long", prompt=(5,) * MAX_LENGTH),
        request("outside", prompt=(VOCABULARY,)),
        *published.refused,
    ]

    async def scenario():
        good = asyncio.create_task(strategy.generate(request("good", 30, ignore_eos=True)))
        for each in bad:
            with pytest.raises(ValueError, match=each.request_id):
                await strategy.generate(each)
        twice = asyncio.create_task(strategy.generate(request("twice", 100, ignore_eos=True)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'twice'"):
            await strategy.generate(request("twice"))
        return await asyncio.gather(good, twice)

    assert [len(completion.token_ids) for completion in published.run(scenario)] == [30, 100]


@pytest.mark.parametrize("mode", ["keep", "resume", "drain"])
def test_an_update_while_every_place_is_taken(published, mode):
    """Right counts, versions that never go back, and spans that their own weights reproduce; a request that waits for a
    place delays nothing and begins with the new weights."""
    strategy, old, places = published.strategy, published.version, published.places
    second = published.make_model(1)
    lengths = [110 + 2 * (index % 32) for index in range(places)]

    async def scenario():
        running = [
            asyncio.create_task(strategy.generate(request(f"r{i}", length, (5, 6, i), seed=i, ignore_eos=True)))
            for i, length in enumerate(lengths)
        ]
        queued = asyncio.create_task(strategy.generate(request("queued", 10, (5, 6, 9), ignore_eos=True)))
        await begun(strategy, running, 12)
        assert strategy.stats()["running"] == places
        await published.load(second, old + 1, mode, requests=places if mode != "drain" else 0)
        return await asyncio.gather(*running, queued)

    *completions, queued = published.run(scenario)
    published.version = old + 1
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert set(queued.versions) == {old + 1}
    published.assert_close(queued.logprobs, full_scores(second, (5, 6, 9), queued))
    by_version = {old: published.model, old + 1: second}
    for index, completion in enumerate(completions):
        prompt = (5, 6, index)
        assert (np.diff(completion.versions) >= 0).all()
        assert set(completion.versions) == ({old} if mode == "drain" else {old, old + 1})
        if mode == "keep":
            published.assert_close(completion.logprobs, scores_over_caches(by_version, prompt, completion))
            continue
        for version, model in by_version.items():
            span = completion.versions == version
            if span.any():
                published.assert_close(completion.logprobs[span], full_scores(model, prompt, completion)[span])


def test_caches_of_old_weights_are_never_shared_with_new_requests(published):
    strategy, second = published.strategy, published.make_model(2)
    prompt = tuple(np.random.default_rng(0).integers(2, 90, 100).tolist())

    async def scenario():
        long = asyncio.create_task(strategy.generate(request("r", 90, prompt=prompt, ignore_eos=True)))
        await begun(strategy, [long], 1)
        await published.load(second, published.version + 1, "keep", requests=1)
        late = await strategy.generate(request("late", 8, prompt=prompt, seed=2, ignore_eos=True))
        await long
        return late

    late = published.run(scenario)
    published.version += 1
    published.assert_close(late.logprobs, full_scores(second, prompt, late))


def test_a_version_that_comes_again_with_other_weights_shares_no_cache_with_the_one_before(published):
    """As after the death of a trainer. The prompt fills a block of vLLM's cache, which has 128 tokens."""
    prompt = tuple(np.random.default_rng(1).integers(2, 90, 140).tolist())
    for seed in (5, 6):
        model = published.make_model(seed)
        published.run(published.load, model, published.version)
        asked = request(f"again {seed}", 8, prompt=prompt, seed=seed, ignore_eos=True)
        completion = published.run(published.strategy.generate, asked)
        assert set(completion.versions) == {published.version}
        published.assert_close(completion.logprobs, full_scores(model, prompt, completion))


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_a_paused_engine_computes_nothing_and_starts_nothing(published, mode):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 100, ignore_eos=True)))
        await begun(strategy, [running], 8)
        await strategy.pause(mode)
        await published.settle()
        frozen = strategy.stats()["generated_tokens"]
        late = asyncio.create_task(strategy.generate(request("late", 5, ignore_eos=True)))
        for _ in range(5):
            await strategy.progress({})
        await strategy.abort([])
        assert strategy.stats()["generated_tokens"] == frozen
        assert strategy.stats()["waiting"] == 1 and not late.done()
        await strategy.resume()
        return await asyncio.gather(running, late)

    assert [len(completion.token_ids) for completion in published.run(scenario)] == [100, 5]


def test_a_drain_interrupted_by_resume_says_so_and_loses_nothing(published):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 150, ignore_eos=True)))
        await begun(strategy, [running], 4)
        drain = asyncio.create_task(strategy.pause("drain"))
        await asyncio.sleep(0.01)
        still_there(strategy, 1)
        await strategy.resume()
        with pytest.raises(RuntimeError, match="interrupted by resume"):
            await drain
        late = await strategy.generate(request("late", 5, ignore_eos=True))
        return await running, late

    assert [len(completion.token_ids) for completion in published.run(scenario)] == [150, 5]


def test_the_receipt_tells_the_version_and_what_was_loaded(published):
    model = published.make_model(3)
    receipt = published.run(published.load, model, published.version + 1)
    published.version += 1
    assert receipt.version == published.version
    assert receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in model.named_parameters()}
    assert receipt.parameter_count == sum(tensor.numel() for tensor in model.parameters())


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "twice"])
def test_a_publication_that_does_not_fit_is_refused_by_name_and_changes_nothing(published, fault):
    weights = dict(published.make_model(1).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        name = "model.layers.9.extra"
        weights[name] = torch.zeros(2)
    elif fault == "shape":
        weights[name] = weights[name][:-1]
    elif fault == "dtype":
        weights[name] = weights[name].long()
    buckets = list(pack_buckets(weights.items(), 64 * 1024))
    if fault == "twice":
        name = buckets[0].tensors[0][0]
        buckets.append(buckets[0])

    async def scenario():
        with pytest.raises(WeightMismatch, match=name.replace(".", r"\.")):
            await published.strategy.prepare_weights(buckets, published.version + 1)
        with pytest.raises(RuntimeError, match="nothing was prepared"):
            await published.strategy.load_weights(published.version + 1)
        return await published.strategy.generate(request("a", 20, ignore_eos=True))

    completion = published.run(scenario)
    assert set(completion.versions) == {published.version}
    published.assert_close(completion.logprobs, full_scores(published.model, PROMPT, completion))


def test_weights_are_not_replaced_under_running_requests(published):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 150, ignore_eos=True)))
        await begun(strategy, [running], 1)
        for attempt in (strategy.load_weights, lambda version: strategy.sleep()):
            await strategy.prepare_weights(buckets_of(published.make_model(1)), published.version + 1)
            still_there(strategy, 1)
            with pytest.raises(RuntimeError, match="paused or idle"):
                await attempt(published.version + 1)
        return await running

    assert set(published.run(scenario).versions) == {published.version}


def test_an_idle_engine_takes_weights_without_a_pause(published):
    model = published.make_model(5)

    async def scenario():
        await published.strategy.prepare_weights(buckets_of(model), published.version + 1)
        await published.strategy.load_weights(published.version + 1)
        return await published.strategy.generate(request("a", 12, ignore_eos=True))

    completion = published.run(scenario)
    published.version += 1
    published.assert_close(completion.logprobs, full_scores(model, PROMPT, completion))


def test_publications_leave_nothing_open(published):
    """None of them: what else this process opens meanwhile, once or twice, is not theirs."""
    model = published.make_model(1)
    published.publish(model)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        published.publish(model)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_weights_are_drawn_beside_the_event_loop(published):
    """A transport may block while it fetches; requests go on meanwhile."""
    buckets = buckets_of(published.make_model(1))

    def slow():
        released.wait(60)
        yield from buckets

    released = threading.Event()

    async def scenario():
        preparing = asyncio.create_task(published.strategy.prepare_weights(slow(), published.version + 1))
        completion = await published.strategy.generate(request("a", 20, ignore_eos=True))
        released.set()
        await preparing
        return completion

    assert len(published.run(scenario).token_ids) == 20


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_requests_go_on_after_sleep_and_wake(published, mode):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 120, seed=4, ignore_eos=True)))
        await begun(strategy, [running], 8)
        await strategy.pause(mode)
        await strategy.sleep()
        await strategy.sleep()
        with pytest.raises(RuntimeError, match="wake it"):
            await strategy.resume()
        await strategy.wake()
        await strategy.resume()
        return await running

    completion = published.run(scenario)
    assert len(completion.token_ids) == 120
    published.assert_close(completion.logprobs, full_scores(published.model, PROMPT, completion))


def test_scores_are_log_probabilities_at_temperature_one_and_need_no_free_place(published):
    strategy, places = published.strategy, published.places
    rng = np.random.default_rng(1)
    sequences = [rng.integers(2, 90, length).astype(np.int32) for length in published.scored_lengths]

    async def scenario():
        names = [f"r{i}" for i in range(2 * places)]
        running = [asyncio.create_task(strategy.generate(request(name, 180, ignore_eos=True))) for name in names]
        await begun(strategy, running, 2, places)
        scores = await strategy.score(sequences)
        still_there(strategy, 2 * places)
        waiting = strategy.stats()["waiting"]
        await strategy.abort(names)
        await asyncio.gather(*running)
        return scores, waiting

    scores, waiting = published.run(scenario)
    assert waiting == places
    for tokens, score in zip(sequences, scores, strict=True):
        logprobs = torch.log_softmax(logits_of(published.model, tokens.tolist())[:-1], -1)
        expected = logprobs[range(len(tokens) - 1), tokens[1:].tolist()].numpy()
        assert score.dtype == np.float32 and score[0] == 0 and len(score) == len(tokens)
        if len(tokens) > 1:
            published.assert_close(score[1:], expected)


def test_versions_told_before_the_end_are_never_newer_than_the_true_ones(published):
    strategy = published.strategy

    async def scenario():
        running = [
            asyncio.create_task(strategy.generate(request(f"r{i}", 100 + i, seed=i, ignore_eos=True))) for i in range(8)
        ]
        told: dict[str, list[np.ndarray]] = {f"r{i}": [] for i in range(8)}
        for seed in (1, 2):
            await begun(strategy, running, 28 * seed)
            await published.load(published.make_model(seed), published.version + 1, requests=8)
            published.version += 1
            for _ in range(4):
                await asyncio.sleep(0.015)
                for name, chunk in (await strategy.progress({})).items():
                    told[name].append(chunk.versions)
        return told, {each.request_id: each for each in await asyncio.gather(*running)}

    told, completions = published.run(scenario)
    for name, versions in told.items():
        true = completions[name].versions
        assert len(set(true)) == 3
        for each in versions:
            assert (np.diff(each) >= 0).all() and (each <= true[: len(each)]).all()


def test_progress_gives_the_tokens_beyond_those_known(published):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 120, seed=2, ignore_eos=True)))
        await begun(strategy, [running], 24)
        await strategy.pause("keep")
        await published.settle()
        still_there(strategy, 1)
        whole = (await strategy.progress({}))["a"]
        rest = (await strategy.progress({"a": 10}))["a"]
        nothing = await strategy.progress({"a": len(whole.token_ids)})
        await strategy.resume()
        return whole, rest, nothing, await running

    whole, rest, nothing, completion = published.run(scenario)
    count = len(whole.token_ids)
    assert whole.token_ids.tolist() == completion.token_ids[:count].tolist()
    assert rest.token_ids.tolist() == completion.token_ids[10:count].tolist()
    assert rest.versions.tolist() == completion.versions[10:count].tolist()
    np.testing.assert_array_equal(whole.logprobs, completion.logprobs[:count])
    assert "a" not in nothing
