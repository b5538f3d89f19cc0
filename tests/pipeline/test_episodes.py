"""How the episodes of a group come about: all of them, replaced where they fail, seeded, and never left running."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from roll.agentic.episode import EnvironmentFailed, Episode, EpisodeRefused, Observation, TurnRecord
from roll.agentic.worker import EnvPoolClosed, SessionFailed
from roll.data.records import Sample
from roll.engines.base import Completion, SamplingParams
from roll.pipeline.agentic import (
    LOST_RETRIES,
    EpisodeRollout,
    EpisodesFailed,
    EpisodeTask,
    as_group,
    validation_metrics,
)
from roll.pipeline.algorithm import TrainingBatch
from roll.rollout.clock import run_virtual
from roll.rollout.scheduler import FatalRolloutError

TASK = EpisodeTask("lake", 17)


@dataclass
class Engine:
    """Answers with the number of the request, and remembers what it was asked."""

    requests: list = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def generate(self, request, *, sticky_key=None, min_version=None):
        self.requests.append((request, sticky_key, min_version))
        await asyncio.sleep(0)
        tokens = np.array([len(self.requests)], dtype=np.int32)
        return Completion(request.request_id, tokens, np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    def forget(self, sticky_key):
        self.forgotten.append(sticky_key)


class Session(int):
    """Its number, and the seconds that its environment worked."""

    worked = 0.0


@dataclass
class Environments:
    opened: int = 0
    worked: dict[int, float] = field(default_factory=dict)

    def session(self, tag, *, frames=False):
        self.opened += 1
        session = Session(self.opened)
        session.worked = self.worked.get(session, 0.0)
        return session


@dataclass
class Manager:
    """Plays two turns; the sessions named in ``failing`` fail between them, those in ``slow`` wait for ``gate``."""

    failing: dict[int, Exception] = field(default_factory=dict)
    slow: frozenset[int] = frozenset()
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ended: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    async def run_episode(self, session, policy, *, tag, seed):
        try:
            await policy(np.array([1], dtype=np.int32), turn=0, max_new_tokens=3)
            if session in self.failing:
                raise self.failing[session]
            if session in self.slow:
                await self.gate.wait()
            await policy(np.array([1, 2], dtype=np.int32), turn=1, max_new_tokens=2)
        except asyncio.CancelledError:
            self.cancelled.append(session)
            raise
        self.ended.append(session)
        return episode(tag, seed, session)


def episode(tag, seed, session):
    token_ids = np.array([1, 2, 3], dtype=np.int32)
    mask = np.array([False, True, True])
    sample = Sample(token_ids, mask, np.zeros(3, np.float32), np.where(mask, 0, -1), "stop", score=float(session))
    turn = TurnRecord(f"map {seed}", "L", 0.0, True, None)
    return Episode(tag, seed, [sample], "terminated", session % 2 == 0, float(session), [turn], None, {"turns": 2.0})


def rollout(manager, engine=None, environments=None, **changes):
    settings = dict(group_size=3, spare=0, run_seed=5, purpose="train", sampling=SamplingParams(99, temperature=0.5))
    environments = environments or Environments()
    return EpisodeRollout(engine or Engine(), environments, {"lake": manager}, **(settings | changes))


def test_each_turn_is_a_request_with_a_name_seed_and_limit_of_its_own():
    async def scenario():
        engine = Engine()
        group = await rollout(Manager(), engine).group(7, TASK, min_version=4)
        return engine, group

    engine, group = asyncio.run(scenario())
    names = [request.request_id for request, _, _ in engine.requests]
    assert sorted(names) == [f"train-7-{index}-{turn}" for index in range(3) for turn in range(2)]
    assert len({request.sampling.seed for request, _, _ in engine.requests}) == 6
    assert {request.sampling.max_new_tokens for request, _, _ in engine.requests} == {3, 2}
    assert all(request.sampling.temperature == 0.5 for request, _, _ in engine.requests)
    assert all(key == request.request_id[:-2] and least == 4 for request, key, least in engine.requests)
    assert sorted(engine.forgotten) == ["train-7-0", "train-7-1", "train-7-2"]
    assert (group.group_id, group.prompt.domain, group.prompt.metadata) == (7, "lake", {"seed": 17})
    assert [sample.episode for sample in group.samples] == [0, 1, 2]
    assert group.samples[0].metrics == {"turns": 2.0, "success": 0.0} and group.prompt.text == "map 17"


@pytest.mark.parametrize(("worked", "recorded"), [(3.0, 3.0), (9.0, 5.0)])
def test_recorded_is_the_work_of_an_environment_without_waits_and_without_generation(worked, recorded):
    """Three seconds of five: the rest is a wait for a process. Nine: within its step an agent generates for four."""

    class Slow(Engine):
        async def generate(self, request, **routing):
            await asyncio.sleep(2)
            return await super().generate(request, **routing)

    async def scenario():
        manager = Manager(slow=frozenset([2]))
        asyncio.get_running_loop().call_later(7, manager.gate.set)
        environments = Environments(worked={2: worked})
        return await rollout(manager, Slow(), environments).group(7, TASK)

    assert run_virtual(scenario()).waits == [0.0, recorded, 0.0]


def test_episodes_that_control_tokens_ended_are_counted_for_every_manager_where_they_are_refused():
    class Refusing(Manager):
        async def run_episode(self, session, policy, *, tag, seed):
            whole = await super().run_episode(session, policy, tag=tag, seed=seed)
            return replace(whole, end="control_token" if session == 2 else "truncated")

    def counted(**changes):
        episodes = asyncio.run(rollout(Refusing(), **changes).play(0, TASK))
        return [each.metrics.get("control_tokens") for each in episodes]

    assert counted(counts_control_tokens=True) == [0.0, 1.0, 0.0] and counted() == [None] * 3


def test_equal_groups_ask_for_equal_random_numbers_and_others_do_not():
    def seeds(group_id, **changes):
        engine = Engine()
        asyncio.run(rollout(Manager(), engine, **changes).group(group_id, TASK))
        return {request.request_id: request.sampling.seed for request, _, _ in engine.requests}

    assert seeds(7) == seeds(7)
    for other in (seeds(8), seeds(7, run_seed=6), seeds(7, purpose="validation")):
        assert not set(other.values()) & set(seeds(7).values())


@pytest.mark.parametrize("error", [EnvironmentFailed("it broke"), EpisodeRefused("too long")])
def test_a_failed_episode_is_replaced_while_there_are_spare_ones(error):
    manager = Manager(failing={1: error, 4: error})
    episodes = asyncio.run(rollout(manager, spare=2).play(0, TASK))
    assert [each.score for each in episodes] == [2.0, 3.0, 5.0]


def test_a_group_without_spare_episodes_left_fails_with_every_cause_and_ends_the_others():
    async def scenario():
        manager = Manager({1: EnvironmentFailed("first"), 4: EnvironmentFailed("second")}, slow=frozenset({2, 3}))
        with pytest.raises(EpisodesFailed, match=r"`lake`, seed 17: 2 episodes failed; first; second"):
            await rollout(manager, spare=1).play(0, TASK)
        return manager

    manager = asyncio.run(scenario())
    assert sorted(manager.cancelled) == [2, 3] and manager.ended == []


def lost(*, proven=False, kind="lost"):
    return SessionFailed("lake", 17, 3, kind, "the process died", proven)


def test_an_episode_lost_through_another_is_begun_again_as_it_was_and_costs_no_spare_one():
    async def scenario():
        manager, engine = Manager(failing={number: lost() for number in (1, 2, 3, 5)}), Engine()
        return await rollout(manager, engine).play(0, TASK), engine

    episodes, engine = asyncio.run(scenario())
    assert sorted(each.score for each in episodes) == [4.0, 6.0, 7.0]
    names = {request.request_id for request, _, _ in engine.requests}
    assert names == {f"train-0-{index}-{turn}" for index in range(3) for turn in range(2)}
    assert len({request.sampling.seed for request, _, _ in engine.requests}) == 6 and len(engine.requests) == 10
    assert sorted(engine.forgotten) == ["train-0-0", "train-0-1", "train-0-2"]


@pytest.mark.parametrize("error", [lost(proven=True), lost(kind="hung")])
def test_an_episode_that_failed_through_its_own_environment_is_not_begun_again(error):
    both = rollout(Manager(failing={1: error}), group_size=1)
    with pytest.raises(EpisodesFailed, match="turn 3: the process died"):
        asyncio.run(both.play(0, TASK))
    assert both.environments.opened == 1


def test_an_episode_that_is_lost_again_and_again_counts_as_failed_in_the_end():
    all_attempts = range(1, LOST_RETRIES + 2)
    both = rollout(Manager(failing={number: lost() for number in all_attempts}), group_size=1)
    with pytest.raises(EpisodesFailed, match="1 episodes failed"):
        asyncio.run(both.play(0, TASK))
    assert both.environments.opened == len(all_attempts)
    last = rollout(Manager(failing={number: lost() for number in all_attempts[:-1]}), group_size=1)
    assert [each.score for each in asyncio.run(last.play(0, TASK))] == [float(all_attempts[-1])]


def counted(**counts):
    return {"sampled": 0, "untrained": 0, "discarded": 0, **counts}


def test_each_sampled_token_is_trained_on_left_out_or_discarded():
    """An episode trains two tokens. The first session fails after one, so does the second, which is begun again."""
    manager = Manager(failing={1: EnvironmentFailed("it broke"), 2: lost()})
    played = rollout(manager, spare=1)
    asyncio.run(played.play(0, TASK))
    assert counted(**played.tokens) == counted(sampled=3 * 2 + 2, discarded=2)


def test_what_an_episode_does_not_train_on_is_counted(monkeypatch):
    monkeypatch.setattr(Sample, "response_tokens", property(lambda sample: 1))
    played = rollout(Manager())
    asyncio.run(played.play(0, TASK))
    assert counted(**played.tokens) == counted(sampled=3 * 2, untrained=3)


def test_a_group_that_is_not_made_discards_its_finished_episodes_too():
    """One episode has come to its end; the other waits after its first turn."""

    async def scenario():
        manager = Manager(slow=frozenset({2}))
        played = rollout(manager, group_size=2)
        group = asyncio.ensure_future(played.play(0, TASK))
        while manager.ended != [1]:
            await asyncio.sleep(0)
        group.cancel()
        await asyncio.wait([group])
        return played

    assert counted(**asyncio.run(scenario()).tokens) == counted(sampled=3, discarded=3)


def test_slow_episodes_are_waited_for_although_spare_ones_could_be_quicker():
    async def scenario():
        manager = Manager(slow=frozenset({2}))
        playing = asyncio.ensure_future(rollout(manager, spare=2).play(0, TASK))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(manager.ended) == [1, 3] and not playing.done()
        manager.gate.set()
        return await playing

    assert [each.score for each in asyncio.run(scenario())] == [1.0, 2.0, 3.0]


def reported(*successes):
    return [replace(episode("lake", 17, 1), success=success) for success in successes]


def test_an_episode_that_was_cut_before_it_reported_its_success_had_none():
    """As an agent that a limit stopped, or an environment that reports a success only at the end."""
    measured = validation_metrics([reported(True, None), reported(None, None)])
    assert (measured["accuracy"], measured["best_of_group"]) == (0.25, 0.5)
    told = [sample.metrics["success"] for sample in as_group(0, TASK, reported(True, None)).samples]
    assert told == [1.0, 0.0]
    assert "accuracy" not in validation_metrics([reported(None, None)])
    assert "success" not in as_group(0, TASK, reported(None, None)).samples[0].metrics


def test_the_success_of_a_step_is_that_of_all_its_episodes_also_of_groups_that_were_cut_whole():
    played = [("lake", (True, None)), ("lake", (None, None)), ("maze", (None, None))]
    groups = [as_group(number, EpisodeTask(tag, 2), reported(*each)) for number, (tag, each) in enumerate(played)]
    batch = TrainingBatch.from_groups(0, groups)
    batch.describe_rollouts("env/{domain}")
    assert batch.metrics["env/lake/success"] == 0.25
    assert "env/maze/success" not in batch.metrics


def test_environments_that_are_gone_for_good_end_the_run():
    with pytest.raises(FatalRolloutError, match="no more"):
        asyncio.run(rollout(Manager({2: EnvPoolClosed("no more")}), spare=5).play(0, TASK))


def test_a_cancelled_group_leaves_no_episode_running():
    async def scenario():
        manager, engine = Manager(slow=frozenset({1, 2, 3})), Engine()
        playing = asyncio.ensure_future(rollout(manager, engine).play(0, TASK))
        for _ in range(10):
            await asyncio.sleep(0)
        playing.cancel()
        await asyncio.wait([playing])
        return manager, engine

    manager, engine = asyncio.run(scenario())
    assert sorted(manager.cancelled) == [1, 2, 3] and len(engine.forgotten) == 3


def test_no_more_groups_play_at_once_than_there_are_places():
    async def scenario():
        manager, places = Manager(slow=frozenset(range(1, 7))), asyncio.Semaphore(1)
        both = rollout(manager, at_once=places)
        playing = [asyncio.ensure_future(both.play(number, TASK)) for number in range(2)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert both.environments.opened == 3
        manager.gate.set()
        await asyncio.gather(*playing)
        assert both.environments.opened == 6

    asyncio.run(scenario())


def test_an_observation_is_done_either_way():
    assert Observation((), terminated=True).done and Observation((), truncated=True).done
    assert not Observation(()).done
