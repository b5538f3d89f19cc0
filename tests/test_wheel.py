"""The package as a wheel: built from a copy, installed apart, and used from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.tier("all")
ASKED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import roll
from importlib import metadata
from roll.distribution import NAME, install_command
facts = metadata.metadata(NAME)
print(json.dumps({
    "file": roll.__file__, "version": roll.__version__, "extras": facts.get_all("Provides-Extra"),
    "requires": metadata.requires(NAME), "remedy": install_command("vllm"), "torch": "torch" in sys.modules,
}))
"""


def run(*command: str, cwd: Path) -> str:
    """Its output; the checkout is not on its path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of(package: Path) -> set[Path]:
    found = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    return {path for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Folder with the installed wheel, and its command in ``bin``."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in ("roll", "requirements"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels), ".", cwd=source)
    (wheel,) = wheels.glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=source)
    return site


def test_it_holds_every_file_of_the_package(installed):
    assert files_of(installed / "roll") == files_of(ROOT / "roll")


def test_it_is_imported_from_where_it_is_and_names_itself(installed, tmp_path):
    told = json.loads(run(sys.executable, "-c", ASKED, str(installed), cwd=tmp_path))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert Path(told["file"]).is_relative_to(installed) and not told["torch"]
    assert told["version"] == project["project"]["version"]
    assert set(told["extras"]) == set(project["tool"]["setuptools"]["dynamic"]["optional-dependencies"])
    assert any(each.startswith("ray") and "extra" not in each for each in told["requires"])
    assert told["remedy"] == f'pip install "{project["project"]["name"]}[vllm]"'


def test_its_command_makes_a_configuration_and_checks_it(installed, tmp_path):
    command = ("-c", "import sys; sys.path.insert(0, sys.argv.pop(1)); from roll.cli.main import main; main()")
    said = run(sys.executable, *command, str(installed), "--help", cwd=tmp_path)
    assert "train" in said and "check" in said
    model = ROOT / "examples" / "qwen2.5-7B-rlvr_fsdp2" / "rlvr_config.yaml"
    plan = run(sys.executable, *command, str(installed), "check", str(model), cwd=tmp_path)
    assert "fsdp2_train, 4 ranks" in plan and "memory of one GPU of 80 GiB" in plan
    assert (installed / "bin" / "roll").is_file()
