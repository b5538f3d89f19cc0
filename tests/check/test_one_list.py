"""Wrong names, lengths and files are in one list with wrong keys, before anything starts."""

from __future__ import annotations

import json

import pytest
from tiny import make_task, tiny_config

import roll
from roll.configs.loader import dump_yaml
from tests.pipeline.command_lines import run_here

REWARDS = "roll.pipeline.rlvr.rewards"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


def paths(tree):
    return sorted(problem.path for problem in roll.check(tree).problems)


def test_wrong_key_wrong_loss_wrong_estimator_and_missing_file_are_one_list(task, tmp_path):
    tree = tiny_config(task, max_stepz=3, actor_train__pg_variant="toppr", adv_estimator="grop")
    tree["actor_train"]["data_args"]["file_name"] = str(tmp_path / "nowhere.jsonl")
    everywhere = ["actor_train.pg_variant", "adv_estimator", "max_stepz"]
    assert paths(tree) == everywhere, "the file may be on the machine of the run"
    (tmp_path / "run.yaml").write_text(dump_yaml(tree))
    here = [*everywhere, "actor_train.data_args.file_name"]
    for command, expected in ((["--config"], here), (["check"], everywhere)):
        refused = run_here([*command, str(tmp_path / "run.yaml")])
        assert refused.exit_code == 2 and refused.stderr.count("\n    -> ") == len(expected)
        assert all(f"\n{path}: " in refused.stderr for path in expected)
        assert "did you mean `topr`?" in refused.stderr


def test_a_dropped_value_causes_no_further_problem(task):
    """What a wrong key stands for is not known, so nothing is concluded from its default."""
    tree = tiny_config(task, rollout_batch_sise=7)
    del tree["rollout_batch_size"]
    tree["actor_train"]["device_mapping"] = {"no": "mapping"}
    assert paths(tree) == ["actor_train.device_mapping", "rollout_batch_sise"]
    assert paths({**tiny_config(task), "pretrain": 7}) == ["pretrain"]


def test_a_length_beyond_the_model_is_in_one_list_with_a_wrong_key_unless_it_may_be_what_the_key_meant(task):
    tree = tiny_config(task, prompt_length=40, response_length=40, max_stepz=3)
    assert paths(tree) == ["max_stepz", "response_length"]
    tree["respnse_length"] = tree.pop("response_length")
    assert paths(tree) == ["max_stepz", "respnse_length"]


@pytest.mark.parametrize("key", ["sequence_length", "response_length"])
def test_a_sequence_beyond_the_positions_of_the_model_is_found(task, key):
    """The tiny model has 64 positions."""
    tree = tiny_config(task)
    room = 60
    if key == "sequence_length":
        room, tree["response_length"] = 64, 200
    tree[key] = room
    assert roll.check(tree).ok
    tree[key] = room + 1
    (problem,) = roll.check(tree).problems
    assert problem.path == key and "65 tokens" in problem.message and "64 positions" in problem.message
    assert paths({**tree, "actor_train": {**tree["actor_train"], "pg_variant": "toppr"}}) == [
        "actor_train.pg_variant",
        key,
    ]


def test_positions_that_another_engine_can_stretch_are_left_to_it(task, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (task / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    facts = json.loads((folder / "config.json").read_text())
    facts["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(facts))
    tree = tiny_config(task, sequence_length=100, response_length=200, pretrain=str(folder))
    assert paths(tree) == ["sequence_length"]
    tree["actor_infer"]["strategy_args"] = {"strategy_name": "vllm"}
    assert "sequence_length" not in paths(tree)


@pytest.mark.parametrize(
    ("role", "worker", "remedy"),
    [
        ("rewards__addition", f"{REWARDS}.math_rule_reward_worker.MathRuleRewardWorker", "`verifier: math`"),
        ("rewards__addition", f"{REWARDS}.ifeval_rule_reward_worker.GeneralRuleRewardWorker", "`verifier`"),
        ("actor_train", "roll.pipeline.base_worker.ActorWorker", "`pg_variant`"),
        ("actor_infer", "roll.pipeline.base_worker.ActorWorker", "`strategy_args.strategy_name`"),
    ],
)
def test_a_worker_of_roll_gets_what_takes_its_place(task, role, worker, remedy):
    problems = roll.check(tiny_config(task, **{f"{role}__worker_cls": worker})).problems
    (found,) = [each for each in problems if each.path == f"{role.replace('__', '.')}.worker_cls"]
    assert "a worker of ROLL" in found.message and remedy in found.remedy
