"""The mathematics of on-policy distillation: gradients against the exact reverse KL divergence of small policies."""

from __future__ import annotations

import pytest
import torch

from roll.algorithms.advantages.base import estimate_advantages, make_advantage_estimator
from roll.algorithms.correction import parse_correction
from roll.algorithms.kl import token_kl
from roll.algorithms.objective import PolicyObjective

WORDS = 5


def logits(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reverse_kl(policy, teacher):
    """Of next-token distributions ``[..., words]`` by their log-probabilities: ``[...]``."""
    return (policy.exp() * (policy - teacher)).sum(-1)


def loss_of_each_word(policy, sampled_from, teacher, **settings):
    """The objective with one response of one token for each word, and each counted as often as it is sampled."""
    objective = PolicyObjective(max_response_length=1, pg_variant="vanilla", weighted=True, **settings)
    fields = {
        "behaviour_logprobs": sampled_from.detach()[:, None],
        "teacher_logprobs": teacher[:, None],
        "advantages": torch.zeros(WORDS, 1, dtype=torch.float64),
        "sample_weights": sampled_from.detach().exp() * WORDS,
        "correction_weights": (policy - sampled_from).detach().exp()[:, None],
    }
    mask = torch.ones(WORDS, 1, dtype=torch.bool)
    loss, metrics = objective(policy[:, None], torch.zeros(WORDS, 1), mask, objective.normalizers([1] * WORDS), fields)
    names, (sums, maxima) = metrics, metrics.vectors()
    return loss, names.from_vectors(sums.tolist(), maxima.tolist())


def test_the_term_of_the_loss_has_the_gradient_of_the_exact_divergence():
    parameters = logits(0, WORDS).requires_grad_()
    policy, teacher = parameters.log_softmax(-1), logits(1, WORDS).log_softmax(-1)
    (exact,) = torch.autograd.grad(reverse_kl(policy, teacher), parameters, retain_graph=True)
    loss, metrics = loss_of_each_word(policy, policy, teacher, distillation_coef=0.7)
    (estimated,) = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(estimated, 0.7 * exact)
    assert metrics["distillation_loss"] == pytest.approx(float(reverse_kl(policy, teacher)))


def test_on_tokens_of_other_weights_a_correction_gives_the_same_gradient():
    parameters = logits(2, WORDS).requires_grad_()
    policy, teacher = parameters.log_softmax(-1), logits(3, WORDS).log_softmax(-1)
    stale = logits(4, WORDS).log_softmax(-1)
    (exact,) = torch.autograd.grad(reverse_kl(policy, teacher), parameters, retain_graph=True)
    loss, _ = loss_of_each_word(policy, stale, teacher, distillation_coef=1.0, corrected=True)
    (estimated,) = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(estimated, exact)


def test_without_one_a_token_counts_at_most_once_and_by_how_likely_it_is_now():
    parameters = logits(5, WORDS).requires_grad_()
    policy, teacher = parameters.log_softmax(-1), logits(6, WORDS).log_softmax(-1)
    stale = logits(7, WORDS).log_softmax(-1)
    difference = policy.detach() - teacher
    weights = stale.exp() * (policy - stale).detach().exp().clamp(max=1)
    assert (weights < stale.exp()).any() and (weights == stale.exp()).any()
    (expected,) = torch.autograd.grad((weights * difference * policy).sum(), parameters, retain_graph=True)
    loss, _ = loss_of_each_word(policy, stale, teacher, distillation_coef=1.0)
    (estimated,) = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(estimated, expected)


@pytest.mark.parametrize("in_rewards", [True, False])
def test_in_the_rewards_tokens_answer_for_those_after_them(in_rewards):
    """All responses of two tokens. In the advantages the gradient is that of each next-token distribution, prefixes
    taken as given; in the rewards, with returns, it is that of the divergence of whole responses."""
    first, second = logits(8, WORDS).requires_grad_(), logits(9, WORDS, WORDS).requires_grad_()
    policy = first.log_softmax(-1), second.log_softmax(-1)
    teacher = logits(10, WORDS).log_softmax(-1), logits(11, WORDS, WORDS).log_softmax(-1)

    def of_responses(model):
        return torch.stack([model[0][:, None].expand(WORDS, WORDS), model[1]], -1).reshape(-1, 2)

    logprobs, theirs = of_responses(policy), of_responses(teacher)
    shares = logprobs.detach().sum(-1).exp()
    mask = torch.ones(len(logprobs), 2, dtype=torch.bool)
    penalties = -token_kl(logprobs.detach(), theirs, mask, "k1")
    advantages = penalties
    if in_rewards:
        nothing = torch.zeros(len(logprobs), dtype=torch.float64)
        estimator = make_advantage_estimator("reinforce")
        advantages = estimate_advantages(estimator, nothing, mask, range(len(mask)), token_rewards=penalties)
    estimated = torch.autograd.grad(
        -(shares[:, None] * advantages * logprobs).sum(), (first, second), retain_graph=True
    )
    reached = policy[0].exp() if in_rewards else policy[0].detach().exp()
    exact = reverse_kl(policy[0], teacher[0]) + (reached * reverse_kl(policy[1], teacher[1])).sum()
    for one, other in zip(estimated, torch.autograd.grad(exact, (first, second)), strict=True):
        torch.testing.assert_close(one, other)


def objective_and_fields(**settings):
    objective = PolicyObjective(max_response_length=3, distillation_coef=2.0, **settings)
    fields = {
        "behaviour_logprobs": torch.tensor([[-1.0, -2.0, torch.nan]]),
        "proximal_logprobs": torch.tensor([[-1.0, -2.0, torch.nan]]),
        "teacher_logprobs": torch.tensor([[-1.5, -1.0, torch.nan]]),
        "advantages": torch.zeros(1, 3),
    }
    return objective, fields


def evaluated(objective, fields, loss_mask=None):
    logprobs = torch.tensor([[-1.0, -2.0, torch.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    counted = (mask if loss_mask is None else mask & loss_mask).sum(-1).tolist()
    loss, _ = objective(logprobs, torch.zeros(1, 3), mask, objective.normalizers(counted), fields, loss_mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss), gradient[0].tolist()


def test_what_is_masked_teaches_nothing():
    objective, fields = objective_and_fields()
    loss, gradient = evaluated(objective, fields)
    first, second = torch.tensor([-0.5, 1.0]).expm1() + torch.tensor([0.5, -1.0])
    assert loss == pytest.approx(float(first + second)) and gradient == pytest.approx([0.5, -1.0, 0.0])
    loss, gradient = evaluated(objective, fields, torch.tensor([[True, False, False]]))
    assert loss == pytest.approx(2 * float(first)) and gradient == pytest.approx([1.0, 0.0, 0.0])


def test_a_token_that_the_correction_rejects_in_the_same_pass_teaches_nothing():
    correction = parse_correction({"weight": {"level": "token", "upper": 1.0}})
    objective, fields = objective_and_fields(pg_variant="vanilla", one_pass=True, corrected=True, correction=correction)
    del fields["proximal_logprobs"]
    fields["behaviour_logprobs"] = torch.tensor([[-1.0, -1.0, 0.0]])
    _, gradient = evaluated(objective, fields)
    assert gradient == pytest.approx([0.5, -torch.tensor(-1.0).exp().item(), 0.0])
    with pytest.raises(ValueError, match="lacks teacher_logprobs"):
        evaluated(objective, {name: value for name, value in fields.items() if name != "teacher_logprobs"})


def test_a_teacher_that_is_the_policy_gives_a_gradient_of_nothing_at_all():
    objective, fields = objective_and_fields()
    fields["teacher_logprobs"] = fields["behaviour_logprobs"]
    assert evaluated(objective, fields) == (0.0, [0.0, 0.0, 0.0])
