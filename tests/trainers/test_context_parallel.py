"""Rows that ranks split by position give the training of whole rows on one rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.configs.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.trainers.options import fsdp2_layout_problems
from tests.trainers.nursery import RankFailed
from tests.trainers.ranks import Job, run_here, run_job
from tests.trainers.test_packed_training import full_batch
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import ALMOST_SGD

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SPLIT = {"context_parallel_size": 2, "process_group_timeout_seconds": 60}
GENTLE = replace(ALMOST_SGD, learning_rate=0.05)
"""Larger steps let rounding grow beyond 1e-5 in later ones."""
CASES = {
    "padded": {"max_tokens": 25},
    "packed": {"max_tokens": 20, "packed": True},
    "eager": {"model_args": ModelArguments(attn_implementation="eager"), "max_tokens": 20, "packed": True},
    "checkpointing": {"strategy_config": {"gradient_checkpointing": True}},
    "two groups of two": {"max_tokens": 25, "packed": True, "ranks": 4},
    "adapters": {"model_args": ModelArguments(lora_target="q_proj,v_proj")},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **HEADS)


def train(trainer, _):
    """All that must not depend on how rows are split, by name: also with odd widths and less rows than ranks."""
    results = {"logprobs": trainer.log_probs(make_batch(), 0.7)}
    for step, batch in enumerate([make_batch(), make_batch(1), make_batch(7, lengths=(5,))]):
        metrics = trainer.train_step(batch, OBJECTIVE, 0.9)
        results |= {f"{step}/{name}": np.array(value) for name, value in metrics.items()}
    objective = PolicyObjective(8, "ppo", one_pass=True)
    for completes in (False, True):
        batch = make_batch(3 + completes)
        metrics, logprobs = trainer.train_part(batch, objective, 0.9, completes=completes)
        results |= {f"part/{name}": np.array(value) for name, value in metrics.items()}
        results[f"one pass/{completes}"] = logprobs
    return results | {f"weight/{name}": weight for name, weight in weights_of(trainer).items()}


def criticise(trainer, _):
    batch = full_batch()
    metrics = [trainer.train_step(batch, ValueObjective(8), 1.0)["loss"] for _ in range(3)]
    return {"loss": np.array(metrics), "values": trainer.values(batch)}


def assert_split_as_whole(work, path, ranks=2, **changes):
    options = changes.pop("strategy_config", {})
    whole = {"training_args": GENTLE, "strategy_config": options, **changes}
    (expected,) = run_here(Job(work, "fsdp2_train", path, setup=whole, ranks=1))
    found = run_job(Job(work, "fsdp2_train", path, setup=whole | {"strategy_config": options | SPLIT}, ranks=ranks))
    assert len(found) == ranks
    for results in found:
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.tier("all")
@pytest.mark.parametrize("case", CASES)
def test_split_rows_train_like_whole_ones(model_path, case, leave_process_group):
    leave_process_group()
    assert_split_as_whole(train, model_path, **CASES[case])


@pytest.mark.tier("all")
def test_a_critic_and_a_reference_are_split_as_well(model_path, leave_process_group):
    leave_process_group()
    assert_split_as_whole(criticise, model_path, kind="value")
    leave_process_group()
    assert_split_as_whole(lend, model_path, forward_only=True, packed=True)


def lend(reference, _):
    return {"logprobs": reference.log_probs(make_batch(), 1.0)}


@pytest.mark.tier("all")
def test_a_model_that_needs_whole_rows_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    path = write_model(tmp_path, rope_parameters=rope, **HEADS)
    with pytest.raises(RankFailed, match="positions depend on the longest"):
        run_job(Job(lend, "fsdp2_train", path, setup={"strategy_config": SPLIT, "forward_only": True}))


@pytest.mark.parametrize(
    ("size", "devices", "attention", "message"),
    [
        (2, [0, 1, 2], "sdpa", "does not divide the 3 ranks"),
        (4, [0, 1, 2, 3], "sdpa", "4 attention heads and 2 key/value heads"),
        (2, [0, 1], "flash_attention_2", "does not take split rows"),
        (2, [0, 1], "sdpa", None),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(model_path, size, devices, attention, message):
    role = WorkerConfig(
        device_mapping=devices,
        model_args=ModelArguments(attn_implementation=attention),
        strategy_args=StrategyArguments(strategy_config={"context_parallel_size": size}),
    )
    place = {"path": "actor_train", "kind": "policy", "forward_only": False, "device": "cpu"}
    problems = fsdp2_layout_problems(role, model_path, **place)
    assert [message in str(problem.message) for problem in problems] == ([True] if message else [])
