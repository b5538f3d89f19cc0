"""The run directory is new, claimed, and never written over."""

import os
import subprocess
import sys
from datetime import datetime

import pytest

from roll.tracking.files import write_atomically
from roll.tracking.run_directory import RunDirectory, RunExists, RunUnusable
from tests.unprivileged import obeying_permissions

NOON = datetime(2025, 3, 4, 12, 0, 5)


def test_default_folder_is_named_by_experiment_and_time_and_latest_leads_to_it(tmp_path):
    run = RunDirectory.create(None, "addition", now=NOON, base=tmp_path)
    assert run.root == tmp_path / "addition" / "2025-03-04_12-00-05"
    assert (tmp_path / "addition" / "latest").resolve() == run.root.resolve()
    assert run.checkpoints.is_dir() and run.logs.is_dir() and run.metrics.is_file()


def test_two_runs_in_one_second_get_two_folders_and_latest_is_the_newer(tmp_path):
    first, second = (RunDirectory.create(None, "addition", now=NOON, base=tmp_path) for _ in range(2))
    assert first.root != second.root
    assert (tmp_path / "addition" / "latest").resolve() == second.root.resolve()


def test_a_folder_that_holds_a_run_is_refused_with_a_remedy_and_left_as_it_is(tmp_path):
    run = RunDirectory.create(str(tmp_path / "mine"), "addition")
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(RunExists, match="Choose another output_dir"):
        RunDirectory.create(str(tmp_path / "mine"), "addition")
    assert run.metrics.read_text() == '{"step": 1}\n'


def test_an_explicit_folder_with_other_files_is_used_without_a_latest_link(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run = RunDirectory.create(str(tmp_path), "addition")
    assert run.root == tmp_path
    assert not (tmp_path.parent / "latest").exists()


def test_a_real_folder_called_latest_is_left_alone_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "addition" / "latest" / "precious").mkdir(parents=True)
    run = RunDirectory.create(None, "addition", now=NOON, base=tmp_path)
    assert run.root.is_dir()
    assert (tmp_path / "addition" / "latest" / "precious").is_dir()
    assert "latest" in caplog.text
    assert sorted(os.listdir(tmp_path / "addition")) == ["2025-03-04_12-00-05", "latest"]


@pytest.mark.parametrize("name", ["../escape", "/absolute", "", "a/../../b"])
def test_an_experiment_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="exp_name"):
        RunDirectory.create(None, name, base=tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/run"):
        RunDirectory.create(str(tmp_path / "file" / "run"), "addition")
    with pytest.raises(OSError, match="file/addition"):
        RunDirectory.create(None, "addition", now=NOON, base=tmp_path / "file")


def test_atomic_write_replaces_everything_and_leaves_nothing_beside(tmp_path):
    target = tmp_path / "summary.json"
    write_atomically(target, "a long first text")
    write_atomically(target, "short")
    assert target.read_text() == "short"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_atomic_write_that_fails_keeps_the_old_file_and_names_it(tmp_path):
    target = tmp_path / "summary.json"
    target.mkdir()
    with pytest.raises(OSError, match="summary.json"):
        write_atomically(target, "text")
    assert os.listdir(tmp_path) == ["summary.json"]


def test_config_is_saved_as_given(tmp_path):
    run = RunDirectory.create(str(tmp_path), "addition")
    run.write_config("exp_name: addition\n")
    assert run.config.read_text() == "exp_name: addition\n"


def test_the_run_that_goes_on_is_the_named_or_the_latest_one(tmp_path):
    assert RunDirectory.latest("addition", base=tmp_path) is None
    first, second = (RunDirectory.create(None, "addition", now=NOON, base=tmp_path) for _ in range(2))
    assert RunDirectory.latest("addition", base=tmp_path).root == second.root.resolve()
    assert RunDirectory.existing(first.root).metrics == first.metrics
    with pytest.raises(FileNotFoundError, match="holds no run"):
        RunDirectory.existing(tmp_path)


def test_a_run_whose_folder_cannot_be_written_is_not_held(tmp_path):
    run = RunDirectory.create(str(tmp_path / "run"), "addition")
    run.root.chmod(0o555)
    with obeying_permissions(), pytest.raises(RunUnusable) as refusal, run.held():
        pass
    assert str(refusal.value) == f"cannot write to {run.root}: Permission denied"
    run.root.chmod(0o755)
    (run.root / ".lock").mkdir()
    with pytest.raises(RunUnusable, match="cannot write to .*run: Is a directory"), run.held():
        pass


def test_a_run_belongs_to_one_process_as_long_as_that_lives(tmp_path):
    run = RunDirectory.create(str(tmp_path), "addition")
    code = (
        "import sys, time; from pathlib import Path; from roll.tracking.run_directory import RunDirectory\n"
        f"with RunDirectory(Path({str(tmp_path)!r})).held():\n"
        "    print('held', flush=True); time.sleep(100)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunExists, match="another process works on the run"), run.held():
            pass
    finally:
        other.kill()
        other.wait()
    with run.held(), pytest.raises(RunExists), run.held():
        pass
    with run.held():
        pass
