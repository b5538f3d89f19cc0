"""Routing is least-loaded and sticky, waits only until its deadline, and never leaks load."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from roll.rollout.clock import run_virtual
from roll.rollout.router import NoReplica, Router


def two_live(versions=(0, 0)):
    router = Router(["a", "b"])
    router.mark_live("a", versions[0])
    router.mark_live("b", versions[1])
    return router


@asynccontextmanager
async def leased(router: Router, **asked: Any) -> AsyncIterator[str]:
    """Hold a lease during a block, and yield the id of its replica."""
    lease = await router.acquire(**asked)
    try:
        yield lease.replica_id
    finally:
        router.release(lease)


def test_requests_go_to_the_least_loaded_replica_and_ties_to_the_first():
    async def main():
        router = two_live()
        leases = [await router.acquire(timeout=1) for _ in range(4)]
        assert [lease.replica_id for lease in leases] == ["a", "b", "a", "b"]
        router.release(leases[1])
        assert (await router.acquire(timeout=1)).replica_id == "b"
        assert router.state("a").load == 2

    run_virtual(main())


def test_an_episode_returns_to_its_replica_while_that_lives():
    async def main():
        router = two_live()
        async with leased(router, timeout=1, sticky_key="episode") as first:
            pass
        crowd = [await router.acquire(timeout=1, sticky_key=None) for _ in range(3)]
        async with leased(router, timeout=1, sticky_key="episode") as again:
            assert again == first == "a"
        router.mark_dead("a", "killed")
        async with leased(router, timeout=1, sticky_key="episode") as moved:
            assert moved == "b"
        router.mark_live("a", 0)
        async with leased(router, timeout=1, sticky_key="episode") as settled:
            assert settled == "b"
        router.forget("episode")
        async with leased(router, timeout=1, sticky_key="episode") as fresh:
            assert fresh == "a"
        assert len(crowd) == 3

    run_virtual(main())


def test_a_request_waits_for_a_replica_that_is_new_enough():
    async def main():
        router = two_live(versions=(3, 3))

        async def publish():
            await asyncio.sleep(5)
            router.set_version("b", 4)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish())
            async with leased(router, timeout=10, min_version=4) as replica_id:
                assert replica_id == "b"
                assert asyncio.get_running_loop().time() == pytest.approx(5)

    run_virtual(main())


def test_a_draining_replica_attracts_no_request_although_it_looks_idle():
    async def main():
        router = two_live()
        async with leased(router, timeout=1, sticky_key="episode") as first:
            assert first == "a"
        busy = [await router.acquire(timeout=1) for _ in range(3)]
        assert [lease.replica_id for lease in busy] == ["a", "b", "a"]
        router.release(busy[0])
        router.release(busy[2])
        with router.draining("a"):
            assert router.state("a").load < router.state("b").load
            for key in (None, "episode"):
                async with leased(router, timeout=1, sticky_key=key) as chosen:
                    assert chosen == "b"
        async with leased(router, timeout=1) as chosen:
            assert chosen == "a"

    run_virtual(main())


def test_a_draining_replica_takes_requests_where_no_other_can():
    async def main():
        router = two_live(versions=(0, 1))
        with router.draining("b"):
            async with leased(router, timeout=1, min_version=1) as chosen:
                assert chosen == "b"
            router.mark_dead("b", "killed")
            router.mark_live("b", 1)
            async with leased(router, timeout=1, min_version=1), leased(router, timeout=1) as chosen:
                assert chosen == "a"
            async with leased(router, timeout=1), leased(router, timeout=1) as chosen:
                assert chosen == "b", "its successor is not draining"

    run_virtual(main())


def test_a_sticky_episode_leaves_a_replica_that_is_too_old():
    async def main():
        router = two_live()
        async with leased(router, timeout=1, sticky_key=7) as first:
            assert first == "a"
        router.set_version("b", 1)
        async with leased(router, timeout=1, sticky_key=7, min_version=1) as second:
            assert second == "b"

    run_virtual(main())


def test_waiting_ends_at_the_deadline_and_names_every_cause():
    async def main():
        router = Router(["a", "b", "c"])
        router.mark_live("a", 2)
        router.mark_live("b", 2)
        router.mark_dead("b", RuntimeError("out of memory"))
        router.mark_dead("b", "connection refused")
        with pytest.raises(NoReplica) as caught:
            await router.acquire(timeout=30, min_version=3)
        assert asyncio.get_running_loop().time() == pytest.approx(30)
        message = str(caught.value)
        for part in ("version 3 or newer", "30 s", "a is live at version 2", "out of memory"):
            assert part in message
        assert "c is not live: it has not started yet" in message
        assert "connection refused" not in message, "the first report is the cause, later ones are its echo"

    run_virtual(main())


def test_waiting_requests_are_served_in_order_when_a_replica_comes_back():
    async def main():
        router = Router(["a"])
        served = []

        async def request(name):
            async with leased(router, timeout=60):
                served.append(name)

        async with asyncio.TaskGroup() as tasks:
            for name in range(5):
                tasks.create_task(request(name))
            await asyncio.sleep(1)
            assert router.state("a").load == 0, "a queued request holds nothing, so no weight update waits for it"
            router.mark_live("a", 0)
        assert served == [0, 1, 2, 3, 4]
        assert router.state("a").load == 0

    run_virtual(main())


def test_cancellation_leaks_no_load():
    async def main():
        router = Router(["a"])

        async def request():
            async with leased(router, timeout=1000):
                await asyncio.sleep(100)

        waiting = asyncio.create_task(request())
        await asyncio.sleep(1)
        waiting.cancel()
        router.mark_live("a", 0)
        running = asyncio.create_task(request())
        await asyncio.sleep(1)
        assert router.state("a").load == 1
        running.cancel()
        await asyncio.wait([waiting, running])
        assert waiting.cancelled() and running.cancelled()
        assert router.state("a").load == 0

    run_virtual(main())


def test_a_lease_on_a_dead_replica_does_not_count_against_its_successor():
    async def main():
        router = Router(["a"])
        router.mark_live("a", 0)
        old, lost = await router.acquire(timeout=1), await router.acquire(timeout=1)
        router.mark_dead("a", "killed")
        assert router.state("a").load == 0, "its leases are void"
        router.release(lost)
        router.mark_live("a", 1)
        new = await router.acquire(timeout=1)
        assert (old.incarnation, new.incarnation) == (1, 2)
        router.release(old)
        assert router.state("a").load == 1
        router.release(new)
        with pytest.raises(RuntimeError, match="more often"):
            router.release(new)

    run_virtual(main())


def test_a_replica_may_die_again_and_the_last_cause_is_told():
    async def main():
        router = Router(["a"])
        for cause in ("out of memory", "killed"):
            router.mark_live("a", 0)
            router.mark_dead("a", cause)
            with pytest.raises(NoReplica, match=f"a is not live: {cause}"):
                await router.acquire(timeout=1)

    run_virtual(main())


def test_an_episode_is_not_bound_to_the_successor_of_its_replica():
    """What it had there is lost, so it goes wherever there is least to do."""

    async def main():
        router = two_live()
        async with leased(router, timeout=1, sticky_key="episode") as first:
            assert first == "a"
        router.mark_dead("a", "killed")
        router.mark_live("a", 0)
        crowd = [await router.acquire(timeout=1) for _ in range(3)]
        assert [lease.replica_id for lease in crowd] == ["a", "b", "a"]
        async with leased(router, timeout=1, sticky_key="episode") as moved:
            assert moved == "b"

    run_virtual(main())


def test_misuse_is_refused():
    for names in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="distinct replica names"):
            Router(names)
    router = two_live(versions=(2, 2))
    with pytest.raises(KeyError, match="unknown replica 'z'; known are a, b"):
        router.state("z")
    with pytest.raises(ValueError, match="went back from version 2 to 1"):
        router.set_version("a", 1)
    with pytest.raises(ValueError, match="is live already"):
        router.mark_live("a", 3)
    router.mark_dead("a", "killed")
    with pytest.raises(ValueError, match="a is not live: killed"):
        router.set_version("a", 3)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_least_loaded_one_whatever_happened_before(seed):
    draw = random.Random(seed)
    names = [f"r{number}" for number in range(draw.randint(1, 9))]

    def least_loaded(router, oldest, candidates):
        usable = [
            (state.draining, state.load, names.index(name))
            for name in candidates
            if (state := router.state(name)).live and (oldest is None or state.version >= oldest)
        ]
        return names[min(usable)[-1]] if usable else None

    async def main():
        router, leases, drains, reserved = Router(names), [], {}, set()
        for _ in range(600):
            name, oldest = draw.choice(names), draw.choice([None, 0, 1, 2, 3])
            state = router.state(name)
            others = ["die", "live", "live", "load", "drain", "drained", "oldest", "reserve"]
            event = draw.choice(["acquire"] * 6 + ["release"] * 5 + others)
            if event == "oldest":
                free = [router.state(each) for each in names if each not in reserved]
                assert router.oldest() == min((each.version for each in free if each.live), default=None)
            elif event == "reserve":
                reserved = set(draw.sample(names, draw.choice([0, 0, draw.randint(0, len(names))])))
                router.reserve(reserved)
            elif event == "acquire":
                wanted = draw.random() < 0.3
                candidates = [each for each in names if not reserved or (each in reserved) == wanted]
                expected = least_loaded(router, oldest, candidates)
                try:
                    leases.append(await router.acquire(timeout=0.1, min_version=oldest, reserved=wanted))
                    assert leases[-1].replica_id == expected
                except NoReplica:
                    assert expected is None
            elif event == "release" and leases:
                router.release(leases.pop(draw.randrange(len(leases))))
            elif event == "die" and state.live:
                router.mark_dead(name, "killed")
            elif event == "live" and not state.live:
                router.mark_live(name, draw.randint(0, 3))
            elif event == "load" and state.live:
                router.set_version(name, draw.randint(state.version, 3))
            elif event == "drain" and name not in drains:
                drains[name] = ExitStack()
                drains[name].enter_context(router.draining(name))
            elif event == "drained" and name in drains:
                drains.pop(name).close()

    run_virtual(main())


def test_a_choice_among_thousands_costs_about_as_much_as_among_a_few():
    def seconds(replicas):
        router = Router(map(str, range(replicas)))
        for number in range(replicas):
            router.mark_live(str(number), number % 2)

        async def main():
            leases = []
            for _ in range(3000):
                leases.append(await router.acquire(timeout=1, min_version=1))
                assert router.oldest() == 0
                if len(leases) > 1000:
                    router.release(leases.pop(0))

        began = time.thread_time()
        run_virtual(main())
        return time.thread_time() - began

    assert seconds(4096) < 30 * seconds(16), "a search through all would take 256 times as long"


def test_a_reserved_replica_takes_no_request_but_those_that_want_one():
    async def main():
        router = two_live()
        async with leased(router, timeout=1, sticky_key="episode") as before:
            assert before == "a"
        running = await router.acquire(timeout=1)  # goes on where it is
        router.reserve(["a"])
        assert running.replica_id == "a"
        for _ in range(3):
            assert (await router.acquire(timeout=1)).replica_id == "b"
            assert (await router.acquire(timeout=1, reserved=True)).replica_id == "a"
        async with leased(router, timeout=1, sticky_key="episode") as moved:
            assert moved == "b"
        router.mark_dead("a", "killed")
        with pytest.raises(NoReplica, match=r"a is not live: killed \(reserved\)"):
            await router.acquire(timeout=1, reserved=True)
        router.mark_live("a", 0)
        assert (await router.acquire(timeout=1)).replica_id == "b"
        waiting = asyncio.create_task(router.acquire(timeout=5, min_version=1, reserved=True))
        await asyncio.sleep(1)
        router.set_version("b", 1)
        await asyncio.sleep(1)
        assert not waiting.done()
        router.reserve([])
        assert (await waiting).replica_id == "b"
        assert (await router.acquire(timeout=1, reserved=True)).replica_id == "a"

    run_virtual(main())


def test_versions_that_no_replica_has_any_more_cost_nothing():
    async def main():
        router = two_live()
        for version in range(2, 100):
            for name in ("a", "b"):
                router.set_version(name, version)
            router.reserve(["a"] if version % 10 == 0 else [])
            async with leased(router, timeout=1, min_version=version):
                pass
        assert len(router._ranks) <= 2

    run_virtual(main())
