"""Roles have no console: their warnings and errors are shown with their names, their chatter is not, unless asked."""

import pytest

from roll.tracking.logs import MOST_BYTES, MOST_LINES, LogWatch

RECORD = "2026-11-22 15:45:56,123 {level} {logger}: {text}\n"


@pytest.fixture
def watch(tmp_path):
    """A function from what is shown to (look, lines shown). Tests look, not the clock."""

    def open_watch(shown="warnings"):
        lines = []
        watch = LogWatch(tmp_path, shown, lines.append)
        watch.close()
        return watch.look, lines

    return open_watch


def write(path, text):
    with open(path, "ab") as file:
        file.write(text.encode())


def record(level, logger, text):
    return RECORD.format(level=level, logger=logger, text=text)


def test_our_warnings_and_everybodys_errors_are_shown_with_the_role(watch, tmp_path):
    look, lines = watch()
    log = tmp_path / "actor_train_0.log"
    write(log, record("INFO", "roll.x", "started") + record("WARNING", "roll.x", "slow"))
    write(log, record("WARNING", "transformers", "deprecated") + record("ERROR", "vllm.engine", "out of memory"))
    write(log, record("WARNING", "rolling", "not ours"))
    look()
    look()
    assert lines == [
        "actor_train_0: 2026-11-22 15:45:56,123 WARNING roll.x: slow",
        "actor_train_0: 2026-11-22 15:45:56,123 ERROR vllm.engine: out of memory",
    ]


def test_the_traceback_of_what_is_shown_is_shown_and_no_other(watch, tmp_path):
    look, lines = watch()
    log = tmp_path / "reference_0.log"
    write(log, record("INFO", "roll.x", "failed") + "Traceback of no matter\n")
    write(log, record("ERROR", "roll.x", "failed") + "Traceback\n  File x\n")
    look()
    assert lines[1:] == ["reference_0: Traceback", "reference_0:   File x"] and len(lines) == 3


@pytest.mark.parametrize(
    "line",
    [
        "ERROR 06-01 12:00:00 [core.py:7] engine died",
        "(EngineCore_0 pid=77) ERROR 06-01 12:00:00 [core.py:7] engine died",
        "[2026-06-01 12:00:00,000] [ERROR] [engine.py:1:f] overflow",
        "[2026-06-01 12:00:00,000 E 77 78] core_worker.cc:1: raylet is gone",
        "[rank0]:[E0601 12:00:00.1 ProcessGroupNCCL.cpp:1] watchdog",
        "F0601 12:00:00.123 check failed",
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_errors_that_engines_print_are_shown(watch, tmp_path, line):
    look, lines = watch()
    write(tmp_path / "actor_infer_0.out", f"{line}\n")
    look()
    assert lines == [f"actor_infer_0: {line}"]


@pytest.mark.parametrize(
    "line",
    [
        "INFO 06-01 12:00:00 [core.py:7] no ERROR at all",
        "WARNING 06-01 12:00:00 [config.py:7] eager",
        "(EngineCore_0 pid=77) INFO 06-01 12:00:00 loading",
        "[2026-06-01 12:00:00,000] [INFO] [engine.py:1:f] ready",
        "[2026-06-01 12:00:00,000 I 77 78] core_worker.cc:1: started",
        "Loading weights:  50%|#####     | ERRORS: 0",
        "",
    ],
)
def test_chatter_is_not_shown_unless_asked(watch, tmp_path, line):
    look, lines = watch()
    everything, all_lines = watch("all")
    write(tmp_path / "actor_infer_0.out", f"{line}\n")
    look()
    everything()
    assert lines == []
    assert all_lines == ([f"actor_infer_0: {line}"] if line else [])


def test_what_was_there_before_is_old_and_a_half_line_waits_for_its_end(watch, tmp_path):
    out = tmp_path / "actor_infer_0.out"
    write(out, "ERROR of an earlier process\n")
    look, lines = watch()
    write(out, "ERROR in ")
    look()
    assert lines == []
    write(out, "two parts\n")
    look()
    assert lines == ["actor_infer_0: ERROR in two parts"]


def test_a_flood_costs_a_few_lines(watch, tmp_path):
    look, lines = watch()
    out = tmp_path / "actor_infer_0.out"
    write(out, "ERROR again\n" * 1000)
    look()
    assert len(lines) == MOST_LINES + 1
    assert lines[-1] == f"actor_infer_0: {1000 - MOST_LINES} more lines in {out}"
    write(out, "x" * (3 * MOST_BYTES) + "\nERROR at last\n")
    look()
    assert lines[-1] == "actor_infer_0: ERROR at last"


def test_the_drivers_own_log_and_trackers_are_told_elsewhere(watch, tmp_path):
    look, lines = watch()
    write(tmp_path / "driver.log", record("ERROR", "roll.x", "said already"))
    write(tmp_path / "tracker_wandb.out", "ERROR no network\n")
    write(tmp_path / "driver.out", "ERROR of native code\n")
    look()
    assert lines == ["driver: ERROR of native code"]


def test_secrets_are_masked_and_bytes_that_are_no_text_are_shown(watch, tmp_path):
    look, lines = watch()
    with open(tmp_path / "actor_infer_0.out", "ab") as file:
        file.write(b"ERROR api_key=hush \xff\n")
    look()
    assert lines == ["actor_infer_0: ERROR api_key=*** \ufffd"]


def test_the_last_lines_are_shown_when_it_is_closed(tmp_path):
    lines = []
    watch = LogWatch(tmp_path, "warnings", lines.append)
    write(tmp_path / "actor_infer_0.out", "ERROR last words\n")
    watch.close()
    assert lines == ["actor_infer_0: ERROR last words"]
