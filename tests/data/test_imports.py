"""A user's own code is found in the folder where the command is called, and does not hide what is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import roll
from roll.configs.plugins import import_object
from roll.runtime.process import DriverFolders, driver_folders

ROOT = Path(roll.__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder that is not on the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return tmp_path


def test_a_module_in_the_working_folder_is_found(folder):
    (folder / "parts_in_the_working_folder.py").write_text("class Part:\n    class Inner:\n        size = 3\n")
    assert import_object("parts_in_the_working_folder:Part.Inner.size") == 3


def test_what_is_installed_comes_before_the_working_folder(folder):
    (folder / "xxhash.py").write_text("xxh3_64 = 'not this one'\n")
    sys.modules.pop("xxhash", None)
    assert callable(import_object("xxhash:xxh3_64"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_colon", "is not of the form"),
        ("no_such_module_anywhere:Part", "ModuleNotFoundError"),
        ("broken_in_the_working_folder:Part", "ZeroDivisionError"),
        ("json:Part", "has no 'Part'"),
    ],
)
def test_what_cannot_be_imported_says_which_part(folder, path, reason):
    (folder / "broken_in_the_working_folder.py").write_text("1 / 0\n")
    with pytest.raises(ImportError, match=reason):
        import_object(path)


def test_workers_find_modules_and_files_where_the_driver_does(folder, tmp_path_factory, monkeypatch):
    """Names in the driver's order: what hides a module there hides it in workers. The folder itself hides nothing."""
    (folder / "beside.txt").write_text("here")
    (folder / "below").mkdir()
    monkeypatch.setattr(sys, "path", ["/of/the/user", "below", "a key of a path hook"])
    driver = driver_folders()
    assert driver.imports == ("/of/the/user", str(folder / "below"), "a key of a path hook", str(folder))
    monkeypatch.chdir(tmp_path_factory.mktemp("where Ray was started"))
    monkeypatch.setattr(sys, "path", ["/of/the/worker", "a key of a path hook", "/of/the/user"])
    driver.enter()
    assert Path("beside.txt").read_text() == "here"
    assert sys.path == [*driver.imports, "/of/the/worker"]


def test_an_import_of_another_thread_misses_no_folder_when_a_worker_begins(folder, monkeypatch):
    """A folder that is named twice is left out once, and all behind it move."""
    monkeypatch.setattr(sys, "path", ["/of/the/user", "/of/the/user", "/installed"])
    driver, searched = driver_folders(), iter(sys.path)
    assert [next(searched), next(searched)] == ["/of/the/user", "/of/the/user"]
    driver.enter()
    assert list(searched) == ["/installed"]


def test_a_folder_that_was_deleted_disturbs_nobody_who_needs_none(folder, monkeypatch, caplog):
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", "/of/the/user"])
    gone.rmdir()
    assert import_object("json:loads") is json.loads
    driver = driver_folders()
    assert driver == DriverFolders(None, ("/of/the/user",))
    assert "the working folder has been deleted" in caplog.text
    monkeypatch.chdir(folder)
    driver.enter()
    assert Path.cwd() == folder


def test_a_worker_on_a_host_without_the_drivers_folder_stays_where_it_is(folder):
    DriverFolders(str(folder / "elsewhere"), ("/of/the/user",)).enter()
    assert (Path.cwd(), sys.path[0]) == (folder, "/of/the/user")


PARTS = """\
from roll.trainers.worker import TrainWorker


async def own_stage(run, batch):
    return batch


class OwnTrainer(TrainWorker):
    pass


def own_reward(response, ground_truth):
    return float(response == ground_truth)
"""


def roll_check(folder: Path) -> subprocess.CompletedProcess[str]:
    """`roll check run.yaml` in a folder, as the console command runs: with neither the folder nor the script's on the
    import path (`-P`)."""
    command = "import sys; from roll.cli.main import main; sys.exit(main(['check', 'run.yaml']))"
    return subprocess.run(
        [sys.executable, "-P", "-c", command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.tier("all")
def test_stages_workers_and_verifiers_beside_the_configuration_are_found_by_the_command(tmp_path):
    (tmp_path / "my_parts.py").write_text(PARTS)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2", "domain": "sums"}) + "\n")
    config = {
        "pretrain": "some/model",
        "cluster": {"device": "cpu", "num_devices_per_node": 2},
        "stages": {"advantage": "my_parts:own_stage"},
        "actor_train": {
            "device_mapping": [0],
            "worker_cls": "my_parts:OwnTrainer",
            "data_args": {"file_name": "train.jsonl"},
        },
        "actor_infer": {"device_mapping": [1]},
        "rewards": {"sums": {"verifier": "my_parts:own_reward"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    checked = roll_check(tmp_path)
    assert checked.returncode == 0, checked.stderr
    (tmp_path / "my_parts.py").rename(tmp_path / "elsewhere.py")
    missing = roll_check(tmp_path)
    assert missing.returncode == 2
    for path in ("stages.advantage", "actor_train.worker_cls", "rewards.sums.verifier"):
        assert f"{path}: module 'my_parts' cannot be imported" in missing.stderr
