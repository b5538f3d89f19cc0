"""A request's bits do not depend on who runs beside it: the ground on which exact reproduction stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engines.hf_helpers import VOCABULARY, completed, make_engine, make_request, run_engine, submit


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def mixed_requests(seed: int, count: int = 24, longest: int = 60) -> list:
    """Short and long prompts, some in common, with all kinds of sampling and lengths."""
    generator = np.random.default_rng(seed)
    shared = generator.integers(3, VOCABULARY, 37)
    kinds = [{}, {"temperature": 0.7}, {"top_k": 8}, {"top_p": 0.8}, {"temperature": 0.0}]
    requests = []
    for index in range(count):
        own = generator.integers(3, VOCABULARY, generator.choice([1, 5, 20, 48, 150, 300]))
        prompt = shared if index % 4 == 0 else own
        sampling = kinds[index % len(kinds)]
        length = int(generator.integers(1, longest))
        requests.append(make_request(str(index), prompt, length, seed=index, ignore_eos=index % 2 == 0, **sampling))
    return requests


def alone(path: str, requests: list) -> dict:
    engine = make_engine(path, max_length=512)
    completions = {}
    for request in requests:
        submit(engine, request)
        completions |= run_engine(engine)
    return completions


def assert_same_bits(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, completion in left.items():
        assert completion.token_ids.tobytes() == right[name].token_ids.tobytes(), name
        assert completion.logprobs.tobytes() == right[name].logprobs.tobytes(), name


def assert_invariant(path: str, requests: list, seeds: range) -> None:
    expected = alone(path, requests)
    for seed in seeds:
        generator = np.random.default_rng(seed)
        rows, prefill = int(generator.integers(3, 30)), int(generator.choice([64, 4096]))
        engine = make_engine(path, max_length=512, rows=rows, prefill=prefill)
        completions = {}
        for key in generator.permutation(len(requests)):
            submit(engine, requests[key])
            for _ in range(generator.integers(0, 6)):
                engine.step()
                completions |= completed(engine)
        assert_same_bits(completions | run_engine(engine), expected)


@pytest.mark.tier("all")
def test_neighbours_order_and_time_of_arrival_change_no_bit(model_path):
    assert_invariant(model_path, mixed_requests(seed=1), range(4))


def test_neighbours_change_no_bit_of_a_mixture_of_experts(moe_path):
    assert_invariant(moe_path, mixed_requests(seed=3, count=12, longest=20), range(2))


def test_neighbours_change_no_bit_of_a_model_with_keys_and_values_of_different_sizes(latent_path):
    assert_invariant(latent_path, mixed_requests(seed=5, count=8, longest=12), range(2))


@pytest.mark.tier("all")
def test_neighbours_change_no_bit_of_a_mixture_of_experts_with_two_threads(moe_path, two_threads):
    assert_invariant(moe_path, mixed_requests(seed=4, count=12, longest=20), range(2))


def test_neighbours_change_no_bit_with_two_threads(qwen_path, two_threads):
    assert_invariant(qwen_path, mixed_requests(seed=2, count=10, longest=20), range(1))


def test_aborted_neighbours_change_no_bit(qwen_path):
    requests = mixed_requests(seed=7)
    expected = alone(qwen_path, requests)
    engine = make_engine(qwen_path, max_length=512)
    submit(engine, *requests)
    for _ in range(5):
        engine.step()
    survivors = completed(engine)
    engine.abort([request.request_id for request in requests[::3]])
    aborted = completed(engine)
    survivors |= run_engine(engine)
    assert_same_bits(survivors, {name: done for name, done in expected.items() if name not in aborted})
