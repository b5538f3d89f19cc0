"""The loader reports every wrong key and value with its path, and executes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll.configs.errors import MASK, ConfigError, ConfigProblem
from roll.configs.fields import alternatives, range_of, walk
from roll.configs.loader import PIPELINES, config_from_tree, dump_config, load_config, parse_yaml, resolved_tree
from roll.configs.rewards import RewardConfig
from roll.configs.run import AgenticConfig, CustomEnvConfig, RLVRConfig
from tests.tiers import examples


def problems_of(path: Path | str, *overrides: str) -> dict[str, ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    problems = caught.value.problems
    assert all(problem.message and problem.remedy for problem in problems)
    assert len({problem.path for problem in problems}) == len(problems)
    return {problem.path: problem for problem in problems}


def test_a_valid_file_loads_with_types(write, tree):
    config = load_config(write(tree), ["actor_train.training_args.learning_rate=3e-4"])
    assert config.actor_train.training_args.learning_rate == 3e-4
    assert config.rewards == {"math": RewardConfig(verifier="math")}


def test_an_agentic_file_loads_with_types(write):
    text = (
        "pipeline: agentic\nactor_train: {device_mapping: 0}\ntrain_env_manager: {num_env_groups: 8, tags: [maze]}\n"
        "custom_envs: {maze: {env_type: grid, env_config: {size: 5}}}\n"
    )
    config = load_config(write(text), ["val_env_manager.group_size=2"])
    assert isinstance(config, AgenticConfig)
    assert config.custom_envs == {"maze": CustomEnvConfig(env_type="grid", env_config={"size": 5})}
    assert config.train_env_manager.num_env_groups == 8
    assert config.val_env_manager is not None and config.val_env_manager.group_size == 2
    assert load_config(write(dump_config(config))) == config


def test_an_override_chooses_the_pipeline(write, tree):
    tree.pop("rewards")
    tree.pop("num_return_sequences_in_group", None)
    assert isinstance(load_config(write(tree), ["pipeline=agentic"]), AgenticConfig)


def test_defaults_of_a_role_survive_a_partial_section(write, tree):
    tree["actor_train"]["training_args"] = {"learning_rate": 3e-4}
    tree["actor_infer"]["strategy_args"] = {"strategy_config": {"slots": 4}}
    tree |= {"reference": {"device_mapping": [0]}, "validation": {"generating_args": {"num_return_sequences": 1}}}
    config = load_config(write(tree))
    assert config.actor_train.strategy_args.strategy_name == "fsdp2_train"
    assert config.actor_infer.strategy_args.strategy_name == "hf_infer"
    assert config.reference is not None and config.reference.strategy_args.strategy_name == "fsdp2_train"
    assert config.validation is not None and config.validation.generating_args.temperature == 0.0
    assert config.actor_infer.generating_args.temperature == 1.0


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", '"1e-6"', "0.000001"])
def test_learning_rates_are_floats_however_written(write, text):
    path = write(f"actor_train: {{training_args: {{learning_rate: {text}}}}}")
    assert load_config(path).actor_train.training_args.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("text", "path", "remedy"),
    [
        ("max_step: 3", "max_step", "`max_steps`"),
        ("learning_rate: 1e-6", "learning_rate", "belongs under `actor_train.training_args`"),
        ("temperature: 1.0", "temperature", "`actor_infer.generating_args`"),
        ("num_gpus_per_node: 8", "num_gpus_per_node", "`cluster.num_devices_per_node`"),
        ("zzzz: 8", "zzzz", "remove it"),
        ("use_topr_loss: true", "use_topr_loss", "`actor_train.pg_variant: topr`"),
        ("mask_type: loss", "mask_type", "out of the loss"),
        ("whiten_rewards: true", "whiten_rewards", "`norm_mean_type: batch`"),
        ("difficulty_loss_weight: true", "difficulty_loss_weight", "`difficulty_mask`"),
        ("actor_train: {system_envs: {A: b}}", "actor_train.system_envs", "before `roll train`"),
        ("actor_train: {training_args: {lr: 1}}", "actor_train.training_args.lr", "learning_rate"),
        ("rewards: {math: {verifyer: math}}", "rewards.math.verifyer", "`verifier`"),
        ("reference: {training_arg: {}}", "reference.training_arg", "`training_args`"),
        (
            "actor_train: {data_args: {reasoning_gym: [{dataset: a}, {sede: 1}]}}",
            "actor_train.data_args.reasoning_gym[1].sede",
            "`seed`",
        ),
        ("max_steps: many", "max_steps", "whole number"),
        ("max_steps: 1.5", "max_steps", "whole number"),
        ("max_steps: true", "max_steps", "whole number"),
        ('max_steps: "true"', "max_steps", "whole number"),
        ("max_steps:", "max_steps", "leave the key out"),
        ("seed: {a: 1}", "seed", "whole number"),
        ("exp_name: [a]", "exp_name", "text"),
        ("exp_name: 7", "exp_name", '"7"'),
        ("whiten_advantages: yes", "whiten_advantages", "true or false"),
        ("whiten_advantages: 1", "whiten_advantages", "true or false"),
        ("loss_agg_mode: token_mean", "loss_agg_mode", "`token-mean`"),
        ("pipeline: rlvrr", "pipeline", "did you mean `rlvr`? known: `rlvr`, `agentic`"),
        ("pipeline: agentik\ncustom_envs: {}\nseed: [1]", "pipeline", "did you mean `agentic`"),
        ("pipeline: [rlvr]", "pipeline", "known: `rlvr`, `agentic`"),
        ("track_with: {wandb: 1}", "track_with", "a list of texts or text"),
        ("actor_infer: null", "actor_infer", "leave the key out"),
        ("actor_infer: [1]", "actor_infer", "mapping"),
        ("actor_infer: {device_mapping: [0, x]}", "actor_infer.device_mapping[1]", "whole number"),
        ("actor_infer: {device_mapping: {a: 1}}", "actor_infer.device_mapping", "list of whole numbers"),
        ("actor_infer: {device_mapping: true}", "actor_infer.device_mapping", "list of whole numbers"),
        ("rewards: {math: {tag_included: gsm8k}}", "rewards.math.tag_included", '["gsm8k"]'),
        ("rewards: [math]", "rewards", "mapping"),
        ("actor_train: {data_args: {file_name: {a: b}}}", "actor_train.data_args.file_name", "list of texts"),
        ("exp_name: ${nope}", "exp_name", "full path"),
        ("exp_name: ${exp_name}", "exp_name", "refer back"),
        ("{exp_name: '${pretrain}', pretrain: '${exp_name}'}", "pretrain", "refer back"),
        ("exp_name: ${oc.env:ROLL_TEST_UNSET}", "exp_name", "set the variable"),
        ("exp_name: '${oc.decode:x}'", "exp_name", "oc.env"),
        ("exp_name: '${oc.coerce:os.sep,1}'", "exp_name", "oc.env"),
        ("exp_name: '${oc.${seed}:x}'", "exp_name", "oc.env"),
        ("exp_name: '${oc.env:A,\"${oc.decode:x}\"}'", "exp_name", "oc.env"),
        ("exp_name: '${seed'", "exp_name", "close the reference"),
        ("exp_name: ???", "exp_name", "has a value"),
        ("critic: {training_args: {learning_rat: 1}}", "critic.training_args.learning_rat", "`learning_rate`"),
        ("custom_envs: {}", "custom_envs", "`docs/configuration.md`"),
        ("{pipeline: agentic, zzz: {}}", "zzz", "`docs/configuration.md`"),
        ("{pipeline: agentic, custom_envs: {a: {env_typ: x}}}", "custom_envs.a.env_typ", "`env_type`"),
        ("{pipeline: agentic, num_env_groups: 2}", "num_env_groups", "`train_env_manager` or `val_env_manager`"),
        ("{pipeline: agentic, train_env_manager: {tags: maze}}", "train_env_manager.tags", '["maze"]'),
    ],
)
def test_a_wrong_key_or_value_is_named_with_a_remedy(write, text, path, remedy):
    found = problems_of(write(text))
    assert path in found
    assert remedy in found[path].remedy


def test_sections_that_refer_to_each_other_are_refused(write):
    text = "rewards: {a: {verifier_args: {x: '${rewards.b}'}}, b: {verifier_args: {y: '${rewards.a}'}}}"
    (problem,) = problems_of(write(text)).values()
    assert "refer back" in problem.message


def test_references_that_multiply_are_refused(write):
    rows = [", ".join([f"'${{stages.s{row + 1}}}'"] * 10) for row in range(9)]
    lines = [f"  s{row}: [{entries}]" for row, entries in enumerate(rows)]
    (problem,) = problems_of(write("stages:\n" + "\n".join(lines) + "\n  s9: x\n")).values()
    assert "grow beyond" in problem.message


def test_all_problems_are_reported_at_once(write):
    text = "max_step: 3\nseed: x\nexp_name: ${nope}\nrewards: {math: {verifyer: a, num_workers: 1.5}}\n"
    found = problems_of(write(text), "nonsense", "actor_train.modle_args=1", "track_with[7]=x", "save_steps=[")
    assert set(found) == {
        "max_step",
        "seed",
        "exp_name",
        "rewards.math.verifyer",
        "rewards.math.num_workers",
        "command line",
        "actor_train.modle_args",
        "track_with[7]",
        "command line, save_steps:1:2",
    }


@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        ("", "run.yaml", "empty"),
        ("# only a comment\n", "run.yaml", "empty"),
        ("- a\n- b\n", "run.yaml", "not a mapping"),
        ("just text", "run.yaml", "not a mapping"),
        ("a: 1\n b: 2\n", "run.yaml:2:3", "not valid YAML"),
        ("a: [1, 2\n", "run.yaml:2:1", "not valid YAML"),
        ("a: 1\n\tb: 2\n", "run.yaml:2:1", "not valid YAML"),
        ("seed: 1\nmax_steps: 2\nseed: 3\n", "run.yaml:3:1", "`seed` stands already at line 1"),
        ("rewards:\n  a: {verifier: x, verifier: y}\n", "run.yaml:2:20", "stands already"),
        ("seed: 1\n---\nseed: 2\n", "run.yaml:2:1", "not valid YAML"),
        ("1: a\n", "run.yaml:1:1", "not text"),
        (b"exp_name: \xff\xfe\n", "run.yaml", "not UTF-8"),
        ("exp_name: \x00\n", "run.yaml", "not valid YAML"),
        ("exp_name: !!python/object/apply:os.system ['true']\n", "run.yaml:1:11", "refused"),
        ("exp_name: !!binary aGk=\n", "run.yaml:1:11", "refused"),
        ("a: &x {b: *x}\n", "run.yaml", "aliases"),
        ("a: " + "[" * 5000 + "]" * 5000, "run.yaml", "levels"),
        ("max_steps: " + "9" * 6000, "run.yaml", "number"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(write, content, where, message):
    path = write(content)
    found = problems_of(path)
    expected = str(path.parent / where)
    assert expected in found
    assert message in found[expected].message


def test_aliases_that_multiply_are_refused(write):
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (problem,) = problems_of(write("\n".join(lines))).values()
    assert "aliases" in problem.message


def test_every_repeated_key_is_reported(write):
    path = write("seed: 1\nseed: 2\nmax_steps: 1\nmax_steps: 1\n")
    assert set(problems_of(path)) == {f"{path}:2:1", f"{path}:4:1"}


def test_all_that_is_wrong_at_one_place_is_reported_and_an_alias_once(write):
    with pytest.raises(ConfigError) as caught:
        load_config(write("a: &x !!binary aGk=\nb: [*x, *x]\n!!binary aGk=: 1\n"))
    found = [problem.message for problem in caught.value.problems]
    assert found == ["tag !!binary is refused", "tag !!binary is refused", "the key aGk= is not text"]


def test_missing_file_and_folder_are_configuration_errors(tmp_path):
    assert "no such file" in problems_of(tmp_path / "no.yaml")[str(tmp_path / "no.yaml")].message
    assert "folder" in problems_of(tmp_path)[str(tmp_path)].message


def test_python_tags_are_not_executed(write, tmp_path):
    mark = tmp_path / "mark"
    problems_of(write(f"exp_name: !!python/object/apply:os.mkdir ['{mark}']\n"))
    problems_of(write({}), f"exp_name=!!python/object/apply:os.mkdir ['{mark}']")
    assert not mark.exists()


def test_anchors_and_merge_keys_work(write):
    config = load_config(write("rewards:\n  a: &a {verifier: math, num_workers: 2}\n  b: {<<: *a, num_workers: 3}\n"))
    assert config.rewards["b"] == RewardConfig(verifier="math", num_workers=3)


def test_references_reach_other_keys_defaults_and_the_environment(write, monkeypatch):
    monkeypatch.setenv("ROLL_TEST_STEPS", "12")
    text = (
        "response_length: 64\nmax_steps: ${oc.env:ROLL_TEST_STEPS}\nexp_name: n-${response_length}-${prompt_length}\n"
        "output_dir: ${oc.env:ROLL_TEST_UNSET,fallback}\n"
        "actor_infer: {generating_args: {max_new_tokens: '${response_length}'}}\n"
    )
    config = load_config(write(text), ["response_length=32"])
    assert (config.max_steps, config.exp_name, config.output_dir) == (12, "n-32-512", "fallback")
    assert config.actor_infer.generating_args.max_new_tokens == 32


def test_text_from_the_environment_is_not_resolved_again(write, monkeypatch):
    monkeypatch.setenv("ROLL_TEST_TEXT", "${oc.coerce:os.sep,1}")
    assert load_config(write("exp_name: ${oc.env:ROLL_TEST_TEXT}")).exp_name == "${oc.coerce:os.sep,1}"


def test_overrides_reach_nested_keys_lists_and_mappings(write, tree):
    tree["rewards"]["math"]["tag_included"] = ["a", "b"]
    overrides = [
        "actor_train.training_args.learning_rate=1e-3",
        "rewards.math.tag_included[1]=c",
        "rewards.math.tag_included.0=d",
        "rewards.code.verifier=exact",
        "actor_infer.generating_args={top_k: 5}",
        "actor_infer.device_mapping=0-1",
        "exp_name=a=b",
        "validation={}",
        "max_steps=1",
        "max_steps=2",
    ]
    config = load_config(write(tree), overrides)
    assert config.actor_train.training_args.learning_rate == 1e-3
    assert config.rewards["math"] == RewardConfig(verifier="math", tag_included=["d", "c"])
    assert config.rewards["code"].verifier == "exact"
    assert (config.actor_infer.generating_args.top_k, config.actor_infer.generating_args.top_p) == (5, 1.0)
    assert (config.actor_infer.device_mapping, config.exp_name, config.max_steps) == ("0-1", "a=b", 2)
    assert config.validation is not None


@pytest.mark.parametrize("override", ["max_steps", "=3", ".a=1", "a..b=1", "a[=1", "", "--max_steps=3 4", "a b=1"])
def test_a_malformed_override_is_refused(write, tree, override):
    path = write(tree)
    assert "dotted.key=value" in problems_of(path, override)["command line"].remedy


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("max_stps=1", "max_stps"),
        ("rewards.math.x.y=1", "rewards.math.x"),
        ("max_steps.x=1", "max_steps"),
        ("track_with.x=1", "track_with.x"),
        ("track_with[3]=tensorboard", "track_with[3]"),
        ("exp_name=${oc.create:1}", "exp_name"),
    ],
)
def test_an_override_that_fits_nowhere_is_reported(write, tree, override, path):
    assert set(problems_of(write(tree), override)) == {path}


def test_a_dumped_configuration_loads_to_an_equal_one(write, tree):
    tree |= {"reference": {"device_mapping": "0"}, "validation": {"data_args": {"template": "chat"}}}
    tree["stages"] = {"reward": "my.stages:Reward"}
    tree["rewards"]["math"]["verifier_args"] = {"tolerance": 1e-6, "words": ["yes", "1e-6", "2024-01-01", "~"]}
    config = load_config(write(tree))
    assert load_config(write(dump_config(config))) == config


@settings(max_examples=examples(100))
@given(st.text(st.characters(codec="utf-8"), max_size=20) | st.text("$\\{}?:a.~", max_size=12))
@example("\x85")
@example("a\u2028b")
def test_any_text_survives_dump_and_load(text):
    config = RLVRConfig(rewards={"r": RewardConfig(verifier=text, verifier_args={"list": [text]})})
    assert config_from_tree(parse_yaml(dump_config(config), "dump")) == config


names = st.sampled_from(["a", "b.c", "yes", "???", "1"])
words = names | st.sampled_from(["", "\\???", "1e-3", "null", "$x", "{}", "\\${a}", "${oc.env:NOT_SET,x}"])
scalars = words | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
trees = st.dictionaries(
    names, st.recursive(scalars, lambda below: st.lists(below) | st.dictionaries(names, below), max_leaves=8)
)


@settings(max_examples=examples(100))
@given(trees)
def test_a_tree_without_references_is_read_like_one_with_some(tree):
    beside = resolved_tree({**tree, "one": 1, "other": "${one}"})
    assert repr(beside) == repr({**resolved_tree(tree), "one": 1, "other": 1})


def test_secrets_are_masked_in_dumps_and_messages(write):
    text = "actor_infer: {strategy_args: {strategy_config: {api_key: abc123, hf_token: abc123, max_new_tokens: 5}}}\n"
    dumped = dump_config(load_config(write(text)))
    assert "abc123" not in dumped and MASK in dumped
    assert "max_new_tokens: 5" in dumped
    found = problems_of(write("actor_infer: {password: abc123}\n"))
    assert "abc123" not in str(found["actor_infer.password"])


def test_loading_is_light(write, tree):
    code = (
        "import sys\n"
        "import roll.check.plan\n"
        "from roll.check.config import check_config\nfrom roll.configs.loader import load_config\n"
        "check_config(load_config(sys.argv[1], ['max_steps=3', 'exp_name=x-${max_steps}']))\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    command = [sys.executable, "-c", code, str(write(tree))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("root", PIPELINES.values())
def test_every_key_has_help_and_every_number_a_range(root):
    for path, item, kind in walk(root):
        assert item.metadata["help"].endswith("."), path
        is_number = bool({int, float} & set(alternatives(kind))) and str not in alternatives(kind)
        assert is_number == (range_of(kind) is not None), path
