"""`roll.algorithms` on plain tensors: three lines, and clear errors in place of silent broadcasts."""

from __future__ import annotations

import pytest
import torch

import roll
from roll.algorithms import PolicyInputs, aggregate, plain
from roll.algorithms.advantages.base import shape_advantages
from roll.algorithms.correction import parse_correction
from roll.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

MASK = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
SCORES = torch.tensor([1.0, 0.0, 1.0])


def tensors(seed=0):
    return -torch.rand(3, 3, generator=torch.Generator().manual_seed(seed))


def test_a_loss_is_three_lines():
    logprobs = tensors().requires_grad_()
    advantages = roll.algorithms.grpo(SCORES, MASK, ["a", "a", "b"])
    losses, metrics = roll.algorithms.ppo(PolicyInputs(logprobs, tensors(1), advantages, MASK), clip_low=0.1)
    loss = aggregate(losses, MASK)
    loss.backward()
    assert torch.isclose(loss, losses[MASK].mean()) and (logprobs.grad[~MASK] == 0).all() and "clip_fraction" in metrics


@pytest.mark.parametrize("name", plain.names())
def test_every_loss_and_estimator_is_there_under_its_name(name):
    function = getattr(roll.algorithms, name)
    assert function.__name__ == name and name in dir(roll.algorithms) and "settings" in function.__doc__
    if name in POLICY_LOSSES.built_in:
        found, _ = function(PolicyInputs(tensors(), tensors(1), tensors(2), MASK, tensors(3), SCORES, MASK))
    else:
        optional = {
            "values": tensors(),
            "baseline_rewards": SCORES,
            "parts": torch.stack([SCORES, 1 - SCORES], 1),
            "part_weights": torch.ones(3, 2),
            "turns": torch.where(MASK, 0, -1),
            "states": torch.zeros(3, 1, dtype=torch.int64),
        }
        found = function(SCORES, MASK, [0, 0, 0], **optional)
    assert found.shape == MASK.shape and found.isfinite().all() and (found[~MASK] == 0).all()


def test_a_wrong_setting_is_named():
    with pytest.raises(roll.ConfigError, match="clip_lo"):
        roll.algorithms.ppo(PolicyInputs(tensors(), tensors(), tensors(), MASK), clip_lo=0.1)
    with pytest.raises(AttributeError, match="pppo"):
        _ = roll.algorithms.pppo


def test_advantages_of_sequences_are_not_taken_for_those_of_tokens():
    """Of a batch as long as it is wide, ``[batch]`` would be broadcast along the tokens."""
    with pytest.raises(ValueError, match=r"advantages must have the shape \[3, 3\], not \[3\]"):
        PolicyInputs(tensors(), tensors(), torch.ones(3), MASK)
    with pytest.raises(ValueError, match=r"values must have the shape"):
        aggregate(torch.ones(3), MASK)
    with pytest.raises(ValueError, match=r"token_rewards must have the shape"):
        roll.algorithms.reinforce(torch.ones(3, 2), MASK)


ROW, WHOLE = torch.ones(3), torch.ones(3, 3)
CORRECTION = parse_correction({"weight": {"level": "token"}})
FUNCTIONS = {
    "a KL divergence": lambda one, other, mask: roll.algorithms.token_kl(one, other, mask),
    "the loss of values": lambda one, other, mask: roll.algorithms.value_loss(one, one, other, mask),
    "a correction": lambda one, other, mask: roll.algorithms.correct(one, other, mask, CORRECTION),
    "whitening": lambda one, other, mask: roll.algorithms.whiten(other, mask),
    "clipping": lambda one, other, mask: shape_advantages(one, mask, False, 1.0, others=other),
    "log-probabilities": lambda one, other, mask: PolicyInputs(other, one, one, mask),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_broadcast_and_no_type_is_guessed(name):
    call = FUNCTIONS[name]
    call(WHOLE, WHOLE, MASK)
    for other, mask, words in (
        (ROW, MASK, r"must have the shape \[3, 3\], not \[3\]"),
        (WHOLE.long(), MASK, r"must be floating-point numbers, not torch.int64: write `\w+.float\(\)`"),
        ([[1.0] * 3] * 3, MASK, "must be a tensor, not list"),
        (WHOLE, MASK.float(), r"write `mask.bool\(\)`"),
        (WHOLE, MASK[0], r"response_mask must be \[batch, seq\], not \[3\]"),
    ):
        with pytest.raises(ValueError, match=words):
            call(WHOLE, other, mask)


@pytest.mark.parametrize(
    ("targets", "words"),
    [(torch.zeros(3), "token ids"), (torch.zeros(2, dtype=torch.int64), r"must have the shape \[3\], not \[2\]")],
)
def test_targets_are_token_ids(targets, words):
    with pytest.raises(ValueError, match=words):
        roll.algorithms.token_logprobs(torch.zeros(3, 5), targets)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.built_in)
@pytest.mark.parametrize(
    ("rewards", "mask", "words"),
    [
        (SCORES, MASK.float(), r"mask.bool\(\)"),
        (SCORES[:2], MASK, r"rewards must have the shape \[3\], not \[2\]"),
        (torch.tensor(1.0), MASK, r"rewards must have the shape \[3\], not \[\]"),
        (SCORES, MASK[0], r"response_mask must be \[batch, seq\]"),
        ([1.0, 0.0, 1.0], MASK, "rewards must be a tensor, not list"),
    ],
)
def test_rewards_of_responses_are_checked_before_anything_is_computed(name, rewards, mask, words):
    with pytest.raises(ValueError, match=words):
        getattr(roll.algorithms, name)(rewards, mask, [0, 0, 0])


@pytest.mark.parametrize("mask", [MASK.float(), MASK.long()])
def test_a_mask_of_numbers_is_refused_with_the_remedy(mask):
    for call in (
        lambda: PolicyInputs(tensors(), tensors(), tensors(), mask),
        lambda: aggregate(tensors(), mask),
        lambda: roll.algorithms.make_advantage_estimator("reinforce")(tensors(), mask),
    ):
        with pytest.raises(ValueError, match=r"mask.bool\(\)"):
            call()


def test_only_estimators_that_compare_ask_for_groups():
    alone = roll.algorithms.reinforce(SCORES, MASK)
    assert torch.equal(alone, roll.algorithms.reinforce(SCORES, MASK, [0, 0, 0]))
    with pytest.raises(ValueError, match="needs groups"):
        roll.algorithms.grpo(SCORES, MASK)
    with pytest.raises(ValueError, match=r"groups must be \[batch\]"):
        roll.algorithms.grpo(SCORES, MASK, [0, 0])


def test_groups_may_be_texts():
    assert torch.equal(
        roll.algorithms.rloo(SCORES, MASK, ["x", "y", "x"]), roll.algorithms.rloo(SCORES, MASK, [7, 1, 7])
    )


def test_each_mode_asks_only_for_what_it_needs():
    normalize = roll.algorithms.normalize_rewards
    assert torch.isclose(normalize(SCORES, mean="batch").sum(), torch.tensor(0.0))
    with pytest.raises(ValueError, match="no groups are given"):
        normalize(SCORES, mean="group")
    with pytest.raises(ValueError, match="max_response_length"):
        aggregate(tensors(), MASK, "seq-mean-token-sum-norm")
    lengths = roll.algorithms.LossNormalizers.of([2, 3, 1], 10)
    assert aggregate(tensors(), MASK, "seq-mean-token-sum-norm", lengths).ndim == 0
