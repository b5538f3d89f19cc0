"""A policy that learns from a teacher: what reaches its batches, what runs compute, and what is refused."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from safetensors.torch import load_file
from test_agentic_runs import agentic_config
from tiny import CHARACTERS, make_task, tiny_config
from transformers import AutoModelForCausalLM

from roll.algorithms.kl import KLController
from roll.algorithms.rewards import RewardShaping
from roll.check.config import check_config
from roll.check.plan import plan_rows
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.configs.run import DistillationConfig
from roll.pipeline.algorithm import add_advantages, with_own_advantages
from roll.pipeline.preflight import look_up
from roll.pipeline.resume import changes
from tests.pipeline.test_advantage_stage import batch_of, sample, settings

TEACHER = {"device_mapping": [0]}
IN_REWARDS = {"teacher": TEACHER, "distillation": {"use": "rewards"}}
ALONE = {"teacher": TEACHER, "distillation": {"reward_coef": 0}}


def taught_batch(teacher=(-1.0, -0.25, -0.5)):
    """Scores 1 and 0; each token was sampled at -0.5."""
    batch = batch_of(([sample(1.0), sample(0.0)], None))
    batch.data.tokens["teacher_logprobs"] = np.tile(np.array([7.0, 7.0, *teacher], dtype=np.float32), 2)
    return batch


def advantages_of(distillation, estimator="reinforce", teacher=(-1.0, -0.25, -0.5), **changes):
    batch = taught_batch(teacher)
    metrics = add_advantages(batch, settings(estimator, distillation=DistillationConfig(**distillation), **changes))
    values = batch.data.tokens["advantages"].reshape(2, 5)
    assert not values[:, :2].any(), "prompts have no advantages"
    return values[:, 2:].tolist(), metrics


def test_the_divergence_is_subtracted_from_the_advantage_of_its_own_token():
    values, metrics = advantages_of({"coef": 2.0, "reward_coef": 0.5})
    assert values == [[-0.5, 1.0, 0.5], [-1.0, 0.5, 0.0]]
    assert metrics["distillation/reverse_kl"] == pytest.approx(0.25 / 3)


def test_in_the_rewards_it_counts_for_all_tokens_before_it():
    values, metrics = advantages_of({"use": "rewards", "coef": 2.0, "reward_coef": 0.5})
    assert values == [[0.0, 1.0, 0.5], [-0.5, 0.5, 0.0]]
    assert metrics["distillation/reverse_kl"] == pytest.approx(0.25 / 3)


def test_as_a_term_of_the_loss_it_leaves_advantages_to_the_task():
    values, metrics = advantages_of({"use": "loss", "coef": 2.0, "reward_coef": 0.5})
    assert values == [[0.5] * 3, [0.0] * 3] and metrics["distillation/reverse_kl"] == pytest.approx(0.25 / 3)


def test_without_rewards_only_the_teacher_counts_and_one_that_is_the_policy_teaches_nothing():
    assert advantages_of({"reward_coef": 0})[0] == [[-0.5, 0.25, 0.0]] * 2
    for use in ("advantages", "rewards", "loss"):
        values, metrics = advantages_of({"use": use, "reward_coef": 0}, teacher=(-0.5, -0.5, -0.5))
        assert values == [[0.0] * 3] * 2 and metrics["distillation/reverse_kl"] == 0


def test_advantages_are_whitened_before_the_divergence_and_clipped_after_it():
    plain, _ = advantages_of({"reward_coef": 1.0}, whitened=True)
    white = (np.array([[1.0], [0.0]]) - 0.5) / (np.std([1, 1, 1, 0, 0, 0], ddof=1) + 1e-8)
    assert np.array(plain) == pytest.approx(white + np.array([-0.5, 0.25, 0.0]), abs=1e-6)
    clipped, _ = advantages_of({"reward_coef": 1.0, "coef": 4.0}, advantage_clip=1.5)
    assert clipped == [[-1.0, 1.5, 1.0], [-1.5, 1.0, 0.0]]


def test_a_kl_penalty_and_a_greedy_baseline_stay_what_they_are():
    batch = batch_of(([sample(1.0)], 0.5))
    batch.data.tokens["teacher_logprobs"] = np.full(5, -1.0, dtype=np.float32)
    batch.data.tokens["reference_logprobs"] = np.full(5, -1.5, dtype=np.float32)
    teaching = DistillationConfig(use="rewards", coef=1.0, reward_coef=3.0)
    add_advantages(batch, settings("remax", kl_controller=KLController(0.1), distillation=teaching))
    assert batch.data.tokens["advantages"][2] == pytest.approx(3.0 - 1.5 - 3 * (0.5 + 0.1))


def test_what_is_left_out_of_the_loss_stays_out_and_a_part_has_the_advantages_of_its_batch():
    teaching = settings(
        "rloo", RewardShaping(drop_truncated=True), distillation=DistillationConfig(use="advantages", coef=1.0)
    )
    batch = batch_of(([sample(1.0), sample(0.0, finish_reason="length")], None), ([sample(2.0), sample(0.0)], None))
    batch.data.tokens["teacher_logprobs"] = np.linspace(-2, 0, 20, dtype=np.float32)
    part = with_own_advantages(batch, teaching)
    add_advantages(batch, teaching)
    assert batch.data.tokens["loss_mask"].sum() == 9
    assert part.data.tokens["advantages"].tobytes() == batch.data.tokens["advantages"].tobytes()


def weights_of(run, step):
    return load_file(run.folder / "checkpoints" / f"step-{step}" / "model.safetensors")


def test_a_teacher_that_is_the_policy_changes_no_weight_and_nothing_need_be_judged(task):
    alone = {"teacher": TEACHER, "distillation": {"use": "loss", "reward_coef": 0}}
    tree = tiny_config(task, max_steps=2, num_return_sequences_in_group=1, **alone)
    del tree["rewards"]
    run = run_pipeline(task, IN_THIS_PROCESS, tree)
    for step in run.metrics:
        assert step["distillation/reverse_kl"] == pytest.approx(0, abs=1e-6) and step["actor/distillation_loss"] == 0
        assert step["actor/loss"] == step["actor/grad_norm"] == 0 and step["lag/max"] == 0
        assert {"time/teacher", "idle/teacher", "tokens_per_second/teacher"} <= step.keys()
        assert not [name for name in step if name.startswith("reward")]
    before, after = load_file(task / "model" / "model.safetensors"), weights_of(run, 2)
    assert all(torch.equal(value, after[name]) for name, value in before.items() if name in after)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder of a task: repeat the first digit. A ``teacher`` can, a ``student`` hardly."""
    folder = tmp_path_factory.mktemp("learned")
    make_task(folder)
    file = folder / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row | {"ground_truth": row["prompt"][0]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = torch.tensor(
        [[CHARACTERS.index(each) + 2 for each in row["prompt"] + row["prompt"][0]] + [1] for row in rows]
    )
    for name, steps in (("teacher", 150), ("student", 12)):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(steps):
            logits = model(input_ids=ids).logits[:, 3:-1]
            loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 4:], label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        shutil.copytree(folder / "model", folder / name)
        model.save_pretrained(folder / name)
    return folder


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("use", "ratio", "rate"),
    [
        ("advantages", 1, 5e-3),
        pytest.param("rewards", 0, 5e-3, marks=pytest.mark.tier("soak")),
        pytest.param("loss", 0, 3e-3, marks=pytest.mark.tier("soak")),
    ],
)
def test_a_student_without_rewards_comes_to_do_what_its_teacher_does(learned, use, ratio, rate):
    changes = {
        "pretrain": str(learned / "student"),
        "max_steps": 40,
        "rollout_batch_size": 50,
        "response_length": 2,
        "async_generation_ratio": ratio,
        "teacher": {**TEACHER, "model_args": {"model_name_or_path": str(learned / "teacher")}},
        "distillation": {"use": use, "reward_coef": 0},
        "actor_train__training_args__learning_rate": rate,
        "actor_train__use_sequence_packing": True,
        "rewards__addition__verifier": "exact",
    }
    if use == "rewards":
        changes["adv_estimator"] = "reinforce"
    run = run_pipeline(learned, IN_THIS_PROCESS, tiny_config(learned, **changes))
    distances = [step["distillation/reverse_kl"] for step in run.metrics]
    right = [step["reward/mean"] for step in run.metrics]
    assert np.mean(distances[-5:]) < 0.5 * np.mean(distances[:5])
    assert np.mean(right[-5:]) > np.mean(right[:5]) + 0.2


@pytest.mark.tier("all")
def test_a_run_goes_on_to_the_bit(learned):
    teacher = {**TEACHER, "model_args": {"model_name_or_path": str(learned / "teacher")}}
    config = tiny_config(
        learned, max_steps=4, save_steps=2, max_ckpt_to_keep=0, teacher=teacher, distillation={"use": "rewards"}
    )
    run = run_pipeline(learned, IN_THIS_PROCESS, config)
    before, weights = run.metrics, weights_of(run, 4)
    again = go_on_from(2, run, learned, IN_THIS_PROCESS, config)
    for key in ("distillation/reverse_kl", "actor/loss", "reward/mean"):
        assert [step[key] for step in again.metrics] == [step[key] for step in before]
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(again, 4).items())


def test_episodes_are_taught_too_beside_a_reference_and_one_step_off(task):
    changes = {"teacher": TEACHER, "distillation": {}, "reference": {"device_mapping": [0]}, "use_kl_loss": True}
    changes |= {"rollout_batch_size": 4, "train_env_manager": {"group_size": 2}}
    changes |= {"actor_train__use_sequence_packing": True}
    run = run_pipeline(task, IN_THIS_PROCESS, agentic_config(task, max_steps=3, async_generation_ratio=1, **changes))
    assert run.metrics[0]["distillation/reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert run.metrics[-1]["distillation/reverse_kl"] != 0 and "actor/reference_kl" in run.metrics[-1]


def test_with_adapters_a_teacher_of_the_same_model_is_the_trainer_without_them(task):
    tree = tiny_config(
        task, max_steps=2, teacher={}, distillation={}, actor_train__model_args={"lora_target": "q_proj"}
    )
    rows = dict(plan_rows(check_config(config_from_tree(tree))))
    assert rows["teacher"] == "actor_train without its adapters" and "x reverse KL" in rows["distillation"]
    run = run_pipeline(task, IN_THIS_PROCESS, tree)
    assert run.metrics[0]["distillation/reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert run.metrics[1]["distillation/reverse_kl"] != 0


def found_problems(tree, look=False):
    with pytest.raises(ConfigError) as refusal:
        config = config_from_tree(tree)
        check_config(config)
        look_up(config, with_model=look, without=())
    return [(each.path, each.message) for each in refusal.value.problems]


@pytest.mark.parametrize(
    ("tree", "path", "words"),
    [
        ({"teacher": TEACHER}, "teacher", "nothing is learned from it"),
        ({"distillation": {}}, "distillation", "no `teacher`"),
        ({"teacher": TEACHER, "distillation": {"coef": 0}}, "distillation.coef", "must be > 0"),
        ({"teacher": TEACHER, "distillation": {"reward_coef": -1}}, "distillation.reward_coef", "must be >= 0"),
        ({"teacher": TEACHER, "distillation": {"use": "reward"}}, "distillation.use", "reward"),
        ({**ALONE, "adv_estimator": "rloo"}, "adv_estimator", "from its teacher alone"),
        ({**ALONE, "reward_clip": 1.0}, "reward_clip", "from its teacher alone"),
        ({**ALONE, "whiten_advantages": True}, "whiten_advantages", "from its teacher alone"),
        ({**ALONE, "rewards": {}, "group_filter": "zero_variance"}, "group_filter", "there are no `rewards`"),
        ({**ALONE, "rewards": {}, "difficulty_mask": True}, "difficulty_mask", "there are no `rewards`"),
        ({**ALONE, "rewards": {}, "actor_train__pg_variant": "topr"}, "actor_train.pg_variant", "at the scores"),
        ({"teacher": TEACHER, "distillation": {}, "rewards": {}}, "rewards", "no reward"),
        ({**ALONE, "teacher__training_args__learning_rate": 1}, "teacher.training_args.learning_rate", "nothing reads"),
        ({**ALONE, "actor_train__pg_variant": "gmpo"}, "distillation.use", "assumes one"),
        ({**IN_REWARDS, "num_return_sequences_in_group": 1}, "num_return_sequences_in_group", "compares"),
        ({**IN_REWARDS, "distillation__reward_coef": 0, "norm_std_type": "group"}, "norm_std_type", "teacher alone"),
    ],
)  # fmt: skip
def test_what_cannot_work_or_has_no_effect_is_refused(task, tree, path, words):
    found = found_problems(tiny_config(task, **deepcopy(tree)))
    assert any(where == path and words in message for where, message in found), found


def test_a_teacher_with_other_tokens_is_refused_by_the_first_that_differs(task, tmp_path):
    teacher = tmp_path / "other"
    shutil.copytree(task / "model", teacher)
    tree = tiny_config(task, distillation={}, teacher={**TEACHER, "model_args": {"model_name_or_path": str(teacher)}})
    look_up(config_from_tree(tree), with_model=True, without=())
    file = teacher / "config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"max_position_embeddings": 7}))
    (problem,) = found_problems(tree, look=True)
    assert problem[0] == "teacher" and "has 7 positions, and sequences have up to 8 tokens" in problem[1]
    file.write_text(json.dumps(facts | {"vocab_size": 12}))
    path = "teacher.model_args.model_name_or_path"
    (problem,) = found_problems(tree, look=True)
    assert problem[0] == path and "has 12 tokens, and the policy's tokenizer 14" in problem[1]
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"3": 5', '"9": 5').replace('"9": 11', '"3": 11'))
    (problem,) = found_problems(tree, look=True)
    assert problem[0] == path and "token 5 of the policy, '3', is number 11 there" in problem[1]
    file.unlink()
    (problem,) = found_problems(tree, look=True)
    assert problem[0] == path and "tokenizer" in problem[1]


def test_another_teacher_changes_what_is_learned_and_no_finished_group(task):
    before = config_from_tree(tiny_config(task, **ALONE))
    other = tiny_config(task, **ALONE)
    other["teacher"] = {"device_mapping": [1], "model_args": {"model_name_or_path": "owner/other"}}
    found = {change.path: change.judgement for change in changes(before, config_from_tree(other))}
    assert found == {
        "teacher.device_mapping": "harmless",
        "teacher.model_args.model_name_or_path": "needs confirmation",
    }
