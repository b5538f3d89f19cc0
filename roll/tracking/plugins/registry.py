"""Plug-in trackers by name. A new one is a file with a `PlugIn` class and one line here.

Classes are named, not imported, so an unused tracker costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

TENSORBOARD = "tensorboard"
"""Written by the driver itself, see `roll.tracking.trackers`."""
PLUG_INS = {
    "wandb": "roll.tracking.plugins.wandb_plugin:WandbPlugIn",
    "swanlab": "roll.tracking.plugins.swanlab_plugin:SwanlabPlugIn",
    "trackio": "roll.tracking.plugins.trackio_plugin:TrackioPlugIn",
}


def tracker_names() -> list[str]:
    """Return the names that `track_with` accepts."""
    return [TENSORBOARD, *PLUG_INS]


def plug_in_class(path: str) -> type[Any]:
    """Return the class at ``package.module:Class``, a `PlugIn`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
