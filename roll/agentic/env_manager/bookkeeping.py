"""Conversion of played episodes to training samples and readable records. Pure functions.

A sample is one row of tokens: the last prompt and the last response. It contains every turn, because each turn's prompt
begins with everything before it. A sample of a single turn works the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from roll.agentic.env_manager.play import Decoder, PlayedEpisode, PlayedTurn
from roll.agentic.episode import Episode, Message, TurnRecord
from roll.data.records import Sample


def trajectory_sample(played: PlayedEpisode, decoder: Decoder) -> Sample:
    """Return the whole episode as one sample. Its text is everything after the first prompt, with special tokens."""
    sample = _sample_of(played.turns, _credited_rewards(played.turns))
    sample.response_text = decoder.decode(
        sample.token_ids[len(played.turns[0].prompt) :].tolist(), skip_special_tokens=False
    )
    sample.finish_reason = _finish_reason(played)
    return _scored(sample, played)


def turn_samples(played: PlayedEpisode) -> list[Sample]:
    """Return one sample per turn in which the policy wrote anything; the first turn's if it never did."""
    rewards = _credited_rewards(played.turns)
    written = [turn for turn in played.turns if len(turn.sampled.token_ids)] or played.turns[:1]
    samples = [_sample_of([turn], rewards) for turn in written]
    for sample, turn in zip(samples, written, strict=True):
        sample.response_text = turn.text
    for sample in samples:
        sample.finish_reason = _finish_reason(played)
    return [_scored(sample, played) for sample in samples]


def episode_of(played: PlayedEpisode, samples: list[Sample]) -> Episode:
    """Return the episode with these samples. Its success is the last value that the environment reported."""
    answers = [turn.answer for turn in played.turns]
    said = [answer.success for answer in answers if answer.success is not None]
    return Episode(
        tag=played.tag,
        seed=played.seed,
        samples=samples,
        end=played.end,
        success=said[-1] if said else None,
        score=_score(played),
        turns=[_record(turn) for turn in played.turns],
        last_frame=answers[-1].frame,
        metrics=_metrics(played),
    )


def state_id(state: str | None) -> int:
    """Return a signed 64-bit number for a state, equal on every machine. None, and only None, gives -1."""
    if state is None:
        return -1
    digest = hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big", signed=True)
    return number if number != -1 else -2


def readable(messages: Sequence[Message]) -> str:
    """Return the contents of messages as one text."""
    return "\n".join(str(message.get("content", "")) for message in messages)


def _credited_rewards(turns: Sequence[PlayedTurn]) -> dict[int, float]:
    """Return the reward by turn number.

    A turn without a token adds its reward to the last turn before it that has one. Rewards before the first token are
    credited to no turn.
    """
    rewards: dict[int, float] = {}
    for turn in turns:
        if len(turn.sampled.token_ids):
            rewards[turn.number] = turn.reward
        elif rewards:
            rewards[next(reversed(rewards))] += turn.reward
    return rewards


def _sample_of(turns: Sequence[PlayedTurn], rewards: dict[int, float]) -> Sample:
    """Return one row for the given turns. Each turn's prompt must begin with the row up to it."""
    token_ids = np.concatenate([turns[-1].prompt, turns[-1].sampled.token_ids]).astype(np.int32)
    length = len(token_ids)
    numbers = np.full(length, -1, dtype=np.int32)
    credited = np.zeros(length, dtype=np.float32)
    states = np.full(length, -1, dtype=np.int64)
    sample = Sample(
        token_ids=token_ids,
        response_mask=np.zeros(length, dtype=bool),
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.full(length, -1, dtype=np.int32),
        finish_reason=turns[-1].sampled.finish_reason,
        turns=numbers,
        turn_rewards=credited,
        turn_states=states,
    )
    for turn in turns:
        place = slice(len(turn.prompt), len(turn.prompt) + len(turn.sampled.token_ids))
        sample.response_mask[place] = True
        sample.behaviour_logprobs[place] = turn.sampled.logprobs
        sample.versions[place] = turn.sampled.versions
        numbers[place] = turn.number
        states[place] = state_id(turn.observation.state)
        if turn.number in rewards:
            credited[place.stop - 1] = rewards[turn.number]
    return sample


def _finish_reason(played: PlayedEpisode) -> str:
    """Return ``length`` if the episode ran out of room, else ``stop``. A turn cut at its own limit does not count."""
    return "length" if played.end == "sequence_length" else "stop"


def _scored(sample: Sample, played: PlayedEpisode) -> Sample:
    sample.score = _score(played)
    sample.reward = float(sum(turn.reward for turn in played.turns))
    return sample


def _score(played: PlayedEpisode) -> float:
    return float(sum(turn.answer.reward for turn in played.turns))


def _record(turn: PlayedTurn) -> TurnRecord:
    return TurnRecord(
        observation=readable(turn.observation.messages),
        response=turn.text,
        reward=turn.answer.reward,
        action_is_valid=turn.answer.action_is_valid,
        frame=turn.observation.frame,
    )


def _metrics(played: PlayedEpisode) -> dict[str, float]:
    """Return the environment's last values. Our own metrics replace those of the same name."""
    metrics = dict(played.turns[0].observation.metrics)
    for turn in played.turns:
        metrics |= turn.answer.metrics
    invalid = sum(not turn.answer.action_is_valid for turn in played.turns)
    return metrics | {
        "turns": float(len(played.turns)),
        "invalid_actions": invalid / len(played.turns),
        "capped_turns": sum(turn.sampled.finish_reason == "length" for turn in played.turns) / len(played.turns),
        "tokens": float(sum(len(turn.sampled.token_ids) for turn in played.turns)),
    }
