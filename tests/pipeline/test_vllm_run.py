"""A whole run with vLLM as its engine: learning, attested and compared, its engine killed on the way."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest
from runs import run_pipeline
from tiny import CHARACTERS, make_task, tiny_config
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from roll.tracking.metrics import read_metrics

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


def kill_engine_after(metrics: Path, step: int, killed: list[int]) -> None:
    """Kill vLLM's engine process, by its id, once this step has been recorded."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) > step:
            break
        time.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("VLLM::EngineCor") and process.parent().name().startswith("ray::"):
            process.kill()
            killed.append(process.pid)
            return


@pytest.mark.timeout(400)
def test_a_run_with_vllm_learns_and_survives_the_death_of_its_engine(vllm_task, ray_cluster, monkeypatch):
    config = tiny_config(
        vllm_task,
        max_steps=STEPS,
        async_generation_ratio=1,
        actor_infer__strategy_args__strategy_name="vllm",
        actor_infer__strategy_args__strategy_config={"max_num_seqs": 64},
        actor_train__training_args__learning_rate=5e-3,
        weight_update__canary_interval=5,
        mismatch_alarm=1e-4,
        mismatch_action="stop",
    )
    killed: list[int] = []
    watcher: list[threading.Thread] = []

    def start_watching(out: Path) -> None:
        thread = threading.Thread(target=kill_engine_after, args=(out / "metrics.jsonl", 3, killed), daemon=True)
        thread.start()
        watcher.append(thread)

    run = run_pipeline(vllm_task, ray_cluster, config, before=start_watching)
    watcher[0].join(10)
    steps = run.metrics
    assert killed and steps[-1]["engine/restarts"] == 1
    assert len(steps) == STEPS and run.summary["status"] == "success"
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == STEPS * 8
    assert ledger["issued"] == ledger["consumed"] + ledger["buffered"] + ledger["in_flight"]
    compared = [row for row in read_metrics(run.folder / "metrics.jsonl") if "mismatch/canary_abs_mean" in row]
    assert len(compared) >= STEPS / 5 and all(row["mismatch/canary_abs_mean"] < 1e-5 for row in compared)
    assert max(step["lag/max"] for step in steps) == 1
    first, last = (sum(step["reward/mean"] for step in part) / 10 for part in (steps[:10], steps[-10:]))
    assert last > first + 0.15
    assert_stages_account_for_the_run(run.folder)


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
