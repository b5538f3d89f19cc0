from __future__ import annotations

import importlib.util
import sys

import gymnasium
import pytest

from roll.agentic.base import observation_from
from roll.agentic.library.grid_games import FrozenLakeEnv
from roll.agentic.registry import ENVIRONMENTS, TextAdapter, check_env_type, make_env
from roll.configs.errors import ConfigError, ConfigProblem
from roll.distribution import install_command
from tests.agentic.sample_envs import GoodEnv, Walk, WalkWithoutText

SAMPLES = "tests.agentic.sample_envs:"
GYMNASIUM_IDS = {
    "frozen_lake": "roll/FrozenLake-v0",
    "number_guessing": "roll/NumberGuessing-v0",
    "reasoning_gym": "roll/ReasoningGym-v0",
    "sokoban": "roll/Sokoban-v0",
    "textarena": "roll/TextArena-v0",
}
NEEDED = {"reasoning_gym": {"dataset": "chain_sum"}, "textarena": {"game": "GuessTheNumber-v0"}}


def problem_of(env_type: str, **env_config) -> ConfigProblem:
    with pytest.raises(ConfigError) as caught:
        make_env(env_type, env_config)
    (problem,) = caught.value.problems
    return problem


def built_in_names() -> list[str]:
    needed = {name: each.requires for name, each in ENVIRONMENTS.built_in.items()}
    for own in ("math_tools", "agent", "dialogue", "openenv", "verifiers"):  # have tests of their own
        del needed[own]
    return sorted(name for name, modules in needed.items() if all(map(importlib.util.find_spec, modules)))


@pytest.mark.parametrize("name", built_in_names())
def test_a_built_in_environment_is_made_by_name_and_by_gymnasium(name):
    options = NEEDED.get(name, {})
    for env in (make_env(name, options), gymnasium.make(GYMNASIUM_IDS[name], **options)):
        observation = observation_from(*env.reset(seed=1))
        assert observation.messages[-1]["content"]
        env.close()
    assert check_env_type("x", name, options) == []


def test_gymnasium_finds_built_ins_by_module_and_id():
    env = gymnasium.make("roll.agentic.registry:roll/FrozenLake-v0", size=3)
    assert isinstance(env.unwrapped, FrozenLakeEnv)


def test_a_class_and_a_function_are_found_by_import_path():
    assert make_env(SAMPLES + "GoodEnv", {"length": "5"}).length == 5  # converted to the annotated type
    assert make_env(SAMPLES + "make_good", {"length": 4}).length == 4
    assert make_env(SAMPLES + "make_anything", {"a": 1, "action_format": "x"}).given == {"a": 1, "action_format": "x"}


def test_a_gymnasium_id_is_found_with_and_without_its_module():
    assert make_env("sample/Good-v0", {}).unwrapped.length == 2
    env = make_env("tests.agentic.sample_envs:sample/Good-v0", {"length": 7, "max_episode_steps": 1})
    env.reset(seed=0)
    assert env.unwrapped.length == 7 and env.step("1")[3] is True
    assert isinstance(make_env("tests.agentic.sample_envs:SampleWalk-v0", {}).unwrapped, Walk)


def test_an_entry_point_is_found_by_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "other_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[roll.environments]\nother_game = other_package_games:Game\n")
    (tmp_path / "other_package_games.py").write_text(
        "from tests.agentic.sample_envs import GoodEnv\nclass Game(GoodEnv):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    env = make_env("other_game", {"length": 2})
    assert type(env).__name__ == "Game" and isinstance(env, GoodEnv)
    assert "did you mean `other_game`?" in problem_of("other_gane").remedy


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_games_here.py").write_text("from tests.agentic.sample_envs import GoodEnv as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(make_env("my_games_here:Mine", {}), GoodEnv)


def test_discrete_actions_are_wrapped_and_the_options_shared_out():
    env = make_env(SAMPLES + "Walk", {"width": 3, "action_format": "plain", "action_names": ["back", "on"]})
    assert isinstance(env, TextAdapter) and env.unwrapped.width == 3
    assert env.reset(seed=0)[0] == "[@].."
    assert env.step("on")[0] == ".[@]."
    assert env.unwrapped.taken == [4]


class Held(WalkWithoutText):
    closed = 0

    def close(self) -> None:
        Held.closed += 1


@pytest.mark.parametrize("env_config", [{}, {"render_mode": "ansi", "action_names": ["one"]}])
def test_an_environment_that_cannot_be_used_is_closed(env_config):
    before = Held.closed
    problem_of(f"{__name__}:Held", **env_config)
    assert Held.closed == before + 1


def test_an_error_when_it_is_closed_does_not_hide_why_an_environment_cannot_be_used(monkeypatch):
    def fail(self):
        raise AttributeError("no window was opened")

    expected = problem_of(f"{__name__}:Held")
    monkeypatch.setattr(Held, "close", fail)
    assert problem_of(f"{__name__}:Held") == expected


class OwnChoices(gymnasium.spaces.Discrete):
    pass


class WalkOfOwnChoices(Walk):
    action_space = OwnChoices(2, start=3)


def test_a_discrete_space_of_ones_own_is_discrete():
    assert isinstance(make_env(f"{__name__}:WalkOfOwnChoices", {}), TextAdapter)


@pytest.mark.parametrize(
    ("env_type", "env_config", "path", "message", "remedy"),
    [
        ("frozen_laek", {}, "env_type", "there is no environment `frozen_laek`", "did you mean `frozen_lake`?"),
        ("Taxi-v99", {}, "env_type", "there is no environment", "did you mean"),
        ("qqqqqq", {}, "env_type", "there is no environment", "known: `agent`, `dialogue`"),
        ("", {}, "env_type", "there is no environment", "package.module:Class"),
        ("no_such_package:Env", {}, "env_type", "no_such_package", "PYTHONPATH"),
        ("no_such_package:Env-v0", {}, "env_type", "no_such_package", "PYTHONPATH"),
        (SAMPLES + "Nothing", {}, "env_type", "has no 'Nothing'", "correct it"),
        (SAMPLES + "Nothing-v0", {}, "env_type", "there is no environment", "package.module:Class"),
        (SAMPLES + "NOT_CALLABLE", {}, "env_type", "is a int", "class or a function"),
        (SAMPLES + "make_nothing", {}, "env_type", "made a str", "gymnasium.Env"),
        (SAMPLES + "Steering", {}, "env_type", "takes actions that cannot be written as text", "wrap it"),
        (SAMPLES + "WalkWithoutText", {}, "env_type", "cannot be written as text", "ansi"),
        ("CartPole-v1", {"action_names": ["left"]}, "env_config.action_names", "1 names for 2 actions", "0, 1"),
        ("Pendulum-v1", {"action_names": ["left"]}, "env_config.action_names", "not discrete", "leave it out"),
        ("builtins:max", {}, "env_type", "cannot be read", "wrap it"),
        (SAMPLES + "GoodEnv", {"lenght": 3}, "env_config.lenght", "no argument `lenght`", "did you mean `length`?"),
        (SAMPLES + "GoodEnv", {"action_format": "plain"}, "env_config.action_format", "takes text already", "known"),
        (
            SAMPLES + "GoodEnv",
            {"length": "much"},
            "env_config.length",
            '"much" does not fit',
            "whole number",
        ),
        (SAMPLES + "GoodEnv", {"length": 0}, "env_config.length", "0 is too short", "at least 1"),
        (SAMPLES + "make_good", {}, "env_config.length", "needs `length`", "set `env_config.length`"),
        (SAMPLES + "make_good", {"length": 1, "zzz": 1}, "env_config.zzz", "no argument `zzz`", "`label`, `length`"),
        (SAMPLES + "Walk", {"action_names": ["x"]}, "env_config.action_names", "1 names for 2 actions", "3, 4"),
        ("frozen_lake", {"siez": 3}, "env_config.siez", "no argument `siez`", "did you mean `size`?"),
        ("frozen_lake", {"symbols": {"goal": "GG"}}, "env_config.symbols", "one visible character", "one character"),
        ("number_guessing", {"action_names": ["x"]}, "env_config.action_names", "no argument", "known"),
        ("reasoning_gym", {}, "env_config.dataset", "needs `dataset`", "set"),
        ("reasoning_gym", {"dataset": "chain_smu"}, "env_config.dataset", "no data set", "did you mean `chain_sum`?"),
        ("Taxi-v4", {"is_rany": 1}, "env_config.is_rany", "no argument", "did you mean `is_rainy`?"),
    ],
)
def test_a_wrong_name_or_option_is_named_with_its_path(env_type, env_config, path, message, remedy):
    problem = problem_of(env_type, **env_config)
    assert problem.path == path
    assert message in problem.message
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("env_type", "env_config", "path"),
    [
        ("roll/MathTools-v0", {"tools": ["calculatro"]}, "env_config.tools[0]"),
        pytest.param(
            "roll/ReasoningGym-v0",
            {"dataset": "chain_smu"},
            "env_config.dataset",
            marks=pytest.mark.needs("reasoning_gym"),
        ),
    ],
)
def test_what_gymnasium_makes_names_the_path_too(env_type, env_config, path):
    assert problem_of(env_type, **env_config).path == path


def test_an_action_space_that_says_nothing_may_take_text():
    env = make_env(SAMPLES + "AnyActions", {"length": 2})
    env.reset(seed=0)
    assert env.step("1")[4]["action_is_valid"] is True


def test_all_wrong_options_are_named_at_once_and_nothing_is_made():
    with pytest.raises(ConfigError) as caught:
        make_env(SAMPLES + "SlowToMake", {"a": 1, "b": 2})
    assert [problem.path for problem in caught.value.problems] == ["env_config.a", "env_config.b"]


def test_the_preflight_names_the_tag():
    (problem,) = check_env_type("lake", "frozen_lake", {"size": 1})
    assert problem.path == "custom_envs.lake.env_config.size"
    (problem,) = check_env_type("lake", "frozen_laek", {})
    assert problem.path == "custom_envs.lake.env_type"
    (problem,) = check_env_type("pole", "CartPole-v1", {"action_format": "xml"})
    assert problem.path == "custom_envs.pole.env_config.action_format"


def test_the_preflight_makes_no_environment_of_others():
    assert check_env_type("slow", SAMPLES + "SlowToMake", {}) == []


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = problem_of("textarena", game="GuessTheNumber-v0")
    assert problem.path == "env_type" and problem.remedy == install_command("textarena")
