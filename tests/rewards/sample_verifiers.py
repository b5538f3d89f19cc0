"""Verifiers of all kinds, as a user might write them, well or badly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.rewards.base import PreparedVerifier, RewardOutput, VerifierUnavailable

if TYPE_CHECKING:
    from decimal import Decimal

NOT_A_FUNCTION = 3


def length(response: str) -> int:
    return len(response)


def everything(**fields: Any) -> dict[str, float]:
    return {"score": len(fields["response"]), "fields": len(fields), "scale": fields["scale"]}


def detailed(response: str, metadata: dict, *, scale: float = 1.0) -> dict[str, float]:
    return {"score": scale * len(response), "level": metadata["level"]}


def lazily_annotated(response: str, scale: Decimal) -> float:
    return float(scale)


def needs_more(response: str, groundtruth: str) -> float:
    return 0.0


def by_position(response, /) -> float:
    return 0.0


class MadeForEachResponse:
    def __init__(self, response):
        self.score = len(response)


class LengthOf(float):
    def __new__(cls, response):
        return super().__new__(cls, len(response))


class Verdict(RewardOutput):
    def __init__(self, response):
        super().__init__(len(response), {"letters": 1})


class Prepared(PreparedVerifier):
    """Made once; its calls take fields only."""

    def __init__(self, timeout_seconds: float, *, limit: int = 1) -> None:
        if limit > timeout_seconds:
            raise ValueError("`limit` is too long")
        self.max_concurrency = limit

    def __call__(self, response: str, ground_truth: str) -> float:
        return float(response == ground_truth)

    def check_ground_truth(self, ground_truth: Any) -> None:
        if not isinstance(ground_truth, str):
            raise ValueError("no text")

    def check_machine(self) -> None:
        raise VerifierUnavailable("no such machine")


def process_id(response: str) -> int:
    return os.getpid()


def imports_torch(response: str) -> bool:
    return "torch" in sys.modules


def answer(response: str, folder: str = "") -> Any:
    """Do what the response says. Counts its calls per response in `folder`."""
    if folder:
        with open(Path(folder) / response, "a") as calls:
            calls.write("x")
    if response.startswith("raise"):
        raise ArithmeticError("cannot judge this")
    if response == "loop":
        while True:
            pass
    if response == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(1000)
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "flaky" and len((Path(folder) / response).read_text()) < 3:
        raise ConnectionError("try again")
    return None if response == "none" else 1.0


async def wait_then_answer(response: str, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return float(response)


async def async_answer(response: str) -> float:
    if response == "never":
        await asyncio.Event().wait()
    if response == "block":
        time.sleep(1000)
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "raise":
        raise ArithmeticError("cannot judge this")
    await asyncio.sleep(0.01)
    return 1.0
