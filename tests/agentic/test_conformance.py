from __future__ import annotations

import os
import select
import threading
from pathlib import Path

import pytest

from roll.agentic.conformance import ConformanceReport, Finding, check_env, render_report

SAMPLES = "tests.agentic.sample_envs:"
FAILS_ONE_CHECK = {"SeedsGlobally", "GoesOnAfterTheEnd", "FrameIsArray", "BoundToThread", "CloseRaises", "LeaksFiles"}


def report_on(name: str, *, deadline_seconds: float = 60.0, **env_config) -> ConformanceReport:
    return check_env(SAMPLES + name, env_config, episodes=3, deadline_seconds=deadline_seconds)


def failures(report: ConformanceReport) -> dict[str, str]:
    return {finding.name: finding.message for finding in report.findings if finding.level == "failed"}


def warnings(report: ConformanceReport) -> dict[str, str]:
    return {finding.name: finding.message for finding in report.findings if finding.level == "warning"}


@pytest.mark.parametrize("name", ["GoodEnv", "AnswersTheEndAgain", "Frugal"])
def test_a_good_environment_passes_without_warnings(name):
    report = report_on(name)
    assert {finding.level for finding in report.findings} == {"passed"}
    assert report.passed
    assert "keeps the interface" in render_report(report)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("env_type", "env_config"),
    [
        ("frozen_lake", {"is_slippery": True}),
        ("frozen_lake", {"instructions": False, "action_format": "plain", "observation": "coordinates"}),
        ("sokoban", {}),
        pytest.param("number_guessing", {}, marks=pytest.mark.tier("quick")),
        ("reasoning_gym", {"dataset": "chain_sum", "max_attempts": 2}),
    ],
)
def test_built_in_environments_pass_without_warnings(env_type, env_config):
    report = check_env(env_type, env_config, episodes=5, deadline_seconds=60)
    assert {finding.level for finding in report.findings} == {"passed"}, render_report(report)


def test_the_environment_of_the_page_passes(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    (tmp_path / "my_games_of_the_page.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    report = check_env("my_games_of_the_page:Parity", {"digits": 4}, episodes=5, deadline_seconds=60)
    assert {finding.level for finding in report.findings} == {"passed"}, render_report(report)


@pytest.mark.tier("all")
@pytest.mark.parametrize("env_type", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"])
def test_games_of_gymnasium_pass(env_type):
    report = check_env(env_type, {}, episodes=3, deadline_seconds=60)
    assert report.passed, render_report(report)


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("RaisesAtReset", "reset", "reset(seed=0) raised OSError: no server (sample_envs.py:"),
        ("RaisesOnOddText", "odd actions", "raised ValueError: invalid literal for int()"),
        ("OldInterface", "answers", "it has to be (text, reward, terminated, truncated, info)"),
        ("OldReset", "reset", "it has to be (text, info)"),
        ("RewardIsText", "answers", "the reward is '1.0' (str); it has to be a number"),
        ("FlagIsNumber", "answers", "terminated is 0 (int); it has to be a bool"),
        ("GlobalRandomness", "same seed", "differ at answer 0: text is"),
        ("RemembersEpisodes", "same seed", "self.np_random"),
        ("SeedsGlobally", "separate state", "one beside another environment's differ"),
        ("SharesState", "separate state", "keep state in the instance"),
        ("GoesOnAfterTheEnd", "after the end", "raise `gymnasium.error.ResetNeeded`"),
        ("FrameIsArray", "frames", "(ndarray); it has to be a str"),
        ("BoundToThread", "threads", "made in another thread"),
        ("CloseRaises", "close", "close() raised ValueError: cannot close"),
        ("CloseOnce", "close", "already closed"),
        ("LeaksFiles", "leaks", "open files"),
        ("LeaksThreads", "leaks", "threads"),
        ("LeaksProcesses", "leaks", "child processes"),
        ("LeaksMemory", "leaks", "MiB of memory"),
    ],
)
def test_a_defect_is_named(name, check, words):
    report = report_on(name)
    assert words in failures(report)[check], render_report(report)
    assert not report.passed
    if name in FAILS_ONE_CHECK:
        assert len(failures(report)) == 1


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("IgnoresSeed", "other seeds", "3 seeds gave one and the same episode"),
        ("NeverInvalid", "odd actions", "info['action_is_valid'] = False"),
        ("NoSuccess", "success", "never given"),
    ],
)
def test_a_doubt_is_a_warning_and_no_failure(name, check, words):
    report = report_on(name)
    assert words in warnings(report)[check]
    assert report.passed


@pytest.mark.tier("all")
def test_an_episode_without_an_end_is_a_warning():
    assert "was not seen" in warnings(report_on("GoodEnv", length=10**6))["after the end"]


@pytest.mark.tier("all")
def test_a_hanging_call_is_reported_and_the_other_checks_go_on():
    report = report_on("HangsAtStep", deadline_seconds=2.0)
    assert "did not return within 2 s" in failures(report)["answers"]
    assert "step(" in failures(report)["answers"]
    assert report.findings[-1].name == "process" and not report.findings[-1].passed
    assert {finding.name: finding.level for finding in report.findings}["reset"] == "passed"


@pytest.mark.tier("all")
def test_an_environment_that_hangs_again_and_again_is_given_up():
    report = report_on("HangsAtClose", deadline_seconds=2.0)
    assert "close() did not return" in failures(report)["reset"]
    assert "was not run" in warnings(report)["leaks"]


@pytest.mark.tier("all")
def test_an_environment_that_cannot_be_made_in_time_is_reported():
    report = check_env(SAMPLES + "SlowToMake", {}, make_deadline_seconds=3.0)
    assert "making the environment did not return within 3 s" in failures(report)["make"]


def test_an_environment_that_ends_its_process_is_reported():
    report = report_on("EndsItsProcess")
    assert "the process ended (signal 9) during step(" in failures(report)["answers"]


def test_what_cannot_be_made_stops_the_check():
    report = check_env("frozen_laek", {})
    assert "did you mean `frozen_lake`?" in failures(report)["make"]
    assert "was not run" in warnings(report)["leaks"]


def test_options_that_cannot_travel_are_named():
    report = check_env("frozen_lake", {"symbols": threading.Lock()})
    assert [finding.name for finding in report.findings] == ["pickling"]
    assert "plain values" in failures(report)["pickling"]


def test_nothing_is_left_of_what_an_environment_started(tmp_path):
    report_on("LeaksProcesses", list_in=str(tmp_path / "children"))
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) > 20
    assert [child for child in children if not ends(child)] == []


def ends(process: int) -> bool:
    """Whether a process is gone, or goes within ten seconds."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


def test_a_report_reads_as_lines_and_a_verdict():
    failed = Finding("odd actions", "failed", "wrong")
    findings = (Finding("make", "passed", "made"), failed, Finding("x", "warning", "?"))
    assert render_report(ConformanceReport("mine", findings)).split("\n") == [
        "make         ok       made",
        "odd actions  FAILED   wrong",
        "x            warning  ?",
        "mine breaks the interface in 1 of 3 checks, with 1 warning",
    ]
