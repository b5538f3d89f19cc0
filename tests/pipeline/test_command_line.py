"""The command refuses what cannot work: exit code 2, the path, a remedy, and with nothing loaded or started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command_lines import ENGINES, Finished, run_here
from fake_cluster import IN_THIS_PROCESS
from runs import ROOT, TESTS, run_pipeline, start_command
from tiny import make_task, tiny_config, write_config

from roll.configs.loader import config_from_tree, load_config

HANG_SECONDS = 120.0
LATE = {"no such stage", "worker class that is none", "output that cannot be made"}
"""What is seen only beside our own stages and workers, which are made of Ray's."""
EARLY = {"no file", "not YAML", "malformed override", "unknown key"}
"""What the loader refuses."""
GYM = {"dataset": "chain_sum", "domain": "addition"}


@dataclass(frozen=True)
class Wrong:
    """A configuration that cannot work: what is changed in one that can, and what the message must say."""

    path: str
    remedy: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Dotted keys with ``__`` for the dots; `{folder}` in a text is the folder of the task."""
    text: str | None = None
    """Content of the file, in place of a configuration."""
    overrides: tuple[str, ...] = ()
    names_file: bool = True
    """False: `--config` names a file that is not there."""


WRONG = {
    # The file and the command line.
    "no file": Wrong("no-file.yaml", "check the path", names_file=False),
    "not YAML": Wrong("not-YAML.yaml:2:7", "indentation", text="max_steps: 1\n  seed: [2\n"),
    "Python in YAML": Wrong(
        "Python-in-YAML.yaml:1:11", "drop the tag", text="exp_name: !!python/object/apply:os.mkdir ['{folder}/mark']\n"
    ),
    "malformed override": Wrong("command line", "dotted.key=value", overrides=("max_steps",)),
    "override of an unknown key": Wrong(
        "actor_train.modle_args", "`model_args`", overrides=("actor_train.modle_args=1",)
    ),
    # Keys, types, numbers.
    "unknown key": Wrong("max_stps", "`max_steps`", {"max_stps": 1}),
    "wrong type": Wrong("max_steps", "whole number", {"max_steps": "many"}),
    "impossible bound": Wrong("max_staleness", "at least 2", {"async_generation_ratio": 2, "max_staleness": 1}),
    "KL without reference": Wrong("use_kl_loss", "add `reference", {"use_kl_loss": True}),
    "a critic nobody uses": Wrong("critic", "remove this section", {"critic": {"device_mapping": [0]}}),
    "environment without a type": Wrong(
        "custom_envs.maze.env_type", "`frozen_lake`", text="pipeline: agentic\ncustom_envs: {maze: {}}\n"
    ),
    # Devices.
    "no devices": Wrong("actor_infer.device_mapping", "0 to 1", {"actor_infer": {}}),
    "missing devices": Wrong(
        "actor_infer.device_mapping", "num_devices_per_node", {"actor_infer__device_mapping": [7]}
    ),
    "overlapping devices": Wrong(
        "actor_infer.device_mapping",
        "separate ones",
        {
            "cluster__num_devices_per_node": 3,
            "actor_train__device_mapping": "0-1",
            "actor_infer__device_mapping": "list(range(1,3))",
        },
    ),
    "code as devices": Wrong(
        "actor_infer.device_mapping",
        "0 to 1",
        {"actor_infer__device_mapping": "[__import__('os').mkdir('{folder}/mark')]"},
    ),
    "GPUs that are not there": Wrong("cluster.device", "cluster.device: cpu", {"cluster__device": "cuda"}),
    "cluster that is not there": Wrong("cluster.address", "ray start", {"cluster__address": "127.0.0.1:1"}),
    # What comes from outside.
    "no model": Wrong("pretrain", "config.json", {"pretrain": "{folder}/nowhere"}),
    "model without tokenizer": Wrong("pretrain", "tokenizer.json", {"pretrain": "{folder}/bare"}),
    "no prompts file": Wrong(
        "actor_train.data_args.file_name", "JSONL", {"actor_train__data_args__file_name": "no.jsonl"}
    ),
    "empty data set": Wrong(
        "actor_train.data_args.file_name", "JSONL", {"actor_train__data_args__file_name": "empty.jsonl"}
    ),
    "prompt longer than allowed": Wrong("actor_train.data_args.overlong_prompts", "at least 4", {"prompt_length": 3}),
    "domain without reward": Wrong(
        "actor_train.data_args.reasoning_gym[0]",
        "tag_included",
        {"actor_train__data_args": {"reasoning_gym": [{"dataset": "chain_sum", "domain": "sums"}]}},
    ),
    "tasks of training in validation": Wrong(
        "validation.data_args.reasoning_gym[0].seed",
        "another seed",
        {
            "eval_steps": 1,
            "actor_train__data_args": {"reasoning_gym": [GYM]},
            "validation__data_args": {"reasoning_gym": [GYM]},
        },
    ),
    "verifier that is no path": Wrong(
        "rewards.addition.verifier", "known", {"rewards__addition__verifier": "good one"}
    ),
    "verifier that cannot be imported": Wrong(
        "rewards.addition.verifier", "importable", {"rewards__addition__verifier": "nowhere:reward"}
    ),
    "verifier with a parameter nobody fills": Wrong(
        "rewards.addition.verifier_args.judge",
        "set `rewards.addition.verifier_args.judge`",
        {"rewards__addition__verifier": "own_code:wants_a_judge"},
    ),
    # Algorithms, engines, classes of one's own.
    "unknown policy loss": Wrong("actor_train.pg_variant", "`ppo`", {"actor_train__pg_variant": "ppoo"}),
    "stale tokens as if fresh": Wrong(
        "actor_train.pg_variant",
        "allow_uncorrected_off_policy",
        {"actor_train__pg_variant": "vanilla", "async_generation_ratio": 1},
    ),
    "knob of another loss": Wrong(
        "actor_train.pg_variant_args.tau", "dual_clip", {"actor_train__pg_variant_args": {"tau": 0.1}}
    ),
    "ROLL's knob of another loss": Wrong(
        "actor_train.cispo_epsilon_high", "pg_variant: cispo", {"actor_train__cispo_epsilon_high": 0.3}
    ),
    "correction that counts twice": Wrong(
        "train_infer_correction.weight",
        "old_logprobs: recompute",
        {"train_infer_correction": {"weight": {"level": "token", "upper": 2.0}}},
    ),
    "correction without effect": Wrong(
        "old_logprobs", "several optimizer steps", {"actor_train__pg_variant": "tis", "old_logprobs": "recompute"}
    ),
    "misspelt correction": Wrong(
        "train_infer_correction.wieght", "did you mean `weight`", {"train_infer_correction": {"wieght": {}}}
    ),
    "estimator with a critic": Wrong("adv_estimator", "grpo or rloo", {"adv_estimator": "gae"}),
    "unknown estimator": Wrong("adv_estimator", "`grpo`", {"adv_estimator": "gpro"}),
    "unknown engine option": Wrong(
        "actor_infer.strategy_args.strategy_config.slotz",
        "max_running_requests",
        {"actor_infer__strategy_args__strategy_config": {"slotz": 4}},
    ),
    "no such stage": Wrong("stages.judge", "rollout", {"stages": {"judge": "own_code:wants_a_judge"}}),
    "worker class that is none": Wrong(
        "actor_train.worker_cls", "TrainWorker", {"actor_train__worker_cls": "own_code:wants_a_judge"}
    ),
    # The folder of the run.
    "output below a file": Wrong("output_dir", "another folder", {"output_dir": "{folder}/train.jsonl/run"}),
    "output that cannot be made": Wrong("output_dir", "folder that", {"output_dir": "/proc/nowhere/run"}),
    "output that holds a run": Wrong("output_dir", "new folder", {"output_dir": "{folder}/earlier"}),
}

PLAN = "8 prompts x 4 samples = 32 samples a step"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    (folder / "empty.jsonl").touch()
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    (folder / "earlier").mkdir()
    (folder / "earlier" / "metrics.jsonl").touch()
    (folder / "ray").mkdir()
    (folder / "own_code.py").write_text("def wants_a_judge(response, judge):\n    return 0.0\n")
    (folder / "leaves.py").write_text("import sys\n\nsys.exit(2)\n")
    (folder / "unforeseen.py").write_text(
        "class Reward:\n"
        "    @property\n"
        "    def __signature__(self):\n"
        "        raise RuntimeError('nobody thought of this')\n"
        "    def __call__(self, response):\n"
        "        return 0.0\n"
        "reward = Reward()\n"
    )
    return folder


@pytest.fixture(scope="module")
def refusals(task: Path) -> Mapping[str, Finished]:
    """What the command says of each, one after the other in a process that has done nothing else: of what takes longest
    to load last."""
    commands = {name: written(task, name, WRONG[name]) for name in sorted(WRONG, key=loads)}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_TMPDIR": str(task / "ray"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(TESTS / "command_lines.py")],
        input=json.dumps(commands),
        cwd=task,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return {name: Finished(**finished) for name, finished in json.loads(done.stdout).items()}


def loads(name: str) -> int:
    """How much has to be loaded to see what is wrong."""
    return 2 * (name in LATE) + (name not in EARLY)


def written(task: Path, name: str, wrong: Wrong) -> list[str]:
    """The command's arguments, once its file is there."""
    path = task / (name.replace(" ", "-") + ".yaml")
    if wrong.text is not None:
        path.write_text(filled(wrong.text, task))
    elif wrong.names_file:
        write_config(task, tiny_config(task, **filled(wrong.changes, task)), path.name)
    return ["--config", str(path), *wrong.overrides]


def filled(value: Any, task: Path) -> Any:
    if isinstance(value, dict):
        return {key: filled(below, task) for key, below in value.items()}
    return value.replace("{folder}", str(task)) if isinstance(value, str) else value


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_with_path_and_remedy(refusals, name):
    finished, wrong = refusals[name], WRONG[name]
    assert finished.exit_code == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    problems = problems_in(finished.stderr)
    assert any(path.endswith(wrong.path) and wrong.remedy in remedy for path, remedy in problems), finished.stderr


def problems_in(stderr: str) -> list[tuple[str, str]]:
    """Path and remedy of each problem in the message: blocks of ``path: what`` and ``    -> remedy``."""
    _, *blocks = stderr.strip().split("\n\n")
    return [(what.split(": ")[0], remedy) for what, _, remedy in (block.partition("\n    -> ") for block in blocks)]


def test_a_refusal_starts_nothing_and_executes_nothing(refusals, task):
    assert not list((task / "ray").iterdir())
    assert not (task / "mark").exists()
    assert not (task / "output").exists()


def test_a_refusal_loads_no_engine_and_what_the_loader_refuses_does_not_even_load_torch(refusals):
    loaded = {name: set(refusal.loaded) for name, refusal in refusals.items()}
    assert {name: loaded[name] for name in EARLY if loaded[name]} == {}
    assert {name: seen for name in WRONG.keys() - LATE if not (seen := loaded[name]) <= {"torch"}} == {}
    assert "torch" in loaded["unknown policy loss"] and loaded["no such stage"] & ENGINES, "they would be seen"


def test_problems_of_all_kinds_are_reported_together(task):
    changes = {
        "prompt_length": 3,
        "adv_estimator": "gpro",
        "actor_train__pg_variant_args": {"upper": 2.0, "lower": 0.1},
        "rewards__addition__verifier": "nowhere:reward",
    }
    finished = run_here(written(task, "many", Wrong("", "", changes)))
    assert finished.exit_code == 2
    assert "5 problems" in finished.stderr
    assert [path for path, _ in problems_in(finished.stderr)] == [
        "rewards.addition.verifier",
        "actor_train.data_args.overlong_prompts",
        "actor_train.pg_variant_args.lower",
        "actor_train.pg_variant_args.upper",
        "adv_estimator",
    ]


def test_the_arithmetic_is_printed_before_anything_loads(refusals):
    assert PLAN in refusals["prompt longer than allowed"].stdout
    assert PLAN in refusals["unknown engine option"].stdout
    assert refusals["impossible bound"].stdout == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "roll check FILE"),
        (("trian", "run.yaml"), "`trian` is no command; did you mean `train`? known: `train`, `check`"),
        (("my.yaml",), "`my.yaml` is no command; to train as it says: roll train my.yaml"),
        (("train",), "roll: error: the following arguments are required: FILE"),
        (("--config",), "expected one argument"),
        (("--config", "run.yaml", "--max_steps=3"), "unrecognized arguments: --max_steps=3"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, complaint):
    finished = run_here(arguments)
    assert finished.exit_code == 2
    assert complaint in finished.stderr and finished.stdout == ""


def test_help_and_version_are_told():
    assert (version := run_here(["--version"])).exit_code == 0 and version.stdout.startswith("roll ")
    finished = run_here(["--help"])
    assert finished.exit_code == 0
    for lesson in ("--config FILE", "key=value", "docs/configuration.md", "max_steps=20", "exit codes"):
        assert lesson in finished.stdout


def test_an_unforeseen_error_in_the_check_is_no_configuration_error(task, monkeypatch):
    """The interpreter ends with 1 and a traceback."""
    monkeypatch.chdir(task)
    with pytest.raises(RuntimeError, match="nobody thought of this"):
        run_here(written(task, "unforeseen", Wrong("", "", {"rewards__addition__verifier": "unforeseen:reward"})))


def test_code_that_ends_the_process_during_the_check_does_not_choose_the_exit_code(task, monkeypatch):
    monkeypatch.chdir(task)
    finished = run_here(written(task, "leaves", Wrong("", "", {"rewards__addition__verifier": "leaves:reward"})))
    assert finished.exit_code == 1
    assert "SystemExit(2)" in finished.stderr and "nothing was started" in finished.stderr


def test_a_run_prints_its_plan_first_and_saves_a_configuration_that_loads_again(task, capsys):
    tree = tiny_config(task, max_steps=1)
    run = run_pipeline(task, IN_THIS_PROCESS, tree)
    assert capsys.readouterr().out.startswith("run          tiny: 1 training step")
    assert load_config(run.folder / "config.yaml") == config_from_tree({**tree, "output_dir": str(run.folder)})


@pytest.mark.tier("all")
def test_a_reader_that_went_away_does_not_fail_the_run(task, warm):
    process, out = start_command(task, tiny_config(task, max_steps=1))
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=HANG_SECONDS) == 0
    assert json.loads((out / "summary.json").read_text())["status"] == "success"
