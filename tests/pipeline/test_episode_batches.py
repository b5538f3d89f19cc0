"""Episodes in batches: whether an episode comes as one sample or turn by turn, it earns the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from roll.algorithms.advantages.base import make_advantage_estimator
from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.correction import parse_correction
from roll.algorithms.metrics import TRAINED_SEQUENCES, TRAINED_TOKENS, combine
from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.algorithms.rewards import RewardShaping, RunningMoments
from roll.data.records import Group, Prompt, Sample, SampleBatch
from roll.pipeline import algorithm
from roll.pipeline.algorithm import AdvantageSettings, TrainingBatch, add_advantages, add_correction
from roll.trainers.step import TrainingStep
from tests.tiers import examples

PROMPT = Prompt("lake:1", "lake", np.zeros(0, dtype=np.int32), "map")


def sample(episode: int, turns: list[tuple[int, int, float, int]], total: float) -> Sample:
    """Each turn (number, sampled tokens, reward, state) has two tokens of the environment before it."""
    pieces = {"mask": [], "turns": [], "rewards": [], "states": []}
    for number, tokens, reward, state in turns:
        pieces["mask"] += [False] * 2 + [True] * tokens
        pieces["turns"] += [-1] * 2 + [number] * tokens
        pieces["rewards"] += [0.0] * (1 + tokens) + [reward]
        pieces["states"] += [-1] * 2 + [state] * tokens
    mask = np.array(pieces["mask"])
    return Sample(
        token_ids=np.arange(len(mask), dtype=np.int32),
        response_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason="stop",
        score=total,
        reward=total,
        episode=episode,
        turns=np.array(pieces["turns"], dtype=np.int32),
        turn_rewards=np.array(pieces["rewards"], dtype=np.float32),
        turn_states=np.array(pieces["states"], dtype=np.int64),
    )


EPISODES = [
    [(0, 2, 0.0, 11), (1, 1, 1.0, 12), (2, 3, 0.5, 13)],
    [(0, 1, 0.0, 11), (1, 2, -0.25, 13)],
    [(0, 3, 2.0, 11)],
]


def batch(in_turns: bool) -> TrainingBatch:
    groups = []
    for group_id in range(2):
        samples = []
        for number, turns in enumerate(EPISODES):
            turns = [(turn, tokens, reward + 0.1 * group_id * number, state) for turn, tokens, reward, state in turns]
            total = sum(reward for _, _, reward, _ in turns)
            parts = [[turn] for turn in turns] if in_turns else [turns]
            samples += [sample(number, part, total) for part in parts]
        groups.append(Group(group_id, PROMPT, samples))
    return TrainingBatch.from_groups(0, groups)


def settings(estimator: str, **changes) -> AdvantageSettings:
    values = dict(
        estimator=make_advantage_estimator(estimator),
        shaping=RewardShaping(),
        reward_moments=RunningMoments(),
        whitened=False,
        advantage_clip=None,
        kl_controller=None,
        kl_estimator="k3",
    )
    return AdvantageSettings(**(values | changes))


@pytest.mark.parametrize(
    ("estimator", "weights"),
    [
        ("grpo", (1.0, 0.0)),
        ("rloo", (0.5, 0.5)),
        ("step_reinforce", (0.0, 1.0)),
        ("agentic_reinforce", (0.0, 1.0)),
        ("gigpo", (0.0, 1.0)),
    ],
)
def test_an_episode_in_turns_gets_the_advantages_of_the_whole(estimator, weights):
    found = []
    for in_turns in (False, True):
        filled = batch(in_turns)
        add_advantages(filled, settings(estimator, episode_weight=weights[0], turn_weight=weights[1]))
        found.append(filled.data.tokens["advantages"][filled.data.tokens["response_mask"]])
    assert np.abs(found[0]).max() > 0.1
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce", "agentic_reinforce", "grpo"])
def test_groups_one_by_one_get_the_advantages_of_the_whole(estimator, in_turns, monkeypatch):
    found = []
    for limit in (10**6, 1):
        monkeypatch.setattr(algorithm, "SLICE_TOKENS", limit)
        filled, asked = batch(in_turns), settings(estimator, episode_weight=0.5, turn_weight=0.5)
        assert len(list(algorithm._slices(filled, asked))) == (2 if limit == 1 else 1)
        add_advantages(filled, asked)
        found.append(filled.data.tokens["advantages"])
    assert np.abs(found[0]).max() > 0.1
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("estimator", ["step_reinforce", "agentic_reinforce"])
def test_turns_of_parallel_conversations_are_discounted_in_their_order(estimator):
    """Samples stand in the order of their last turns, here 2 and 3, and the first turn is in the second one."""
    parts = [[(1, 1, 0.0, 0), (2, 2, 0.0, 0)], [(0, 2, 0.0, 0), (3, 1, 1.0, 0)]]
    whole = [(number, tokens, float(number == 3), 0) for number, tokens in enumerate((2, 1, 2, 1))]
    episodes = [sample(0, part, 1.0) for part in parts], [sample(1, whole, 1.0)], [sample(2, whole[3:], 1.0)]
    filled = TrainingBatch.from_groups(0, [Group(0, PROMPT, [each for episode in episodes for each in episode])])
    discounted = make_advantage_estimator(estimator, {"gamma": 0.5})
    add_advantages(filled, replace(settings(estimator, episode_weight=0.0, turn_weight=1.0), estimator=discounted))
    data, rows = filled.data, filled.data.offsets
    expected = [0.125, 0.25, 0.5, 1.0]
    for begin, end in ((rows[0], rows[2]), (rows[2], rows[3])):
        turns, advantages = data.tokens["turns"][begin:end], data.tokens["advantages"][begin:end]
        np.testing.assert_allclose(advantages[turns >= 0], np.take(expected, turns[turns >= 0]))
    assert data.tokens["advantages"][-1] == 1.0


def test_rewards_of_turns_reach_what_came_before_them():
    filled = batch(False)
    add_advantages(filled, settings("step_reinforce", episode_weight=0.0, turn_weight=2.0))
    data = filled.data
    first = slice(0, data.lengths[0])
    turns, advantages = data.tokens["turns"][first], data.tokens["advantages"][first]
    for turn, expected in ((0, 3.0), (1, 3.0), (2, 1.0)):
        np.testing.assert_allclose(advantages[turns == turn], expected)
    assert (advantages[turns < 0] == 0).all()


def test_states_compare_turns_of_a_group_only_where_they_acted_alike():
    filled = batch(False)
    add_advantages(filled, settings("gigpo", episode_weight=0.0, turn_weight=1.0))
    other = batch(False)
    for each in other.groups[0].samples:
        each.turn_states[each.turn_states == 13] = 14 + each.episode
    other = TrainingBatch.from_groups(0, other.groups)
    add_advantages(other, settings("gigpo", episode_weight=0.0, turn_weight=1.0))
    changed = filled.data.tokens["advantages"] != other.data.tokens["advantages"]
    assert changed.any()
    # Only turns that acted in state 13 of the first group have lost whom they were compared with.
    assert (filled.data.tokens["turn_states"][changed] == 13).all() and not changed[len(changed) // 2 :].any()


def test_metrics_count_episodes_and_not_their_parts():
    whole, parts = batch(False), batch(True)
    for filled in (whole, parts):
        for group in filled.groups:
            for samples in group.episodes:
                samples[0].metrics = {"success": float(samples[0].episode == 1)}
        filled.describe_rollouts("env/{domain}")
    assert len(parts.samples) == 12 and len(whole.samples) == 6
    assert whole.metrics == parts.metrics
    assert whole.metrics["env/lake/success"] == pytest.approx(1 / 3)
    assert whole.metrics["response/length_mean"] == pytest.approx((6 + 3 + 3) / 3)


def test_a_figure_of_a_verifier_never_replaces_one_of_the_run():
    plain, named = batch(False), batch(False)
    for filled, own in ((plain, {}), (named, {"mean": 77.0, "zero_variance_groups": 8.0, "steps": 3.0})):
        for sample in filled.samples:
            sample.metrics = own
        filled.describe_rollouts("reward")
    assert named.metrics == plain.metrics | {"reward/steps": 3.0}


def test_normalisation_by_tag_takes_the_samples_of_a_tag():
    groups = []
    for group_id, tag in enumerate(("lake", "sokoban", "lake")):
        prompt = Prompt(f"{tag}:{group_id}", tag, np.zeros(0, dtype=np.int32), "map")
        groups.append(Group(group_id, prompt, [sample(0, [(0, 1, 0.0, 1)], 10.0 * group_id + 1)]))
    filled = TrainingBatch.from_groups(0, groups)
    add_advantages(filled, settings("reinforce", shaping=RewardShaping(mean="tag")))
    np.testing.assert_allclose(filled.data.per_sample["rewards"], [-10.0, 0.0, 10.0])


def test_joined_samples_share_their_tokens():
    samples = [sample(number, turns, 0.0) for number, turns in enumerate(EPISODES)]
    data = SampleBatch.from_samples(samples)
    joined = data.joined([2, 1])
    assert joined.lengths.tolist() == [data.lengths[0] + data.lengths[1], data.lengths[2]]
    assert joined.tokens is data.tokens
    for wrong in ([1, 1], [3, 0], [4]):
        with pytest.raises(ValueError, match="parts"):
            data.joined(wrong)


def test_the_parts_of_a_split_batch_share_its_arrays_and_are_all_of_it():
    data = SampleBatch.from_samples([sample(number, turns, 0.0) for number, turns in enumerate(EPISODES)])
    parts = data.split([2, 0, 1])
    assert [len(part) for part in parts] == [2, 0, 1]
    for name, values in data.tokens.items():
        assert np.array_equal(np.concatenate([part.tokens[name] for part in parts]), values)
        assert np.shares_memory(parts[2].tokens[name], values)
    for wrong in ([1, 1], [4]):
        with pytest.raises(ValueError, match="parts"):
            data.split(wrong)


MOST_TOKENS = 4
"""Sampled tokens of a turn, at most."""


@st.composite
def split_episodes(draw):
    """Groups of episodes, each a list of the tokens of its turns, and for each episode the cuts between its samples."""
    episode = st.lists(st.integers(0, MOST_TOKENS), min_size=1, max_size=5).filter(any)
    groups = draw(st.lists(st.lists(episode, min_size=1, max_size=3), min_size=1, max_size=3))
    cuts = [[draw(st.sets(st.integers(1, max(1, len(turns) - 1)))) for turns in group] for group in groups]
    return groups, cuts


def branches(number: int, turns: list[int], cuts: set[int], score: float) -> list[Sample]:
    """An episode's samples: each has the turns before its own as context."""
    first = [0, *sorted(cut for cut in cuts if cut < len(turns)), len(turns)]
    found = []
    for start, end in zip(first, first[1:], strict=False):
        if not any(turns[start:end]):
            continue
        made = sample(number, [(turn, tokens, 0.0, -1) for turn, tokens in enumerate(turns[:end]) if tokens], score)
        new = made.turns >= start
        made.response_mask &= new
        made.turns[~new] = -1
        found.append(made)
    return found


def split_batch(groups, cuts) -> TrainingBatch:
    made = []
    for group_id, (group, group_cuts) in enumerate(zip(groups, cuts, strict=True)):
        numbered = enumerate(zip(group, group_cuts, strict=True))
        samples = [branches(number, turns, own, float(number % 2)) for number, (turns, own) in numbered]
        made.append(Group(group_id, PROMPT, [each for parts in samples for each in parts]))
    return TrainingBatch.from_groups(0, made)


def gradients(batch: TrainingBatch, objective, weights: torch.Tensor, parts: list[np.ndarray] | None = None):
    """Loss and gradient of the sampled tokens of a batch, each token's at its episode, turn and place in the turn,
    float64. ``parts``: rows that a streaming trainer is given one after the other."""
    names = []
    for group in range(len(batch.groups)):
        for episode in batch.groups[group].episodes:
            for each in episode:
                turns = each.turns
                count = np.zeros(len(turns), dtype=int)
                for turn in np.unique(turns[turns >= 0]):
                    count[turns == turn] = np.arange((turns == turn).sum())
                names.append(((group * 3 + each.episode) * 5 + np.maximum(turns, 0)) * MOST_TOKENS + count)
    own = SampleBatch(batch.data.lengths, {"place": np.concatenate(names)})
    leaf, metrics, loss = weights.clone().requires_grad_(), [], torch.zeros((), dtype=torch.float64)
    for rows in [np.arange(len(own))] if parts is None else parts:
        step = TrainingStep.of(batch.data.select(rows), objective, is_part=parts is not None)
        (micro_batch,) = step.micro_batches([list(range(len(rows)))], torch.device("cpu"))
        places = torch.from_numpy(own.select(rows).padded("place", 0, micro_batch.input_ids.shape[1])[:, 1:].copy())
        kept = leaf[places[:, micro_batch.positions]]
        outputs = (kept,) if isinstance(objective, ValueObjective) else (kept, torch.ones_like(kept))
        part_loss, part_metrics = step.loss(micro_batch, *outputs)
        loss, metrics = loss + part_loss, [*metrics, part_metrics]
    named = metrics[0].named(combine(metrics)[0].tolist())
    divisor = named[TRAINED_TOKENS if objective.loss_agg_mode == "token-mean" else TRAINED_SEQUENCES]
    loss = loss if parts is None else loss / (divisor or 1)
    loss.backward()
    return loss.detach(), leaf.grad, divisor


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("trained", ["policy", "critic"])
@hypothesis_settings(max_examples=examples(20))
@given(drawn=split_episodes(), seed=st.integers(0, 999), left_out=st.booleans(), streams=st.booleans())
def test_an_episode_in_several_samples_weighs_as_one(mode, trained, drawn, seed, left_out, streams):
    """Loss and gradient of every token are those of the episode as one sample, exactly: of the whole batch, of parts
    that a streaming trainer adds up, and where a correction has left tokens out."""
    groups, cuts = drawn
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(3 * 3 * 5 * MOST_TOKENS, generator=generator, dtype=torch.float64)
    dropped = torch.rand(len(weights), generator=generator) < 0.3
    found = []
    for own_cuts in ([[set() for _ in group] for group in groups], cuts):
        filled = split_batch(groups, own_cuts)
        add_advantages(filled, settings("grpo", by_episode=True))
        data = filled.data
        if left_out:
            turn = np.maximum(data.tokens["turns"], 0)
            filled.leave_out(~dropped.numpy()[turn])
            filled.share_episodes()
        data.tokens["old_values"] = np.zeros(len(data.tokens["turns"]), dtype=np.float32)
        data.tokens["returns"] = data.tokens["advantages"]
        objective = (
            PolicyObjective(20, pg_variant="ppo", loss_agg_mode=mode, by_episode=True)
            if trained == "policy"
            else ValueObjective(20, mode, by_episode=True)
        )
        rows = np.cumsum([len(group.samples) for group in filled.groups])
        parts = np.split(np.arange(len(data)), rows[:-1]) if streams else None
        found.append(gradients(filled, objective, weights, parts))
        advantages = data.tokens["advantages"][data.tokens["response_mask"]]
        found[-1] += (torch.from_numpy(np.sort(advantages)),)
    for whole, split in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(split), torch.as_tensor(whole), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reject", [[], [{"level": "token", "upper": 2.0}]])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_normalised_weights_of_an_episode_in_turns_are_those_of_the_whole(mode, reject):
    correction = parse_correction({"weight": {"upper": 3.0}, "normalize": True, "reject": reject})
    found = []
    for in_turns in (False, True):
        filled = batch(in_turns)
        add_advantages(filled, settings("grpo", by_episode=mode != "token-mean"))
        tokens = filled.data.tokens
        count = int(tokens["response_mask"].sum())
        tokens["proximal_logprobs"] = tokens["behaviour_logprobs"].copy()
        tokens["proximal_logprobs"][tokens["response_mask"]] += np.linspace(-1.0, 1.0, count, dtype=np.float32)
        objective = PolicyObjective(20, loss_agg_mode=mode, corrected=True, by_episode=mode != "token-mean")
        mean = add_correction(filled, correction, objective)["weight_mean"]
        found.append([mean, *tokens["correction_weights"][tokens["response_mask"]]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_a_batch_that_a_stage_has_beside_keeps_its_shares():
    filled = batch(True)
    filled.share_episodes()
    aside, before = filled.beside(), filled.data.per_sample["episode_shares"].copy()
    filled.leave_out(filled.data.tokens["turns"] != 0)
    filled.share_episodes()
    assert aside.data.per_sample["episode_shares"].tolist() == before.tolist()
    assert filled.data.per_sample["episode_shares"].tolist() != before.tolist()


def test_whole_episodes_have_shares_of_exactly_one():
    filled = batch(False)
    filled.share_episodes()
    assert filled.data.per_sample["episode_shares"].tolist() == [1.0] * 6
    parts = batch(True)
    parts.share_episodes()
    assert parts.data.per_sample["episode_shares"].tolist() == [2 / 6, 1 / 6, 3 / 6, 1 / 3, 2 / 3, 1.0] * 2
