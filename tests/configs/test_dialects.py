"""Files of ROLL are read as they are, other systems' configurations convert, and nothing is lost without a word."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from roll.check.config import LACKING, check_elsewhere, read_config
from roll.cli.convert import converted, written
from roll.cli.main import main
from roll.configs.dialects import foreign_hint, prime_rl, roll, rules, slime, trl, verl
from roll.configs.dialects.rules import leaves, nested
from roll.configs.dialects.sources import read_keys
from roll.configs.errors import ConfigError
from roll.configs.fields import kind_at
from roll.configs.given import PREFIX
from roll.configs.loader import config_from_tree, dump_yaml, load_config, parse_yaml
from roll.configs.run import AgenticConfig, RLVRConfig

FOREIGN = Path(__file__).parent / "foreign"
SEEDS = ("roll_rlvr_async", "roll_agentic_async")
SYSTEMS = {"verl": verl, "trl": trl, "slime": slime}
EXAMPLES = [
    pytest.param(system, name, id=f"{system}-{name}")
    for system in SYSTEMS
    for name in json.loads((FOREIGN / f"{system}.json").read_text())
]


def problems_of(attempt):
    with pytest.raises(ConfigError) as refused:
        attempt()
    return {problem.path: problem for problem in refused.value.problems}


def told_of(name, *overrides):
    told = []
    return read_config(FOREIGN / f"{name}.yaml", overrides, told.append), "\n".join(told)


@pytest.mark.parametrize("name", SEEDS)
def test_a_file_of_roll_passes_the_check_unchanged(name, capsys):
    assert main(["check", str(FOREIGN / f"{name}.yaml")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("is in ROLL's dialect") == 1
    asked = "custom_envs" if "agentic" in name else "rewards"
    assert f"[ ] {asked}" in shown and "not in the file" in shown


@pytest.mark.parametrize("name", SEEDS)
def test_each_translation_is_said_once_and_every_key_that_changes_is_said(name):
    config, told = told_of(name)
    lines = [line.strip() for line in told.splitlines()]
    assert len(lines) == len(set(lines))
    ours = dict(leaves(parse_yaml(dump_yaml(asdict(config)), "")))
    for parts, value in leaves(parse_yaml((FOREIGN / f"{name}.yaml").read_text(), "")):
        if ours.get(parts) != value and not str(value).startswith("${"):
            assert any(line.startswith(".".join(parts)) for line in lines), parts


def test_the_numbers_of_rolls_files_keep_rolls_meaning():
    rlvr, _ = told_of("roll_rlvr_async")
    assert (rlvr.rollout_batch_size, rlvr.num_return_sequences_in_group) == (64, 8)
    assert (rlvr.cluster.num_nodes, rlvr.cluster.num_devices_per_node, rlvr.cluster.device) == (3, 8, "cuda")
    assert (rlvr.actor_train.model_args.dtype, rlvr.actor_infer.model_args.dtype) == ("bfloat16", "float16")
    assert rlvr.actor_infer.strategy_args.strategy_config == {"mem_fraction_static": 0.85}
    assert not rlvr.actor_train.use_dynamic_batching_in_train and rlvr.actor_train.infer_batch_size == 2
    agentic, _ = told_of("roll_agentic_async")
    assert agentic.rollout_batch_size * agentic.train_env_manager.group_size == 1024
    assert agentic.val_env_manager.num_env_groups * agentic.val_env_manager.group_size == 1024
    assert (agentic.sequence_length, agentic.response_length, agentic.prompt_length) == (8192, 8191, 8064)
    assert agentic.actor_train.strategy_args.strategy_config["recompute_method"] == "uniform"
    grouped, _ = told_of("roll_agentic_async", "train_env_manager.group_size=16")
    assert grouped.rollout_batch_size == 64


def test_trajectories_that_are_no_whole_number_of_groups_are_refused():
    found = problems_of(lambda: told_of("roll_agentic_async", "train_env_manager.group_size=3"))
    assert list(found) == ["rollout_batch_size"] and "groups of 3" in found["rollout_batch_size"].message


def test_an_unknown_key_in_rolls_dialect_still_fails_with_the_nearest_name(tmp_path):
    text = (FOREIGN / "roll_rlvr_async.yaml").read_text() + "\nmax_stepz: 3\n"
    (tmp_path / "run.yaml").write_text(text)
    found = problems_of(lambda: load_config(tmp_path / "run.yaml"))
    assert list(found) == ["max_stepz"] and "`max_steps`" in found["max_stepz"].remedy


def test_what_roll_has_and_this_has_not_stops_the_run_with_advice(tmp_path):
    text = (FOREIGN / "roll_rlvr_async.yaml").read_text() + "\ndifficulty_loss_weight: true\nadd_len_reward: false\n"
    (tmp_path / "run.yaml").write_text(text)
    told = []
    found = problems_of(lambda: load_config(tmp_path / "run.yaml", (), told.append))
    assert list(found) == ["difficulty_loss_weight"]
    assert "add_len_reward: false has no effect here: it is off" in told[0]


@pytest.mark.parametrize(
    "tree",
    [
        {"pretrain": "m", "actor_train": {"model_args": {"dtype": "bf16"}}},
        {"cluster": {"device": "cuda"}, "actor_train": {"model_args": {"dtype": "bf16", "attn_implementation": "fa2"}}},
        {"pipeline": "rlvr", "pg_clip": 0.2, "gamma": 1},
        {"pg_clip": 0.2},
    ],
)
def test_a_slip_in_a_file_of_ours_does_not_change_its_dialect(tree):
    assert not roll.is_roll(tree)
    assert problems_of(lambda: config_from_tree(tree))


def test_an_override_may_be_written_either_way():
    theirs, _ = told_of("roll_rlvr_async", "actor_train.model_args.dtype=fp32")
    ours, _ = told_of("roll_rlvr_async", "actor_train.model_args.dtype=float32")
    assert theirs == ours and theirs.actor_train.model_args.dtype == "float32"


def test_options_of_an_engine_that_an_override_replaced_are_left_out_and_named():
    config, told = told_of("roll_rlvr_async", "actor_infer.strategy_args.strategy_name=hf_infer")
    assert config.actor_infer.strategy_args.strategy_config == {}
    assert "mem_fraction_static: 0.85 has no effect here: it is an option of the file's `sglang`" in told


def test_the_rest_of_rolls_spellings():
    tree = {
        "num_gpus_per_node": 4,
        "pg_clip": 0.1,
        "dual_clip_loss": True,
        "whiten_rewards": True,
        "gamma": 0.9,
        "adv_estimator": "reinforce",
        "model_update_frequency": 2,
        "system_envs": {"A": "1"},
        "generate_opt_level": 1,
        "rollout_batch_size": 64,
        "sequence_length": 100,
        "prompt_length": 40,
        "pretrain": "Qwen/Qwen3-8B",
        "actor_train": {
            "model_args": {"dtype": "bf16", "disable_gradient_checkpointing": False},
            "data_args": {"dataset_dir": "data", "file_name": ["a.jsonl"], "template": "qwen3"},
            "strategy_args": {"strategy_name": "fsdp2_train"},
            "device_mapping": "list(range(0,4))",
        },
        "actor_infer": {
            "strategy_args": {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}},
            "device_mapping": "list(range(0,4))",
        },
        "rewards": {
            "math_rule": {
                "worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
                "tag_included": ["deepmath"],
                "world_size": 8,
                "data_args": {"template": "qwen3"},
            }
        },
    }
    assert roll.is_roll(tree)
    config = config_from_tree(tree)
    check_elsewhere(config)
    assert config.actor_train.pg_variant_args == {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.2}
    assert (config.norm_mean_type, config.adv_estimator_args) == ("batch", {"gamma": 0.9})
    assert config.actor_train.strategy_args.strategy_config == {"gradient_checkpointing": True}
    assert config.actor_train.data_args.file_name == ["data/a.jsonl"]
    assert (config.actor_infer.num_gpus_per_engine, config.weight_update.interval_steps) == (2, 2)
    assert (config.rewards["math_rule"].verifier, config.rewards["math_rule"].num_workers) == ("math", 8)
    assert (config.response_length, config.cluster.num_devices_per_node) == (60, 4)


@pytest.mark.parametrize(("system", "name"), EXAMPLES)
def test_a_public_configuration_converts_and_each_of_its_keys_is_accounted_for(system, name, monkeypatch):
    given = json.loads((FOREIGN / f"{system}.json").read_text())[name]
    keys = {tuple(key.split(".")): value for key, value in given.items()}
    for variable in ("HOME", "BASE_DIR"):
        monkeypatch.setenv(variable, "/data")
    done = SYSTEMS[system].translate({key: value for key, value in keys.items() if value is not None})
    assert not [line for line in done.lost if "knows no key" in line]
    text = written(converted(dump_yaml(nested(keys)), "example.yaml", system), name)
    missing = {line.partition(":")[0] for line in done.missing}
    try:
        check_elsewhere(config_from_tree(parse_yaml(text, name)))
    except ConfigError as error:
        unnamed = [each for each in error.problems if each.path not in missing]
        assert not unnamed, "\n".join(map(str, unnamed))
    for line in (*done.missing, *done.lost):
        assert line.split(":")[0] in text


@pytest.mark.parametrize(
    ("own", "reference"), [({}, 2), ({"actor_rollout_ref.ref.ulysses_sequence_parallel_size": 1}, None)]
)
def test_ulysses_of_verl_becomes_context_parallel(own, reference):
    given = {
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "trainer.n_gpus_per_node": 8,
        **own,
    }
    done = verl.translate({tuple(path.split(".")): value for path, value in given.items()})
    ours = done.tree()
    assert ours["actor_train"]["strategy_args"]["strategy_config"]["context_parallel_size"] == 2
    assert ours["reference"]["strategy_args"].get("strategy_config", {}).get("context_parallel_size") == reference
    assert not any("ulysses" in line for line in (*done.lost, *done.without_effect))
    samples = 64 * ours["num_return_sequences_in_group"] if "num_return_sequences_in_group" in ours else 64
    arguments = ours["actor_train"]["training_args"]
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * 4 == samples


def test_context_ranks_of_megatron_take_one_share_of_the_batch():
    given = {
        "actor_rollout_ref.actor.strategy": "megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.megatron.context_parallel_size": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "trainer.n_gpus_per_node": 8,
    }
    done = verl.translate({tuple(path.split(".")): value for path, value in given.items()})
    arguments = done.tree()["actor_train"]["training_args"]
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * 2 == 64


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_removed_padding_of_verl_becomes_packed_rows(strategy):
    given = {"actor_rollout_ref.actor.strategy": strategy, "actor_rollout_ref.model.use_remove_padding": True}
    done = verl.translate({tuple(path.split(".")): value for path, value in given.items()})
    assert done.tree()["actor_train"]["use_sequence_packing"] is True


def test_experts_of_the_engine_are_replayed_as_in_verl_and_slime():
    mode, beside = (
        "actor_rollout_ref.actor.router_replay.mode",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
    )
    older = "actor_rollout_ref.actor.megatron.router_replay_mode"
    for given, replays in (({mode: "R3", beside: True}, True), ({older: "R3"}, True), ({mode: "disabled"}, False)):
        done = verl.translate({tuple(path.split(".")): value for path, value in given.items()})
        assert done.tree()["actor_train"]["router_replay"] is replays and not done.lost
    done = verl.translate({tuple(mode.split(".")): "R2"})
    assert "router_replay" not in done.tree()["actor_train"] and [mode in line for line in done.lost] == [True]
    done = slime.translate({("use-rollout-routing-replay",): True})
    assert done.tree()["actor_train"]["router_replay"] is True and not done.lost
    done = slime.translate({("use-routing-replay",): True})
    assert "router_replay" not in done.tree()["actor_train"] and len(done.lost) == 1


def test_the_teacher_of_verl_becomes_a_role():
    given = {
        "distillation.enabled": True,
        "distillation.nnodes": 1,
        "distillation.teacher_models.teacher_model.model_path": "models/teacher",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size": 2,
        "distillation.distillation_loss.loss_mode": "k1",
        "distillation.distillation_loss.use_policy_gradient": True,
        "distillation.distillation_loss.use_task_rewards": False,
        "trainer.n_gpus_per_node": 8,
    }

    def converted(**changes):
        return verl.translate({tuple(path.split(".")): value for path, value in (given | changes).items()})

    done = converted()
    ours = done.tree()
    assert ours["distillation"] == {"coef": 1.0, "reward_coef": 0}
    assert ours["teacher"]["model_args"]["model_name_or_path"] == "models/teacher"
    assert ours["teacher"]["device_mapping"] == ours["actor_train"]["device_mapping"]
    assert not any("distillation" in line for line in done.lost)
    assert {line.partition(":")[0] for line in done.without_effect if line.startswith("distillation")} == {
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size",
        "distillation.nnodes",
    }
    as_loss = converted(
        **{
            "distillation.distillation_loss.use_policy_gradient": False,
            "distillation.distillation_loss.loss_mode": "forward_kl_topk",
            "distillation.distillation_loss.loss_max_clamp": 10.0,
            "distillation.teacher_models.other.model_path": "models/other",
        }
    )
    assert as_loss.tree()["distillation"]["use"] == "loss"
    assert {line.partition(":")[0] for line in as_loss.lost if line.startswith("distillation")} == {
        "distillation.teacher_models.other.model_path",
        "distillation.distillation_loss.loss_mode",
        "distillation.distillation_loss.loss_max_clamp",
    }
    off = converted(**{"distillation.enabled": False})
    assert "teacher" not in off.tree() and "distillation" not in off.tree()
    named = {line.partition(":")[0] for line in off.without_effect}
    assert {path for path in given if path.startswith("distillation")} - {"distillation.enabled"} <= named


def test_the_teacher_of_slime_becomes_a_role_that_may_be_the_only_judge():
    given = {("use-opd",): True, ("opd-type",): "megatron", ("opd-teacher-load",): "/t", ("opd-kl-coef",): 0.5}
    done = slime.translate(given | {("rm-type",): "math", ("tensor-model-parallel-size",): 2})
    ours = done.tree()
    assert ours["distillation"] == {"coef": 0.5} and ours["teacher"]["device_mapping"] == "0-7"
    assert ours["teacher"]["strategy_args"]["strategy_config"] == {"tensor_model_parallel_size": 2}
    assert any(line.startswith("teacher.model_args.model_name_or_path: ") and "(/t)" in line for line in done.missing)
    judge = {("custom-rm-path",): "slime.rollout.on_policy_distillation.reward_func", ("opd-type",): "sglang"}
    done = slime.translate({("use-opd",): True} | judge)
    assert done.tree()["distillation"] == {"reward_coef": 0, "coef": 1.0} and "rewards" not in done.tree()
    assert not done.lost
    done = slime.translate({("opd-kl-coef",): 0.5})
    assert "distillation" not in done.tree() and [line.partition(":")[0] for line in done.without_effect] == [
        "opd-kl-coef"
    ]


@pytest.mark.parametrize(
    ("system", "keys"),
    [
        (trl, {"chat_template_kwargs.enable_thinking": False}),
        (
            verl,
            {"data.apply_chat_template_kwargs.enable_thinking": False, "data.val_files": "v", "trainer.test_freq": 5},
        ),
        (
            slime,
            {
                "apply-chat-template": True,
                "apply-chat-template-kwargs": '{"enable_thinking": false}',
                "eval-interval": 5,
                "eval-prompt-data": ["aime", "a.jsonl"],
            },
        ),
    ],
)
def test_variables_of_the_chat_template_are_those_of_training_and_validation(system, keys):
    done = system.translate({tuple(key.split(".")): value for key, value in keys.items()})
    ours = done.tree()
    data = [ours["actor_train"]["data_args"], *([ours["validation"]["data_args"]] if "validation" in ours else [])]
    assert [each["chat_template_kwargs"] for each in data] == [{"enable_thinking": False}] * (1 if system is trl else 2)
    assert not any("template" in line for line in done.lost)


@pytest.mark.parametrize(
    ("system", "keys", "silent"),
    [
        (slime, {"value-clip": 0.2, "tis-clip": 3.0, "eps-clip": 0.3}, ["value-clip", "tis-clip"]),
        (slime, {"advantage-estimator": "grpo", "lambd": 0.9, "gamma": 0.9}, ["lambd", "gamma"]),
        (slime, {"advantage-estimator": "ppo", "lambd": 0.9, "gamma": 1.0}, []),
        (
            verl,
            {
                "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
                "actor_rollout_ref.actor.clip_ratio_c": 3.0,
                "actor_rollout_ref.actor.kl_loss_coef": 0.1,
            },
            ["actor_rollout_ref.actor.clip_ratio_c", "actor_rollout_ref.actor.kl_loss_coef"],
        ),
        (trl, {"sapo_temperature_pos": 2.0, "epsilon": 0.2}, ["sapo_temperature_pos"]),
    ],
)
def test_a_key_beside_which_others_decide_is_named(system, keys, silent):
    done = system.translate({tuple(key.split(".")): value for key, value in keys.items()})
    assert [line.partition(":")[0] for line in done.without_effect] == silent


def test_what_changes_what_is_learned_is_lost_and_never_called_without_effect():
    done = trl.translate({("reward_weights",): [1.0, 0.5], ("fp16",): True})
    assert [line.partition(":")[0] for line in done.lost] == ["reward_weights"]
    assert nested(done.values)["actor_train"]["model_args"]["dtype"] == "float16"


WRONG = (None, "x", "no", [], 3, True)
LEAVES = [
    pytest.param(roll, dict(leaves(parse_yaml((FOREIGN / f"{name}.yaml").read_text(), ""))), id=name) for name in SEEDS
] + [
    pytest.param(system, {tuple(key.split(".")): value for key, value in keys.items()}, id=name)
    for name, system in SYSTEMS.items()
    for keys in [next(iter(json.loads((FOREIGN / f"{name}.json").read_text()).values()))]
]
ROLLS_CHOICES = {
    "pg_clip": 0.1, "pg_clip_low": 0.1, "pg_clip_high": 0.1, "use_pg_clip_range": True, "dual_clip_loss": True,
    "use_kl_loss": True, "kl_penalty": "mse", "gamma": 0.9, "lambd": 0.9, "whiten_rewards": True,
    "importance_sampling": "seq", "reward_normalization.grouping": "batch", "reward_normalization.method": "mean",
    "enable_old_logprobs_recompute": True, "actor_train.data_args.dataset_dir": "data",
}  # fmt: skip


@pytest.mark.parametrize(("system", "keys"), LEAVES)
def test_a_value_of_any_form_is_a_problem_and_never_a_traceback(system, keys, monkeypatch):
    monkeypatch.setattr(rules, "accounted", lambda translate, given: translate(given))  # which takes most of the time
    if system is roll:
        keys = keys | {tuple(key.split(".")): value for key, value in ROLLS_CHOICES.items()}
    for parts in keys:
        for value in WRONG:
            tree = keys | {parts: value}
            if system is roll:
                done = roll._translate(tree, tree)
                assert roll.is_roll(nested(tree))
            else:
                done = system.translate({key: each for key, each in tree.items() if each is not None})
            assert done.tree()


def rolls(**keys):
    """What becomes of a file of ROLL with these keys."""
    tree = {"num_gpus_per_node": 8, "rollout_mock": False, "rollout_batch_size": 8, "rewards": {"math": {}}, **keys}
    assert roll.is_roll(tree)
    return roll.translate(tree)


def test_the_kl_loss_of_roll_is_k3_and_its_penalty_what_kl_penalty_says():
    alone = rolls(use_kl_loss=True, kl_penalty="mse")
    assert alone.ours("kl_estimator") == "k3" and 'kl_penalty: "mse" has no effect' in "\n".join(alone.lines)
    assert rolls(add_token_level_kl=True).ours("kl_estimator") == "k1"
    assert rolls(add_token_level_kl=True, kl_penalty="mse").ours("kl_estimator") == "k2"
    for refused in (
        rolls(add_token_level_kl=True, kl_penalty="full"),
        rolls(add_token_level_kl=True, use_kl_loss=True, kl_penalty="mse"),
    ):
        assert [problem.path for problem in refused.problems] == ["kl_penalty"]


def test_text_is_no_switch_of_roll():
    done = rolls(dual_clip_loss="no", whiten_rewards="yes", pg_clip="x")
    assert {problem.path for problem in done.problems} == {"dual_clip_loss", "whiten_rewards", "pg_clip"}
    assert done.ours("norm_mean_type") is None and done.ours("actor_train.pg_variant_args.dual_clip") is None


@pytest.mark.parametrize("turn", [1, -1])
def test_the_order_of_lines_does_not_matter(turn):
    both = {"force_disable_old_logprobs_recompute": False, "enable_old_logprobs_recompute": True}
    assert rolls(**dict(list(both.items())[::turn])).ours("old_logprobs") == "recompute"
    both["force_disable_old_logprobs_recompute"] = True
    assert rolls(**dict(list(both.items())[::turn])).ours("old_logprobs") == "behaviour"


def test_arguments_of_a_name_that_an_object_replaced_have_no_effect():
    done = rolls(
        adv_estimator=f"{PREFIX}mine", gamma=0.9, pg_clip=0.1, dual_clip_loss=True,
        actor_train={"pg_variant": f"{PREFIX}loss"},
    )  # fmt: skip
    assert not [parts for parts in done.values if parts[-2:-1] in (("pg_variant_args",), ("adv_estimator_args",))]
    assert {"gamma", "pg_clip", "dual_clip_loss"} <= {line.partition(":")[0] for line in done.without_effect}


def test_a_range_of_clips_has_defaults_of_its_own():
    assert rolls(use_pg_clip_range=True, pg_clip=0.1).ours("actor_train.pg_variant_args.clip_low") is None
    assert rolls(use_pg_clip_range=True, pg_clip_high=0.3).ours("actor_train.pg_variant_args.clip_low") == 0.2


def test_ten_public_configurations_of_each_system():
    for system in SYSTEMS:
        assert len(json.loads((FOREIGN / f"{system}.json").read_text())) >= 10


def test_a_mini_batch_of_verl_keeps_its_number_of_samples():
    given = json.loads((FOREIGN / "verl.json").read_text())["examples/grpo_trainer/run_qwen3-8b.sh"]
    done = verl.translate({tuple(key.split(".")): value for key, value in given.items()})
    training = nested(done.values)["actor_train"]["training_args"]
    assert training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * 8 == 256 * 5


DOTS = """
python3 -m verl.trainer.main_ppo \\
    +actor_rollout_ref.async_pipeline=True \\
    +trainer.use_nodes_ratios=[0.5,0.5,0.5,0.5] \\
    actor_rollout_ref.hybrid_engine=False \\
    actor_rollout_ref.rollout.mode=async \\
    +actor_rollout_ref.rollout.enable_dual_buffer=True \\
    +actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb=512 \\
    +actor_rollout_ref.rollout.param_update_consume_bucket_size_mb=128 \\
    +trainer.generate_ahead_steps=2 +reward_model.with_reward=True \\
    actor_rollout_ref.model.path=$MODEL algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\
    data.train_batch_size=64 data.train_files=train.parquet trainer.n_gpus_per_node=${GPUS:-8}  # eight
"""


def test_keys_of_asynchrony():
    done = converted(DOTS, "run.sh", "verl")
    tree = nested(done.values)
    assert tree["async_generation_ratio"] == 1
    assert tree["cluster"]["shares"] == {"train": 0.5, "infer": 0.5}
    assert tree["weight_update"] == {
        "dual_buffer": True,
        "param_update_gather_bucket_size_mb": 512,
        "param_update_load_bucket_size_mb": 128,
    }
    assert "2 steps ahead there are one step off" in written(done, "run.sh")
    assert any("with_reward" in line for line in done.without_effect) and not done.lost
    assert "variable MODEL: set it before `roll` runs, or write its value" in done.missing


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("async_strategy", "verl's `async_strategy`: write `async_generation_ratio: 1`"),
        ("hybrid_engine", "verl's `hybrid_engine`: write the same `device_mapping`"),
        ("n_samples_per_prompt", "slime's `n-samples-per-prompt`: write `num_return_sequences_in_group`"),
        ("max_off_policy_steps", "prime-rl's `max_off_policy_steps`: write `max_staleness`"),
        ("num_generations", "TRL's `num_generations`: write `num_return_sequences_in_group`"),
        ("actor_rollout_ref", "`roll convert FILE --from verl`"),
    ],
)
def test_an_unknown_key_that_is_another_systems_gets_that_hint(key, words):
    found = problems_of(lambda: config_from_tree({key: 1}))
    assert words in found[key].remedy
    assert foreign_hint(("no_such_key_anywhere",)) is None


@pytest.mark.parametrize(
    ("tree", "path", "words"),
    [
        ({"actor_infer": {"tensor_model_parallel_size": 2}}, "actor_infer.tensor_model_parallel_size", "num_gpus_per"),
        ({"actor_train": {"tensor_model_parallel_size": 2}}, "actor_train.tensor_model_parallel_size", "strategy_conf"),
        ({"actor_train": {"optim": {"lr": 1}}}, "actor_train.optim", "verl's `optim.lr`: write `actor_train.training_"),
        ({"actor_train": {"optim": "adam"}}, "actor_train.optim", "TRL's `optim`: remove it"),
        ({"trainer": {"total_epochs": 3}}, "trainer", "section of verl: `roll convert FILE --from verl`"),
        ({"trainer": {"optim": {"lr": 1}}}, "trainer", "section of prime-rl: `roll convert FILE --from prime-rl`"),
        ({"trainer": {"x": 1}}, "trainer", "section of verl or prime-rl"),
        ({"actor_train": {"model_args": {"dtype": "fp16"}}}, "actor_train.model_args.dtype", "write `float16`"),
        (
            {"actor_train": {"model_args": {"attn_implementation": "fa2"}}},
            "actor_train.model_args.attn_implementation",
            "write `flash_attention_2`",
        ),
        ({"actor_train": {"data_args": {"template": "qwen3"}}}, "actor_train.data_args.template", "write `chat`"),
    ],
)
def test_the_path_of_a_key_decides_its_hint(tree, path, words):
    assert words in problems_of(lambda: config_from_tree({"pipeline": "rlvr", **tree}))[path].remedy


def test_a_script_is_read_and_never_run(tmp_path):
    mark = tmp_path / "mark"
    text = f"""
touch {mark}; X=$(touch {mark})
A=4  # a comment
ARGS=(
   --rollout-batch-size $((A * 8))
   # --num-rollout 7
   --n-samples-per-prompt ${{N:-2}}
   --prompt-data "a b.jsonl" --colocate
   --wandb-group $(touch {mark})
)
ray job submit --address=http://x -- python3 train.py --actor-num-nodes 2 ${{ARGS[@]}} --lr 1e-6 --kl-coef 0.00
"""
    keys = {".".join(key): value for key, value in read_keys(text, "run.sh").items()}
    assert not mark.exists()
    assert keys["rollout-batch-size"] == 32 and keys["n-samples-per-prompt"] == 2
    assert keys["prompt-data"] == "a b.jsonl" and keys["colocate"] is True and keys["lr"] == 1e-6
    assert keys["actor-num-nodes"] == 2 and keys["entry"] == "train.py" and "num-rollout" not in keys
    assert "address" not in keys
    bad = f"import os\nargs = GRPOConfig(learning_rate=os.mkdir({str(mark)!r}) or 1.0, beta=0.0)\n"
    assert read_keys(bad, "run.py")[("beta",)] == 0.0 and not mark.exists()
    done = converted(bad, "run.py", "trl")
    assert any("learning_rate" in line and "computes it" in line for line in done.lost)


def test_prime_rl_converts_with_its_environments_named_as_missing():
    text = (
        "max_steps = 20\nseq_len = 2048\n[model]\nname = 'Qwen/Qwen3-0.6B'\n[deployment]\nnum_train_gpus = 2\n"
        "num_infer_gpus = 6\n[orchestrator]\nbatch_size = 512\ngroup_size = 16\n[orchestrator.train.sampling]\n"
        "max_completion_tokens = 128\n[[orchestrator.train.source]]\nname = 'wordle'\n[trainer.optim]\nlr = 3e-6\n"
    )
    done = converted(text, "rl.toml", "prime-rl")
    assert [line.partition(":")[0] for line in done.missing] == ["custom_envs"] and not done.lost
    config = config_from_tree(parse_yaml(written(done, "rl.toml"), "ours"))
    assert (config.rollout_batch_size, config.train_env_manager.group_size) == (32, 16)
    assert config.actor_infer.device_mapping == "2-7"
    assert set(problems_of(lambda: check_elsewhere(config))) == {"custom_envs"}


@pytest.mark.parametrize("name", SEEDS)
def test_a_converted_file_of_roll_means_what_the_file_means(name, tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    assert main(["convert", str(FOREIGN / f"{name}.yaml"), "--from", "roll", "-o", str(out)]) == 0
    assert not roll.is_roll(parse_yaml(out.read_text(), ""))
    assert load_config(out) == told_of(name)[0]
    assert main(["convert", str(FOREIGN / f"{name}.yaml"), "--from", "roll", "-o", str(out)]) == 1
    assert "File exists" in capsys.readouterr().err


def test_a_file_of_another_system_is_refused(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("a: 1\nb: 2\n")
    assert main(["convert", str(path), "--from", "slime"]) == 2
    assert "has no key of slime" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), "--from", "slime"]) == 2


def test_a_value_cannot_leave_its_comment_or_its_line():
    text = (
        "max_steps: 3\nexp_name: 'x\n\n  pretrain: y'\nmask_type: \"a\\nmax_steps: 9\"\nreward_funcs: 1\nrun_name: a\n"
    )
    done = converted(text, "e\nmax_steps: 5.yaml", "trl")
    again = parse_yaml(written(done, "e max_steps: 5.yaml"), "")
    assert again["max_steps"] == 3 and "pretrain" not in again


TARGETS = [
    pytest.param(rule.to, id=f"{system.ORIGIN}-{pattern}")
    for system in (roll, verl, trl, slime, prime_rl)
    for pattern, rule in system.RULES.items()
    if rule.to not in (None, "=")
]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_of_the_tables_is_a_key_of_ours(target):
    parts = tuple("x" if part == "*" else part for part in target.split("."))
    if parts[0] == "x":
        parts = ("actor_train", *parts[1:])
    if "strategy_config" in parts:
        parts = parts[: parts.index("strategy_config") + 1]
    assert any(kind_at(root, parts) is not None for root in (RLVRConfig, AgenticConfig)), target


def test_nothing_is_evaluated():
    for source in Path(roll.__file__).parent.glob("*.py"):
        text = source.read_text()
        assert " eval(" not in text and "exec(" not in text and "subprocess" not in text, source


def test_lacking_keys_are_asked_for_by_train_too(capsys):
    overrides = ["pretrain=Qwen/Qwen3-8B", "cluster.device=cpu"]
    assert main(["train", str(FOREIGN / "roll_rlvr_async.yaml"), *overrides]) == 2
    shown = capsys.readouterr()
    assert "is in ROLL's dialect" in shown.out and "rewards: there is no reward" in shown.err
    assert "rewards" in LACKING


def test_float16_trains_where_the_trainer_scales_the_loss():
    (problem,) = problems_of(
        lambda: check_elsewhere(told_of("roll_rlvr_async", "actor_train.model_args.dtype=fp16", REWARD)[0])
    ).values()
    assert problem.path == "actor_train.model_args.dtype" and "no loss scale" in problem.message
    config, _ = told_of(
        "roll_rlvr_async",
        *("actor_train.model_args.dtype=fp16", "actor_train.strategy_args.strategy_name=fsdp2_train", REWARD),
        *("actor_train.training_args.gradient_accumulation_steps=32", "actor_infer.strategy_args.strategy_name=vllm"),
    )
    check_elsewhere(config)
    assert config.actor_train.model_args.dtype == config.actor_infer.model_args.dtype == "float16"


REWARD = "rewards.math.verifier=math"


def verl_of(**keys):
    """Translation of keys of verl, with `_` for `.` between sections of short names."""
    sections = {"actor": "actor_rollout_ref.actor", "rollout": "actor_rollout_ref.rollout", "correct": CORRECTION}
    paths = {}
    for name, value in keys.items():
        section, _, key = name.partition("__")
        paths[(*sections.get(section, section).split("."), *key.split("__"))] = value
    return verl.translate(paths)


CORRECTION = "algorithm.rollout_correction"


def lost_of(done):
    return [line.partition(":")[0] for line in done.lost]


@pytest.mark.parametrize(
    ("mode", "given", "ours"),
    [
        (
            "clip_cov",
            {"clip_cov_ratio": 0.001, "clip_cov_lb": 2.0, "clip_cov_ub": 9.0},
            {"clip_low": 0.2, "clip_high": 0.2, "share": 0.001, "cov_low": 2.0, "cov_high": 9.0},
        ),
        ("kl_cov", {"kl_cov_ratio": 0.002, "ppo_kl_coef": 0.5}, {"share": 0.002, "beta": 0.5}),
        ("dppo_tv", {}, {"threshold": 0.2, "threshold_high": 0.2, "divergence": "tv"}),
    ],
)
def test_losses_of_verl_keep_their_arguments(mode, given, ours):
    keys = {f"actor__policy_loss__{name}": value for name, value in given.items()}
    done = verl_of(actor__policy_loss__loss_mode=mode, **keys)
    assert nested(done.values)["actor_train"]["pg_variant"] == mode.removesuffix("_tv")
    assert nested(done.values)["actor_train"]["pg_variant_args"] == ours and not done.lost
    other = verl_of(actor__policy_loss__loss_mode="gpg", actor__policy_loss__new_key=1)
    assert other.ours("actor_train.pg_variant") == "ppo"
    assert lost_of(other) == [f"actor_rollout_ref.actor.policy_loss.{key}" for key in ("loss_mode", "new_key")]


def test_estimators_of_verl_are_ours_or_lost():
    found = {name: verl_of(algorithm__adv_estimator=name).ours("adv_estimator") for name in ("gae", "grpo_vectorized")}
    assert found == {"gae": "gae", "grpo_vectorized": "grpo"}
    assert verl_of(algorithm__adv_estimator="rloo_vectorized").ours("adv_estimator") == "rloo"
    best = verl_of(algorithm__adv_estimator="grpo_passk", rollout__n=8)
    assert nested(best.values)["adv_estimator_args"] == {"k": 7, "baseline": "leave_one_out"}
    assert "deviation" in best.notes["adv_estimator_args", "k"]
    unknown = verl_of(algorithm__adv_estimator="gpg")
    assert unknown.ours("adv_estimator") == "grpo" and lost_of(unknown) == ["algorithm.adv_estimator"]


VERL_STEP = {
    "data__train_batch_size": 64, "actor__ppo_mini_batch_size": 64, "rollout__n": 8, "data__train_files": "t.jsonl",
    "algorithm__adv_estimator": "grpo", "trainer__total_training_steps": 10, "data__max_prompt_length": 8,
    "data__max_response_length": 4, "actor_rollout_ref__model__path": "Qwen/Qwen3-0.6B",
}  # fmt: skip
SLIME_STEP = {
    "use-tis": True, "rollout-batch-size": 32, "n-samples-per-prompt": 8, "global-batch-size": 256, "num-rollout": 9,
    "hf-checkpoint": "Qwen/Qwen3-0.6B", "prompt-data": "t.jsonl", "rm-type": "math", "rollout-max-response-len": 64,
}  # fmt: skip
ONE_STEP = [
    pytest.param(lambda **more: verl_of(**VERL_STEP, **more), {"correct__rollout_is": "token"}, id="verl"),
    pytest.param(
        lambda **more: verl_of(**VERL_STEP, **more), {"algorithm__rollout_is": True, "actor__ppo_epochs": 1}, id="old"
    ),
    pytest.param(
        lambda **more: slime.translate({(key,): value for key, value in (SLIME_STEP | more).items()}), {}, id="slime"
    ),
]


@pytest.mark.parametrize(("translate", "more"), ONE_STEP)
def test_truncated_importance_sampling_with_one_step_a_batch_passes_the_check(translate, more):
    done = translate(**more)
    assert done.ours("actor_train.pg_variant") == "vanilla" and "ratio" in done.notes["actor_train", "pg_variant"]
    assert done.ours("train_infer_correction.weight") == {"level": "token", "mode": "truncate", "upper": 2.0}
    tree = done.tree() | {"rewards": {"math": {"verifier": "math", "tag_included": ["default"]}}}
    check_elsewhere(config_from_tree(tree))


def test_with_several_steps_a_batch_the_loss_keeps_its_ratio():
    done = verl_of(**(VERL_STEP | {"actor__ppo_mini_batch_size": 16}), correct__rollout_is="token")
    assert done.ours("actor_train.pg_variant") == "ppo" and done.ours("old_logprobs") == "recompute"
    done = slime.translate({(key,): value for key, value in (SLIME_STEP | {"global-batch-size": 64}).items()})
    assert done.ours("actor_train.pg_variant") == "ppo" and done.ours("old_logprobs") == "recompute"


def test_corrections_of_verl_of_both_ages():
    old = verl_of(
        algorithm__rollout_is=True, algorithm__rollout_is_threshold=4.0, algorithm__rollout_is_mode="mask",
        algorithm__rollout_is_level="sequence", algorithm__rollout_is_veto_threshold=1e-4,
    )  # fmt: skip
    ours = nested(old.values)["train_infer_correction"]
    assert ours["weight"] == {"level": "sequence", "mode": "mask", "upper": 4.0, "lower": 0.25} and not old.lost
    assert ours["reject"] == [{"level": "veto", "lower": 1e-4}]
    assert verl_of(algorithm__rollout_is=False, algorithm__rollout_is_threshold=2.0).ours("old_logprobs") is None
    new = verl_of(correct__rollout_is_threshold="0.5_5.0", correct__rollout_is="token", correct__rollout_rs="token_k1")
    assert new.ours("train_infer_correction.weight")["lower"] == 0.5
    assert lost_of(new) == ["algorithm.rollout_correction.rollout_rs"]
    bypass = verl_of(correct__bypass_mode=True, correct__rollout_is="token")
    assert bypass.ours("train_infer_correction.weight") is None and bypass.ours("actor_train.pg_variant") == "ppo"


def test_what_is_not_understood_is_lost_and_never_without_effect():
    done = verl_of(actor__use_kl_loss=True, actor__kl_loss_type="low_var_kl+")
    assert done.ours("kl_estimator") == "k3_straight_through" and not done.lost
    done = verl_of(actor__use_kl_loss=True, actor__kl_loss_type="full", data__train_batch_size="many")
    assert lost_of(done) == ["actor_rollout_ref.actor.kl_loss_type", "data.train_batch_size"]
    assert lost_of(verl_of(data__train_batch_size="many", actor__ppo_mini_batch_size=7.5)) == [
        "data.train_batch_size",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    ]
    assert lost_of(verl.translate({("foo",): 3, ("hf-checkpoint",): "x"})) == ["foo", "hf-checkpoint"]
    assert lost_of(verl_of(rollout__val_kwargs__tree=1, reward_model__thought=1, critic__x=1)) == [
        "reward_model.thought",
        "critic.x",
        "actor_rollout_ref.rollout.val_kwargs.tree",
    ]
    done = verl_of(reward_model__overlong_buffer__enable=True, reward_model__overlong_buffer__len=16)
    assert done.ours("length_penalty.kind") == "overlong" and done.ours("length_penalty.buffer") == 16
    assert lost_of(trl.translate({("vllm_mode",): "x", ("report_to",): "mlflow"})) == ["vllm_mode", "report_to"]


def test_opsm_of_slime_and_the_devices_of_prime_rl():
    done = slime.translate({("use-opsm",): True, ("opsm-delta",): 0.1})
    assert done.ours("train_infer_correction.reject") == [
        {"level": "geometric", "divergence": "k1", "threshold": 0.1, "only_negative": True}
    ]
    given = {("inference_gpu_ids",): [0, 1, 2, 3], ("trainer_gpu_ids",): [4, 5], ("inference", "parallel", "tp"): 2}
    done = prime_rl.translate(given)
    assert done.ours("actor_infer.device_mapping") == [0, 1, 2, 3] and done.ours("cluster.num_devices_per_node") == 6
    assert prime_rl.translate({("inference", "parallel", "tp"): 2}).ours("actor_infer.device_mapping") == "1-2"
    for system in (verl, slime, trl):
        text = "\n".join(system.translate({("seed",): 1}).missing)
        assert "counts epochs" in text and "None" not in text and "no epochs" not in text


SLIME_SCRIPT = "python3 train.py --hf-checkpoint x --rollout-batch-size 8 --bf16"
VERL_SCRIPT = "python3 -m verl.trainer.main_ppo data.train_batch_size=8 trainer.nnodes=1"
TRL_SCRIPT = (
    "from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(model='q', args=GRPOConfig(beta=0.1, num_iterations=2))"
)


@pytest.mark.parametrize(
    ("text", "name", "origin"),
    [
        (SLIME_SCRIPT, "a.sh", "verl"),
        (TRL_SCRIPT, "a.py", "verl"),
        (VERL_SCRIPT, "a.sh", "trl"),
        (VERL_SCRIPT, "a.sh", "slime"),
        ("data: {train_batch_size: 3}", "a.yaml", "roll"),
        ("python3 -m verl.trainer.main_ppo a.b=c", "a.sh", "verl"),
    ],
)
def test_a_file_of_another_system_than_from_names_is_refused(text, name, origin):
    found = problems_of(lambda: converted(text, name, origin))
    assert f"has no key of {origin}" in found[name].message


def test_words_of_a_command_line_that_are_no_keys_are_named():
    text = "A=1 python3 -m verl.trainer.main_ppo data.train_batch_size = 3 data.seed:4 foo=3 trainer.nnodes=1 $@ > log"
    done = converted(text, "a.sh", "verl")
    assert [line for line in done.lost if line.startswith("data.train_batch_size = 3 data.seed:4: ")]
    assert "foo: 3: roll knows no key of verl of this name" in done.lost and "log" not in "".join(done.lost)


def test_a_file_of_roll_lists_what_it_lacks():
    for name, path in (("roll_rlvr_async", "rewards"), ("roll_agentic_async", "custom_envs")):
        text = (FOREIGN / f"{name}.yaml").read_text()
        assert [line.partition(":")[0] for line in converted(text, "a.yaml", "roll").missing] == [path]
        broken = converted(text + "\nmax_stepz: 3\n", "a.yaml", "roll").missing
        assert [line.partition(":")[0] for line in broken] == ["max_stepz", path]


def test_a_script_of_trl_is_read_with_its_names_and_later_assignments():
    text = """
LR = 1e-6
cfg = dict(learning_rate=LR, num_generations=4)
args = GRPOConfig(**cfg, **more, max_steps=5)
args.beta = 0.1
args.epsilon = compute()
if debug:
    args.delta = 2.0
GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=[lambda completions, **k: f(1, 2), accuracy_reward], args=args)
"""
    done = converted(text, "a.py", "trl")
    tree = done.tree()
    assert tree["pretrain"] == "Qwen/Qwen3-0.6B" and tree["num_return_sequences_in_group"] == 4
    assert tree["actor_train"]["training_args"]["learning_rate"] == 1e-6 and tree["kl_loss_coef"] == 0.1
    assert tree["rewards"]["math"]["verifier"] == "math"
    assert sorted(lost_of(done)) == ["**more", "delta", "epsilon", "reward_funcs"]
    assert any("lambda completions, **k: f(1, 2)" in line for line in done.lost)


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("SFTTrainer(model='q', args=SFTConfig(learning_rate=1e-5))", "a.py", "pipeline: sft"),
        ("PPOConfig(learning_rate=1e-5)", "a.py", "GRPOTrainer"),
        ("trl sft --model_name_or_path q --learning_rate 1e-5", "a.sh", "pipeline: sft"),
    ],
)
def test_other_trainers_of_trl_are_refused(text, name, told):
    (problem,) = problems_of(lambda: converted(text, name, "trl")).values()
    assert told in problem.remedy


def ours_of(command, system):
    return converted(command, "x.toml" if system == "prime-rl" else "x.sh", system).tree()


VERL_GAE = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 "
    "actor_rollout_ref.actor.ppo_micro_batch_size=64 algorithm.adv_estimator=gae algorithm.lam=1.0 "
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10 trainer.n_gpus_per_node=8 "
)


def test_batches_warm_up_and_advantages_of_verls_ppo():
    more = "actor_rollout_ref.actor.ppo_epochs=2 critic.ppo_mini_batch_size=512 critic.optim.lr_warmup_steps=5"
    ours = ours_of(VERL_GAE + more, "verl")
    assert ours["adv_estimator_args"]["lambda_"] == 1.0 and ours["whiten_advantages"] is True
    actor, critic = ours["actor_train"]["training_args"], ours["critic"]["training_args"]
    assert (actor["per_device_train_batch_size"], actor["gradient_accumulation_steps"]) == (8, 4)  # 64 over 8 GPUs
    assert (critic["per_device_train_batch_size"], critic["gradient_accumulation_steps"]) == (8, 8)
    assert (actor["warmup_steps"], critic["warmup_steps"]) == (10 * 4 * 2, 5 * 2 * 2)
    assert ours["critic"]["use_dynamic_batching_in_train"] is False


def test_warm_up_of_verl_counts_training_steps_also_where_batches_do_not_divide():
    def warm_up_of(more):
        ours = ours_of(f"{VERL_GAE} critic.optim.lr_warmup_steps=5 {more}", "verl")
        return [ours[role]["training_args"]["warmup_steps"] for role in ("actor_train", "critic")]

    assert warm_up_of("trainer.n_gpus_per_node=7") == [10 * 4, 5 * 4]
    assert warm_up_of("critic.ppo_mini_batch_size=100") == [10 * 4, 5 * 11]


def test_defaults_of_verl_that_are_not_ours_are_written():
    lora = "actor_rollout_ref.model.lora_rank=32 trainer.save_freq=20 trainer.total_training_steps=null"
    done = converted(VERL_GAE + lora, "x.sh", "verl")
    ours = done.tree()
    assert ours["actor_train"]["model_args"]["lora_alpha"] == 16
    actor, critic = ours["actor_train"]["training_args"], ours["critic"]["training_args"]
    assert (
        (actor["weight_decay"], actor["adam_beta2"]) == (critic["weight_decay"], critic["adam_beta2"]) == (0.01, 0.999)
    )
    assert critic["learning_rate"] == 1e-5 and ours["max_ckpt_to_keep"] == 0
    assert "max_steps" not in ours and any(line.startswith("max_steps: verl counts epochs") for line in done.missing)
    given = "actor_rollout_ref.actor.optim.betas=[0.8,0.95] actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    given = ours_of(VERL_GAE + given, "verl")["actor_train"]["training_args"]
    assert (given["adam_beta1"], given["adam_beta2"], given["lr_scheduler_type"]) == (0.8, 0.95, "cosine")


def test_the_target_of_verls_kl_controller_is_asked_for():
    done = converted(VERL_GAE + "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive", "x.sh", "verl")
    assert [line for line in done.missing if line.startswith("target_kl: verl aims at 0.1 nats per token")]


def test_steps_of_trl_count_each_pass_over_a_batch():
    command = (
        "trl grpo --max_steps 1000 --save_steps 100 --eval_steps 50 --num_iterations 2 --steps_per_generation 4 "
        "--gradient_accumulation_steps 2 --eval_strategy steps --dataset_name d --dataset_test_split test "
    )
    ours = ours_of(command, "trl")
    assert (ours["max_steps"], ours["save_steps"], ours["eval_steps"]) == (250, 25, 13)
    assert ours["actor_train"]["training_args"]["adam_beta2"] == 0.999 and ours["max_ckpt_to_keep"] == 0


def test_checkpoints_of_trl_at_a_share_of_all_steps_are_lost_aloud():
    done = converted("trl grpo --max_steps 1000 --save_steps 0.1", "x.sh", "trl")
    assert "save_steps" not in done.tree() and any(line.startswith("save_steps: 0.1") for line in done.lost)
    assert not converted("trl grpo --max_steps 1000 --save_steps 0.1 --save_strategy no", "x.sh", "trl").lost


def test_adapters_of_trl_have_the_scale_of_their_defaults():
    adapters = ours_of("trl grpo --max_steps 9 --use_peft --lora_r 64", "trl")["actor_train"]["model_args"]
    assert (adapters["lora_rank"], adapters["lora_alpha"]) == (64, 32)
    assert ours_of("trl grpo --max_steps 9 --use_peft", "trl")["actor_train"]["model_args"]["lora_rank"] == 16
    script = "trainer = GRPOTrainer(model='m', args=GRPOConfig(max_steps=9), peft_config=LoraConfig(r=32))"
    adapters = converted(script, "x.py", "trl").tree()["actor_train"]["model_args"]
    assert (adapters["lora_rank"], adapters["lora_alpha"]) == (32, 8)
    adapters = converted(script.replace("r=32", ""), "x.py", "trl").tree()["actor_train"]["model_args"]
    assert (adapters["lora_rank"], adapters["lora_alpha"]) == (8, 8)


def test_the_critic_of_slime_is_trained_as_its_actor_but_for_what_it_says():
    command = (
        "train.py --advantage-estimator ppo --lambd 1.0 --rollout-batch-size 64 --n-samples-per-prompt 1 "
        "--global-batch-size 32 --lr 1e-6 --lr-warmup-iters 9 --critic-lr 1e-5 --num-critic-only-steps 3"
    )
    ours = ours_of(command, "slime")
    actor, critic = ours["actor_train"]["training_args"], ours["critic"]["training_args"]
    assert critic == actor | {"learning_rate": 1e-5, "warmup_steps": 0} and actor["gradient_accumulation_steps"] == 4
    assert (ours["value_clip"], ours["adv_estimator_args"]["lambda_"], ours["critic_warmup"]) == (0.2, 1.0, 3)
    assert (actor["weight_decay"], actor["adam_beta2"]) == (0.01, 0.999)
    done = converted(command.replace("ppo", "grpo"), "x.sh", "slime")
    assert "critic" not in done.tree() and [line for line in done.without_effect if "critic" in line]


def test_adapters_of_prime_rl_stay_adapters():
    text = 'max_steps = 9\n[trainer.optim]\nweight_decay = "auto"\n[trainer.model.lora]\nalpha = 64.0\n'
    ours = ours_of(text, "prime-rl")["actor_train"]
    assert ours["model_args"]["lora_target"] == "all-linear"
    assert (ours["model_args"]["lora_rank"], ours["model_args"]["lora_alpha"]) == (16, 64)
    assert (ours["training_args"]["weight_decay"], ours["training_args"]["adam_beta2"]) == (0.0, 0.999)


def test_a_lambda_of_one_in_rolls_file_stays_one():
    assert rolls(adv_estimator="gae", lambd=1.0).ours("adv_estimator_args.lambda_") == 1.0


def test_the_target_of_rolls_kl_controller_has_another_unit():
    keys = {"add_token_level_kl": True, "target_kl": 0.1}
    (problem,) = rolls(**keys).problems
    assert problem.path == "target_kl" and "per token" in problem.message
    assert not rolls(**keys, kl_controller="adaptive").problems
    assert not rolls(target_kl=0.1).problems


@pytest.mark.parametrize(
    ("system", "command"),
    [
        (
            "verl",
            "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.use_dynamic_bsz=True "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        ),
        (
            "slime",
            "train.py --context-parallel-size 2 --rollout-batch-size 64 --n-samples-per-prompt 1 "
            "--use-dynamic-batch-size --max-tokens-per-gpu 4096",
        ),
    ],
)
def test_ranks_that_split_rows_take_one_share_of_a_batch_and_its_tokens_together(system, command):
    ours = ours_of(command, system)["actor_train"]
    assert ours["strategy_args"]["strategy_config"]["context_parallel_size"] == 2
    assert ours["max_tokens_per_microbatch_in_train"] == 2 * 4096
    assert ours["training_args"]["gradient_accumulation_steps"] == 64 // (8 // 2)


def test_context_ranks_of_prime_rl_are_kept():
    ours = ours_of("max_steps = 9\n[trainer.model]\ncp = 2\nep = 4\n", "prime-rl")["actor_train"]
    assert ours["strategy_args"]["strategy_config"]["context_parallel_size"] == 2


def test_staleness_of_verls_fully_asynchronous_trainer_is_a_share_of_an_interval():
    keys = "async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4"
    ours = ours_of(f"python3 -m verl.experimental.fully_async_policy.fully_async_main {keys}", "verl")
    assert (ours["async_generation_ratio"], ours["weight_update"]["interval_steps"]) == (2.0, 4)
