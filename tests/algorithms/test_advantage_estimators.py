"""Every advantage estimator against a loop written from its formula, in float64; masks, groups and degenerate cases."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.advantages.base import (
    ADVANTAGE_ESTIMATORS,
    AdvantageRequirements,
    estimate_advantages,
    make_advantage_estimator,
    shape_advantages,
    whiten,
)
from roll.algorithms.advantages.shared import response_segments, token_returns
from roll.algorithms.kl import sequence_token_rewards
from roll.configs.errors import ConfigError
from tests.tiers import examples

NAMES = ADVANTAGE_ESTIMATORS.names()
EVERY_FILL = st.sampled_from([float("nan"), float("inf"), -float("inf")])


@dataclass
class Case:
    """Everything an estimator may ask for."""

    token_rewards: Tensor
    response_mask: Tensor
    groups: Tensor
    values: Tensor
    baseline_rewards: Tensor
    parts: Tensor
    part_weights: Tensor
    turns: Tensor
    states: Tensor

    def estimate(self, name, **args):
        return make_advantage_estimator(name, args)(
            self.token_rewards,
            self.response_mask,
            self.groups,
            values=self.values,
            baseline_rewards=self.baseline_rewards,
            parts=self.parts,
            part_weights=self.part_weights,
            turns=self.turns,
            states=self.states,
        )

    def rows(self):
        """Per sample: the positions of its response tokens."""
        return [row.nonzero()[:, 0].tolist() for row in self.response_mask]

    def total(self, row):
        return sum(self.token_rewards[row, position].item() for position in self.rows()[row])

    def peers(self, row):
        """Rows of the group of ``row`` that have tokens, itself included."""
        return [other for other, chosen in enumerate(self.rows()) if chosen and self.groups[other] == self.groups[row]]


def random_case(seed, rows=8, width=9):
    """Turns are runs of one to three response tokens; one row is empty, one has one token, rewards repeat."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def draw_integers(limit, *shape):
        return torch.randint(0, limit, shape, generator=generator)

    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[0] = False
    mask[1] = False
    mask[1, int(draw_integers(width, 1))] = True
    turns = torch.full((rows, width), -1)
    for row in range(rows):
        number = 0
        for count, position in enumerate(mask[row].nonzero()[:, 0].tolist()):
            number += int(count > 0 and draw_integers(2, 1).item())
            turns[row, position] = number
    rewards = torch.where(draw(rows, width) > 0, draw_integers(3, rows, width).double(), draw(rows, width))
    return Case(
        token_rewards=torch.where(mask, rewards, 0.0),
        response_mask=mask,
        groups=draw_integers(3, rows) * 5 - 7,
        values=draw(rows, width),
        baseline_rewards=draw(rows),
        parts=torch.stack([draw_integers(2, rows).double(), 100 * draw(rows), torch.ones(rows).double()], dim=1),
        part_weights=torch.tensor([1.0, 0.5, 2.0]).double().expand(rows, 3),
        turns=turns,
        states=draw_integers(3, rows, width) - 1,
    )


def per_token(case, value):
    """float64 ``[batch, seq]`` of ``value(row, rank of the token, position)``, 0 outside the mask."""
    out = torch.zeros_like(case.token_rewards)
    for row, chosen in enumerate(case.rows()):
        for rank, position in enumerate(chosen):
            out[row, position] = value(row, rank, position)
    return out


def grpo_of(value, members, normalize=True, eps=1e-6):
    centred = value - statistics.fmean(members)
    if len(set(members)) == 1:
        return 0.0
    return centred / (statistics.stdev(members) + eps) if normalize else centred


def loop_reinforce(case, gamma=1.0):
    def value(row, rank, position):
        chosen = case.rows()[row][rank:]
        return sum(gamma**k * case.token_rewards[row, later].item() for k, later in enumerate(chosen))

    return per_token(case, value)


def loop_grpo(case, normalize_by_std=True, eps=1e-6):
    def value(row, rank, position):
        return grpo_of(case.total(row), [case.total(peer) for peer in case.peers(row)], normalize_by_std, eps)

    return per_token(case, value)


def loop_rloo(case):
    def value(row, rank, position):
        others = [case.total(peer) for peer in case.peers(row) if peer != row]
        return case.total(row) - statistics.fmean(others) if others else 0.0

    return per_token(case, value)


def loop_opo(case):
    def value(row, rank, position):
        lengths = {peer: len(case.rows()[peer]) for peer in case.peers(row)}
        baseline = sum(lengths[peer] * case.total(peer) for peer in lengths) / sum(lengths.values())
        return case.total(row) - baseline

    return per_token(case, value)


def loop_whiten(case, advantages, eps=1e-8):
    tokens = [advantages[row, position].item() for row, chosen in enumerate(case.rows()) for position in chosen]
    if len(set(tokens)) <= 1:
        return torch.zeros_like(advantages)
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    return per_token(case, lambda row, rank, position: (advantages[row, position].item() - mean) / (deviation + eps))


def loop_gdpo(case, normalize_by_batch=True, eps=1e-6):
    sums = {}
    for row, chosen in enumerate(case.rows()):
        if chosen:
            names = range(case.parts.shape[1])
            sums[row] = sum(
                case.part_weights[row, name].item()
                * grpo_of(case.parts[row, name].item(), [case.parts[peer, name].item() for peer in case.peers(row)])
                for name in names
            )
    if normalize_by_batch:
        sums = {row: grpo_of(value, list(sums.values())) for row, value in sums.items()}
    return per_token(case, lambda row, rank, position: sums[row])


def loop_pass_at_k(case, k=4, baseline="group", eps=1e-6):
    """By drawing every subset."""

    def value(row, rank, position):
        peers = case.peers(row)
        if len(peers) <= k or len({case.total(peer) for peer in peers}) == 1:
            return 0.0
        best = {subset: max(map(case.total, subset)) for subset in itertools.combinations(peers, k)}
        own = statistics.fmean(value for subset, value in best.items() if row in subset)
        if baseline == "leave_one_out":
            return own - statistics.fmean(value for subset, value in best.items() if row not in subset)
        if len(set(best.values())) == 1:
            return 0.0
        return (own - statistics.fmean(best.values())) / (statistics.pstdev(best.values()) + eps)

    return per_token(case, value)


def loop_remax(case):
    return per_token(case, lambda row, rank, position: case.total(row) - case.baseline_rewards[row].item())


def loop_gae(case, gamma=1.0, lambda_=0.95):
    out = torch.zeros_like(case.token_rewards)
    for row, chosen in enumerate(case.rows()):
        advantage = following = 0.0
        for position in reversed(chosen):
            value = case.values[row, position].item()
            error = case.token_rewards[row, position].item() + gamma * following - value
            advantage = error + gamma * lambda_ * advantage
            following = value
            out[row, position] = advantage
    return out


def loop_turn_return(case, turns, row, turn, gamma):
    return sum(
        gamma ** (int(turns[row, position]) - turn) * case.token_rewards[row, position].item()
        for position in case.rows()[row]
        if turns[row, position] >= turn
    )


def loop_step_reinforce(case, gamma=1.0):
    def value(row, rank, position):
        return loop_turn_return(case, case.turns, row, int(case.turns[row, position]), gamma)

    return per_token(case, value)


def loop_agentic_reinforce(case, gamma=1.0):
    segments = torch.full_like(case.turns, -1)
    for row, chosen in enumerate(case.rows()):
        number = -1
        for rank, position in enumerate(chosen):
            number += int(rank == 0 or chosen[rank - 1] != position - 1)
            segments[row, position] = number
    return loop_step_reinforce(replace(case, turns=segments), gamma)


def loop_gigpo(case, gamma=0.95, step_weight=1.0, normalize_by_std=True, eps=1e-6):
    returns = {
        (row, turn): loop_turn_return(case, case.turns, row, turn, gamma)
        for row, chosen in enumerate(case.rows())
        for turn in {int(case.turns[row, position]) for position in chosen}
    }
    anchors = {key: (int(case.groups[key[0]]), int(case.states[key])) for key in returns}
    episode = loop_grpo(case, normalize_by_std, eps)

    def value(row, rank, position):
        key = row, int(case.turns[row, position])
        step = 0.0
        if case.states[key] != -1:
            members = [returns[other] for other in returns if anchors[other] == anchors[key]]
            step = grpo_of(returns[key], members, normalize_by_std, eps)
        return episode[row, position].item() + step_weight * step

    return per_token(case, value)


CLOSED_FORMS = [
    ("reinforce", {}, loop_reinforce),
    ("reinforce", {"gamma": 0.9}, loop_reinforce),
    ("reinforce", {"gamma": 0.0}, loop_reinforce),
    ("grpo", {}, loop_grpo),
    ("grpo", {"normalize_by_std": False}, loop_grpo),
    ("grpo", {"eps": 0.5}, loop_grpo),
    ("rloo", {}, loop_rloo),
    ("opo", {}, loop_opo),
    *(
        ("pass_at_k", {"k": k, "baseline": baseline}, loop_pass_at_k)
        for k in (1, 2, 3)
        for baseline in ("group", "leave_one_out")
    ),
    ("pass_at_k", {}, loop_pass_at_k),
    ("gdpo", {}, loop_gdpo),
    ("gdpo", {"normalize_by_batch": False}, loop_gdpo),
    ("reinforce_plus_plus", {}, lambda case: loop_whiten(case, loop_reinforce(case))),
    (
        "reinforce_plus_plus",
        {"gamma": 0.7, "eps": 0.1},
        lambda case, gamma, eps: loop_whiten(case, loop_reinforce(case, gamma), eps),
    ),
    (
        "reinforce_plus_plus_baseline",
        {"eps": 1e-3},
        lambda case, eps: loop_whiten(case, loop_grpo(case, normalize_by_std=False), eps),
    ),
    ("remax", {}, loop_remax),
    ("gae", {}, loop_gae),
    ("gae", {"gamma": 0.9, "lambda_": 0.5}, loop_gae),
    ("gae", {"gamma": 0.0, "lambda_": 1.0}, loop_gae),
    ("step_reinforce", {}, loop_step_reinforce),
    ("step_reinforce", {"gamma": 0.8}, loop_step_reinforce),
    ("agentic_reinforce", {}, loop_agentic_reinforce),
    ("agentic_reinforce", {"gamma": 0.8}, loop_agentic_reinforce),
    ("gigpo", {}, loop_gigpo),
    ("gigpo", {"gamma": 0.5, "step_weight": 0.3, "normalize_by_std": False}, loop_gigpo),
]


@pytest.mark.parametrize(
    ("name", "args", "closed_form"), CLOSED_FORMS, ids=[f"{name} {args}" for name, args, _ in CLOSED_FORMS]
)
@pytest.mark.parametrize("seed", range(4))
def test_estimators_agree_with_their_closed_form(name, args, closed_form, seed):
    case = random_case(seed)
    values = case.estimate(name, **args)
    assert values.dtype == torch.float64
    torch.testing.assert_close(values, closed_form(case, **args), rtol=1e-10, atol=1e-10)


def test_every_estimator_has_a_closed_form():
    assert {name for name, _, _ in CLOSED_FORMS} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(50))
@given(seed=st.integers(0, 10_000), fill=EVERY_FILL)
def test_what_stands_outside_the_mask_is_never_read(name, seed, fill):
    case = random_case(seed)
    outside = ~case.response_mask
    turns_seen = [{int(turn) for turn in row if turn >= 0} for row in case.turns]
    unused = torch.tensor([[turn not in seen for turn in range(outside.shape[1])] for seen in turns_seen])
    dirty = replace(
        case,
        token_rewards=case.token_rewards.masked_fill(outside, fill),
        values=case.values.masked_fill(outside, fill),
        baseline_rewards=case.baseline_rewards.masked_fill(outside.all(-1), fill),
        turns=case.turns.masked_fill(outside, 10**6),
        states=case.states.masked_fill(unused, 1),
    )
    before = {item.name: getattr(dirty, item.name).clone() for item in fields(dirty)}
    values = dirty.estimate(name)
    assert torch.equal(values, case.estimate(name))
    assert values[outside].eq(0).all() and values.isfinite().all()
    for field, value in before.items():
        torch.testing.assert_close(getattr(dirty, field), value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(50))
@given(seed=st.integers(0, 10_000))
def test_order_of_samples_and_names_of_groups_do_not_matter(name, seed):
    case = random_case(seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    moved = Case(**{item.name: getattr(case, item.name)[order] for item in fields(case)})
    moved.groups = 100 - moved.groups * 17
    torch.testing.assert_close(moved.estimate(name), case.estimate(name)[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(50))
@given(seed=st.integers(0, 10_000), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_on_either_side_and_groups_without_tokens_change_nothing(name, seed, left, right):
    case = random_case(seed)
    width = case.response_mask.shape[1]

    def widened(values, fill):
        return torch.nn.functional.pad(values, (left, right, 0, 1), value=fill)

    padded = Case(
        token_rewards=widened(case.token_rewards, float("nan")),
        response_mask=widened(case.response_mask.long(), 0).bool(),
        groups=torch.cat([case.groups, case.groups[-1:]]),
        values=widened(case.values, float("nan")),
        baseline_rewards=torch.cat([case.baseline_rewards, torch.tensor([float("nan")]).double()]),
        parts=torch.nn.functional.pad(case.parts, (0, 0, 0, 1), value=float("nan")),
        part_weights=torch.nn.functional.pad(case.part_weights, (0, 0, 0, 1)),
        turns=widened(case.turns, -1),
        states=torch.cat([case.states, case.states[-1:]]),
    )
    values = padded.estimate(name)
    torch.testing.assert_close(values[:-1, left : left + width], case.estimate(name), rtol=1e-9, atol=1e-9)
    assert values[-1].eq(0).all()


@pytest.mark.parametrize("name", [name for name in NAMES if not make_advantage_estimator(name).requirements.whitens])
def test_groups_are_estimated_apart_unless_the_batch_is_whitened(name):
    case = random_case(11)
    values = case.estimate(name)
    for group in case.groups.unique():
        rows = case.groups == group
        part = Case(**{item.name: getattr(case, item.name)[rows] for item in fields(case)})
        torch.testing.assert_close(part.estimate(name), values[rows], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_flows_through_advantages(name):
    case = random_case(2)
    for tensor in (case.token_rewards, case.values, case.baseline_rewards):
        tensor.requires_grad_(True)
    assert not case.estimate(name).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_lower_precision_rewards_give_float32_computed_in_float64(name):
    case = random_case(5)
    half = replace(case, token_rewards=case.token_rewards.half())
    exact = replace(case, token_rewards=half.token_rewards.double())
    assert half.estimate(name).dtype == torch.float32
    assert torch.equal(half.estimate(name), exact.estimate(name).float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)])
def test_batches_without_a_single_response_token_give_zeros(name, shape):
    empty = Case(
        token_rewards=torch.full(shape, float("nan")),
        response_mask=torch.zeros(shape, dtype=torch.bool),
        groups=torch.zeros(shape[0], dtype=torch.int64),
        values=torch.full(shape, float("nan")),
        baseline_rewards=torch.zeros(shape[0]),
        parts=torch.full((shape[0], 2), float("nan")),
        part_weights=torch.ones(shape[0], 2),
        turns=torch.full(shape, -1),
        states=torch.full(shape, -1),
    )
    values = empty.estimate(name)
    assert values.shape == shape and values.eq(0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_field_is_named_and_nothing_else_is_asked_for(name):
    case, estimator = random_case(1), make_advantage_estimator(name)
    needs = {
        "values": estimator.requirements.needs_values,
        "baseline_rewards": estimator.requirements.needs_greedy_baseline,
        "parts": estimator.requirements.needs_parts,
        "part_weights": estimator.requirements.needs_parts,
        "turns": estimator.requirements.needs_turns,
        "states": estimator.requirements.needs_states,
    }
    given_fields = {field: getattr(case, field) for field, needed in needs.items() if needed}
    full = estimator(case.token_rewards, case.response_mask, case.groups, **given_fields)
    assert torch.equal(full, case.estimate(name))
    for field in given_fields:
        rest = {other: value for other, value in given_fields.items() if other != field}
        with pytest.raises(ValueError, match=rf"{name}.*{field}"):
            estimator(case.token_rewards, case.response_mask, case.groups, **rest)


def test_traits_say_what_estimators_need():
    traits = {name: make_advantage_estimator(name).requirements for name in NAMES}
    assert all(isinstance(item, AdvantageRequirements) for item in traits.values())

    def having(trait):
        return {name for name, item in traits.items() if getattr(item, trait)}

    assert make_advantage_estimator("pass_at_k", {"k": 7}).requirements.least_samples == 8
    assert having("group_relative") == {
        "grpo",
        "rloo",
        "opo",
        "reinforce_plus_plus_baseline",
        "gigpo",
        "gdpo",
        "pass_at_k",
    }
    assert having("needs_parts") == {"gdpo"}
    assert having("needs_greedy_baseline") == {"remax"}
    assert having("needs_values") == {"gae"}
    assert having("needs_turns") == {"gigpo", "step_reinforce"}
    assert having("needs_states") == {"gigpo"}
    assert having("for_episodes") == {"gigpo", "step_reinforce", "agentic_reinforce"}
    assert having("returns_to_go") == {"reinforce", "reinforce_plus_plus", "gae"}
    assert having("whitens") == {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"}
    assert not make_advantage_estimator("gdpo", {"normalize_by_batch": False}).requirements.whitens


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *((name, {}) for name in NAMES),
        ("gdpo", {"normalize_by_batch": False}),
        ("pass_at_k", {"k": 2}),
        ("gae", {"gamma": 0.9}),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_an_estimator_looks_at_one_group_if_and_only_if_it_says_so(name, args, seed):
    case = random_case(seed, rows=24)
    alone = torch.zeros_like(case.estimate(name, **args))
    for group in case.groups.unique():
        rows = case.groups == group
        part = Case(**{field.name: getattr(case, field.name)[rows] for field in fields(Case)})
        alone[rows] = part.estimate(name, **args)
    is_alike = torch.allclose(alone, case.estimate(name, **args), rtol=1e-12, atol=1e-12)
    assert is_alike == make_advantage_estimator(name, args).requirements.by_group


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("values", (8, 1)),
        ("baseline_rewards", (8, 1)),
        ("parts", (7, 3)),
        ("part_weights", (8, 2)),
        ("turns", (8, 8)),
        ("states", (8,)),
        ("groups", (7,)),
    ],
)
def test_fields_of_a_wrong_shape_are_refused(field, shape):
    case = random_case(3)
    name = {"values": "gae", "baseline_rewards": "remax", "parts": "gdpo", "part_weights": "gdpo"}.get(field, "gigpo")
    wrong = replace(case, **{field: torch.zeros(shape, dtype=getattr(case, field).dtype)})
    with pytest.raises(ValueError, match=field):
        wrong.estimate(name)


def test_a_response_token_without_a_turn_or_a_turn_without_a_state_column_is_refused():
    case = random_case(3)
    with pytest.raises(ValueError, match="no turn"):
        replace(case, turns=torch.full_like(case.turns, -1)).estimate("step_reinforce")
    with pytest.raises(ValueError, match="states"):
        replace(case, states=case.states[:, : int(case.turns.max())]).estimate("gigpo")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("reinforce", {"gamma": 1.01}),
        ("reinforce_plus_plus", {"eps": 0.0}),
        ("gae", {"lambda_": -0.1}),
        ("gae", {"gamma": 2.0}),
        ("gigpo", {"step_weight": -1.0}),
        ("step_reinforce", {"gamma": -0.5}),
        ("agentic_reinforce", {"gamma": 1.5}),
        ("rloo", {"eps": 1.0}),
    ],
)
def test_arguments_out_of_range_are_refused(name, args):
    with pytest.raises(ConfigError):
        make_advantage_estimator(name, args)


def sequence_case(rewards, groups, lengths=None):
    lengths = lengths or [2] * len(rewards)
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return sequence_token_rewards(torch.tensor(rewards, dtype=torch.float64), mask), mask, np.array(groups)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
@pytest.mark.parametrize("reward", [0.1, 1.0, -3.3e7, 1e-9, 1 / 3])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(name, reward):
    rewards, mask, groups = sequence_case([reward] * 5 + [12.0], [4, 4, 4, 4, 4, 1], [1, 2, 3, 1, 1, 2])
    assert make_advantage_estimator(name)(rewards, mask, groups).eq(0).all()


reward_lists = st.lists(st.tuples(st.integers(0, 2), st.integers(-5, 5), st.integers(1, 5)), min_size=1, max_size=9)


@settings(max_examples=examples(80))
@given(data=reward_lists)
def test_group_relative_advantages_cancel_within_a_group(data):
    groups, rewards, lengths = ([item[i] for item in data] for i in range(3))
    token_rewards, mask, numbers = sequence_case([float(reward) for reward in rewards], groups, lengths)
    first = {
        name: make_advantage_estimator(name, args)(token_rewards, mask, numbers)[:, 0]
        for name, args in (("grpo", {}), ("rloo", {}), ("opo", {}))
    }
    weights = torch.tensor(lengths, dtype=torch.float64)
    for group in set(groups):
        rows = torch.tensor([number == group for number in groups])
        assert abs(first["grpo"][rows].sum().item()) < 1e-9
        assert abs(first["rloo"][rows].sum().item()) < 1e-9
        assert abs((weights * first["opo"])[rows].sum().item()) < 1e-9


@settings(max_examples=examples(80))
@given(data=reward_lists)
def test_rloo_is_the_centred_reward_stretched_by_the_size_of_its_group(data):
    groups, rewards = [item[0] for item in data], [float(item[1]) for item in data]
    case = sequence_case(rewards, groups)
    rloo = make_advantage_estimator("rloo")(*case)
    centred = make_advantage_estimator("grpo", {"normalize_by_std": False})(*case)
    sizes = torch.tensor([groups.count(group) for group in groups], dtype=torch.float64)[:, None]
    torch.testing.assert_close(rloo * (sizes - 1), centred * sizes, rtol=1e-10, atol=1e-10)


@settings(max_examples=examples(80))
@given(data=reward_lists, shift=st.floats(-100, 100), scale=st.floats(0.01, 100))
def test_grpo_ignores_the_shift_and_with_the_deviation_the_scale_of_rewards(data, shift, scale):
    groups, rewards = [item[0] for item in data], np.array([float(item[1]) for item in data])
    plain, mask, numbers = sequence_case(rewards, groups)
    shifted, scaled = (sequence_case(changed, groups)[0] for changed in (rewards + shift, rewards * scale))
    for args in ({"eps": 1e-12}, {"normalize_by_std": False}):
        estimator = make_advantage_estimator("grpo", args)
        expected = estimator(plain, mask, numbers)
        torch.testing.assert_close(estimator(shifted, mask, numbers), expected, rtol=1e-8, atol=1e-8)
    whole = make_advantage_estimator("grpo", {"eps": 1e-12})
    torch.testing.assert_close(whole(scaled, mask, numbers), whole(plain, mask, numbers), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(estimator(scaled, mask, numbers), expected * scale, rtol=1e-8, atol=1e-8)


def test_a_reward_after_a_tool_answer_reaches_the_tokens_before_it():
    mask = torch.tensor([[False, True, True, False, False, True]])
    rewards = sequence_token_rewards(torch.tensor([2.0]), mask)
    for name in ("reinforce", "agentic_reinforce"):
        assert make_advantage_estimator(name)(rewards, mask, [0]).tolist() == [[0, 2, 2, 0, 0, 2]]


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1))
def test_gae_with_lambda_one_is_the_return_minus_the_value(seed, gamma):
    case = random_case(seed)
    values = case.estimate("gae", gamma=gamma, lambda_=1.0)
    expected = torch.where(case.response_mask, loop_reinforce(case, gamma) - case.values, 0.0)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1))
def test_gae_with_lambda_zero_is_the_error_of_one_step(seed, gamma):
    case = random_case(seed)

    def error(row, rank, position):
        following = case.rows()[row][rank + 1 : rank + 2]
        bootstrap = gamma * sum(case.values[row, later].item() for later in following)
        return case.token_rewards[row, position].item() + bootstrap - case.values[row, position].item()

    values = case.estimate("gae", gamma=gamma, lambda_=0.0)
    torch.testing.assert_close(values, per_token(case, error), rtol=1e-10, atol=1e-10)


def test_gae_reads_no_value_outside_the_response_and_carries_no_gradient():
    case = random_case(6)
    dirty = case.values.masked_fill(~case.response_mask, float("nan")).requires_grad_(True)
    gae = make_advantage_estimator("gae", {"gamma": 0.9, "lambda_": 0.8})
    advantages = gae(case.token_rewards, case.response_mask, case.groups, values=dirty)
    torch.testing.assert_close(advantages, loop_gae(case, 0.9, 0.8), rtol=1e-10, atol=1e-10)
    assert not advantages.requires_grad
    single = gae(case.token_rewards.float(), case.response_mask, case.groups, values=dirty)
    assert single.dtype == torch.float32


def test_gae_of_a_perfect_critic_is_zero():
    case = random_case(8)
    case.values = loop_reinforce(case, 0.9)
    assert case.estimate("gae", gamma=0.9, lambda_=0.6).abs().max() < 1e-12


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
def test_returns_of_long_sequences_are_exact(length):
    rewards = torch.randn(2, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, length, dtype=torch.bool)
    returns = token_returns(rewards, mask, 0.99)
    running = torch.zeros(2, dtype=torch.float64)
    for position in reversed(range(length)):
        running = rewards[:, position] + 0.99 * running
        torch.testing.assert_close(returns[:, position], running, rtol=1e-10, atol=1e-10)


def test_segments_are_unbroken_runs_of_response_tokens():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]]).bool()
    assert response_segments(mask).tolist() == [[0, 0, -1, 1, -1, -1, 2], [-1] * 7, [-1, 0, 0, 0, 0, 0, 0]]


def test_step_reinforce_and_agentic_reinforce_agree_where_turns_are_segments():
    case = random_case(4)
    case.turns = response_segments(case.response_mask)
    torch.testing.assert_close(
        case.estimate("step_reinforce", gamma=0.6), case.estimate("agentic_reinforce", gamma=0.6), rtol=0, atol=0
    )


def test_turns_are_discounted_by_their_number_and_not_by_their_length():
    mask = torch.tensor([[1, 1, 1, 0, 1, 1]]).bool()
    rewards = torch.tensor([[0.0, 0.0, 1.0, 9.0, 0.0, 4.0]])
    turns = torch.tensor([[0, 0, 0, 0, 1, 1]])
    values = make_advantage_estimator("step_reinforce", {"gamma": 0.5})(rewards, mask, [0], turns=turns)
    assert values.tolist() == [[3, 3, 3, 0, 4, 4]]
    late = make_advantage_estimator("step_reinforce", {"gamma": 0.5})(rewards, mask, [0], turns=turns * 2)
    assert late.tolist() == [[2, 2, 2, 0, 4, 4]]


def test_gigpo_of_one_turn_from_the_same_state_counts_the_episode_twice():
    rewards, mask, groups = sequence_case([1.0, 0.0, 3.0, 2.0, 2.5], [0, 0, 0, 1, 1])
    turns, states = torch.zeros_like(mask, dtype=torch.int64), torch.full((5, 1), 42)
    grpo = make_advantage_estimator("grpo")(rewards, mask, groups)
    gigpo = make_advantage_estimator("gigpo", {"step_weight": 0.5})(rewards, mask, groups, turns=turns, states=states)
    torch.testing.assert_close(gigpo, 1.5 * grpo)


@pytest.mark.parametrize("states", [torch.full((4, 3), -1), torch.arange(12).reshape(4, 3)])
def test_gigpo_without_shared_states_is_grpo(states):
    generator = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(4, 6, generator=generator).double(), torch.ones(4, 6, dtype=torch.bool)
    turns, groups = (torch.arange(6) // 2).expand(4, 6), [0, 0, 1, 1]
    values = make_advantage_estimator("gigpo")(rewards, mask, groups, turns=turns, states=states)
    assert torch.equal(values, make_advantage_estimator("grpo")(rewards, mask, groups))


def test_gigpo_never_merges_equal_states_of_different_groups():
    rewards, mask, groups = sequence_case([1.0, 1.0, 5.0, 5.0], [0, 0, 1, 1])
    turns, states = torch.zeros_like(mask, dtype=torch.int64), torch.full((4, 1), 7)
    assert make_advantage_estimator("gigpo")(rewards, mask, groups, turns=turns, states=states).eq(0).all()


def test_gigpo_compares_a_state_visited_twice_in_one_episode():
    rewards, mask = torch.tensor([[0.0, 2.0]]).double(), torch.ones(1, 2, dtype=torch.bool)
    args = {"gamma": 0.5, "normalize_by_std": False}
    values = make_advantage_estimator("gigpo", args)(
        rewards, mask, [0], turns=torch.tensor([[0, 1]]), states=torch.tensor([[3, 3]])
    )
    assert values.tolist() == [[-0.5, 0.5]]


def test_gdpo_tells_mixtures_of_rewards_apart_where_grpo_sees_one_sum():
    """The example of the paper: (1, 0) and (0, 1) are one sum, and the rarer reward is worth more."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]).double()
    mask = torch.ones(4, 1, dtype=torch.bool)
    given = {"parts": parts, "part_weights": torch.ones(4, 2).double()}
    rewards, groups = parts.sum(-1, keepdim=True), [0, 0, 0, 0]
    assert make_advantage_estimator("grpo")(rewards, mask, groups).eq(0).all()
    rewards_of_both = make_advantage_estimator("gdpo")(rewards, mask, groups, **given)[:, 0]
    assert rewards_of_both.eq(0).all()  # one is the mirror image of the other
    weighted = given | {"part_weights": torch.tensor([1.0, 0.5]).expand(4, 2)}
    first, *others = make_advantage_estimator("gdpo")(rewards, mask, groups, **weighted)[:, 0].tolist()
    assert first == pytest.approx(1.5, abs=1e-5) and others == pytest.approx([-0.5] * 3, abs=1e-5)


@pytest.mark.parametrize(("size", "right", "k"), [(8, 1, 4), (8, 3, 4), (8, 4, 4), (8, 5, 4), (8, 7, 4), (16, 2, 8)])
def test_pass_at_k_has_the_analytic_advantages_of_its_paper(size, right, k):
    """arXiv 2508.10751: from the numbers of samples and of wrong ones."""
    wrong = size - right
    mean = 1 - math.comb(wrong, k) / math.comb(size, k)
    deviation = math.sqrt(mean * (1 - mean))
    expected = [0.0] * size
    if deviation > 0:
        bad = 1 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
        expected = [(1 - mean) / deviation] * right + [bad / deviation] * wrong
    rewards, mask = torch.tensor([[1.0]] * right + [[0.0]] * wrong).double(), torch.ones(size, 1, dtype=torch.bool)
    values = make_advantage_estimator("pass_at_k", {"k": k, "eps": 1e-12})(rewards, mask, [0] * size)[:, 0]
    assert values.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if deviation == 0:
        assert values.eq(0).all()


def test_pass_at_one_left_out_is_rloo():
    case = random_case(12)
    args = {"k": 1, "baseline": "leave_one_out"}
    torch.testing.assert_close(case.estimate("pass_at_k", **args), case.estimate("rloo"), rtol=1e-12, atol=1e-12)


def test_reinforce_plus_plus_sees_the_kl_penalty_of_each_token():
    mask = torch.ones(2, 3, dtype=torch.bool)
    logprobs, reference = torch.full((2, 3), -1.0).double(), torch.full((2, 3), -2.0).double()
    values = estimate_advantages(
        make_advantage_estimator("reinforce_plus_plus"),
        torch.tensor([1.0, 0.0]).double(),
        mask,
        [0, 1],
        logprobs=logprobs,
        reference_logprobs=reference,
        kl_coef=0.1,
        kl_estimator="k1",
    )
    returns = [0.7, 0.8, 0.9, -0.3, -0.2, -0.1]
    mean, deviation = statistics.fmean(returns), statistics.stdev(returns)
    expected = [(value - mean) / (deviation + 1e-8) for value in returns]
    assert values.flatten().tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_estimators_have_mean_zero_and_deviation_one_over_tokens(name):
    case = random_case(9)
    tokens = case.estimate(name)[case.response_mask]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.std().item() == pytest.approx(1, abs=1e-6)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens():
    case = random_case(3)
    advantages, mask = case.values, case.response_mask
    dirty = advantages.masked_fill(~mask, float("nan"))
    values = whiten(dirty, mask)
    torch.testing.assert_close(values, loop_whiten(case, advantages), rtol=1e-10, atol=1e-10)
    assert values[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert values[mask].std().item() == pytest.approx(1, abs=1e-6)
    assert whiten(advantages.float(), mask).dtype == torch.float32
    assert dirty[~mask].isnan().all()


def test_two_tokens_are_whitened_by_the_unbiased_deviation():
    values = whiten(torch.tensor([[1.0, 3.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
    assert values.tolist() == [pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-7)]


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_what_stands_outside_the_mask_never_reaches_the_gradient_of_whitening(fill):
    case = random_case(3)
    weights = torch.randn(case.values.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradient(advantages):
        leaf = advantages.clone().requires_grad_(True)
        (weights * whiten(leaf, case.response_mask)).sum().backward()
        return leaf.grad

    dirty = gradient(case.values.masked_fill(~case.response_mask, fill))
    assert torch.equal(dirty, gradient(case.values))
    assert dirty[~case.response_mask].eq(0).all() and dirty[case.response_mask].ne(0).any()


@pytest.mark.parametrize("value", [3.0, 0.1, 1e7 / 3])
def test_whitening_equal_advantages_or_none_gives_exactly_zero(value):
    case = random_case(3)
    equal = torch.full_like(case.values, value)
    assert whiten(equal, case.response_mask).eq(0).all()
    assert whiten(equal, torch.zeros_like(case.response_mask)).eq(0).all()
    assert whiten(equal, case.response_mask & (case.response_mask.cumsum(-1) == 1)).eq(0).all()


def test_clipped_advantages_stay_within_the_limit():
    advantages, mask = torch.tensor([[-3.0, -0.5, 0.0, 0.5, 3.0]]), torch.ones(1, 5, dtype=torch.bool)
    assert shape_advantages(advantages, mask, False, 1.5).tolist() == [[-1.5, -0.5, 0.0, 0.5, 1.5]]
    assert advantages.tolist() == [[-3.0, -0.5, 0.0, 0.5, 3.0]]
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="limit"):
            shape_advantages(advantages, mask, False, limit)


def test_advantages_are_whitened_before_they_are_clipped():
    mask, rewards = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0.0, 0.0, 0.0, 8.0]).double()
    estimator = make_advantage_estimator("reinforce")
    plain = estimate_advantages(estimator, rewards, mask, range(4))
    white = shape_advantages(plain, mask, True, None)
    both = shape_advantages(plain, mask, True, 1.0)
    assert white.max() > 1.4 and both.dtype == torch.float64
    assert torch.equal(both, white.clamp(-1, 1))


def test_estimate_advantages_passes_every_field_on():
    case = random_case(7)
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(1)).double()
    placed = replace(case, token_rewards=sequence_token_rewards(rewards, case.response_mask))
    for name in NAMES:
        values = estimate_advantages(
            make_advantage_estimator(name),
            rewards,
            case.response_mask,
            case.groups,
            values=case.values,
            baseline_rewards=case.baseline_rewards,
            parts=case.parts,
            part_weights=case.part_weights,
            turns=case.turns,
            states=case.states,
        )
        assert torch.equal(values, placed.estimate(name))


def test_a_kl_penalty_lowers_the_returns_before_it():
    mask = torch.tensor([[False, True, True]])
    logprobs, reference = torch.full((1, 3), -1.0), torch.full((1, 3), -2.0)
    estimator = make_advantage_estimator("reinforce")
    values = estimate_advantages(
        estimator,
        torch.tensor([1.0]),
        mask,
        [0],
        logprobs=logprobs,
        reference_logprobs=reference,
        kl_coef=0.1,
        kl_estimator="k1",
    )
    torch.testing.assert_close(values, torch.tensor([[0.0, 0.8, 0.9]]))
    plain = estimate_advantages(estimator, torch.tensor([1.0]), mask, [0])
    assert plain.tolist() == [[0, 1, 1]] and plain.dtype == torch.float32
    with pytest.raises(ValueError, match="both"):
        estimate_advantages(estimator, torch.tensor([1.0]), mask, [0], logprobs=logprobs)


KINDS = {"none": (), "batch": ("batch",), "group": ("batch", "group")}


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("grpo", {}), ("grpo", {"normalize_by_std": False}), ("rloo", {}), ("opo", {}), ("reinforce", {}),
        ("reinforce_plus_plus", {}), ("reinforce_plus_plus", {"gamma": 0.5}), ("reinforce_plus_plus_baseline", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("amounts", ["batch", "group"])
def test_shifts_and_scales_cancel_exactly_where_the_requirements_say_so(name, knobs, amounts):
    estimator = make_advantage_estimator(name, knobs)
    generator = torch.Generator().manual_seed(0)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.rand(6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6)[None, :] < torch.tensor([2, 5, 3, 4, 6, 1])[:, None]
    amount = torch.tensor([2.0, 5.0] if amounts == "group" else [3.0, 3.0], dtype=torch.float64)[groups]

    def advantages(values):
        return estimate_advantages(estimator, values, mask, groups)

    for changed, trait in (
        (rewards + amount, estimator.requirements.shifts_cancel),
        (rewards * amount, estimator.requirements.scales_cancel),
    ):
        same = torch.allclose(advantages(changed), advantages(rewards), rtol=1e-4, atol=1e-6)
        assert same == (amounts in KINDS[trait])
