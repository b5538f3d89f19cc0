"""What is thinned out keeps its peaks, shares are those of all spans, and the verdict names who waits."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.report.files import RunFiles, read_run
from roll.report.findings import findings
from roll.report.lanes import drawn_lanes, read_trace
from roll.report.page import excerpts, page_data, spread
from roll.report.panels import sections_of, series_of, thin

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(VALUES, st.integers(4, 60))
def test_thinning_keeps_recorded_points_their_extremes_and_the_ends(values, most):
    points = list(enumerate(values))
    kept = thin(points, most)
    finite = [value for value in values if value is not None]
    left = [value for _, value in kept if value is not None]
    assert len(kept) <= most and kept == sorted(set(kept) & set(points), key=lambda point: point[0])
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    if finite:
        assert (min(left), max(left)) == (min(finite), max(finite))


def test_a_metric_of_some_steps_has_steps_of_its_own():
    series = series_of([{"step": 0, "a": 1.5}, {"step": 1, "a": None, "b": 2}])
    assert series["steps"] == [0, 1] and series["thinned"] is None
    assert series["series"] == {"a": {"values": [1.5, None]}, "b": {"values": [2], "steps": [1]}}


def test_metrics_that_nobody_has_heard_of_are_shown_too():
    sections = {section.title: section for section in sections_of(["step", "actor/new", "env/a/x", "env/b/x", "zzz"])}
    assert [panel.metrics for panel in sections["Policy and optimizer"].panels] == [["actor/new"]]
    assert [(panel.title, panel.metrics) for panel in sections["Environments"].panels] == [
        ("env/…/x", ["env/a/x", "env/b/x"])
    ]
    assert [panel.metrics for panel in sections["Everything else"].panels] == [["zzz"]]


def test_shares_are_those_of_the_training_time_and_not_of_the_start(make_run):
    trace = read_trace(make_run().timeline)
    assert trace.training_window == (10_000_000, 16_000_000)
    shares = {lane.label: lane.busy_share(trace.training_window) for lane in trace.lanes}
    assert shares["actor_infer/0"] == pytest.approx(0.4) and shares["actor_train/0"] == pytest.approx(0.9)
    assert shares["rollout"] == 0 and shares["train"] == pytest.approx(0.9)
    assert [lane.label for lane in trace.lanes][:4] == ["actor_infer/0", "actor_train/0", "rollout", "train"]


def test_a_timeline_that_is_being_written_is_read_as_far_as_it_goes(make_run):
    run = make_run()
    whole = run.timeline.read_text()
    run.timeline.write_text(whole[: int(len(whole) * 0.7)])
    assert 0 < sum(len(lane.spans) for lane in read_trace(run.timeline).lanes)


def test_spans_that_are_not_drawn_one_by_one_are_drawn_as_shares_of_stretches(make_run):
    trace = read_trace(make_run(steps=50).timeline)
    whole = drawn_lanes(trace)
    cut = drawn_lanes(trace, first_step=7, max_spans=60, bins=11)
    assert whole["bins"] == 0 and whole["detail_from"] == 0
    assert cut["spans_recorded"] == sum(len(lane["start"]) for lane in whole["lanes"])
    assert sum(len(lane["start"]) for lane in cut["lanes"]) <= 60 + len(cut["lanes"])
    for lane, every in zip(cut["lanes"], whole["lanes"], strict=True):
        assert lane["busy"] == every["busy"] and lane["shares"] == every["shares"]
        before = {state: sum(parts) / 1000 * cut["detail_from"] / 11 for state, parts in lane["bins"].items()}
        for state in range(len(cut["states"])):
            spans = zip(every["start"], every["length"], every["state"], strict=True)
            expected = sum(max(0, min(at + long, cut["detail_from"]) - at) for at, long, of in spans if of == state)
            assert before.get(state, 0.0) == pytest.approx(expected, abs=0.001 * cut["detail_from"])
    # 50 steps of this process, of which the first ended long before what is drawn one by one.
    assert cut["step_first"] + len(cut["step_ends"]) == 7 + 50


def test_the_drawn_steps_follow_the_last_resume_even_one_from_an_earlier_checkpoint(make_run):
    run = read_run(make_run().root)
    data = page_data(replace(run, summary={**run.summary, "resumed_at": [10, 5]}), 0.0)
    assert data["timeline"]["step_first"] == 6


def test_samples_are_of_steps_spread_over_the_run_with_both_ends(make_sample):
    records = [{"step": step, "prompt": "p", "response": "x" * 500} for step in range(100)]
    kept = [sample["step"] for sample in excerpts(records, max_bytes=8_000)]
    assert (kept[0], kept[-1]) == (0, 99) and 8 <= len(kept) <= 15
    assert max(b - a for a, b in zip(kept, kept[1:], strict=False)) <= 15
    assert len(excerpts(records)) == 100
    assert spread([1, 2, 3], 2) == [1, 3]


def test_a_sample_with_all_its_tokens_is_not_told_twice_and_a_long_text_is_cut_in_the_middle():
    whole = {"step": 1, "prompt": "p", "response": "46", "tokens": {"texts": ["46"], "left_out": 0}}
    cut = {"step": 1, "prompt": "a" * 5000 + "z", "response": "46", "tokens": {"texts": ["4"], "left_out": 1}}
    first, second = excerpts([whole, cut])
    assert (first["response"], second["response"]) == ("", "46")
    assert "1001 characters left out" in second["prompt"] and second["prompt"].endswith("z")


def run_with(idle_engine, idle_trainer, config=None, **more):
    steps = [
        {"step": step, "time/step": 2.0, "idle/actor_infer": idle_engine, "idle/actor_train": idle_trainer, **more}
        for step in range(1, 6)
    ]
    return RunFiles(root=None, metrics=steps, config=config or {})


APART = {"async_generation_ratio": 1.0, "actor_train": {"device_mapping": [0]}, "actor_infer": {"device_mapping": [1]}}
SHARED = {"actor_train": {"device_mapping": [0, 1]}, "actor_infer": {"device_mapping": [1]}}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_with(0.6, 0.1, APART), "The engine waits for the trainer"),
        (run_with(0.1, 0.6), "The trainer waits for rollouts"),
        (run_with(0.1, 0.1), "keep each other busy"),
        (run_with(0.5, 0.5, SHARED), "share their devices"),
        (run_with(0.5, 0.5, {"async_generation_ratio": 0.0}), "take turns"),
        (run_with(0.5, 0.5, APART), "Both wait"),
        (run_with(0.0, 0.0, **{"weights/stall_seconds": 0.5}), "new weights 25%"),
        (run_with(0.0, 0.0, **{"ledger/issued": 10, "ledger/dropped/stale": 2}), "20% of the groups"),
        (run_with(0.0, 0.0, **{"engine/restarts": 2, "engine/reissued": 5}), "2 times; 5 requests"),
        (run_with(0.0, 0.0, **{"response/truncated_share": 0.5}), "50% of the responses"),
        (run_with(0.0, 0.0, **{"reward/zero_variance_groups": 0.9}), "90% of the groups"),
        (run_with(0.0, 0.0, **{"time/reference": 1.0}), "reference works for 50%"),
        (run_with(0.0, 0.0, **{"actor_logp/wait_seconds": 1.0}), "waits for log-probabilities of `actor_logp` 50%"),
    ],
)
def test_the_first_finding_is_what_costs_most(run, words):
    assert words in findings(run)[0].text


def test_repairs_before_a_resume_count_too():
    run = run_with(0.0, 0.0)
    for step, restarts in zip(run.metrics, (1, 2, 0, 0, 3), strict=True):
        step |= {"engine/restarts": restarts, "engine/reissued": 10 * restarts}
    assert "5 times; 50 requests" in findings(run)[0].text


def test_groups_of_equal_scores_teach_where_they_are_not_compared():
    def texts(**config):
        run = run_with(0.0, 0.0, config, **{"reward/zero_variance_groups": 0.9})
        return [each.text for each in findings(run) if "teach nothing" in each.text]

    assert texts() and texts(adv_estimator="rloo")
    assert not texts(adv_estimator="gae") and not texts(adv_estimator="remax") and not texts(distillation={"coef": 1.0})


def test_a_ratio_that_only_makes_tokens_older_is_named():
    def remedy(ratio, engine, trainer):
        return findings(run_with(engine, trainer, {**APART, "async_generation_ratio": ratio}))[0].remedy

    assert "`async_generation_ratio: 1` is enough" in remedy(2, 0.6, 0.1)
    assert "is enough" not in remedy(1, 0.6, 0.1) + remedy(2, 0.1, 0.6)


def test_advice_for_a_run_of_pictures_names_keys_that_it_has():
    def remedy(engine, trainer, pipeline):
        return findings(run_with(engine, trainer, {**APART, "pipeline": pipeline}))[0].remedy

    training, drawing = remedy(0.6, 0.1, "image"), remedy(0.1, 0.6, "image")
    assert "per_device_train_batch_size" in training and "max_tokens" not in training
    assert "num_inference_steps" in drawing and "responses" not in drawing
    assert "max_tokens_per_microbatch_in_train" in remedy(0.6, 0.1, "rlvr")
    assert "shorten responses" in remedy(0.1, 0.6, "rlvr")


def test_the_first_step_is_not_counted_where_others_tell():
    run = run_with(0.6, 0.1)
    run.metrics[0].update({"idle/actor_infer": 0.0, "time/step": 1000.0})
    (finding,) = findings(run)
    assert finding.share == pytest.approx(0.6) and finding.evidence.endswith("steps 2 to 5")


def test_a_slow_reward_is_named(make_run):
    run = read_run(make_run().root)
    lines = run.root.joinpath("timeline.json").read_text().splitlines()
    slow = [
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 99, "args": {"name": "rewards.sums/all"}},
        {"ph": "X", "name": "busy", "pid": 2, "tid": 99, "ts": 10_000_000, "dur": 5_400_000},
    ]
    run.root.joinpath("timeline.json").write_text("\n".join([*lines[:-1], *map(json.dumps, slow), "]"]))
    waiting = run_with(0.5, 0.5, {"async_generation_ratio": 1.0})
    slow_run = RunFiles(root=None, metrics=waiting.metrics, config=waiting.config, trace=read_run(run.root).trace)
    assert "rewards.sums worked 90%" in findings(slow_run)[0].text
