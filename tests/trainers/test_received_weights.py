"""Forward-only roles that take new weights while they run: whole, exact, and refused by name if they do not fit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from roll.configs.roles import ModelArguments
from roll.runtime.workers import WorkerIdentity, WorkerPlace
from roll.trainers.trainer import ForwardStrategy
from roll.trainers.worker import TrainWorker
from roll.weights.buckets import WeightMismatch, manifest, pack_buckets, views
from roll.weights.publisher import Publication, WeightsDiffer
from tests.trainers.ranks import Job, run_here, run_job
from tests.trainers.tiny_models import make_batch, write_model
from tests.weights.test_checkpoint_names import make

BATCH = make_batch()


def weights_of(path, dtype=torch.float32):
    return {name: weight.to(dtype) for name, weight in load_file(f"{path}/model.safetensors").items()}


def before_and_after(role: ForwardStrategy, source):
    """Log-probabilities, those with the weights of ``source``, and what the model then holds, to the bit."""
    before = role.log_probs(BATCH, 1.0)
    weights = weights_of(source, getattr(torch, role.setup.model_args.dtype))
    role.load_weights(weights.items())
    held = {name: tensor.clone() for name, tensor in role.held_weights(weights)}
    return before, role.log_probs(BATCH, 1.0), all(torch.equal(held[name], weights[name]) for name in weights)


def log_probs(role: ForwardStrategy, _):
    return role.log_probs(BATCH, 1.0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.tier("all"))])
@pytest.mark.parametrize("layout", [{}, {"packed": True, "max_tokens": 14}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp2_train", "hf_infer"])
def test_a_role_computes_with_the_weights_that_it_got(tmp_path, strategy, tied, layout, ranks, leave_process_group):
    paths = [write_model(tmp_path / str(seed), tied=tied, seed=seed) for seed in (0, 1)]
    setup = {"forward_only": True, **layout}
    if "dtype" in setup:
        setup["model_args"] = ModelArguments(dtype=setup.pop("dtype"))
    start = run_here if ranks == 1 else run_job
    results = start(Job(before_and_after, strategy, paths[0], paths[1], setup, ranks))
    expected = start(Job(log_probs, strategy, paths[1], None, setup, ranks))
    for (before, after, held), wanted in zip(results, expected, strict=True):
        assert held and np.array_equal(after, wanted)
        assert np.abs(before - after).max() > 0.01


def from_worker(role: ForwardStrategy, source):
    """A worker's whole way of float32 weights that travel in bfloat16, to a role; and of a damaged model after it."""
    weights, uncast = load_file(f"{source}/model.safetensors"), role.checkpoint_names.uncast
    buckets = list(pack_buckets(weights.items(), 3000, float_dtype=torch.bfloat16, uncast=uncast))
    worker = TrainWorker(WorkerIdentity("reference", 0, 1, WorkerPlace(0, "cpu", (0,), 1), None))
    worker._strategy = role
    worker.__dict__["_receiver"] = SimpleNamespace(receive=lambda handles, version: iter(buckets))
    for version in range(40):  # each looks at other tensors of the model
        worker._load(Publication(version, [], *manifest(buckets), 0))
    held = dict(role.held_weights(weights))
    for bucket in buckets:
        assert all(torch.equal(held[name], tensor.to(held[name].dtype)) for name, tensor in views(bucket))
    assert np.isfinite(role.log_probs(BATCH, 1.0)).all()
    read = role._read
    role._read = lambda parameter: read(parameter) * 1.01
    with pytest.raises(WeightsDiffer, match="differs from what was published"):
        worker._load(Publication(41, [], *manifest(buckets), 0))
    assert all(held[name].dtype == torch.float32 for name in uncast)
    return {str(tensor.dtype) for tensor in held.values()}


@pytest.mark.parametrize(
    ("family", "strategy"),
    [("ernie4_5_moe", "hf_infer"), ("minimax_m2", "hf_infer"), ("minimax_m2", "fsdp2_train")],
)
def test_a_role_in_bf16_loses_no_digits_of_what_is_kept_in_float32(tmp_path, family, strategy, leave_process_group):
    paths = [str(tmp_path / str(seed)) for seed in (0, 1)]
    for seed, path in enumerate(paths):
        make(family, seed).save_pretrained(path)
    setup = {"forward_only": True, "model_args": ModelArguments(dtype="bfloat16")}
    (dtypes,) = run_here(Job(from_worker, strategy, paths[0], paths[1], setup, 1))
    assert dtypes == {"torch.bfloat16", "torch.float32"}


def loses_digits(role: ForwardStrategy, source):
    with pytest.raises(WeightMismatch, match=r"is torch\.bfloat16 in the model, torch\.float32 as published"):
        role.load_weights(weights_of(source).items())


@pytest.mark.parametrize("strategy", ["fsdp2_train", "hf_infer"])
def test_weights_in_a_higher_precision_than_the_roles_are_refused(tmp_path, strategy, leave_process_group):
    path, setup = write_model(tmp_path), {"forward_only": True, "model_args": ModelArguments(dtype="bfloat16")}
    run_here(Job(loses_digits, strategy, path, path, setup, 1))


def refusals(role: ForwardStrategy, source):
    """What is said of weights that do not fit."""
    weights = weights_of(source)
    name = sorted(weights)[0]
    wrong = {
        "missing": {key: value for key, value in weights.items() if key != name},
        "unknown": weights | {"model.another.weight": torch.zeros(2)},
        "shape": weights | {name: weights[name][:1]},
    }
    said = {}
    for kind, given in wrong.items():
        with pytest.raises(WeightMismatch) as caught:
            role.load_weights(given.items())
        said[kind] = str(caught.value)
    return name, said


@pytest.mark.parametrize("strategy", ["fsdp2_train", "hf_infer"])
def test_weights_that_do_not_fit_are_named(tmp_path, strategy, leave_process_group):
    path = write_model(tmp_path)
    ((name, said),) = run_here(Job(refusals, strategy, path, path, {"forward_only": True}, 1))
    assert said["missing"] == f"tensor '{name}' is missing (1 missing in all)"
    assert said["unknown"] == "tensor 'model.another.weight' is not in the model"
    assert name in said["shape"]
