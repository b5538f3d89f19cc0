"""What a verifier is given, what it answers, and the ways it can let a run down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardInput:
    """One response to be judged."""

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

    def fields(self) -> dict[str, Any]:
        """The values by the names under which a verifier's parameters ask for them (see `VERIFIER_FIELDS`)."""
        return {
            "prompt": self.prompt_text,
            "response": self.response_text,
            "ground_truth": self.ground_truth,
            "domain": self.domain,
            "metadata": self.metadata,
            "finish_reason": self.finish_reason,
            "prompt_id": self.prompt_id,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "messages": self.messages,
        }


VERIFIER_FIELDS = tuple(RewardInput("", "", "").fields())
"""Names a verifier's parameters may have to be filled from the response under judgement."""


@dataclass(frozen=True)
class RewardOutput:
    """A judgement: the raw score, and whatever else the verifier measured."""

    score: float
    metrics: dict[str, float] = field(default_factory=dict)


class PreparedVerifier:
    """A verifier that is an object, made once in each process: of `verifier_args`, and of the reward's
    `timeout_seconds` where its constructor has a parameter of that name. It raises `ValueError` for arguments that do
    not fit together. Its calls take fields of the response only, as those of a function do (see `VERIFIER_FIELDS`).
    """

    max_concurrency: int | None = None
    """Responses judged at a time over all processes; ``None``: as many as the processes take."""

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Raise `ValueError` for one that nothing can be judged against. Before a run, each prompt's is shown here."""

    def check_machine(self) -> None:
        """Raise `VerifierUnavailable` if it cannot judge here. Called before a run on the machine that starts it."""


class VerifierUnavailable(RuntimeError):
    """A verifier cannot judge on this machine, whatever it is given. The message says what would have to change."""


class RewardNonsense(ValueError):
    """A verifier answered something that is no score. The message names the verifier and the value."""


class RewardGaveUp(RuntimeError):
    """A verifier has tried again by itself as often as it was told to. The pool does not try once more."""


class RewardFailed(RuntimeError):
    """A response could not be judged, after all retries. The message names reward, prompt and cause."""
