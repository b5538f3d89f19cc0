"""Promise 2: with ratio 0 a run is bit-identical to a plain generate-then-train loop.

The plain loop is `examples/grpo_in_one_file.py`: no scheduler, no stages, no workers.
"""

from __future__ import annotations

import asyncio
import runpy
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import ROOT, run_pipeline
from safetensors.torch import load_file
from tiny import tiny_config, write_config

from tests.tiers import quick

STEPS = 5


@dataclass
class Plain:
    """What the plain loop came to."""

    model: Path
    steps: list[tuple[float, ...]]
    """Mean reward, loss and norm of the gradient of each."""


@pytest.fixture(scope="module")
def plain(task, tmp_path_factory) -> Plain:
    """Generate, judge, train, load the weights; five times."""
    out = tmp_path_factory.mktemp("plain")
    example = runpy.run_path(str(ROOT / "examples" / "grpo_in_one_file.py"))
    config = write_config(out, tiny_config(task, max_steps=STEPS))
    steps = asyncio.run(example["train"](config, export=out / "model"))
    return Plain(out / "model", [astuple(step) for step in steps])


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def different(first: Path, second: Path) -> list[str]:
    """Tensors of two models of which any bit differs."""
    one, other = final_weights(first), final_weights(second)
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def assert_is_the_plain_loop(run, plain: Plain) -> None:
    assert different(run.folder / "checkpoints" / f"step-{STEPS}", plain.model) == []
    told = [(step["reward/mean"], step["actor/loss"], step["actor/grad_norm"]) for step in run.metrics]
    assert told == plain.steps


COLOCATED = {"cluster__num_devices_per_node": 1, "actor_infer__device_mapping": [0]}
IN_PIECES = {
    "weight_update__param_update_gather_bucket_size_mb": 0.01,
    "weight_update__param_update_load_bucket_size_mb": 0.005,
}


VARIANTS = {
    "split": {},
    "late rewards": {"rewards__addition__verifier": "reward_functions:late_reward"},
    "colocated": COLOCATED,
    "object store": {**IN_PIECES, "weight_update__transport": "object_store"},
    "files": {**IN_PIECES, **COLOCATED, "weight_update__transport": "checkpoint"},
    "one buffer": {**IN_PIECES, "weight_update__transport": "shared_memory", "weight_update__dual_buffer": False},
    "colocated with one buffer": {**IN_PIECES, **COLOCATED, "weight_update__dual_buffer": False},
}


@pytest.mark.parametrize("name", quick(VARIANTS, "split", "colocated"))
def test_ratio_zero_is_the_plain_loop_bit_for_bit_however_rewards_and_weights_travel(task, plain, name):
    run = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, max_steps=STEPS, **VARIANTS[name]))
    assert_is_the_plain_loop(run, plain)
    parts = {f"weights/{part}_seconds" for part in ("gather", "send", "fetch", "load", "stall")}
    assert all(parts <= step.keys() for step in run.metrics)
    assert not (run.folder / "weights").exists()


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "changes", [{}, {**IN_PIECES, **COLOCATED, "weight_update__transport": "object_store"}], ids=["split", "colocated"]
)
def test_across_processes_it_is_so_too(task, plain, ray_cluster, changes):
    assert_is_the_plain_loop(run_pipeline(task, ray_cluster, tiny_config(task, max_steps=STEPS, **changes)), plain)


def test_the_plain_loop_learns_something_and_another_seed_gives_another_run(task, plain):
    assert "model.embed_tokens.weight" in different(plain.model, task / "model")
    other = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, max_steps=1, seed=8))
    assert other.metrics[0]["actor/loss"] != plain.steps[0][1]
