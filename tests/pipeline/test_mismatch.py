"""What a run does when trainer and engine disagree under equal weights."""

import logging
import math

import pytest
from odd_engines import SHIFT
from runs import run_pipeline
from tiny import make_task, tiny_config

from roll.configs.loader import config_from_tree
from roll.configs.run import RLVRConfig
from roll.pipeline.algorithm import MismatchTooLarge, build_algorithms, check_mismatch

WARNS = RLVRConfig(mismatch_alarm=0.01)
STOPS = RLVRConfig(mismatch_alarm=0.01, mismatch_action="stop")


def metrics(value):
    return {"mismatch/abs_mean": value, "mismatch/max": 3 * value, "mismatch/tokens": 120.0}


def test_a_warning_names_step_value_and_tokens_once(caplog):
    with caplog.at_level(logging.WARNING):
        check_mismatch(WARNS, 7, metrics(0.02))
    (record,) = caplog.records
    for part in ("step 7", "0.02 nats", "over 120 tokens", "at most 0.06", "mismatch_alarm allows 0.01"):
        assert part in record.getMessage()


@pytest.mark.parametrize("value", [0.02, math.inf, math.nan])
def test_an_alarm_that_stops_raises(value):
    with pytest.raises(MismatchTooLarge, match="step 7"):
        check_mismatch(STOPS, 7, metrics(value))


@pytest.mark.parametrize("found", [metrics(0.01), {"mismatch/tokens": 0.0}, {}])
def test_nothing_is_said_within_the_limit_or_of_a_step_that_measured_nothing(found, caplog):
    check_mismatch(STOPS, 7, found)
    check_mismatch(WARNS, 7, found)
    assert not caplog.records


def test_without_a_limit_there_is_no_alarm_and_truncated_sampling_is_not_measured(tmp_path, caplog):
    def config(**changes):
        return config_from_tree(tiny_config(tmp_path, **changes))

    check_mismatch(config(), 7, metrics(100.0))
    assert not caplog.records
    assert build_algorithms(config()).objective.monitored
    for truncation in ({"top_p": 0.9}, {"top_k": 5}):
        changes = {f"actor_infer__generating_args__{name}": value for name, value in truncation.items()}
        assert not build_algorithms(config(**changes)).objective.monitored


@pytest.mark.tier("all")
def test_an_engine_whose_record_is_off_raises_the_alarm_though_its_weights_are_right(tmp_path, ray_cluster, capfd):
    make_task(tmp_path)
    changes = {"actor_infer__worker_cls": "odd_engines:ShiftedRecord", "weight_update__canary_interval": 2}
    config = tiny_config(tmp_path, **changes, max_steps=3, mismatch_alarm=0.1)
    run = run_pipeline(tmp_path, ray_cluster, config)
    for step in run.metrics:
        assert step["mismatch/mean"] == pytest.approx(SHIFT, abs=1e-4)
        assert step["mismatch/p50"] == pytest.approx(SHIFT, rel=0.06)
        assert step["mismatch/std"] < 1e-4
    assert [step["step"] for step in run.metrics if "mismatch/canary_max" in step] == [2]
    assert next(step for step in run.metrics if step["step"] == 2)["mismatch/canary_max"] < 1e-5
    assert capfd.readouterr().err.count("mismatch_alarm allows 0.1") == 3

    stopped = run_pipeline(tmp_path, ray_cluster, {**config, "mismatch_action": "stop"}, expect=1)
    assert "step 1: log-probabilities of trainer and engine differ by 0.5 nats" in stopped.summary["error"]


@pytest.mark.tier("all")
def test_an_engine_that_computes_something_else_stops_the_run_at_the_canaries(tmp_path, ray_cluster):
    make_task(tmp_path)
    changes = {"actor_infer__worker_cls": "odd_engines:ShiftedScores", "weight_update__canary_interval": 1}
    run = run_pipeline(tmp_path, ray_cluster, tiny_config(tmp_path, **changes), expect=1)
    assert "actor_infer/0, version 1: its log-probabilities of the canary sequences" in run.summary["error"]
    assert "by 0.5 nats per token on average (at most 0.001 allowed" in run.summary["error"]
