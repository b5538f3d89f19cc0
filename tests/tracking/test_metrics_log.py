"""metrics.jsonl is valid JSON whatever happens, and a crash costs at most the line being written."""

import json
import math
import os

import numpy as np
import pytest

from roll.tracking.trackers import NON_FINITE, MetricsLog, read_metrics

needs_full_device = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")


def test_each_step_is_readable_at_once(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        log.log({"reward/mean": 0.5 * step}, step)
        assert read_metrics(tmp_path / "metrics.jsonl")[-1] == {"step": step, "reward/mean": 0.5 * step}


def test_values_that_json_lacks_become_null_and_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).log({"a": math.nan, "b": -math.inf, "c": np.float32("inf"), "d": 1}, 1)
    text = path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {"step": 1, "a": None, "b": None, "c": None, "d": 1, NON_FINITE: 3}


def test_finite_steps_do_not_carry_the_count(tmp_path):
    MetricsLog(tmp_path / "m").log({"a": 1.0}, 1)
    assert NON_FINITE not in read_metrics(tmp_path / "m")[0]


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    MetricsLog(tmp_path / "m").log({"a": np.int64(3), "b": np.float32(0.5), "c": True}, np.int64(7))
    assert read_metrics(tmp_path / "m") == [{"step": 7, "a": 3, "b": 0.5, "c": 1}]


def test_what_is_no_number_is_refused_by_name_and_nothing_is_written(tmp_path):
    log = MetricsLog(tmp_path / "m")
    with pytest.raises(TypeError, match="reward/mean"):
        log.log({"reward/mean": "high"}, 1)
    with pytest.raises(ValueError, match="step"):
        log.log({"step": 1.0}, 1)
    assert read_metrics(tmp_path / "m") == []


@pytest.mark.parametrize("kept_bytes", range(1, 12))
def test_a_torn_last_line_is_left_out_wherever_it_was_torn(tmp_path, kept_bytes):
    path = tmp_path / "m"
    log = MetricsLog(path)
    log.log({"a": 1.0}, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "a": 1}'[:kept_bytes])
    assert read_metrics(path) == [{"step": 1, "a": 1.0}]


def test_a_log_continued_after_a_torn_line_loses_that_line_only(tmp_path):
    path = tmp_path / "m"
    MetricsLog(path).log({"a": 1.0}, 1)
    path.write_bytes(path.read_bytes() + b'{"step": 2, "a"')
    MetricsLog(path).log({"a": 2.0}, 2)
    assert read_metrics(path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}')
    assert read_metrics(path) == [{"step": 1}]
    MetricsLog(path).log({}, 2)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_reported_with_its_number(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


@needs_full_device
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    log = MetricsLog(path)
    with pytest.raises(OSError, match="metrics.jsonl"):
        log.log({"a": 1.0}, 1)
    with pytest.raises(OSError, match="metrics.jsonl"):
        log.close()


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(OSError, match="missing/metrics.jsonl"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl")
