"""The pool keeps its promises whatever verifiers and processes do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from roll.configs.rewards import RewardConfig
from roll.rewards.base import RewardFailed, RewardOutput
from roll.rewards.pool import RewardPool
from tests.warm_workers import COLD

pytestmark = pytest.mark.tier("all")
in_quick_tests = pytest.mark.tier("quick")
T = TypeVar("T")
USER = "tests.rewards.sample_verifiers:"


def run(pool: RewardPool, use: Callable[[RewardPool], Awaitable[T]], limit: float = 100.0) -> T:
    async def main() -> T:
        async with asyncio.timeout(limit):
            await pool.start()
            try:
                return await use(pool)
            finally:
                await pool.shutdown()

    return asyncio.run(main())


def scores(outputs: list[RewardOutput]) -> list[float]:
    return [output.score for output in outputs]


def is_gone(process_id: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)  # it needs the processor to end
        try:
            if Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
    return False


@in_quick_tests
def test_outputs_come_in_order_with_metrics_in_one_call(make_pool, judged):
    pool = make_pool(USER + "detailed", verifier_args={"scale": 2})
    records = [judged("x" * size, metadata={"level": size + 1}) for size in range(8)]
    outputs = run(pool, lambda pool: pool.score(records))
    assert outputs == [RewardOutput(2.0 * size, {"level": size + 1.0}) for size in range(8)]
    counts = pool.counts
    assert (counts.calls, counts.samples, counts.errors, counts.restarts) == (1, 8, 0, 0)


def test_workers_are_processes_without_torch_that_are_gone_after_shutdown(make_pool, judged):
    def work(pool: RewardPool) -> Awaitable[list[list[RewardOutput]]]:
        return asyncio.gather(*(pool.score([judged("")]) for _ in range(12)))

    calls = run(make_pool(USER + "process_id", num_workers=2), work)
    ids = {int(score) for outputs in calls for score in scores(outputs)}
    assert len(ids) == 2
    assert os.getpid() not in ids
    assert all(is_gone(process_id) for process_id in ids)
    cold = RewardPool("test", RewardConfig(verifier=USER + "imports_torch"), actor_options=COLD)
    assert run(cold, lambda pool: pool.score([judged("")]))[0].score == 0.0


@in_quick_tests
@pytest.mark.parametrize("response", ["raise", "none"])
def test_an_error_or_nonsense_is_retried_and_then_named(make_pool, judged, tmp_path, response):
    pool = make_pool(USER + "answer", max_retries=2, verifier_args={"folder": str(tmp_path)})
    with pytest.raises(RewardFailed) as caught:
        run(pool, lambda pool: pool.score([judged("fine"), judged(response)]))
    cause = "ArithmeticError" if response == "raise" else "RewardNonsense"
    for words in ("`test`", "train.jsonl:1", "3 attempts", cause):
        assert words in str(caught.value)
    assert (tmp_path / response).read_text() == "xxx"
    assert (tmp_path / "fine").read_text() == "x"
    assert pool.counts.errors == 3


@in_quick_tests
def test_a_passing_error_is_healed_by_a_retry(make_pool, judged, tmp_path):
    pool = make_pool(USER + "answer", verifier_args={"folder": str(tmp_path)})
    assert scores(run(pool, lambda pool: pool.score([judged("flaky")]))) == [1.0]
    assert pool.counts.errors == 2


def test_a_hang_in_python_ends_at_its_limit_and_the_process_lives_on(make_pool, judged):
    pool = make_pool(USER + "answer", timeout_seconds=1.0, max_retries=1)

    async def use(pool: RewardPool) -> list[float]:
        with pytest.raises(RewardFailed, match=r"no answer within 1 s"):
            await pool.score([judged("fine"), judged("loop")])
        return scores(await pool.score([judged("fine")]))

    assert run(pool, use) == [1.0]
    assert pool.counts.timeouts == 2
    assert pool.counts.restarts == 0


@pytest.mark.parametrize(
    ("response", "words"),
    [("deaf", "had to be killed"), ("die", "worker rewards.test/0 died")],
)
def test_what_no_alarm_ends_costs_the_process_but_no_other_response(make_pool, judged, response, words, tmp_path):
    args = {"folder": str(tmp_path)}
    pool = make_pool(USER + "answer", timeout_seconds=1.0, max_retries=0, verifier_args=args)

    async def use(pool: RewardPool) -> list[float]:
        with pytest.raises(RewardFailed, match=words):
            await pool.score([judged("fine"), judged(response), judged("good")])
        return scores(await pool.score([judged("fine")]))

    assert run(pool, use) == [1.0]
    assert (tmp_path / "good").exists()
    assert pool.counts.restarts == 2


def test_a_long_call_of_slow_responses_is_no_hang(make_pool, judged):
    pool = make_pool(USER + "answer", timeout_seconds=1.0, max_retries=0)

    async def use(pool: RewardPool) -> list[BaseException]:
        calls = [pool.score([judged("fine")] * 4), pool.score([judged("loop")] * 4)]
        return await asyncio.gather(*calls, return_exceptions=True)

    fine, looping = run(pool, use)
    assert scores(fine) == [1.0] * 4
    assert isinstance(looping, RewardFailed)
    assert pool.counts.restarts == 0


def test_a_worker_killed_from_outside_is_replaced_without_a_failure(make_pool, judged):
    pool = make_pool(USER + "process_id", max_retries=0)

    async def use(pool: RewardPool) -> tuple[float, float]:
        (before,) = await pool.score([judged("")])
        os.kill(int(before.score), signal.SIGKILL)
        (after, _) = await pool.score([judged(""), judged("")])
        return before.score, after.score

    before, after = run(pool, use)
    assert before != after
    assert is_gone(int(after))
    assert pool.counts.restarts == 1


def test_hundreds_of_waiting_responses_wait_at_once(make_pool, judged):
    pool = make_pool(USER + "wait_then_answer", verifier_args={"seconds": 0.5})

    async def use(pool: RewardPool) -> tuple[list[list[float]], float]:
        started = time.perf_counter()
        groups = await asyncio.gather(
            *(pool.score([judged(str(group * 8 + index)) for index in range(8)]) for group in range(50))
        )
        return [scores(group) for group in groups], time.perf_counter() - started

    groups, seconds = run(pool, use)
    assert groups == [[group * 8 + index for index in range(8)] for group in range(50)]
    assert seconds < 60  # one after the other they would take 200 s


def test_an_async_response_that_never_ends_or_raises_fails_alone(make_pool, judged):
    pool = make_pool(USER + "async_answer", timeout_seconds=1.0, max_retries=0)

    async def use(pool: RewardPool) -> list[object]:
        calls = [pool.score([judged(each), judged("fine")]) for each in ("never", "raise", "fine")]
        return await asyncio.gather(*calls, return_exceptions=True)

    never, raising, fine = run(pool, use)
    assert "no answer within 1 s" in str(never)
    assert "ArithmeticError" in str(raising)
    assert scores(fine) == [1.0, 1.0]
    assert pool.counts.restarts == 0


@pytest.mark.parametrize("response", [pytest.param("block", marks=pytest.mark.tier("soak")), "die"])
def test_an_async_response_that_takes_its_process_down_fails_alone(make_pool, judged, response):
    pool = make_pool(USER + "async_answer", timeout_seconds=1.0, max_retries=0)

    async def use(pool: RewardPool) -> list[object]:
        calls = [pool.score([judged(each)]) for each in ("fine", response, "fine")]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, guilty, last = run(pool, use)
    assert [scores(first), scores(last)] == [[1.0], [1.0]]
    assert isinstance(guilty, RewardFailed)


@in_quick_tests
def test_a_cancelled_score_frees_its_worker_and_harms_nobody(make_pool, judged):
    pool = make_pool(USER + "answer", timeout_seconds=1.0, max_retries=0)

    async def use(pool: RewardPool) -> list[float]:
        task = asyncio.create_task(pool.score([judged("loop")]))
        while pool.counts.calls == 0:
            await asyncio.sleep(0)
        task.cancel()
        outputs = await pool.score([judged("fine")])
        assert task.cancelled()
        return scores(outputs)

    assert run(pool, use) == [1.0]
    assert pool.counts.restarts == 0


def test_shutdown_ends_a_hanging_call_at_once(make_pool, judged):
    pool = make_pool(USER + "answer", timeout_seconds=1000)

    async def use(pool: RewardPool) -> None:
        task = asyncio.create_task(pool.score([judged("deaf")]))
        while pool.counts.calls == 0:
            await asyncio.sleep(0)
        await pool.shutdown()
        await asyncio.wait([task])
        assert task.cancelled()

    run(pool, use)  # has a limit, much shorter than the call's


@in_quick_tests
def test_nothing_starts_after_a_shutdown(make_pool, judged):
    pool = make_pool(USER + "answer")

    async def use(pool: RewardPool) -> None:
        await pool.shutdown()
        with pytest.raises(RewardFailed, match="shut down"):
            await pool.score([judged("fine")])

    run(pool, use)


def test_a_math_answer_that_cannot_be_evaluated_is_wrong_and_fails_no_group(make_pool, judged):
    pool = make_pool("math", timeout_seconds=5.0)
    endless = r"\boxed{\sum_{i=1}^{10^{12}} i^{i}}"
    answers = [r"\boxed{\frac{84}{2}}", endless, "9**9**9", "it is 42"]
    outputs = run(pool, lambda pool: pool.score([judged(answer, "42") for answer in answers]))
    assert scores(outputs) == [1.0, 0.0, 0.0, 1.0]
    assert outputs[1].metrics == {"timeout": 1.0}


def test_a_worker_that_cannot_start_is_named(make_pool, judged, tmp_path, monkeypatch):
    refusal = f"if os.getpid() != {os.getpid()}: raise OSError('no licence')"
    (tmp_path / "only_here.py").write_text(f"import os\n{refusal}\ndef judge(response): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    pool = make_pool("only_here:judge")
    with pytest.raises(RewardFailed, match="`test` did not start.*no licence"):
        run(pool, lambda pool: pool.score([judged("")]))


@in_quick_tests
def test_a_verifier_reads_modules_and_files_in_the_folder_of_the_run(make_pool, judged, tmp_path, monkeypatch):
    """The Ray of these tests was started elsewhere."""
    (tmp_path / "next_to_the_run.py").write_text("def judge(response): return float(open('answer.txt').read())\n")
    (tmp_path / "answer.txt").write_text("7")
    monkeypatch.chdir(tmp_path)
    outputs = run(make_pool("next_to_the_run:judge"), lambda pool: pool.score([judged("")]))
    assert scores(outputs) == [7.0]
