"""The worker without its process: every answer leaves exactly once, whatever the order of commands and polls."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from roll.agentic.episode import Observation
from roll.agentic.worker import Close, Command, EnvWorker, PoolSettings, Reset, Step
from roll.configs.run import CustomEnvConfig
from roll.runtime.process import DriverFolders

T = TypeVar("T")
HERE = "tests.agentic.sample_environments"
SOON = 0.001
LONG = 30.0


def run(use: Callable[[EnvWorker], Awaitable[T]], observe: str = f"{HERE}:observe") -> T:
    async def main() -> T:
        async with asyncio.timeout(60):
            settings = PoolSettings(make_env=f"{HERE}:make", observe=observe)
            worker = EnvWorker("w", {"a": CustomEnvConfig("obedient")}, settings, DriverFolders())
            await worker.start()
            try:
                return await use(worker)
            finally:
                await worker.close()

    return asyncio.run(main())


async def answered(worker: EnvWorker, *commands: Command) -> dict[int, str]:
    """Submit and poll until as many answers came as there are calls."""
    calls = sum(not isinstance(command, Close) for command in commands)
    await worker.submit(commands)
    answers: list[Any] = []
    while len(answers) < calls:
        answers += (await worker.collect(LONG)).outcomes
    return {session: outcome.messages[0]["content"] for session, outcome in answers}


def test_no_answer_is_lost_between_polls(tmp_path):
    async def use(worker: EnvWorker) -> dict[int, str]:
        await answered(worker, *(Reset(number, "a", number, False) for number in range(6)))
        await worker.submit([Step(number, f"wait-for {tmp_path / str(number)}") for number in range(3)])
        answers = await answered(worker, *(Step(number, "go") for number in range(3, 6)))
        assert (await worker.collect(SOON)).outcomes == []
        for number in range(3):
            (tmp_path / str(number)).touch()
            ((session, outcome),) = (await worker.collect(LONG)).outcomes
            answers[session] = outcome.messages[0]["content"].split()[-1]
        return answers

    assert run(use) == {0: "1", 1: "1", 2: "1", 3: "go 3 1", 4: "go 4 1", 5: "go 5 1"}


def test_a_session_closed_in_the_call_that_opened_it_keeps_no_environment():
    async def use(worker: EnvWorker) -> list[int]:
        await worker.submit([Reset(0, "a", 0, False), Close(0), Close(1)])
        reports = [await worker.collect(LONG)]
        ((_, outcome),) = reports[0].outcomes
        assert not isinstance(outcome, Observation)
        await worker.submit([Reset(1, "a", 1, False)])
        reports += [await worker.collect(LONG), await worker.collect(SOON)]
        ((_, observation),) = reports[1].outcomes
        assert observation.messages[0]["content"] == "seed 1, episode 1"
        return [report.counts["made"] for report in reports]

    assert run(use) == [0, 1, 0], "a report has what is new"


def test_a_second_reset_of_a_session_keeps_its_environment():
    async def use(worker: EnvWorker) -> list[str]:
        texts = [(await answered(worker, Reset(0, "a", seed, False)))[0] for seed in (1, 2)]
        await worker.submit([Close(0)])
        return [*texts, (await answered(worker, Reset(1, "a", 3, False)))[1]]

    assert run(use) == ["seed 1, episode 1", "seed 2, episode 2", "seed 3, episode 3"]


def test_closing_frees_the_environment_for_the_next_command_of_the_same_batch():
    async def use(worker: EnvWorker) -> dict[int, str]:
        await answered(worker, Reset(0, "a", 0, False))
        return await answered(worker, Close(0), Reset(1, "a", 1, False))

    assert run(use) == {1: "seed 1, episode 2"}


def test_an_error_of_the_worker_itself_fails_the_poll():
    async def use(worker: EnvWorker) -> None:
        await answered(worker, Reset(0, "a", 0, False))
        worker._sessions[0]._config = None
        await worker.submit([Step(0, "go")])
        with pytest.raises(AttributeError):
            await worker.collect(LONG)

    run(use)


def test_a_report_leaves_at_once_if_no_call_is_left_and_soon_if_others_run(tmp_path, monkeypatch):
    async def use(worker: EnvWorker) -> None:
        monkeypatch.setattr("roll.agentic.worker.GATHER_SECONDS", 2 * LONG)
        await worker.submit([Reset(number, "a", number, False) for number in range(3)])
        began = asyncio.get_running_loop().time()
        assert len((await worker.collect(LONG)).outcomes) == 3
        assert asyncio.get_running_loop().time() - began < LONG
        monkeypatch.setattr("roll.agentic.worker.GATHER_SECONDS", SOON)
        await worker.submit([Step(0, f"wait-for {tmp_path / 'free'}"), Step(1, "go")])
        assert [session for session, _ in (await worker.collect(LONG)).outcomes] == [1]
        (tmp_path / "free").touch()
        assert [session for session, _ in (await worker.collect(LONG)).outcomes] == [0]

    run(use)


@pytest.mark.parametrize("module", ["worker", "pool"])
def test_loading_it_loads_no_heavy_library(module):
    code = (
        f"import sys, roll.agentic.{module}\n"
        "sys.exit(' '.join(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules))) or None)"
    )
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
