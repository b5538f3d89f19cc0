"""Each policy loss against a loop written from its formula, in float64: values, gradients and clip fractions."""

from __future__ import annotations

import math
import pickle
from dataclasses import asdict, replace

import pytest
import torch

from roll.algorithms.losses.base import POLICY_LOSSES, LossRequirements, PolicyInputs, make_policy_loss
from roll.algorithms.losses.dppo import binary_kl, binary_total_variation
from roll.algorithms.registry import about_of
from tests.algorithms.policy_loss_reference import (
    CASES,
    bernoulli_kl,
    hard_inputs,
    random_fields,
    random_inputs,
    row_of,
)


def one_row(log_ratios, advantages, **fields):
    """Inputs whose ratios to the behaviour policy are given, with gradient."""
    ratios = torch.tensor([log_ratios], dtype=torch.float64)
    behaviour = torch.full_like(ratios, -30.0)
    return PolicyInputs(
        logprobs=(behaviour + ratios).requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        response_mask=torch.ones_like(ratios, dtype=torch.bool),
        **fields,
    )


def gradient_of(inputs, name, args=None):
    """d (sum of losses) / d logprobs."""
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    losses, _ = make_policy_loss(name, args)(replace(inputs, logprobs=logprobs))
    return torch.autograd.grad(losses.sum(), logprobs)[0]


def test_a_token_at_the_bound_of_the_unified_mask_keeps_its_gradient():
    inputs = one_row([0.0, -1e-3], [-1.0, -1.0])
    assert gradient_of(inputs, "cispo", {"epsilon_low": 0.0, "use_unified_mask": True}).tolist() == [[1.0, 0.0]]


def test_every_variant_has_a_reference():
    assert {variant for variant, _, _ in CASES.values()} == set(POLICY_LOSSES.names())


@pytest.mark.parametrize("old_policy", ["behaviour", "proximal"])
@pytest.mark.parametrize("make_inputs", [lambda old_policy: random_inputs(1, 6, 9, old_policy), hard_inputs])
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_clip_fractions_follow_the_formula(case, make_inputs, old_policy):
    name, args, reference = CASES[case]
    inputs = make_inputs(old_policy)
    logprobs = inputs.logprobs.clone().requires_grad_()
    losses, metrics = make_policy_loss(name, args)(replace(inputs, logprobs=logprobs))
    upstream = torch.randn(losses.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((losses * upstream).sum(), logprobs)
    for row, mask in enumerate(inputs.response_mask):
        values, derivatives, changed = reference(row_of(inputs, row))
        pulls = list(zip(upstream[row][mask].tolist(), derivatives, strict=True))
        expected = [sum(pull * line[j] for pull, line in pulls) for j in range(len(pulls))]
        assert losses[row][mask].tolist() == pytest.approx(values, rel=1e-10, abs=1e-10)
        assert gradient[row][mask].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)
        assert metrics["clip_fraction"][row][mask].tolist() == changed
    outside = ~inputs.response_mask
    assert losses[outside].eq(0).all() and gradient[outside].eq(0).all()
    assert metrics["clip_fraction"][outside].eq(0).all()


@pytest.mark.parametrize("case", CASES)
def test_huge_and_tiny_ratios_stay_finite(case):
    name, args, _ = CASES[case]
    inputs = hard_inputs()
    losses, _ = make_policy_loss(name, args)(inputs)
    assert losses.isfinite().all() and gradient_of(inputs, name, args).isfinite().all()


@pytest.mark.parametrize(
    ("name", "args", "advantage"),
    [("ppo", {}, 1.0), ("ppo", {"dual_clip": 3.0}, -1.0), ("tis", {}, 1.0), ("cispo", {}, -1.0), ("gspo", {}, 1.0),
     ("gmpo", {}, 1.0), ("dppo", {"ratio_cap": 20.0}, -1.0)],
)  # fmt: skip
def test_a_bound_holds_where_the_ratio_itself_overflows(name, args, advantage):
    inputs = PolicyInputs(
        torch.tensor([[-1.0]]), torch.tensor([[-120.0]]), torch.tensor([[advantage]]), torch.ones(1, 1).bool()
    )
    assert inputs.ratio().isinf().all()
    losses, metrics = make_policy_loss(name, args)(inputs)
    assert losses.isfinite().all() and gradient_of(inputs, name, args).isfinite().all()
    assert metrics["clip_fraction"].item() == 1


def test_the_gradient_of_ppo_ends_only_where_a_step_leads_further_away():
    outside = math.log(1.5)
    inputs = one_row([outside, outside, -outside, -outside], [1.0, -1.0, 1.0, -1.0])
    gradient = gradient_of(inputs, "ppo")
    assert gradient[0, 0] == 0 and gradient[0, 3] == 0
    torch.testing.assert_close(gradient[0, 1:3], torch.tensor([1.5, -1 / 1.5], dtype=torch.float64))


def test_tis_keeps_every_gradient_and_bounds_its_weight():
    inputs = one_row([-20.0, 0.0, 20.0], [1.0, 1.0, -1.0])
    expected = torch.tensor([[-math.exp(-20.0), -1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient_of(inputs, "tis"), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("score", "weight"), [(1.0, 1.0), (0.0, math.exp(-0.5)), (-1.0, math.exp(-0.5))])
def test_topr_tapers_a_failed_response_by_its_whole_ratio(score, weight):
    inputs = one_row([0.5, -1.0], [1.0, 1.0], scores=torch.tensor([score]))
    expected = torch.full((1, 2), -weight, dtype=torch.float64)
    torch.testing.assert_close(gradient_of(inputs, "topr"), expected)


def test_the_ratio_of_a_whole_response_counts_all_its_tokens_and_no_others():
    inputs = random_inputs(3)
    difference = inputs.logprobs - inputs.behaviour_logprobs
    dirty = replace(inputs, logprobs=inputs.logprobs.masked_fill(~inputs.response_mask, math.nan))
    for row, mask in enumerate(inputs.response_mask):
        total = sum(difference[row][mask].tolist())
        assert dirty.sequence_log_ratio(mean=False)[row].tolist() == pytest.approx([total])
        assert dirty.sequence_log_ratio(mean=True)[row].tolist() == pytest.approx([total / mask.sum().item()])
    empty = replace(inputs, response_mask=torch.zeros_like(inputs.response_mask))
    for mean in (True, False):
        assert empty.sequence_log_ratio(mean).tolist() == [[0.0]] * len(difference)


def test_kimi15_on_sequences_adds_up_to_the_square_of_the_whole_log_ratio():
    inputs = random_inputs(4)
    policy, _ = make_policy_loss("vanilla")(inputs)
    losses, _ = make_policy_loss("kimi15", {"tau": 0.5, "level": "sequence"})(inputs)
    squares = inputs.sequence_log_ratio(mean=False)[:, 0].square()
    torch.testing.assert_close((losses - policy).sum(-1), 0.25 * squares)


def test_gspo_cuts_the_tokens_of_a_response_together_however_far_each_has_moved():
    inputs = one_row([3.0, -3.0, 0.3], [1.0] * 3)
    _, metrics = make_policy_loss("gspo")(inputs)
    assert metrics["clip_fraction"].tolist() == [[1, 1, 1]]
    balanced = one_row([3.0, -3.0, 0.0], [1.0] * 3)
    assert make_policy_loss("gspo")(balanced)[1]["clip_fraction"].eq(0).all()
    assert gradient_of(balanced, "gspo").tolist() == [pytest.approx([-1.0] * 3)]


def test_the_weight_of_decoupled_ppo_is_always_there_and_carries_no_gradient():
    inputs = random_inputs(5)
    names = ("logprobs", "proximal_logprobs", "behaviour_logprobs")
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    for old_policy in ("behaviour", "proximal"):
        losses, _ = make_policy_loss("decoupled_ppo")(replace(inputs, **leaves, old_policy=old_policy))
        plain, _ = make_policy_loss("ppo")(replace(inputs, old_policy="proximal"))
        weights = (inputs.proximal_logprobs - inputs.behaviour_logprobs).exp()
        torch.testing.assert_close(losses.detach(), weights * plain)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        assert gradients[0].abs().sum() > 0 and gradients[1:] == (None, None)


def test_dppo_lets_a_rare_token_move_and_holds_a_likely_one():
    probabilities = torch.tensor([[1e-4, 0.99]], dtype=torch.float64)
    moved = torch.tensor([[1e-2, 0.80]], dtype=torch.float64)
    inputs = PolicyInputs(
        moved.log(), probabilities.log(), torch.tensor([[1.0, -1.0]], dtype=torch.float64), torch.ones(1, 2).bool()
    )
    for divergence in ("tv", "kl"):
        gradient = gradient_of(inputs, "dppo", {"divergence": divergence})
        assert gradient.tolist() == [pytest.approx([-100.0, 0.0])]
    assert gradient_of(inputs, "ppo").tolist() == [pytest.approx([0.0, 0.80 / 0.99])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_binary_divergences_are_finite_and_exact_up_to_the_last_bit_of_probability_one(dtype):
    certain = torch.tensor([0.0, 1e-7, -1e-12, -1e-3, -40.0], dtype=dtype)
    for function in (binary_total_variation, binary_kl):
        assert function(certain, certain).eq(0).all()
        everything = function(certain[:, None], certain[None, :])
        assert everything.isfinite().all() and (everything > -1e-6).all()
    mu, pi = torch.rand(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [bernoulli_kl(*pair) for pair in zip(mu.tolist(), pi.tolist(), strict=True)]
    assert binary_kl(mu.log(), pi.log()).tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    tiny = binary_kl(torch.tensor(-1e-9, dtype=torch.float64), torch.tensor(-3e-9, dtype=torch.float64))
    assert tiny.item() == pytest.approx(1e-9 * (2 - math.log(3)), rel=1e-6)


def test_requirements_say_what_each_loss_needs_and_does():
    found = {name: make_policy_loss(name).requirements for name in POLICY_LOSSES.names()}
    assert {name for name, each in found.items() if each.select is not None} == {"clip_cov", "kl_cov"}
    assert {name: asdict(replace(each, select=None)) for name, each in found.items()} == {
        name: asdict(requirements)
        for name, requirements in {
            "vanilla": LossRequirements(uses_old_policy=False, importance_weighted=False, corrects=False),
            "ppo": LossRequirements(),
            "decoupled_ppo": LossRequirements(needs_proximal=True),
            "tis": LossRequirements(),
            "topr": LossRequirements(needs_scores=True),
            "cispo": LossRequirements(),
            "kimi15": LossRequirements(importance_weighted=False),
            "gspo": LossRequirements(),
            "gmpo": LossRequirements(sequence_valued=True),
            "sapo": LossRequirements(),
            "dppo": LossRequirements(),
            "clip_cov": LossRequirements(ratio_one=None),
            "kl_cov": LossRequirements(ratio_one="noise"),
        }.items()
    }
    assert make_policy_loss("kimi15", {"level": "sequence"}).requirements.sequence_valued


def test_the_gate_of_sapo_is_flat_where_the_ratio_overflows():
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    inputs = PolicyInputs(
        logprobs, torch.tensor([[-90.0, 0.0]]), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    )
    losses, _ = make_policy_loss("sapo")(inputs)
    losses.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_what_a_loss_needs_and_does_not_get_is_an_error(name):
    needs = make_policy_loss(name).requirements
    bare = replace(random_inputs(6), proximal_logprobs=None, scores=None)
    for inputs, lacking in (
        (replace(bare, scores=torch.zeros(5)), "proximal_logprobs" if needs.needs_proximal else None),
        (
            replace(bare, scores=torch.zeros(5), old_policy="proximal"),
            "proximal_logprobs" if needs.uses_old_policy else None,
        ),
        (replace(bare, proximal_logprobs=bare.logprobs), "scores" if needs.needs_scores else None),
        (replace(random_inputs(6), selected=None), "selected" if needs.select is not None else None),
    ):
        if lacking is None:
            make_policy_loss(name)(inputs)
            continue
        with pytest.raises(ValueError, match=lacking):
            make_policy_loss(name)(inputs)


@pytest.mark.parametrize("shape", [(5, 1), (4,), ()])
def test_scores_that_are_not_one_per_row_are_refused(shape):
    with pytest.raises(ValueError, match=r"scores of shape \(5,\)"):
        make_policy_loss("topr")(replace(random_inputs(6), scores=torch.zeros(shape)))


def test_an_unknown_old_policy_is_refused():
    with pytest.raises(ValueError, match="behaviour, proximal"):
        random_inputs(0, old_policy="behavior")


def test_a_loss_survives_pickling():
    for loss in (make_policy_loss("dppo", {"divergence": "kl"}), make_policy_loss("kl_cov")):
        assert pickle.loads(pickle.dumps(loss)) == loss


def test_formula_source_and_use_are_one_printable_line_each():
    for name in POLICY_LOSSES.names():
        about = about_of(POLICY_LOSSES.load(name, name))
        for text in (about.formula, about.source, about.use):
            assert text.strip() and "\n" not in text
        assert "arXiv" in about.source or name == "vanilla"


def selected_by(name, args, inputs, seed=0):
    select = make_policy_loss(name, args).select
    return select(
        inputs.behaviour_logprobs, inputs.advantages, inputs.response_mask, torch.Generator().manual_seed(seed)
    )


def covariances_by_loop(inputs):
    """Position -> (log mu - mean) (A - mean), over the response tokens of the batch."""
    tokens = [tuple(place) for place in inputs.response_mask.nonzero().tolist()]
    values = {place: (inputs.behaviour_logprobs[place].item(), inputs.advantages[place].item()) for place in tokens}
    means = [sum(each) / len(tokens) for each in zip(*values.values(), strict=True)]
    return {place: (logprob - means[0]) * (advantage - means[1]) for place, (logprob, advantage) in values.items()}


@pytest.mark.parametrize("share", [1e-6, 0.1, 1.0])
def test_kl_cov_selects_the_share_of_tokens_with_the_largest_covariance(share):
    inputs = random_inputs(5, 10, 9)
    found = covariances_by_loop(inputs)
    number = max(1, int(share * len(found)))
    chosen = selected_by("kl_cov", {"share": share}, inputs)
    assert {tuple(place) for place in chosen.nonzero().tolist()} == set(sorted(found, key=found.get)[-number:])


def test_clip_cov_selects_random_tokens_with_a_covariance_in_its_range():
    inputs = random_inputs(5, 10, 9)
    found = covariances_by_loop(inputs)
    candidates = {place for place, value in found.items() if 0.2 < value < 1.5}
    args = {"share": 0.1, "cov_low": 0.2, "cov_high": 1.5}
    drawn = [
        {tuple(place) for place in selected_by("clip_cov", args, inputs, seed).nonzero().tolist()} for seed in range(50)
    ]
    number = int(0.1 * len(found))
    assert len(candidates) > number and all(len(each) == number and each <= candidates for each in drawn)
    assert set.union(*drawn) == candidates
    assert drawn[0] == {tuple(place) for place in selected_by("clip_cov", args, inputs).nonzero().tolist()}
    everything = selected_by("clip_cov", args | {"share": 1.0}, inputs)
    assert {tuple(place) for place in everything.nonzero().tolist()} == candidates


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_whatever_stands_outside_the_mask_and_however_wide_it_is(name):
    args = {"share": 0.2} | ({"cov_low": 0.0} if name == "clip_cov" else {})
    fields = random_fields(6, 8, 9)
    clean = PolicyInputs(**fields)
    chosen = selected_by(name, args, clean)
    assert chosen.any() and not chosen[~clean.response_mask].any()
    select = make_policy_loss(name, args).select
    for fill in (math.nan, math.inf):
        old, advantages = (
            torch.nn.functional.pad(fields[key].masked_fill(~clean.response_mask, fill), (1, 2, 0, 1), value=fill)
            for key in ("behaviour_logprobs", "advantages")
        )
        mask = torch.nn.functional.pad(clean.response_mask, (1, 2, 0, 1))
        wide = select(old, advantages, mask, torch.Generator().manual_seed(0))
        assert torch.equal(wide[:-1, 1:-2], chosen) and wide.sum() == chosen.sum()
    nothing = torch.zeros_like(clean.response_mask)
    assert not select(fields["advantages"], fields["advantages"], nothing, torch.Generator()).any()


def test_selected_tokens_lose_their_gradient_or_are_pulled_back():
    inputs = one_row([0.3, 0.3, -0.3], [1.0, 1.0, 1.0], selected=torch.tensor([[False, True, True]]))
    assert gradient_of(inputs, "clip_cov").tolist() == [pytest.approx([-math.exp(0.3), 0, 0])]
    pulled = [-math.exp(0.3), -math.exp(0.3) + 0.5, -math.exp(-0.3) - 0.5]
    assert gradient_of(inputs, "kl_cov", {"beta": 0.5}).tolist() == [pytest.approx(pulled)]
