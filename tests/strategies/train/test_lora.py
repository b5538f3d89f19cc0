"""Adapters trained by `fsdp2_train`: what learns, what leaves, what is kept, against peft and plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.configs.schema import ModelArguments, TrainingArguments
from roll.strategies.train import build_train_strategy
from roll.strategies.train.lora import UnknownTarget, resolve_targets
from roll.strategies.train.sharded_state import SavedState, UnfitState, write_state
from tests.strategies.train.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.strategies.train.trainers import ALMOST_SGD, free_ports, trainer_setup

SOME = {"lora_target": "q_proj, down_proj", "lora_rank": 3, "lora_alpha": 5}
"""Two kinds of layers, with and without a bias; a rank that two processes do not share evenly."""
CHECKPOINTING = {"gradient_checkpointing": True}


def build(model_path, lora=SOME, dtype="float32", **changes):
    arguments = {"training_args": ALMOST_SGD, "model_args": ModelArguments(dtype=dtype, **lora)}
    trainer = build_train_strategy("fsdp2_train", trainer_setup(model_path, **arguments | changes))
    trainer.initialize()
    return trainer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(leave_process_group):
    """Build trainers of one rank, one after the other."""

    def build_one(model_path, *args, **changes):
        leave_process_group()
        return build(model_path, *args, **changes)

    return build_one


def train(trainer, steps=range(2)):
    return [trainer.train_step(make_batch(step), OBJECTIVE, 0.9) for step in steps]


def logprobs_of(model, batch):
    """Of each token but the first of a sample, each sample alone; 0 there."""
    values = np.zeros(len(batch.tokens["token_ids"]), dtype=np.float32)
    ids = torch.from_numpy(batch.tokens["token_ids"].astype(np.int64))
    for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        table = model(input_ids=ids[None, begin:end]).logits[0, :-1].float().log_softmax(-1)
        values[begin + 1 : end] = table.gather(-1, ids[begin + 1 : end, None])[:, 0].detach().numpy()
    return values


def plain_model(path, trainer=None):
    """The plain model, filled with what a trainer publishes."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    if trainer is not None:
        model.load_state_dict({name: weight.clone() for name, weight in trainer.named_weights()}, strict=False)
        model.tie_weights()
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_compute_what_the_adapted_model_does_under_the_names_of_the_base(start, tmp_path, tied):
    path = write_model(tmp_path, tied)
    trainer = start(path)
    base = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    before = weights_of(trainer)
    assert list(before) == list(base)
    assert all(np.array_equal(before[name], value.detach().numpy()) for name, value in base.items())
    train(trainer)
    published = weights_of(trainer)
    moved = {name for name in base if not np.array_equal(published[name], before[name])}
    assert moved == {name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))}
    batch = make_batch(5)
    expected = logprobs_of(plain_model(path, trainer), batch)
    assert np.abs(expected - logprobs_of(plain_model(path), batch)).max() > 0.1
    np.testing.assert_allclose(trainer.log_probs(batch, 1.0), expected, rtol=1e-5, atol=1e-5)
    # Asking changed nothing.
    assert all(np.array_equal(value, published[name]) for name, value in weights_of(trainer).items())
