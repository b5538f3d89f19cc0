"""`fsdp2_train` against plain transformers and autograd, on one rank and on two real processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from roll.algorithms.objective import PolicyObjective
from roll.configs.errors import ConfigError
from roll.configs.roles import ModelArguments, TrainingArguments
from roll.configs.strategies import FORWARD_STRATEGIES, option_problems
from roll.trainers.base import build_trainer
from roll.trainers.fsdp2 import sharding_policies
from roll.trainers.model import save
from roll.trainers.options import Fsdp2Options
from roll.trainers.state import SavedState, UnfitState, write_state
from tests.trainers.moves import Moves, on_a_gpu, places_of_states
from tests.trainers.nursery import on_ranks
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import ALMOST_SGD, assert_close, trainer_setup


def build(model_path, **changes):
    trainer = build_trainer("fsdp2_train", trainer_setup(model_path, **{"training_args": ALMOST_SGD} | changes))
    trainer.initialize()
    return trainer


def plain_logits(model, batch):
    """Logits of each sample alone, without padding."""
    offsets = batch.offsets
    ids = torch.from_numpy(batch.tokens["token_ids"].astype(np.int64))
    return [model(input_ids=ids[None, start:end]).logits[0] for start, end in zip(offsets, offsets[1:], strict=False)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(leave_process_group):
    """Build trainers of one rank, one after the other."""

    def build_one(model_path, **changes):
        leave_process_group()
        return build(model_path, **changes)

    return build_one


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_plain_model_on_each_sample_alone(start, model_path, temperature):
    batch = make_batch()
    values = start(model_path, max_tokens=30).log_probs(batch, temperature)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    ids = batch.tokens["token_ids"]
    for row, logits in enumerate(plain_logits(model, batch)):
        begin, end = batch.offsets[row], batch.offsets[row + 1]
        table = (logits / temperature).log_softmax(-1)
        expected = [0.0] + [table[t - begin - 1, ids[t]].item() for t in range(begin + 1, end)]
        np.testing.assert_allclose(values[begin:end], expected, rtol=1e-5, atol=1e-5)
    assert values.dtype == np.float32 and values.shape == (len(ids),)


@pytest.mark.parametrize("tied", [True, False])
def test_one_step_is_the_update_that_plain_autograd_predicts(start, tmp_path, tied):
    path = write_model(tmp_path, tied)
    batch, temperature = make_batch(), 0.8
    trainer = start(path, max_tokens=20)
    metrics = trainer.train_step(batch, PolicyObjective(8, "vanilla", loss_agg_mode="token-mean"), temperature)

    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokens, offsets, loss, count = batch.tokens, batch.offsets, 0.0, 0
    for row, logits in enumerate(plain_logits(model, batch)):
        table = (logits / temperature).log_softmax(-1)
        for token in range(offsets[row] + 1, offsets[row + 1]):
            if tokens["response_mask"][token]:
                logprob = table[token - offsets[row] - 1, tokens["token_ids"][token]]
                loss, count = loss - float(tokens["advantages"][token]) * logprob, count + 1
    (loss / count).backward()
    assert metrics["loss"] == pytest.approx((loss / count).item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    updated = weights_of(trainer)
    assert updated.keys() == gradients.keys() and ("lm_head.weight" in updated) != tied
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        expected = parameter.detach() - ALMOST_SGD.learning_rate * gradient / (gradient.abs() + 1)
        np.testing.assert_allclose(updated[name], expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def two_steps(trainer):
    """Everything that must not depend on ranks and micro-batches, flat."""
    results = {f"logprob/{t}": trainer.log_probs(make_batch(), t) for t in (1.0, 0.5)}
    for step in range(2):
        metrics = trainer.train_step(make_batch(step), OBJECTIVE, 0.9)
        results |= {f"metric/{step}/{name}": np.array(value) for name, value in metrics.items()}
    # A batch smaller than the number of ranks: somebody has nothing to do.
    metrics = trainer.train_step(make_batch(7, lengths=(6,)), OBJECTIVE, 0.9)
    results |= {f"metric/one/{name}": np.array(value) for name, value in metrics.items()}
    return results | {f"weight/{name}": value for name, value in weights_of(trainer).items()}


@pytest.fixture(scope="module")
def reference_results(model_path):
    """Two steps on one rank in one micro-batch each."""
    trainer = build(model_path)
    results = two_steps(trainer)
    trainer.shutdown()
    return results


@pytest.mark.parametrize("limits", [{"max_tokens": 12}, {"max_tokens": 25}, {"max_tokens": None, "max_samples": 1},
                                    {"max_tokens": None, "max_samples": 3}])  # fmt: skip
def test_any_micro_batch_split_gives_the_same_training(start, model_path, reference_results, limits):
    assert_close(two_steps(start(model_path, **limits)), reference_results, rtol=2e-4, atol=2e-6)


def test_gradient_checkpointing_and_resharding_change_nothing(start, model_path, reference_results):
    options = {"gradient_checkpointing": True, "reshard_after_forward": False}
    assert_close(two_steps(start(model_path, strategy_config=options)), reference_results, rtol=2e-4, atol=2e-6)


def test_equal_runs_are_equal_to_the_bit(start, model_path):
    first = two_steps(start(model_path, max_tokens=25))
    second = two_steps(start(model_path, max_tokens=25))
    assert all(np.array_equal(second[name], value) for name, value in first.items())


def run_rank(rank, port, model_path, folder):
    """One of two ranks."""
    trainer = build(model_path, rank=rank, world_size=2, port=port, max_tokens=25)
    results = two_steps(trainer)
    save(trainer, f"{folder}/export")
    trained = trainer.log_probs(make_batch(), 1.0)
    trainer.load(model_path)
    results["reloaded"] = trainer.log_probs(make_batch(), 1.0)
    trainer.load(f"{folder}/export")
    assert np.array_equal(trainer.log_probs(make_batch(), 1.0), trained)
    trainer.shutdown()
    return results


@pytest.mark.tier("all")
def test_two_ranks_train_like_one(model_path, reference_results, tmp_path):
    by_rank = on_ranks(run_rank, model_path, str(tmp_path), ranks=2)
    for results in by_rank:
        assert np.array_equal(results.pop("reloaded"), results["logprob/1.0"])
        assert_close(results, reference_results, rtol=2e-4, atol=2e-6)
    assert all(np.array_equal(by_rank[1][name], value) for name, value in by_rank[0].items())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), by_rank[0][f"weight/{name}"])
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '{"made": "by the test"}'
    assert exported.config.architectures == ["Qwen2ForCausalLM"]


def bfloat16_step(rank, port, model_path, world_size):
    trainer = build(
        model_path, rank=rank, world_size=world_size, port=port, model_args=ModelArguments(dtype="bfloat16"),
        strategy_config={"gradient_checkpointing": True},
    )  # fmt: skip
    metrics = trainer.train_step(make_batch(), OBJECTIVE, 0.9)
    trainer.shutdown()
    return metrics


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.tier("all"))])
def test_bfloat16_with_checkpointing_trains_like_float32(
    model_path, reference_results, world_size, leave_process_group
):
    """Compared to the three significant digits that bfloat16 has."""
    leave_process_group()
    asked = (model_path, world_size)
    by_rank = [bfloat16_step(0, None, *asked)] if world_size == 1 else on_ranks(bfloat16_step, *asked, ranks=2)
    for metrics in by_rank:
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(reference_results[f"metric/0/{name}"], rel=0.03)


def test_named_weights_fill_a_fresh_model(start, model_path):
    trainer = start(model_path, max_tokens=25)
    trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    expected = trainer.log_probs(make_batch(), 1.0)
    fresh = Qwen2ForCausalLM(AutoModelForCausalLM.from_pretrained(model_path).config).eval()
    own = dict(fresh.named_parameters())
    weights = list(trainer.named_weights())
    assert sorted(name for name, _ in weights) == sorted(own)
    with torch.no_grad():
        for name, weight in weights:
            assert weight.dtype == torch.float32
            own[name].copy_(weight)
    batch = make_batch()
    for row, logits in enumerate(plain_logits(fresh, batch)):
        begin, end = batch.offsets[row], batch.offsets[row + 1]
        ids = torch.from_numpy(batch.tokens["token_ids"][begin + 1 : end].astype(np.int64))
        values = logits[:-1].log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        np.testing.assert_allclose(values.detach().numpy(), expected[begin + 1 : end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_return_the_same_weights(start, tmp_path, tied):
    path = write_model(tmp_path / "model", tied)
    trainer = start(path)
    trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    trained = weights_of(trainer)
    save(trainer, str(tmp_path / "export"))
    trainer.load(path)
    assert not np.array_equal(weights_of(trainer)["model.norm.weight"], trained["model.norm.weight"])
    trainer.load(str(tmp_path / "export"))
    assert all(np.array_equal(value, trained[name]) for name, value in weights_of(trainer).items())
    exported = start(str(tmp_path / "export"))
    assert all(np.array_equal(value, trained[name]) for name, value in weights_of(exported).items())


def test_weights_that_do_not_fit_are_named(start, model_path, tmp_path):
    trainer = start(model_path)
    with pytest.raises(ValueError, match="lm_head.weight"):
        trainer.load(write_model(tmp_path, tied=False))


def test_gradients_are_clipped_to_the_configured_norm(start, model_path):
    before = weights_of(start(model_path))
    trainer = start(model_path, training_args=replace(ALMOST_SGD, max_grad_norm=0.01))
    assert trainer.train_step(make_batch(), OBJECTIVE, 1.0)["grad_norm"] > 0.1
    moved = np.concatenate([(value - before[name]).ravel() for name, value in weights_of(trainer).items()])
    assert np.linalg.norm(moved) == pytest.approx(ALMOST_SGD.learning_rate * 0.01, rel=0.01)


def test_learning_rate_follows_the_schedule(start, model_path):
    training = TrainingArguments(learning_rate=1e-3, warmup_steps=2, lr_scheduler_type="linear")
    trainer = start(model_path, training_args=training, total_optimizer_steps=4)
    rates = [trainer.train_step(make_batch(), OBJECTIVE, 1.0)["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4, 0.0])


def test_a_fully_masked_batch_changes_nothing(start, model_path):
    trainer = start(model_path, max_tokens=20)
    trainer.train_step(make_batch(), OBJECTIVE, 1.0)  # The optimizer's momentum would go on without a gradient.
    before = weights_of(trainer)
    batch = make_batch()
    batch.tokens["response_mask"][:] = False
    metrics = trainer.train_step(batch, OBJECTIVE, 1.0)
    assert metrics["grad_norm"] == 0.0 and metrics["loss"] == 0.0 and metrics["skipped_updates"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(np.array_equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_only_tokens_of_the_loss_mask_are_trained_on_and_counted(start, model_path):
    """Leaving samples out is the same as not having them, whatever the micro-batches."""
    batch = make_batch()
    batch.tokens["loss_mask"] = np.repeat(np.arange(len(batch)) % 2 == 0, batch.lengths)
    trainer = start(model_path, max_tokens=20)
    left_out = trainer.train_step(batch, OBJECTIVE, 1.0)
    weights = weights_of(trainer)
    trainer = start(model_path)
    without = trainer.train_step(batch.select(range(0, len(batch), 2)), OBJECTIVE, 1.0)
    assert left_out["loss"] == pytest.approx(without["loss"], rel=1e-5)
    assert left_out["trained_share"] < without["trained_share"] == 1.0
    for name, value in weights_of(trainer).items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_skipped_and_said(start, model_path):
    trainer = start(model_path)
    before = weights_of(trainer)
    batch = make_batch()
    batch.tokens["advantages"][np.flatnonzero(batch.tokens["response_mask"])[3]] = np.inf
    assert trainer.train_step(batch, OBJECTIVE, 1.0)["skipped_updates"] == 1.0
    assert all(np.array_equal(value, before[name]) for name, value in weights_of(trainer).items())
    metrics = trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    assert metrics["skipped_updates"] == 0.0 and np.isfinite(metrics["grad_norm"])
    assert all(np.isfinite(value).all() for value in weights_of(trainer).values())


@pytest.mark.parametrize("pg_variant", ["vanilla", "ppo", "tis"])
def test_positive_advantages_raise_the_probability_of_the_tokens(start, model_path, pg_variant):
    trainer = start(model_path, training_args=TrainingArguments(learning_rate=1e-2))
    batch = make_batch()
    wanted = batch.tokens["response_mask"].copy()
    wanted[batch.offsets[:-1]] = False
    batch.tokens["behaviour_logprobs"] = first = trainer.log_probs(batch, 1.0)
    batch.tokens["advantages"] = np.ones_like(first)
    objective = PolicyObjective(8, pg_variant)
    for _ in range(5):
        metrics = trainer.train_step(batch, objective, 1.0)
    last = trainer.log_probs(batch, 1.0)
    assert last[wanted].mean() > first[wanted].mean() + 0.1
    assert metrics["ratio_mean"] > 1.0


@pytest.mark.parametrize("lora", [{}, {"lora_target": "q_proj", "lora_rank": 2}], ids=["all weights", "adapters"])
def test_all_states_leave_the_device_and_come_back(start, model_path, lora):
    trainer = start(model_path, model_args=ModelArguments(**lora))
    trained(trainer, [0])
    states = places_of_states(trainer)
    assert any(name.startswith("exp_avg of") for name in states)
    with Moves() as nothing:
        trainer.offload_states()
        trainer.load_states()
    assert not nothing.any(), "on a CPU nobody else waits for them"
    on_a_gpu(trainer)
    for move, place in ((trainer.offload_states, "cpu"), (trainer.load_states, "cuda")):
        with Moves() as moves:
            move()
        assert moves.left_out(place, states) == set()


def test_a_role_without_an_optimizer_moves_its_weights_and_states_kept_on_the_cpu_stay(start, model_path):
    trainer = start(model_path, forward_only=True)
    on_a_gpu(trainer)
    for move, place in ((trainer.offload_states, "cpu"), (trainer.load_states, "cuda")):
        with Moves() as moves:
            move()
        assert moves.left_out(place, places_of_states(trainer)) == set()
    trainer = start(model_path, strategy_config={"offload": "cpu"})
    on_a_gpu(trainer)
    with Moves() as moves:
        trainer.offload_states()
        trainer.load_states()
    assert not moves.any()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_states_are_kept_on_the_cpu_where_that_is_asked_for(device):
    setup = trainer_setup("/nowhere", device=device)
    assert "offload_policy" not in sharding_policies(setup, Fsdp2Options())
    policy = sharding_policies(setup, Fsdp2Options(offload="cpu"))["offload_policy"]
    assert isinstance(policy, CPUOffloadPolicy) and policy.pin_memory == (device == "cuda")


def test_updates_far_below_the_resolution_of_bfloat16_add_up(start, model_path):
    """They would all be lost in weights that were bfloat16 themselves."""
    training, computed = replace(ALMOST_SGD, learning_rate=1e-5), {}

    def movement(dtype):
        trainer = start(model_path, training_args=training, model_args=ModelArguments(dtype=dtype))
        before = weights_of(trainer)
        computed[dtype] = trainer.log_probs(make_batch(), 1.0)
        trained(trainer, [0] * 10)
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        return before, {name: value - before[name] for name, value in weights_of(trainer).items()}

    weights, moved = movement("bfloat16")
    _, expected = movement("float32")
    for name in weights:
        if name.endswith("proj.weight"):
            resolution = np.median(np.abs(weights[name])) * 2.0**-8
            assert 0 < np.abs(moved[name]).max() < resolution / 10, name
            # Processors round products of bfloat16 differently; updates that are lost would differ by 1.
            assert np.linalg.norm(moved[name] - expected[name]) < 0.25 * np.linalg.norm(expected[name]), name
    assert np.abs(computed["bfloat16"] - computed["float32"]).max() > 1e-3, "that was not computed in bfloat16"


def test_a_forward_only_role_computes_but_does_not_train(start, model_path):
    expected = start(model_path).log_probs(make_batch(), 1.0)
    trainer = start(model_path, forward_only=True)
    assert np.array_equal(trainer.log_probs(make_batch(), 1.0), expected)
    with pytest.raises(RuntimeError, match="forward-only"):
        trainer.train_step(make_batch(), OBJECTIVE, 1.0)


def test_missing_fields_are_named(start, model_path):
    batch = make_batch()
    del batch.tokens["reference_logprobs"]
    with pytest.raises(ValueError, match="lacks reference_logprobs"):
        start(model_path).train_step(batch, OBJECTIVE, 1.0)


def test_unknown_options_and_strategies_are_refused_before_anything_loads():
    with pytest.raises(ConfigError, match="did you mean `reshard_after_forward`"):
        build("/nowhere", strategy_config={"reshard_after_forwad": True})
    with pytest.raises(ConfigError, match="> 0"):
        build("/nowhere", strategy_config={"process_group_timeout_seconds": 0})
    check = partial(option_problems, FORWARD_STRATEGIES, "fsdp2_train")
    problems = check({"gradient_checkpointing": "yes", "shards": 2}, "actor_train.strategy_args.strategy_config")
    assert sorted(problem.path.rsplit(".", 1)[1] for problem in problems) == ["gradient_checkpointing", "shards"]
    assert check({"gradient_checkpointing": True}, "path") == []
    with pytest.raises(ConfigError, match="fsdp2_train"):
        build_trainer("fsdp3_train", trainer_setup("/nowhere"))


def trained(trainer, steps):
    return [trainer.train_step(make_batch(step), OBJECTIVE, 0.9) for step in steps]


LINEAR = TrainingArguments(learning_rate=0.01, lr_scheduler_type="linear", warmup_steps=2)


def save_and_go_on(rank, port, model_path, folder, world_size):
    trainer = build(model_path, rank=rank, world_size=world_size, port=port, training_args=LINEAR, max_tokens=25)
    trained(trainer, range(2))
    snapshot = trainer.snapshot()
    metrics = trained(trainer, range(2, 4))
    write_state(Path(folder), rank, snapshot)
    weights = weights_of(trainer)
    trainer.shutdown()
    return metrics, weights


def go_on(rank, port, model_path, folder, world_size):
    trainer = build(model_path, rank=rank, world_size=world_size, port=port, training_args=LINEAR, max_tokens=25)
    trainer.restore(SavedState(Path(folder)))
    results = trained(trainer, range(2, 4)), weights_of(trainer)
    trainer.shutdown()
    return results


def assert_same_history(found, expected):
    assert found[0] == expected[0]
    assert all(np.array_equal(weight, found[1][name]) for name, weight in expected[1].items())


def test_a_restored_trainer_goes_on_to_the_bit(model_path, tmp_path, leave_process_group):
    leave_process_group()
    expected = save_and_go_on(0, None, model_path, tmp_path, 1)
    assert_same_history(go_on(0, None, model_path, tmp_path, 1), expected)


@pytest.mark.tier("all")
def test_two_restored_ranks_go_on_to_the_bit_and_one_that_takes_their_place_alike(
    model_path, tmp_path, leave_process_group
):
    asked = (model_path, str(tmp_path), 2)
    by_rank = on_ranks(save_and_go_on, *asked, ranks=2)
    for found, expected in zip(on_ranks(go_on, *asked, ranks=2), by_rank, strict=True):
        assert_same_history(found, expected)
    _, weights = go_on(0, None, model_path, tmp_path, 1)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, by_rank[0][1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_snapshot_is_not_changed_by_training_on(start, model_path):
    trainer = start(model_path)
    trained(trainer, [0])
    snapshot = trainer.snapshot()
    before = [part.tensor.clone() for part in snapshot.parts]
    trained(trainer, [1])
    assert len(before) == 3 * len(weights_of(trainer))
    assert all(torch.equal(part.tensor, kept) for part, kept in zip(snapshot.parts, before, strict=True))


def test_the_state_of_another_model_is_refused_by_name(start, model_path, tmp_path):
    write_state(tmp_path / "state", 0, start(write_model(tmp_path / "untied", tied=False)).snapshot())
    trainer = start(model_path)
    with pytest.raises(UnfitState, match="another model.*lm_head"):
        trainer.restore(SavedState(tmp_path / "state"))


def test_a_state_from_before_the_first_update_has_no_moments(start, model_path, tmp_path):
    trainer = start(model_path)
    write_state(tmp_path, 0, trainer.snapshot())
    expected = trained(trainer, range(2))
    trainer = start(model_path)
    trainer.restore(SavedState(tmp_path))
    assert trained(trainer, range(2)) == expected
