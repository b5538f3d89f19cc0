"""Input and output of verifiers, and the errors they may raise."""

from __future__ import annotations

import base64
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.pictures import png

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class RewardInput:
    """One response to judge."""

    prompt_id: str
    prompt_text: str
    response_text: str
    ground_truth: Any = None
    domain: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    """``stop``, ``length`` or ``abort``."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)
    """The prompt as a conversation."""
    image: Image | None = None
    """The image to judge; None for a text response."""
    pictures: list[np.ndarray] = field(default_factory=list)
    """The files of the prompt's pictures, uint8 ``[bytes]`` each; a verifier gets them decoded, as PIL images."""

    def fields(self) -> dict[str, Any]:
        """Return the values by the names of verifier parameters (see `VERIFIER_FIELDS`)."""
        values = dict(vars(self))
        return {"prompt": values.pop("prompt_text"), "response": values.pop("response_text"), **values}


VERIFIER_FIELDS = tuple(RewardInput("", "", "").fields())
"""Names of verifier parameters that are filled from the judged response."""


def png_base64(image: Image) -> str:
    """Return a picture as a PNG (RGB) in base64, the form in which services get it."""
    return base64.b64encode(png(image.convert("RGB"))).decode()


@dataclass(frozen=True)
class RewardOutput:
    """The raw score of a response, and other numbers that the verifier returned."""

    score: float
    metrics: dict[str, float] = field(default_factory=dict)


class PreparedVerifier:
    """Base class of verifiers with state. One object is created in each process.

    The constructor takes `verifier_args`, and the reward's `timeout_seconds` if it has a parameter of that name. It
    raises `ValueError` for arguments that do not fit together. `__call__` takes only fields of the response (see
    `VERIFIER_FIELDS`).
    """

    max_concurrency: int | None = None
    """Largest number of responses judged at a time in all processes together; None: no limit besides the processes."""
    secrets: tuple[str, ...] = ()
    """Environment variables that its processes need."""
    numbers: tuple[str, ...] | None = None
    """Names of the numbers that it always returns; None: not known before a run."""

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Raise `ValueError` for an unusable ground truth. Called for each prompt before a run."""

    def check_machine(self) -> Collection[str] | None:
        """Raise `VerifierUnavailable` if it cannot work here: a machine without what it needs, or a service that does
        not answer. Called before a run, on the starting machine. Returns the names of the numbers that a service
        answered with, if it was asked for a score."""
        return None

    def load(self) -> None:
        """Load models that the verifier needs. Called in each process as it starts, without a time limit."""


class VerifierUnavailable(RuntimeError):
    """A verifier cannot work on this machine. The message says what has to change."""


class RewardNonsense(ValueError):
    """A verifier returned something that is not a score. The message names the verifier and the value."""


class RewardGaveUp(RuntimeError):
    """A verifier failed after its own retries. The pool does not retry again."""


class RewardFailed(RuntimeError):
    """A response could not be judged after all retries. The message names reward, prompt and cause."""
