"""Every kind of plug-in is found by a name, an import path and an entry point; nothing in `roll` is touched."""

from __future__ import annotations

import pickle
from typing import Annotated

import pytest
from pydantic import Field

from roll.agentic.manager import ENVIRONMENT_MANAGERS
from roll.agentic.registry import ENVIRONMENTS
from roll.agentic.tools.base import TOOLS
from roll.algorithms.advantages.base import ADVANTAGE_ESTIMATORS
from roll.algorithms.losses.base import POLICY_LOSSES
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.plugins import Kind, checked_arguments, parameters_of
from roll.configs.rewards import VERIFIERS
from roll.configs.run import TRACKERS
from roll.configs.strategies import ENGINES, FORWARD_STRATEGIES, SCORERS, TRAINERS
from roll.distribution import install_command
from roll.pipeline.stages import STAGES

KINDS = [
    ADVANTAGE_ESTIMATORS, ENGINES, ENVIRONMENTS, ENVIRONMENT_MANAGERS, FORWARD_STRATEGIES, POLICY_LOSSES, SCORERS,
    STAGES, TOOLS, TRACKERS, TRAINERS, VERIFIERS,
]  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that has a plug-in `dummy` of every kind, and one that is broken."""
    members = {member for kind in KINDS for member in kind.members}
    (tmp_path / "dummies.py").write_text(
        "from roll.engines.base import InferStrategy\nfrom roll.trainers.trainer import TrainStrategy\n\n"
        "class Dummy(InferStrategy, TrainStrategy):\n    "
        + "; ".join(f"{each} = None" for each in sorted(members))
        + "\n\nclass Nothing:\n    pass\n\nNUMBER = 3\n"
    )
    info = tmp_path / "dummies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dummies\nVersion: 1.0\n")
    groups = {kind.group for kind in KINDS}
    lines = "".join(f"[{group}]\ndummy = dummies:Dummy\nbroken = dummies:Missing\n" for group in groups)
    (info / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)


def problem_of(attempt) -> ConfigProblem:
    with pytest.raises(ConfigError) as caught:
        attempt()
    (problem,) = caught.value.problems
    return problem


@every_kind
def test_a_plug_in_from_outside_is_found_by_entry_point_and_by_import_path(kind: Kind, package):
    import dummies

    assert kind.load("dummy", "here") is dummies.Dummy is kind.load("dummies:Dummy", "here")
    assert {"dummy", *kind.built_in} <= set(kind.names())


def test_a_class_of_another_kind_is_refused(package):
    words = [
        (ENGINES, "`dummies:Nothing` is not a subclass of InferStrategy"),
        (TRAINERS, "`dummies:Nothing` is not a subclass of TrainStrategy"),
        (FORWARD_STRATEGIES, "`dummies:Nothing` is not a subclass of ForwardStrategy"),
        (ENVIRONMENTS, "`dummies:Nothing` is no environment: it has no `reset` and no `step` and no `close`"),
        (TRACKERS, "`dummies:Nothing` is no tracker: it has no `Options` and no `package`"),
    ]
    for kind, said in words:
        found = problem_of(lambda kind=kind: kind.load("dummies:Nothing", "here"))
        assert found.path == "here" and found.message.startswith(said)


@every_kind
def test_what_cannot_be_found_is_a_problem_with_its_path_and_a_remedy(kind: Kind, package):
    misspelt = problem_of(lambda: kind.find("dumy", "here"))
    assert (misspelt.path, misspelt.message) == ("here", f"there is no {kind.name} `dumy`")
    assert misspelt.remedy == f"did you mean `dummy`? Or use an import path `{kind.form}`"
    for name, reason in (
        ("broken", "has no 'Missing'"),
        ("dummies:Missing", "has no 'Missing'"),
        ("dummies:NUMBER", "is a int"),
        ("no_such_module:Thing", "cannot be imported"),
        (":Thing", "is not of the form"),
    ):
        problem = problem_of(lambda name=name: kind.load(name, "here"))
        assert problem.path == "here" and reason in problem.message and problem.remedy


@every_kind
def test_a_built_in_one_is_there_and_says_what_it_needs(kind: Kind, monkeypatch):
    """Those that need large packages are loaded by the tests of their own."""
    for name, record in kind.built_in.items():
        if not record.requires:
            assert callable(kind.load(name, "here"))
    monkeypatch.setattr("roll.configs.plugins.importlib.util.find_spec", lambda module: None)
    for name in (name for name, record in kind.built_in.items() if record.requires):
        assert "needs the module" in problem_of(lambda name=name: kind.load(name, "here")).message


def test_a_remedy_brings_the_package_and_not_one_that_is_named_as_its_module(monkeypatch):
    monkeypatch.setattr("roll.configs.plugins.importlib.util.find_spec", lambda module: None)
    trainers = ("deepspeed_train", "megatron_train")
    remedies = [problem_of(lambda name=name: TRAINERS.load(name, "here")).remedy for name in trainers]
    assert remedies == [install_command("deepspeed"), install_command("megatron")]
    agents = problem_of(lambda: ENVIRONMENT_MANAGERS.load("agent", "here"))
    assert "needs the module `aiohttp`" in agents.message and "requirements/agents.txt" in agents.remedy


def test_an_installed_package_cannot_take_a_built_in_name(package):
    assert "ppo" in POLICY_LOSSES.names() and POLICY_LOSSES.find("ppo", "here").path.startswith("roll.")


def settings(prompt, *, count: Annotated[int, Field(ge=1, description="How many.")], share: float = 0.5, **others):
    return count, share, others


def by_position(prompt, /, count=1):
    return count


def test_all_wrong_arguments_are_reported_at_once():
    def check(function, arguments, **how):
        return checked_arguments("it", parameters_of(function, "it", "here"), arguments, "args", **how)

    assert check(settings, {"count": "3", "extra": 1}, filled=("prompt",)) == {"count": 3, "extra": 1}
    with pytest.raises(ConfigError) as caught:
        check(settings, {"count": 0, "share": "much", "prompt": 1}, filled=("prompt",))
    assert [problem.path for problem in caught.value.problems] == ["args.count", "args.share", "args.prompt"]
    assert "whole number, >= 1" in caught.value.problems[0].remedy
    missing = problem_of(lambda: check(settings, {}, filled=("prompt",)))
    assert missing.path == "args.count" and "the run itself fills `prompt`" in missing.remedy
    assert (
        "true does not fit"
        in problem_of(lambda: check(settings, {"count": True}, filled=("prompt",), strict=True)).message
    )
    assert "by position only" in problem_of(lambda: check(by_position, {})).message


def test_an_error_of_a_configuration_survives_the_way_from_another_process():
    error = ConfigError([ConfigProblem("a.b", "is wrong", "correct it"), ConfigProblem("c", "too", "this as well")])
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems and str(again) == str(error)
