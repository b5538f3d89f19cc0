"""A run of two domains, one judged by rule and one by a model, whose process is killed on the way."""

from __future__ import annotations

import json

import pytest
from reward_functions import digit_reward
from reward_models import SCORES, make_reward_model
from runs import run_pipeline
from tiny import make_task, tiny_config

from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.pipeline.preflight import prepare


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    make_reward_model(folder / "reward")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows += [{"prompt": f"{number}=", "domain": "chat"} for number in range(10, 60)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_models_that_rewards_name_are_looked_up_before_anything_starts(task):
    tree = tiny_config(
        task,
        reward_pretrain=str(task / "model"),
        rewards__chat={"verifier": "reward_model", "device_mapping": [1]},
        rewards__essay={"verifier": "judge", "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
    )
    with pytest.raises(ConfigError) as caught:
        prepare(config_from_tree(tree))
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"reward_pretrain", "rewards.chat.reward_model.label", "rewards.essay.judge.base_url"}
    assert all(words in str(caught.value) for words in ("no head", "no chat template", "http://127.0.0.1:1/v1"))


@pytest.mark.tier("all")
@pytest.mark.timeout(300)
def test_each_domain_has_its_judge_although_the_reward_model_dies_and_shares_its_device(task, ray_cluster):
    chat = {
        "verifier": "reward_model",
        "device_mapping": [1],
        "infer_batch_size": 8,
        "worker_cls": "reward_models:DiesOnce",
        "strategy_args": {"strategy_name": "hf_infer", "strategy_cls": "reward_models:DoubledScores"},
    }
    config = tiny_config(
        task,
        max_steps=6,
        async_generation_ratio=1,
        num_logged_samples=100,
        reward_pretrain=str(task / "reward"),
        rewards__chat=chat,
    )
    run = run_pipeline(task, ray_cluster, config)
    assert (run.folder / "logs" / "reward-model-killed").exists()
    assert run.metrics[-1]["rewards/chat/restarts"] == 1
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == 48 and ledger["dropped/failed"] == 0
    truths = {row["prompt"]: row["ground_truth"] for row in map(json.loads, open(task / "train.jsonl")) if len(row) > 2}
    by_rule = [sample for sample in run.samples if sample["domain"] == "addition"]
    by_model = [sample for sample in run.samples if sample["domain"] == "chat"]
    assert len(by_rule) > 5 and len(by_model) > 5
    for sample in by_rule:
        assert sample["score"] == pytest.approx(digit_reward(sample["response"], truths[sample["prompt"]]))
    for sample in by_model:
        last = (sample["prompt"] + sample["response"])[-1]
        assert sample["score"] == pytest.approx(2 * SCORES[last], abs=1e-4)
    assert len({sample["score"] for sample in by_model}) > 3
    scored = [step["reward/chat/mean"] for step in run.metrics if "reward/chat/mean" in step]
    assert scored and all(0 < mean < 6 for mean in scored)
    assert run.metrics[-1]["reward/truncated_left"] == 0
