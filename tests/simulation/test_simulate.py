"""Simulated runs: repeatable, within the bound, with a closed ledger; and `roll simulate`."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tiny import tiny_config

from roll.cli.main import main
from roll.configs import derived
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree, dump_config, load_config
from roll.rollout.clock import VirtualTimeLoop, run_virtual
from roll.simulation.calibration import NEEDED, calibrated
from roll.simulation.costs import Tokens, costs_of, engine_costs, shape_of
from roll.simulation.engines import Host
from roll.simulation.fit import busy_seconds
from roll.simulation.inputs import SPREADS, Inputs, drawn_factors, dump_inputs, read_inputs, varied
from roll.simulation.prediction import interval, predict, report
from roll.simulation.run import _Driver, simulate
from roll.simulation.workload import groups, response_lengths
from tests.simulation.test_prediction import random_settings

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "qwen2.5-7B-rlvr_fsdp2" / "rlvr_config.yaml")
LAKE = Path(__file__).parents[2] / "examples" / "frozen_lake-tiny-cpu" / "agentic.yaml"
GPUS = {
    "pretrain": "Qwen/Qwen2.5-7B",
    "cluster": {"device": "cuda", "num_devices_per_node": 4},
    "rollout_batch_size": 8,
    "response_length": 2048,
    "prompt_length": 512,
    "actor_train__device_mapping": "0-1",
    "actor_infer__device_mapping": "2-3",
    "actor_infer__model_args": {"dtype": "bfloat16"},
    "actor_infer__strategy_args": {"strategy_name": "vllm"},
}


def gpus(folder, **changes):
    return config_from_tree(tiny_config(folder, **{**GPUS, **changes}))


@pytest.mark.parametrize("seed", range(100, 106))
def test_a_seed_gives_the_same_events_within_the_bound_and_the_ledger(tmp_path, seed):
    changes, inputs, _ = random_settings(seed)
    config = config_from_tree(tiny_config(tmp_path, **changes))
    first, again = (simulate(config, inputs, seed=seed) for _ in range(2))
    assert first == again
    assert first != simulate(config, inputs, seed=seed + 1)
    assert max(first.lags) <= derived.resolved_max_staleness(config)
    assert sum(first.lags.values()) == pytest.approx(1)
    ledger = first.ledger
    assert ledger["issued"] == sum(number for name, number in ledger.items() if name != "issued")
    assert ledger["consumed"] == len(first.step_ends) * config.rollout_batch_size


def test_responses_of_a_group_are_judged_once_all_have_ended(tmp_path):
    config = gpus(tmp_path, async_generation_ratio=0, rollout_batch_size=1)

    def seconds(of_response):
        rewards = replace(Inputs().rewards, seconds=of_response, sigma=0.0, workers=1)
        return simulate(config, replace(Inputs(), rewards=rewards)).step_seconds

    size = config.num_return_sequences_in_group
    assert seconds(5.0) - seconds(0.0) == pytest.approx(5.0 * size, rel=0.01)


def test_on_policy_nothing_overlaps_but_what_streams_and_a_step_ahead_everything_does(tmp_path):
    def outcome(ratio, streams):
        return simulate(gpus(tmp_path, async_generation_ratio=ratio, actor_train__stream_groups=streams), Inputs())

    plain, streamed, ahead = outcome(0, False), outcome(0, True), outcome(1, False)
    assert plain.lags == streamed.lags == {0: 1.0} and ahead.lags[1] > 0.5
    assert plain.idle["actor_infer"] + plain.idle["actor_train"] >= 1.0
    assert ahead.step_seconds < streamed.step_seconds < plain.step_seconds


def test_roles_on_the_same_devices_take_turns_and_move_their_states(tmp_path):
    shared = {"actor_train__device_mapping": "0-3", "actor_infer__device_mapping": "0-3"}
    moved = simulate(gpus(tmp_path, **shared), read_inputs(None, ["weight_update.exchange_seconds=10"]))
    free = simulate(gpus(tmp_path, **shared), read_inputs(None, ["weight_update.exchange_seconds=0"]))
    assert moved.idle["actor_infer"] + moved.idle["actor_train"] >= 1.0
    # Each role leaves and comes back once in a step.
    assert moved.step_seconds - free.step_seconds == pytest.approx(40, abs=1)
    usual, slow = (
        simulate(gpus(tmp_path, **shared), read_inputs(None, [f"weight_update.exchange_bandwidth={speed}"]))
        for speed in (2e10, 2e9)
    )
    assert usual.step_seconds > free.step_seconds
    assert slow.step_seconds - free.step_seconds == pytest.approx(
        10 * (usual.step_seconds - free.step_seconds), rel=0.05
    )


def test_an_episode_waits_for_its_environment_after_each_turn():
    config = load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B"])
    alike = ["environments.turns=5", "environments.sigma=0", "trainer.token_seconds=0"]
    quick, slow = (read_inputs(None, [f"environments.seconds={seconds}", *alike]) for seconds in (0, 20))
    assert simulate(config, slow).step_seconds > simulate(config, quick).step_seconds
    on_policy = replace(config, async_generation_ratio=0.0)
    assert simulate(on_policy, slow).step_seconds >= 5 * 20


def test_an_environment_worker_does_one_turn_after_another_and_occupies_a_core():
    config = replace(load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B"]), async_generation_ratio=0.0)
    turns = 5 * config.rollout_batch_size * derived.group_size(config)
    alike = ["environments.turns=5", "environments.seconds=0", "environments.sigma=0", "host.slowdown=0"]

    def step(cpu_seconds, workers, *overrides):
        own = replace(config, env_workers=replace(config.env_workers, num_workers=workers))
        inputs = read_inputs(None, [*alike, f"environments.cpu_seconds={cpu_seconds}", *overrides])
        return simulate(own, inputs).step_seconds

    none = step(0, 1, "host.cores=64")
    one, four = (step(0.5, workers, "host.cores=64") for workers in (1, 4))
    assert turns * 0.5 <= one <= turns * 0.5 + none
    assert turns * 0.5 / 4 <= four <= turns * 0.5 / 4 + none
    assert step(0.5, 4, "host.cores=1") >= turns * 0.5, "the processes share one core"
    within = step(0.5, 1, "host.cores=64", "environments.seconds=0.4")
    assert within == pytest.approx(one, rel=0.01), "the environment's own time is a part of the processor's"
    slow = ["host.cores=64", "environments.seconds=1000", "engine.scale=0.001"]
    alone, beyond = (step(seconds, 1, *slow) for seconds in (0, 0.5))
    assert beyond >= alone + 0.9 * turns / 5 * 0.5, "the time of an environment begins when its worker has come to it"


def test_each_turn_waits_for_messages_and_takes_its_share_of_the_driver():
    config = replace(load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B"]), async_generation_ratio=0.0)
    samples = config.rollout_batch_size * derived.group_size(config)
    alike = ["environments.turns=5", "environments.seconds=0", "host.slowdown=0"]
    none = simulate(config, read_inputs(None, alike)).step_seconds
    waits = simulate(config, read_inputs(None, [*alike, "driver.turn_seconds=20"])).step_seconds
    assert waits == pytest.approx(none + 5 * 20, rel=0.02), "episodes wait side by side"
    works = simulate(config, read_inputs(None, [*alike, "driver.sample_seconds=2"])).step_seconds
    assert works >= samples * 2, "one after the other"
    assert works <= samples * 2 + none


def test_what_comes_while_the_driver_works_is_passed_on_together():
    config = replace(load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B"]), async_generation_ratio=0.0)
    samples = config.rollout_batch_size * derived.group_size(config)
    alike = ["environments.turns=5", "environments.turns_sigma=0", "environments.seconds=0", "lengths.sigma=0",
             "lengths.median=5", "engine.step_seconds=20", "trainer.scale=0.001"]  # fmt: skip
    none = simulate(config, read_inputs(None, alike)).step_seconds
    assert none == pytest.approx(5 * 20, rel=0.05), "a decoding step for each turn of all episodes"
    works = simulate(config, read_inputs(None, [*alike, "driver.sample_seconds=1"])).step_seconds
    assert works == pytest.approx(none + samples * 1, rel=0.01), "turn by turn, driver and engine wait for each other"


def test_the_driver_leaves_out_cancelled_work_and_then_leaves_its_core():
    async def ends() -> tuple[float, float]:
        loop = cast(VirtualTimeLoop, asyncio.get_running_loop())
        host = Host(1, loop)
        driver = _Driver(host)
        first = asyncio.ensure_future(driver.work(3))
        await asyncio.sleep(1)
        cancelled, second = (asyncio.ensure_future(driver.work(seconds)) for seconds in (50, 2))
        await asyncio.sleep(1)
        cancelled.cancel()
        await asyncio.gather(first, second)
        done = loop.time()
        only = asyncio.ensure_future(driver.work(50))
        await asyncio.sleep(0)
        only.cancel()
        await host.work(4, 1)
        return done, loop.time() - done

    assert run_virtual(ends()) == pytest.approx((3 + 2, 4))


def test_longer_episodes_have_more_turns_up_to_the_limit():
    config = load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B", "response_length=32", "sequence_length=52"])
    inputs = read_inputs(None, ["environments.turns=4", "environments.turns_sigma=0.5", "lengths.median=60"])
    works = list(islice(groups(config, inputs, seed=1), 256))
    lengths = [length for work in works for length in work.responses]
    turns = [len(each) for work in works for each in work.latencies]
    assert np.corrcoef(np.log(lengths), np.log(turns))[0, 1] > 0.9
    assert np.median(turns) == 4 and max(turns) == 12 and np.log(turns).std() == pytest.approx(0.5, abs=0.05)
    alike = next(groups(config, replace(inputs, environments=replace(inputs.environments, turns_sigma=0.0)), seed=1))
    assert {len(each) for each in alike.latencies} == {4}


def test_lengths_have_the_median_the_correlation_and_the_limit_that_they_are_given():
    random = np.random.default_rng(0)
    given = Inputs().lengths
    drawn = np.log(response_lengths(replace(given, median=200, correlation=0.7), 10**9, (4000, 8), random))
    assert math.exp(np.median(drawn)) == pytest.approx(200, rel=0.05)
    assert drawn.std() == pytest.approx(0.8, rel=0.05)
    assert drawn.mean(axis=1).var() / drawn.var() == pytest.approx(0.7 + 0.3 / 8, rel=0.05)
    cut = response_lengths(given, 64, (500, 8), random)
    assert cut.max() == 64 and cut.min() >= 1
    table = response_lengths(replace(given, quantiles=[10, 20, 40]), 10**9, (4000, 8), random)
    assert np.quantile(table, [0.25, 0.5, 0.75]) == pytest.approx([15, 20, 30], rel=0.05)


def test_an_interval_narrows_with_what_is_known(tmp_path):
    config = gpus(tmp_path)
    unknown = predict(config, Inputs(), draws=6, steps=2)
    assert unknown.low < unknown.outcome.step_seconds < unknown.high
    known = read_inputs(None, ["engine.scale=1.01", "trainer.scale=1.01", "lengths.median=512.1", "lengths.sigma=0.81"])
    told = predict(config, known, draws=6, steps=2)
    assert told.high / told.low < unknown.high / unknown.low


def test_a_further_draw_lies_in_four_of_five_intervals():
    random = np.random.default_rng(0)
    drawn = np.exp(0.6 * random.standard_normal((2000, 17)))
    held = [low <= last <= high for *draws, last in drawn.tolist() for low, high in [interval(1.0, draws)]]
    assert np.mean(held) == pytest.approx(0.8, abs=0.025)
    assert interval(5.0, [1.0, 2.0, 3.0, 4.0]) == (1.0, 5.0)
    assert interval(2.0, []) == (2.0, 2.0)


def test_stages_of_a_pipeline_wait_while_it_fills_and_drains(tmp_path):
    def seconds(tensor, pipeline, samples):
        strategy = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        config = gpus(
            tmp_path,
            rollout_batch_size=16,
            cluster={"device": "cuda", "num_devices_per_node": 10},
            actor_train={"device_mapping": "0-7", "use_dynamic_batching_in_train": False,
                         "strategy_args": {"strategy_name": "megatron_train", "strategy_config": strategy}},
            actor_infer__device_mapping="8-9",
        )  # fmt: skip
        return costs_of(config, Inputs()).train(Tokens([1000.0] * samples))

    micro_batches = 64 / 2  # of one sample, for each of 2 data-parallel ranks
    assert seconds(1, 4, 64) / seconds(4, 1, 64) == pytest.approx(1 + 3 / micro_batches)
    # A single sequence passes through one stage after another.
    assert seconds(1, 4, 1) / seconds(4, 1, 1) == pytest.approx(4)


def test_tokens_travel_to_their_experts_and_back_over_the_links_of_the_device(tmp_path):
    def seconds(device, experts, node=8, role="train", **sizes):
        strategy = {"expert_model_parallel_size": experts, **sizes}
        config = gpus(
            tmp_path,
            pretrain="Qwen/Qwen3-30B-A3B",
            cluster={"device": "cuda", "num_devices_per_node": node},
            actor_train={"device_mapping": "0-15", "model_args": {"dtype": "bfloat16"},
                         "strategy_args": {"strategy_name": "megatron_train", "strategy_config": strategy}},
            actor_infer={"device_mapping": "16-17", "num_gpus_per_engine": 2},
        )  # fmt: skip
        costs = costs_of(config, read_inputs(None, [f"device={device}", "trainer.link_efficiency=0.5"]))
        return (costs.train if role == "train" else costs.forward["actor_train"])(Tokens([1e3] * 1600))

    def exchanged(*words, **sizes):
        return seconds(*words, **sizes) - seconds(words[0], 1, **sizes)

    # Of 100,000 tokens a rank: 48 layers, 8 experts of 2,048 elements of 2 bytes, there and back, forward and backward.
    sent = 1e5 * 48 * 8 * 2048 * 2 * 2 * 2
    assert exchanged("H100", 8) == pytest.approx(sent * 7 / 8 / (0.5 * 450e9))
    assert exchanged("H100", 16) == pytest.approx(sent * 8 / 16 / (0.5 * 50e9))
    assert exchanged("GB200", 16, node=4) == pytest.approx(sent * 15 / 16 / (0.5 * 900e9))
    assert exchanged("H100", 8, role="forward") == pytest.approx(exchanged("H100", 8) / 2)
    # Two ranks that split an expert are no other place.
    assert exchanged("H100", 8, expert_tensor_parallel_size=2) == pytest.approx(sent * 8 / 16 / (0.5 * 50e9))


def test_ranks_that_split_rows_exchange_them_in_every_layer(tmp_path):
    def seconds(ranks, role="train"):
        config = gpus(
            tmp_path,
            pretrain="Qwen/Qwen2.5-7B",
            cluster={"device": "cuda", "num_devices_per_node": 8},
            actor_train={"device_mapping": "0-15", "model_args": {"dtype": "bfloat16"},
                         "strategy_args": {"strategy_name": "fsdp2_train",
                                           "strategy_config": {"context_parallel_size": ranks}}},
            actor_infer__device_mapping="16-17",
        )  # fmt: skip
        costs = costs_of(config, read_inputs(None, ["device=H100", "trainer.link_efficiency=0.5"]))
        return (costs.train if role == "train" else costs.forward["actor_train"])(Tokens([1e3] * 1600))

    # Of 100,000 tokens a rank: 28 layers, queries and results of 3,584 elements, keys and values of 512, of 2 bytes.
    sent = 1e5 * 28 * 2 * (3584 + 512) * 2
    assert seconds(4, "forward") - seconds(1, "forward") == pytest.approx(sent * 3 / 4 / (0.5 * 450e9))
    assert seconds(4) - seconds(1) == pytest.approx(2 * sent * 3 / 4 / (0.5 * 450e9))


def test_a_replica_on_several_nodes_waits_for_their_network(tmp_path):
    def step(node, *inputs):
        config = gpus(
            tmp_path,
            cluster={"device": "cuda", "num_devices_per_node": node},
            actor_infer={"device_mapping": "16-31", "num_gpus_per_engine": 16, "model_args": {"dtype": "bfloat16"},
                         "strategy_args": {"strategy_name": "vllm"}},
            actor_train__device_mapping="0-15",
        )  # fmt: skip
        return costs_of(config, read_inputs(None, inputs)).engine.step[1]

    sums = 2 * 28
    assert step(8) - step(16) == pytest.approx(sums * 2 * 8.5e-6)
    assert step(4, "engine.network_seconds=1e-5") - step(16) == pytest.approx(sums * 4 * 1e-5)
    assert step(4, "device=GB200") == step(16, "device=GB200")


def written_run(folder, config, inputs, recorded=lambda outcome: {}):
    """Write the files of a run that took what a simulation says. ``recorded`` makes further metrics of its outcome."""
    outcome = simulate(config, inputs)
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    step, tokens = outcome.step_seconds, outcome.tokens * outcome.step_seconds
    record = {
        **{f"idle/{role}": share for role, share in outcome.idle.items()},
        "time/step": step,
        "response/tokens": tokens,
        "tokens_per_second/actor_train": (tokens + outcome.samples * inputs.lengths.prompt) / step,
        "weights/gather_seconds": inputs.weight_update.gather_seconds,
        "weights/send_seconds": inputs.weight_update.send_seconds,
        "weights/load_seconds": 2 * inputs.weight_update.load_seconds,
        **recorded(outcome),
    }
    lines = [json.dumps({"step": number, **record}) for number in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    lengths = response_lengths(inputs.lengths, 2048, (1000, 4), np.random.default_rng(1)).ravel().tolist()
    samples = [
        {"split": "train", "tokens": {"versions": [[int(length), 0]], "left_out": 0}} for length in lengths
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    return outcome


def test_a_calibration_finds_the_speeds_of_the_run(tmp_path):
    truth = read_inputs(None, [
        "engine.scale=1.7", "trainer.scale=0.6", "trainer.step_seconds=0", "trainer.optimizer_seconds=0",
        "lengths.median=300", "lengths.prompt=200", "weight_update.gather_seconds=1", "weight_update.send_seconds=2",
        "weight_update.load_seconds=1", "rewards.seconds=0.05",
    ])  # fmt: skip
    config = gpus(tmp_path, async_generation_ratio=0)
    taken = written_run(tmp_path / "run", config, truth)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "time/step": null}\n{"step": 10, "time/st')
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write('{"split": "tr')
    found, notes = calibrated(config, Inputs(), [tmp_path / "run"])
    assert found.weight_update.load_seconds == pytest.approx(1) and found.lengths.prompt == pytest.approx(200, rel=0.01)
    assert found.engine.scale == pytest.approx(1.7, rel=0.1)
    assert "measured" in found.known() and "fitted" in found.known() and "simulated with these inputs" in notes[0]
    assert simulate(config, found).step_seconds == pytest.approx(taken.step_seconds, rel=0.1)
    other = gpus(tmp_path, async_generation_ratio=2)
    assert simulate(other, found).step_seconds == pytest.approx(simulate(other, truth).step_seconds, rel=0.1)
    told = read_inputs(None, ["trainer.token_seconds=1e-3", "lengths.median=300", "weight_update.send_bandwidth=7e9"])
    kept, notes = calibrated(config, told, [tmp_path / "run"], rounds=0)
    assert kept.trainer.token_seconds == 1e-3 and kept.lengths.median == 300 and not kept.lengths.quantiles
    assert kept.weight_update.send_seconds is None and kept.weight_update.load_seconds == pytest.approx(1)
    assert "not taken from a run: lengths.median, trainer.token_seconds, weight_update.send_bandwidth" in notes[0]
    again = tmp_path / "numbers.yaml"
    again.write_text(dump_inputs(found))
    assert read_inputs(str(again)) == found
    with pytest.raises(ConfigError, match="calibrate on a run of the same model"):
        calibrated(replace(config, pretrain="Qwen/Qwen2.5-3B"), Inputs(), [tmp_path / "run"])
    with pytest.raises(ConfigError, match="calibrate on a run on the same kind of device"):
        calibrated(replace(config, cluster=replace(config.cluster, device="cpu")), Inputs(), [tmp_path / "run"])
    wide = replace(config, actor_infer=replace(config.actor_infer, num_gpus_per_engine=2))
    _, notes = calibrated(wide, Inputs(), [tmp_path / "run"], rounds=0)
    assert "had actor_infer.num_gpus_per_engine 1, not 2" in notes[0]
    with pytest.raises(ConfigError, match="there is no run in this folder"):
        calibrated(config, Inputs(), [tmp_path])


def test_recorded_parts_of_a_step_tell_fixed_times_from_those_that_grow_with_tokens(tmp_path):
    truth = read_inputs(None, [
        "trainer.step_seconds=1.5", "trainer.optimizer_seconds=4", "lengths.median=300", "lengths.prompt=200",
        "weight_update.gather_seconds=1", "weight_update.send_seconds=3", "weight_update.load_seconds=1",
    ])  # fmt: skip
    config = gpus(tmp_path, async_generation_ratio=0)

    def recorded(outcome):
        passes = busy_seconds(outcome, "actor_train") - 1 - 1.5 - 4
        parts = {"forward_backward": passes, "optimizer": 4.0}
        return {
            **{f"seconds/actor_train/{part}": seconds for part, seconds in parts.items()},
            "time/param_update": 3.0 + 2 * 1.0,  # one replica after the other
            "weights/send_seconds": 0.5,  # the calls around sending take the other 2.5 seconds
            "cpu_seconds/driver": 0.96,  # of 32 samples
            "time/rollout": 0.1,
            "time/advantage": 0.3,
        }

    written_run(tmp_path / "told", config, truth, recorded)
    found, _ = calibrated(config, Inputs(), [tmp_path / "told"])
    assert (
        found.trainer.optimizer_seconds == pytest.approx(4) and found.origin("trainer.optimizer_seconds") == "measured"
    )
    assert found.trainer.step_seconds == found.trainer.part_seconds == pytest.approx(1.5, rel=0.01)
    assert found.driver.part_seconds == pytest.approx(0.4)  # a part of the driver's 0.96 s
    assert found.driver.sample_seconds == pytest.approx((0.96 - 0.4) / 32)
    assert found.weight_update.send_seconds == pytest.approx(3)
    streams = gpus(tmp_path, async_generation_ratio=0, actor_train__stream_groups=True)
    written_run(tmp_path / "parts", streams, truth, lambda made: recorded(made) | {"micro_batches/actor_train": 5})
    of_parts, _ = calibrated(streams, Inputs(), [tmp_path / "parts"], rounds=0)
    assert of_parts.trainer.part_seconds == of_parts.trainer.step_seconds == pytest.approx(1.5 / 5, rel=0.01)
    assert of_parts.driver.part_seconds == Inputs().driver.part_seconds
    written_run(tmp_path / "untold", config, truth)
    guessed, _ = calibrated(config, Inputs(), [tmp_path / "untold"])
    fewer = gpus(tmp_path, async_generation_ratio=1, rollout_batch_size=config.rollout_batch_size // 4)
    wanted = simulate(fewer, truth).step_seconds
    assert simulate(fewer, found).step_seconds == pytest.approx(wanted, rel=0.03)
    assert simulate(fewer, guessed).step_seconds < 0.9 * wanted


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"idle/actor_train": None}, "no number in the others: idle/actor_train"),
        ({"response/tokens": "many", "time/step": True}, "no number in the others: time/step, response/tokens"),
        ("not JSON", "line 1: not a JSON object"),
    ],
)
def test_a_run_without_the_metrics_of_a_calibration_is_refused(tmp_path, change, told):
    (tmp_path / "config.yaml").write_text(dump_config(gpus(tmp_path)))
    whole = {name: 0.5 for name in NEEDED}
    lines = [change if change == "not JSON" else json.dumps({"step": step, **whole, **change}) for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    with pytest.raises(ConfigError, match=told):
        calibrated(gpus(tmp_path), Inputs(), [tmp_path])


def test_an_input_set_to_its_default_is_given_and_one_may_stand_for_another(tmp_path):
    def drawn(*overrides):
        return drawn_factors(read_inputs(None, list(overrides)), np.random.default_rng(0))

    told = read_inputs(None, ["engine.scale=1.0", "filtered_share=0.3"])
    assert told.known() == {"given": ["engine.scale=1", "filtered_share=0.3"]}
    assert not {"engine.scale", "filtered_share"} & drawn("engine.scale=1.0", "filtered_share=0.3").keys()
    assert "lengths.sigma" in drawn("lengths.median=300") and "trainer.scale" not in drawn("trainer.mfu=0.35")
    assert 1 < drawn("engine.bandwidth=0.7")["engine.scale"] ** (1 / 0.3) == pytest.approx(drawn()["engine.scale"])
    moved = "weight_update.exchange_bandwidth"
    assert moved not in drawn("weight_update.exchange_seconds=3")
    # What a calibration attributes to a whole step has the error of states that move in it.
    assert 1 != drawn("driver.step_seconds=0.1")[moved] ** 4 == pytest.approx(drawn()[moved])
    changed = varied(Inputs(), dict.fromkeys(SPREADS, 9.0), gpus(tmp_path))
    assert changed.lengths.correlation == changed.trainer.exponent == 1 and changed.filtered_share < 1
    assert changed.lengths.prompt == 9 * 256 and changed.lengths.median == 9 * 512


def test_lengths_of_the_command_line_replace_those_of_a_calibration(tmp_path):
    numbers = tmp_path / "numbers.yaml"
    numbers.write_text(
        "lengths: {quantiles: [1, 2], prompt: 3}\norigins: {lengths.quantiles: measured, lengths.prompt: fitted}"
    )
    told = read_inputs(str(numbers), ["lengths.median=9", "lengths.prompt=4"])
    assert told.known() == {"given": ["lengths.prompt=4", "lengths.median=9"]}


def test_an_engine_has_the_memory_of_its_option_and_copies_heads_that_are_fewer_than_its_gpus(tmp_path):
    def engine(gpus_of_it=1, **options):
        config = gpus(tmp_path, actor_infer__strategy_args={"strategy_name": "vllm", "strategy_config": options})
        config = replace(config, actor_infer=replace(config.actor_infer, num_gpus_per_engine=gpus_of_it))
        shape = shape_of(config, config.actor_train)
        return engine_costs(config, Inputs(), shape, Inputs().hardware("cuda"))

    half, most = engine(gpu_memory_utilization=0.5), engine(gpu_memory_utilization=0.9)
    assert (most.cache_tokens - half.cache_tokens) * 57_344 == pytest.approx(0.4 * 80e9)
    with pytest.raises(ConfigError, match="less than one sequence"):
        engine(gpu_memory_utilization=0.1)
    # 4 heads of keys: on 8 GPUs each has a whole one, and reads as much as on 4.
    assert engine(8).cached_token == pytest.approx(engine(4).cached_token) == pytest.approx(engine().cached_token / 4)


def test_the_command_prints_times_rates_and_what_they_rest_on(capsys):
    assert main(["simulate", EXAMPLE, "--draws", "2", "--price", "2", "simulation.lengths.median=500"]) == 0
    told = capsys.readouterr().out
    for words in ("a step", "samples/s", "idle", "lag", "waste", "device hours", "at 2 an hour", "H100"):
        assert words in told
    assert "given      lengths.median=500" in told and "default    every other input" in told


def test_a_sweep_is_a_table(capsys):
    assert main(["simulate", EXAMPLE, "--draws", "0", "--sweep", "ratio=0,1"]) == 0
    head, *rows, origin, left_out = capsys.readouterr().out.splitlines()
    assert origin.startswith("default ") and left_out == "left out   validations; checkpoints"
    assert head.split()[0] == "async_generation_ratio" and [row.split()[0] for row in rows] == ["0", "1"]
    steps = [float(row.split()[1]) for row in rows]
    assert steps[1] < steps[0]
    bars = [row.split()[-1] for row in rows]
    assert set("".join(bars)) == {"#"} and len(bars[1]) == 30
    assert len(bars[0]) == round(30 * steps[1] / steps[0])


def test_a_sweep_over_splits_and_ratios_has_all_their_combinations(capsys):
    small = ["simulate", EXAMPLE, "--draws", "0", "response_length=256", "rollout_batch_size=8"]
    assert main([*small, "--sweep", "split=2,6", "--sweep", "ratio=0,1"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[:5]
    assert head.startswith("split, async_generation_ratio ")
    assert [row.split()[:2] for row in rows] == [["2,", "0"], ["2,", "1"], ["6,", "0"], ["6,", "1"]]
    moved = ["actor_train.device_mapping=0-5", "actor_infer.device_mapping=6-7", "async_generation_ratio=0"]
    assert main([*small, *moved]) == 0
    assert f"a step     {rows[0].split()[2]} s" in capsys.readouterr().out
    assert main([*small, "--sweep", "split=auto"]) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()[1:8]] == list("1234567")


def test_the_configuration_of_another_system_is_simulated(tmp_path, capsys):
    theirs = tmp_path / "grpo.sh"
    theirs.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
        "data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8\n"
    )
    assert main(["simulate", str(theirs), "--from", "verl", "--draws", "0", "max_steps=36"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("from       verl: ") and "the run    36 steps" in told and "on 8 devices" in told
    # 64 prompts of 4 samples.
    step, rate = (float(re.search(rf"{name} +([0-9.]+) s", told)[1]) for name in ("a step", "rates"))
    assert step * rate == pytest.approx(256, rel=0.02)
    assert main(["simulate", EXAMPLE, "--from", "verl"]) == 2
    assert "has no key of verl" in capsys.readouterr().err


def test_the_page_of_a_simulated_run_has_its_lanes(tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ["--draws", "0", "async_generation_ratio=1", "simulation.lengths.median=99", "--html"]
    assert main(["simulate", EXAMPLE, *words, str(page)]) == 0
    told = capsys.readouterr().out
    data = json.loads(re.search(r'id="run-data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    lanes = {lane["name"]: lane for lane in data["timeline"]["lanes"]}
    assert {"actor_train/0", "actor_infer/0", "stage/train", "stage/param_update"} <= lanes.keys()
    assert data["state"]["status"] == "simulated" and data["name"].endswith("(simulated)")
    config = load_config(EXAMPLE, ["async_generation_ratio=1"])
    outcome = simulate(config, read_inputs(None, ["lengths.median=99"]))
    assert data["state"]["seconds"] == pytest.approx(outcome.step_ends[-1])
    assert [end / 1e3 for end in data["timeline"]["step_ends"]] == pytest.approx(outcome.step_ends, abs=1e-3)
    first, last = outcome.measured
    idle = data["metrics"]["series"]["idle/actor_train"]["values"][first + 1 : last + 1]
    seconds = data["metrics"]["series"]["time/step"]["values"][first + 1 : last + 1]
    assert np.average(idle, weights=seconds) == pytest.approx(outcome.idle["actor_train"], abs=0.01)
    assert data["log"] in told and "idle" in data["log"]
    nowhere = str(tmp_path / "nowhere" / "page.html")
    assert main(["simulate", EXAMPLE, *words, nowhere]) == 1
    assert capsys.readouterr().err == f"{nowhere}: cannot write: No such file or directory\n"
    assert main(["simulate", EXAMPLE, *words, str(page), "--sweep", "ratio=0,1"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_a_sweep_keeps_the_price_and_says_where_inputs_come_from(capsys, monkeypatch):
    monkeypatch.setattr("roll.cli.simulate.PROGRESS_SECONDS", 0.0)
    words = ["--draws", "3", "--sweep", "ratio=1", "--price", "2", "simulation.lengths.median=99"]
    assert main(["simulate", EXAMPLE, *words]) == 0
    told = capsys.readouterr()
    head, row, *origins = told.out.splitlines()
    config = load_config(EXAMPLE, ["async_generation_ratio=1"])
    step = simulate(config, read_inputs(None, ["lengths.median=99"])).step_seconds
    cost = 2 * step * config.max_steps * derived.total_devices(config) / 3600
    assert head.split()[-1] == "cost" and float(row.split()[-2].replace(",", "")) == pytest.approx(cost, abs=0.5)
    assert "interval" not in head
    assert "given      lengths.median=99" in origins
    assert "async_generation_ratio=1, simulation 1 of 1: 1 step of " in told.err


def test_what_adapters_save_is_named_as_left_out():
    file = Path(__file__).parents[2] / "examples" / "qwen2.5-7B-rlvr_lora" / "rlvr_config.yaml"
    config = load_config(file, [])
    nominal = predict(config, read_inputs(None, ["lengths.median=10"]), draws=0, steps=1)
    told = report(config, Inputs(), nominal)
    assert "adapters (LoRA)" in told and " as what is not known" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["simulation.engine.scal=2"], "simulation.engine.scal: unknown key"),
        (["simulation.trainer.mfu=2"], "simulation.trainer.mfu: 2.0 must be > 0 and <= 1"),
        (["simulation.device=H101"], "`H101` is no known device"),
        (["simulation.lengths.quantiles=[3,2]"], "rising quantiles"),
        (["pretrain=someone/model"], "the sizes of someone/model are not known"),
        (["simulation.device=H20", "pretrain=Qwen/Qwen2.5-72B"], "less than one sequence"),
        (["weight_update.mode=pull"], "not simulated yet"),
        (["--sweep", "ratio"], "write KEY=A,B"),
        (["--sweep", "split=9"], "the engine cannot have 9 devices"),
        (["--draws", "-1"], "-1 is no number of simulations"),
        (["--price", "-2"], "-2 is no price"),
        (["--seed", "-1"], "-1 is no seed"),
        (["simulation.lengths.median=3", "simulation.lengths.quantiles=[1,2]"], "leave one of them out"),
        (["--calibrate", "nowhere"], "there is no run in this folder"),
        (["async_generation_rati=1"], "did you mean `async_generation_ratio`?"),
    ],
)
def test_a_wrong_or_missing_input_is_named(capsys, words, told):
    assert main(["simulate", EXAMPLE, "--draws", "0", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.tier("soak")
def test_it_simulates_many_steps_a_second(tmp_path):
    """Against a plain loop of Python on the same machine: 50 steps a second were measured where it makes 2e7 turns."""
    config = gpus(
        tmp_path,
        cluster={"device": "cuda", "num_devices_per_node": 16},
        rollout_batch_size=64,
        num_return_sequences_in_group=16,
        response_length=8192,
        actor_train__device_mapping="0-7",
        actor_infer__device_mapping="8-15",
        async_generation_ratio=1,
    )
    simulate(config, Inputs(), steps=1)
    began = time.process_time()
    outcome = simulate(config, Inputs(), steps=40)
    seconds = time.process_time() - began
    began = time.process_time()
    number = 0
    while number < 2_000_000:
        number += 1
    turns = 2_000_000 / (time.process_time() - began)
    assert len(outcome.step_ends) / seconds > 25 * turns / 2e7
