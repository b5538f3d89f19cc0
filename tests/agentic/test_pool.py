"""The pool keeps its promises whatever environments, processes and episodes do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from roll.agentic.episode import EnvironmentFailed
from roll.agentic.pool import EnvPool, EnvPoolSession, PoolSettings
from roll.agentic.worker import EnvPoolClosed, SessionFailed
from roll.configs.run import CustomEnvConfig, EnvWorkersConfig
from tests.warm_workers import COLD

T = TypeVar("T")
HERE = "tests.agentic.sample_environments"
SHORT = 0.3
"""Seconds, for what is meant to run out of time."""

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.tier("all")]


def pool_of(
    *,
    num_workers: int = 1,
    max_sessions: int = 1000,
    envs: dict[str, CustomEnvConfig] | None = None,
    **rest: Any,
) -> EnvPool:
    """A pool whose tag ``a`` is a plain environment."""
    specs = {"a": CustomEnvConfig("obedient")} | (envs or {})
    limits = {field.name: rest.pop(field.name) for field in fields(EnvWorkersConfig) if field.name in rest}
    quick = {"close_timeout_seconds": SHORT, "leak_check_seconds": 0.0}
    settings = PoolSettings(
        EnvWorkersConfig(num_workers=num_workers, max_sessions=max_sessions, **limits),
        **quick | {"make_env": f"{HERE}:make", "observe": f"{HERE}:observe"} | rest,
    )
    return EnvPool(specs, settings)


def run(pool: EnvPool, use: Callable[[EnvPool], Awaitable[T]], limit: float = 120.0) -> T:
    async def main() -> T:
        async with asyncio.timeout(limit):
            await pool.start()
            try:
                return await use(pool)
            finally:
                await pool.shutdown()

    return asyncio.run(main())


async def episode(pool: EnvPool, seed: int, *actions: str, tag: str = "a") -> list[str]:
    """What the policy reads."""
    session = pool.session(tag)
    try:
        observations = [await session.reset(seed)]
        for action in actions:
            observations.append(await session.step(action))
        return [observation.messages[0]["content"] for observation in observations]
    finally:
        await session.close()


async def process_id(pool: EnvPool) -> int:
    return int((await episode(pool, 0, "process"))[1])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_gone(pid: int) -> bool:
    """Whether it is gone soon. Blocks: for after a shutdown."""
    deadline = time.monotonic() + 60
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)  # it needs the processor to end
    return not runs(pid)


async def until(condition: Callable[[], bool], pause: float = 0.01) -> None:
    """Without a pause no state of this event loop is missed, however short it is."""
    while not condition():
        await asyncio.sleep(pause)


def test_an_episode_runs_and_gives_its_environment_to_the_next():
    async def use(pool: EnvPool) -> list[list[str]]:
        return [await episode(pool, seed, "go") for seed in (7, 8)]

    pool = pool_of()
    assert run(pool, use) == [["seed 7, episode 1", "go 7 1"], ["seed 8, episode 2", "go 8 1"]]
    counts = pool.counts()
    assert {name: counts[name] for name in ("sessions", "resets", "steps", "restarts", "retired")} == {
        "sessions": 0,
        "resets": 2,
        "steps": 2,
        "restarts": 0,
        "retired": 0,
    }
    assert (counts["environments/made"], counts["environments/reused"]) == (1, 1)


def test_the_time_that_environments_took_is_added_up_for_each_session():
    async def use(pool: EnvPool) -> list[float]:
        slow, quick = pool.session("a"), pool.session("a")
        took = [await slow.reset(1), await slow.step("sleep 0.2"), await slow.step("sleep 0.1")]
        others = [await quick.reset(2), await quick.step("go")]
        for session in (slow, quick):
            await session.close()
        assert slow.worked == sum(each.seconds for each in took) and took[1].seconds > 0.2
        assert quick.worked == sum(each.seconds for each in others)
        return [each.seconds for each in (*took, *others)]

    assert min(run(pool_of(), use)) > 0


def test_frames_come_with_the_sessions_that_asked_for_them():
    async def use(pool: EnvPool) -> list[str | None]:
        sessions = [pool.session("a", frames=True), pool.session("a")]
        observations = [await session.reset(1) for session in sessions] + [await sessions[0].step("go")]
        return [observation.frame for observation in observations]

    assert run(pool_of(), use) == ["frame 0", None, "frame 1"]


def test_an_environment_reads_files_in_the_folder_of_the_run(tmp_path, monkeypatch):
    """The Ray of these tests was started elsewhere."""
    (tmp_path / "level.txt").write_text("a level")
    monkeypatch.chdir(tmp_path)
    assert run(pool_of(), lambda pool: episode(pool, 0, "read level.txt")) == ["seed 0, episode 1", "a level"]


def test_an_unknown_tag_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="`aa`.*did you mean `a`"):
        pool_of().session("aa")


def test_workers_are_light_processes_that_are_gone_after_shutdown(tmp_path):
    async def use(pool: EnvPool) -> tuple[set[int], list[str]]:
        sessions = [pool.session("noting") for _ in range(6)]
        for session in sessions:
            await session.reset(1)
        ids = {(await session.step("process")).messages[0]["content"] for session in sessions}
        return ids, await episode(pool, 1, "loaded")

    envs = {"noting": CustomEnvConfig("obedient", {"folder": str(tmp_path)})}
    ids, (_, loaded) = run(pool_of(num_workers=2, envs=envs, actor_options=COLD), use)
    assert len(ids) == 2 and str(os.getpid()) not in ids
    assert loaded == ""
    assert all(is_gone(int(pid)) for pid in ids)
    closed = (tmp_path / "closed").read_text().split()
    assert sorted(closed) == sorted((tmp_path / "made").read_text().split())
    assert len(closed) == 6


def test_hundreds_of_episodes_run_at_once(tmp_path):
    async def use(pool: EnvPool) -> list[list[str]]:
        running = [asyncio.create_task(episode(pool, seed, f"wait-for {tmp_path / 'go'}", "on")) for seed in range(200)]
        await until(lambda: pool.counts()["steps"] == 200)
        (tmp_path / "go").touch()
        return await asyncio.gather(*running)

    pool = pool_of(num_workers=2)
    assert [texts[2] for texts in run(pool, use)] == [f"on {seed} 2" for seed in range(200)]
    assert pool.counts()["sessions"] == 0


@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("raise divide", "raised", "ArithmeticError: cannot divide"),
        ("hang", "hung", "did not end within 2 s"),
        ("number", "nonsense", "the observation is a int"),
        ("die", "lost", "worker environments/0 died: it ended "),
    ],
)
def test_a_bad_environment_fails_its_own_episode_and_is_named(action, kind, words):
    async def use(pool: EnvPool) -> str:
        with pytest.raises(SessionFailed) as caught:
            await episode(pool, 7, "go", "on", action, tag="bad")
        assert caught.value.kind == kind
        assert await episode(pool, 9, "go") == ["seed 9, episode 1", "go 9 1"]
        assert await episode(pool, 9, "go", tag="bad") == ["seed 9, episode 1", "go 9 1"]
        return str(caught.value)

    pool = pool_of(envs={"bad": CustomEnvConfig("obedient", step_timeout_seconds=2.0 if action == "hang" else 60.0)})
    message = run(pool, use)
    assert message.startswith("environment `bad`, seed 7, turn 2: ") and words in message
    counts = pool.counts()
    assert counts[f"failures/bad/{kind}"] == 1
    assert counts["restarts"] == (1 if kind == "lost" else 0)
    assert counts["sessions"] == 0


def test_a_process_that_dies_takes_its_own_sessions_only():
    async def use(pool: EnvPool) -> list[str]:
        sessions = [pool.session("a") for _ in range(4)]
        for seed, session in enumerate(sessions):
            await session.reset(seed)
        homes = [(await session.step("process")).messages[0]["content"] for session in sessions]
        dead = homes[0]
        with pytest.raises(SessionFailed):
            await sessions[0].step("die")
        ends = []
        for session, home in zip(sessions[1:], homes[1:], strict=True):
            try:
                await session.step("go")
                ends.append(home != dead)
            except SessionFailed as failure:
                assert " died: it ended " in str(failure)
                ends.append(home == dead)
        await until(lambda: pool.counts()["workers"] == 2)
        return ends

    assert run(pool_of(num_workers=2), use) == [True] * 3


async def suspected(pool: EnvPool, seed: int) -> None:
    """Make the seed so by two deaths."""
    for _ in range(2):
        with pytest.raises(SessionFailed) as caught:
            await episode(pool, seed, "die")
        assert caught.value.may_be_innocent


async def proven(pool: EnvPool, seed: int) -> None:
    """Make the seed so by a third one."""
    await suspected(pool, seed)
    with pytest.raises(SessionFailed) as caught:
        await episode(pool, seed, "go", "die")
    assert caught.value.proven
    message = str(caught.value)
    assert "seed 7, turn 1: worker environments/" in message and "died: it ended without a message" in message


def test_a_killer_among_many_slow_innocents_costs_nobody_but_itself(tmp_path):
    """The innocent steps are under way at both deaths, so all are suspects, and end after that."""
    wait, innocents = f"wait-for {tmp_path / 'go'}", range(100, 120)

    async def until_it_ends_well(pool: EnvPool, seed: int) -> str:
        while True:
            try:
                return (await episode(pool, seed, wait))[0]
            except SessionFailed as error:
                assert error.may_be_innocent

    async def use(pool: EnvPool) -> tuple[list[str], dict[str, int], dict[str, int]]:
        playing = [asyncio.create_task(until_it_ends_well(pool, seed)) for seed in innocents]
        for death in range(3):
            await until(partial(all_are_in_a_step, pool, death))
            if death == 2:
                (tmp_path / "go").touch()
            with pytest.raises(SessionFailed) as caught:
                await episode(pool, 7, "die")
            assert caught.value.proven == (death == 2)
        ends = await asyncio.gather(*playing)
        before = pool.counts()
        for _ in range(2):
            with pytest.raises(SessionFailed) as caught:
                await episode(pool, 7, "die")
            assert caught.value.proven
        return ends, before, pool.counts()

    def all_are_in_a_step(pool: EnvPool, death: int) -> bool:
        counts = pool.counts()
        if death < 2:
            return counts["steps"] >= (1 + death) * len(innocents) + death
        return counts["workers"] == 1

    ends, before, after = run(pool_of(), use)
    assert [end.split(",")[0] for end in ends] == [f"seed {seed}" for seed in innocents]
    assert before["restarts"] == after["restarts"] == 2
    assert after["quarantined"] - before["quarantined"] == 2


def test_an_episode_that_waits_for_its_policy_while_its_process_dies_is_no_suspect():
    async def use(pool: EnvPool) -> int:
        for _ in range(3):
            idle = pool.session("a")
            await idle.reset(1)
            with pytest.raises(SessionFailed):
                await episode(pool, 7, "die", tag="bad")
            with suppress(SessionFailed):
                await idle.step("go")
            await idle.close()
        before = pool.counts()["quarantined"]
        await episode(pool, 1, "go")
        return pool.counts()["quarantined"] - before

    assert run(pool_of(envs={"bad": CustomEnvConfig("obedient")}), use) == 0


def test_a_proven_killer_never_shares_a_process_again():
    async def use(pool: EnvPool) -> None:
        await proven(pool, 7)
        others = await process_id(pool)
        alone = [(await episode(pool, 7, "process"))[1] for _ in range(3)]
        assert len(set(alone)) == 1 and alone[0] != str(others)
        assert await process_id(pool) == others
        session = pool.session("a")
        await session.reset(8)
        await session.reset(7)
        assert (await session.step("process")).messages[0]["content"] == alone[0]
        await session.reset(9)
        assert (await session.step("process")).messages[0]["content"] == str(others)
        await session.close()
        assert pool.counts()["quarantined"] == 5 and pool.counts()["sessions"] == 0

    run(pool_of(), use)


def test_a_suspect_that_ends_well_alone_is_among_others_again():
    async def use(pool: EnvPool) -> None:
        await suspected(pool, 7)
        others = str(await process_id(pool))
        homes = [(await episode(pool, 7, "process"))[1] for _ in range(2)]
        assert homes[0] != others and homes[1] == others
        assert pool.counts()["quarantined"] == 1

    run(pool_of(), use)


def test_what_a_suspect_leaves_unfinished_is_not_there_with_the_next(tmp_path):
    async def use(pool: EnvPool) -> None:
        await proven(pool, 7)
        home = (await episode(pool, 7, "process"))[1]
        with pytest.raises(SessionFailed, match="cannot"):
            await episode(pool, 7, "raise")
        second = (await episode(pool, 7, "process"))[1]
        task = asyncio.create_task(episode(pool, 7, f"wait-for {tmp_path / 'go'}"))
        steps = pool.counts()["steps"]
        await until(lambda: pool.counts()["steps"] == steps + 1)
        task.cancel()
        await asyncio.wait([task])
        third = (await episode(pool, 7, "process"))[1]
        assert len({home, second, third}) == 3
        (tmp_path / "go").touch()
        await until(lambda: not runs(int(home)) and not runs(int(second)))

    run(pool_of(), use)


def test_suspects_play_one_at_a_time_and_those_that_wait_or_give_up_hold_nothing():
    async def use(pool: EnvPool) -> None:
        await proven(pool, 7)
        first = pool.session("a")
        await first.reset(7)
        waiting = [asyncio.create_task(episode(pool, 7, "go")) for _ in range(3)]
        await until(lambda: pool.counts()["waiting"] == 3)
        assert pool.counts()["sessions"] == 1
        assert await episode(pool, 8, "go")  # there is a second place, and they do not hold it
        waiting[0].cancel()
        await first.close()
        await asyncio.wait(waiting)
        assert [task.cancelled() for task in waiting] == [True, False, False]
        assert [task.result()[1] for task in waiting[1:]] == ["go 7 1"] * 2
        assert (pool.counts()["sessions"], pool.counts()["waiting"]) == (0, 0)

    run(pool_of(max_sessions=2), use)


def test_a_suspect_that_is_cancelled_while_its_process_starts_leaves_the_turn_to_the_next():
    async def use(pool: EnvPool) -> None:
        await suspected(pool, 7)
        task = asyncio.create_task(episode(pool, 7, "go"))
        await until(lambda: pool.counts()["waiting"] == 1, pause=0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and (pool.counts()["sessions"], pool.counts()["waiting"]) == (0, 0)
        assert (await episode(pool, 7, "go"))[1] == "go 7 1"
        assert pool.counts()["quarantined"] == 1

    run(pool_of(max_sessions=1), use)


@pytest.mark.parametrize("when", ["its process starts", "another one plays"])
def test_shutdown_ends_suspects_and_their_process(when):
    async def use(pool: EnvPool) -> list[int]:
        await suspected(pool, 7)
        pids = []
        if when == "another one plays":
            await suspected(pool, 9)
            first = pool.session("a")
            await first.reset(9)
            pids.append(int((await first.step("process")).messages[0]["content"]))
        task = asyncio.create_task(episode(pool, 7))
        await until(lambda: pool.counts()["waiting"] == 1, pause=0)
        await pool.shutdown()
        with pytest.raises(EnvPoolClosed, match="shut down"):
            await task
        return pids

    pool = pool_of()
    assert all(is_gone(pid) for pid in run(pool, use))
    assert not pool._processes


def test_a_session_whose_process_died_begins_anew_elsewhere():
    async def use(pool: EnvPool) -> list[str]:
        session = pool.session("a")
        await session.reset(1)
        with pytest.raises(EnvironmentFailed):
            await session.step("die")
        with pytest.raises(EnvironmentFailed, match="without a successful reset"):
            await session.step("go")
        await session.reset(2)
        return (await session.step("go")).messages[0]["content"]

    assert run(pool_of(), use) == "go 2 1"


@pytest.mark.parametrize("how", ["hold", pytest.param("stop", marks=pytest.mark.tier("soak"))])
def test_a_process_that_does_not_answer_is_killed_and_replaced(how):
    async def use(pool: EnvPool) -> tuple[int, str]:
        pid = await process_id(pool)
        session = pool.session("a")
        await session.reset(1)
        if how == "stop":
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SessionFailed) as caught:
            await session.step("hold")
        await until(lambda: pool.counts()["workers"] == 1)
        assert (await episode(pool, 2, "go"))[1] == "go 2 1"
        return pid, str(caught.value)

    pool = pool_of(silence_timeout_seconds=5.0)
    pid, message = run(pool, use)
    assert "environment `a`, seed 1, turn 0: worker environments/0 died: it did not answer for 5 s" in message
    assert is_gone(pid)
    assert pool.counts()["restarts"] == 1


def test_a_driver_that_stood_still_blames_no_process():
    async def use(pool: EnvPool) -> list[str]:
        await episode(pool, 1)
        time.sleep(5.5)
        return await episode(pool, 2, "go")

    pool = pool_of(silence_timeout_seconds=5.0)
    assert run(pool, use) == ["seed 2, episode 2", "go 2 1"]
    assert pool.counts()["restarts"] == 0


def test_a_process_full_of_stuck_threads_is_replaced_and_ends_with_its_last_session():
    async def use(pool: EnvPool) -> int:
        before = await process_id(pool)
        last = pool.session("a")
        await last.reset(1)
        for seed in range(2):
            with pytest.raises(SessionFailed, match="did not end within"):
                await episode(pool, seed, "hang", tag="hanging")
        await until(lambda: pool.counts()["retired"] == 1 and pool.counts()["workers"] == 1)
        assert await process_id(pool) != before
        assert (await last.step("process")).messages[0]["content"] == str(before)
        await last.close()
        await until(lambda: not runs(before))
        return before

    envs = {"hanging": CustomEnvConfig("obedient", step_timeout_seconds=SHORT)}
    pool = pool_of(envs=envs, max_stuck_threads=1, silence_timeout_seconds=30.0)
    run(pool, use)
    assert pool.counts()["restarts"] == 0


@pytest.mark.parametrize("leak", ["files 200", "threads 200", "memory 200000000"])
def test_a_process_whose_environments_leak_is_replaced_without_a_failure(leak):
    async def use(pool: EnvPool) -> None:
        before = await process_id(pool)
        await episode(pool, 1, leak, "go")
        await until(lambda: pool.counts()["retired"] == 1 and pool.counts()["workers"] == 1)
        assert await process_id(pool) != before
        await until(lambda: not runs(before))

    limits = {"max_open_files": 100, "max_extra_threads": 100, "max_memory_growth_gib": 0.1}
    pool = pool_of(close_timeout_seconds=5.0, silence_timeout_seconds=30.0, **limits)
    run(pool, use)
    assert not [name for name in pool.counts() if name.startswith("failures/")]


def test_episodes_beyond_the_places_wait_their_turn():
    order: list[int] = []

    async def one(pool: EnvPool, seed: int, leave: asyncio.Event) -> None:
        session = pool.session("a")
        await session.reset(seed)
        order.append(seed)
        await leave.wait()
        await session.close()
        await session.close()

    async def use(pool: EnvPool) -> None:
        leave = asyncio.Event()
        tasks = [asyncio.create_task(one(pool, seed, leave)) for seed in range(10)]
        await until(lambda: len(order) == 3)
        assert (pool.counts()["sessions"], pool.counts()["waiting"]) == (3, 7)
        leave.set()
        await asyncio.gather(*tasks)
        assert (pool.counts()["sessions"], pool.counts()["waiting"]) == (0, 0)

    run(pool_of(max_sessions=3), use)
    assert sorted(order) == list(range(10))


def test_a_second_reset_keeps_the_place_while_others_wait():
    async def use(pool: EnvPool) -> list[str]:
        session = pool.session("a")
        texts = [(await session.reset(1)).messages[0]["content"]]
        other = asyncio.create_task(episode(pool, 3))
        await until(lambda: pool.counts()["waiting"] == 1)
        texts.append((await session.reset(2)).messages[0]["content"])
        assert pool.counts()["waiting"] == 1
        await session.close()
        return texts + await other

    pool = pool_of(max_sessions=1)
    assert run(pool, use) == [f"seed {number}, episode {number}" for number in (1, 2, 3)]
    assert pool.counts()["sessions"] == 0


def test_waiting_for_a_place_has_a_limit():
    async def use(pool: EnvPool) -> None:
        holder = pool.session("a")
        await holder.reset(1)
        with pytest.raises(EnvironmentFailed, match="`a`, seed 2: no place .* within 0.3 s"):
            await episode(pool, 2)
        assert (pool.counts()["sessions"], pool.counts()["waiting"]) == (1, 0)

    run(pool_of(max_sessions=1, place_timeout_seconds=SHORT), use)


def test_sessions_closed_at_odd_moments_hold_nothing(tmp_path):
    async def use(pool: EnvPool) -> None:
        session, waiting = pool.session("a"), pool.session("a")
        await waiting.close()
        await session.reset(1)
        step = asyncio.create_task(session.step(f"wait-for {tmp_path / 'go'}"))
        reset = asyncio.create_task(waiting.reset(2))
        await until(lambda: pool.counts()["waiting"] == 1 and pool.counts()["steps"] == 1)
        with pytest.raises(RuntimeError, match="two calls at the same time"):
            await session.step("go")
        await waiting.close()
        await session.close()
        with pytest.raises(EnvironmentFailed, match="closed during the call"):
            await step
        with pytest.raises(EnvironmentFailed, match="closed while it waited"):
            await reset
        assert (pool.counts()["sessions"], pool.counts()["waiting"]) == (0, 0)
        (tmp_path / "go").touch()

    run(pool_of(max_sessions=1), use)


@pytest.mark.parametrize("storm", range(2))
def test_a_storm_of_cancellations_and_failures_keeps_the_places_exact(storm):
    schedule = random.Random(storm)
    running: set[EnvPoolSession] = set()
    most = 0

    async def one(pool: EnvPool, seed: int) -> None:
        nonlocal most
        actions = schedule.choices(["go", "sleep 0.01", "raise x", "number", "hang"], [20, 10, 2, 2, 1], k=4)
        session = pool.session("a")
        try:
            await session.reset(seed)
            running.add(session)
            most = max(most, len(running))
            for action in actions:
                await session.step(action)
        except EnvironmentFailed:
            pass
        finally:
            running.discard(session)
            if seed % 2:  # a cancelled or failed session has given its place back even without this
                await session.close()

    async def use(pool: EnvPool) -> None:
        tasks = []
        for seed in range(150):
            tasks.append(asyncio.create_task(one(pool, 2 * seed + 1)))
            if schedule.random() < 0.4:
                schedule.choice(tasks).cancel()
            if schedule.random() < 0.3:
                await asyncio.sleep(schedule.choice([0, 0, 0.002, 0.01]))
            assert pool.counts()["sessions"] <= 7
        await asyncio.wait(tasks)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert (pool.counts()["sessions"], pool.counts()["waiting"]) == (0, 0)
        assert await episode(pool, 5, "go", "on", tag="patient")
        sessions = [pool.session("patient") for _ in range(8)]
        resets = [asyncio.create_task(session.reset(5)) for session in sessions]
        await until(lambda: sum(reset.done() for reset in resets) == 7)
        assert (pool.counts()["sessions"], pool.counts()["waiting"]) == (7, 1), "no place is lost or invented"
        for session in reversed(sessions):
            await session.close()
        await asyncio.wait(resets)

    envs = {"a": CustomEnvConfig("obedient", step_timeout_seconds=SHORT), "patient": CustomEnvConfig("obedient")}
    pool = pool_of(num_workers=2, max_sessions=7, max_stuck_threads=4, envs=envs, silence_timeout_seconds=30.0)
    run(pool, use)
    assert most <= 7


def test_a_cancelled_episode_gives_its_place_back_without_being_closed(tmp_path):
    async def use(pool: EnvPool) -> None:
        for call in ("reset", "step"):
            session = pool.session("slow" if call == "reset" else "a")
            if call == "step":
                await session.reset(1)
            work = session.reset(1) if call == "reset" else session.step(f"wait-for {tmp_path / 'go'}")
            task = asyncio.create_task(work)
            await until(lambda: pool.counts()["sessions"] == 1)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() and pool.counts()["sessions"] == 0
            assert (await episode(pool, 2, "go"))[1] == "go 2 1"
        (tmp_path / "go").touch()

    slow = CustomEnvConfig("obedient", {"at_reset": f"wait-for {tmp_path / 'go'}"})
    run(pool_of(max_sessions=1, envs={"slow": slow}), use)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"make_env": f"{HERE}:missing"}, "did not start.*no 'missing'"),
        ({"make_env": "nowhere:make"}, "did not start.*nowhere"),
    ],
)
def test_a_pool_that_cannot_start_says_why_and_leaves_nothing(settings, words):
    pool = pool_of(num_workers=2, **settings)
    with pytest.raises(EnvPoolClosed, match=words):
        run(pool, lambda pool: episode(pool, 1))
    assert pool.counts()["workers"] == 0


def test_one_worker_that_does_not_start_ends_the_others(tmp_path, monkeypatch):
    (tmp_path / "once_only.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from tests.agentic.sample_environments import make, observe\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    (folder / f'{os.getpid()}.pid').touch()\n"
        "    try:\n"
        "        (folder / 'taken').mkdir()\n"
        "    except FileExistsError:\n"
        "        raise OSError('no second licence')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvPoolClosed, match="no second licence"):
        run(pool_of(num_workers=2, make_env="once_only:make"), lambda pool: episode(pool, 1))
    assert all(is_gone(int(path.stem)) for path in tmp_path.glob("*.pid"))


def test_replacements_that_do_not_start_end_the_run_with_the_cause(tmp_path, monkeypatch):
    (tmp_path / "first_only.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from tests.agentic.sample_environments import make, observe\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    try:\n"
        f"        Path({str(tmp_path / 'taken')!r}).mkdir()\n"
        "    except FileExistsError:\n"
        "        raise OSError('licence expired')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def use(pool: EnvPool) -> None:
        with pytest.raises(SessionFailed):
            await episode(pool, 1, "die")
        with pytest.raises(EnvPoolClosed, match="2 environment workers in a row did not start.*licence expired"):
            await episode(pool, 2)

    run(pool_of(make_env="first_only:make", max_failed_starts=2), use)


def test_shutdown_ends_calls_and_waiting_at_once_and_nothing_starts_after_it(tmp_path):
    async def use(pool: EnvPool) -> None:
        session = pool.session("a")
        await session.reset(1)
        step = asyncio.create_task(session.step("hang"))
        waiting = asyncio.create_task(episode(pool, 2))
        await until(lambda: pool.counts()["waiting"] == 1)
        await pool.shutdown()
        for task in (step, waiting):
            with pytest.raises(EnvPoolClosed, match="shut down"):
                await task
        with pytest.raises(EnvPoolClosed, match="shut down"):
            await episode(pool, 3)
        await session.close()
        assert (pool.counts()["sessions"], pool.counts()["workers"]) == (0, 0)

    run(pool_of(max_sessions=1), use)


def test_the_processor_time_of_a_process_that_has_ended_is_still_known():
    async def play(pool: EnvPool) -> float:
        session = pool.session("a")
        await session.reset(0)
        await session.close()
        return sum(pool.cpu_seconds()["environments"].values())

    pool = pool_of()
    used = run(pool, play)
    assert 0 < used <= pool.cpu_seconds()["environments"]["environments/0"]
