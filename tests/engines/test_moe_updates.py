"""Weight updates of mixtures of experts, whose experts have other names in memory than in a checkpoint: each engine
must come to hold them, or fail by name.

vLLM is the real one. SGLang's stand-in reads a checkpoint as SGLang's models do: experts one by one, and names that it
does not know are skipped without a word.
"""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch

from roll.weights.buckets import WeightMismatch, pack_buckets
from roll.weights.checkpoint_names import CheckpointNames
from tests.engines.engine_checks import full_scores
from tests.engines.hf_helpers import make_strategy
from tests.engines.sglang_helpers import running_stand_in
from tests.engines.vllm_helpers import RunningEngine, make_moe, request
from tests.tiers import need

pytestmark = [pytest.mark.tier("all"), pytest.mark.timeout(300)]


def with_other(model, pattern: str):
    """A copy of the model in which the parameters of this name are others."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if re.search(pattern, name):
                parameter.mul_(-1).add_(torch.randn_like(parameter) * 0.1)
    return changed


def start_vllm(path):
    need("vllm")
    return RunningEngine(path)


def start_hf(path):
    return RunningEngine(path, strategy=make_strategy(path, max_length=192))


@pytest.fixture(scope="module", params=["hf", "vllm", "sglang"])
def engine(request, moe_path, tmp_path_factory):
    if request.param == "sglang":
        need("aiohttp")
        with running_stand_in(moe_path, enable_deterministic_inference=True) as running:
            yield running
        return
    running = {"hf": start_hf, "vllm": start_vllm}[request.param](moe_path)
    yield running
    running.close()


def assert_computes(engine, model):
    completion = engine.run(engine.strategy.generate, request("a", 40, ignore_eos=True))
    expected = full_scores(model, (5, 6, 7), completion)
    difference = np.abs(completion.logprobs - expected)
    assert difference.mean() < 1e-4 and difference.max() < 1e-2


def test_an_update_of_experts_alone_reaches_them(engine):
    torch.manual_seed(3)
    model = make_moe()
    engine.publish(model)
    assert_computes(engine, model)
    for pattern in (r"experts\.gate_up_proj", r"experts\.down_proj", r"layers\.2\.mlp\.experts", r"mlp\.gate\.weight"):
        before, model = model, with_other(model, pattern)
        engine.publish(model)
        assert_computes(engine, model)
        completion = engine.run(engine.strategy.generate, request("a", 40, ignore_eos=True))
        assert np.abs(completion.logprobs - full_scores(before, (5, 6, 7), completion)).mean() > 0.01


def test_an_update_that_lacks_an_expert_is_refused_by_its_name(engine):
    model = make_moe(1)
    tensors = dict(CheckpointNames.like(model).of(model.named_parameters()))
    lost = "model.layers.2.mlp.experts.5.up_proj.weight"
    del tensors[lost]
    with pytest.raises(WeightMismatch, match=re.escape(lost)):
        engine.run(engine.strategy.prepare_weights, list(pack_buckets(tensors.items(), 1 << 20)), 99)


def test_names_in_memory_are_refused(engine):
    buckets = list(pack_buckets(make_moe(1).named_parameters(), 1 << 20))
    with pytest.raises(WeightMismatch, match=r"experts\.gate_up_proj' is not in the engine's model"):
        engine.run(engine.strategy.prepare_weights, buckets, 99)


@pytest.fixture(scope="module")
def faulty(moe_path, tmp_path_factory):
    """An engine with the stand-in, and the file that says what goes wrong there."""
    need("aiohttp")
    file = tmp_path_factory.mktemp("faults") / "fault"
    file.touch()
    with running_stand_in(moe_path, fault_file=file) as running:
        yield running, file


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("skips mlp.experts", r"does not load tensor 'model\.layers\.\d\.mlp\.experts\.\d\.\w+\.weight'"),
        (r"skips experts.3.up_proj", r"parameter 'model\.layers\.0\.mlp\.experts\.w13_weight' is not filled.*\(2 such"),
        ("skips q_norm", r"does not load tensor 'model\.layers\.\d\.self_attn\.q_norm\.weight'"),
        ("lacks q_norm", r"does not load tensor 'model\.layers\.\d\.self_attn\.q_norm\.weight'"),
        ("skips v_proj", r"does not load tensor 'model\.layers\.\d\.self_attn\.v_proj\.weight'"),
        ("skips layers.1.mlp.up_proj", r"does not load tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        ("skips lm_head", r"does not load tensor 'lm_head\.weight'"),
    ],
)
def test_tensors_that_sglangs_loader_passes_over_are_told_at_the_first_update(faulty, fault, message):
    engine, file = faulty
    file.write_text(fault)
    engine.strategy._loader = None
    with pytest.raises(WeightMismatch, match=message):
        engine.publish(make_moe(1))


def test_a_later_update_that_sglang_does_not_take_is_told_by_a_tensor(faulty):
    engine, file = faulty
    file.write_text("")
    engine.strategy._loader = None
    model = make_moe(1)
    for _ in range(2):
        engine.publish(model)
    file.write_text("skips experts")
    engine.publish(with_other(model, "self_attn"))
    with pytest.raises(WeightMismatch, match=r"new tensor 'model\.layers\.2\.mlp\.experts\.0\.gate_proj\.weight'"):
        engine.publish(with_other(model, r"layers\.2\.mlp\.experts\.gate_up_proj|norm"))
