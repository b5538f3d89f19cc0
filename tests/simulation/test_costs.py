"""The cost models against arithmetic by hand: a 7B model in bfloat16 on H100s, and a mixture of experts."""

from __future__ import annotations

import pytest

from roll.simulation.costs import Tokens, costs_of
from roll.simulation.inputs import read_inputs
from tests.simulation.test_simulate import gpus

WEIGHTS, EMBEDDING, CACHED = 7_615_616_512, 152_064 * 3584, 2 * 28 * 512 * 2
"""Of Qwen2.5-7B; the last are the bytes of keys and values of a token."""
READ, COMPUTED = 0.6 * 3.35e12, 0.4 * 989e12
"""Bytes and operations a second that an H100 reaches by default."""
LENGTH = 8192
ONE = Tokens([LENGTH])
BATCH = Tokens([LENGTH] * 64)


def costs(folder, *inputs, **changes):
    return costs_of(gpus(folder, **changes), read_inputs(None, inputs))


def test_a_step_of_one_request_reads_weights_and_one_of_many_computes(tmp_path):
    engine = costs(tmp_path).engine
    used = WEIGHTS - EMBEDDING  # the embedding is looked up, the output layer is another matrix
    assert engine.step[1] == pytest.approx(0.005 + 2 * used / READ, rel=1e-6)
    assert engine.step[256] == pytest.approx(0.005 + 2 * used * 256 / COMPUTED, rel=1e-6)
    assert 0.012 < engine.step[1] < engine.step[256] < 0.015
    assert engine.cached_token == pytest.approx(CACHED / READ)
    assert engine.prefill_token == pytest.approx(2 * used / COMPUTED, rel=1e-6)


def test_a_step_reads_the_experts_that_some_request_chooses(tmp_path):
    engine = costs(tmp_path, "engine.efficiency=1", pretrain="Qwen/Qwen3-30B-A3B").engine
    experts = 48 * 128 * 3 * 2048 * 768
    chosen = [1 - (1 - 8 / 128) ** requests for requests in (1, 64)]
    read = 2 * experts * (chosen[1] - chosen[0]) / READ
    assert engine.step[64] - engine.step[1] == pytest.approx(read, rel=1e-6)


def test_training_takes_three_forward_passes_and_the_longest_sequence_one_rank(tmp_path):
    made = costs(tmp_path)
    forward = 2 * (WEIGHTS - EMBEDDING) * LENGTH + 2 * 28 * 3584 * LENGTH**2
    assert made.train(BATCH) == pytest.approx(64 * 3 * forward / (COMPUTED * 2**0.95), rel=1e-6)
    assert made.train(ONE) == pytest.approx(3 * forward / COMPUTED, rel=1e-6)
    assert 0.9 < made.train(ONE) < 1.1
    assert made.forward["actor_train"](BATCH) == pytest.approx(made.train(BATCH) / 3)
    assert costs(tmp_path, ppo_epochs=2).train(BATCH) == pytest.approx(2 * made.train(BATCH))
    slower = costs(tmp_path, "trainer.mfu=0.1", "trainer.forward_mfu=0.2", "trainer.scale=2")
    assert slower.train(BATCH) == pytest.approx(8 * made.train(BATCH))
    assert slower.forward["actor_train"](BATCH) == pytest.approx(4 * made.forward["actor_train"](BATCH))


def test_each_optimizer_step_waits_for_its_longest_sequence(tmp_path):
    sizes = {"rollout_batch_size": 8, "num_return_sequences_in_group": 4, "actor_train__device_mapping": "0-3"}
    sizes |= {"actor_infer__device_mapping": "4-5", "cluster": {"device": "cuda", "num_devices_per_node": 8}}
    mini = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}  # 8 samples of 4 ranks
    once, often = costs(tmp_path, **sizes), costs(tmp_path, **sizes, actor_train__training_args=mini)
    assert (once.train_step, often.train_step) == (2 + 0.5, 2 + 4 * 0.5)
    all_in_one, one_in_each = (Tokens([LENGTH if at % n == 0 else 64 for at in range(32)]) for n in (8, 9))
    assert often.train(Tokens([LENGTH] * 32)) == pytest.approx(once.train(Tokens([LENGTH] * 32)))
    assert once.train(all_in_one) == once.train(one_in_each) == pytest.approx(once.train(ONE), rel=0.2)
    assert often.train(all_in_one) < 1.1 * once.train(all_in_one)
    assert often.train(one_in_each) == pytest.approx(4 * once.train(ONE), rel=0.02)


def test_an_update_moves_all_weights_and_shared_devices_move_states(tmp_path):
    made = costs(tmp_path)
    assert [made.gather, made.send, made.load] == pytest.approx(
        [2 * WEIGHTS / 2e10, 2 * WEIGHTS / 1e10, 2 * WEIGHTS / 2e10]
    )
    assert made.exchange["actor_train"] == pytest.approx(16 * WEIGHTS / 2 / 2e10)
    assert made.exchange["actor_infer"] == pytest.approx(2 * WEIGHTS / 2e10)
    of_two = costs(tmp_path, actor_infer__num_gpus_per_engine=2)
    assert of_two.load == pytest.approx(made.load / 2)
    two, none = (costs(tmp_path, f"trainer.optimizer_seconds={seconds}").train_step for seconds in (2, 0))
    assert none == 2.0 and two > none
