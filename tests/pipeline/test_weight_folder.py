"""Published weights of a process that was killed do not stay, and nobody else's are touched."""

from __future__ import annotations

import shutil

import pytest

from roll.tracking.run_directory import RunDirectory
from roll.weights.transports import claim_weight_folder, clear_weight_folder


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(str(tmp_path / "run"), "addition")


def publish(folder, version=6):
    """As a process that is killed while it writes the next version."""
    (folder / f"version-{version:06d}").mkdir(parents=True)
    (folder / f"version-{version:06d}" / "bucket-00000.safetensors").write_bytes(b"weights")
    (folder / f".version-{version + 1:06d}.unfinished").mkdir()


def test_each_process_of_a_run_begins_with_a_folder_of_its_own_and_the_last_ones_are_gone(run):
    first = claim_weight_folder(run, None, "addition")
    publish(first)
    second = claim_weight_folder(run, None, "addition")
    assert first != second and first.parent == second.parent == run.weights.absolute()
    assert not run.weights.exists(), "what the first one published"
    publish(second)
    clear_weight_folder(run)
    assert not run.weights.exists()


def test_under_a_shared_folder_what_this_run_left_is_deleted_whatever_its_configuration_says_now(run, tmp_path):
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    neighbour = RunDirectory.create(str(tmp_path / "neighbour"), "addition")
    others = claim_weight_folder(neighbour, str(shared), "math/7B")
    publish(others)
    for label, folder in (("math/7B", shared), ("math/8B", shared), ("math/8B", elsewhere)):
        mine = claim_weight_folder(run, str(folder), label)
        assert mine.parent == folder.absolute() and label.replace("/", "-") in mine.name
        publish(mine)
        assert [path for place in (shared, elsewhere) for path in place.glob("*") if path != others] == [mine]
    clear_weight_folder(run)
    assert list(shared.iterdir()) == [others] and list(elsewhere.iterdir()) == []
    assert not run.weights_note.exists()


def test_a_copy_of_a_run_leaves_the_weights_of_the_original_alone(run, tmp_path):
    original = claim_weight_folder(run, str(tmp_path / "shared"), "addition")
    publish(original)
    shutil.copytree(run.root, tmp_path / "copy")
    claim_weight_folder(RunDirectory(tmp_path / "copy"), str(tmp_path / "shared"), "addition")
    assert len(list(original.iterdir())) == 2


def test_only_published_weights_are_deleted_in_a_folder_that_a_note_names(run, tmp_path, caplog):
    mine = claim_weight_folder(run, str(tmp_path / "shared"), "addition")
    publish(mine)
    (mine / "notes.txt").write_text("somebody's")
    clear_weight_folder(run)
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
    assert str(mine) in caplog.text
    run.weights_note.write_text('{"run": 1')
    claim_weight_folder(run, None, "addition")
    assert "damaged" in caplog.text
