"""Whole runs whose weights travel as deltas: those with whole weights, whatever happens to deltas or processes."""

from __future__ import annotations

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from safetensors.torch import load_file
from tiny import tiny_config

LARGE = {"transport": "object_store", "canary_interval": 1}
"""The transport for which deltas are meant."""


def learned(step):
    """Metrics without times and bytes."""
    return {name: value for name, value in step.items() if name.startswith(("actor/", "reward/", "mismatch/"))}


def as_deltas(folder, content="delta", dtype="bfloat16", **changes):
    settings = {
        "weight_update": {**LARGE, "content": content},
        "actor_infer__model_args__dtype": dtype,
        "actor_train__training_args__learning_rate": 1e-5,
    }
    return tiny_config(folder, **settings | changes)


@pytest.mark.parametrize("transport", ["object_store", "shared_memory"])
def test_a_run_with_deltas_is_the_run_with_whole_weights_to_the_bit(task, transport):
    corrupted = {"chaos": {"enabled": True, "events": [{"kind": "corrupt_bucket", "at_step": 2}]}}
    way = {"weight_update__transport": transport}
    mine = run_pipeline(task, IN_THIS_PROCESS, as_deltas(task, **corrupted, **way))
    other = run_pipeline(task, IN_THIS_PROCESS, as_deltas(task, "full", **way))
    assert [*map(learned, mine.metrics)] == [*map(learned, other.metrics)] != []
    assert [each["response"] for each in mine.samples] == [each["response"] for each in other.samples] != []
    export = "checkpoints/step-3/model.safetensors"
    mine_saved, other_saved = load_file(mine.folder / export), load_file(other.folder / export)
    assert all(mine_saved[name].equal(other_saved[name]) for name in mine_saved.keys() | other_saved.keys())
    assert [step["weights/healed"] for step in mine.metrics] == [0, 1, 0], "the damaged one"
    for step, whole in zip(mine.metrics, other.metrics, strict=True):
        assert step["weights/bytes"] < 0.3 * whole["weights/bytes"] and "weights/healed" not in whole


@pytest.mark.tier("all")
def test_an_engine_that_dies_and_a_run_that_is_resumed_begin_with_whole_weights(task):
    events = [{"kind": "kill", "at_step": 2, "role": "actor_infer", "rank": 0}]
    config = as_deltas(
        task,
        max_steps=5,
        save_steps=3,
        async_generation_ratio=1,
        actor_infer__device_mapping=[1, 2],
        cluster__num_devices_per_node=3,
        chaos={"enabled": True, "events": events},
        weight_update__full_every=4,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    steps = run.metrics
    assert steps[-1]["engine/restarts"] == 1 and not any(step["weights/healed"] for step in steps)
    whole = max(step["weights/bytes"] for step in steps)
    assert [step["weights/bytes"] == whole for step in steps] == [False, False, False, True, False], (
        "version 0 is whole"
    )
    again = go_on_from(3, run, task, IN_THIS_PROCESS, config).metrics
    assert [step["step"] for step in again] == [1, 2, 3, 4, 5] and not any(step["weights/healed"] for step in again)
    assert again[3]["weights/bytes"] < 0.5 * whole, "version 3 was whole for the resumed one"
    assert all("mismatch/canary_max" in step for step in again)
