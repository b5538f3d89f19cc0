"""SGLang's adapter against a running server: what it samples, records, takes in and survives.

Every test runs with the stand-in (tests/strategies/infer/sglang_stand_in says what that shows), and with SGLang itself
where it and a GPU are.
"""

from __future__ import annotations

import asyncio
import gc
import os

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from roll.strategies.infer.base import EngineFailed, WeightMismatch
from roll.strategies.weights import tensor_checksum
from tests.strategies.infer.engine_checks import full_scores, logits_of, scores_over_caches
from tests.strategies.infer.sglang_helpers import (
    PLACES,
    begun,
    make_wide_model,
    running_sglang,
    running_stand_in,
)
from tests.strategies.infer.vllm_helpers import (
    EOS,
    LETTERS,
    MAX_LENGTH,
    VOCABULARY,
    buckets_of,
    make_tokenizer,
    request,
)

PROMPT = (5, 6, 7)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def first_model():
    """The weights that the engine starts with."""
    return make_wide_model()


@pytest.fixture(scope="module")
def folder(first_model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("sglang")
    first_model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["stand-in", "sglang"])
def engine(request, folder):
    start = running_stand_in if request.param == "stand-in" else running_sglang
    with start(folder, **({"enable_deterministic_inference": True} if request.param == "stand-in" else {})) as running:
        running.tolerance = (1e-5, 1e-3) if request.param == "stand-in" else (1e-3, 2e-2)
        yield running


@pytest.fixture
def published(engine, first_model):
    """The engine, holding the first model's weights."""
    engine.publish(first_model)
    return engine


def assert_close(engine, recorded, expected) -> None:
    """Within rounding (of kernels for GPUs, with the real engine)."""
    difference = np.abs(recorded - expected)
    mean, most = engine.tolerance
    assert difference.mean() < mean and difference.max() < most


def test_a_response_has_its_tokens_logprobs_versions_and_reason(published, first_model):
    strategy = published.strategy

    async def scenario():
        return await asyncio.gather(
            *(strategy.generate(request(str(i), 60, seed=i)) for i in range(24)),
            strategy.generate(request("long", 20, seed=1, ignore_eos=True)),
        )

    *free, forced = published.run(scenario)
    for completion in [*free, forced]:
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        assert set(completion.versions) == {published.version}
        assert_close(published, completion.logprobs, full_scores(first_model, PROMPT, completion))
    assert {completion.finish_reason for completion in free} == {"stop", "length"}
    for completion in free:
        assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")
        assert EOS not in completion.token_ids[:-1]
        assert len(completion.token_ids) == 60 or completion.finish_reason == "stop"
    assert (len(forced.token_ids), forced.finish_reason) == (20, "length")


def test_equal_seeds_sample_equal_tokens_and_a_continued_response_goes_on_with_them(published):
    strategy = published.strategy

    async def scenario():
        whole = [await strategy.generate(request("a", 24, seed=seed, ignore_eos=True)) for seed in (7, 7, 8)]
        start = whole[0].token_ids[:10].tolist()
        rest = request("b", 14, (*PROMPT, *start), seed=7, first_token_index=10, ignore_eos=True)
        return (*whole, await strategy.generate(rest))

    first, again, other, rest = published.run(scenario)
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()
    assert rest.token_ids.tolist() == first.token_ids[10:].tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 12, 0.8), (1.0, 90, 0.5)]
)
def test_logprobs_are_those_of_the_distribution_sampled_from(published, first_model, temperature, top_k, top_p):
    strategy = published.strategy
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True)

    async def scenario():
        return await asyncio.gather(*(strategy.generate(request(str(i), 20, seed=i, **sampling)) for i in range(6)))

    for completion in published.run(scenario):
        logits = logits_of(first_model, [*PROMPT, *completion.token_ids.tolist()])[2:-1]
        probabilities, order = torch.softmax(logits / temperature, -1).sort(descending=True)
        kept = probabilities.clone()
        if top_k:
            kept[:, top_k:] = 0
        kept[probabilities.cumsum(-1) - probabilities > top_p] = 0
        kept = torch.zeros_like(kept).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
        expected = kept[range(20), completion.token_ids.tolist()].log().numpy()
        assert_close(published, completion.logprobs, expected)


def test_greedy_takes_the_most_probable_token_and_records_certainty(published, first_model):
    for sampling in (dict(temperature=0.0), dict(top_k=1)):
        completion = published.run(published.strategy.generate, request("a", 20, ignore_eos=True, **sampling))
        tokens = [*PROMPT, *completion.token_ids.tolist()]
        assert logits_of(first_model, tokens)[2:-1].argmax(-1).tolist() == tokens[3:]
        assert not completion.logprobs.any()


def test_a_response_ends_at_the_longest_sequence(published):
    completion = published.run(published.strategy.generate, request("a", 10_000, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (MAX_LENGTH - 3, "length")
    last = request("b", 10_000, (5,) * (MAX_LENGTH - 1), ignore_eos=True)
    assert len(published.run(published.strategy.generate, last).token_ids) == 1


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
    whole = published.run(strategy.generate, request("free", 40, seed=3, ignore_eos=True))
    text = "".join(LETTERS[token] for token in whole.token_ids)
    before_the_end = next((at for at, token in enumerate(whole.token_ids) if token == EOS), 40)
    stop = text[before_the_end - 3 : before_the_end - 1]
    stopped = published.run(strategy.generate, request("a", 40, seed=3, stop_strings=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == whole.token_ids[: text.index(stop) + 2].tolist()
    assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.token_ids)
    assert strategy.stats()["running"] == 0


def test_aborted_requests_end_with_their_tokens_and_queued_ones_without(published):
    strategy = published.strategy

    async def scenario():
        running = [
            asyncio.create_task(strategy.generate(request(f"r{i}", 180, seed=i, ignore_eos=True)))
            for i in range(PLACES)
        ]
        await begun(strategy, PLACES, 8)
        queued = asyncio.create_task(strategy.generate(request("queued", 180)))
        await asyncio.sleep(0)
        assert strategy.stats()["waiting"] == 1
        await strategy.abort(["queued", "r1", "unknown"])
        ended = await asyncio.gather(queued, running[1])
        cancelled = running.pop(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        again = await strategy.generate(request("r0", 4, ignore_eos=True))
        others = strategy.stats()["running"]
        await strategy.abort([f"r{i}" for i in range(PLACES)])
        await asyncio.gather(*running)
        return (*ended, again, others)

    queued, aborted, again, others = published.run(scenario)
    assert (len(queued.token_ids), queued.finish_reason) == (0, "abort")
    assert aborted.finish_reason == "abort"
    assert 8 <= len(aborted.token_ids) == len(aborted.versions) == len(aborted.logprobs) < 180
    assert len(again.token_ids) == 4
    assert others == PLACES - 2
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
    assert strategy._gate._free == PLACES


def test_a_request_aborted_while_paused_ends_at_once(published):
    strategy = published.strategy

    async def scenario():
        running = [asyncio.create_task(strategy.generate(request(f"r{i}", 150, ignore_eos=True))) for i in range(2)]
        await begun(strategy, 2, 4)
        await strategy.pause("keep")
        await strategy.abort(["r0"])
        aborted = await asyncio.wait_for(running[0], 10)
        await strategy.resume()
        return aborted, await running[1]

    aborted, other = published.run(scenario)
    assert aborted.finish_reason == "abort" and len(other.token_ids) == 150


def test_a_bad_request_fails_alone(published):
    strategy = published.strategy
    bad = [
        request("empty", prompt=()),
        request("long", prompt=(5,) * MAX_LENGTH),
        request("outside", prompt=(VOCABULARY,)),
        request("cold", temperature=1e-7),
        request("nucleus", top_p=0.9),
        request("wide", top_k=5000),
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
def test_an_update_in_the_middle_of_requests(published, first_model, mode):
    """Right counts, versions that never go back, and spans that their own weights reproduce; a request that waits for a
    place delays nothing and begins with the new weights."""
    strategy, old = published.strategy, published.version
    second = make_wide_model(1)
    lengths = [50 + 3 * index for index in range(PLACES)]

    async def scenario():
        running = [
            asyncio.create_task(strategy.generate(request(f"r{i}", length, (5, 6, i), seed=i, ignore_eos=True)))
            for i, length in enumerate(lengths)
        ]
        await begun(strategy, PLACES, 9)
        queued = asyncio.create_task(strategy.generate(request("queued", 10, (5, 6, 9), ignore_eos=True)))
        await published.load(second, old + 1, mode)
        return await asyncio.gather(*running, queued)

    *completions, queued = published.run(scenario)
    published.version = old + 1
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert set(queued.versions) == {old + 1}
    assert_close(published, queued.logprobs, full_scores(second, (5, 6, 9), queued))
    by_version = {old: first_model, old + 1: second}
    for index, completion in enumerate(completions):
        prompt = (5, 6, index)
        assert (np.diff(completion.versions) >= 0).all()
        assert set(completion.versions) == ({old} if mode == "drain" else {old, old + 1})
        if mode == "keep":
            assert_close(published, completion.logprobs, scores_over_caches(by_version, prompt, completion))
            continue
        for version, model in by_version.items():
            span = completion.versions == version
            if span.any():
                assert_close(published, completion.logprobs[span], full_scores(model, prompt, completion)[span])


def test_caches_of_old_weights_are_never_shared_with_new_requests(published):
    strategy, second = published.strategy, make_wide_model(2)
    prompt = tuple(np.random.default_rng(0).integers(2, 90, 140).tolist())

    async def scenario():
        long = asyncio.create_task(strategy.generate(request("r", 40, prompt=prompt, ignore_eos=True)))
        await begun(strategy, 1, 1)
        await published.load(second, published.version + 1, "keep")
        late = await strategy.generate(request("late", 8, prompt=prompt, seed=2, ignore_eos=True))
        await long
        return late

    late = published.run(scenario)
    published.version += 1
    assert_close(published, late.logprobs, full_scores(second, prompt, late))


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_a_paused_engine_starts_nothing_and_goes_on(published, mode):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 100, ignore_eos=True)))
        await begun(strategy, 1, 8)
        await strategy.pause(mode)
        for _ in range(5):  # What was on its way arrives.
            await strategy.progress({})
        frozen = strategy.stats()["generated_tokens"]
        late = asyncio.create_task(strategy.generate(request("late", 5, ignore_eos=True)))
        for _ in range(5):
            await strategy.progress({})
        assert strategy.stats()["generated_tokens"] == frozen
        assert strategy.stats()["waiting"] == 1 and not late.done()
        await strategy.resume()
        return await asyncio.gather(running, late)

    assert [len(completion.token_ids) for completion in published.run(scenario)] == [100, 5]


def test_a_drain_interrupted_by_resume_says_so_and_loses_nothing(published):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 150, ignore_eos=True)))
        await begun(strategy, 1, 4)
        drain = asyncio.create_task(strategy.pause("drain"))
        await asyncio.sleep(0)
        await strategy.resume()
        with pytest.raises(RuntimeError, match="interrupted by resume"):
            await drain
        late = await strategy.generate(request("late", 5, ignore_eos=True))
        return await running, late

    assert [len(completion.token_ids) for completion in published.run(scenario)] == [150, 5]


def test_the_receipt_tells_the_version_and_what_was_loaded(published):
    model = make_wide_model(3)
    receipt = published.run(published.load, model, published.version + 1)
    published.version += 1
    assert receipt.version == published.version
    assert receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in model.named_parameters()}
    assert receipt.parameter_count == sum(tensor.numel() for tensor in model.parameters())


def test_a_publication_that_does_not_fit_is_refused_by_name_and_changes_nothing(published, first_model):
    weights = dict(make_wide_model(1).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name][:-1]

    class Odd(torch.nn.Module):
        def named_parameters(self):
            return weights.items()

    async def scenario():
        with pytest.raises(WeightMismatch, match=name.replace(".", r"\.")):
            await published.strategy.prepare_weights(buckets_of(Odd()), published.version + 1)
        with pytest.raises(RuntimeError, match="nothing was prepared"):
            await published.strategy.load_weights(published.version + 1)
        return await published.strategy.generate(request("a", 20, ignore_eos=True))

    completion = published.run(scenario)
    assert set(completion.versions) == {published.version}
    assert_close(published, completion.logprobs, full_scores(first_model, PROMPT, completion))


def test_weights_are_not_replaced_under_running_requests(published):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 120, ignore_eos=True)))
        await begun(strategy, 1, 1)
        for attempt in (strategy.load_weights, lambda version: strategy.sleep()):
            await strategy.prepare_weights(buckets_of(make_wide_model(1)), published.version + 1)
            with pytest.raises(RuntimeError, match="paused or idle"):
                await attempt(published.version + 1)
        return await running

    assert set(published.run(scenario).versions) == {published.version}


def test_an_idle_engine_takes_weights_without_a_pause(published):
    model = make_wide_model(5)

    async def scenario():
        await published.strategy.prepare_weights(buckets_of(model), published.version + 1)
        await published.strategy.load_weights(published.version + 1)
        return await published.strategy.generate(request("a", 12, ignore_eos=True))

    completion = published.run(scenario)
    published.version += 1
    assert_close(published, completion.logprobs, full_scores(model, PROMPT, completion))


def test_publications_leave_nothing_open(published):
    model = make_wide_model(1)
    published.publish(model)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        published.publish(model)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_requests_go_on_after_sleep_and_wake(published, first_model, mode):
    strategy = published.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 120, seed=4, ignore_eos=True)))
        await begun(strategy, 1, 8)
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
    assert_close(published, completion.logprobs, full_scores(first_model, PROMPT, completion))


def test_scores_are_log_probabilities_at_temperature_one_and_need_no_free_place(published, first_model):
    strategy = published.strategy
    rng = np.random.default_rng(1)
    sequences = [rng.integers(2, 90, length).astype(np.int32) for length in (1, 17, 64, MAX_LENGTH - 1)]

    async def scenario():
        names = [f"r{i}" for i in range(2 * PLACES)]
        running = [asyncio.create_task(strategy.generate(request(name, 180, ignore_eos=True))) for name in names]
        await begun(strategy, PLACES, 2)
        scores = await strategy.score(sequences)
        waiting = strategy.stats()["waiting"]
        await strategy.abort(names)
        await asyncio.gather(*running)
        return scores, waiting

    scores, waiting = published.run(scenario)
    assert waiting == PLACES
    for tokens, score in zip(sequences, scores, strict=True):
        logprobs = torch.log_softmax(logits_of(first_model, tokens.tolist())[:-1], -1)
        expected = logprobs[range(len(tokens) - 1), tokens[1:].tolist()].numpy()
        assert score.dtype == np.float32 and score[0] == 0
        if len(tokens) > 1:
            assert_close(published, score[1:], expected)


def test_versions_told_before_the_end_are_never_newer_than_the_true_ones(published):
    strategy = published.strategy

    async def scenario():
        running = [
            asyncio.create_task(strategy.generate(request(f"r{i}", 100 + i, seed=i, ignore_eos=True))) for i in range(6)
        ]
        told: dict[str, list[np.ndarray]] = {f"r{i}": [] for i in range(6)}
        for seed in (1, 2):
            await begun(strategy, 6, 25 * seed)
            await published.load(make_wide_model(seed), published.version + 1)
            published.version += 1
            for _ in range(4):
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
        await begun(strategy, 1, 24)
        await strategy.pause("keep")
        for _ in range(5):  # What was on its way arrives.
            await strategy.progress({})
        whole = (await strategy.progress({}))["a"]
        rest = (await strategy.progress({"a": 10}))["a"]
        nothing = await strategy.progress({"a": len(whole.token_ids)})
        await strategy.resume()
        return whole, rest, nothing, await running

    whole, rest, nothing, completion = published.run(scenario)
    count = len(whole.token_ids)
    assert whole.token_ids.tolist() == completion.token_ids[:count].tolist()
    assert rest.token_ids.tolist() == completion.token_ids[10:count].tolist()
    np.testing.assert_array_equal(whole.logprobs, completion.logprobs[:count])
    assert "a" not in nothing


def test_a_server_that_does_not_start_says_so(folder):
    with pytest.raises(EngineFailed, match="did not start: it ended with status 1"):
        with running_stand_in(folder, no_such_argument=1):
            pass


class Faulty:
    """An engine on shared devices with overlap, of a model that can be read back; and what is to go wrong."""

    def __init__(self, engine, model, file) -> None:
        self.engine, self.model, self._file = engine, model, file

    def becomes(self, fault: str) -> None:
        self._file.write_text(fault)

    def publish(self) -> dict[str, torch.Tensor]:
        """Load other weights than ever before."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01
        self.receipt = self.engine.run(self.engine.load, self.model, self.engine.version + 1)
        self.engine.version += 1
        return dict(self.model.named_parameters())


@pytest.fixture(scope="module")
def one_engine(llama_path, tmp_path_factory):
    file = tmp_path_factory.mktemp("faults") / "fault"
    file.touch()
    model = LlamaForCausalLM.from_pretrained(llama_path, dtype=torch.float32)
    config = {"shares_devices": True, "disable_overlap_schedule": False}
    with running_stand_in(llama_path, fault_file=file, **config) as engine:
        yield Faulty(engine, model, file)


@pytest.fixture
def faulty(one_engine):
    one_engine.becomes("")
    return one_engine


def test_an_engine_of_shared_devices_gives_its_memory_up_and_takes_it_back(faulty):
    """The stand-in ends itself where the real one would: memory given up while requests run, or used while away. With
    overlap a pause leaves no step under way, whose tokens SGLang would count under the newer version."""
    strategy = faulty.engine.strategy

    async def state():
        return (await strategy._order("/server_info"))["internal_states"][0]

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 100, seed=4, ignore_eos=True)))
        await begun(strategy, 1, 8)
        await strategy.pause("keep")
        assert await state() == {"running": 0, "released": False}
        await strategy.sleep()
        assert await state() == {"running": 0, "released": True}
        await strategy.wake()
        await strategy.resume()
        completion = await running
        await strategy.sleep()
        late = asyncio.create_task(strategy.generate(request("late", 5, ignore_eos=True)))
        await strategy.progress({})
        await strategy.wake()
        return completion, await late

    completion, late = faulty.engine.run(scenario)
    assert len(completion.token_ids) == 100 and len(late.token_ids) == 5
    logprobs = full_scores(faulty.model, PROMPT, completion)
    assert np.abs(completion.logprobs - logprobs).max() < 1e-3


def test_a_response_that_was_cut_for_want_of_memory_is_no_success(faulty):
    generate = faulty.engine.strategy.generate
    faulty.becomes("has little memory")
    with pytest.raises(ValueError, match="'a' was cut at 10 of 20 tokens: .*`mem_fraction_static`"):
        faulty.engine.run(generate, request("a", 20, ignore_eos=True))
    assert len(faulty.engine.run(generate, request("b", 10, ignore_eos=True)).token_ids) == 10


def test_weights_that_can_be_read_back_are(faulty):
    sent = faulty.publish()
    assert faulty.receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in sent.items()}
    faulty.becomes("holds something else")
    sent = faulty.publish()
    told = faulty.receipt.checksums
    differing = {name for name, tensor in sent.items() if told[name] != tensor_checksum(tensor)}
    assert differing and all(sent[name].numel() <= 8192 for name in differing)


def test_an_update_that_changes_nothing_or_half_is_told_by_what_it_left(faulty):
    strategy = faulty.engine.strategy
    faulty.publish()
    faulty.becomes("keeps its weights")
    with pytest.raises(WeightMismatch, match="brought other weights, but SGLang holds the same"):
        faulty.publish()
    faulty.becomes("fails half-way")
    with pytest.raises(EngineFailed, match="were only partly loaded: .*Failed to update weights"):
        faulty.publish()
    faulty.engine.run(strategy.resume)


def test_a_server_that_dies_is_reported_to_every_request_and_call(faulty):
    """The last one with this engine."""
    strategy = faulty.engine.strategy

    async def scenario():
        running = [asyncio.create_task(strategy.generate(request(str(i), 120, ignore_eos=True))) for i in range(4)]
        await begun(strategy, 4, 4)
        psutil.Process(strategy._server._process.pid).kill()
        later = (strategy.progress({}), strategy.generate(request("later")), strategy.pause("keep"))
        for failing in (*running, *later):
            with pytest.raises(EngineFailed, match="SGLang cannot go on: its server ended with status -9"):
                await failing
        await strategy.shutdown()
        await strategy.shutdown()
        with pytest.raises(EngineFailed, match="was shut down"):
            await strategy.generate(request("after"))

    faulty.engine.run(scenario)
