"""`megatron_train` against transformers and `fsdp2_train`, however the model is shared out over real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiers import need, soak_but
from tests.trainers.megatron_models import MODELS, VOCABULARY
from tests.trainers.megatron_runs import LEFT_OUT, Run, every_next_token
from tests.trainers.ranks import Results

need("megatron.core")
pytestmark = pytest.mark.tier("all")

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
PLAIN_OPTIMIZER = {"use_distributed_optimizer": False}
EVERY_LAYER = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FIRST_LAYER = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}

ONE_RANK = [
    *(Run(f"{model}-fsdp2", model, strategy="fsdp2_train") for model in MODELS),
    *(Run(f"{model}-one", model, trains=model == "qwen2") for model in MODELS),
]
TWO_RANKS = [
    *(Run(f"{model}-tensor", model, 2, SEQUENCE if model == "qwen3_moe" else TENSOR) for model in MODELS),
    *(Run(f"{model}-stages", model, 2, STAGES) for model in MODELS),
    Run("qwen2-sequence", "qwen2", 2, SEQUENCE | PLAIN_OPTIMIZER),
    Run("qwen2-data", "qwen2", 2),
    Run("qwen3-data-plain", "qwen3", 2, PLAIN_OPTIMIZER | {"overlap_grad_reduce": True}),
    Run("qwen3_moe-experts", "qwen3_moe", 2, EXPERTS),
    Run("qwen3_moe-experts-plain", "qwen3_moe", 2, EXPERTS | PLAIN_OPTIMIZER),
    Run("llama-recompute", "llama", 2, SEQUENCE | EVERY_LAYER),
    Run("qwen2-recompute-block", "qwen2", 2, STAGES | FIRST_LAYER | PLAIN_OPTIMIZER),
    Run("qwen3_moe-reference", "qwen3_moe", 2, TENSOR, trains=False, changes={"forward_only": True}),
    Run("qwen3-recompute-attention", "qwen3", 1, {"recompute_granularity": "selective"}),
]
MORE_RANKS = [
    Run("qwen2-both", "qwen2", 4, TENSOR | STAGES),
    Run("qwen3_moe-all", "qwen3_moe", 4, SEQUENCE | EXPERTS | {"expert_tensor_parallel_size": 1}),
    Run("qwen2-virtual", "qwen2", 3, {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}),
]
RUNS = (*ONE_RANK, *TWO_RANKS, *MORE_RANKS)
LAYOUTS = [run for run in RUNS if run.strategy == "megatron_train"]
FOR_EACH_CHANGE = {
    *("qwen2-one", "qwen3_moe-one", "qwen2-tensor", "qwen3_moe-tensor", "llama-stages", "qwen3-stages", "qwen2-data"),
    *("qwen3_moe-experts", "llama-recompute", "qwen3_moe-reference", "qwen3_moe-all", "qwen2-virtual"),
}
"""Each model and each way to share it."""


@pytest.fixture(scope="module")
def results_of(folder):
    """Results by rank, by the run's name."""
    return Results({run.name: run.job(folder) for run in RUNS})


def plain_distributions(path: Path, temperature: float) -> np.ndarray:
    """What transformers says comes next after each prefix: ``[prefixes, vocabulary]``."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    rows = []
    for length in (1, 4, 11):
        prefix = every_next_token(length, length).tokens["token_ids"][:length].astype(np.int64)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(prefix)[None]).logits[0, -1]
        rows.append((logits / temperature).log_softmax(-1).numpy())
    return np.stack(rows)


def of_layouts(layouts: list[Run]) -> pytest.MarkDecorator:
    chosen = [run for run in layouts if run.name in FOR_EACH_CHANGE]
    return pytest.mark.parametrize("run", soak_but(chosen, layouts), ids=lambda run: run.name)


layouts = of_layouts(LAYOUTS)
trained = of_layouts([run for run in LAYOUTS if run.trains])


@layouts
def test_each_next_token_is_as_likely_as_transformers_says(run, folder, results_of):
    for temperature in (1.0, 0.6):
        expected = plain_distributions(folder / run.model, temperature)
        assert expected.shape[1] == VOCABULARY
        for results in results_of[run.name]:
            np.testing.assert_allclose(results[f"distribution/{temperature}"], expected, rtol=0, atol=1e-4)


@layouts
def test_loaded_weights_come_back_bit_for_bit_on_every_rank(run, folder, results_of):
    expected = dict(AutoModelForCausalLM.from_pretrained(folder / run.model).named_parameters())
    for results in results_of[run.name]:
        found = {name.partition("/")[2]: value for name, value in results.items() if name.startswith("initial/")}
        assert list(found) and found.keys() == expected.keys()
        for name, value in found.items():
            assert np.array_equal(value, expected[name].detach().numpy()), name


@layouts
def test_an_export_has_the_tensors_of_the_file_that_was_loaded(run, folder, results_of):
    assert results_of[run.name]
    original = load_file(folder / run.model / "model.safetensors")
    exported = load_file(folder / f"{run.name}-initial" / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    assert (folder / f"{run.name}-initial" / "tokenizer.json").read_text() == '{"made": "by the test"}'


@trained
def test_training_is_that_of_fsdp2(run, results_of):
    (expected,) = results_of[f"{run.model}-fsdp2"]
    by_rank = results_of[run.name]
    names = [name for name in expected if name.startswith(("metric/", "trained"))]
    assert len([name for name in names if name.endswith("/grad_norm")]) == len(LEFT_OUT)
    for results in by_rank:
        for name in names:
            np.testing.assert_allclose(results[name], expected[name], rtol=1e-4, atol=2e-6, err_msg=name)
    for other in by_rank[1:]:
        assert all(np.array_equal(other[name], by_rank[0][name]) for name in names)


@trained
def test_a_reloaded_model_is_the_first_one_again(run, results_of):
    for results in results_of[run.name]:
        assert np.array_equal(results["reloaded_distribution"], results["distribution/1.0"])
        assert not np.allclose(results["trained_distribution"], results["distribution/1.0"], atol=1e-3)


@trained
def test_what_was_trained_is_what_is_exported(run, folder, results_of):
    results = results_of[run.name][0]
    exported = AutoModelForCausalLM.from_pretrained(folder / f"{run.name}-export")
    for name, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), results[f"trained/{name}"]), name
