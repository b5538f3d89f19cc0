"""Trackers in the configuration: known names, their own options, keys from the environment, and what has to be here."""

import pytest

from roll.check.config import check_config, check_elsewhere
from roll.check.memory import estimate_memory
from roll.check.plan import needs, plan
from roll.check.rules import is_installed, tracker_words
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree, dump_config, redacted_config
from roll.distribution import install_command


@pytest.fixture
def config(tree, monkeypatch):
    """A function from keys to a configuration that is right but for them."""
    for variable in ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    # As on a machine that has every tracker.
    monkeypatch.setattr("roll.check.rules.is_installed", lambda package: True)
    return lambda **keys: config_from_tree({**tree, **keys})


def problems(config):
    with pytest.raises(ConfigError) as refusal:
        check_config(config)
    return {problem.path: problem for problem in refusal.value.problems}


OFFLINE = {"wandb": {"mode": "offline"}}


@pytest.mark.parametrize("track_with", ["wandb", ["wandb"], ["tensorboard", "wandb"]])
def test_a_tracker_is_named_as_in_roll_or_in_a_list(config, track_with):
    checked = check_config(config(track_with=track_with, tracker_kwargs=OFFLINE))
    assert tracker_words(checked) == ["TensorBoard", "wandb (offline)"]


def test_the_plan_says_where_metrics_go(config):
    assert "metrics      metrics.jsonl, TensorBoard\n" in plan(config()) + "\n"
    many = config(track_with=["trackio", "swanlab"], tracker_kwargs={"swanlab": {"mode": "local"}})
    assert "metrics.jsonl, TensorBoard, trackio (local), swanlab (local)" in plan(many)
    assert "metrics      metrics.jsonl\n" in plan(config(track_with=[])) + "\n"


@pytest.mark.parametrize(
    ("keys", "path", "message", "remedy"),
    [
        ({"track_with": ["wandbb"]}, "track_with[0]", "no tracker", "did you mean `wandb`"),
        ({"track_with": "excel"}, "track_with", "no tracker", "`swanlab`"),
        ({"track_with": ["trackio", "trackio"]}, "track_with", "twice", "once"),
        ({"tracker_kwargs": {"trackio": {"project": "a"}}}, "tracker_kwargs.trackio", "no effect", "`track_with`"),
        ({"track_with": "trackio", "tracker_kwargs": {"tensorboard": {}}}, "tracker_kwargs.tensorboard", "no options",
         "remove"),
        ({"track_with": "trackio", "tracker_kwargs": {"trackoi": {}}}, "tracker_kwargs.trackoi", "no tracker",
         "`trackio`"),
        ({"track_with": "trackio", "tracker_kwargs": {"trackio": {"projekt": "a"}}}, "tracker_kwargs.trackio.projekt",
         "unknown key", "did you mean `project`"),
        ({"track_with": "trackio", "tracker_kwargs": {"trackio": {"name": 7}}}, "tracker_kwargs.trackio.name",
         "text", '"7"'),
        ({"track_with": "wandb", "tracker_kwargs": {"wandb": {"mode": "of"}}}, "tracker_kwargs.wandb.mode",
         "is not", "`offline`"),
        ({"track_with": "wandb", "tracker_kwargs": {"wandb": {"mode": "offline", "tags": "a"}}},
         "tracker_kwargs.wandb.tags", "list", '["a"]'),
        ({"track_with": "wandb", "tracker_kwargs": {"wandb": {"mode": "offline", "api_key": "hush"}}},
         "tracker_kwargs.wandb.api_key", "environment", "docs/trackers.md"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_path(config, keys, path, message, remedy):
    (problem,) = problems(config(**keys)).values()
    assert problem.path == path and message in problem.message and remedy in problem.remedy
    assert "hush" not in str(problem)


def test_a_tracker_that_sends_metrics_needs_its_key_in_the_environment(config, monkeypatch):
    online = config(track_with=["wandb", "swanlab"])
    with pytest.raises(ConfigError) as refusal:
        check_config(online)
    assert [problem.message.split("variable ")[1] for problem in refusal.value.problems] == [
        "WANDB_API_KEY is not set", "SWANLAB_API_KEY is not set",
    ]  # fmt: skip
    assert "docs/trackers.md" in refusal.value.problems[0].remedy
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setenv("SWANLAB_API_KEY", "x")
    assert tracker_words(check_config(online))[1:] == ["wandb (online)", "swanlab (online)"]


def test_trackio_needs_a_key_for_a_space_only(config):
    assert check_config(config(track_with="trackio"))
    space = config(track_with="trackio", tracker_kwargs={"trackio": {"space_id": "me/runs"}})
    assert "HF_TOKEN" in problems(space)["track_with"].message


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(config, monkeypatch):
    monkeypatch.setattr("roll.check.rules.is_installed", lambda package: False)
    chosen = config(track_with="wandb", tracker_kwargs=OFFLINE)
    problem = problems(chosen)["track_with"]
    assert "not installed" in problem.message and install_command("wandb") in problem.remedy
    assert [item.path for item in check_elsewhere(chosen)] == ["track_with"], "another machine may have it"


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandbish").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("wandbish") and is_installed("json")


def test_packages_and_keys_are_among_the_needs(config):
    chosen = config(track_with="swanlab")
    found = {need.what: need for need in needs(chosen, estimate_memory(chosen))}
    assert found["package swanlab"].here == is_installed("swanlab")
    assert not found["variable SWANLAB_API_KEY"].here and "swanlab" in found["variable SWANLAB_API_KEY"].state


def test_no_library_is_imported_to_check_a_configuration(config):
    import subprocess
    import sys

    code = (
        "import sys, yaml\n"
        "from roll.configs.loader import config_from_tree\n"
        "from roll.check.rules import *\n"
        "config = config_from_tree({'track_with': ['wandb', 'swanlab', 'trackio']})\n"
        "found = [*trackers_are_known(config), *trackers_are_here(config)]\n"
        "sys.exit(' '.join({'wandb', 'swanlab', 'trackio'} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_what_trackers_are_told_has_no_secrets_and_is_what_the_run_does(config):
    secretive = config(track_with="wandb", tracker_kwargs=OFFLINE, stages={"x": "https://me:hush@host/y"})
    told = redacted_config(secretive)
    assert told["stages"] == {"x": "https://me:***@host/y"}
    assert told["seed"] == secretive.seed and told["cluster"]["device"] == "cpu"
    assert "mode: offline" in dump_config(secretive)
