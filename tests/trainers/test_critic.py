"""A value model in the trainers: the values, their alignment, and what learning does to them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForTokenClassification

from roll.algorithms.objective import ValueObjective
from roll.configs.roles import TrainingArguments
from roll.trainers.base import build_trainer
from roll.trainers.model import save
from roll.trainers.state import SavedState, write_state
from tests.trainers.nursery import on_ranks
from tests.trainers.tiny_models import make_batch, weights_of, write_model
from tests.trainers.trainers import trainer_setup

LEARNING = TrainingArguments(learning_rate=0.02, max_grad_norm=0.0)
OBJECTIVE = ValueObjective(8)


def with_returns(seed=0):
    """A batch whose returns follow from its tokens, so that they can be learned."""
    batch = make_batch(seed)
    batch.tokens["returns"] = np.where(batch.tokens["response_mask"], batch.tokens["token_ids"] / 10, np.nan).astype(
        np.float32
    )
    batch.tokens["old_values"] = np.zeros_like(batch.tokens["returns"])
    return batch


def build(path, **changes):
    settings = {"kind": "value", "training_args": LEARNING} | changes
    trainer = build_trainer("fsdp2_train", trainer_setup(path, **settings))
    trainer.initialize()
    return trainer


@pytest.fixture
def start(leave_process_group):
    def build_one(path, **changes):
        leave_process_group()
        return build(path, **changes)

    return build_one


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("critic"))


def test_a_new_critic_says_zero_for_everything_and_the_body_is_the_policys(start, model_path):
    trainer = start(model_path)
    assert not trainer.values(with_returns()).any()
    weights = weights_of(trainer)
    policy = weights_of(start(model_path, kind="policy"))
    assert not weights["score.weight"].any() and "lm_head.weight" not in weights
    assert all(np.array_equal(weights[name], policy[name]) for name in weights.keys() & policy.keys())
    assert len(weights.keys() & policy.keys()) > 10


def changed_copy(model_path, folder, change):
    """The model in a new folder, its tensors changed."""
    shutil.copytree(model_path, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_a_reward_models_head_is_taken_over(start, model_path, tmp_path):
    """It has no bias; that alone is new."""
    head = torch.arange(AutoConfig.from_pretrained(model_path).hidden_size).float()[None]
    scorer = changed_copy(model_path, tmp_path / "scorer", lambda tensors: tensors.update({"score.weight": head}))
    weights = weights_of(start(scorer))
    assert np.array_equal(weights["score.weight"], head.numpy()) and not weights["score.bias"].any()


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_model_that_lacks_a_tensor_is_refused(start, model_path, tmp_path, kind):
    damaged = changed_copy(model_path, tmp_path / "damaged", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        start(damaged, kind=kind)


@pytest.mark.parametrize("packed", [False, True])
def test_values_are_of_the_state_before_each_token(start, model_path, tmp_path, packed):
    trainer = start(model_path, max_tokens=25, packed=packed)
    batch = with_returns()
    for _ in range(3):
        trainer.train_step(batch, OBJECTIVE, 1.0)
    values = trainer.values(batch)
    save(trainer, str(tmp_path / "export"))
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "export", num_labels=1).eval()
    offsets, ids = batch.offsets, torch.from_numpy(batch.tokens["token_ids"].astype(np.int64))
    for first, last in zip(offsets, offsets[1:], strict=False):
        given = model(input_ids=ids[None, first:last]).logits[0, :, 0].detach().numpy()
        np.testing.assert_allclose(values[first + 1 : last], given[:-1], rtol=1e-4, atol=1e-5)
        assert values[first] == 0


def test_it_learns_returns_that_follow_from_what_it_sees(start, model_path):
    trainer = start(model_path)
    batch = with_returns()
    batch.tokens["returns"] = np.where(
        batch.tokens["response_mask"], np.concatenate([[0], batch.tokens["token_ids"][:-1]]) / 10, np.nan
    ).astype(np.float32)
    metrics = [trainer.train_step(batch, OBJECTIVE, 1.0) for _ in range(60)]
    assert metrics[-1]["loss"] < 0.2 * metrics[0]["loss"]
    assert metrics[0]["explained_variance"] == pytest.approx(0, abs=1e-6) and metrics[-1]["explained_variance"] > 0.8


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 12}, {"max_tokens": None, "max_samples": 1}, {"max_tokens": 14, "packed": True}],
)
def test_any_split_trains_the_same(start, model_path, changes):
    def train(trainer):
        return [trainer.train_step(with_returns(seed), OBJECTIVE, 1.0) for seed in range(3)]

    expected = train(start(model_path))
    for found, wanted in zip(train(start(model_path, **changes)), expected, strict=True):
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-6)


def three_steps(rank, port, model_path, world_size):
    trainer = build(model_path, rank=rank, world_size=world_size, port=port, max_tokens=25)
    losses = [trainer.train_step(with_returns(seed), OBJECTIVE, 1.0)["loss"] for seed in range(3)]
    values = trainer.values(with_returns())
    trainer.shutdown()
    return losses, values


@pytest.mark.tier("all")
def test_two_ranks_train_the_same(model_path, leave_process_group):
    leave_process_group()
    losses, values = three_steps(0, None, model_path, 1)
    for found_losses, found_values in on_ranks(three_steps, model_path, 2, ranks=2):
        np.testing.assert_allclose(found_losses, losses, rtol=2e-4)
        np.testing.assert_allclose(found_values, values, rtol=2e-3, atol=2e-5)


def test_a_restored_critic_goes_on_to_the_bit(start, model_path, tmp_path):
    trainer = start(model_path)
    trainer.train_step(with_returns(), OBJECTIVE, 1.0)
    write_state(tmp_path / "state", 0, trainer.snapshot())
    expected = trainer.train_step(with_returns(1), OBJECTIVE, 1.0)
    trainer = start(model_path)
    trainer.restore(SavedState(tmp_path / "state"))
    assert trainer.train_step(with_returns(1), OBJECTIVE, 1.0) == expected


def test_an_exported_critic_is_loaded_with_its_head(start, model_path, tmp_path):
    trainer = start(model_path)
    trainer.train_step(with_returns(), OBJECTIVE, 1.0)
    expected = trainer.values(with_returns())
    save(trainer, str(tmp_path / "export"))
    np.testing.assert_allclose(start(str(tmp_path / "export")).values(with_returns()), expected, rtol=1e-5, atol=1e-6)
    assert expected.any()
