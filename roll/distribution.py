"""The name of this package where packages are installed from, and how its optional parts are installed.

That name is not the name of the import: on the package index, `roll` is a package of somebody else's. Every remedy
that tells a user to install something comes from here, so it is right from a checkout and from an installed package.
"""

from __future__ import annotations

import shlex
from importlib import metadata
from pathlib import Path

NAME = "roll-rl"
"""Name of the distribution, as in `pyproject.toml`."""
EXTRAS = {
    "aiohttp": "judge",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "diffusers": "image",
    "mcp": "mcp",
    "megatron": "megatron",
    "onnxruntime": "ocr",
    "openai": "agents",
    "peft": "lora",
    "rapidocr": "ocr",
    "sglang": "sglang",
    "swanlab": "swanlab",
    "textarena": "textarena",
    "trackio": "trackio",
    "verifiers": "verifiers",
    "vllm": "vllm",
    "wandb": "wandb",
    "websockets": "openenv",
}
"""Module that is not installed with `roll` -> the extra that brings it."""
PACKAGES = {"reasoning_gym": "reasoning-gym"}
"""Module of a package that is installed with `roll`, but may have been taken away -> the package."""


def version() -> str:
    """Return the version of the installed distribution; ``0+unknown`` if the package runs without being installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return "0+unknown"


def install_command(module: str, extra: str | None = None, checkout: Path = Path(__file__).parents[1]) -> str:
    """Return the command that installs a module: with the list of the checkout, else with the extra of the package.

    ``extra`` is the one to name, if more than one brings the module. pip takes it from the package that is installed.
    Raises `KeyError` for a module that is not known.
    """
    if module in PACKAGES:
        return f"pip install {PACKAGES[module]}"
    extra = extra or EXTRAS[module]
    requirements = checkout / "requirements" / f"{extra}.txt"
    if requirements.is_file():
        return f"pip install -r {shlex.quote(str(requirements))}"
    return f'pip install "{NAME}[{extra}]"'
