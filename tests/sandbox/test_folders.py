from __future__ import annotations

import os

from roll.sandbox.filesystem import folder_bytes, remove_folder

LEVELS = 2100
"""So many that the path has more characters than the kernel takes."""


def deep(folder: str, levels: int) -> None:
    """Folders in folders, deeper than a path can name."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def test_what_is_in_a_folder_is_added_up(tmp_path):
    (tmp_path / "a").mkdir()
    empty = folder_bytes(str(tmp_path))
    (tmp_path / "a" / "file").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to("/usr")
    assert 100_000 <= folder_bytes(str(tmp_path)) - empty < 130_000


def test_what_cannot_be_added_up_is_too_much(tmp_path):
    deep(str(tmp_path), LEVELS)
    assert folder_bytes(str(tmp_path)) == float("inf")
    remove_folder(str(tmp_path))


def test_any_tree_is_removed_and_nothing_beside_it(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder = tmp_path / "folder"
    (folder / "shut" / "inner").mkdir(parents=True)
    (folder / "shut" / "inner" / "file").write_text("x")
    (folder / "link").symlink_to(outside)
    (folder / "shut" / "link").symlink_to("../..")
    (folder / "shut").chmod(0)
    deep(str(folder), LEVELS)
    remove_folder(str(folder))
    remove_folder(str(folder))
    assert not folder.exists() and (outside / "kept").read_text() == "kept"
