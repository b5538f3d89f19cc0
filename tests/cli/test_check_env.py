"""`roll check-env`: exit codes, and what is said."""

from __future__ import annotations

import pytest

from roll.cli.main import main
from tests.pipeline.tiny import make_task, write_config

LAKE = {"env_type": "frozen_lake", "env_config": {"size": 3}}


@pytest.fixture
def config(tmp_path):
    make_task(tmp_path)
    tree = {"pipeline": "agentic", "pretrain": str(tmp_path / "model"), "custom_envs": {"lake": LAKE}}
    return str(write_config(tmp_path, tree, "run.yaml"))


def test_a_good_environment_passes(capsys):
    assert main(["check-env", "frozen_lake", "size=3", "--episodes", "2"]) == 0
    assert "keeps the interface" in capsys.readouterr().out


def test_a_tag_of_a_configuration_is_checked_with_its_options(config, capsys):
    assert main(["check-env", "lake", "--config", config, "--episodes", "2"]) == 0
    assert main(["check-env", "lake", "--config", config, "size=1"]) != 0
    assert "size" in "".join(capsys.readouterr())


def test_a_bad_environment_fails_and_the_report_says_why(capsys):
    assert main(["check-env", "copy_games:Copy", "trouble=nonsense", "period=1", "--episodes", "2"]) == 1
    assert "the observation is 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frozen_lke"], "frozen_lake"),
        (["frozen_lake", "sizes=3"], "size"),
        (["frozen_lake", "big"], "key=value"),
        (["frozen_lake", "size=[3"], "command line, size:1:3: not valid YAML"),
        (["frozen_lake", "map=${"], "command line: "),
        (["agent", "command=[sh]"], "by HTTP"),
        (["frozen_lake", "--episodes", "0"], "--episodes"),
        (["frozen_lake", "--seed", "-1"], "--seed"),
        (["frozen_lake", "--deadline", "0"], "--deadline"),
        (["frozen_lake", "--deadline", "nan"], "--deadline"),
    ],
)
def test_what_cannot_be_checked_is_a_configuration_error(arguments, words, capsys):
    assert main(["check-env", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_tag_and_another_pipeline_are_said(config, tmp_path, capsys):
    assert main(["check-env", "lak", "--config", config]) == 2
    assert "`lake`" in capsys.readouterr().err
    other = write_config(tmp_path, {"pipeline": "rlvr"}, "rlvr.yaml")
    assert main(["check-env", "lake", "--config", str(other)]) == 2
    assert "agentic" in capsys.readouterr().err
