"""The role that computes log-probabilities beside the trainer: the same numbers, of the same weights, sooner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from safetensors.torch import load_file
from test_publication_schedule import VALIDATING, VALIDATION_SECONDS, Run
from tiny import tiny_config

from roll.check.config import check_config
from roll.check.memory import estimate_memory
from roll.check.plan import plan
from roll.configs import derived
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.data.records import Group, SampleBatch
from roll.pipeline.algorithm import build_algorithms
from roll.pipeline.exact import exact_config
from roll.pipeline.logp import LogProbRole, wanted_of
from roll.pipeline.resume import changes as changes_between
from roll.pipeline.stages import stage_chain
from roll.pipeline.streaming import least_groups
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.step import PROMPT_PICTURES
from roll.weights.transports import TRANSPORTS
from tests.pipeline.test_advantage_stage import PROMPT, sample
from tests.tiers import quick

ROLE = {"cluster__num_devices_per_node": 3, "actor_logp": {"device_mapping": [2]}}
SEVERAL = {
    "ppo_epochs": 2,
    "actor_train__use_dynamic_batching_in_train": False,
    "actor_train__training_args__per_device_train_batch_size": 4,
    "actor_train__training_args__gradient_accumulation_steps": 2,
}
RECOMPUTED = {"old_logprobs": "recompute"}
DECOUPLED = {**RECOMPUTED, "actor_train__pg_variant": "decoupled_ppo"}
VARIANTS = {
    "several optimizer steps": {**RECOMPUTED, **SEVERAL},
    "decoupled, one optimizer step, groups of a batch as they finish": {**DECOUPLED, "async_generation_ratio": 1},
    "decoupled, several epochs, packed": {
        **DECOUPLED,
        "ppo_epochs": 2,
        "loss_agg_mode": "seq-mean-token-mean",
        "actor_train__use_sequence_packing": True,
        "actor_train__max_tokens_per_microbatch_in_train": 32,
        "actor_logp__use_sequence_packing": True,
        "actor_logp__max_tokens_per_microbatch_in_infer": 40,
    },
    "a correction that rejects": {
        **DECOUPLED,
        **SEVERAL,
        "train_infer_correction": {"reject": [{"level": "token", "divergence": "abs", "threshold": 1e-3}]},
        "async_generation_ratio": 1,
    },
    "weights of a correction": {
        "actor_train__pg_variant": "vanilla",
        "train_infer_correction": {"weight": {"level": "sequence"}},
        "allow_uncorrected_off_policy": True,
        **SEVERAL,
    },
    "normalised weights": {
        "actor_train__pg_variant": "vanilla",
        "train_infer_correction": {"weight": {"level": "token"}, "normalize": True},
        "async_generation_ratio": 1,
    },
    "tokens that are selected from the whole batch": {
        **RECOMPUTED,
        **SEVERAL,
        "actor_train__pg_variant": "clip_cov",
        "actor_train__pg_variant_args": {"share": 0.2, "cov_low": -100.0, "cov_high": 100.0},
    },
    "the second moment of the whole batch": {
        **DECOUPLED,
        **SEVERAL,
        "train_infer_correction": {"reject": [{"second_moment": 1e-12}]},
        "async_generation_ratio": 1,
    },
    "whole models on each device": {
        **RECOMPUTED,
        **SEVERAL,
        "actor_logp__strategy_args": {"strategy_name": "hf_infer"},
    },
    "adapters": {
        **RECOMPUTED,
        **SEVERAL,
        "actor_train__model_args": {"lora_target": "all-linear", "lora_rank": 4},
    },
    "only the critic learns at first": {
        **DECOUPLED,
        **SEVERAL,
        "adv_estimator": "gae",
        "cluster__num_devices_per_node": 4,
        "critic": {"device_mapping": [3], "training_args": {"learning_rate": 3e-3}},
        "critic_warmup": 1,
        "async_generation_ratio": 1,
    },
}
COMPARED = ("actor/", "advantage/", "critic/", "correction/", "reward/addition", "response/")


SOAKED = ("normalised weights", "the second moment of the whole batch", "whole models on each device", "adapters")


@pytest.mark.parametrize("name", quick(VARIANTS, "several optimizer steps", soaked=SOAKED))
def test_steps_are_those_of_a_run_without_the_role(task, name):
    assert_same_steps(task, IN_THIS_PROCESS, VARIANTS[name])


def lags(run):
    return [(record["lag/mean"], record["lag/max"]) for record in run.metrics]


def assert_same_steps(task, address, changes):
    # In order, as which groups a step has may depend on time otherwise.
    fixed = {"consumption": "fifo"} if changes.get("async_generation_ratio") else {}
    own = {key: value for key, value in changes.items() if key.startswith("actor_logp")}
    changes = {
        "max_steps": 3,
        "rewards__addition__verifier": "reward_functions:late_reward",
        # Attention hardly feels key biases: their gradients are rounding, of which Adam alone would make whole steps.
        "actor_train__training_args__adam_epsilon": 1e-4,
        **fixed,
        **{key: value for key, value in changes.items() if key not in own},
    }
    role = {**ROLE, "actor_logp": dict(ROLE["actor_logp"])}
    role |= {"cluster__num_devices_per_node": max(3, changes.get("cluster__num_devices_per_node", 0))}
    for _ in range(4):
        plain = run_pipeline(task, address, tiny_config(task, **changes))
        beside = run_pipeline(task, address, tiny_config(task, **changes | role | own))
        if lags(plain) == lags(beside):
            break  # Ahead of training, which version samples a token depends on how busy the machine is.
    assert lags(plain) == lags(beside) and len(beside.metrics) == 3
    for one, other in zip(plain.metrics, beside.metrics, strict=True):
        for key in sorted(key for key in one.keys() | other.keys() if key.startswith(COMPARED)):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), key
        learned = "actor/loss" in one
        assert ("actor_logp/wait_seconds" in other) == learned
        assert 0 <= other["idle/actor_logp"] <= 1 and "tokens_per_second/actor_logp" in other
    path = "checkpoints/step-3/model.safetensors"
    first, second = load_file(plain.folder / path), load_file(beside.folder / path)
    for weight, value in first.items():
        assert torch.allclose(value, second[weight], rtol=0, atol=1e-5 * float(value.abs().max())), weight
    return beside


def test_it_is_given_the_pictures_of_prompts():
    pictures = np.empty(1, dtype=object)
    pictures[0] = (np.zeros(3, np.uint8),)
    tokens = {"token_ids": np.ones(4, np.int32), "response_mask": np.ones(4, bool), "advantages": np.ones(4)}
    wanted = wanted_of(SampleBatch(np.array([4]), tokens, {"scores": np.ones(1), PROMPT_PICTURES: pictures}))
    assert set(wanted.tokens) == {"token_ids", "response_mask"} and set(wanted.per_sample) == {PROMPT_PICTURES}
    assert wanted.select(np.array([0])).per_sample[PROMPT_PICTURES][0] is pictures[0]


@pytest.mark.tier("all")
@pytest.mark.parametrize(("train", "logp"), [([0, 1], [2]), pytest.param([0], [1, 2], marks=pytest.mark.tier("soak"))])
def test_so_they_are_on_two_ranks_in_processes_of_their_own(task, ray_cluster, train, logp):
    devices = {
        "cluster__num_devices_per_node": 4,
        "actor_train__device_mapping": train,
        "actor_infer__device_mapping": [3],
        "actor_logp__device_mapping": logp,
        "actor_logp__use_sequence_packing": True,
    }
    assert_same_steps(task, ray_cluster, {**DECOUPLED, **SEVERAL, **devices})


@pytest.mark.tier("all")
def test_a_run_goes_on_with_the_role_or_without_it(task):
    config = tiny_config(task, **RECOMPUTED, **SEVERAL, max_steps=4, save_steps=2, max_ckpt_to_keep=0)
    plain = run_pipeline(task, IN_THIS_PROCESS, config)
    before = plain.metrics
    with_role = tiny_config(task, **RECOMPUTED, **SEVERAL, max_steps=4, save_steps=2, **ROLE)
    resumed = go_on_from(2, plain, task, IN_THIS_PROCESS, with_role)
    assert ["actor_logp/wait_seconds" in step for step in resumed.metrics] == [False, False, True, True]
    for one, other in zip(before, resumed.metrics, strict=True):
        for key in ("actor/loss", "actor/ratio_mean", "reward/addition/mean"):
            assert (key in one) == (key in other) and one.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-5)
    difference = changes_between(config_from_tree(config), config_from_tree(with_role))
    assert {change.judgement for change in difference} == {"harmless"}


@pytest.mark.tier("all")
def test_a_role_that_dies_ends_the_run_with_its_name_and_a_restart_begins_it_anew(task):
    killed = {"chaos": {"enabled": True, "events": [{"kind": "kill", "role": "actor_logp", "at_step": 2}]}}
    config = tiny_config(task, **RECOMPUTED, **SEVERAL, **ROLE, **killed, max_steps=4, save_steps=1)
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
    assert "actor_logp/0" in run.summary["error"]
    restarts = {"restarts": {"max_in_a_row": 2, "delay_seconds": 0}}
    run = run_pipeline(task, IN_THIS_PROCESS, {**config, **restarts})
    assert len(run.metrics) == 4 and run.summary["resumed_at"]


class Spoiling:
    """The role's end of the way: one byte of version 2 changes on it."""

    def __init__(self):
        self._receiver = TRANSPORTS["shared_memory"].receiver()

    def receive(self, handles, version):
        for bucket in self._receiver.receive(handles, version):
            data = bucket.data.copy()
            if version == 2:
                data[bucket.tensors[-1][3]] ^= 1
            yield replace(bucket, data=data)


def test_wrong_bytes_on_the_way_to_the_role_stop_the_run_before_it_computes_with_them(task, monkeypatch):
    spoilt = {"shared_memory": SimpleNamespace(receiver=Spoiling)}
    monkeypatch.setattr("roll.trainers.worker.TRANSPORTS", spoilt)
    run = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **RECOMPUTED, **SEVERAL, **ROLE), expect=1)
    assert len(run.metrics) == 1 or len(run.metrics) == 2
    error = run.summary["error"]
    assert "actor_logp/0, version 2" in error and "model.norm.weight" in error and "differs" in error


def test_weights_that_the_model_did_not_take_stop_the_run(task, monkeypatch):
    monkeypatch.setattr(Fsdp2TrainStrategy, "_write", lambda self, parameter, weight: None)
    run = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **RECOMPUTED, **SEVERAL, **ROLE), expect=1)
    assert "actor_logp/0, version 1: the content of" in run.summary["error"]


class Trainer:
    """A `TrainerGroup` that takes a second for a sample, and 0.6 for its log-probabilities."""

    def __init__(self, plain):
        self.gather, self.send = plain.gather, plain.send
        self.began: dict[int, float] = {}
        """Times of the first work on each step."""
        self.proximal: dict[int, set[float]] = {}
        """Log-probabilities that each step was given."""
        self.trained: list[int] = []

    async def log_probs(self, batch, temperature):
        await asyncio.sleep(0.6 * len(batch))
        return np.zeros(batch.lengths.sum(), np.float32)

    async def train(self, batch, objective, plan):
        for _ in range(plan.epochs):
            await self.train_part(batch, objective, plan, completes=True)
        return {}

    async def train_part(self, batch, objective, plan, *, completes):
        self.began.setdefault(plan.step, asyncio.get_running_loop().time())
        self.proximal.setdefault(plan.step, set()).update(batch.tokens["proximal_logprobs"].tolist())
        self.trained += batch.per_sample["scores"].astype(int).tolist()
        await asyncio.sleep(len(batch))
        return {}, None


class Ranks:
    """A `LogProbGroup` of which one version says one number."""

    def __init__(self, load_seconds):
        self.load_seconds = load_seconds
        self.version = -1
        self.computed: list[tuple[float, int, int]] = []
        """Time, version and samples of each pass."""

    async def load_weights(self, publication):
        await asyncio.sleep(self.load_seconds)
        self.version = publication.version

    async def log_probs(self, batch, temperature):
        await asyncio.sleep(0.6 * len(batch))
        self.computed.append((asyncio.get_running_loop().time(), self.version, len(batch)))
        return np.full(batch.lengths.sum(), -1.0 - self.version, np.float32)


class LogpRun(Run):
    """A run of eight groups a step, each of one sample."""

    rollout_seconds = (1, 2, 3, 4, 5, 6, 7, 8)
    load_seconds = 1.0
    with_role = True

    def __init__(self, *arguments, **changes):
        super().__init__(*arguments, **{"rollout_batch_size": 8, **changes})
        self.trainer = Trainer(self.trainer)

    async def rollout(self, asked):
        version = self.scheduler._admission.version
        await asyncio.sleep(self.rollout_seconds[asked.group_id * 5 % 8])
        return Group(asked.group_id, PROMPT, [sample(float(asked.group_id), version=version)])

    def context(self, pool):
        context = super().context(pool)
        context.needs_proximal = True
        if self.with_role:
            self.ranks = Ranks(self.load_seconds)
            context.logp = LogProbRole(self.ranks, self.trainer.send, pool.buffers, self.recorder, 1.0)
            self.background["actor_logp"] = context.logp.run
        return context

    def chain(self):
        return [stage for stage in stage_chain({}) if stage.role in (None, "actor_train")]


ONE_STEP = {**DECOUPLED, "adv_estimator": "reinforce"}
FOUR_STEPS = {
    **ONE_STEP,
    "ppo_epochs": 2,
    "actor_train__use_dynamic_batching_in_train": False,
    "actor_train__training_args__per_device_train_batch_size": 2,
    "actor_train__training_args__gradient_accumulation_steps": 2,
}


def seconds_of_a_step(run, steps):
    return (run.recorder.ends[steps] - run.recorder.ends[4]) / (steps - 4)


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("changes", [ONE_STEP, FOUR_STEPS])
def test_the_trainer_waits_for_a_piece_of_the_batch_and_not_for_the_whole_one(tmp_path, monkeypatch, ratio, changes):
    """Log-probabilities of a batch take 4.8 seconds, those of a piece 0.6, a load one, training eight an epoch."""
    steps, found = 12, {}
    for with_role in (False, True):
        run = LogpRun(tmp_path, monkeypatch, max_steps=steps, async_generation_ratio=ratio, **changes, **ROLE)
        run.with_role = with_role
        run.run()
        found[with_role] = seconds_of_a_step(run, steps)
        epochs = changes.get("ppo_epochs", 1)
        assert sorted(run.trainer.trained) == sorted([*range(8 * steps)] * epochs), "each group once an epoch"
        if with_role:
            # The number of version s is -1 - s: no step had log-probabilities of other weights.
            assert run.trainer.proximal == {step: {-1.0 - step} for step in range(steps)}
            assert sum(samples for _, _, samples in run.ranks.computed) == 8 * steps, "each sample once"
            busy = run.recorder.busy_seconds["actor_train"]
            assert busy == pytest.approx(8 * epochs * steps), "a trainer that waits is idle"
            waits = [run.recorder.steps[step]["actor_logp/wait_seconds"] for step in range(4, steps)]
            assert 0 < max(waits) <= (1.6 if ratio else 0.6) + 0.01
    # Of 4.8 seconds; fewer where rollouts take as long as the training.
    assert found[True] <= found[False] - 2.6


@pytest.mark.parametrize("dual_buffer", [True, False])
def test_a_role_that_is_late_is_waited_for(tmp_path, monkeypatch, dual_buffer):
    run = LogpRun(tmp_path, monkeypatch, max_steps=6, async_generation_ratio=1, **FOUR_STEPS, **ROLE)
    run.load_seconds = 40.0
    if not dual_buffer:
        local = run.local
        run.local = lambda: local(in_place=False, dual_buffer=False)
    run.run()
    assert run.trainer.proximal == {step: {-1.0 - step} for step in range(6)}
    waits = [run.recorder.steps[step]["actor_logp/wait_seconds"] for step in range(2, 7)]
    assert min(waits) >= 35


def test_what_has_finished_is_computed_before_the_batch_is_full(tmp_path, monkeypatch):
    run = LogpRun(tmp_path, monkeypatch, max_steps=8, async_generation_ratio=1, **FOUR_STEPS, **ROLE)
    run.rollout_seconds = (1, 1, 1, 1, 1, 1, 1, 60)
    run.run()
    for step in range(3, 8):
        before = [n for time, version, n in run.ranks.computed if version == step and time <= run.trainer.began[step]]
        assert sum(before) >= 5
    assert run.trainer.proximal == {step: {-1.0 - step} for step in range(8)}


@pytest.mark.parametrize("dual_buffer", [True, False])
@pytest.mark.parametrize(("mode", "ratio"), [("overlap", 1), ("pause", 2)])
def test_a_validation_on_the_devices_of_the_trainer_ends_while_that_waits_for_the_role(
    tmp_path, monkeypatch, mode, ratio, dual_buffer
):
    """The trainer holds devices that a validation needs, and waits for weights that are published after it."""
    settings = {"mode": mode, "data_args": {"file_name": "val.jsonl"}}
    run = LogpRun(
        tmp_path, monkeypatch, async_generation_ratio=ratio, validation=settings, **VALIDATING, **FOUR_STEPS, **ROLE
    )
    run.devices["rewards.judge"] = run.devices["actor_train"]
    if not dual_buffer:
        local = run.local
        run.local = lambda: local(in_place=False, dual_buffer=False)

    async def measure(version):
        await asyncio.sleep(VALIDATION_SECONDS)
        async with run.locks["rewards.judge"].hold("rewards.judge"):
            await asyncio.sleep(1)

    run.validator.measure = measure
    run.run()
    assert run.recorder.validated == list(range(7))
    assert run.trainer.proximal == {step: {-1.0 - step} for step in range(6)}


@pytest.mark.parametrize(
    ("changes", "path", "reason"),
    [
        ({"actor_logp": {"device_mapping": [1]}}, "actor_logp.device_mapping", "take turns with actor_infer"),
        (
            {"actor_logp": {"device_mapping": [2], "strategy_args": {"strategy_name": "megatron_train"}}},
            "actor_logp.strategy_args.strategy_name",
            "takes no new weights",
        ),
        ({"weight_update": {"interval_steps": 2}}, "weight_update.interval_steps", "every step"),
        ({"weight_update": {"transport": "nccl"}}, "weight_update.transport", "engines of vLLM only"),
        (
            {"actor_logp": {"device_mapping": [2], "model_args": {"model_name_or_path": "owner/other"}}},
            "actor_logp.model_args.model_name_or_path",
            "weights of actor_train",
        ),
        ({"actor_train__model_args": {"dtype": "bfloat16"}}, "actor_logp.model_args.dtype", "in bfloat16"),
        ({"actor_infer__model_args": {"dtype": "bfloat16"}}, "actor_infer.model_args.dtype", "travel in it"),
        (
            {
                "actor_train__model_args": {"dtype": "bfloat16", "lora_target": "all-linear"},
                "actor_infer__model_args": {"dtype": "bfloat16"},
                "actor_logp": {"device_mapping": [2], "model_args": {"dtype": "bfloat16"}},
            },
            "actor_train.model_args.lora_target",
            "rounded away",
        ),
        ({"actor_logp": {"infer_batch_size": 4, "use_dynamic_batching_in_infer": False}},
         "actor_logp.infer_batch_size", "is actor_train"),
        ({"actor_logp": {"device_mapping": [2], "generating_args": {"top_k": 3}}},
         "actor_logp.generating_args.top_k", "nothing reads"),
    ],
)  # fmt: skip
def test_a_role_that_could_not_have_the_weights_of_each_step_is_refused(task, changes, path, reason):
    tree = tiny_config(task, **{**RECOMPUTED, **SEVERAL, **ROLE, **changes})
    with pytest.raises(ConfigError) as caught:
        check_config(config_from_tree(tree))
    problems = {problem.path: problem for problem in caught.value.problems}
    assert reason in problems[path].message and problems[path].remedy


def test_a_comparison_with_the_plain_loop_is_refused(task):
    config = config_from_tree(tiny_config(task, **RECOMPUTED, **SEVERAL, **ROLE))
    with pytest.raises(ConfigError, match="actor_logp: the plain loop has one trainer"):
        exact_config(config, 3)


def test_a_role_that_nobody_asks_for_anything_is_refused(task):
    for changes, reason in (
        ({}, "nothing needs log-probabilities"),
        ({**DECOUPLED, "actor_train__stream_groups": True}, "those of the pass that trains"),
    ):
        with pytest.raises(ConfigError, match=f"actor_logp: has no effect: .*{reason}"):
            build_algorithms(config_from_tree(tiny_config(task, **ROLE, **changes)))
    waits = tiny_config(task, **ROLE, **DECOUPLED, ppo_epochs=2, actor_train__stream_groups="auto")
    assert not build_algorithms(config_from_tree(waits)).streams


@pytest.mark.tier("all")
@pytest.mark.parametrize("section", [{}, {"device_mapping": [0]}])
def test_without_devices_of_its_own_it_is_the_trainer(task, section):
    config = check_config(config_from_tree(tiny_config(task, **RECOMPUTED, **SEVERAL, actor_logp=section)))
    assert derived.logp_is_trainer(config) and "actor_logp" not in derived.present_roles(config)
    assert "actor_logp   actor_train itself" in plan(config)
    run = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **RECOMPUTED, **SEVERAL, actor_logp=section))
    without = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **RECOMPUTED, **SEVERAL))
    model = "checkpoints/step-3/model.safetensors"
    assert (run.folder / model).read_bytes() == (without.folder / model).read_bytes()


def test_its_devices_memory_and_weights_are_planned(task):
    tree = tiny_config(task, **{**RECOMPUTED, **SEVERAL, **ROLE}, async_generation_ratio=0)
    tree["cluster"] |= {"num_devices_per_node": 4, "shares": {"train": 0.5, "infer": 0.25, "actor_logp": 0.25}}
    for role in ("actor_train", "actor_infer", "actor_logp"):
        tree[role].pop("device_mapping")
    config = check_config(config_from_tree(tree))
    assert config.actor_logp.device_mapping == "3"
    assert "fsdp2_train, 1 rank on device 3 (of its own)" in plan(config)
    (role,) = (each for each in estimate_memory(config).roles if each.role == "actor_logp")
    assert {part.name for part in role.always} == {"weights", "libraries"}
    assert {phase.name for phase in role.phases} == {"log-probabilities", "new weights are loaded"}
    assert least_groups(config, False) == 8
    tree["async_generation_ratio"] = 1
    tree["actor_train"]["pg_variant"] = "decoupled_ppo"
    assert least_groups(config_from_tree(tree), False) == 1
    tree["cluster"] |= {"num_devices_per_node": 2, "num_nodes": 2, "shares": {}}
    for role, devices in (("actor_train", [0]), ("actor_infer", [1]), ("actor_logp", [3])):
        tree[role]["device_mapping"] = devices
    assert derived.weight_transport(config_from_tree(tree)) == "object_store"
