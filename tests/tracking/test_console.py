"""The console: plain lines where nobody watches, a live view on a terminal, and never an exception."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console as RichConsole

from roll.tracking.console import Console, Progress, closing_text, duration, live_view, plain_line
from roll.tracking.summary import VALIDATION_LOSS


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


METRICS = {
    "reward/mean": 0.62,
    "lag/mean": 0.75,
    "lag/max": 1,
    "tokens_per_second/actor_infer": 5123.0,
    "idle/actor_infer": 0.12,
    "idle/actor_train": 0.456,
    "actor/loss": 0.1,
}


def console(stream, clock=None, **options):
    return Console("quickstart", options.pop("max_steps", 40), stream=stream, clock=clock or Clock(), **options)


def test_a_plain_line_has_everything_worth_knowing():
    clock, stream = Clock(), io.StringIO()
    view = console(stream, clock)
    view.step({"val/addition/accuracy": 0.332}, 0)
    clock.now = 10.0
    view.step(METRICS, 1)
    clock.now = 20.0
    view.step({**METRICS, "val/addition/accuracy": 0.5}, 2)
    assert stream.getvalue().splitlines() == [
        "step 0/40 | val addition 33.2% | 0:00 elapsed",
        "step 1/40 | reward 0.620 | val addition 33.2% | lag 0.75 mean, 1 max | tokens/s actor_infer 5.1k | "
        "idle actor_infer 12%, actor_train 46% | 0:10 elapsed, 6:30 left",
        "step 2/40 | reward 0.620 | val addition 33.2% -> 50.0% | lag 0.75 mean, 1 max | "
        "tokens/s actor_infer 5.1k | idle actor_infer 12%, actor_train 46% | 0:20 elapsed, 6:20 left",
    ]


def test_lines_come_every_logging_steps_and_at_validations_and_at_the_end():
    stream = io.StringIO()
    view = console(stream, logging_steps=5, max_steps=12)
    for step in range(1, 13):
        view.step({"val/a/accuracy": 0.5} if step == 7 else {}, step)
    assert [int(re.match(r"step (\d+)", line)[1]) for line in stream.getvalue().splitlines()] == [5, 7, 10, 12]


def test_a_validation_that_ends_after_later_steps_has_its_own_line():
    stream = io.StringIO()
    view = console(stream, logging_steps=5)
    view.validation({"val/addition/accuracy": 0.25}, 0)
    view.step({"reward/mean": 0.5}, 5)
    view.validation({"val/addition/accuracy": 0.75, "val/logic/accuracy": 0.5}, 2)
    first, step, later = stream.getvalue().splitlines()
    assert first == "validation of version 0: addition 25.0%" and step.startswith("step 5/40 | reward 0.500 | val addi")
    assert later == "validation of version 2: addition 25.0% -> 75.0%, logic 50.0%"
    assert view._progress.step == 5 and view._progress.first_accuracy == {"addition": 0.25, "logic": 0.5}


def test_the_end_of_a_run_is_told_once_with_its_error():
    stream = io.StringIO()
    view = console(stream)
    summary = {
        "status": "failed", "steps": 12, "seconds": 75.4, "val/first": {"addition": 0.31},
        "val/last": {"addition": 0.915}, "lag/max": 1, "error": "EngineFailed: replica 1",
    }  # fmt: skip
    view.close(summary)
    view.close(summary)
    assert stream.getvalue() == (
        "failed: 12 steps in 1:15, val addition 31.0% -> 91.5%, lag max 1\nEngineFailed: replica 1\n"
    )


def test_a_summary_of_a_run_that_did_nothing_can_be_told():
    summary = {"status": "interrupted", "steps": 0, "seconds": 3.0, "val/first": {}, "val/last": {}, "lag/max": None}
    assert closing_text(summary) == "interrupted: 0 steps in 0:03"
    summary |= {f"{VALIDATION_LOSS}/{which}": 0.0 for which in ("first", "last")}
    assert closing_text(summary) == "interrupted: 0 steps in 0:03, val loss 0.0000 -> 0.0000"


def test_terminal_commands_in_a_text_are_not_obeyed():
    stream = io.StringIO()
    console(stream).event("model said \x1b[2J\x07 [bold]hi[/bold]\nsecond line")
    assert stream.getvalue() == "model said  [2J  [bold]hi[/bold]\nsecond line\n"


def test_a_stream_that_knows_only_ascii_gets_ascii():
    raw = io.BytesIO()
    view = console(io.TextIOWrapper(raw, encoding="ascii"))
    view.event("größer → \ud83d")
    view.step({"val/größe/accuracy": 0.5}, 1)
    assert raw.getvalue().startswith(b"gr??er ? ?\nstep 1/40 | val gr??e 50.0%")


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError("reader went away")


def test_a_reader_that_went_away_does_not_stop_the_run(caplog):
    view = console(ClosedPipe())
    view.event("one")
    view.step(METRICS, 1)
    view.close({"status": "success", "steps": 1, "seconds": 1.0})
    assert caplog.text.count("no more console output") == 1


def test_values_that_are_not_finite_are_shown():
    progress = Progress("run", 10, 0.0).after({"reward/mean": float("nan"), "lag/mean": float("inf")}, 1, 1.0)
    assert "reward nan" in plain_line(progress, 1.0)


def test_time_left_follows_the_recent_steps_only():
    progress = Progress("run", 100, 0.0)
    for step in range(0, 31):
        progress = progress.after({}, step, 100.0 * min(step, 5) + 2.0 * max(0, step - 5))
    last = 500.0 + 2.0 * 25
    assert progress.seconds_left(last) == pytest.approx(140.0)
    assert progress.seconds_left(last + 1.0) == pytest.approx(139.0)
    assert progress.seconds_left(last + 1e6) == 0.0


def test_time_left_is_unknown_before_a_step_was_timed_and_zero_at_the_end():
    fresh = Progress("run", 3, 0.0)
    assert fresh.seconds_left(5.0) is None
    assert fresh.after({}, 0, 5.0).seconds_left(6.0) is None
    assert fresh.after({}, 3, 5.0).seconds_left(6.0) == 0.0


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.9, "1:15"), (3675, "1:01:15"), (-3, "0:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def rendered(width, height=25, encoding="utf-8"):
    progress = Progress("quickstart ü", 40, 0.0).after({**METRICS, "val/größe/accuracy": 0.5}, 12, 60.0)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    RichConsole(file=stream, width=width, height=height, force_terminal=True, no_color=True).print(
        live_view(progress, 60.0)
    )
    stream.flush()
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", raw.getvalue().decode(encoding)).splitlines()


@pytest.mark.parametrize("width", [1, 2, 7, 20, 60, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_live_view_fits_any_width(width, encoding):
    lines = rendered(width, encoding=encoding)
    assert 0 < len(lines) <= 8
    assert all(len(line) <= width for line in lines)


def test_the_live_view_says_what_the_plain_line_says():
    lines = rendered(100)
    labels = [line.split()[0] for line in lines[2:]]
    assert labels == ["reward", "val", "lag", "idle", "12%", "46%"], "the bar has a line, and so has each fact and role"
    text = "\n".join(lines)
    for part in ("step 12/40", "1:00 elapsed", "reward    0.620", "größe 50.0%", "0.75 mean, 1 max"):
        assert part in text


def test_each_role_has_a_line_with_its_idle_share_and_its_tokens():
    lines = rendered(100)
    assert lines[5].split() == ["idle", "tokens/s", "role"]
    assert lines[6] == "  12%      5.1k  actor_infer  " + "#" * 18
    assert lines[7] == "  46%            actor_train  " + "#" * 11


def test_the_numbers_of_every_role_are_seen_on_a_narrow_terminal():
    assert [line[:5] for line in rendered(20)[6:8]] == ["  12%", "  46%"]


def test_the_live_view_has_the_time_that_is_left():
    progress = Progress("run", 10, 0.0).after({}, 1, 10.0).after({}, 2, 20.0)
    stream = io.StringIO()
    RichConsole(file=stream, width=80, force_terminal=True, no_color=True).print(live_view(progress, 25.0))
    assert "step 2/10  0:25 elapsed, 1:15 left" in stream.getvalue()


def test_a_role_whose_share_is_not_a_number_is_shown():
    progress = Progress("run", 10, 0.0).after({"idle/actor_train": float("nan")}, 1, 1.0)
    stream = io.StringIO()
    RichConsole(file=stream, width=80).print(live_view(progress, 1.0))
    assert "nan%" in stream.getvalue()


LIVE_RUN = """
import logging
from pathlib import Path
from roll.tracking.console import Console
from roll.tracking.logs import configure_logging
configure_logging(Path("logs"), "driver", console=True)
view = Console("quickstart", 3)
for step in range(1, 4):
    view.step({"reward/mean": step / 10, "val/addition/accuracy": step / 5}, step)
    print("printed by somebody", step)
    logging.getLogger("roll").warning("warned %d", step)
view.event("published version 3")
view.close({"status": "success", "steps": 3, "seconds": 1.0})
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)


def in_terminal(code, **environment):
    """Run Python code on a pseudo terminal; returns exit status and everything it printed there."""
    master, slave = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env={**clean, **environment}
    )
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 65536):
            output += chunk
    except OSError as error:
        assert error.errno == 5, error  # how Linux says that the other side of a terminal is closed
    finally:
        os.close(master)
    return process.wait(timeout=60), output.decode()


def test_on_a_terminal_the_view_is_live_and_gives_the_cursor_back():
    status, output = in_terminal(LIVE_RUN, TERM="xterm-256color", PYTHONUTF8="1")
    assert status == 0
    assert "\x1b[?25l" in output and output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert re.search(r"\x1b\[[\d;]*38;5", output)
    for line in ("printed by somebody 2", "warned 2", "published version 3"):
        assert line in output
    assert output.rstrip().endswith("success: 3 steps in 0:01")


def test_no_color_means_no_colour():
    status, output = in_terminal(LIVE_RUN, TERM="xterm-256color", PYTHONUTF8="1", NO_COLOR="1")
    assert status == 0
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])[;m]", output)


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines():
    status, output = in_terminal(LIVE_RUN, TERM="dumb")
    assert status == 0
    assert "\x1b" not in output
    assert "step 3/3 | reward 0.300 | val addition 20.0% -> 60.0%" in output
