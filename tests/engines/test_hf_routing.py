"""The experts that `hf_infer` returns are those that it used for each token, whatever ran beside it or before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from roll.algorithms.routing import RoutingRecorder
from roll.engines.base import ModelSpec
from roll.engines.hf.engine import HFEngine
from roll.engines.hf.model import load_model
from roll.engines.options import HFInferConfig
from tests.engines.hf_helpers import completed, make_request, run_engine, submit

LENGTH = 96
PROMPTS = {"a": [5, 6, 7], "b": list(range(8, 30)), "same as a": [5, 6, 7], "c": [9]}


def engine_of(path: str) -> HFEngine:
    model = load_model(ModelSpec(path, "cpu", "float32", "sdpa", LENGTH))
    engine = HFEngine(model, LENGTH, HFInferConfig(4, 64), ())
    engine.record_routing()
    return engine


def routed_request(name, prompt, tokens=12, **changes):
    return replace(make_request(name, prompt, tokens, seed=sum(prompt), **changes), with_routing=True)


def experts_of(path, token_ids):
    """Experts in one pass over all tokens, each token's in order."""
    model = load_model(ModelSpec(path, "cpu", "float32", "sdpa", LENGTH))
    recorder = RoutingRecorder(model)
    with torch.no_grad():
        model(torch.tensor([token_ids]), use_cache=False)
    return np.sort(recorder.take())


def assert_used(path, prompt, done):
    token_ids = [*prompt, *done.token_ids.tolist()]
    assert done.routed_experts.dtype == np.uint8
    assert done.routed_experts.shape == (len(token_ids) - 1, 3, 3)
    np.testing.assert_array_equal(np.sort(done.routed_experts), experts_of(path, token_ids)[:-1])


def test_prompts_and_responses_have_the_experts_that_computed_them(moe_path):
    engine = engine_of(moe_path)
    more = {f"late {number}": [number + 5, 40] for number in range(12)}  # rows are moved, and the table grows
    lengths = {name: 5 + 3 * (place % 7) for place, name in enumerate({**PROMPTS, **more})}
    submit(engine, *(routed_request(name, prompt, lengths[name]) for name, prompt in PROMPTS.items()))
    for _ in range(3):
        engine.step()
    submit(engine, *(routed_request(name, prompt, lengths[name]) for name, prompt in more.items()))
    done = run_engine(engine)
    assert len(done) == 16 and engine.load.shared_tokens > 0
    for name, prompt in {**PROMPTS, **more}.items():
        assert_used(moe_path, prompt, done[name])


def test_tokens_keep_their_experts_when_caches_are_computed_again_with_other_weights(moe_path):
    engine, before = engine_of(moe_path), engine_of(moe_path)
    for each in (engine, before):
        submit(each, routed_request("a", PROMPTS["b"]))
    for _ in range(5):
        engine.step()
    with torch.no_grad():
        for name, parameter in engine._model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.neg_()
    engine.drop_caches()
    found, first = run_engine(engine)["a"].routed_experts, run_engine(before)["a"].routed_experts
    known = len(PROMPTS["b"]) + 4
    np.testing.assert_array_equal(found[:known], first[:known])
    assert not np.array_equal(np.sort(found[known]), np.sort(first[known]))


def test_a_continued_response_has_the_experts_of_its_first_part_too(moe_path):
    whole = run_engine_with(moe_path, routed_request("a", PROMPTS["b"]))
    prompt = [*PROMPTS["b"], *whole.token_ids[:5].tolist()]
    rest = routed_request("b", prompt, 7, first_token_index=5)
    continued = run_engine_with(moe_path, rest)
    assert len(continued.routed_experts) == len(whole.routed_experts)
    assert_used(moe_path, prompt, continued)


def run_engine_with(path, request):
    engine = engine_of(path)
    submit(engine, request)
    return run_engine(engine)[request.request_id]


def test_only_requests_that_ask_for_experts_get_them(moe_path):
    assert run_engine_with(moe_path, make_request("a", [5, 6])).routed_experts is None
    model = load_model(ModelSpec(moe_path, "cpu", "float32", "sdpa", LENGTH))
    engine = HFEngine(model, LENGTH, HFInferConfig(4, 64), ())
    submit(engine, routed_request("a", [5, 6]))
    assert run_engine(engine)["a"].routed_experts is None


def test_an_aborted_request_has_no_experts(moe_path):
    engine = engine_of(moe_path)
    submit(engine, routed_request("a", [5, 6]))
    engine.step()
    engine.abort()
    done = completed(engine)["a"]
    assert done.finish_reason == "abort" and len(done.token_ids) == 1 and done.routed_experts is None
