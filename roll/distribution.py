"""Name of the distribution, and the commands that install its optional dependencies.

The distribution is not called `roll`: on the package index that name belongs to another project. Every message that
tells a user to install something takes its command from here, so the command is right both in a checkout and for an
installed package.
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
"""Optional module -> the extra that installs it."""
PACKAGES = {"reasoning_gym": "reasoning-gym"}
"""Module of a required dependency that may have been uninstalled -> its package."""


def version() -> str:
    """Return the version of the installed distribution, or ``0+unknown`` if it is not installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return "0+unknown"


def install_command(module: str, extra: str | None = None, checkout: Path = Path(__file__).parents[1]) -> str:
    """Return the pip command that installs ``module``.

    In a checkout, the command uses the file in ``requirements/``; otherwise it uses the distribution's extra. ``extra``
    chooses among several extras that install the module. Raises `KeyError` for an unknown module.
    """
    if module in PACKAGES:
        return f"pip install {PACKAGES[module]}"
    extra = extra or EXTRAS[module]
    requirements = checkout / "requirements" / f"{extra}.txt"
    if requirements.is_file():
        return f"pip install -r {shlex.quote(str(requirements))}"
    return f'pip install "{NAME}[{extra}]"'
