"""Python imports this first where a test says so (`warm_workers.search_path`): a Ray that this process starts has warm
workers."""

import importlib
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class BeforeRayStarts(MetaPathFinder):
    """Sees that the code which starts Ray is imported; finds nothing itself."""

    def find_spec(self, name, path, target=None):
        if name == "ray._private.node":
            sys.meta_path.remove(self)
            constants = importlib.import_module("ray._private.ray_constants")
            constants.SETUP_WORKER_FILENAME = str(Path(__file__).parents[1] / "warm_workers.py")


sys.meta_path.insert(0, BeforeRayStarts())
