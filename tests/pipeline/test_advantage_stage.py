"""What the stages add to a batch: shaped rewards, advantages, correction weights, and what leaves the loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roll.algorithms.advantages.base import make_advantage_estimator
from roll.algorithms.correction import parse_correction
from roll.algorithms.kl import AdaptiveKLController
from roll.algorithms.objective import PolicyObjective
from roll.algorithms.rewards import LengthPenalty, RepetitionPenalty, RewardShaping, RunningMoments
from roll.configs.run import DistillationConfig
from roll.data.records import Group, Prompt, Sample
from roll.pipeline import algorithm
from roll.pipeline.algorithm import AdvantageSettings, TrainingBatch, add_advantages, add_correction, select_tokens

PROMPT = Prompt("p", "sums", np.array([7, 8], dtype=np.int32), "p")


def sample(score, tokens=3, version=3, finish_reason="stop"):
    mask = np.array([False, False] + [True] * tokens)
    return Sample(
        token_ids=np.arange(2 + tokens, dtype=np.int32),
        response_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        finish_reason=finish_reason,
        score=score,
        reward=score,
    )


def batch_of(*groups, step=4):
    made = [
        Group(number, PROMPT, list(samples), baseline_score=baseline)
        for number, (samples, baseline) in enumerate(groups)
    ]
    return TrainingBatch.from_groups(step, made)


def settings(estimator="grpo", shaping=None, **changes):
    defaults = {
        "reward_moments": RunningMoments(), "whitened": False, "advantage_clip": None, "kl_controller": None,
        "kl_estimator": "k1",
    }  # fmt: skip
    return AdvantageSettings(
        estimator=make_advantage_estimator(estimator), shaping=shaping or RewardShaping(), **{**defaults, **changes}
    )


def first_advantages(batch):
    """Of the first response token of each sample."""
    return batch.data.tokens["advantages"][batch.data.offsets[:-1] + 2]


def test_lags_are_counted_from_the_step_and_only_on_sampled_tokens():
    batch = batch_of(([sample(1, version=3), sample(0, version=4)], None))
    assert batch.data.tokens["lags"].tolist() == [0, 0, 1, 1, 1] + [0] * 5
    assert batch.lags.tolist() == [1, 1, 1, 0, 0, 0]


def test_only_responses_without_a_token_of_other_weights_are_compared_with_the_trainer():
    """Late tokens of a response that saw an update have the trainer's version, but stand over older caches."""
    late = sample(1, version=4)
    late.versions[late.response_mask] = [3, 4, 4]
    batch = batch_of(([late, sample(0, version=4)], None))
    assert batch.data.tokens["same_weights"].tolist() == [False] * 5 + [True] * 5


def test_rewards_are_shaped_before_they_are_compared_and_scores_stay():
    shaping = RewardShaping(clip=1.0, length_penalty=LengthPenalty("overlong", 1.0, max_length=6, buffer=3))
    batch = batch_of(([sample(5.0, tokens=3), sample(5.0, tokens=6)], None))
    metrics = add_advantages(batch, settings("reinforce", shaping))
    assert batch.data.per_sample["rewards"].tolist() == [1.0, 0.0]
    assert [each.reward for each in batch.samples] == [1.0, 0.0]
    assert batch.data.per_sample["scores"].tolist() == [5.0, 5.0]
    assert first_advantages(batch).tolist() == [1.0, 0.0]
    assert metrics["reward/clipped_share"] == 1.0


def test_samples_left_out_count_in_their_group_but_not_in_the_loss():
    batch = batch_of(([sample(1.0), sample(0.0, finish_reason="length")], None))
    add_advantages(batch, settings("rloo", RewardShaping(drop_truncated=True)))
    assert batch.data.tokens["loss_mask"].tolist() == [False, False, True, True, True] + [False] * 5
    assert first_advantages(batch).tolist() == [1.0, -1.0]


def test_groups_of_equal_scores_can_leave_the_loss():
    batch = batch_of(([sample(1.0), sample(1.0)], None), ([sample(1.0), sample(0.0)], None))
    add_advantages(batch, settings(shaping=RewardShaping(drop_zero_variance=True)))
    assert batch.data.tokens["loss_mask"].tolist() == [False] * 10 + [False, False, True, True, True] * 2


def test_without_anything_left_out_there_is_no_loss_mask():
    batch = batch_of(([sample(1.0), sample(0.0)], None))
    add_advantages(batch, settings())
    assert "loss_mask" not in batch.data.tokens


def test_a_greedy_baseline_reaches_its_estimator():
    batch = batch_of(([sample(1.0), sample(0.0)], 0.25), ([sample(1.0)], 1.0))
    add_advantages(batch, settings("remax"))
    assert first_advantages(batch).tolist() == [0.75, -0.25, 0.0]
    with pytest.raises(ValueError, match="baseline_rewards"):
        add_advantages(batch_of(([sample(1.0)], None)), settings("remax"))


def test_the_kl_penalty_uses_the_coefficient_of_before_and_then_steers_it():
    controller = AdaptiveKLController(0.1, 0.01, 100)
    batch = batch_of(([sample(0.0), sample(0.0)], None))
    batch.data.tokens["reference_logprobs"] = np.where(batch.data.tokens["response_mask"], -1.0, 0).astype(np.float32)
    metrics = add_advantages(batch, settings("reinforce", kl_controller=controller))
    assert metrics["kl_penalty/coef"] == 0.1 and metrics["kl_penalty/nats_per_response"] == pytest.approx(1.5)
    assert first_advantages(batch) == pytest.approx([-0.15, -0.15])
    assert controller.coef > 0.1


def large_batch():
    """Groups of different sizes and lengths, with all fields that an estimator, a penalty and a teacher read."""
    rng = np.random.default_rng(0)
    sizes = [3, 1, 4, 2, 5]
    groups = [([sample(float(rng.normal()), tokens=int(rng.integers(1, 9))) for _ in range(n)], n / 4) for n in sizes]
    batch = batch_of(*groups)
    tokens = batch.data.tokens
    for name in ("reference_logprobs", "teacher_logprobs", "values"):
        tokens[name] = np.where(tokens["response_mask"], rng.normal(size=tokens["lags"].shape), 0).astype(np.float32)
    return batch


@pytest.mark.parametrize("limit", [1, 40, 70])
@pytest.mark.parametrize("use", ["rewards", "advantages"])
@pytest.mark.parametrize("estimator", ["grpo", "gae", "remax", "reinforce"])
def test_a_batch_in_slices_gets_the_advantages_and_metrics_of_the_whole(estimator, use, limit, monkeypatch):
    found = []
    for most in (10**6, limit):
        monkeypatch.setattr(algorithm, "SLICE_TOKENS", most)
        batch, controller = large_batch(), AdaptiveKLController(0.1, 0.01, 100)
        teaching = DistillationConfig(use=use, coef=0.5)
        asked = settings(estimator, kl_controller=controller, distillation=teaching, advantage_clip=1.5)
        slices = [(len(part.groups), part.data.padded("lags").size) for part in algorithm._slices(batch, asked)]
        assert all(groups == 1 or size <= most for groups, size in slices)
        metrics = add_advantages(batch, asked)
        values = [
            batch.data.tokens[name] for name in ("advantages", "returns", "old_values") if name in batch.data.tokens
        ]
        found.append((slices, values, metrics, controller.coef))
    (one, whole, *rest), (several, parts, *others) = found
    assert len(one) == 1 and len(several) > 1
    assert len(whole) == (3 if estimator == "gae" else 1)
    for mine, theirs in zip(whole, parts, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    assert rest[0].keys() == others[0].keys()
    assert list(rest[0].values()) + [rest[1]] == pytest.approx(list(others[0].values()) + [others[1]], rel=1e-6)


def test_groups_of_a_streamed_run_are_compared_with_the_whole_batch(monkeypatch):
    monkeypatch.setattr(algorithm, "SLICE_TOKENS", 1)
    assert len(list(algorithm._slices(large_batch(), settings(in_slices=False)))) == 1


@pytest.mark.parametrize(("estimator", "whitened"), [("reinforce_plus_plus", False), ("grpo", True)])
def test_moments_of_the_batch_are_not_those_of_slices(estimator, whitened, monkeypatch):
    monkeypatch.setattr(algorithm, "SLICE_TOKENS", 1)
    batch = large_batch()
    metrics = add_advantages(batch, settings(estimator, whitened=whitened))
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1, rel=0.05)


def test_running_moments_remember_earlier_batches():
    shared = settings("reinforce", RewardShaping(mean="running"), reward_moments=RunningMoments())
    add_advantages(batch_of(([sample(1.0), sample(1.0)], None)), shared)
    later = batch_of(([sample(0.0), sample(0.0)], None))
    add_advantages(later, shared)
    assert first_advantages(later).tolist() == [-0.5, -0.5]


def test_advantages_are_clipped_last():
    batch = batch_of(([sample(3.0), sample(-3.0)], None))
    add_advantages(batch, settings("reinforce", advantage_clip=2.0))
    assert first_advantages(batch).tolist() == [2.0, -2.0]


@pytest.mark.parametrize("limit", [1, 10**6])
def test_several_rewards_are_compared_by_name_within_their_domain(limit, monkeypatch):
    rows = [[{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 0.0}], [{"kind": 2.0}, {"kind": 4.0, "right": 9.0}]]
    batch = batch_of(*(([sample(0.0), sample(0.0)], None) for _ in rows))
    for group, metrics, domain in zip(batch.groups, rows, ("sums", "talk"), strict=True):
        group.prompt = replace(PROMPT, domain=domain)
        for each, numbers in zip(group.samples, metrics, strict=True):
            each.metrics = numbers
    weights = {"sums": {"right": 1.0, "short": 0.5}, "talk": {"kind": 0.5}}
    estimator = make_advantage_estimator("gdpo", {"normalize_by_batch": False})
    monkeypatch.setattr(algorithm, "SLICE_TOKENS", limit)
    add_advantages(batch, replace(settings(part_weights=weights), estimator=estimator))
    half = 0.5**0.5
    assert first_advantages(batch) == pytest.approx([half, -half, -half / 2, half / 2], abs=1e-5)
    batch.groups[0].samples[0].metrics = {"right": 1.0}
    with pytest.raises(ValueError, match="domain 'sums' has no reward short"):
        add_advantages(batch, replace(settings(part_weights=weights), estimator=estimator))


def with_proximal(batch, *per_sample):
    values = np.repeat(np.array(per_sample, dtype=np.float32), batch.data.lengths)
    batch.data.tokens["proximal_logprobs"] = np.where(batch.data.tokens["response_mask"], values, np.nan)
    return batch


def test_correction_weights_are_the_bounded_ratio_of_proximal_to_behaviour():
    batch = with_proximal(batch_of(([sample(1.0), sample(0.0)], None)), -0.5 + np.log(1.5), 4.0)
    correction = parse_correction({"weight": {"level": "token", "upper": 2.0}})
    metrics = add_correction(batch, correction, PolicyObjective(3, max_lag=2))
    assert batch.data.tokens["correction_weights"] == pytest.approx([0, 0, 1.5, 1.5, 1.5, 0, 0, 2, 2, 2])
    assert "loss_mask" not in batch.data.tokens
    assert metrics["clipped_share"] == 0.5 and metrics["lag_1/share"] == 1.0


def test_rejection_adds_to_what_is_left_out_already():
    batch = with_proximal(
        batch_of(([sample(1.0), sample(0.0), sample(0.0, finish_reason="length")], None)), -0.5, 4, -0.5
    )
    add_advantages(batch, settings("rloo", RewardShaping(drop_truncated=True)))
    correction = parse_correction({"reject": [{"level": "sequence", "upper": 10.0}]})
    metrics = add_correction(batch, correction, PolicyObjective(3))
    assert batch.data.tokens["loss_mask"].tolist() == [False, False, True, True, True] + [False] * 10
    assert "correction_weights" not in batch.data.tokens
    assert metrics["rejected_share"] == pytest.approx(1 / 3)


def test_weights_are_averaged_over_what_is_trained_on():
    samples = [sample(1.0), sample(0.0), sample(0.0, finish_reason="length")]
    batch = with_proximal(batch_of((samples, None)), -0.5, -0.5, -0.5 + np.log(10))
    add_advantages(batch, settings("rloo", RewardShaping(drop_truncated=True)))
    correction = parse_correction({"weight": {"level": "token", "upper": 20.0}, "normalize": True})
    metrics = add_correction(batch, correction, PolicyObjective(3, max_lag=2))
    trained = batch.data.tokens["loss_mask"]
    assert batch.data.tokens["correction_weights"][trained] == pytest.approx(1.0)
    assert metrics["weight_mean"] == pytest.approx(1.0)
    assert metrics["lag_1/clipped_share"] == 0.0 and metrics["lag_1/rejected_share"] == 0.0


@pytest.mark.parametrize(
    ("mode", "mean"),
    [
        ("token-mean", (1 + 2 * 3) / 4),
        ("seq-mean-token-mean", (1 + 2) / 2),
        ("seq-mean-token-sum", (1 + 2 * 3) / 4),
        ("seq-mean-token-sum-norm", (1 + 2 * 3) / 4),
    ],
)
def test_weights_are_averaged_as_the_loss_is(mode, mean):
    short, long = sample(1.0), sample(0.0)
    short.response_mask = np.array([False, False, True, False, False])
    batch = with_proximal(batch_of(([short, long], None)), -0.5, -0.5 + np.log(2) / 3)
    correction = parse_correction({"weight": {"level": "sequence", "upper": 3.0}, "normalize": True})
    metrics = add_correction(batch, correction, PolicyObjective(3, loss_agg_mode=mode))
    assert metrics["weight_mean"] == pytest.approx(mean)
    trained = batch.data.tokens["response_mask"]
    assert batch.data.tokens["correction_weights"][trained] == pytest.approx(np.array([1, 2, 2, 2]) / mean)


def test_tokens_are_selected_among_those_of_the_loss_by_the_old_policy_and_the_step():
    samples = [sample(1.0), sample(0.0, finish_reason="length"), sample(0.5)]
    batch = with_proximal(batch_of((samples, None)), -0.1, -0.2, -0.9)
    add_advantages(batch, settings("rloo", RewardShaping(drop_truncated=True)))
    behaviour = PolicyObjective(3, "kl_cov", {"share": 0.5})
    select_tokens(batch, behaviour, 7)
    # The recorded log-probabilities are all equal, so all covariances are 0 and the first tokens are taken.
    assert batch.data.tokens["selected_tokens"].nonzero()[0].tolist() == [2, 3, 4]
    select_tokens(batch, PolicyObjective(3, "kl_cov", {"share": 0.5}, old_policy="proximal"), 7)
    assert batch.data.tokens["selected_tokens"].sum() == 3
    assert not batch.data.tokens["selected_tokens"][5:10].any()
    draws = set()
    for step in range(4, 12):
        batch.step = step
        select_tokens(batch, PolicyObjective(3, "clip_cov", {"cov_low": -1.0, "share": 0.2}), 7)
        draws.add(int(batch.data.tokens["selected_tokens"].nonzero()[0][0]))
    assert len(draws) > 1
    plain = batch_of((samples, None))
    select_tokens(plain, PolicyObjective(3), 7)
    assert "selected_tokens" not in plain.data.tokens


def test_repetition_is_counted_in_what_the_policy_wrote_in_its_whole_episode():
    first, second = sample(1.0), sample(1.0)
    first.token_ids, second.token_ids = np.array([9, 9, 1, 2, 3]), np.array([9, 9, 1, 2, 4])
    first.episode = second.episode = 0
    batch = batch_of(([first, second], None), ([sample(1.0)], None))
    shaping = RewardShaping(repetition_penalty=RepetitionPenalty(ngram_size=2))
    metrics = add_advantages(batch, settings("reinforce", shaping))
    assert batch.data.per_sample["rewards"] == pytest.approx([1 - 0.2, 1 - 0.2, 1.0])  # 12 23 31 12 24
    assert metrics["reward/repetition_penalty"] == pytest.approx(-0.1)


def test_samples_weigh_what_their_episode_reports():
    batch = batch_of(([sample(1.0), sample(0.0), sample(0.5)], None))
    for each, episode, weight in zip(batch.samples, (0, 0, 1), (2.0, None, 0.0), strict=True):
        each.episode, each.metrics = episode, {} if weight is None else {"weight": weight}
    add_advantages(batch, settings("rloo", sample_weight="weight"))
    assert batch.data.per_sample["sample_weights"].tolist() == [2.0, 2.0, 0.0]
    for wrong in ({}, {"weight": -1.0}, {"weight": np.nan}):
        batch.samples[2].metrics = wrong
        with pytest.raises(ValueError, match="a sample of prompt p has no number `weight`"):
            add_advantages(batch, settings("rloo", sample_weight="weight"))
