"""Whole runs over two Ray nodes: the trainer on one, the engine on the other, a step ahead. Weights and tokens travel
between the nodes' object stores; that both nodes are processes of this machine makes no difference to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from node_witnesses import FILE
from runs import run_pipeline
from test_vllm_run import assert_balanced, vllm_task  # noqa: F401  # a fixture
from tiny import tiny_config

from roll.configs import derived
from roll.configs.loader import load_config
from roll.tracking.files import read_json_lines
from tests.ray_cluster import running_cluster
from tests.tiers import need

pytestmark = pytest.mark.tier("all")

STEPS = 4


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    with running_cluster(nodes=2) as address:
        yield address


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["hf_infer", "vllm"])
def test_trainer_and_engine_on_different_nodes_run_a_step_apart(vllm_task, two_nodes, engine):  # noqa: F811
    if engine == "vllm":
        need("vllm")
    config = tiny_config(
        vllm_task,
        max_steps=STEPS,
        async_generation_ratio=1,
        cluster__num_nodes=2,
        cluster__num_devices_per_node=1,
        actor_train__worker_cls="node_witnesses:WitnessTrainer",
        actor_infer__worker_cls="node_witnesses:WitnessEngine",
        actor_infer__strategy_args__strategy_name=engine,
        actor_infer__strategy_args__strategy_config={"max_num_seqs": 32} if engine == "vllm" else {},
        weight_update__canary_interval=1,
        num_logged_samples=8,
    )
    run = run_pipeline(vllm_task, two_nodes, config)

    witnessed = read_json_lines(run.folder / "logs" / FILE)
    started = {each["role"]: each for each in witnessed if "transport" in each}
    nodes = {role: each["node"] for role, each in started.items()}
    assert nodes.keys() == {"actor_train", "actor_infer"} and nodes["actor_train"] != nodes["actor_infer"]
    resolved = load_config(run.folder / "config.yaml")
    assert derived.publication_nodes(resolved) == {0, 1} and derived.weight_transport(resolved) == "object_store"
    assert {each["transport"] for each in started.values()} == {"object_store"}
    assert [each["version"] for each in witnessed if "version" in each] == list(range(STEPS + 1))

    assert run.summary["status"] == "success" and len(run.metrics) == STEPS
    assert_balanced(run)
    assert run.summary["lag/max"] == 1 and run.metrics[0]["lag/max"] == 0
    for step, sample in ((each["step"], each) for each in run.samples):
        oldest, newest = sample["versions"]
        assert max(step - 2, 0) <= oldest <= newest <= step - 1
    # What the engine computes with the weights that came is what the trainer computes.
    assert all(each["mismatch/canary_abs_mean"] < 1e-5 for each in run.metrics)
    assert all(each["weights/fetch_seconds"] > 0 for each in run.metrics)
