"""The synchronous engine against plain transformers, and its bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll.engines.hf.engine import prefill_length
from roll.engines.hf.model import NonFiniteLogits, processed_logprobs
from roll.weights.buckets import pack_buckets
from tests.engines.hf_helpers import (
    EOS,
    VOCABULARY,
    completed,
    make_engine,
    make_request,
    make_strategy,
    run_engine,
    run_requests,
    submit,
)


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCABULARY, generator.integers(1, longest)) for _ in range(count)]


def scored(model, prompt, completion, **sampling) -> np.ndarray:
    """Log-probabilities of a completion by one full forward pass."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion.token_ids]))[None].long()
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    rows = len(logits)
    distribution = processed_logprobs(
        logits,
        np.full(rows, sampling.get("temperature", 1.0), dtype=np.float32),
        np.full(rows, sampling.get("top_k", 0)),
        np.full(rows, sampling.get("top_p", 1.0)),
    )
    return distribution.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_tokens_equal_those_of_generate(model_path, reference, attention):
    prompts = random_prompts(20)
    requests = [make_request(str(i), prompt, 24, temperature=0.0) for i, prompt in enumerate(prompts)]
    completions = run_requests(model_path, requests, rows=7, attention=attention)
    for i, prompt in enumerate(prompts):
        expected = reference.generate(
            torch.from_numpy(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=EOS,
        )[0, len(prompt) :]
        assert completions[str(i)].token_ids.tolist() == expected.tolist()
        assert not completions[str(i)].logprobs.any()


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 1.5, "top_k": 20, "top_p": 0.8}],
)
def test_recorded_logprobs_are_those_of_the_distribution_sampled_from(model_path, reference, sampling):
    prompts = random_prompts(8, seed=1)
    requests = [make_request(str(i), p, 30, seed=i, ignore_eos=True, **sampling) for i, p in enumerate(prompts)]
    completions = run_requests(model_path, requests)
    for i, prompt in enumerate(prompts):
        completion = completions[str(i)]
        assert len(completion.token_ids) == 30
        np.testing.assert_allclose(completion.logprobs, scored(reference, prompt, completion, **sampling), atol=1e-4)


def test_keys_and_values_may_have_different_sizes(latent_path):
    prompts = random_prompts(4, seed=3)
    completions = run_requests(latent_path, [make_request(str(i), p, 12, seed=i) for i, p in enumerate(prompts)])
    reference = AutoModelForCausalLM.from_pretrained(latent_path, dtype=torch.float32).eval()
    for i, prompt in enumerate(prompts):
        expected = scored(reference, prompt, completions[str(i)])
        np.testing.assert_allclose(completions[str(i)].logprobs, expected, atol=1e-4)


def test_rows_with_different_sampling_run_side_by_side(model_path, reference):
    settings = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.7, "top_k": 9}]
    prompt = random_prompts(1, seed=2)[0]
    requests = [make_request(str(i), prompt, 20, ignore_eos=True, **sampling) for i, sampling in enumerate(settings)]
    together = run_requests(model_path, requests)
    for i, sampling in enumerate(settings):
        if sampling.get("temperature") != 0.0:
            expected = scored(reference, prompt, together[str(i)], **sampling)
            np.testing.assert_allclose(together[str(i)].logprobs, expected, atol=1e-4)


def test_samples_of_one_prompt_are_prefilled_once_and_differ(qwen_path):
    engine = make_engine(qwen_path)
    prompt = np.arange(3, 33)
    submit(engine, *(make_request(str(seed), prompt, 8, seed=seed, ignore_eos=True) for seed in range(16)))
    completions = run_engine(engine)
    assert engine.prefill_tokens == len(prompt) - 1
    assert engine.generated_tokens == 16 * 8
    assert len({completion.token_ids.tobytes() for completion in completions.values()}) > 8


def test_equal_seeds_give_equal_tokens_and_a_continuation_goes_on_where_it_stopped(qwen_path):
    prompt = np.arange(3, 20)
    whole = run_requests(qwen_path, [make_request("a", prompt, 30, seed=5, ignore_eos=True)])["a"]
    longer = np.concatenate([prompt, whole.token_ids[:11]])
    rest = make_request("b", longer, 19, seed=5, first_token_index=11, ignore_eos=True)
    continued = run_requests(qwen_path, [rest])["b"]
    assert continued.token_ids.tolist() == whole.token_ids[11:].tolist()


def test_a_response_ends_at_an_end_token_a_stop_token_or_its_limit(qwen_path):
    free = run_requests(qwen_path, [make_request("a", [5, 6], 60, seed=3, ignore_eos=True)])["a"]
    assert free.finish_reason == "length" and len(free.token_ids) == 60
    stop = int(free.token_ids[10])
    first = free.token_ids.tolist().index(stop)
    requests = [
        make_request("stop", [5, 6], 60, seed=3, stop_token_ids=(stop,)),
        make_request("ignored", [5, 6], 60, seed=3, stop_token_ids=(stop,), ignore_eos=True),
        *(make_request(f"eos{i}", [5, 6], 200, seed=i) for i in range(20)),
    ]
    completions = run_requests(qwen_path, requests, max_length=256)
    stopped = completions["stop"]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] in (stop, EOS)
    assert stopped.token_ids.tolist() == free.token_ids[: len(stopped.token_ids)].tolist()
    assert len(stopped.token_ids) <= first + 1
    assert completions["ignored"].token_ids.tolist() == free.token_ids.tolist()
    ended = [completions[f"eos{i}"] for i in range(20)]
    assert any(completion.finish_reason == "stop" for completion in ended)
    for completion in ended:
        assert EOS not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")


def test_the_length_limit_ends_a_response_with_reason_length(qwen_path):
    request = make_request("a", np.arange(3, 33), 1000, ignore_eos=True)
    completion = run_requests(qwen_path, [request], max_length=50)["a"]
    assert len(completion.token_ids) == 20 and completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty"),
        (range(3, 35), {}, "no room"),
        ([VOCABULARY], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"temperature": float("nan")}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"top_k": -1}, "top_k"),
        ([5], {"stop_strings": ("",)}, "stop strings"),
        ([5], {"stop_strings": ("x",)}, "tokenizer"),
        ([5], {"first_token_index": 2}, "first_token_index"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_the_reason(qwen_path, prompt, sampling, words):
    strategy = make_strategy(qwen_path, max_length=32)
    strategy._read_facts(AutoConfig.from_pretrained(qwen_path))
    wrong, right = make_request("wrong", list(prompt), **sampling), make_request("right", [5])
    with pytest.raises(ValueError, match=f"'wrong' cannot run.*{words}|'wrong' has stop strings.*{words}"):
        strategy._check_request(wrong)
        strategy._matcher_for(wrong)
    strategy._check_request(right)
    assert strategy._matcher_for(right) is None


def test_abort_returns_partial_tokens_and_leaves_the_others_alone(qwen_path):
    prompts = random_prompts(6, seed=4)
    requests = [make_request(str(i), prompt, 30, seed=i, ignore_eos=True) for i, prompt in enumerate(prompts)]
    undisturbed = run_requests(qwen_path, requests)
    engine = make_engine(qwen_path, rows=4)
    submit(engine, *requests)
    for _ in range(9):
        engine.step()
    engine.abort(["0", "2", "5", "unknown"])
    aborted = completed(engine)
    assert {name: done.finish_reason for name, done in aborted.items()} == dict.fromkeys("025", "abort")
    assert aborted["0"].token_ids.tolist() == undisturbed["0"].token_ids[:9].tolist()
    assert len(aborted["5"].token_ids) == 0
    rest = run_engine(engine)
    for name in "134":
        assert rest[name].token_ids.tobytes() == undisturbed[name].token_ids.tobytes()
        assert rest[name].logprobs.tobytes() == undisturbed[name].logprobs.tobytes()


def test_rebuilt_caches_continue_a_response_unchanged(model_path):
    requests = [make_request(str(i), p, 24, seed=i, ignore_eos=True) for i, p in enumerate(random_prompts(5, seed=6))]
    undisturbed = run_requests(model_path, requests)
    engine = make_engine(model_path)
    submit(engine, *requests)
    for _ in range(10):
        engine.step()
    assert engine.kv_bytes > 0
    engine.drop_caches()
    assert engine.kv_bytes == 0
    completions = run_engine(engine)
    for name, completion in undisturbed.items():
        assert completions[name].token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(completions[name].logprobs, completion.logprobs, atol=1e-4)


def test_not_a_number_in_the_weights_ends_the_step_with_an_error(qwen_path):
    engine = make_engine(qwen_path)
    weights = AutoModelForCausalLM.from_pretrained(qwen_path).state_dict()
    del weights["lm_head.weight"]  # tied to the embedding
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()}
    engine.load_weights(engine.stage_weights(pack_buckets(broken.items(), 10_000), version=1))
    submit(engine, make_request("a", [5, 6]))
    with pytest.raises(NonFiniteLogits):
        engine.step()


def test_prefill_length_depends_on_the_prompt_alone_and_wastes_little():
    for tokens in range(1, 2000):
        padded = prefill_length(tokens, 4096)
        assert padded % 16 == 0 and tokens <= padded < 1.25 * tokens + 16
    assert prefill_length(515, 520) == 528
