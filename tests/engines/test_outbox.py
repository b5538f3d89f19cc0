"""When results of ended requests leave an engine's process."""

import asyncio

import pytest

from roll.engines.base import Completion, no_tokens
from roll.engines.worker import Outbox


def completion(name):
    nothing = no_tokens()
    return Completion(name, nothing.token_ids, nothing.logprobs, nothing.versions, "stop")


async def leave_at_once_and_later():
    outbox = Outbox()
    for number, patience in enumerate((0.0, 30.0, 0.0, 1e-6)):
        outbox.add(completion(f"r{number}"), patience)
    return [each.request_id for each in await outbox.collected(20.0)]


def test_results_leave_with_the_first_that_must():
    assert asyncio.run(leave_at_once_and_later()) == ["r0", "r1", "r2", "r3"]


def test_so_they_do_on_the_event_loop_of_a_worker():
    """Ray's workers use uvloop, whose handles are not those of asyncio."""
    uvloop = pytest.importorskip("uvloop")
    assert uvloop.run(leave_at_once_and_later()) == ["r0", "r1", "r2", "r3"]
