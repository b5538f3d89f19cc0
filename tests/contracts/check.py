"""Whether another release of a library still has what `roll` uses of it: fetches the wheels, unpacks their sources
into a folder, installs nothing, and runs the contracts on them.

python -m tests.contracts.check [--keep FOLDER] vllm==0.33.0 sglang==0.5.24    (or: make contracts VLLM=0.33.0)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.contracts.sources import VARIABLE

CONTRACTS = ["tests/contracts"]
SGLANG = [f"tests/engines/test_sglang_{part}.py" for part in ("interface", "messages", "options", "engine")]
"""The stand-in for SGLang's server demands what the release demands."""


def fetch(requirement: str, folder: Path) -> None:
    """Unpack the Python sources of a release into the folder. Raises ``CalledProcessError`` if there is none."""
    with TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--dest", downloads, requirement], check=True)
        for archive in Path(downloads).iterdir():
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
            else:
                with tarfile.open(archive) as source:
                    source.extractall(downloads, filter="data")
                for package in Path(downloads).glob("*/*/__init__.py"):
                    package.parent.rename(folder / package.parent.name)


def main() -> int:
    """Return the exit status of the tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.contracts.check", description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", help="vllm==<version>, sglang==..., megatron-core==..., deepspeed==...")
    parser.add_argument("--keep", type=Path, help="only unpack the sources, into this folder")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for release in arguments.releases:
            fetch(release, folder)
        if arguments.keep:
            return 0
        has_sglang = any(release.startswith("sglang") for release in arguments.releases)
        files = CONTRACTS + (SGLANG if has_sglang or not arguments.releases else [])
        chosen = {VARIABLE: str(folder)} if arguments.releases else {}
        return subprocess.run([sys.executable, "-m", "pytest", "-q", *files], env=os.environ | chosen).returncode


if __name__ == "__main__":
    sys.exit(main())
