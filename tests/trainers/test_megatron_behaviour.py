"""What `megatron_train` does at the edges, on one rank, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import ModelArguments
from roll.trainers.base import build_trainer
from tests.tiers import need
from tests.trainers.megatron_runs import OBJECTIVE, TRAINING, make_batch
from tests.trainers.moves import Moves, moments_of, on_a_gpu, place_of
from tests.trainers.nursery import on_ranks
from tests.trainers.trainers import ALMOST_SGD, trainer_setup

need("megatron.core")
pytestmark = pytest.mark.tier("all")


def start(folder: Path, model: str = "qwen2", strategy: str = "megatron_train", **changes):
    settings = {"training_args": ALMOST_SGD, "max_tokens": 25} | changes
    trainer = build_trainer(strategy, trainer_setup(str(folder / model), **settings))
    trainer.initialize()
    return trainer


def weights_of(trainer) -> dict[str, np.ndarray]:
    return {name: weight.clone().numpy() for name, weight in trainer.named_weights()}


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(value, second[name]) for name, value in first.items())


def infinite_gradients_are_skipped(folder: Path) -> None:
    trainer = start(folder)
    before = weights_of(trainer)
    batch = make_batch(0)
    batch.tokens["advantages"][np.flatnonzero(batch.tokens["response_mask"])[3]] = np.inf
    assert trainer.train_step(batch, OBJECTIVE, 1.0)["skipped_updates"] == 1.0
    assert same(before, weights_of(trainer))
    metrics = trainer.train_step(make_batch(1), OBJECTIVE, 1.0)
    assert metrics["skipped_updates"] == 0.0 and np.isfinite(metrics["grad_norm"])
    assert all(np.isfinite(value).all() for value in weights_of(trainer).values())
    trainer.shutdown()


def nothing_to_learn_moves_nothing(folder: Path) -> None:
    trainer = start(folder, training_args=TRAINING)
    trainer.train_step(make_batch(0), OBJECTIVE, 1.0)
    before = weights_of(trainer)
    batch = make_batch(1)
    batch.tokens["response_mask"][:] = False
    metrics = trainer.train_step(batch, OBJECTIVE, 1.0)
    assert metrics["grad_norm"] == 0.0 and metrics["loss"] == 0.0 and metrics["skipped_updates"] == 1.0
    assert same(before, weights_of(trainer))
    trainer.shutdown()


def the_loss_mask_leaves_tokens_out(folder: Path) -> None:
    batch = make_batch(0)
    batch.tokens["loss_mask"] = np.repeat(np.arange(len(batch)) % 2 == 0, batch.lengths)
    seen = []
    for strategy in ("megatron_train", "fsdp2_train"):
        trainer = start(folder, strategy=strategy)
        seen.append(trainer.train_step(batch, OBJECTIVE, 1.0))
        trainer.shutdown()
    assert seen[0]["trained_share"] == seen[1]["trained_share"] < 1.0
    assert seen[0] == pytest.approx(seen[1], rel=1e-4, abs=1e-6)


def gradients_are_clipped_only_where_asked(folder: Path) -> None:
    moved = {}
    for max_norm in (0.0, 0.01):
        trainer = start(folder, training_args=replace(ALMOST_SGD, max_grad_norm=max_norm))
        before = weights_of(trainer)
        norm = trainer.train_step(make_batch(0), OBJECTIVE, 1.0)["grad_norm"]
        after = weights_of(trainer)
        trainer.shutdown()
        moved[max_norm] = np.linalg.norm(np.concatenate([(after[name] - before[name]).ravel() for name in before]))
    assert norm > 0.1
    assert moved[0.01] == pytest.approx(ALMOST_SGD.learning_rate * 0.01, rel=0.01) and moved[0.0] > 10 * moved[0.01]


def the_learning_rate_follows_the_schedule(folder: Path) -> None:
    arguments = replace(TRAINING, learning_rate=1e-3, warmup_steps=2, lr_scheduler_type="linear")
    trainer = start(folder, training_args=arguments, total_optimizer_steps=4)
    rates = [trainer.train_step(make_batch(0), OBJECTIVE, 1.0)["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4, 0.0])
    trainer.shutdown()


def a_forward_only_role_computes_and_does_not_train(folder: Path) -> None:
    trainer = start(folder)
    expected = trainer.log_probs(make_batch(0), 1.0)
    trainer.shutdown()
    trainer = start(folder, forward_only=True)
    assert np.array_equal(trainer.log_probs(make_batch(0), 1.0), expected)
    with pytest.raises(RuntimeError, match="forward-only"):
        trainer.train_step(make_batch(0), OBJECTIVE, 1.0)
    trainer.load(str(folder / "qwen2"))
    trainer.shutdown()


def bfloat16_is_that_of_fsdp2_and_keeps_float32_weights(folder: Path) -> None:
    """Updates below what bfloat16 can represent add up: 12 steps of 1e-4 at weights of about 0.2."""
    arguments = replace(TRAINING, learning_rate=1e-4, adam_epsilon=1e-8, warmup_steps=0, weight_decay=0.0)
    settings = {"model_args": ModelArguments(dtype="bfloat16"), "training_args": arguments}

    def learn(strategy: str, options: dict[str, bool]) -> tuple[dict[str, float], float]:
        trainer = start(folder, "qwen3", strategy, strategy_config=options, **settings)
        first = trainer.train_step(make_batch(0), OBJECTIVE, 0.9)
        losses = [trainer.train_step(make_batch(0), PolicyObjective(8, "vanilla"), 0.9)["loss"] for _ in range(12)]
        trainer.shutdown()
        return first, losses[0] - losses[-1]

    expected, expected_fall = learn("fsdp2_train", {})
    assert expected_fall > 0.01
    for options in ({}, {"use_distributed_optimizer": False}):
        first, fall = learn("megatron_train", options)
        for name in ("loss", "grad_norm", "entropy"):
            assert first[name] == pytest.approx(expected[name], rel=2e-3)
        assert fall == pytest.approx(expected_fall, rel=0.2)


def other_models_and_broken_files_are_named(folder: Path) -> None:
    trainer = start(folder)
    with pytest.raises(ValueError, match="family is llama there, qwen2 here"):
        trainer.load(str(folder / "llama"))
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "qwen2" / "config.json").read_text())
    tensors = load_file(folder / "qwen2" / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj.weight is \(23, 32\) in the checkpoint, \(24, 32\)"):
        trainer.load(str(broken))
    del tensors[name]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match="lacks model.layers.3.mlp.up_proj.weight"):
        trainer.load(str(broken))
    trainer.shutdown()


def a_checkpoint_in_several_files_is_read(folder: Path) -> None:
    trainer = start(folder, "qwen3_moe")
    expected = weights_of(trainer)
    trainer.shutdown()
    shards = folder / "shards"
    shards.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (shards / file).write_text((folder / "qwen3_moe" / file).read_text())
    places = {}
    for number, name in enumerate(load_file(folder / "qwen3_moe" / "model.safetensors")):
        places[name] = f"model-{number % 3}.safetensors"
    for file in set(places.values()):
        tensors = load_file(folder / "qwen3_moe" / "model.safetensors")
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    trainer = start(folder, "shards")
    assert same(expected, weights_of(trainer))
    trainer.shutdown()


def _states(trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, those that the optimizer has beside them, and moments."""
    yield from trainer.chunks[0].named_parameters()
    optimizer = trainer.optimizer
    masters = (tensor for group in optimizer.param_groups for tensor in group["params"])
    yield from ((f"master {number}", tensor) for number, tensor in enumerate(masters))
    yield from moments_of(optimizer)


def states_leave_the_device_and_come_back(folder: Path) -> None:
    """Buffers are emptied, which happens on a CPU as well; the rest is sent."""
    for shares_out in (True, False):
        for dtype in ("float32", "bfloat16"):
            options = {"use_distributed_optimizer": shares_out}
            trainer = start(folder, model_args=ModelArguments(dtype=dtype), strategy_config=options)
            trainer.train_step(make_batch(0), OBJECTIVE, 1.0)
            expected = weights_of(trainer)
            states = dict(_states(trainer))
            places = {name: place_of(tensor) for name, tensor in states.items()}
            assert any(name.startswith("exp_avg of") for name in places)
            on_a_gpu(trainer)
            with Moves() as moves:
                trainer.offload_states()
            emptied = {name for name, tensor in states.items() if tensor.untyped_storage().size() == 0}
            assert moves.left_out("cpu", places) == emptied
            assert bool(emptied) == shares_out, "weights lie in one buffer where the optimizer is shared out"
            gradients = [buffer.grad_data for chunk in trainer.wrapped for buffer in chunk.buffers]
            assert gradients and all(buffer.untyped_storage().size() == 0 for buffer in gradients)
            with Moves() as moves:
                trainer.load_states()
            assert moves.left_out("cuda", places) == emptied
            trainer.device = torch.device("cpu")
            assert same(expected, weights_of(trainer))
            assert trainer.train_step(make_batch(1), OBJECTIVE, 1.0)["skipped_updates"] == 0.0
            trainer.shutdown()


BEHAVIOURS: tuple[Callable[[Path], None], ...] = (
    infinite_gradients_are_skipped,
    nothing_to_learn_moves_nothing,
    the_loss_mask_leaves_tokens_out,
    gradients_are_clipped_only_where_asked,
    the_learning_rate_follows_the_schedule,
    a_forward_only_role_computes_and_does_not_train,
    bfloat16_is_that_of_fsdp2_and_keeps_float32_weights,
    other_models_and_broken_files_are_named,
    a_checkpoint_in_several_files_is_read,
    states_leave_the_device_and_come_back,
)


def _hold(rank: int, port: int, behaviour: Callable[[Path], None], folder: Path) -> None:
    behaviour(folder)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_every_behaviour_holds(folder, behaviour):
    on_ranks(_hold, behaviour, folder, ranks=1, engine="megatron")
