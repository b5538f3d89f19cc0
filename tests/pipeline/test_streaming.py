"""Training on groups as they finish: the step of the whole batch, but for rounding, and sooner."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from safetensors.torch import load_file
from test_agentic_runs import agentic_config
from test_publication_schedule import Run
from tiny import tiny_config

from roll.configs import derived
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.data.records import Group
from roll.pipeline import algorithm
from roll.pipeline.algorithm import TrainingBatch, build_algorithms, with_own_advantages
from roll.pipeline.resume import changes
from roll.pipeline.stages import stage_chain
from roll.pipeline.streaming import (
    AdvantagesNeedBatch,
    PartsOfBatch,
    StreamedStep,
    by_group,
    in_order,
    join,
    least_groups,
)
from tests.pipeline.test_advantage_stage import PROMPT, batch_of, sample, settings
from tests.tiers import quick

THREE_DEVICES = {"cluster__num_devices_per_node": 3}
VARIANTS = {
    "grpo": {},
    "every token alike, packed": {
        "loss_agg_mode": "token-mean",
        "adv_estimator": "rloo",
        "actor_train__use_sequence_packing": True,
        "actor_train__max_tokens_per_microbatch_in_train": 32,
    },
    "a reference, and penalties that adapt": {
        **THREE_DEVICES,
        "reference": {"device_mapping": [2]},
        "add_token_level_kl": True,
        "kl_controller": "adaptive",
        "adv_estimator": "reinforce",
        "norm_mean_type": "group",
    },
    "a reference in the loss, groups left out": {
        **THREE_DEVICES,
        "reference": {"device_mapping": [2]},
        "use_kl_loss": True,
        "entropy_loss_coef": 0.01,
        "zero_variance_mask": True,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "a teacher in the advantages": {
        **THREE_DEVICES,
        "teacher": {"device_mapping": [2]},
        "distillation": {"coef": 0.5},
    },
    "a teacher in the loss": {
        **THREE_DEVICES,
        "teacher": {"device_mapping": [2]},
        "distillation": {"use": "loss", "reward_coef": 0.5},
        "train_infer_correction": {"weight": {"level": "token"}},
        "actor_train__pg_variant": "vanilla",
        "actor_train__use_sequence_packing": True,
    },
    "a critic": {
        **THREE_DEVICES,
        "adv_estimator": "gae",
        "critic": {"device_mapping": [2], "training_args": {"learning_rate": 3e-3}},
        "critic_warmup": 1,
    },
    "a correction that would reject": {
        "actor_train__pg_variant": "decoupled_ppo",
        "old_logprobs": "recompute",
        "train_infer_correction": {"reject": [{"level": "token", "divergence": "abs", "threshold": 1e-3}]},
    },
    "weights of a correction": {
        "actor_train__pg_variant": "vanilla",
        "train_infer_correction": {"weight": {"level": "sequence"}},
    },
}
COMPARED = (
    "actor/",
    "distillation/",
    "advantage/",
    "critic/",
    "correction/",
    "kl_penalty/",
    "reward/addition",
    "response/",
)


@pytest.mark.parametrize("name", quick(VARIANTS, "grpo"))
def test_a_run_that_streams_takes_the_steps_of_one_that_does_not(task, name):
    assert_same_steps(task, IN_THIS_PROCESS, 3, VARIANTS[name])


@pytest.mark.tier("all")
def test_so_it_does_on_two_ranks_in_processes_of_their_own(task, ray_cluster):
    corrected = VARIANTS["weights of a correction"] | VARIANTS["every token alike, packed"]
    corrected = VARIANTS["a teacher in the loss"] | corrected
    corrected |= {"cluster__num_devices_per_node": 4, "teacher": {"device_mapping": [2, 3]}}
    two_ranks = {"actor_train__device_mapping": [0, 1], "actor_infer__device_mapping": [2]}
    two_ranks |= {"teacher": {"device_mapping": [3]}}
    assert_same_steps(task, ray_cluster, 5, corrected, two_ranks)


@pytest.mark.tier("all")
def test_so_it_does_where_an_episode_is_several_samples(task):
    changes = {
        "custom_envs__copy__env_type": "copy_games:Late",
        "custom_envs__copy__env_manager_cls": "step",
        "loss_agg_mode": "seq-mean-token-mean",
    }
    assert_same_steps(task, IN_THIS_PROCESS, 3, changes, make=agentic_config)


def assert_same_steps(task, address, steps, changes, streamed_only=None, make=tiny_config):
    changes = {
        "max_steps": steps,
        # Attention hardly feels key biases: their gradients are rounding, of which Adam alone would make whole steps.
        "actor_train__training_args__adam_epsilon": 1e-4,
        **changes,
    }
    plain = run_pipeline(task, address, make(task, **changes))
    streams = {"actor_train__stream_groups": True, **(streamed_only or {})}
    if make is tiny_config:
        streams["rewards__addition__verifier"] = "reward_functions:straggling_reward"
    streamed = run_pipeline(task, address, make(task, **changes | streams))
    assert len(streamed.metrics) == steps
    shares = [record["actor/streamed_share"] for record in streamed.metrics if "actor/loss" in record]
    assert 0.2 < max(shares) and max(shares) < 1, "how much depends on how busy the machine is"
    for one, other in zip(plain.metrics, streamed.metrics, strict=True):
        own = {"actor/streamed_share"} if "actor/loss" in one else set()
        # A trainer that streams needs no pass for log-probabilities alone; a short step may see no engine at work.
        differing = {name for name in other.keys() ^ one.keys() if not name.startswith(("seconds/", "engine/"))}
        assert differing == own
        assert other["lag/max"] == 0
        for key in sorted(one.keys() & other.keys()):
            if key.startswith(COMPARED):
                assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), key
    path = f"checkpoints/step-{steps}/model.safetensors"
    first, second = load_file(plain.folder / path), load_file(streamed.folder / path)
    for weight, value in first.items():
        assert torch.allclose(value, second[weight], rtol=0, atol=1e-5 * float(value.abs().max())), weight


class StreamedTrainer:
    """A `TrainerGroup` that takes a second for a group, and notes what it had when."""

    def __init__(self):
        self.groups: list[list[int]] = [[]]
        self.lags: set[int] = set()

    async def train_part(self, batch, objective, plan, *, completes):
        await self._work(batch)
        if completes:
            self.groups.append([])
        return {}, None

    async def train(self, batch, objective, plan):
        await self._work(batch)
        self.groups.append([])
        return {}

    async def _work(self, batch):
        await asyncio.sleep(len(batch))
        self.groups[-1] += batch.per_sample["scores"].astype(int).tolist()
        self.lags |= set(batch.tokens["lags"].tolist())


class StreamingRun(Run):
    """A run whose groups take some seconds each, with all of the real stages that it needs."""

    SECONDS = (1, 2, 3, 4, 5, 6, 7, 8)

    def __init__(self, *arguments, **changes):
        super().__init__(*arguments, **changes)
        plain, trainer = self.trainer, StreamedTrainer()
        trainer.gather, trainer.send = plain.gather, plain.send
        self.trainer = trainer

    async def rollout(self, asked):
        version = self.scheduler._admission.version
        await asyncio.sleep(self.SECONDS[asked.group_id * 5 % 8])
        made = sample(float(asked.group_id), version=version)
        return Group(asked.group_id, PROMPT, [made])

    def chain(self):
        return [stage for stage in stage_chain({}) if stage.role in (None, "actor_train")]


@pytest.mark.parametrize("ratio", [0, 1, 2.5])
@pytest.mark.parametrize("consumption", ["fifo", "ready_first"])
def test_training_begins_before_the_batch_is_full(tmp_path, monkeypatch, ratio, consumption):
    """Rollouts and training of a batch take eight seconds each, and an update four."""
    steps = 12
    seconds = {}
    for streams in (False, True):
        run = StreamingRun(
            tmp_path,
            monkeypatch,
            max_steps=steps,
            rollout_batch_size=8,
            async_generation_ratio=ratio,
            **({"consumption": consumption} if ratio else {}),
            actor_train__stream_groups=streams,
        ).run()
        *trained, rest = run.trainer.groups
        assert rest == [] and [len(groups) for groups in trained] == [8] * steps
        assert sorted(sum(trained, [])) == list(range(8 * steps)), "each group once"
        assert run.scheduler.ledger.consumed == 8 * steps
        assert max(run.trainer.lags) <= (0 if ratio == 0 else 3)
        ends = run.recorder.ends
        seconds[streams] = (ends[steps] - ends[4]) / (steps - 4)
    if ratio == 0:
        assert seconds[False] >= 16 and seconds[False] >= 1.5 * seconds[True]
    else:
        assert seconds[True] <= seconds[False] * 1.001


def test_parts_of_a_batch_come_together_in_order_whatever_the_order_in_which_they_finished():
    groups = [([sample(score) for score in scores], None) for scores in ((1, 0), (0, 0, 1), (1, 1), (0, 1))]
    whole = batch_of(*groups)
    parts = PartsOfBatch()
    values = np.arange(whole.data.lengths.sum(), dtype=np.float32)
    added = by_group(whole, values)
    for ids in ((3,), (0, 2)):
        part = TrainingBatch.from_groups(4, [whole.groups[number] for number in ids])
        part.complete = False
        part.data.tokens["reference_logprobs"] = in_order(part, added)
        assert parts.add(part) is None
    last = TrainingBatch.from_groups(4, [whole.groups[1]])
    last.data.tokens["reference_logprobs"] = in_order(last, added)
    joined = parts.add(last)
    assert joined.complete and [group.group_id for group in joined.groups] == [0, 1, 2, 3]
    assert np.array_equal(joined.data.tokens["reference_logprobs"], values)
    for name, tokens in whole.data.tokens.items():
        assert np.array_equal(joined.data.tokens[name], tokens), name
    assert parts.add(whole) is whole


def test_parts_that_wait_for_the_trainer_are_trained_on_as_one_and_the_last_one_still_completes_the_batch():
    whole = batch_of(*(([sample(1), sample(0)], None) for _ in range(3)))
    parts = [TrainingBatch.from_groups(4, [group]) for group in whole.groups]
    for part in parts[:-1]:
        part.complete = False
    middle = asyncio.run(join(parts[:2]))
    assert not middle.complete and [group.group_id for group in middle.groups] == [0, 1]
    whole.untrained = parts[2]
    last = asyncio.run(join([parts[0], whole]))
    assert last.complete and last.data is whole.data
    assert [group.group_id for group in last.untrained.groups] == [0, 2]
    assert last.untrained.data.lengths.sum() == sum(parts[number].data.lengths.sum() for number in (0, 2))


@pytest.mark.parametrize("masked", [0, 1])
def test_a_part_of_which_nothing_is_left_out_joins_one_with_a_group_that_is(masked):
    whole = batch_of(*(([sample(1), sample(0)], None) for _ in range(2)))
    parts = [TrainingBatch.from_groups(4, [group]) for group in whole.groups]
    nothing = np.zeros_like(parts[masked].data.tokens["response_mask"])
    parts[masked].data.tokens["loss_mask"] = nothing
    wanted = [nothing if number == masked else part.data.tokens["response_mask"] for number, part in enumerate(parts)]
    assert np.array_equal(asyncio.run(join(parts)).data.tokens["loss_mask"], np.concatenate(wanted))


@pytest.mark.parametrize("seen", [0, 1])
def test_a_part_without_pictures_in_its_prompts_joins_one_with_pictures(seen):
    whole, picture = batch_of(*(([sample(1), sample(0)], None) for _ in range(2))), np.ones(3, np.uint8)
    whole.groups[seen].prompt = replace(PROMPT, pictures=[picture])
    parts = [TrainingBatch.from_groups(4, [group]) for group in whole.groups]
    found = asyncio.run(join(parts)).data.per_sample["prompt_pictures"]
    assert [len(pictures) for pictures in found] == [int(row // 2 == seen) for row in range(4)]


def test_advantages_of_a_part_change_nothing_and_are_those_of_its_batch():
    whole = batch_of(([sample(1), sample(0)], None), ([sample(0), sample(1), sample(1)], None))
    shaped = settings("grpo")
    part = TrainingBatch.from_groups(4, [whole.groups[1]])
    trained = with_own_advantages(part, shaped)
    assert "advantages" not in part.data.tokens and whole.groups[1].samples[0].reward == 0
    step = StreamedStep()
    step.note_advantages(trained)
    whole = with_own_advantages(whole, shaped)
    step.check(whole, shaped.estimator)
    whole.data.tokens["advantages"][-1] += 0.01
    with pytest.raises(AdvantagesNeedBatch, match=r"advantages of group 1 .*stream_groups: false"):
        step.check(whole, shaped.estimator)


@pytest.mark.parametrize("estimator", ["centred", "said_to_look_at_one_group"])
def test_an_estimator_that_looks_at_other_groups_ends_the_run_before_it_is_trained_on(task, estimator, monkeypatch):
    monkeypatch.setattr(algorithm, "SLICE_TOKENS", 1)
    config = tiny_config(
        task,
        actor_train__stream_groups=True,
        adv_estimator=f"custom_parts:{estimator}",
        rewards__addition__verifier="reward_functions:late_reward",
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
    assert run.metrics == [] and "AdvantagesNeedBatch" in (run.folder / "summary.json").read_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"whiten_advantages": True}, "whitening takes the moments of the whole batch"),
        ({"adv_estimator": "reinforce_plus_plus"}, "gives advantages the moments of the whole batch"),
        ({"adv_estimator": "reinforce", "norm_mean_type": "batch"}, "`norm_mean_type: batch` looks at other groups"),
        ({"actor_train__pg_variant": "clip_cov"}, "clip_cov selects tokens of the whole batch"),
        ({"ppo_epochs": 2}, "2 optimizer steps are taken on each batch"),
        ({"actor_infer__device_mapping": [0]}, "actor_train takes turns with other roles on its devices"),
        (
            {"reference": {"device_mapping": [1]}, "use_kl_loss": True},
            "reference takes turns with other roles on its devices",
        ),
        ({"stages": {"mine": {"after": "rollout", "use": "custom_parts:keep"}}}, "stages of your own take whole"),
        (
            {"train_infer_correction": {"reject": [{"second_moment": 0.04}]}},
            "rejects by the second moment of the whole batch",
        ),
        (
            {
                "actor_train__pg_variant": "vanilla",
                "train_infer_correction": {"weight": {"level": "token"}, "normalize": True},
            },
            "normalised over the whole batch",
        ),
    ],
)
def test_what_needs_the_whole_batch_is_refused_or_waited_for(task, changes, reason):
    with pytest.raises(ConfigError, match=f"actor_train.stream_groups: true: .*{reason}"):
        build_algorithms(config_from_tree(tiny_config(task, actor_train__stream_groups=True, **changes)))
    waits = build_algorithms(config_from_tree(tiny_config(task, actor_train__stream_groups="auto", **changes)))
    assert not waits.streams and reason in waits.not_streamed
    config = config_from_tree(tiny_config(task, actor_train__stream_groups="auto"))
    streams = build_algorithms(config)
    assert streams.streams and streams.not_streamed is None
    assert least_groups(config, True) == 1 and least_groups(config, False) == 8


def test_rejection_waits_for_the_batch_only_where_an_episode_may_be_several_samples(task):
    changes = {
        "actor_train__stream_groups": "auto",
        "loss_agg_mode": "seq-mean-token-mean",
        "train_infer_correction": {"reject": [{"level": "token", "divergence": "abs", "threshold": 1e-3}]},
    }
    several = {"custom_envs__copy__env_manager_cls": "step"}
    for own, waits in ((several, True), ({}, False), (several | {"loss_agg_mode": "token-mean"}, False)):
        found = build_algorithms(config_from_tree(agentic_config(task, **changes | own)))
        assert found.streams is not waits and found.objective.by_episode is waits
        assert not waits or "rejects in one sample of an episode" in found.not_streamed


@pytest.mark.parametrize("ratio", [0, 1])
def test_without_streaming_a_reference_computes_on_parts_unless_nothing_may_depend_on_timing(task, ratio):
    apart = {**THREE_DEVICES, "reference": {"device_mapping": [2]}, "use_kl_loss": True}
    config = config_from_tree(tiny_config(task, async_generation_ratio=ratio, **apart))
    assert least_groups(config, False) == (8 if ratio == 0 else 1)
    apart["reference"]["device_mapping"] = [1]
    assert least_groups(config_from_tree(tiny_config(task, async_generation_ratio=ratio, **apart)), False) == 8


def test_a_run_that_streams_may_fall_back_to_synchronous_mode(task):
    config = tiny_config(task, actor_train__stream_groups="auto", async_generation_ratio=1, restarts__max_in_a_row=3)
    config["restarts"]["synchronous_after"] = 2
    config = config_from_tree(config)
    fallback = derived.synchronous(config)
    assert fallback.actor_train.stream_groups is False
    assert {change.judgement for change in changes(config, fallback)} == {"harmless"}
