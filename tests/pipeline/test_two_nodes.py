"""Whole runs over two Ray nodes: the trainer on one, the engine on the other, a step ahead. Weights and tokens travel
between the nodes' object stores; that both nodes are processes of this machine makes no difference to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_witnesses import FILE
from runs import FinishedRun, run_pipeline
from test_vllm_run import assert_balanced, vllm_config, vllm_task  # noqa: F401  # a fixture

from roll.configs import derived
from roll.configs.loader import load_config
from roll.tracking.files import read_json_lines
from tests.ray_cluster import running_cluster

pytestmark = pytest.mark.tier("all")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    with running_cluster(nodes=2) as address:
        yield address


def run_apart(task: Path, address: str, steps: int, **changes: Any) -> tuple[FinishedRun, list[int]]:
    """A run with the trainer on one node and the engine on the other, and the versions that engines loaded."""
    config = vllm_config(
        task,
        max_steps=steps,
        cluster__num_nodes=2,
        cluster__num_devices_per_node=1,
        actor_train__worker_cls="node_witnesses:WitnessTrainer",
        actor_infer__worker_cls="node_witnesses:WitnessEngine",
        weight_update__canary_interval=1,
        num_logged_samples=8,
        **changes,
    )
    run = run_pipeline(task, address, config)

    witnessed = read_json_lines(run.folder / "logs" / FILE)
    started = {each["role"]: each for each in witnessed if "transport" in each}
    nodes = {role: each["node"] for role, each in started.items()}
    assert nodes.keys() == {"actor_train", "actor_infer"} and nodes["actor_train"] != nodes["actor_infer"]
    resolved = load_config(run.folder / "config.yaml")
    assert derived.publication_nodes(resolved) == {0, 1} and derived.weight_transport(resolved) == "object_store"
    assert {each["transport"] for each in started.values()} == {"object_store"}

    assert run.summary["status"] == "success" and len(run.metrics) == steps
    assert_balanced(run)
    assert run.summary["lag/max"] == 1 and run.metrics[0]["lag/max"] == 0
    for step, sample in ((each["step"], each) for each in run.samples):
        oldest, newest = sample["versions"]
        assert max(step - 2, 0) <= oldest <= newest <= step - 1
    return run, [each["version"] for each in witnessed if "version" in each]


@pytest.mark.timeout(300)
def test_trainer_and_engine_on_different_nodes_run_a_step_apart(vllm_task, two_nodes):  # noqa: F811
    run, loaded = run_apart(
        vllm_task, two_nodes, 4, actor_infer__strategy_args={"strategy_name": "hf_infer", "strategy_config": {}}
    )
    assert loaded == list(range(5))
    # What the engine computes with the weights that came is what the trainer computes.
    assert all(each["mismatch/canary_abs_mean"] < 1e-5 for each in run.metrics)
    assert all(each["weights/fetch_seconds"] > 0 for each in run.metrics)


@pytest.mark.timeout(400)
def test_vllm_lives_on_when_the_trainer_is_killed_and_computes_with_the_weights_of_the_next_one(
    vllm_task,  # noqa: F811
    two_nodes,
):
    """Versions that it had come by again: nothing that it has cached of the earlier ones is taken for theirs."""
    run, loaded = run_apart(
        vllm_task,
        two_nodes,
        8,
        save_steps=3,
        restarts={"max_in_a_row": 1, "delay_seconds": 0},
        chaos={"enabled": True, "events": [{"kind": "kill", "role": "actor_train", "at_step": 5}]},
    )
    (resumed_at,) = run.summary["resumed_at"]
    again = list(range(resumed_at, 9))
    assert loaded == [*range(len(loaded) - len(again)), *again] and len(loaded) > 9
    # An engine whose load the death of the trainer interrupts is replaced, and misses a comparison or two.
    compared = [step["mismatch/canary_abs_mean"] for step in run.metrics if "mismatch/canary_abs_mean" in step]
    assert len(compared) >= 5 and max(compared) < 1e-5
    started = (run.folder / "logs" / "driver.log").read_text().count
    engines = started("worker actor_infer/0 runs as process")
    assert engines == 1 or (engines == 2 and run.metrics[-1]["engine/restarts"] == 1)
    assert started("worker actor_train/0 runs as process") == 2
