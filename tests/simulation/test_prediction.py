"""What a simulation predicts, against the real stages, scheduler and pool with engines and trainers that only wait."""

from __future__ import annotations

import asyncio
from itertools import islice

import numpy as np
import pytest
from test_publication_schedule import Run, Trainer, publication, request

from roll.data.records import Group, Prompt, Sample
from roll.simulation.inputs import inputs_from_tree
from roll.simulation.run import MEASURED_STEPS, simulate
from roll.simulation.workload import groups


class WaitingTrainer(Trainer):
    """Takes a time for a step and for each token, and for gathering and sending."""

    def __init__(self, inputs) -> None:
        super().__init__()
        self.seconds = inputs.trainer, inputs.weight_update

    async def train(self, batch, objective, plan):
        costs, _ = self.seconds
        await asyncio.sleep(costs.step_seconds + costs.optimizer_seconds + costs.token_seconds * batch.lengths.sum())
        return {}

    async def train_part(self, batch, objective, plan, *, completes):
        costs, _ = self.seconds
        fixed = costs.step_seconds + costs.optimizer_seconds if completes else 0
        await asyncio.sleep(fixed + costs.token_seconds * batch.lengths.sum())
        return {}, None

    async def gather(self, version, buffer, dtype, bucket_bytes):
        await asyncio.sleep(self.seconds[1].gather_seconds)
        self._gathered.add(version)

    async def send(self, version):
        await asyncio.sleep(self.seconds[1].send_seconds)
        return publication(version)


class WaitingRun(Run):
    """A run of the groups that a simulation would draw."""

    def __init__(self, folder, monkeypatch, inputs, seed, replicas, **changes) -> None:
        super().__init__(folder, monkeypatch, **changes)
        local, update = self.local, self.config.weight_update
        self.local = lambda: local(
            replicas=replicas, in_flight=update.in_flight, max_unavailable=update.max_unavailable,
            dual_buffer=update.dual_buffer, in_place=update.dual_buffer,
        )  # fmt: skip
        self.trainer = WaitingTrainer(inputs)
        self.works = list(islice(groups(self.config, inputs, seed), 1000))

    async def rollout(self, asked) -> Group:
        work = self.works[asked.item]

        async def one(number, tokens, seconds):
            name = f"{asked.group_id}-{asked.attempt}-{number}"
            completion = await self.gate.generate(request(name, int(tokens)), min_version=asked.start_version)
            await asyncio.sleep(seconds[0])
            return completion

        made = await asyncio.gather(*map(one, range(100), work.responses, work.latencies))
        samples = []
        for number, completion in enumerate(made):
            tokens = np.concatenate([[7], completion.token_ids]).astype(np.int32)
            mask = np.arange(len(tokens)) > 0
            versions = np.concatenate([[-1], completion.versions]).astype(np.int32)
            score = float(number % 2) if work.kept else 0.0
            samples.append(Sample(tokens, mask, np.zeros(len(tokens), np.float32), versions, "stop", score=score))
        return Group(asked.group_id, Prompt("p", "addition", np.array([7], np.int32), "text"), samples)

    def chain(self):
        return [stage for stage in super().chain() if stage.name != "advantage"]


def random_settings(seed):
    """Settings of a run, and the inputs of its simulation."""
    random = np.random.default_rng(seed)
    ratio = float(random.choice([0, 0.5, 1, 1, 2]))
    replicas, interval = int(random.integers(1, 5)), int(random.choice([1, 1, 2]))
    changes = {
        "pretrain": "Qwen/Qwen2.5-0.5B",
        "cluster__num_devices_per_node": 1 + replicas,
        "actor_infer__device_mapping": f"1-{replicas}",
        "rollout_batch_size": int(random.choice([4, 8, 12])),
        "num_return_sequences_in_group": 4,
        "adv_estimator": "grpo",
        "response_length": 40,
        "prompt_length": 2,
        "async_generation_ratio": ratio,
        "group_filter": str(random.choice(["none", "zero_variance"])),
        "weight_update__interval_steps": interval,
        "weight_update__in_flight": str(random.choice(["keep", "resume", "drain"])),
        "weight_update__max_unavailable": float(random.choice([0.25, 0.5, 1.0])),
        "weight_update__dual_buffer": bool(random.random() < 0.7),
    }
    if ratio:
        changes["consumption"] = str(random.choice(["ready_first", "fifo"]))
    inputs = inputs_from_tree(
        {
            "lengths": {"median": float(random.uniform(5, 20)), "sigma": float(random.uniform(0, 1)), "prompt": 1},
            "engine": {"step_seconds": 1.0, "max_running": 1000, "prefill_token_seconds": 0.0},
            "trainer": {
                "step_seconds": float(random.uniform(0, 20)),
                "optimizer_seconds": 0.5,
                "token_seconds": float(random.uniform(0, 0.1)),
            },
            "weight_update": {
                "gather_seconds": float(random.uniform(0, 3)),
                "send_seconds": float(random.uniform(0, 3)),
                "fetch_seconds": 1.0,
                "load_seconds": 1.0,
            },
            "rewards": {"seconds": float(random.uniform(0, 5)), "sigma": 0.5},
            "driver": {"sample_seconds": 0},
            "host": {"cores": 1000},
        }
    )
    return changes, inputs, replicas


def tiers(seeds):
    """The first seed is quick, the next two are in all, the others are soaked."""
    marks = {0: [], 1: pytest.mark.tier("all"), 2: pytest.mark.tier("all")}
    return [pytest.param(seed, marks=marks.get(seed, pytest.mark.tier("soak"))) for seed in seeds]


@pytest.mark.parametrize("seed", tiers(range(12)))
def test_a_run_whose_engines_and_trainers_wait_takes_the_predicted_time(tmp_path, monkeypatch, seed):
    changes, inputs, replicas = random_settings(seed)
    run = WaitingRun(tmp_path, monkeypatch, inputs, seed, replicas, max_steps=20, **changes)
    predicted = simulate(run.config, inputs, seed=seed)
    first, last = predicted.measured
    recorder = run.run().recorder
    ends = recorder.ends
    start, end = ends[first + 1], ends[last + 1]
    measured = (end - start) / (last - first)
    assert predicted.step_seconds == pytest.approx(measured, rel=0.05), changes
    assert last - first == MEASURED_STEPS
    busy = sum(max(0.0, min(until, end) - max(since, start)) for since, until in recorder.spans["actor_train"])
    assert predicted.idle["actor_train"] == pytest.approx(1 - busy / (end - start), abs=0.03), changes
