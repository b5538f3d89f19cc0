"""All ranks get the calls in which they meet in the same order, whoever makes them; others need not wait."""

import asyncio
import threading

import numpy as np
import pytest

from roll.trainers.worker import TrainerGroup
from tests.trainers.tiny_models import make_batch


class Ranks:
    """Answers when it is told to, and remembers what is being computed."""

    def __init__(self):
        self.running: list[str] = []
        self.go_on = asyncio.Event()
        self.workers = [self]

    async def call(self, method, *args, timeout=None):
        return (await self.call_all(method, *args))[0]

    async def call_all(self, method, *args, timeout=None):
        self.running.append(method)
        await self.go_on.wait()
        self.running.remove(method)
        return [None]


def test_calls_in_which_ranks_meet_go_out_one_after_the_other_and_what_is_beside_training_does_not_wait():
    async def scenario():
        ranks = Ranks()
        group = TrainerGroup(ranks, start_timeout_seconds=1, call_timeout_seconds=1)
        async with asyncio.TaskGroup() as tasks:
            for call in (group.export("here"), group.gather(1, 0, "float32", 8), group.written()):
                tasks.create_task(call)
            tasks.create_task(group.push(1, None))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert ranks.running == ["export", "written", "offer"]
            ranks.go_on.set()
        assert ranks.running == []

    asyncio.run(scenario())


class Rank:
    """The first rank, whose push fails as it does when its engine dies."""

    def __init__(self, group):
        self.group = group

    async def call(self, method, *args, timeout=None):
        self.group.calls.append((method, *args))
        raise OSError("the engine died")

    def tell(self, method, *args):
        self.group.calls.append((method, *args))


class TwoRanks:
    def __init__(self):
        self.calls = []
        self.workers = [Rank(self), None]

    async def call_all(self, method, *args, timeout=None):
        self.calls.append((method, *args))
        return [["handles of rank 0"], ["handles of rank 1"]]


def test_one_rank_pushes_with_what_all_offer_and_no_other_waits_for_an_engine_that_dies():
    async def scenario():
        ranks = TwoRanks()
        group = TrainerGroup(ranks, start_timeout_seconds=1, call_timeout_seconds=1)
        with pytest.raises(OSError, match="the engine died"):
            await group.push(3, "engine")
        group.disconnect("engine")
        assert ranks.calls == [
            ("offer", 3),
            ("push", 3, "engine", [["handles of rank 0"], ["handles of rank 1"]]),
            ("disconnect", "engine"),
        ]

    asyncio.run(scenario())


class Echo:
    """Answers with what it was given."""

    async def call_all(self, method, *args, timeout=None):
        return [args[0]]


def test_a_batch_is_sent_as_it_was_at_the_call_whatever_is_added_meanwhile(monkeypatch):
    added = threading.Event()

    def put(batch):
        assert added.wait(10)
        return sorted(batch.tokens) + sorted(batch.per_sample)

    async def scenario():
        monkeypatch.setattr("ray.put", put)
        batch = make_batch()
        names = sorted(batch.tokens)
        group = TrainerGroup(Echo(), start_timeout_seconds=1, call_timeout_seconds=1)
        call = asyncio.create_task(group.forward("values", batch))
        await asyncio.sleep(0)
        batch.tokens["values"] = batch.per_sample["baselines"] = np.zeros(0)
        added.set()
        assert (await call).tolist() == names

    asyncio.run(scenario())
