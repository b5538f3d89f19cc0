"""Whole runs with vLLM: learning, verified and compared, with devices shared, and engines killed on the way."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import FinishedRun, run_pipeline
from test_agent_runs import agent, agent_config
from tiny import CHARACTERS, make_task, tiny_config
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from roll.pipeline.recorder import RunRecorder
from roll.tracking.trackers import read_metrics
from tests.tiers import need

need("vllm")
pytestmark = pytest.mark.tier("all")

STEPS = 60
STAGES = tuple(f"stage/{name}" for name in ("rollout", "advantage", "train", "param_update"))


@pytest.fixture(scope="module")
def vllm_task(tmp_path_factory) -> Path:
    """The tiny task with a model whose heads are wide enough for vLLM's CPU kernels."""
    folder = tmp_path_factory.mktemp("vllm-task")
    make_task(folder)
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder


def vllm_config(folder: Path, **changes):
    settings = {
        "async_generation_ratio": 1,
        "actor_infer__strategy_args__strategy_name": "vllm",
        "actor_infer__strategy_args__strategy_config": {"max_num_seqs": 64},
        "actor_train__training_args__learning_rate": 5e-3,
        "mismatch_alarm": 1e-4,
        "mismatch_action": "stop",
    }
    return tiny_config(folder, **settings | changes)


ADAPTERS_ALONE = {
    "weight_update__content": "adapter",
    "actor_train__model_args": {"lora_target": "all-linear", "lora_rank": 8},
}
"""What they can learn beside a random model is little."""
COLOCATED = {"cluster__num_devices_per_node": 1, "actor_infer__device_mapping": [0]}
"""Trainer and engine share the only device; over two nodes they do not (`test_two_nodes.py`)."""


def apart(replicas: int) -> dict[str, object]:
    return {
        "cluster__num_devices_per_node": 1 + replicas,
        "actor_infer__device_mapping": list(range(1, 1 + replicas)),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("replicas", "changes", "gain"),
    [
        (1, COLOCATED, 0.15),
        pytest.param(2, apart(2), 0.15, marks=pytest.mark.tier("soak")),
        pytest.param(2, ADAPTERS_ALONE | apart(2), -0.1, marks=pytest.mark.tier("soak")),
    ],
    ids=["colocated", "two", "adapter"],
)
def test_a_run_with_vllm_learns_although_one_replica_dies_generating_and_a_second_at_an_update(
    vllm_task, ray_cluster, replicas, changes, gain
):
    config = vllm_config(
        vllm_task,
        max_steps=STEPS,
        actor_infer__worker_cls="odd_engines:KilledTwiceWithVLLM",
        weight_update__canary_interval=5,
        **changes,
    )
    run = run_pipeline(vllm_task, ray_cluster, config)
    steps = run.metrics
    assert {path.name for path in (run.folder / "logs").glob("killed-*")} == {
        f"killed-{rank}" for rank in range(replicas)
    }
    assert steps[-1]["engine/restarts"] == replicas
    assert len(steps) == STEPS and run.summary["status"] == "success"
    assert_balanced(run)
    compared = [row for row in read_metrics(run.folder / "metrics.jsonl") if "mismatch/canary_abs_mean" in row]
    assert len(compared) >= STEPS / 5 and all(row["mismatch/canary_abs_mean"] < 1e-5 for row in compared)
    assert max(step["lag/max"] for step in steps) == 1
    first, last = (sum(step["reward/mean"] for step in part) / 10 for part in (steps[:10], steps[-10:]))
    assert last > first + gain
    assert_stages_account_for_the_run(run.folder)


@pytest.mark.timeout(900)
@pytest.mark.tier("soak")
def test_agents_of_vllm_are_trained_on_what_was_sampled_although_weights_change_meanwhile(
    vllm_task, ray_cluster, monkeypatch
):
    """Each token's log-probability is found again with the weights of its version."""
    samples, record = [], RunRecorder.step

    async def recorded(recorder, batch, *rest):
        samples.extend(sample for group in batch.groups for sample in group.samples)
        await record(recorder, batch, *rest)

    monkeypatch.setattr(RunRecorder, "step", recorded)
    envs = {"copy": agent("copy_agents:patient", max_steps=6, max_tokens_per_step=4)}
    settings = {
        "actor_infer__strategy_args": {"strategy_name": "vllm", "strategy_config": {"max_num_seqs": 64}},
        "actor_train__training_args__learning_rate": 5e-3,
        "async_generation_ratio": 1,
        "weight_update__in_flight": "resume",
        "max_steps": 10,
        "save_steps": 1,
        "max_ckpt_to_keep": 0,
        "response_length": 50,
    }
    run = run_pipeline(vllm_task, ray_cluster, agent_config(vllm_task, envs, **settings))
    mixed, differences = 0, []
    for sample in samples:
        versions = sample.versions[sample.response_mask]
        mixed += versions[0] != versions[-1]
        for version in np.unique(versions).tolist():
            folder = run.folder / "checkpoints" / f"step-{version}" if version else vllm_task / "model"
            mine = np.flatnonzero(sample.versions == version)
            found = logprobs_of(folder, sample.token_ids)[mine - 1]
            differences.append(np.abs(found - sample.behaviour_logprobs[mine]))
    assert mixed > len(samples) / 10
    assert np.concatenate(differences).mean() < 1e-5


@torch.no_grad()
def logprobs_of(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """Log-probabilities of each token but the first."""
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    logits = model_at(folder)(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, tokens[1:, None])[:, 0].numpy()


@cache
def model_at(folder: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_balanced(run: FinishedRun) -> None:
    """Every batch was whole, and no group is unaccounted for."""
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == len(run.metrics) * 8
    assert ledger["issued"] == ledger["consumed"] + ledger["buffered"] + ledger["in_flight"]


def assert_stages_account_for_the_run(folder: Path) -> None:
    """The states of each stage, one after the other, make up the time from the first to the last event."""
    trace = json.loads((folder / "timeline.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault(names[event["pid"], event["tid"]], []).append((event["ts"], event["dur"]))
    spans = {stage: spans[stage] for stage in STAGES}
    for stage, own in spans.items():
        wall = max(start + length for start, length in own) - min(start for start, _ in own)
        assert abs(sum(length for _, length in own) / wall - 1) < 0.05, stage
