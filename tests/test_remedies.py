"""No remedy leads to somebody else's package: every text of the package that tells to install something is read."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from roll.distribution import EXTRAS, NAME, PACKAGES, install_command
from tests.docs.commands import foreign_package

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS_OF_THE_PROJECT = PROJECT["tool"]["setuptools"]["dynamic"]["optional-dependencies"]
MADE_HERE = ROOT / "roll" / "distribution.py"


def advice(source: str) -> list[str]:
    """What the texts of a module tell to install, word by word."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    commands = [
        each for text in texts if isinstance(text, str) for each in re.findall(r"pip install ([^,;`\n]+)", text)
    ]
    return [word for command in commands for word in re.sub(r" or .*", "", command).split()]


def wrong(words: list[str]) -> list[str]:
    packages = [word.strip("\"'") for word in words if not word.startswith("-")]
    return [reason for word in packages if (reason := foreign_package(word))]


def test_every_text_names_packages_of_ours_only():
    modules = [path for path in (ROOT / "roll").rglob("*.py") if path != MADE_HERE]
    found = {path: reasons for path in modules if (reasons := wrong(advice(path.read_text(encoding="utf-8"))))}
    assert found == {}


@pytest.mark.parametrize("text", ['"pip install roll"', "\"pip install 'roll[wandb]'\"", '"x: pip install reqests"'])
def test_another_package_is_found(text):
    assert len(wrong(advice(f"remedy = {text}"))) == 1


@pytest.mark.parametrize("module", EXTRAS)
def test_a_remedy_is_right_from_a_checkout_and_from_a_wheel(module, tmp_path):
    option, listed = shlex.split(install_command(module))[2:]
    assert option == "-r" and Path(listed).is_file() and Path(listed).parent == ROOT / "requirements"
    (own,) = shlex.split(install_command(module, checkout=tmp_path))[2:]
    name, extra = re.fullmatch(r"([\w-]+)\[(\w+)\]", own).groups()
    assert name == NAME == PROJECT["project"]["name"] != "roll" and extra in EXTRAS_OF_THE_PROJECT


def test_every_list_of_an_optional_part_is_an_extra_and_every_extra_has_its_list():
    lists = {path.stem for path in (ROOT / "requirements").glob("*.txt")}
    not_for_users = {"base", "cpu", "test-all", "vllm-cpu", "check"}
    assert lists - not_for_users == set(EXTRAS_OF_THE_PROJECT)
    assert set(EXTRAS.values()) <= set(EXTRAS_OF_THE_PROJECT)
    for files in EXTRAS_OF_THE_PROJECT.values():
        assert all((ROOT / file).is_file() for file in files["file"])


def test_what_no_extra_brings_comes_with_the_package():
    base = (ROOT / "requirements" / "base.txt").read_text()
    assert all(re.search(rf"^{package}\b", base, re.MULTILINE) for package in PACKAGES.values())
