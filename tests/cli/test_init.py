"""`roll init`: what it writes passes `roll check`; what cannot work is named and not left behind."""

from __future__ import annotations

import pytest

from roll.cli.init import QUESTIONS, main
from roll.cli.main import main as roll
from roll.configs.loader import load_config
from tests.pipeline.tiny import make_task


def test_the_defaults_make_a_run_that_passes_check(tmp_path, capsys):
    path = str(tmp_path / "runs" / "mine.yaml")
    assert roll(["init", path, "--yes"]) == 0
    assert "still needed" in capsys.readouterr().out
    assert roll(["check", path]) == 0
    config = load_config(path)
    assert config.exp_name == "mine" and config.async_generation_ratio == 0
    assert config.actor_train.data_args.template == "chat"


def test_flags_are_taken_and_the_rest_is_asked_for(tmp_path):
    make_task(tmp_path)
    asked = []

    def answer(text):
        asked.append(text)
        return {"domain": "addition"}.get(text.partition(" ")[0], "")

    path = str(tmp_path / "mine.yaml")
    flags = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "train.jsonl"), "--device", "cpu"]
    assert main([path, *flags, "--verifier", "exact", "--devices", "4", "--async"], answer) == 0
    assert len(asked) == len(QUESTIONS) - 5
    config = load_config(path)
    assert (config.actor_train.device_mapping, config.actor_infer.device_mapping) == ("0-1", "2-3")
    assert (config.prompt_length, config.response_length) == (21, 43), "the model has 64 positions"
    assert config.async_generation_ratio == 1 and config.rewards["addition"].tag_included == ["addition"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--devices", "none"], "num_devices_per_node"),
        (["--devices", "²"], "num_devices_per_node"),
        (["--devices", "1", "--async"], "actor_infer.device_mapping"),
        (["--verifier", "guess"], "rewards.math.verifier"),
        (["--device", "tpu"], "cluster.device"),
    ],
)
def test_answers_that_cannot_work_are_named_and_leave_no_file(flags, words, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    assert main([str(path), *flags, "--yes"]) == 2
    assert not path.exists() and words in capsys.readouterr().err


def test_odd_answers_stay_what_they_are(tmp_path):
    path, odd = tmp_path / "mine.yaml", 'a "model": [é'
    assert main([str(path), "--model", odd, "--yes"]) == 0
    assert load_config(path).pretrain == odd


@pytest.mark.parametrize("name", ["1.yaml", "null.yaml", "[x].yaml", "my run: 1.yaml", "é #2.yaml"])
def test_any_file_name_is_the_runs_name(name, tmp_path):
    assert main([str(tmp_path / name), "--yes"]) == 0
    assert load_config(tmp_path / name).exp_name == name.removesuffix(".yaml")


def test_a_verifier_of_ones_own_that_is_not_there_yet_is_named(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    assert main([str(path), "--yes", "--verifier", "not_there:judge"]) == 0
    assert "still needed: rewards.math.verifier: module 'not_there' cannot be imported" in capsys.readouterr().out
    assert path.exists()


def test_ctrl_c_at_a_question_writes_nothing(tmp_path, capsys):
    def interrupted(text):
        raise KeyboardInterrupt

    assert main([str(tmp_path / "mine.yaml")], interrupted) == 1
    assert list(tmp_path.iterdir()) == [] and "nothing was written" in capsys.readouterr().err


def test_ctrl_c_while_it_is_checked_leaves_no_file(tmp_path, capsys, monkeypatch):
    def interrupted(config):
        assert (tmp_path / "mine.yaml").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("roll.cli.init.check_elsewhere", interrupted)
    assert main([str(tmp_path / "mine.yaml"), "--yes"]) == 1
    assert list(tmp_path.iterdir()) == [] and "nothing was written" in capsys.readouterr().err


def test_a_file_that_is_there_is_left_alone(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert main([str(path), "--yes"]) == 1
    assert path.read_text() == "mine" and "there already" in capsys.readouterr().err


def test_nobody_who_answers_is_no_traceback(tmp_path, capsys):
    def gone(text):
        raise EOFError

    assert main([str(tmp_path / "mine.yaml")], gone) == 2
    assert "--yes" in capsys.readouterr().err
