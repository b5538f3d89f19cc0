"""The asynchronous engine: its protocol, weight updates while requests are in flight, and its failures."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from roll.configs.errors import ConfigError
from roll.configs.strategies import ENGINES, strategy_class
from roll.engines.base import EngineFailed, InferStrategy
from roll.engines.hf.strategy import HFInferStrategy
from roll.weights.buckets import WeightMismatch, pack_buckets, tensor_checksum
from tests.engines.hf_helpers import EOS, VOCABULARY, load, make_request, make_strategy, run_requests

DEADLINE_SECONDS = 60


def run_with(strategy: HFInferStrategy, scenario):
    """Start the engine, run the scenario, shut the engine down; nothing may hang."""

    async def main():
        await strategy.start()
        try:
            return await scenario(strategy)
        finally:
            await strategy.shutdown()

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_SECONDS))


def load_reference(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def changed_weights(path: str, seed: int) -> dict[str, torch.Tensor]:
    """Weights of the model with noise added."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in load_reference(path).named_parameters()
    }


def buckets_of(weights: dict[str, torch.Tensor]):
    return pack_buckets(weights.items(), 20_000)


def with_weights(path: str, weights: dict[str, torch.Tensor]):
    model = load_reference(path)
    model.load_state_dict(weights, strict=False)
    return model


def score(model, tokens: np.ndarray, prompt_length: int) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None].long()).logits[0, prompt_length - 1 : -1]
    chosen = torch.from_numpy(tokens[prompt_length:, None]).long()
    return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].numpy()


def prompts_of(count: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCABULARY, generator.integers(1, 30)) for _ in range(count)]


async def after_tokens(strategy: HFInferStrategy, request, count: int):
    """Start a streamed request; returns when it has ``count`` tokens, with its chunks so far and its stream."""
    stream = strategy.stream(request)
    chunks = []
    while sum(len(chunk.token_ids) for chunk in chunks) < count:
        chunks.append(await anext(stream))
    return chunks, stream


def test_an_engine_of_ones_own_has_every_method_of_the_interface():
    class Unfinished(HFInferStrategy):
        abort = InferStrategy.abort

    with pytest.raises(TypeError, match="abstract method '?abort"):
        Unfinished("m", device="cpu", dtype="float32", attn_implementation="sdpa", max_length=8, strategy_config={})
    with pytest.raises(RuntimeError, match="cannot be pushed into HFInferStrategy"):
        asyncio.run(make_strategy("m").transfer_step("init", {}))


def test_registry_finds_the_engine_and_names_the_nearest():
    assert strategy_class(ENGINES, "hf_infer") is HFInferStrategy
    with pytest.raises(ConfigError, match="did you mean `hf_infer`"):
        strategy_class(ENGINES, "hf_inferr")


def test_requests_of_many_tasks_get_what_the_plain_engine_gives(qwen_path):
    requests = [make_request(str(i), prompt, 20, seed=i) for i, prompt in enumerate(prompts_of(30))]
    expected = run_requests(qwen_path, requests)

    async def scenario(strategy):
        completions = await asyncio.gather(*(strategy.generate(request) for request in requests))
        stats = strategy.stats()
        assert stats["running"] == stats["waiting"] == stats["version"] == 0
        assert stats["generated_tokens"] == sum(len(completion.token_ids) for completion in completions)
        assert stats["busy_seconds"] > 0 and stats["prefill_tokens"] > 0 and stats["kv_bytes"] > 0
        return completions

    for completion in run_with(make_strategy(qwen_path, max_running_requests=6), scenario):
        other = expected[completion.request_id]
        assert completion.token_ids.tobytes() == other.token_ids.tobytes()
        assert completion.logprobs.tobytes() == other.logprobs.tobytes()
        assert completion.finish_reason == other.finish_reason
        assert completion.token_ids.dtype == completion.versions.dtype == np.int32
        assert not completion.versions.any()


def test_a_stream_yields_the_same_tokens_as_generate(qwen_path):
    request = make_request("a", [5, 6, 7], 25, seed=1, ignore_eos=True)

    async def scenario(strategy):
        chunks = [chunk async for chunk in strategy.stream(request)]
        return chunks, await strategy.generate(request)

    chunks, completion = run_with(make_strategy(qwen_path), scenario)
    assert len(chunks) == 25
    assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == completion.token_ids.tolist()
    assert np.concatenate([chunk.logprobs for chunk in chunks]).tolist() == completion.logprobs.tolist()
    assert [chunk.finish_reason for chunk in chunks] == [None] * 24 + ["length"]


def test_abort_ends_a_request_with_its_tokens_and_ignores_unknown_ids(qwen_path):
    async def scenario(strategy):
        chunks, stream = await after_tokens(strategy, make_request("a", [5], 120, ignore_eos=True), 3)
        queued = asyncio.create_task(strategy.generate(make_request("b", [6], 120, ignore_eos=True)))
        await asyncio.sleep(0)
        await strategy.abort(["a", "b", "nobody"])
        chunks += [chunk async for chunk in stream]
        completion = await queued
        assert chunks[-1].finish_reason == completion.finish_reason == "abort"
        assert 3 <= sum(len(chunk.token_ids) for chunk in chunks) < 120
        assert len(completion.token_ids) == 0

    run_with(make_strategy(qwen_path, max_running_requests=1), scenario)


def test_a_cancelled_task_frees_its_row_and_its_id(qwen_path):
    async def scenario(strategy):
        _, stream = await after_tokens(strategy, make_request("a", [5], 120, ignore_eos=True), 2)
        waiting = asyncio.create_task(strategy.generate(make_request("b", [5], 120)))
        await asyncio.sleep(0)
        waiting.cancel()
        await stream.aclose()
        again = await strategy.generate(make_request("a", [5], 4, ignore_eos=True))
        assert len(again.token_ids) == 4
        assert strategy.stats()["running"] == strategy.stats()["waiting"] == 0

    run_with(make_strategy(qwen_path, max_running_requests=1), scenario)


def test_a_bad_request_fails_alone(qwen_path):
    async def scenario(strategy):
        good = asyncio.create_task(strategy.generate(make_request("good", [5], 30)))
        text = make_request("text", [5], stop_strings=("x",))
        for bad in (make_request("empty", []), make_request("long", [5] * 128), text):
            with pytest.raises(ValueError, match=bad.request_id):
                await strategy.generate(bad)
        with pytest.raises(ValueError, match="empty"):
            await anext(strategy.stream(make_request("empty", [])))
        await strategy.pause("keep")
        running = asyncio.create_task(strategy.generate(make_request("twice", [5])))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'twice'"):
            await strategy.generate(make_request("twice", [5]))
        await strategy.resume()
        await asyncio.gather(good, running)

    run_with(make_strategy(qwen_path), scenario)


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_pause_stops_all_decoding_and_changes_no_token(qwen_path, mode):
    request = make_request("a", [5, 6], 60, seed=4, ignore_eos=True)
    expected = run_requests(qwen_path, [request])["a"]

    async def scenario(strategy):
        chunks, stream = await after_tokens(strategy, request, 5)
        await strategy.pause(mode)
        frozen = strategy.stats()["generated_tokens"]
        late = asyncio.create_task(strategy.generate(make_request("late", [7], 5, ignore_eos=True)))
        await strategy.abort([])
        assert strategy.stats()["generated_tokens"] == frozen
        assert (strategy.stats()["kv_bytes"] > 0) == (mode == "keep")
        await strategy.pause(mode)
        await strategy.resume()
        chunks += [chunk async for chunk in stream]
        assert len((await late).token_ids) == 5
        return np.concatenate([chunk.token_ids for chunk in chunks])

    assert run_with(make_strategy(qwen_path), scenario).tolist() == expected.token_ids.tolist()


def test_drain_ends_what_runs_and_starts_nothing_that_waits(qwen_path):
    async def scenario(strategy):
        running = make_request("running", [5], 60, ignore_eos=True)
        chunks, stream = await after_tokens(strategy, running, 2)
        queued = asyncio.create_task(strategy.generate(make_request("queued", [6], 5, ignore_eos=True)))
        await asyncio.sleep(0)
        await strategy.pause("drain")
        chunks += [chunk async for chunk in stream]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 60
        assert not queued.done()
        assert strategy.stats()["running"] == 0 and strategy.stats()["waiting"] == 1
        await load(strategy, buckets_of(changed_weights(qwen_path, 1)), version=1)
        await strategy.resume()
        assert (await queued).versions.tolist() == [1] * 5

    run_with(make_strategy(qwen_path, max_running_requests=1), scenario)


def test_a_drain_interrupted_by_resume_says_so(qwen_path):
    async def scenario(strategy):
        _, stream = await after_tokens(strategy, make_request("a", [5], 120, ignore_eos=True), 2)
        drain = asyncio.create_task(strategy.pause("drain"))
        await asyncio.sleep(0)
        await strategy.resume()
        with pytest.raises(RuntimeError, match="interrupted by resume"):
            await drain
        assert [chunk async for chunk in stream][-1].finish_reason == "length"

    run_with(make_strategy(qwen_path), scenario)


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_tokens_carry_the_version_and_logprobs_of_the_weights_that_produced_them(model_path, mode):
    weights = {1: changed_weights(model_path, 1), 2: changed_weights(model_path, 2)}
    prompts = prompts_of(6, seed=3)

    async def scenario(strategy):
        others = [
            asyncio.create_task(strategy.generate(make_request(str(i), prompt, 60, seed=i, ignore_eos=True)))
            for i, prompt in enumerate(prompts)
        ]
        observer = make_request("observer", [5], 90, ignore_eos=True)
        _, stream = await after_tokens(strategy, observer, 10)
        for version in (1, 2):
            await strategy.pause(mode)
            receipt = await load(strategy, buckets_of(weights[version]), version)
            assert receipt.version == version
            await strategy.resume()
            count = 0
            async for chunk in stream:
                count += len(chunk.token_ids)
                if count >= 12:
                    break
        await strategy.abort(["observer"])
        return await asyncio.gather(*others)

    completions = run_with(make_strategy(model_path), scenario)
    models = {0: load_reference(model_path)} | {v: with_weights(model_path, weights[v]) for v in weights}
    for prompt, completion in zip(prompts, completions, strict=True):
        assert (np.diff(completion.versions) >= 0).all()
        assert set(completion.versions) == {0, 1, 2}
        tokens = np.concatenate([prompt, completion.token_ids])
        for version, model in models.items():
            span = completion.versions == version
            if mode == "resume" or version == 0:
                expected = score(model, tokens, len(prompt))[span]
                np.testing.assert_allclose(completion.logprobs[span], expected, atol=1e-4)
            else:
                assert np.abs(completion.logprobs[span] - score(models[0], tokens, len(prompt))[span]).max() > 1e-3


def test_keep_goes_on_with_the_old_keys_and_values(qwen_path):
    """The first token after the update, by hand: old cache of all tokens but the last, new weights for the last."""
    weights = changed_weights(qwen_path, 1)
    request = make_request("a", [5, 6, 7], 40, seed=2, ignore_eos=True)

    async def scenario(strategy):
        chunks, stream = await after_tokens(strategy, request, 8)
        await strategy.pause("keep")
        await load(strategy, buckets_of(weights), 1)
        await strategy.resume()
        return chunks + [chunk async for chunk in stream]

    chunks = run_with(make_strategy(qwen_path), scenario)
    tokens = torch.tensor([[5, 6, 7, *np.concatenate([chunk.token_ids for chunk in chunks])]])
    versions = np.concatenate([chunk.versions for chunk in chunks])
    index = 3 + int((versions == 0).sum())
    with torch.no_grad():
        cache = load_reference(qwen_path)(tokens[:, : index - 1], use_cache=True).past_key_values
        logits = with_weights(qwen_path, weights)(tokens[:, index - 1 : index], past_key_values=cache).logits[0, -1]
    expected = torch.log_softmax(logits, -1)[tokens[0, index]].item()
    recorded = np.concatenate([chunk.logprobs for chunk in chunks])[index - 3]
    assert recorded == pytest.approx(expected, abs=1e-4)


def test_the_engine_tells_the_checksums_of_what_it_holds(model_path):
    weights = changed_weights(model_path, 3)

    async def scenario(strategy):
        return await load(strategy, buckets_of(weights), 7)

    receipt = run_with(make_strategy(model_path), scenario)
    assert receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    assert receipt.parameter_count == sum(tensor.numel() for tensor in weights.values())


def test_loaded_weights_give_the_same_bits_as_weights_read_from_a_file(qwen_path, tmp_path):
    weights = changed_weights(qwen_path, 5)
    with_weights(qwen_path, weights).save_pretrained(tmp_path)
    requests = [make_request(str(i), prompt, 20, seed=i) for i, prompt in enumerate(prompts_of(5))]
    expected = run_requests(str(tmp_path), requests)

    async def scenario(strategy):
        await load(strategy, buckets_of(weights), 1)
        return await asyncio.gather(*(strategy.generate(request) for request in requests))

    for completion in run_with(make_strategy(qwen_path), scenario):
        assert completion.logprobs.tobytes() == expected[completion.request_id].logprobs.tobytes()


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "stream"])
def test_a_publication_that_does_not_fit_changes_nothing(qwen_path, fault):
    weights = changed_weights(qwen_path, 1)
    name = list(weights)[5]
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        name = "lm_head.extra"
        weights[name] = torch.zeros(2)
    elif fault == "shape":
        weights[name] = weights[name][..., :-1]
    elif fault == "dtype":
        weights[name] = weights[name].long()

    def broken_stream():
        yield next(iter(buckets_of(weights)))
        raise OSError("connection lost")

    buckets = broken_stream() if fault == "stream" else buckets_of(weights)
    request = make_request("a", [5, 6], 20, seed=1)

    async def scenario(strategy):
        error, words = (OSError, "lost") if fault == "stream" else (WeightMismatch, name)
        with pytest.raises(error, match=words):
            await load(strategy, buckets, 1)
        return await strategy.generate(request)

    completion = run_with(make_strategy(qwen_path), scenario)
    assert not completion.versions.any()
    assert completion.logprobs.tobytes() == run_requests(qwen_path, [request])["a"].logprobs.tobytes()


def test_weights_are_not_replaced_under_running_requests(qwen_path):
    async def scenario(strategy):
        _, stream = await after_tokens(strategy, make_request("a", [5], 120, ignore_eos=True), 1)
        await strategy.prepare_weights(buckets_of(changed_weights(qwen_path, 1)), 1)
        for attempt in (strategy.load_weights(1), strategy.sleep()):
            with pytest.raises(RuntimeError, match="paused or idle"):
                await attempt
        await stream.aclose()

    run_with(make_strategy(qwen_path), scenario)


def test_requests_go_on_after_sleep_and_wake(qwen_path):
    request = make_request("a", [5, 6], 50, seed=4, ignore_eos=True)
    expected = run_requests(qwen_path, [request])["a"]

    async def scenario(strategy):
        chunks, stream = await after_tokens(strategy, request, 5)
        await strategy.pause("keep")
        await strategy.sleep()
        await strategy.sleep()
        assert strategy.stats()["kv_bytes"] == 0
        with pytest.raises(RuntimeError, match="wake it"):
            await strategy.resume()
        await strategy.wake()
        await strategy.resume()
        return chunks + [chunk async for chunk in stream]

    chunks = run_with(make_strategy(qwen_path), scenario)
    assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == expected.token_ids.tolist()


def test_a_crash_in_a_step_ends_every_request_and_every_later_call_with_its_cause(qwen_path):
    weights = {name: torch.full_like(tensor, float("nan")) for name, tensor in changed_weights(qwen_path, 0).items()}

    async def scenario(strategy):
        await load(strategy, buckets_of(weights), 1)
        requests = [make_request(str(i), [5], 20) for i in range(5)]
        results = [asyncio.create_task(strategy.generate(request)) for request in requests]
        for result in results:
            with pytest.raises(EngineFailed, match="NaN") as caught:
                await result
            assert isinstance(caught.value.__cause__, ArithmeticError)
        for call in (strategy.generate(requests[0]), strategy.pause("keep"), strategy.resume(), strategy.abort(["0"])):
            with pytest.raises(EngineFailed, match="NaN"):
                await call
        with pytest.raises(EngineFailed, match="NaN"):
            strategy.stats()

    run_with(make_strategy(qwen_path), scenario)


def test_shutdown_aborts_what_runs_and_leaves_no_thread(qwen_path):
    strategy = make_strategy(qwen_path)

    async def scenario(strategy):
        chunks, stream = await after_tokens(strategy, make_request("a", [5], 120, ignore_eos=True), 2)
        waiting = asyncio.create_task(strategy.pause("drain"))
        await asyncio.sleep(0)
        await strategy.shutdown()
        assert [chunk async for chunk in stream][-1].finish_reason == "abort"
        with pytest.raises(RuntimeError, match="shutdown"):
            await waiting
        with pytest.raises(EngineFailed, match="shut down"):
            await strategy.generate(make_request("b", [5]))

    run_with(strategy, scenario)
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_infer"]


def test_stop_strings_end_a_response(qwen_path, tmp_path):
    """A tokenizer of one letter per token; the stop string spans two tokens."""
    letters = [chr(ord("A") + token) for token in range(VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({letter: token for token, letter in enumerate(letters)}, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    load_reference(qwen_path).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="B").save_pretrained(tmp_path)
    free = run_requests(str(tmp_path), [make_request("a", [5], 40, seed=9, ignore_eos=True)])["a"]
    text = "".join(letters[token] for token in free.token_ids)
    stop = text[20:22]

    async def scenario(strategy):
        free = strategy.generate(make_request("free", [5], 40, seed=9, stop_strings=(stop,), ignore_eos=True))
        return await asyncio.gather(strategy.generate(make_request("a", [5], 40, seed=9, stop_strings=(stop,))), free)

    stopped, ignored = run_with(make_strategy(str(tmp_path), eos_token_ids=()), scenario)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[: text.index(stop) + 2].tolist()
    assert ignored.token_ids.tolist() == free.token_ids.tolist()


def test_a_tokenizer_is_loaded_beside_the_event_loop_and_only_requests_that_need_it_fail(qwen_path, monkeypatch):
    threads = []

    def broken(spec):
        threads.append(threading.current_thread().name)
        raise OSError("broken")

    monkeypatch.setattr("roll.engines.base.load_tokenizer", broken)

    async def scenario(strategy):
        with pytest.raises(ValueError, match="'a' has stop strings.*broken"):
            await strategy.generate(make_request("a", [5], stop_strings=("x",)))
        assert strategy.stats()["waiting"] == 0
        return await strategy.generate(make_request("a", [5], 3, ignore_eos=True))

    assert len(run_with(make_strategy(qwen_path), scenario).token_ids) == 3
    assert threads == ["hf_infer"]


def test_end_tokens_default_to_those_of_the_model(qwen_path):
    async def scenario(strategy):
        requests = [make_request(str(i), [5], 127, seed=i) for i in range(20)]
        return await asyncio.gather(*(strategy.generate(request) for request in requests))

    completions = run_with(make_strategy(qwen_path, eos_token_ids=None), scenario)
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert ended and all(completion.token_ids[-1] == EOS for completion in ended)


def test_wrong_options_are_reported_together_with_the_nearest_name(qwen_path):
    with pytest.raises(ConfigError) as caught:
        asyncio.run(make_strategy(qwen_path, max_runing_requests=4, threads=0, max_prefill_tokens="many").start())
    assert len(caught.value.problems) == 3
    assert "did you mean `max_running_requests`?" in str(caught.value)


def test_models_and_settings_the_engine_cannot_drive_are_refused_at_start(qwen_path, tmp_path):
    sizes = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, max_position_embeddings=64)
    MistralForCausalLM(MistralConfig(**sizes, sliding_window=8)).save_pretrained(tmp_path / "sliding")
    dynamic = LlamaConfig(**sizes, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    LlamaForCausalLM(dynamic).save_pretrained(tmp_path / "dynamic")

    def start(path, attention="sdpa", dtype="float32", max_length=64):
        strategy = HFInferStrategy(
            str(path),
            device="cpu",
            dtype=dtype,
            attn_implementation=attention,
            max_length=max_length,
            strategy_config={},
        )

        async def nothing(_):
            return None

        run_with(strategy, nothing)

    for arguments, words in [
        ({"path": tmp_path / "sliding"}, "full attention"),
        ({"path": tmp_path / "dynamic"}, "longest running sequence"),
        ({"path": qwen_path, "max_length": 513}, "512 positions"),
        ({"path": qwen_path, "attention": "flash_attention_2"}, "different lengths"),
        ({"path": qwen_path, "dtype": "float8"}, "precision"),
    ]:
        with pytest.raises(ConfigError, match=words):
            start(**arguments)
    with pytest.raises(OSError):
        start(tmp_path / "nothing")
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_infer"]
