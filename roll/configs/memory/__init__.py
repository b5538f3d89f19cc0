"""How much memory a run will need on each device, by arithmetic alone: no model is loaded, no GPU asked.

`estimate_memory` judges a configuration that passed `check_config`; `render` prints it line by line, each with its
arithmetic. What each line means, worked out for a 7B model, is in `docs/memory.md`; how far the estimate is from what
was measured, in `benchmarks/README.md`.
"""

from roll.configs.memory.estimate import MemoryEstimate, estimate_memory
from roll.configs.memory.shapes import ModelShape, ShapeUnknown, find_shape
from roll.configs.memory.text import render

__all__ = ["MemoryEstimate", "ModelShape", "ShapeUnknown", "estimate_memory", "find_shape", "render"]
