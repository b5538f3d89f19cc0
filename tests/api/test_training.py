"""`roll.train`: objects in place of names, what a saved run says of them, interrupts, and the end of the caller."""

from __future__ import annotations

import _thread
import asyncio
import json
import logging
import pickle
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from fake_cluster import FakeCluster
from tiny import make_task, tiny_config

import roll
from roll.api.configuration import with_given
from roll.api.training import Order, Result, _passed_on, conduct
from roll.configs.given import PREFIX, holding_given, with_tokens
from roll.configs.loader import load_config
from roll.runtime.process import DriverFolders
from tests.report.conftest import make_run  # noqa: F401


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


def starts_with_a_digit():
    """A function that no module has, as in a notebook."""

    def reward(response, bonus: float = 0.0):
        return float(response[:1].isdigit()) + bonus

    return reward


def column(samples, name):
    """The values of samples, which are a frame where pandas is installed."""
    return [sample[name] for sample in samples] if isinstance(samples, list) else samples[name].tolist()


def conducted(tree, **given):
    """A run as its process conducts it, but in this one."""
    overrides = given.pop("overrides", ())
    parts = {"reward": None, "loss": None, "advantage": None, "env": None, **given}
    config, pickles = with_given(tree, overrides, **parts)
    with holding_given(pickles), FakeCluster():
        lines: list[str] = []
        conduct(Order(config, DriverFolders(given=pickles), -1), lines.append)
    return Result(**json.loads(lines[-1]))


def test_a_run_names_what_it_was_given_and_goes_on_only_with_it(task, tmp_path):
    tree = tiny_config(task, max_steps=2, save_steps=1, output_dir=str(tmp_path / "out"))
    del tree["rewards"]["addition"]["verifier"]
    done = conducted(tree, reward=starts_with_a_digit())
    assert done.exit_code == 0 and done.problems == []
    run = roll.open_run(done.run)
    assert run.status == "success" and run.path == (tmp_path / "out").resolve()
    assert set(column(run.samples, "score")) <= {0.0, 1.0}
    saved = load_config(run.path / "config.yaml")
    assert saved.rewards["addition"].verifier == f"{PREFIX}reward"

    more = ("max_steps=3", "resume_from_checkpoint=true")
    refused = conducted(str(run.path / "config.yaml"), overrides=more)
    assert refused.exit_code == 2 and refused.run is None
    (problem,) = refused.problems
    assert problem["path"] == "rewards.addition.verifier"
    assert "in no file" in problem["message"] and "give it again" in problem["remedy"]
    assert run.summary["steps"] == 2

    again = conducted(str(run.path / "config.yaml"), reward=starts_with_a_digit(), overrides=more)
    assert again.exit_code == 0 and run.summary["steps"] == 3 and run.summary["resumed_at"] == [2]


def test_a_token_in_a_file_loads_nothing(task):
    """However it is written, a file cannot make a process load a pickle."""
    tree = tiny_config(task, rewards__addition__verifier=f"{PREFIX}os.system")
    (problem,) = roll.check(tree).problems
    assert problem.path == "rewards.addition.verifier" and "in no file" in problem.message


def test_objects_go_where_names_stand_and_their_arguments_with_them(task):
    loss, reward = starts_with_a_digit(), starts_with_a_digit()
    tree = tiny_config(task, actor_train__pg_variant_args={"clip_low": 0.1})
    tree["rewards"]["addition"] |= {"verifier_args": {"unknown": 1}, "num_workers": 2}
    tree["rewards"]["other"] = {"judge": {"model": "m"}, "verifier": "judge", "tag_included": ["poems"]}
    config, pickles = with_given(tree, ["rewards.addition.verifier_args.bonus=0.5"], reward, loss, None, None)
    addition, other = config.rewards["addition"], config.rewards["other"]
    assert addition.verifier == other.verifier != config.actor_train.pg_variant
    assert {addition.verifier, config.actor_train.pg_variant} == {f"{PREFIX}reward", f"{PREFIX}reward (2)"}
    assert addition.num_workers == 2 and addition.verifier_args == {"bonus": 0.5}
    assert other.judge is None and other.tag_included == ["poems"]
    assert config.actor_train.pg_variant_args == {}
    assert set(pickles) == {addition.verifier, config.actor_train.pg_variant}


def test_a_dictionary_may_hold_objects_and_one_object_has_one_name():
    first, second = (lambda response: 1.0), (lambda response: 2.0)
    tree, pickles = with_tokens({"a": first, "b": [second, {"c": first}], "d": "text", "e": 3})
    assert tree == {"a": f"{PREFIX}<lambda>", "b": [f"{PREFIX}<lambda> (2)", {"c": tree["a"]}], "d": "text", "e": 3}
    assert len(pickles) == 2


def test_a_function_of_a_module_that_no_file_has_travels_too():
    module = types.ModuleType("of_no_file")
    sys.modules["of_no_file"] = module
    try:
        exec("SIZE = 2\ndef reward(response):\n    return SIZE * len(response)", vars(module))
        tree, pickles = with_tokens({"verifier": module.reward})
    finally:
        del sys.modules["of_no_file"]
    assert pickle.loads(pickles[tree["verifier"]])("ab") == 4


def test_what_cannot_be_pickled_is_named_with_its_place(task):
    lock = threading.Lock()
    with pytest.raises(roll.ConfigError) as error:
        roll.train(tiny_config(task), reward={"addition": lambda response: lock.locked()})
    (problem,) = error.value.problems
    assert problem.path == "rewards.addition.verifier" and "lock" in problem.message


def test_a_tracker_is_named_since_its_process_imports_it(task):
    (problem,) = roll.check({**tiny_config(task), "track_with": [starts_with_a_digit()]}).problems
    assert problem.path == "track_with" and "package.module:Class" in problem.remedy


def test_a_configuration_is_a_file_a_dictionary_or_a_dataclass(task, tmp_path):
    tree = tiny_config(task)
    from_tree = roll.load_config(tree, ["max_steps=5"])
    (tmp_path / "run.yaml").write_text(roll.configs.loader.dump_config(from_tree))
    assert roll.load_config(tmp_path / "run.yaml") == from_tree == roll.load_config(from_tree)
    assert isinstance(from_tree, roll.RLVRConfig) and from_tree.max_steps == 5
    with pytest.raises(roll.ConfigError, match="a configuration is text"):
        roll.load_config({**tree, "adv_estimator": lambda inputs: inputs})


def test_problems_and_plan_are_data(task):
    tree = tiny_config(task)
    good = roll.check(tree, reward=starts_with_a_digit(), loss=my_loss())
    assert good and good.ok and good.problems == [] and good.config.max_steps == 3
    assert dict(good.plan)["batch"].startswith("8 prompts x 4 samples = 32 samples")
    assert any(need.what.startswith("model ") and need.here for need in good.needs) and good.memory is not None
    bad = roll.check({**tree, "max_stepz": 3, "seed": "x"})
    assert not bad and {problem.path for problem in bad.problems} == {"max_stepz", "seed"} and bad.config is None
    asks_for_more = roll.check(tree, reward=lambda response, strictness: 1.0)
    assert [problem.path for problem in asks_for_more.problems] == ["rewards.addition.verifier_args.strictness"]


def test_an_object_of_a_misspelt_name_is_refused(task):
    (problem,) = roll.check(tiny_config(task), reward={"additon": starts_with_a_digit()}).problems
    assert problem.path == "reward" and "did you mean `addition`?" in problem.remedy
    with pytest.raises(roll.ConfigError, match="the configuration has no `lakes`"):
        with_given({"pipeline": "agentic", "custom_envs": {"lake": {}}}, (), None, None, None, {"lakes": my_loss()})


def test_an_environment_may_be_given_for_a_file_in_rolls_dialect():
    """Such a file does not say its pipeline: its keys do."""
    foreign = Path(__file__).parents[1] / "configs/foreign"
    checked = roll.check(foreign / "roll_agentic_async.yaml", env=gymnasium.Env)
    assert checked.ok and checked.config.custom_envs["default"].env_type.startswith(PREFIX)
    (problem,) = roll.check(foreign / "roll_rlvr_async.yaml", env=gymnasium.Env).problems
    assert problem.path == "env" and "only the pipeline `agentic`" in problem.message


def test_an_object_does_not_replace_what_a_reference_leads_to(task):
    tree = tiny_config(task)
    tree["rewards"]["poems"] = "${rewards.addition}"
    (problem,) = roll.check(tree, reward=starts_with_a_digit()).problems
    assert problem.path == "rewards.poems" and "write the section out" in problem.remedy
    for name, given in {"rewards": {"reward": my_loss()}, "actor_train": {"loss": my_loss()}}.items():
        (problem,) = roll.check({**tiny_config(task), name: "${other}"}, **given).problems
        assert problem.path == name and "${other}" in problem.message


def test_a_wrong_key_does_not_make_a_missing_model_a_problem(task):
    tree = {**tiny_config(task), "pretrain": "/no/such/model", "max_stepz": 3}
    assert [problem.path for problem in roll.check(tree).problems] == ["max_stepz"]
    with pytest.raises(roll.ConfigError) as error:
        with_given(tree, (), None, None, None, None)
    assert {"max_stepz"} < {problem.path for problem in error.value.problems}


def test_values_of_python_become_plain_or_are_refused_with_their_path():
    endless = {}
    endless["a"] = endless
    tree, _ = with_tokens({"a": Path("x/y"), "b": np.float64(0.5), "c": [np.int32(3)], "d": None})
    assert tree == {"a": "x/y", "b": 0.5, "c": [3], "d": None} and type(tree["b"]) is float
    for wrong in ({"a": {"b": {1, 2}}}, {"a": {"b": threading.Lock()}}):
        with pytest.raises(roll.ConfigError) as error:
            with_tokens(wrong)
        assert [problem.path for problem in error.value.problems] == ["a.b"]
    with pytest.raises(roll.ConfigError, match="contains itself"):
        with_tokens(endless)


def test_the_function_and_the_package_of_one_name_go_together():
    from roll.check.config import check_config

    assert callable(roll.check) and roll.check.config.check_config is check_config


def my_loss():
    def loss(inputs, strength: float = 1.0):
        nothing = torch.zeros_like(inputs.logprobs)
        return -strength * inputs.advantages * inputs.logprobs, {"clip_fraction": nothing}

    return loss


def centred():
    def advantage(inputs):
        scores = inputs.token_rewards.sum(-1, keepdim=True)
        return (scores - scores.mean()).expand_as(inputs.token_rewards)

    return advantage


@pytest.mark.tier("all")
def test_a_lambda_a_loss_and_an_estimator_reach_the_workers_from_within_an_event_loop(
    task, tmp_path, capfd, warm_commands
):
    """The only test here that starts Ray: what is given crosses processes, and the notebook's loop keeps running."""
    tree = tiny_config(task, max_steps=2, output_dir=str(tmp_path / "out"))
    handlers = list(logging.getLogger().handlers)

    async def cell():
        return roll.train(tree, reward=lambda response: len(response) / 4, loss=my_loss(), advantage=centred())

    run = asyncio.run(cell())
    assert run.status == "success" and [row["step"] for row in read(run)] == [0, 1, 2]
    assert set(column(run.samples, "score")) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert run.config.actor_train.pg_variant == f"{PREFIX}loss" and run.config.adv_estimator == f"{PREFIX}advantage"
    assert (run.checkpoint / "config.json").is_file()
    assert "step 2/2" in capfd.readouterr().out
    assert logging.getLogger().handlers == handlers
    with pytest.raises(roll.ConfigError) as error:  # a second run of the same process; nothing of the first is left
        roll.train(tree)
    assert [problem.path for problem in error.value.problems] == ["output_dir"]


KILLED = """
import os, signal, sys, types
sys.path[:] = {path!r}
from roll.api import training
def begin(path, load, started, begins):
    begins(types.SimpleNamespace(root=__import__("pathlib").Path({run!r})))
    os.kill(os.getpid(), signal.SIGKILL)
training.run_to_its_end = begin
training.main()
"""


def test_a_run_whose_process_is_killed_shows_what_was_done(task, make_run, monkeypatch):  # noqa: F811
    root = make_run(status="running").root
    monkeypatch.setattr("roll.api.training._START", KILLED.format(path=sys.path, run=str(root)))
    with pytest.raises(roll.RunFailed, match=f"was killed; the run in {root}") as failure:
        roll.train(tiny_config(task))
    assert failure.value.run.path == root.resolve() and len(failure.value.run.metrics) == 4


@pytest.mark.parametrize(
    ("parts", "path", "words"),
    [
        ({"loss": lambda: 1}, "actor_train.pg_variant", "takes no inputs"),
        ({"loss": dict}, "actor_train.pg_variant", "takes no inputs"),
        ({"advantage": lambda *, eps=1.0: 1}, "adv_estimator", "takes no inputs"),
    ],
)
def test_what_cannot_be_a_loss_or_an_estimator_is_refused(task, parts, path, words):
    [problem] = roll.check(tiny_config(task), **parts).problems
    assert problem.path == path and words in problem.message


@pytest.mark.parametrize(
    ("source", "given", "path"),
    [
        (5, {}, "the configuration"),
        (None, {}, "the configuration"),
        ({}, {"overrides": "max_steps=3"}, "overrides"),
        ({}, {"overrides": [3]}, "overrides"),
        ({}, {"env": dict}, "env"),
    ],
)
def test_what_is_given_in_a_wrong_form_is_named(source, given, path):
    [problem] = roll.check(source, **given).problems
    assert problem.path == path and problem.remedy


def test_a_result_that_no_pipe_holds_arrives(task):
    tree = tiny_config(task)
    tree["rewards"] |= {f"r{number}": {"verifier": "no_such_verifier"} for number in range(1500)}
    with pytest.raises(roll.ConfigError) as error:
        roll.train(tree)
    assert len(str(error.value)) > 200_000


def read(run):
    rows = run.metrics
    return rows if isinstance(rows, list) else rows.reset_index().to_dict("records")


def child(code, **options):
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )


ENDS_IN_ORDER = """
import time
try:
    print("begun")
    time.sleep(60)
except KeyboardInterrupt:
    print("ended in order")
"""


def test_an_interrupt_of_the_caller_ends_the_run_in_order(capsys):
    process = child(ENDS_IN_ORDER)

    def interrupt():
        while "begun" not in "".join(said):
            time.sleep(0.01)
        _thread.interrupt_main()

    said = []
    real = print

    def spy(*words, **options):
        said.extend(words)
        real(*words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", spy)
        threading.Thread(target=interrupt, daemon=True).start()
        interrupted = _passed_on(process)
    assert interrupted and process.returncode == 0 and capsys.readouterr().out == "begun\nended in order\n"


def test_output_is_passed_on_while_another_process_holds_it_open(capsys):
    process = child("import subprocess; subprocess.Popen(['sleep', '20']); print('done')")
    started = time.monotonic()
    assert not _passed_on(process)
    assert capsys.readouterr().out == "done\n" and time.monotonic() - started < 15


WAITS_FOR_ITS_CALLER = """
import threading, time
from roll.api.training import _end_with_the_caller
try:
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    print("begun")
    time.sleep(60)
except KeyboardInterrupt:
    print("ended in order")
"""


def test_a_run_ends_in_order_when_its_caller_dies():
    process = child(WAITS_FOR_ITS_CALLER)
    assert process.stdout.readline() == b"begun\n"
    process.stdin.close()  # as the system does for a process that was killed
    assert process.stdout.read() == b"ended in order\n" and process.wait() == 0
