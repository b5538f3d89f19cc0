"""Which versions reach the engines, and what a validation holds up: the real stages, scheduler and pool, virtual time.

Only the ends are stood in for: a trainer whose steps take ten seconds, and engines whose tokens do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import tiny_config

from roll.configs import derived
from roll.configs.loader import config_from_tree
from roll.data.records import Group, Prompt, Sample
from roll.pipeline.algorithm import build_algorithms
from roll.pipeline.context import build_scheduler
from roll.pipeline.main import build_stages, publish_initial
from roll.pipeline.records import StepRecords
from roll.pipeline.rollouts import EngineGate, ValidationResult
from roll.pipeline.stage import StageGraph, StepCounter
from roll.pipeline.stages import ChainedStage, stage_chain
from roll.pipeline.streaming import PARTS_PER_BATCH, PartsOfBatch, StreamedStep, least_groups
from roll.rollout.clock import run_virtual
from roll.runtime.locks import build_device_locks
from roll.tracking.timeline import Timeline
from roll.weights.verify import CanaryScores
from tests.runtime.local_engines import LocalPool, ScriptedEngine, publication, request, scripted_scores

VALIDATION_SECONDS = 60.0


class Trainer:
    """A `TrainerGroup` without weights. It trains on what it is given, and notes what was asked of it."""

    def __init__(self) -> None:
        self.trained_on: list[set[int]] = []
        """Versions of the tokens of each step."""
        self.ends: list[float] = []
        """Times at which the optimizer steps ended."""
        self.sent: list[int] = []
        self._gathered: set[int] = set()

    async def train(self, batch, objective, plan):
        await asyncio.sleep(10)  # longer than a publication, so that a step ends while a validation runs
        self.ends.append(asyncio.get_running_loop().time())
        self.trained_on.append(set(batch.tokens["versions"][batch.tokens["response_mask"]].tolist()))
        return {}

    async def gather(self, version, buffer, dtype, bucket_bytes):
        self._gathered.add(version)

    async def send(self, version):
        self._gathered.remove(version)
        self.sent.append(version)
        return replace(publication(version), seconds={"gather": 3.0, "send": 4.0})


class OneSequence:
    """A sequence of which engines and trainer say the same."""

    async def score(self, trainer, version):
        tokens = [np.array([2, 3, 5], dtype=np.int32)]
        return CanaryScores(version, tokens, [scripted_scores(each, version) for each in tokens], 0.1)

    def judge(self, version, differences):
        assert all(each.tolist() == [0.0, 0.0] for each in differences)


class Checkpoints:
    """A `Checkpointer` that takes one after each second step."""

    def __init__(self, events: list[tuple[str, int]]) -> None:
        self.events = events

    def due(self, step):
        return step % 2 == 0

    async def take(self, step, progress, memory):
        self.events.append(("taken", step))

    async def step_recorded(self, step):
        self.events.append(("recorded", step))


class Recorder:
    """A `RunRecorder` that keeps the metrics of each step."""

    def __init__(self, folder, events: list[tuple[str, int]]) -> None:
        self.events = events
        self.timeline = Timeline(folder / "timeline.json")
        self.steps: dict[int, dict[str, float]] = {}
        self.validated: list[int] = []
        self.shown: list[int] = []
        """Versions whose validation ended after their step was shown."""
        self.ends: dict[int, float] = {}
        self.busy_seconds: Counter[str] = Counter()
        self.spans: dict[str, list[tuple[float, float]]] = {}
        """Role -> beginning and end of each time in which it worked."""

    @contextmanager
    def busy(self, role):
        began = asyncio.get_running_loop().time()
        yield
        ended = asyncio.get_running_loop().time()
        self.busy_seconds[role] += ended - began
        self.spans.setdefault(role, []).append((began, ended))

    def validating(self, version):
        return nullcontext()

    def count_tokens(self, role, tokens):
        pass

    def start_clock(self):
        pass

    def show(self, metrics, step):
        pass

    def show_validation(self, result):
        self.shown.append(result.version)

    async def validation(self, result):
        self.validated.append(result.version)

    async def step(self, batch, scheduler, pool, workers, trainers):
        self.ends[batch.step + 1] = asyncio.get_running_loop().time()

    def log(self, metrics, step):
        assert step not in self.steps, "a step has one record"
        self.steps[step] = metrics
        if step:
            self.events.append(("written", step))

    async def sync(self):
        self.events.append(("synced", max(self.steps)))


class Validator:
    """Takes a minute, and notes how many training groups begin meanwhile."""

    def __init__(self, run: Run) -> None:
        self.run_of = run
        self.begun_during: dict[int, int] = {}

    async def run(self, version):
        before = self.run_of.scheduler.ledger.issued
        await self.measure(version)
        self.begun_during[version] = self.run_of.scheduler.ledger.issued - before
        return ValidationResult(version, {"val/addition/accuracy": 1.0}, [])

    async def measure(self, version):
        await asyncio.sleep(VALIDATION_SECONDS)


class Run:
    """A run of a whole configuration, as `run_pipeline` wires it."""

    def __init__(self, folder, monkeypatch, **changes) -> None:
        small = {
            "rollout_batch_size": 2, "num_return_sequences_in_group": 1, "adv_estimator": "reinforce", **changes,
        }  # fmt: skip
        self.config = config_from_tree(tiny_config(folder, **small))
        self.folder = folder
        self.local = lambda **settings: LocalPool(monkeypatch, **{"replicas": 2, **settings})
        self.trainer = Trainer()
        self.events: list[tuple[str, int]] = []
        """Records and checkpoints, in order."""
        self.recorder = Recorder(folder, self.events)
        self.announced_to_chaos: list[int] = []
        self.validator = Validator(self)
        self.devices = {"actor_train": [0], "actor_infer": [1]}
        self.seconds: dict[str, float] = {}
        """Time that stages take."""
        self.colocated: dict[str, Resident] = {}
        """States of the roles that share devices."""
        self.background: dict = {}

    async def rollout(self, asked) -> Group:
        completion = await self.gate.generate(
            request(f"{asked.group_id}-{asked.attempt}"), min_version=asked.start_version
        )
        return self.group(asked.group_id, completion)

    def group(self, group_id, completion) -> Group:
        tokens = np.concatenate([[7], completion.token_ids]).astype(np.int32)
        mask, versions = tokens == tokens, np.concatenate([[-1], completion.versions]).astype(np.int32)
        mask[0] = False
        sample = Sample(tokens, mask, np.zeros(len(tokens), np.float32), versions, "stop", score=1.0)
        return Group(group_id, Prompt("p", "addition", tokens[:1], "text"), [sample])

    def context(self, pool) -> SimpleNamespace:
        config = self.config
        side = SimpleNamespace(
            source=lambda: iter(range(10_000)), metrics=dict, sample_metrics="reward", workers=SimpleNamespace()
        )
        self.pool = pool
        self.scheduler = build_scheduler(config, side, self.rollout)
        self.scheduler.pause_admission()
        pool.on_oldest = self.scheduler.weights_published
        locks = self.locks = build_device_locks(self.devices)
        self.gate = EngineGate(pool, locks["actor_infer"], "actor_infer")
        locks["actor_infer"].register("actor_infer", pool)
        for role, resident in self.colocated.items():
            locks[role].register(role, resident)

        async def undisturbed(version):
            self.announced_to_chaos.append(version)

        algorithms = build_algorithms(config)
        checkpoints = Checkpoints(self.events)
        return SimpleNamespace(
            config=config,
            streams=algorithms.streams,
            least_groups=least_groups(config, algorithms.streams),
            parts=PartsOfBatch(),
            streamed=StreamedStep(),
            advantages=algorithms.advantages,
            correction=algorithms.correction,
            scheduler=self.scheduler,
            trainer=self.trainer,
            compared={},
            logp=None,
            pool=pool,
            side=side,
            validator=self.validator,
            locks=locks,
            holder=lambda role: role,
            hold=lambda role: lambda: locks[role].hold(role),
            recorder=self.recorder,
            objective=algorithms.objective,
            needs_proximal=False,
            steps=StepCounter(),
            published=StepCounter(),
            critic_steps=StepCounter(),
            critic=self.colocated.get("critic"),
            parity_check=OneSequence(),
            routing=None,
            max_staleness=derived.resolved_max_staleness(config),
            train_temperature=1.0,
            checkpoints=checkpoints,
            records=StepRecords(self.recorder, checkpoints, pool, self.validator),
            chaos=SimpleNamespace(publication=undisturbed),
            first_step=0,
        )

    def chain(self) -> list[ChainedStage]:
        """The stages: those without which nothing happens, and those of the roles that share the devices."""

        async def compute(seconds, run, batch):
            await asyncio.sleep(seconds)
            return batch

        others = [
            replace(stage, function=partial(compute, self.seconds.get(stage.name, 2)))
            for stage in stage_chain({})
            if stage.role in self.colocated.keys() - {"actor_train"} or (stage.name == "advantage" and self.colocated)
        ]
        first, *last = [stage for stage in stage_chain({}) if stage.name in ("rollout", "train", "param_update")]
        return [first, *others, *last]

    def run(self) -> Run:
        async def main():
            local = self.engines = self.local()
            await local.pool.start()
            context = self.context(local.pool)
            graph = StageGraph(build_stages(self.chain(), context))
            background = {"scheduler": self.scheduler.run, "engine": local.pool.run, "gate": self.gate.run}
            background |= {"validation": context.records.run, **self.background}
            async with asyncio.timeout(10_000):
                await graph.run(background, lambda: publish_initial(context))
            self.held_at_the_end = [handle.engine.version for handle in local.handles]
            local.witness.testify()

        run_virtual(main())
        self.recorder.timeline.close()
        return self


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(prepare=lambda run: None, **changes):
        made = Run(tmp_path, monkeypatch, **changes)
        prepare(made)
        return made.run()

    return run


@pytest.mark.parametrize(("streams", "room"), [(False, {1}), (True, {PARTS_PER_BATCH})])
def test_a_channel_has_room_for_parts_only_where_batches_come_in_parts(tmp_path, streams, room):
    config = config_from_tree(tiny_config(tmp_path, actor_train__stream_groups=streams, rollout_batch_size=64))
    run = SimpleNamespace(
        config=config,
        compared={},
        hold=lambda role: None,
        streams=streams,
        least_groups=least_groups(config, streams),
        recorder=SimpleNamespace(timeline=None),
    )
    assert {stage.inbox.capacity for stage in build_stages(stage_chain({}), run) if stage.inbox is not None} == room


@pytest.mark.parametrize(
    ("interval", "sent"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (3, [0, 3, 5]), (9, [0, 5])]
)
def test_every_nth_version_is_published_and_the_last_one(run, interval, sent):
    done = run(max_steps=5, weight_update__interval_steps=interval)
    assert done.trainer.sent == sent
    assert done.held_at_the_end == [5, 5], "the engines end with what was trained last"
    assert done.trainer.trained_on == [{step - step % interval} for step in range(5)]
    assert done.scheduler._admission.version == 5
    assert done.announced_to_chaos == sent
    for step, metrics in done.recorder.steps.items():
        seconds = {f"weights/{each}_seconds" for each in ("gather", "send", "fetch", "load", "stall")}
        weights = {name for name in metrics if name.startswith("weights/")}
        assert weights == (seconds | {"weights/bytes"} if step in sent else set())
        assert metrics.get("mismatch/canary_abs_mean", 0.0 if step not in sent else None) == 0.0


@pytest.mark.parametrize(
    ("changes", "versions"),
    [
        ({"max_staleness": 3}, range(7)),
        ({"max_staleness": 3, "weight_update__mode": "pull"}, range(7)),
        ({"weight_update__interval_steps": 4, "eval_steps": 3}, [0, 0, 0, 3, 4, 4, 6]),
        (
            {"weight_update__interval_steps": 4, "eval_steps": 3, "validation__mode": "overlap"},
            [0, 0, 0, 3, 4, 4, 6],
        ),
    ],
)
def test_at_ratio_zero_groups_wait_for_the_newest_version_whatever_the_bound_allows(run, changes, versions):
    """No batch mixes versions, and which one it has does not depend on how long a publication takes."""
    given = {"validation__data_args": {"file_name": "val.jsonl"}, **changes} if "eval_steps" in changes else changes
    assert run(max_steps=7, **given).trainer.trained_on == [{version} for version in versions]


def test_a_checkpoint_is_completed_when_the_record_of_its_step_is_on_the_disk(run):
    events = run(max_steps=4).events
    for step in (2, 4):
        known = [name for name, number in events if number == step]
        assert known == ["taken", "written", "synced", "recorded"]
    assert [name for name, number in events if number in (1, 3)] == ["written", "written"]


@pytest.mark.parametrize(
    ("eval_steps", "sent", "validated"),
    [(3, [0, 3, 4, 6, 7], [0, 3, 6, 7]), (1, list(range(8)), list(range(8))), (0, [0, 4, 7], [])],
)
def test_what_is_validated_is_published_whatever_the_interval(run, eval_steps, sent, validated):
    done = run(
        max_steps=7,
        weight_update__interval_steps=4,
        eval_steps=eval_steps,
        validation={"data_args": {"file_name": "val.jsonl"}},
    )
    assert done.trainer.sent == sent and done.recorder.validated == validated
    told = {step for step, metrics in done.recorder.steps.items() if metrics.get("val/addition/accuracy") == 1.0}
    assert told == set(validated)


@pytest.mark.parametrize("mode", ["pause", "overlap"])
def test_no_group_begins_during_a_validation_that_pauses_the_rollout(run, mode):
    """Room for more comes twice while it runs: with the version, and with the training step that ends meanwhile."""
    done = run(
        max_steps=6,
        eval_steps=2,
        async_generation_ratio=1,
        max_staleness=2,
        validation={"mode": mode, "data_args": {"file_name": "val.jsonl"}},
    )
    begun = done.validator.begun_during
    assert sorted(begun) == [0, 2, 4, 6] and any(begun.values()) == (mode == "overlap")
    assert done.scheduler.ledger.consumed == 12 == done.scheduler.ledger.issued


VALIDATING = {"eval_steps": 1, "max_steps": 6, "max_staleness": 2}


@pytest.mark.parametrize(("mode", "ratio"), [("overlap", 1), ("pause", 2)])
def test_a_validation_that_needs_a_reward_model_on_the_devices_of_the_trainer_ends(run, mode, ratio):
    """The trainer holds these devices and waits for memory of a publication that waits for the validation."""

    def share(made):
        made.devices["rewards.judge"] = made.devices["actor_train"]

        async def measure(version):
            await asyncio.sleep(VALIDATION_SECONDS)
            async with made.locks["rewards.judge"].hold("rewards.judge"):
                await asyncio.sleep(1)

        made.validator.measure = measure

    settings = {"mode": mode, "data_args": {"file_name": "val.jsonl"}}
    done = run(share, async_generation_ratio=ratio, validation=settings, **VALIDATING)
    assert done.recorder.validated == list(range(7))


@pytest.mark.parametrize("dual_buffer", [True, False])
def test_a_replica_that_dies_during_a_validation_comes_back_with_the_version_that_is_measured(run, dual_buffer):
    def kill(made):
        single = {} if dual_buffer else {"in_place": False, "dual_buffer": False}
        local = made.local
        made.local = lambda: local(**single)

        async def measure(version):
            await asyncio.sleep(VALIDATION_SECONDS / 2)  # until the next step is trained
            if version == 2:
                for handle in made.engines.handles[:2]:
                    handle.kill()
            measured = await made.pool.generate(request(f"measured-{version}"))
            assert measured.versions.tolist() == [version] * 4

        made.validator.measure = measure

    settings = {"mode": "overlap", "data_args": {"file_name": "val.jsonl"}}
    done = run(kill, async_generation_ratio=1, validation=settings, **VALIDATING)
    assert done.pool.restarts == 2 and done.recorder.validated == list(range(7))


def test_a_trainer_that_waits_for_memory_of_a_publication_is_idle(run):
    settings = {"mode": "overlap", "data_args": {"file_name": "val.jsonl"}}
    done = run(async_generation_ratio=2, validation=settings, **VALIDATING)
    assert done.recorder.busy_seconds["actor_train"] == pytest.approx(6 * 10)


class Resident:
    """States that take three seconds to move."""

    def __init__(self) -> None:
        self.moves = 0

    async def load_states(self):
        await asyncio.sleep(3)
        self.moves += 1

    offload_states = load_states


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_roles_that_share_devices_hand_them_over_once_each_way_in_a_step(run, monkeypatch, ratio):
    residents = {"actor_train": Resident(), "reference": Resident(), "critic": Resident()}

    def colocate(made):
        monkeypatch.setattr(derived, "present_roles", lambda config: dict.fromkeys(made.devices, config.actor_train))
        made.devices = dict.fromkeys(["actor_infer", *residents], [0])
        made.colocated = residents

    steps = 8
    done = run(colocate, async_generation_ratio=ratio, max_steps=steps)
    for role, resident in residents.items():
        assert 2 * steps - 1 <= resident.moves <= 2 * steps + 2, role
    for handle in done.engines.handles:
        assert Counter(handle.engine.moves) == {"sleep": steps + 1, "wake": steps + 1}


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("interval", [1, 3])
def test_an_engine_on_the_devices_of_the_trainer_drops_weights_that_are_replaced_and_loads_each_version_once(
    run, monkeypatch, ratio, interval
):
    dropped: Counter[str] = Counter()

    def colocate(made):
        made.devices = dict.fromkeys(["actor_infer", "actor_train"], [0])
        made.colocated = {"actor_train": Resident()}
        made.local = lambda **settings: LocalPool(monkeypatch, replicas=2, discards=True, **settings)
        sleep, send = ScriptedEngine.sleep, made.trainer.send

        async def slow_send(version):
            await asyncio.sleep(20)  # so that the engine would have the devices before, and generate
            return await send(version)

        made.trainer.send = slow_send

        async def counted(engine, discard=False):
            dropped[engine] += discard
            return await sleep(engine, discard)

        monkeypatch.setattr(ScriptedEngine, "sleep", counted)

    steps = 9
    done = run(colocate, async_generation_ratio=ratio, max_steps=steps, weight_update__interval_steps=interval)
    for handle in done.engines.handles:
        assert handle.calls["load_weights"] == 1 + steps // interval
        # It may sleep already when the trainer asks for the memory of a version.
        assert steps // interval - 1 <= dropped[handle.engine] <= steps // interval


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_critic_and_the_policy_learn_at_the_same_time(run, monkeypatch, ratio):
    def apart(made):
        monkeypatch.setattr(derived, "present_roles", lambda config: dict.fromkeys(made.devices, config.actor_train))
        made.devices["critic"] = [2]
        made.colocated = {"critic": Resident()}
        made.seconds = {"value": 4, "advantage": 1, "critic": 12}  # and the policy 10, a response 4, a load 2

    done = run(apart, async_generation_ratio=ratio, max_steps=10, rollout_batch_size=1)
    ends = done.recorder.ends
    seconds = (ends[10] - ends[4]) / 6
    # At ratio 0 one after the other: response, value, advantage, the slower of critic and policy with its update.
    assert seconds <= 1.1 * ((4 + 4 + 1 + 12) if ratio == 0 else (4 + 12))
