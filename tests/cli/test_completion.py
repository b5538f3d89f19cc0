"""`roll completion`: what a shell offers, asked of the shells that are here."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from roll.cli.completion import SHELLS, completed_keys, script
from roll.cli.main import _EPILOG, COMMANDS, main


def offered(words: list[str], folder: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in words)
    state = f"compopt() {{ :; }}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    ask = '_roll; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "--norc", "-c", f"{script('bash')}\n{state}\n{ask}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.split()


def test_bash_offers_commands_files_and_keys(tmp_path):
    (tmp_path / "run.yaml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "runs").mkdir()
    assert sorted(offered(["roll", "ch"], tmp_path)) == ["chat", "check", "check-agent", "check-env"]
    assert sorted(offered(["roll", "train", "r"], tmp_path)) == ["run.yaml", "runs/"]
    assert offered(["roll", "serve", "r"], tmp_path) == ["runs/"]
    assert offered(["roll", "check", "run.yaml", "--gpu"], tmp_path) == ["--gpu-memory"]
    assert offered(["roll", "train", "run.yaml", "actor_train.pg_variant="], tmp_path) == ["actor_train.pg_variant="]
    assert offered(["roll", "completion", "f"], tmp_path) == ["fish"]


@pytest.mark.parametrize("command", ["train", "check", "simulate", "advise", "check-agent"])
def test_fish_offers_files_and_keys_after_each_command_that_takes_both(command):
    kinds = ("__fish_complete_suffix .yaml", "max_steps=")
    lines = [line for line in script("fish").splitlines() if any(kind in line for kind in kinds)]
    assert len(lines) == len(kinds) and all(command in line.split("'")[1].split() for line in lines)


@pytest.mark.parametrize("command", ["advise", "doctor", "report", "serve", "chat"])
def test_fish_offers_folders_after_each_command_that_takes_one(command):
    (line,) = [line for line in script("fish").splitlines() if "__fish_complete_directories" in line]
    assert command in line.split("'")[1].split()


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_read_by_their_shells(shell, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    assert "max_steps=" in path.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(path)], check=True)


def test_keys_are_the_leaves_of_every_pipeline():
    keys = completed_keys()
    for key in ("cluster.device_memory_gib=", "train_env_manager.group_size=", "num_return_sequences_in_group="):
        assert key in keys
    assert "cluster=" not in keys and not any(key.startswith("actor_infer.data_args") for key in keys)


def test_every_command_is_in_the_help():
    assert all(f"roll {name} " in _EPILOG for name in COMMANDS)
