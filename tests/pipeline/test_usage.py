"""How well devices are used: by hand, and in whole runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from tiny import tiny_config

from roll.check.hardware import peak_flops
from roll.check.memory_parts import find_shape
from roll.configs.roles import ActorInferConfig
from roll.pipeline.usage import CpuSeconds, EngineLoads, engine_memory, rates_per_device, trainer_usage
from roll.runtime.placement import WorkerPlace
from roll.runtime.usage import Usage, cpu_seconds, memory_in_use
from roll.runtime.workers import WorkerIdentity
from roll.trainers.worker import TrainWorker


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2450),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
        ("", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_the_name_its_driver_gives_it(name, tflops):
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_operations_are_those_of_matrix_products_and_of_half_the_pairs():
    shape = find_shape("Qwen/Qwen2.5-7B")
    layers = shape.layers * (shape.attention_parameters + 3 * shape.hidden * shape.intermediate)
    matrices = layers + shape.embedding_parameters  # the output layer; the embedding is only looked up
    lengths = np.array([100.0, 50.0])
    pairs = 4 * shape.layers * shape.queries * (lengths**2).sum() / 2
    found = shape.forward_operations(lengths.sum(), (lengths**2).sum())
    assert found == pytest.approx(2 * matrices * 150 + pairs, rel=1e-4)
    experts = find_shape("Qwen/Qwen3-30B-A3B")
    assert experts.active_parameters / 1e9 == pytest.approx(3.0, abs=0.1)


def test_utilisation_is_the_share_of_the_peak_of_all_ranks():
    ranks = [
        Usage(989e12, seconds, "NVIDIA H100 80GB HBM3", {"peak_gib": gib}) for seconds, gib in ((4, 1.5), (6, 2.5))
    ]
    assert trainer_usage("actor_train", ranks, None) == {
        "mfu/actor_train": 0.1,
        "memory/actor_train/peak_gib": 2.5,
        "seconds/actor_train/forward_backward": 5.0,
    }
    assert trainer_usage("critic", ranks, 989 / 2)["mfu/critic"] == pytest.approx(0.2)
    for unknown in (Usage(1e12, 1.0, "NVIDIA L4"), Usage(0.0, 1.0, "NVIDIA H100"), Usage(1e12, 0.0, "NVIDIA H100")):
        assert "mfu/actor_train" not in trainer_usage("actor_train", [unknown], None)


def test_times_of_a_trainer_are_means_over_its_ranks():
    ranks = [Usage(seconds=10, forward_seconds=2, optimizer_seconds=1, micro_batches=number) for number in (3, 4)]
    assert trainer_usage("critic", [*ranks, replace(ranks[0], seconds=13)], None) == {
        "seconds/critic/forward": 2.0,
        "seconds/critic/forward_backward": 8.0,
        "seconds/critic/optimizer": 1.0,
        "micro_batches/critic": 4.0,
    }
    assert trainer_usage("critic", [Usage()], None) == {}


class Trainer:
    """A strategy whose only call lasts until it is let go."""

    def __init__(self) -> None:
        self.used = Usage()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def train_part(self, batch, objective, temperature, *, completes):
        self.used.micro_batches += 3
        self.used.optimizer_seconds += 1e-9
        self.begun.set()
        self.goes_on.wait(10)
        return {}, None


def test_a_call_is_reported_whole_by_the_first_report_after_it():
    async def reports() -> list[Usage]:
        worker, trainer = (
            TrainWorker(WorkerIdentity("actor_train", 0, 1, WorkerPlace(0, "cpu", (0,), 1), None)),
            Trainer(),
        )
        worker._strategy = worker._trainer = trainer
        worker._used, worker._shape, worker._setup = Usage(), None, SimpleNamespace(trains_adapters=False)
        training = asyncio.create_task(worker.train_part(None, None, 1.0, completes=True))
        await asyncio.to_thread(trainer.begun.wait, 10)
        during = await worker.usage()
        trainer.goes_on.set()
        await training
        return [during, await worker.usage(), await worker.usage()]

    during, after, later = asyncio.run(reports())
    assert (during.micro_batches, during.optimizer_seconds, during.seconds) == (0, 0.0, 0.0)
    assert after.micro_batches == 3 and after.seconds > after.optimizer_seconds == 1e-9
    assert (later.micro_batches, later.seconds) == (0, 0.0)


def test_processor_seconds_are_those_since_the_last_look_also_where_a_process_was_replaced():
    used = CpuSeconds()

    def gained(driver, **engines):
        return used.metrics({"driver": {0: driver}, "actor_infer": engines})

    assert gained(5.0, one=1.0, two=2.0) == {}
    assert gained(5.5, one=1.5, two=4.0) == {"cpu_seconds/driver": 0.5, "cpu_seconds/actor_infer": 2.5}
    assert gained(5.5, one=2.0, another=3.0)["cpu_seconds/actor_infer"] == 3.5, "two died, another took its place"
    assert gained(5.5, one=2.5)["cpu_seconds/actor_infer"] == 0.5, "the other does not answer"
    assert gained(5.5, one=2.5, another=3.25)["cpu_seconds/actor_infer"] == 0.25
    assert gained(5.5, one=1.0, another=3.5)["cpu_seconds/actor_infer"] == 0.25, "one lost a descendant and its time"
    assert gained(5.5, one=1.5, another=3.5)["cpu_seconds/actor_infer"] == 0.5


def test_the_processor_time_of_a_process_includes_those_it_started():
    before = cpu_seconds()
    waited = "import time; began = time.process_time()\nwhile time.process_time() < began + 0.4: pass"
    subprocess.run([sys.executable, "-c", waited], check=True)
    assert cpu_seconds() - before >= 0.4
    child = subprocess.Popen([sys.executable, "-c", f"{waited}\nprint(flush=True); input()"], stdin=-1, stdout=-1)
    child.stdout.readline()
    assert cpu_seconds() - before >= 0.8
    child.communicate(b"\n")


def load(**totals):
    return {"name": totals.pop("name", "actor_infer/0"), "load": totals}


def test_loads_are_means_over_the_steps_since_the_last_look():
    loads = EngineLoads()
    seen = dict(steps=10, running=40, waiting=5, cache_use=2.5, prompt_tokens=100, shared_tokens=75, preemptions=1)
    first = loads.metrics([load(**seen)])
    assert first == {
        "engine/running": 4.0, "engine/waiting": 0.5, "engine/kv_cache_use": 0.25,
        "engine/prefix_hit_share": 0.75, "engine/preemptions": 1,
    }  # fmt: skip
    later = {name: total + {"steps": 2, "running": 16}.get(name, 0) for name, total in seen.items()}
    second = loads.metrics([load(**later), load(name="actor_infer/1", steps=2, running=4)])
    assert second == {"engine/running": 5.0, "engine/waiting": 0.0, "engine/kv_cache_use": 0.0, "engine/preemptions": 0}


def test_an_engine_that_was_replaced_begins_anew_and_one_that_tells_nothing_is_left_out():
    loads = EngineLoads()
    loads.metrics([load(steps=100, running=900)])
    assert loads.metrics([load(steps=4, running=4)]) == {"engine/running": 1.0}
    assert EngineLoads().metrics([{"name": "actor_infer/0"}]) == engine_memory("actor_infer", [{"name": "a"}]) == {}
    only = EngineLoads()
    assert only.metrics([load(prompt_tokens=8, shared_tokens=2)]) == {"engine/prefix_hit_share": 0.25}
    assert only.metrics([load(prompt_tokens=4, shared_tokens=4)]) == {"engine/prefix_hit_share": 1.0}


def test_rates_are_divided_by_the_devices_of_a_role():
    roles = {"actor_infer": ActorInferConfig(device_mapping=[0, 1, 2, 3])}
    rates = {"tokens_per_second/actor_infer": 100.0, "tokens_per_second/reference": 1.0, "idle/actor_infer": 0.5}
    assert rates_per_device(rates, roles) == {"tokens_per_second_per_device/actor_infer": 25.0}


def test_the_memory_of_this_process():
    taken = np.ones(8 << 20)
    assert taken.nbytes / 2**30 < memory_in_use()["peak_gib"] < 1000


def test_a_run_tells_how_its_devices_are_used(task):
    done = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, cluster__device_tflops=0.1))
    shape = find_shape(str(task / "model"))
    computed: list[float] = []
    busy = 0.0
    for step in done.metrics:
        trained = step["tokens_per_second/actor_train"] * step["time/step"]
        least = 3 * 2 * shape.active_parameters * trained / (0.1e12 * step["time/step"])
        assert least < step["mfu/actor_train"] < 1, "the operations of a step take less time than the step"
        assert step["tokens_per_second_per_device/actor_train"] == step["tokens_per_second/actor_train"]
        assert 0 < step["engine/running"] <= 64 and 0 < step["engine/kv_cache_use"] <= 1 and step["engine/waiting"] == 0
        computed += [step[f"seconds/actor_train/{part}"] for part in ("forward_backward", "optimizer")]
        busy += (1 - step["idle/actor_train"]) * step["time/step"]
        assert step["micro_batches/actor_train"] >= 1
        assert step["memory/actor_train/peak_gib"] > 0 < step["memory/actor_infer/peak_gib"]
    # A step is recorded while the next one goes on, so what belongs to one may be told with the other.
    assert min(computed) > 0 and sum(computed) <= busy
    shares = [step["engine/prefix_hit_share"] for step in done.metrics if "engine/prefix_hit_share" in step]
    assert 0 < sum(shares) < len(shares), "samples of a group share their prompt"


def test_without_a_known_peak_there_is_no_utilisation(task):
    done = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, max_steps=1))
    assert not [name for name in done.metrics[0] if name.startswith("mfu/")]
