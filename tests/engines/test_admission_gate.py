"""The door of an engine: in order, never more than there are places, no place lost."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from roll.engines.process_engine import AdmissionGate
from roll.rollout.clock import run_virtual
from tests.tiers import examples


def test_requests_enter_in_order_as_places_become_free():
    async def scenario():
        gate, entered = AdmissionGate(2), []

        async def visit(name):
            assert await gate.enter(name)
            entered.append(name)

        visits = [asyncio.create_task(visit(name)) for name in "abcd"]
        await asyncio.sleep(1)
        assert (entered, gate.waiting) == (["a", "b"], 2)
        gate.leave()
        await asyncio.sleep(1)
        assert entered == ["a", "b", "c"]
        gate.leave()
        await asyncio.gather(*visits)

    run_virtual(scenario())


def test_nobody_enters_a_shut_gate_and_everyone_when_it_opens():
    async def scenario():
        gate = AdmissionGate(3)
        gate.shut()
        visits = [asyncio.create_task(gate.enter(name)) for name in "ab"]
        await asyncio.sleep(1)
        assert not any(visit.done() for visit in visits)
        gate.open()
        assert await asyncio.gather(*visits) == [True, True]

    run_virtual(scenario())


def test_turning_away_those_who_have_given_up_turns_the_others_away_too():
    async def scenario():
        gate = AdmissionGate(1)
        assert await gate.enter("a")
        visits = {name: asyncio.create_task(gate.enter(name)) for name in "bc"}
        await asyncio.sleep(0)
        visits["b"].cancel()
        gate.turn_away({"b", "c"})
        assert await visits["c"] is False
        await asyncio.wait([visits["b"]])
        gate.leave()
        assert await gate.enter("d")

    run_virtual(scenario())


def test_one_that_had_a_place_enters_before_the_others():
    async def scenario():
        gate = AdmissionGate(1)
        gate.shut()
        order = []
        for name, first in (("a", False), ("b", False), ("c", True)):

            async def visit(name=name, first=first):
                await gate.enter(name, first=first)
                order.append(name)
                gate.leave()

            asyncio.ensure_future(visit())
        await asyncio.sleep(0)
        gate.open()
        await asyncio.sleep(1)
        assert order == ["c", "a", "b"]

    run_virtual(scenario())


def test_those_turned_away_hold_no_place():
    async def scenario():
        gate = AdmissionGate(1)
        assert await gate.enter("a")
        visits = {name: asyncio.create_task(gate.enter(name)) for name in "bcd"}
        await asyncio.sleep(0)
        gate.turn_away({"b", "x"})
        assert await visits["b"] is False
        gate.leave()
        assert await visits["c"] is True
        gate.turn_away({"d"})
        assert await visits["d"] is False
        gate.leave()
        assert await gate.enter("e")

    run_virtual(scenario())


@settings(max_examples=examples(60))
@given(
    places=st.integers(1, 3),
    visits=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 12)), max_size=20),
    shut=st.tuples(st.integers(0, 10), st.integers(0, 10)),
)
def test_no_place_is_lost_or_given_twice_whoever_is_cancelled_when(places, visits, shut):
    """Each visitor comes at a time, stays for a time, and is cancelled at a time of its own."""

    async def scenario():
        gate, inside = AdmissionGate(places), []

        async def visit(name, arrival, stay):
            await asyncio.sleep(arrival)
            assert await gate.enter(name)
            inside.append(name)
            assert len(inside) <= places
            try:
                await asyncio.sleep(stay)
            finally:
                inside.remove(name)
                gate.leave()

        async def close_for_a_while():
            await asyncio.sleep(shut[0])
            gate.shut()
            await asyncio.sleep(shut[1])
            gate.open()

        tasks = [asyncio.create_task(close_for_a_while())]
        for index, (arrival, stay, patience) in enumerate(visits):
            task = asyncio.create_task(visit(str(index), arrival, stay))
            asyncio.get_running_loop().call_later(patience, task.cancel)
            tasks.append(task)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError)
        async with asyncio.timeout(1):
            assert all([await gate.enter(f"late {index}") for index in range(places)])

    run_virtual(scenario())
