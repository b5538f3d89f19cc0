"""Rewards of pictures that the tests use."""

from __future__ import annotations

import numpy as np
from reward_functions import fail_sometimes


def redness(image) -> float:
    """How much more red than blue there is, from -1 to 1."""
    pixels = np.asarray(image, dtype=np.float64) / 255
    return float((pixels[..., 0] - pixels[..., 2]).mean())


def brightness(pictures, response) -> float:
    """How bright the first picture of the prompt is, from 0 to 1, and a tenth for each character of the response."""
    return float(np.asarray(pictures[0]).mean()) / 255 + 0.1 * len(response)


def sometimes_failing_redness(image, prompt_id) -> float:
    """`redness`, but one prompt in ten cannot be judged."""
    fail_sometimes(prompt_id)
    return redness(image)
