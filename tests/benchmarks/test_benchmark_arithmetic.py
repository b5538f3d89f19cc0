"""What the benchmarks do with their measurements, on runs whose figures are known. Nothing is timed here."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from _pipeline import Evaluation, PipelineRun
from _rewards import digit_share, waiting_seconds
from async_overlap import compare
from logprob_memory import SIDES, compare_sides, make_inputs, one_pass
from packing import compare as compare_packing
from packing import spread_lengths
from trl_comparison import first_at_least, learning_figures, throughput_figures


def run_of(steps: list[tuple[float, float]]) -> PipelineRun:
    """A run with these seconds (step, training)."""
    return PipelineRun([{"time/step": step, "time/train": train} for step, train in steps], [])


def trace(*tracks: tuple[str, str, list[tuple[float, float, dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Events of a timeline: (actor, state, [(start, end, details)]), in seconds."""
    events: list[dict[str, Any]] = []
    for thread, (actor, state, spans) in enumerate(tracks):
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": actor}})
        for start, end, details in spans:
            times = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
            events.append({"ph": "X", "name": state, "pid": 1, "tid": thread, **times, "args": details})
    return events


def test_waits_have_the_promised_median_and_tail_and_are_the_same_in_every_run() -> None:
    waits = sorted(waiting_seconds(f"prompt {index}", visit) for index in range(2000) for visit in range(8))
    assert statistics.median(waits) == pytest.approx(0.05, rel=0.05)
    assert waits[math.floor(0.99 * len(waits))] == pytest.approx(1.0, rel=0.15)
    assert waiting_seconds("a", 0) == waiting_seconds("a", 0) != waiting_seconds("a", 1)


def test_the_synthetic_score_is_the_share_of_digits_and_bears_an_empty_response() -> None:
    assert digit_share("1a2b") == 0.5
    assert digit_share("") == 0.0


def test_full_overlap_reaches_the_bound_and_no_overlap_half_of_it() -> None:
    synchronous = run_of([(9.0, 1.0)] + [(4.0, 2.0)] * 4)
    streamed = run_of([(9.0, 2.0)] + [(2.5, 2.0)] * 4)
    assert compare(synchronous, run_of([(9.0, 2.0)] + [(2.0, 2.0)] * 4), streamed, 1)["median"] == {
        "ratio": 2.0,
        "bound": 2.0,
        "share_of_bound": 1.0,
        "streamed_over_ratio_0": 1.6,
        "streamed_over_ratio_1": 0.8,
    }
    assert compare(synchronous, run_of([(9.0, 2.0)] + [(4.0, 2.0)] * 4), None, 1)["mean"]["share_of_bound"] == 0.5


def test_rewards_as_long_as_drawing_take_half_the_time_beside_it() -> None:
    pictures = pytest.importorskip("pictures")
    judging = pictures.PICTURES * pictures.JUDGE_SECONDS
    after, during = (run_of([(99.0, 1.0)] + [(seconds + 1.0, 1.0)] * 3) for seconds in (2 * judging, judging))
    figures = pictures.compare_rewards(after, during, 1)
    assert figures["median"] == figures["mean"] == {"rewards_over_drawing": 1.0, "ratio": 2.0}


def test_windows_are_compared_by_training_seconds_and_the_accuracies_on_the_way() -> None:
    pictures = pytest.importorskip("pictures")
    events = trace(
        ("validation", "running", [(0, 1, {"version": 0}), (9, 10, {"version": 4})]), ("actor_train/0", "busy", [])
    )
    steps = [{"step": step, "time/train": 9.0 if step < 4 else 2.0} for step in range(1, 5)]
    fast = PipelineRun([*steps[:3], {**steps[3], "val/shapes/accuracy": 0.75}], events)
    full = PipelineRun([*steps[:3], {**steps[3], "time/train": 8.0, "val/shapes/accuracy": 0.5}], events)
    figures = pictures.compare_windows({"fast": fast, "full": full})
    assert figures["accuracy"] == {"fast": [0.75], "full": [0.5]}
    assert figures["full_over_fast"] == {"median": 4.0, "mean": 4.0}


def test_training_beside_a_validation_counts_as_training_time() -> None:
    events = trace(
        ("validation", "running", [(0, 10, {"version": 0}), (20, 24, {"version": 5}), (30, 34, {"version": 10})]),
        ("actor_train/0", "busy", [(10, 19, {}), (23, 29, {})]),
    )
    metrics = [{"step": 5, "val/sums/accuracy": 0.5}, {"step": 6}, {"step": 10, "val/sums/accuracy": 0.9}]
    # 20 s from the end of the first validation to the start of the last, less 3 s of the middle one without training.
    assert PipelineRun(metrics, events).evaluations("sums") == [Evaluation(5, 10.0, 0.5), Evaluation(10, 17.0, 0.9)]


def test_throughput_is_compared_with_the_fastest_trl() -> None:
    seconds = {"trl, slow": [4.0, 4.0], "trl, fast": [2.0, 2.0, 99.0], "roll, ratio 1": [1.0]}
    figures = throughput_figures(256, seconds)
    assert figures["samples_per_second"]["trl, fast"] == 128.0
    assert figures["over_best_trl"] == {"roll, ratio 1": 2.0}


def test_time_to_accuracy_is_compared_only_where_every_seed_got_there() -> None:
    early, late = Evaluation(5, 3.0, 0.86), Evaluation(10, 6.0, 0.9)
    assert first_at_least([Evaluation(1, 1.0, 0.4), early, late], 0.85) is early
    assert first_at_least([early], 0.95) is None
    assert learning_figures(0.85, {"trl": [late, late], "roll": [early, early]})["roll_over_trl"] == 0.5
    assert "roll_over_trl" not in learning_figures(0.85, {"trl": [late, None], "roll": [early, early]})


def test_memory_of_both_sides_is_compared_with_their_largest_differences() -> None:
    figures = {"plain": {"peak_mib": 8000, "seconds": 2.0}, "roll": {"peak_mib": 500, "seconds": 3.0}}
    plain = {"logprobs": torch.tensor([-4.0, -2.0]), "weight_gradient": torch.tensor([-8.0, 4.0])}
    ours = {"logprobs": torch.tensor([-4.0, -2.5]), "weight_gradient": torch.tensor([-8.0, 2.0])}
    compared = compare_sides(figures, {"plain": plain, "roll": ours})
    assert compared["peak_mib"] == {"plain": 8000, "roll": 500, "ratio": 0.062}
    assert compared["seconds"]["ratio"] == 1.5
    assert compared["largest_difference"] == {"logprobs": 0.5, "weight_gradient": 0.25}


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_both_sides_of_the_memory_comparison_compute_the_same(entropy_gradient: bool) -> None:
    inputs = make_inputs(2, 30, 70, 8)
    plain, ours = (one_pass(side, inputs, entropy_gradient, 500) for side in SIDES)
    assert plain.keys() == ours.keys() and len(plain) == 4
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)


def test_packing_is_compared_on_lengths_with_a_mean_of_0_3_of_the_longest() -> None:
    lengths = spread_lengths(64, 512, np.random.default_rng(0))
    assert lengths.max() == 512 and lengths.min() > 24 and len(lengths) == 64
    assert lengths.mean() / 512 == pytest.approx(0.3, abs=0.01)
    assert (np.diff(lengths) > 0).any() and (np.diff(lengths) < 0).any()


def test_packing_rates_are_of_real_tokens_and_ratios_of_passes_side_by_side() -> None:
    figures = compare_packing(1000, {"padded": [4.0, 8.0, 4.0], "packed": [2.0, 2.0, 1.0]})
    assert figures["tokens_per_second"] == {"padded": 250, "packed": 500}
    assert figures["ratio"] == {"padded": 4.0}
