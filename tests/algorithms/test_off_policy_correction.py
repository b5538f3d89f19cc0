"""Importance weights and rejection against a loop over plain lists, and what they promise."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.correction import (
    Correction,
    DivergenceRejection,
    ImportanceWeight,
    RatioRejection,
    SecondMomentRejection,
    correct,
    parse_correction,
)
from roll.configs.errors import ConfigError
from tests.tiers import examples

ROWS, WIDTH = 7, 6
LEVELS = ("token", "segment", "sequence", "geometric")
DIVERGENCES = {
    "k1": lambda x: -x,
    "abs": abs,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.expm1(x) - x,
}


def random_tensors(seed):
    """Proximal and behaviour log-probabilities, and a mask with an empty row and a row of one token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0] = False
    mask[1] = torch.arange(WIDTH) == 2
    mask[2] = torch.arange(WIDTH) < 3
    mask[3] = torch.arange(WIDTH) >= 3
    behaviour = -torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).abs()
    return behaviour + 0.6 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64), behaviour, mask


def at_level(values, level, places):
    """For each token of one response: its own value, the mean of its run, the sum, or the mean."""
    if level in ("token", "veto"):
        return values
    if level == "segment":
        starts = [index for index, place in enumerate(places) if index == 0 or places[index - 1] != place - 1]
        runs = [values[start:end] for start, end in zip(starts, [*starts[1:], len(values)], strict=True)]
        return [sum(run) / len(run) for run in runs for _ in run]
    total = sum(values) if level == "sequence" else sum(values) / len(values)
    return [total] * len(values)


def weight_by_loop(log_ratio, weight):
    ratio = math.exp(log_ratio)
    if weight.lower <= ratio <= weight.upper:
        return ratio, False
    return (min(max(ratio, weight.lower), weight.upper) if weight.mode == "truncate" else 0.0), True


def is_kept(values, level, rejection, places):
    if isinstance(rejection, DivergenceRejection):
        divergences = at_level([DIVERGENCES[rejection.divergence](value) for value in values], level, places)
        kept = [divergence <= rejection.threshold for divergence in divergences]
    else:
        ratios = [math.exp(value) for value in at_level(values, level, places)]
        lower = -math.inf if rejection.lower is None else rejection.lower
        upper = math.inf if rejection.upper is None else rejection.upper
        kept = [lower <= ratio <= upper for ratio in ratios]
    return [all(kept)] * len(kept) if level == "veto" else kept


def correct_by_loop(proximal, behaviour, mask, settings):
    """Weights, kept and the metrics of the correction, as plain Python."""
    weights, kept = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros_like(mask)
    clipped = rejected = tokens = 0
    for row in range(len(mask)):
        places = [place for place in range(mask.shape[1]) if mask[row, place]]
        if not places:
            continue
        log_ratios = [(proximal[row, place] - behaviour[row, place]).item() for place in places]
        own = [(1.0, False)] * len(places)
        if settings.weight is not None:
            own = [
                weight_by_loop(value, settings.weight) for value in at_level(log_ratios, settings.weight.level, places)
            ]
        stays = [True] * len(places)
        for rejection in settings.reject:
            accepted = is_kept(log_ratios, rejection.level, rejection, places)
            stays = [one and other for one, other in zip(stays, accepted, strict=True)]
        for place, (value, changed), stay in zip(places, own, stays, strict=True):
            tokens, clipped, rejected = tokens + 1, clipped + changed, rejected + (not stay)
            kept[row, place] = stay
            weights[row, place] = value if stay else 0.0
    mean = weights.sum().item() / max(1, int(kept.sum()))
    if settings.normalize and mean > 0:
        weights = weights / mean
    responses = [row for row in range(len(mask)) if mask[row].any()]
    return (
        weights,
        kept,
        {
            "clipped_share": clipped / max(1, tokens),
            "rejected_share": rejected / max(1, tokens),
            "rejected_sequences_share": sum(not kept[row].any() for row in responses) / max(1, len(responses)),
            "weight_mean": mean,
        },
    )


WEIGHTS = [None] + [
    ImportanceWeight(level, mode, lower, 1.3)
    for level, mode, lower in itertools.product(LEVELS, ("truncate", "mask"), (0.0, 0.7))
]
REJECTIONS = [
    (),
    *((RatioRejection(level, 0.6, 1.6),) for level in (*LEVELS, "veto")),
    *((DivergenceRejection(level, name, 0.3),) for level in (*LEVELS, "veto") for name in DIVERGENCES),
    (RatioRejection("token", upper=2.0), RatioRejection("geometric", lower=0.9), DivergenceRejection("token", "k3", 1)),
]
CORRECTIONS = [
    Correction(weight, normalize, reject)
    for weight, normalize, reject in itertools.product(WEIGHTS, (False, True), REJECTIONS)
    if (weight is not None or not normalize) and (weight is not None or reject)
]


def assert_equal_to_loop(tensors, correction):
    result = correct(*tensors, correction)
    weights, kept, metrics = correct_by_loop(*tensors, correction)
    torch.testing.assert_close(result.weights, weights, rtol=1e-10, atol=1e-10)
    assert torch.equal(result.kept, kept)
    assert {name: result.metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-10, abs=1e-12)


@settings(max_examples=examples(100))
@given(correction=st.sampled_from(CORRECTIONS), seed=st.integers(0, 10_000))
def test_weights_rejection_and_metrics_follow_their_definitions(correction, seed):
    assert_equal_to_loop(random_tensors(seed), correction)


def test_every_combination_follows_its_definition():
    for correction in CORRECTIONS:
        assert_equal_to_loop(random_tensors(11), correction)


@settings(max_examples=examples(60))
@given(correction=st.sampled_from(CORRECTIONS), fill=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_outside_the_mask_is_never_read(correction, fill):
    proximal, behaviour, mask = random_tensors(5)
    clean = correct(proximal, behaviour, mask, correction)
    dirty = correct(proximal.masked_fill(~mask, fill), behaviour.masked_fill(~mask, fill), mask, correction)
    assert torch.equal(dirty.weights, clean.weights) and torch.equal(dirty.kept, clean.kept)
    assert dirty.metrics == clean.metrics
    assert dirty.weights[~mask].eq(0).all() and not (dirty.kept & ~mask).any()


@settings(max_examples=examples(60))
@given(correction=st.sampled_from(CORRECTIONS), seed=st.integers(0, 10_000))
def test_permuting_samples_permutes_the_result_and_inputs_stay_as_they_were(correction, seed):
    tensors = random_tensors(seed)
    before = [tensor.clone() for tensor in tensors]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    whole = correct(*tensors, correction)
    permuted = correct(*(tensor[order] for tensor in tensors), correction)
    torch.testing.assert_close(permuted.weights, whole.weights[order], rtol=1e-12, atol=1e-12)
    assert torch.equal(permuted.kept, whole.kept[order])
    assert permuted.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


def test_nothing_carries_a_gradient_and_the_mask_is_not_shared():
    proximal, behaviour, mask = random_tensors(6)
    result = correct(proximal.requires_grad_(), behaviour, mask, Correction(ImportanceWeight()))
    assert not result.weights.requires_grad
    result.kept[:] = False
    assert mask.any()


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000), level=st.sampled_from(LEVELS), upper=st.floats(1.001, 10.0), scale=st.floats(0.0, 30.0)
)
def test_truncation_never_raises_a_weight(seed, level, upper, scale):
    proximal, behaviour, mask = random_tensors(seed)
    proximal = behaviour + scale * (proximal - behaviour)
    bounded = correct(proximal, behaviour, mask, Correction(ImportanceWeight(level, upper=upper))).weights
    free = correct(proximal, behaviour, mask, Correction(ImportanceWeight(level, upper=1e300))).weights
    assert (bounded <= free).all() and (bounded <= upper).all()


@settings(max_examples=examples(100))
@given(correction=st.sampled_from(CORRECTIONS), sign=st.sampled_from([1.0, -1.0]))
def test_a_thousand_tokens_with_ratios_of_e_to_20_overflow_nowhere(correction, sign):
    proximal = torch.full((2, 1000), 20.0 * sign, dtype=torch.float64)
    proximal[1] = 0.01 * sign
    result = correct(proximal, torch.zeros_like(proximal), torch.ones(2, 1000, dtype=torch.bool), correction)
    assert result.weights.isfinite().all()
    assert not any(math.isnan(value) for value in result.metrics.values())
    one_sided = [
        item for item in correction.reject if isinstance(item, DivergenceRejection) and item.divergence == "k1"
    ]
    if correction.reject and not (one_sided and sign > 0):
        assert not result.kept[0].any()


def test_bounds_apply_to_the_ratio_and_not_to_its_inverse():
    proximal = torch.tensor([[2.0, -2.0]], dtype=torch.float64)
    everything, behaviour = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.float64)
    upper = correct(proximal, behaviour, everything, Correction(reject=(RatioRejection("token", upper=2.0),)))
    lower = correct(proximal, behaviour, everything, Correction(reject=(RatioRejection("token", lower=0.5),)))
    truncated = correct(proximal, behaviour, everything, Correction(ImportanceWeight()))
    assert upper.kept.tolist() == [[False, True]] and lower.kept.tolist() == [[True, False]]
    assert truncated.weights.tolist() == [[2.0, math.exp(-2.0)]]


def test_a_ratio_on_its_bound_is_inside():
    proximal = torch.tensor([[math.log(2.0), math.log(0.5)]], dtype=torch.float64)
    arguments = (proximal, torch.zeros_like(proximal), torch.ones(1, 2, dtype=torch.bool))
    result = correct(*arguments, Correction(ImportanceWeight(lower=0.5), reject=(RatioRejection("token", 0.5, 2.0),)))
    assert result.kept.all() and result.metrics["clipped_share"] == 0.0


def test_the_ratio_of_a_sequence_includes_its_rejected_tokens():
    proximal = torch.tensor([[3.0, -3.0], [3.0, 0.0]], dtype=torch.float64)
    token, sequence = RatioRejection("token", upper=2.0), RatioRejection("sequence", 0.5, 2.0)
    arguments = (proximal, torch.zeros_like(proximal), torch.ones(2, 2, dtype=torch.bool))
    for reject in ((token, sequence), (sequence, token)):
        result = correct(*arguments, Correction(ImportanceWeight("sequence"), reject=reject))
        assert result.kept.tolist() == [[False, True], [False, False]]
        assert result.weights.tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_a_masked_weight_stays_in_the_normaliser_and_a_rejected_token_does_not():
    proximal = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    arguments = (proximal, torch.zeros_like(proximal), torch.ones(1, 2, dtype=torch.bool))
    masked = correct(*arguments, Correction(ImportanceWeight(mode="mask")))
    rejected = correct(*arguments, Correction(reject=(RatioRejection("token", upper=2.0),)))
    assert masked.weights.tolist() == rejected.weights.tolist() == [[0.0, 1.0]]
    assert masked.kept.tolist() == [[True, True]] and rejected.kept.tolist() == [[False, True]]
    assert masked.metrics["clipped_share"] == rejected.metrics["rejected_share"] == 0.5
    assert masked.metrics["rejected_share"] == rejected.metrics["clipped_share"] == 0.0


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 10_000), level=st.sampled_from(LEVELS))
def test_normalised_weights_have_mean_one_over_the_tokens_that_stay(seed, level):
    tensors = random_tensors(seed)
    correction = Correction(ImportanceWeight(level), True, (RatioRejection("token", upper=3.0),))
    result = correct(*tensors, correction)
    assert result.weights[result.kept].mean().item() == pytest.approx(1.0, abs=1e-10)


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 10_000), level=st.sampled_from(LEVELS))
def test_weights_normalised_by_sequence_have_mean_one_over_sequences(seed, level):
    tensors = random_tensors(seed)
    correction = Correction(ImportanceWeight(level), True, (RatioRejection("token", upper=3.0),))
    result = correct(*tensors, correction, sequences=torch.arange(ROWS))
    means = [row[kept].mean().item() for row, kept in zip(result.weights, result.kept, strict=True) if kept.any()]
    assert sum(means) / len(means) == pytest.approx(1.0, abs=1e-10)


def test_weights_that_are_all_zero_stay_zero_when_normalised():
    proximal = torch.full((1, 3), 5.0)
    arguments = (proximal, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    result = correct(*arguments, Correction(ImportanceWeight(mode="mask"), normalize=True))
    assert result.weights.eq(0).all() and result.kept.all()


def test_a_fully_masked_batch_is_zero_everywhere():
    fill = torch.full((2, 3), math.nan)
    for correction in CORRECTIONS:
        result = correct(fill, fill, torch.zeros(2, 3, dtype=torch.bool), correction)
        assert result.weights.eq(0).all() and not result.kept.any()
        assert all(value == 0.0 for value in result.metrics.values())


@pytest.mark.parametrize("rejection", [RatioRejection("token", 0.5, 2.0), DivergenceRejection("token", "k3", 0.1)])
def test_a_token_without_a_usable_ratio_is_rejected(rejection):
    proximal = torch.tensor([[math.nan, math.inf, -math.inf, 0.0]])
    result = correct(proximal, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), Correction(reject=(rejection,)))
    assert result.kept.tolist() == [[False, False, False, True]]


def test_on_policy_data_is_left_alone():
    _, behaviour, mask = random_tensors(8)
    for correction in CORRECTIONS:
        result = correct(behaviour, behaviour, mask, correction)
        assert torch.equal(result.weights, mask.double()) and torch.equal(result.kept, mask)


def test_distances_of_proximal_from_behaviour_are_reported_per_lag():
    proximal = torch.tensor([[0.5, 0.0, -0.25]], dtype=torch.float64)
    lags = torch.tensor([[3, 0, 1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    correction = Correction(ImportanceWeight())
    arguments = (proximal, torch.zeros_like(proximal), mask, correction)
    metrics = correct(*arguments, lags=lags, max_lag=1, capped=True).metrics
    assert metrics["k1"] == pytest.approx(-0.25 / 3, abs=1e-12)
    assert metrics["lag_0/k3"] == 0.0 and metrics["lag_0/share"] == pytest.approx(1 / 3)
    assert metrics["lag_1+/share"] == pytest.approx(2 / 3)
    assert metrics["lag_1+/chi2"] == pytest.approx((math.exp(1) + math.exp(-0.5)) / 2 - 1)
    assert not any(name.startswith("lag") for name in correct(*arguments, lags=lags).metrics)


def test_what_was_clipped_and_rejected_is_reported_for_each_lag_that_occurs():
    proximal = torch.tensor([[math.log(3), 0.0, math.log(3)]], dtype=torch.float64)
    lags, mask = torch.tensor([[2, 0, 0]]), torch.ones(1, 3, dtype=torch.bool)
    correction = Correction(ImportanceWeight(), reject=(RatioRejection("token", 0.5, 2.5),))
    metrics = correct(proximal, torch.zeros_like(proximal), mask, correction, lags=lags, max_lag=2).metrics
    shares = {name: value for name, value in metrics.items() if name.endswith("rejected_share")}
    expected = {"rejected_share": 2 / 3, "lag_0/rejected_share": 0.5, "lag_2/rejected_share": 1.0}
    assert shares == pytest.approx(expected)
    assert {f"lag_{lag}/clipped_share" for lag in (0, 2)} == {
        name for name in metrics if name.startswith("lag") and name.endswith("clipped_share")
    }


@pytest.mark.parametrize(("given_dtype", "dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_weights_are_float32_unless_an_input_is_wider(given_dtype, dtype):
    zeros = torch.zeros(1, 2, dtype=given_dtype)
    result = correct(zeros, zeros.float(), torch.ones(1, 2, dtype=torch.bool), Correction(ImportanceWeight()))
    assert result.weights.dtype == dtype


MU = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
PI = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)


def test_sampled_weights_have_their_exact_expectation_within_four_sigma():
    number = 100_000
    tokens = torch.multinomial(MU, number, replacement=True, generator=torch.Generator().manual_seed(3))
    arguments = (PI.log()[tokens][None], MU.log()[tokens][None], torch.ones(1, number, dtype=torch.bool))
    ratio = PI / MU
    for upper, expected in ((1e6, 1.0), (2.0, (MU * ratio.clamp(max=2.0)).sum().item())):
        weights = correct(*arguments, Correction(ImportanceWeight(upper=upper))).weights
        error = abs(weights.mean().item() - expected)
        assert 0 < error < 4 * weights.std().item() / math.sqrt(number)


def test_the_weight_of_a_sequence_makes_an_expectation_under_the_target_within_four_sigma():
    number, length = 50_000, 3
    tokens = torch.multinomial(MU, number * length, replacement=True, generator=torch.Generator().manual_seed(4))
    tokens = tokens.reshape(number, length)
    mask = torch.ones(number, length, dtype=torch.bool)
    weights = correct(PI.log()[tokens], MU.log()[tokens], mask, Correction(ImportanceWeight("sequence", upper=1e9)))
    values = weights.weights[:, 0] * (tokens == 3).all(-1)
    error = abs(values.mean().item() - PI[3].item() ** length)
    assert 0 < error < 4 * values.std().item() / math.sqrt(number)


def test_one_improbable_token_vetoes_its_response():
    proximal = torch.tensor([[0.0, -10.0, 9.0], [0.0, -9.0, 20.0]], dtype=torch.float64)
    veto = RatioRejection("veto", lower=1e-4)
    result = correct(proximal, torch.zeros_like(proximal), torch.ones(2, 3).bool(), Correction(reject=(veto,)))
    assert result.kept.tolist() == [[False] * 3, [True] * 3]
    assert result.metrics["rejected_sequences_share"] == 0.5


def test_sequence_masking_rejects_bad_responses_that_the_policy_no_longer_gives():
    """DeepSeek-V3.2: a negative advantage, and a mean log ratio of behaviour to proximal above the threshold."""
    proximal = torch.tensor([[-0.5, -0.1], [-0.5, -0.1], [-0.1, 0.0], [0.5, 0.1]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand(4, 2)
    arguments = (proximal, torch.zeros_like(proximal), torch.ones(4, 2).bool())
    masking = Correction(reject=(DivergenceRejection("geometric", "k1", 0.2, only_negative=True),))
    assert correct(*arguments, masking, advantages=advantages).kept.all(-1).tolist() == [False, True, True, True]
    unusable = (proximal.clone().index_fill_(0, torch.tensor([1]), math.nan), *arguments[1:])
    assert not correct(*unusable, masking, advantages=advantages).kept[1].any()
    with pytest.raises(ValueError, match="advantages"):
        correct(*arguments, masking)


def second_moment_by_loop(log_ratio, mask, limit):
    """Take out the token with the largest square, with all that equal it, until the mean is small enough."""
    kept = {tuple(place): log_ratio[tuple(place)].item() ** 2 for place in mask.nonzero().tolist()}
    while kept and sum(kept.values()) / len(kept) > limit:
        largest = max(kept.values())
        kept = {place: value for place, value in kept.items() if value < largest}
    return set(kept)


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), limit=st.sampled_from([1e-6, 0.04, 0.2, 0.3, 5.0]))
def test_the_second_moment_of_what_stays_in_the_batch_is_bounded_at_the_least_price(seed, limit):
    proximal, behaviour, mask = random_tensors(seed)
    correction = Correction(reject=(SecondMomentRejection(limit),))
    kept = correct(proximal, behaviour, mask, correction).kept
    log_ratio = torch.where(mask, proximal - behaviour, 0.0)
    assert {tuple(place) for place in kept.nonzero().tolist()} == second_moment_by_loop(log_ratio, mask, limit)
    if kept.any():
        assert log_ratio[kept].square().mean() <= limit
    dirty = (tensor.masked_fill(~mask, math.nan) for tensor in (proximal, behaviour))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    again = correct(*(tensor[order] for tensor in (*dirty, mask)), correction).kept
    assert torch.equal(again, kept[order])


def test_of_equally_distant_tokens_none_or_all_are_rejected_for_the_second_moment():
    proximal = torch.tensor([[0.0, 0.0, 1.0, -1.0, math.nan]], dtype=torch.float64)
    arguments = (proximal, torch.zeros_like(proximal), torch.ones(1, 5).bool())
    kept = [
        correct(*arguments, Correction(reject=(SecondMomentRejection(limit),))).kept.tolist()[0] for limit in (0.4, 0.5)
    ]
    assert kept == [[True, True, False, False, False], [True, True, True, True, False]]


def test_plain_values_become_settings():
    second_moment = parse_correction({"reject": [{"second_moment": 0.04}]})
    assert second_moment == Correction(reject=(SecondMomentRejection(0.04),))
    args = {
        "weight": {"level": "geometric", "mode": "mask", "lower": 0.5, "upper": 5},
        "normalize": True,
        "reject": [{"level": "sequence", "upper": 2}, {"level": "token", "divergence": "k3", "threshold": 0.1}],
    }
    assert parse_correction(args) == Correction(
        ImportanceWeight("geometric", "mask", 0.5, 5.0),
        True,
        (RatioRejection("sequence", None, 2.0), DivergenceRejection("token", "k3", 0.1)),
    )


def test_defaults_are_token_weights_truncated_at_two():
    assert parse_correction({"weight": {}}) == Correction(ImportanceWeight("token", "truncate", 0.0, 2.0))


@pytest.mark.parametrize(
    ("args", "paths"),
    [
        ({}, [None]),
        ({"weight": None, "reject": []}, [None]),
        ({"normalize": True}, ["normalize", None]),
        ({"normalize": True, "reject": [{"level": "token", "upper": 2}]}, ["normalize"]),
        ({"weight": {}, "normalize": 1}, ["normalize"]),
        ({"weight": {}, "rejects": []}, ["rejects"]),
        ({"weight": 2.0}, ["weight"]),
        ({"weight": {"level": "row"}}, ["weight.level"]),
        ({"weight": {"upper": 0.2}}, ["weight.upper"]),
        ({"weight": {"upper": math.inf}}, ["weight.upper"]),
        ({"weight": {"upper": "2"}}, ["weight.upper"]),
        ({"weight": {"lower": -0.1, "cap": 3}}, ["weight.lower", "weight.cap"]),
        ({"weight": {"lower": 1, "upper": 1}}, ["weight"]),
        ({"weight": {3: 4}}, ["weight.3"]),
        ({"reject": {"level": "token"}}, ["reject"]),
        ({"reject": "token"}, ["reject"]),
        ({"reject": [None]}, ["reject[0]"]),
        ({"reject": [{"level": "token"}]}, ["reject[0]"]),
        ({"reject": [{"upper": 2}]}, ["reject[0].level"]),
        ({"reject": [{"level": "token", "upper": 0.5}]}, ["reject[0].upper"]),
        ({"reject": [{"level": "token", "lower": 0}]}, ["reject[0].lower"]),
        ({"reject": [{"level": "token", "lower": 1, "upper": 1}]}, ["reject[0]"]),
        ({"reject": [{"level": "token", "threshold": 1}]}, ["reject[0].divergence"]),
        ({"reject": [{"level": "token", "divergence": "k3"}]}, ["reject[0].threshold"]),
        ({"reject": [{"level": "token", "divergence": "k3", "threshold": 0}]}, ["reject[0].threshold"]),
        ({"reject": [{"level": "token", "divergence": "tv", "threshold": 1}]}, ["reject[0].divergence"]),
        ({"reject": [{"second_moment": 0}]}, ["reject[0].second_moment"]),
        ({"reject": [{"second_moment": 0.1, "level": "token"}]}, ["reject[0].level"]),
        ({"weight": {"level": "veto"}}, ["weight.level"]),
        (
            {
                "weight": {"mode": "clip"},
                "reject": [
                    {"level": "token", "upper": 2},
                    {"level": "token", "divergence": "k3", "threshold": 1, "upper": 2},
                ],
                "extra": 1,
            },
            ["weight.mode", "reject[1].upper", "extra"],
        ),
    ],
)
def test_every_wrong_key_type_range_and_combination_is_reported_with_its_path(args, paths):
    with pytest.raises(ConfigError) as caught:
        parse_correction(args)
    found = [problem.path.removeprefix("train_infer_correction").removeprefix(".") for problem in caught.value.problems]
    assert found == [path or "" for path in paths]


def test_messages_name_the_nearest_key_and_the_owner_of_a_misplaced_one():
    with pytest.raises(ConfigError, match="did you mean `reject`"):
        parse_correction({"weight": {}, "rejct": []})
    with pytest.raises(ConfigError, match="`upper`, which belongs to `rejection by ratio`"):
        parse_correction({"reject": [{"level": "token", "divergence": "k3", "threshold": 1, "upper": 2}]})


@pytest.mark.parametrize(
    "wrong", [{}, {"normalize": True}, {"normalize": True, "reject": (RatioRejection("token", 0.5),)}]
)
def test_a_correction_without_effect_cannot_be_built(wrong):
    with pytest.raises(ValueError, match="no effect"):
        Correction(**wrong)
