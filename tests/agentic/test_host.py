"""One process' environments: reused while they are good, abandoned when they are not, and never in each other's way."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import pytest

from roll.agentic.episode import Observation
from roll.agentic.worker import EnvFactory, EnvHost, HostSession, PoolSettings, SessionFailed
from roll.configs.run import CustomEnvConfig, EnvWorkersConfig
from tests.agentic import sample_environments
from tests.agentic.sample_environments import Obedient, make, observe

T = TypeVar("T")
SHORT = 0.2
"""Seconds, for what is meant to run out of time."""


@pytest.fixture(autouse=True)
def let_hanging_threads_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    never = threading.Event()
    monkeypatch.setattr(sample_environments, "never", never)
    yield
    never.set()


class Made:
    """A factory that remembers what it made."""

    def __init__(self) -> None:
        self.environments: list[Obedient] = []

    def __call__(self, env_type: str, env_config: Any) -> gymnasium.Env:
        environment = make(env_type, env_config)
        self.environments.append(environment)
        return environment


def spec(env_type: str = "obedient", *, reset: float = 20.0, step: float = 20.0, **env_config: str) -> CustomEnvConfig:
    return CustomEnvConfig(env_type, env_config, reset_timeout_seconds=reset, step_timeout_seconds=step)


def run(
    use: Callable[[EnvHost], Awaitable[T]],
    factory: EnvFactory = make,
    limits: PoolSettings | None = None,
    **specs: CustomEnvConfig,
) -> T:
    """Use a host whose tag ``a`` is a plain environment unless said otherwise, within a minute."""

    async def main() -> T:
        async with asyncio.timeout(60):
            host = EnvHost({"a": spec()} | specs, limits or PoolSettings(close_timeout_seconds=SHORT), factory, observe)
            try:
                return await use(host)
            finally:
                await host.close()

    return asyncio.run(main())


async def episode(session: HostSession, seed: int, *actions: str) -> list[Observation | SessionFailed]:
    answers = [await session.reset(seed)]
    for action in actions:
        answers.append(await session.step(action))
    session.release()
    return answers


def texts(answers: list[Observation | SessionFailed]) -> list[str]:
    return [str(each) if isinstance(each, SessionFailed) else each.messages[0]["content"] for each in answers]


def test_an_episode_runs_with_rewards_and_without_frames():
    answers = run(lambda host: episode(host.open("a", False), 7, "go", "stop"))
    assert texts(answers) == ["seed 7, episode 1", "go 7 1", "stop 7 2"]
    assert [answer.reward for answer in answers] == [0.0, 1.0, 1.0]
    assert {answer.frame for answer in answers} == {None}


def test_frames_are_rendered_when_asked_for():
    answers = run(lambda host: episode(host.open("a", True), 7, "go"))
    assert [answer.frame for answer in answers] == ["frame 0", "frame 1"]


class Unseen(Obedient):
    """An environment that does not render, which is a warning of `roll check-env` and no failure."""

    render = gymnasium.Env.render


def test_an_environment_that_does_not_render_plays_without_frames_where_they_are_asked_for():
    answers = run(lambda host: episode(host.open("a", True), 7, "go"), lambda env_type, env_config: Unseen())
    assert texts(answers) == ["seed 7, episode 1", "go 7 1"]
    assert [answer.frame for answer in answers] == [None, None]


def test_a_good_environment_serves_the_next_episode_of_its_tag_only():
    async def use(host: EnvHost) -> list[str]:
        first = await episode(host.open("a", False), 1, "go")
        second = await episode(host.open("b", False), 2)
        third = await episode(host.open("a", False), 3)
        assert host.counts == {"made": 2, "reused": 1, "closed": 0, "close_failures": 0}
        return [texts(answers)[0] for answers in (first, second, third)]

    assert run(use, b=spec()) == ["seed 1, episode 1", "seed 2, episode 1", "seed 3, episode 2"]


def test_a_second_reset_of_a_session_keeps_its_environment():
    async def use(host: EnvHost) -> list[str]:
        session = host.open("a", False)
        first = [await session.reset(1), await session.step("go")]
        return texts(first + [await session.reset(2), await session.step("on")])

    assert run(use) == ["seed 1, episode 1", "go 1 1", "seed 2, episode 2", "on 2 1"]


def test_two_sessions_never_share_an_environment():
    factory = Made()

    async def use(host: EnvHost) -> list[str]:
        one, other = host.open("a", False), host.open("a", False)
        await asyncio.gather(one.reset(1), other.reset(2))
        return texts(await asyncio.gather(one.step("x"), other.step("y")))

    assert run(use, factory) == ["x 1 1", "y 2 1"]
    assert len(factory.environments) == 2


@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("raise divide", "raised", "ArithmeticError: cannot divide"),
        ("exit 3", "raised", "SystemExit: 3"),
        ("hang", "hung", "its step did not end within 2 s (step_timeout_seconds)"),
        ("none", "nonsense", "a tuple of 0 where (text, reward, terminated, truncated, info) is due"),
        ("pair", "nonsense", "a tuple of 2"),
        ("number", "nonsense", "ValueError: the observation is a int, not a text"),
        ("unpicklable", "nonsense", "pickle"),
    ],
)
def test_a_bad_step_is_told_with_tag_seed_and_turn_and_its_environment_is_closed(action, kind, words):
    factory = Made()

    async def use(host: EnvHost) -> tuple[SessionFailed, list[str]]:
        *_, failure = await episode(host.open("a", False), 7, "one", "two", action)
        assert isinstance(failure, SessionFailed)
        return failure, texts(await episode(host.open("a", False), 8, "go"))

    failure, after = run(use, factory, a=spec(step=2.0 if action == "hang" else 20.0))
    assert (failure.tag, failure.seed, failure.turn, failure.kind) == ("a", 7, 2, kind)
    assert str(failure).startswith("environment `a`, seed 7, turn 2: its step")
    assert words in str(failure) and "\n" not in str(failure)
    assert after == ["seed 8, episode 1", "go 8 1"]
    assert [environment.closed for environment in factory.environments] == [1, 1]


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (spec("unknown"), "raised", "making it raised LookupError: no environment unknown"),
        (spec(at_make="hang", reset=SHORT), "hung", "making it did not end within 0.2 s (reset_timeout_seconds)"),
        (spec(at_reset="raise start"), "raised", "its reset raised ArithmeticError: cannot start"),
        (spec(at_reset="hang", reset=SHORT), "hung", "its reset did not end within 0.2 s (reset_timeout_seconds)"),
        (spec(at_reset="none"), "nonsense", "a tuple of 0 where (text, info) is due"),
    ],
)
def test_an_environment_that_cannot_be_made_or_reset_is_told_so(bad, kind, words):
    async def use(host: EnvHost) -> list[SessionFailed]:
        session = host.open("bad", False)
        return [await session.reset(7), await session.reset(8)]

    first, second = run(use, bad=bad)
    assert (first.kind, first.turn, second.seed) == (kind, None, 8)
    assert str(first).startswith("environment `bad`, seed 7, at the reset: ")
    assert words in str(first) and words in str(second)


def test_a_failing_frame_is_the_environments_failure():
    class Blind(Obedient):
        def render(self) -> str:
            raise OSError("no screen")

    (failure,) = run(lambda host: episode(host.open("a", True), 7), lambda env_type, env_config: Blind())
    assert "OSError: no screen" in str(failure)


def test_a_failure_is_logged_with_a_short_traceback(caplog):
    with caplog.at_level(logging.WARNING, "roll"):
        run(lambda host: episode(host.open("a", False), 7, "raise divide"))
    (record,) = caplog.records
    assert record.getMessage().startswith("environment `a`, seed 7, turn 0: its step raised ArithmeticError")
    assert "in _raise" in record.getMessage() and "second line" in record.getMessage()


def test_a_hanging_step_delays_nobody():
    async def use(host: EnvHost) -> list[str]:
        hanging = host.open("a", False)
        await hanging.reset(1)
        waiting = asyncio.create_task(hanging.step("hang"))
        others = await asyncio.gather(*(episode(host.open("a", False), seed, "go", "on") for seed in range(2, 202)))
        assert not waiting.done()
        waiting.cancel()
        return [texts(answers)[-1] for answers in others]

    assert run(use) == [f"on {seed} 2" for seed in range(2, 202)]


@pytest.mark.parametrize("at_close", ["hang", "raise close"])
def test_a_close_that_fails_is_counted_and_waited_for_only_at_the_end(at_close):
    async def use(host: EnvHost) -> dict[str, int]:
        await episode(host.open("a", False), 1, "raise x")
        await episode(host.open("a", False), 2, "go")
        await host.close()
        return host.counts

    assert run(use, a=spec(at_close=at_close)) == {"made": 2, "reused": 0, "closed": 2, "close_failures": 2}


def test_an_environment_released_during_a_call_is_used_again_after_it(tmp_path):
    async def use(host: EnvHost) -> tuple[str, str]:
        session = host.open("a", False)
        await session.reset(1)
        step = asyncio.create_task(session.step(f"wait-for {tmp_path / 'go'}"))
        await asyncio.sleep(0)
        session.release()
        meanwhile = texts(await episode(host.open("a", False), 2))
        (tmp_path / "go").touch()
        await step
        both = [host.open("a", False), host.open("a", False)]
        afterwards = texts([await each.reset(3) for each in both])
        assert host.counts["made"] == 2
        return meanwhile[0], sorted(afterwards)

    assert run(use) == ("seed 2, episode 1", ["seed 3, episode 2", "seed 3, episode 2"])


def test_a_session_released_before_its_reset_began_makes_nothing():
    factory = Made()

    async def use(host: EnvHost) -> SessionFailed:
        session = host.open("a", False)
        session.release()
        return await session.reset(1)

    assert "closed before the call began" in str(run(use, factory))
    assert factory.environments == []


def test_an_environment_that_is_made_too_late_is_closed(tmp_path):
    factory = Made()

    async def use(host: EnvHost) -> None:
        failure = await host.open("a", False).reset(1)
        assert failure.kind == "hung"
        (tmp_path / "go").touch()
        while not (tmp_path / "closed").exists():
            await asyncio.sleep(0.01)

    run(use, factory, a=spec(at_make=f"wait-for {tmp_path / 'go'}", folder=str(tmp_path), reset=SHORT))
    assert [environment.closed for environment in factory.environments] == [1]


def test_stuck_threads_are_counted_until_they_return():
    async def use(host: EnvHost) -> None:
        sessions = [host.open("a", False) for _ in range(3)]
        for session in sessions[:2]:
            await episode(session, 1, "hang")
        assert host.retire_because() is None
        await episode(sessions[2], 1, "hang")
        assert host.retire_because() == "3 threads are stuck in environments that do not return"
        sample_environments.never.set()
        while host.retire_because() is not None:
            await asyncio.sleep(0.01)

    run(use, limits=PoolSettings(max_stuck_threads=2), a=spec(step=SHORT))


@pytest.mark.parametrize(
    ("order", "limit", "words"),
    [
        (
            "files 20",
            {"max_open_files": 7, "files_per_environment": 8},
            "files were opened and not closed",
        ),
        (
            "threads 20",
            {"max_extra_threads": 7, "threads_per_environment": 8},
            "threads were started by environments and have not ended",
        ),
        ("memory 200000000", {"workers": EnvWorkersConfig(max_memory_growth_gib=0.1)}, "its memory has grown by"),
    ],
)
def test_leaks_are_seen(order, limit, words, monkeypatch):
    monkeypatch.setattr(sample_environments, "KEPT", [])

    async def use(host: EnvHost) -> None:
        await episode(host.open("a", False), 1, "go")
        assert host.retire_because() is None
        await episode(host.open("a", False), 1, order)
        assert words in host.retire_because()

    run(use, limits=PoolSettings(**limit))


@pytest.mark.parametrize("order", ["files 8", "threads 8"])
def test_what_living_environments_hold_is_no_leak(order, monkeypatch):
    monkeypatch.setattr(sample_environments, "KEPT", [])

    async def use(host: EnvHost) -> None:
        sessions = [host.open("a", False) for _ in range(40)]
        for session in sessions:
            await session.reset(1)
            await session.step(order)
        assert host.retire_because() is None
        for session in sessions[:20]:
            await session.step("raise")
        while host.counts["closed"] < 20:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert host.retire_because() is not None

    run(
        use,
        limits=PoolSettings(
            max_open_files=20, files_per_environment=8, max_extra_threads=20, threads_per_environment=8
        ),
    )


def test_threads_of_running_calls_are_no_leak(tmp_path):
    async def use(host: EnvHost) -> None:
        sessions = [host.open("a", False) for _ in range(40)]
        steps = [asyncio.create_task(episode(session, 1, f"wait-for {tmp_path / 'go'}")) for session in sessions]
        while host.counts["made"] < 40:
            await asyncio.sleep(0.01)
        assert host.retire_because() is None
        (tmp_path / "go").touch()
        await asyncio.gather(*steps)

    run(use, limits=PoolSettings(max_extra_threads=8, threads_per_environment=0))


def test_closing_closes_every_environment_idle_or_not():
    factory = Made()

    async def use(host: EnvHost) -> None:
        await episode(host.open("a", False), 1)
        await asyncio.gather(*(host.open("a", False).reset(seed) for seed in range(3)))

    run(use, factory)
    assert [environment.closed for environment in factory.environments] == [1, 1, 1]


def test_the_threads_end_with_the_host():
    before = set(threading.enumerate())
    started: set[threading.Thread] = set()

    async def use(host: EnvHost) -> None:
        await asyncio.gather(*(episode(host.open("a", False), seed, "go") for seed in range(20)))
        started.update(set(threading.enumerate()) - before)

    run(use)
    assert started
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)


def test_an_idle_environment_of_a_failing_tag_is_not_touched(tmp_path: Path):
    async def use(host: EnvHost) -> list[str]:
        good, bad = host.open("a", False), host.open("a", False)
        await good.reset(1)
        await bad.reset(2)
        good.release()
        await bad.step("raise x")
        bad.release()
        return texts(await episode(host.open("a", False), 3))

    assert run(use) == ["seed 3, episode 2"]


class Endable(Obedient):
    """An environment whose running call ends when it is closed."""

    ends_calls_when_closed = True
    acting: threading.Event
    over: threading.Event

    def step(self, action: str) -> Any:
        self.acting.set()
        assert self.over.wait(20)
        raise RuntimeError("closed")

    def close(self) -> None:
        self.over.set()


def test_a_given_up_call_is_ended_if_its_environment_can_end_it():
    made: list[Endable] = []

    def factory(env_type: str, env_config: Any) -> gymnasium.Env:
        made.append(Endable())
        made[-1].acting, made[-1].over = threading.Event(), threading.Event()
        return made[-1]

    async def use(host: EnvHost) -> dict[str, int]:
        session = host.open("a", frames=False)
        await session.reset(1)
        acting = asyncio.ensure_future(session.step("go"))
        await asyncio.to_thread(made[0].acting.wait, 20)
        session.release()
        answer = await acting
        assert isinstance(answer, SessionFailed) and "closed" in answer.cause
        await episode(host.open("a", frames=False), 2)
        return host.counts

    counts = run(use, factory)
    assert (counts["made"], counts["reused"], len(made)) == (2, 0, 2), "a closed environment is not used again"


def test_only_the_giving_up_ends_a_step_that_closing_can_end_and_a_thread_that_stays_is_counted():
    class Deaf(Endable):
        def close(self) -> None:
            pass

    deaf = Deaf()
    deaf.acting, deaf.over = threading.Event(), threading.Event()

    async def use(host: EnvHost) -> None:
        session = host.open("a", frames=False)
        await session.reset(1)
        acting = asyncio.ensure_future(session.step("go"))
        await asyncio.to_thread(deaf.acting.wait, 20)
        await asyncio.sleep(3 * SHORT)
        assert not acting.done(), "it is past its step_timeout_seconds"
        session.release()
        answer = await acting
        assert isinstance(answer, SessionFailed) and answer.kind == "hung" and host.threads.stuck == 1
        deaf.over.set()
        while host.threads.stuck:
            await asyncio.sleep(0.01)

    run(use, lambda env_type, env_config: deaf, a=spec(step=SHORT))
