"""Whole runs with vLLM: learning, verified and compared, engines killed on the way, and devices shared."""

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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("replicas", "changes", "gain"),
    [
        (1, {}, 0.15),
        pytest.param(2, {}, 0.15, marks=pytest.mark.tier("soak")),
        pytest.param(2, ADAPTERS_ALONE, -0.1, marks=pytest.mark.tier("soak")),
    ],
    ids=["one", "two", "adapter"],
)
def test_a_run_with_vllm_learns_although_one_replica_dies_generating_and_a_second_at_an_update(
    vllm_task, ray_cluster, replicas, changes, gain
):
    config = vllm_config(
        vllm_task,
        max_steps=STEPS,
        cluster__num_devices_per_node=1 + replicas,
        actor_infer__device_mapping=list(range(1, 1 + replicas)),
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


@pytest.mark.timeout(300)
def test_vllm_shares_the_device_of_the_trainer(vllm_task, ray_cluster):
    config = vllm_config(
        vllm_task,
        max_steps=3,
        cluster__num_devices_per_node=1,
        actor_infer__device_mapping=[0],
        weight_update__canary_interval=1,
    )
    run = run_pipeline(vllm_task, ray_cluster, config)
    assert len(run.metrics) == 3 and run.summary["status"] == "success"
    assert_balanced(run)
    assert run.summary["lag/max"] == 1
    assert all(step["mismatch/canary_abs_mean"] < 1e-5 for step in run.metrics)


@pytest.mark.timeout(400)
def test_vllm_lives_on_when_the_trainer_is_killed_and_computes_with_the_weights_of_the_next_one(vllm_task, ray_cluster):
    """Versions that it had come by again: nothing that it has cached of the earlier ones is taken for theirs."""
    config = vllm_config(
        vllm_task,
        max_steps=8,
        save_steps=3,
        weight_update__canary_interval=1,
        restarts={"max_in_a_row": 1, "delay_seconds": 0},
        chaos={"enabled": True, "events": [{"kind": "kill", "role": "actor_train", "at_step": 5}]},
    )
    run = run_pipeline(vllm_task, ray_cluster, config)
    assert len(run.metrics) == 8 and run.summary["status"] == "success" and len(run.summary["resumed_at"]) == 1
    assert_balanced(run)
    # An engine whose load the death of the trainer interrupts is replaced, and misses a comparison or two.
    compared = [step["mismatch/canary_abs_mean"] for step in run.metrics if "mismatch/canary_abs_mean" in step]
    assert len(compared) >= 5 and max(compared) < 1e-5
    started = (run.folder / "logs" / "driver.log").read_text().count
    engines = started("worker actor_infer/0 runs as process")
    assert engines == 1 or (engines == 2 and run.metrics[-1]["engine/restarts"] == 1)
    assert started("worker actor_train/0 runs as process") == 2


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
