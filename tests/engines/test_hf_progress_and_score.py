"""What the engine tells of running requests, what can be made of it when it dies, and scores of given sequences."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from roll.engines.base import EngineFailed
from roll.engines.response import PartialResponse
from roll.weights.buckets import pack_buckets
from tests.engines.hf_helpers import VOCABULARY, load, make_request, make_strategy, submit

DEADLINE_SECONDS = 60


def with_engine(strategy, scenario):
    async def main():
        await strategy.start()
        try:
            return await scenario(strategy)
        finally:
            await strategy.shutdown()

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_SECONDS))


async def until_known(strategy, name: str, tokens: int):
    """The chunk of a request once it has so many tokens; the engine stands still afterwards."""
    while True:
        await strategy.pause("keep")  # before looking: the request may end while its chunk is on its way
        chunk = (await strategy.progress({})).get(name)
        if chunk is not None and len(chunk.token_ids) >= tokens:
            return chunk
        await strategy.resume()
        await asyncio.sleep(0)


def plain_logprobs(path: str, tokens: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
    return logprobs.gather(1, ids[1:, None])[:, 0].numpy()


def test_progress_tells_the_tokens_beyond_those_that_are_known(qwen_path):
    async def scenario(strategy):
        requests = [make_request(f"r{index}", [3, 4, 5 + index], 60, seed=index, ignore_eos=True) for index in range(3)]
        running = [asyncio.ensure_future(strategy.generate(request)) for request in requests]
        first = await until_known(strategy, "r1", 5)
        count = len(first.token_ids)
        seen = await strategy.progress({"r0": 0, "r1": 2, "r2": count, "gone": 7})
        assert seen.keys() == {"r0", "r1"}, "a request without further tokens is left out"
        assert len(seen["r0"].token_ids) == count
        assert seen["r1"].token_ids.tolist() == first.token_ids[2:].tolist()
        assert seen["r1"].finish_reason is None and seen["r1"].versions.tolist() == [0] * (count - 2)
        await strategy.resume()
        completion = (await asyncio.gather(*running))[1]
        assert completion.token_ids[:count].tolist() == first.token_ids.tolist()
        assert completion.logprobs[:count].tolist() == first.logprobs.tolist()
        assert await strategy.progress({"r1": 5}) == {}

    with_engine(make_strategy(qwen_path), scenario)


def test_requests_that_wait_for_a_row_have_no_progress_and_do_not_delay_a_pause(qwen_path):
    async def scenario(strategy):
        running = asyncio.ensure_future(strategy.generate(make_request("runs", [3], 30, ignore_eos=True)))
        await asyncio.sleep(0)
        waiting = [
            asyncio.ensure_future(strategy.generate(make_request(f"w{index}", [4], 100, ignore_eos=True)))
            for index in range(8)
        ]
        await until_known(strategy, "runs", 3)
        assert (await strategy.progress({})).keys() == {"runs"}
        await strategy.resume()
        await strategy.pause("drain")
        assert not any(each.done() for each in waiting)
        assert len((await running).token_ids) == 30
        assert strategy.stats()["waiting"] == 8
        weights = AutoModelForCausalLM.from_pretrained(qwen_path, dtype=torch.float32).named_parameters()
        await load(strategy, pack_buckets(weights, 1 << 20), 4)
        await strategy.resume()
        for each in waiting:
            assert set((await each).versions.tolist()) == {4}

    with_engine(make_strategy(qwen_path, max_running_requests=1), scenario)


def test_a_stuck_or_failed_engine_has_no_progress_to_tell(qwen_path):
    async def scenario(strategy):
        engine = strategy._thread.engine
        step, entered, release = engine.step, threading.Event(), threading.Event()

        def stuck(admit):
            entered.set()
            release.wait(DEADLINE_SECONDS)

        engine.step = stuck
        running = asyncio.ensure_future(strategy.generate(make_request("r", [3], 5)))
        await asyncio.to_thread(entered.wait, DEADLINE_SECONDS)
        asking = asyncio.ensure_future(strategy.progress({}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done()
        engine.step = step
        release.set()
        assert await asking == {}
        await running

        def broken(admit):
            raise RuntimeError("the device is gone")

        engine.step = broken
        with pytest.raises(EngineFailed, match="the device is gone"):
            await strategy.generate(make_request("s", [3], 5))
        with pytest.raises(EngineFailed, match="the device is gone"):
            await strategy.progress({})

    with_engine(make_strategy(qwen_path), scenario)


@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_an_engine_that_stands_still_still_answers(qwen_path, state):
    async def scenario(strategy):
        running = asyncio.ensure_future(strategy.generate(make_request("r", [3], 40, ignore_eos=True)))
        chunk = await until_known(strategy, "r", 4)
        if state == "asleep":
            await strategy.sleep()
        assert (await strategy.progress({}))["r"].token_ids.tolist() == chunk.token_ids.tolist()
        if state == "asleep":
            await strategy.wake()
        await strategy.resume()
        await running

    with_engine(make_strategy(qwen_path), scenario)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}, {"temperature": 0.8, "top_p": 0.9, "seed": 12}],
    ids=["greedy", "seeded", "top_p"],
)
def test_a_response_that_goes_on_in_another_engine_is_the_uninterrupted_one(model_path, sampling):
    request = make_request("r", [3, 4, 5, 6], 40, ignore_eos=True, **sampling)

    async def whole(strategy):
        return await strategy.generate(request)

    async def dies(strategy):
        running = asyncio.ensure_future(strategy.generate(request))
        chunk = await until_known(strategy, "r", 13)
        running.cancel()
        return chunk

    expected = with_engine(make_strategy(model_path), whole)
    partial = PartialResponse(request, min_version=None, max_length=128)
    partial.add(with_engine(make_strategy(model_path), dies))
    kept = partial.cut_off()
    assert 13 <= kept < 40
    rest = with_engine(make_strategy(model_path), lambda strategy: strategy.generate(partial.remaining()))
    assert len(rest.token_ids) == 40 - kept
    found = partial.joined_to(rest)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert found.finish_reason == expected.finish_reason == "length"


def spelled_tokenizer(folder) -> None:
    """Token i is one character, so that a stop string spans tokens."""
    vocabulary = {chr(ord("A") + index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="A").save_pretrained(folder)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_stop_string_that_began_before_the_death_still_ends_the_response(qwen_path, tmp_path, kept):
    AutoModelForCausalLM.from_pretrained(qwen_path).save_pretrained(tmp_path)
    spelled_tokenizer(tmp_path)
    free = make_request("free", [3, 4, 5], 4, seed=5, ignore_eos=True)
    path = str(tmp_path)
    expected = with_engine(make_strategy(path), lambda strategy: strategy.generate(free))
    stop = "".join(chr(ord("A") + token) for token in expected.token_ids[:4])
    request = make_request("r", [3, 4, 5], 50, seed=5, stop_strings=(stop,))
    partial = PartialResponse(request, min_version=None, max_length=128)
    uninterrupted = with_engine(make_strategy(path), lambda strategy: strategy.generate(request))
    assert uninterrupted.finish_reason == "stop" and len(uninterrupted.token_ids) == 4

    async def dies(strategy):
        await strategy.pause("keep")

        def steps(engine):
            submit(engine, request)
            for _ in range(kept):
                engine.step()
            ((_, chunk),) = engine.progress({})
            return chunk

        return await strategy._thread.call(steps)

    partial.add(with_engine(make_strategy(path), dies))
    assert partial.cut_off() == kept
    rest = with_engine(make_strategy(path), lambda strategy: strategy.generate(partial.remaining()))
    whole = partial.joined_to(rest)
    assert whole.finish_reason == "stop"
    assert whole.token_ids.tolist() == uninterrupted.token_ids.tolist()


def test_scores_are_the_log_probabilities_of_the_sequences(model_path):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in (1, 2, 17, 64)]

    async def scenario(strategy):
        running = asyncio.ensure_future(strategy.generate(make_request("r", [3], 80, ignore_eos=True, temperature=0.5)))
        scores = await strategy.score(sequences)
        assert not running.done(), "it runs beside"
        await running
        return scores

    for tokens, scores in zip(sequences, with_engine(make_strategy(model_path), scenario), strict=True):
        assert scores.dtype == np.float32 and len(scores) == len(tokens) and scores[0] == 0
        np.testing.assert_allclose(scores[1:], plain_logprobs(model_path, tokens), atol=1e-5)


def test_scores_are_those_of_the_weights_held_now_and_change_no_request(qwen_path):
    tokens = np.array([3, 9, 2, 8], dtype=np.int32)
    request = make_request("r", [3, 4], 30, seed=3, ignore_eos=True)

    async def scenario(strategy):
        before = await strategy.score([tokens])
        running = asyncio.ensure_future(strategy.generate(request))
        await until_known(strategy, "r", 5)
        await strategy.resume()
        await strategy.score([tokens] * 3)
        completion = await running
        model = AutoModelForCausalLM.from_pretrained(qwen_path, dtype=torch.float32)
        weights = {name: parameter.detach() * 1.1 for name, parameter in model.named_parameters()}
        await load(strategy, pack_buckets(weights.items(), 1 << 20), 1)
        after = await strategy.score([tokens])
        assert np.abs(after[0] - before[0]).max() > 1e-3
        return completion

    scored = with_engine(make_strategy(qwen_path), scenario)
    alone = with_engine(make_strategy(qwen_path), lambda strategy: strategy.generate(request))
    assert scored.token_ids.tolist() == alone.token_ids.tolist()
    assert scored.logprobs.tolist() == alone.logprobs.tolist()


@pytest.mark.parametrize(
    ("tokens", "words"), [([], "0 tokens"), ([1] * 129, "129 tokens"), ([1, VOCABULARY], "vocabulary of 40")]
)
def test_a_sequence_that_does_not_fit_is_refused(qwen_path, tokens, words):
    async def scenario(strategy):
        with pytest.raises(ValueError, match=words):
            await strategy.score([np.array(tokens, dtype=np.int32)])
        assert len(await strategy.score([np.array([1, 2])])) == 1

    with_engine(make_strategy(qwen_path), scenario)
