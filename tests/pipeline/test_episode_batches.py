"""Episodes in batches: whether an episode comes as one sample or turn by turn, it earns the same."""

from __future__ import annotations

import numpy as np
import pytest

from roll.algorithms.advantages.base import make_advantage_estimator
from roll.algorithms.rewards import RewardShaping, RunningMoments
from roll.data.records import Group, Prompt, Sample, SampleBatch
from roll.pipeline.algorithm import AdvantageSettings, TrainingBatch, add_advantages

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
