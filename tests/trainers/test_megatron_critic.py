"""A value model shared out by `megatron_train` is that of `fsdp2_train`: values, learning, exports and states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from roll.algorithms.objective import ValueObjective
from roll.configs.roles import TrainingArguments
from roll.trainers.model import save
from roll.trainers.state import SavedState, write_state
from tests.tiers import need
from tests.trainers.megatron_runs import make_batch
from tests.trainers.ranks import Job, Results
from tests.trainers.tiny_models import weights_of

need("megatron.core")
pytestmark = pytest.mark.tier("all")

TRAINING = TrainingArguments(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0, adam_epsilon=1e-3)
OBJECTIVE = ValueObjective(8)
TENSOR = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "whole": {},
    "tensors": TENSOR,
    "sequence": TENSOR | {"sequence_parallel": True},
    "stages": {"pipeline_model_parallel_size": 2},
}
MODELS = {"whole": "qwen3", "tensors": "qwen2", "sequence": "llama", "stages": "qwen2"}
"""Tied and untied ones; of a critic, neither has the embedding as its head."""


def with_returns(seed):
    """A batch whose returns follow from its tokens, so that they can be learned."""
    batch = make_batch(seed)
    batch.tokens["returns"] = (batch.tokens["token_ids"] / 10).astype(np.float32)
    batch.tokens["old_values"] = np.zeros_like(batch.tokens["returns"])
    return batch


def learn(trainer, folder):
    """Values before and after four updates; the state is that of after the second."""
    results = {"values/new": trainer.values(with_returns(0))}
    for step in range(4):
        if step == 2 and folder is not None:
            snapshot = trainer.snapshot()
        metrics = trainer.train_step(with_returns(step), OBJECTIVE, 1.0)
        results |= {f"metric/{step}/{name}": np.array(value) for name, value in metrics.items()}
    if folder is not None:
        write_state(Path(folder, "state"), trainer.setup.rank, snapshot)
        save(trainer, str(Path(folder, "export")))
    results["values/trained"] = trainer.values(with_returns(0))
    return results | {f"weight/{name}": weight for name, weight in weights_of(trainer).items()}


def go_on(trainer, folder):
    trainer.restore(SavedState(Path(folder, "state")))
    metrics = [trainer.train_step(with_returns(step), OBJECTIVE, 1.0) for step in (2, 3)]
    return metrics, trainer.values(with_returns(0))


def look(trainer, _):
    return trainer.values(with_returns(0))


@pytest.fixture(scope="module")
def seen(folder):
    """What each rank saw, by what it did and the layout."""
    setup = {"kind": "value", "training_args": TRAINING, "max_tokens": 25}

    def job(work, name, argument, path=None):
        ranks = 1 if name == "whole" else 2
        model = path or str(folder / MODELS[name])
        return Job(work, "megatron_train", model, argument, setup | {"strategy_config": LAYOUTS[name]}, ranks)

    models = sorted(set(MODELS.values()))
    jobs = {
        ("expected", model): Job(learn, "fsdp2_train", str(folder / model), None, setup, ranks=1) for model in models
    }
    jobs |= {("learned", name): job(learn, name, str(folder / name)) for name in LAYOUTS}
    jobs |= {("went on", name): job(go_on, name, str(folder / name)) for name in LAYOUTS}
    jobs |= {("loaded", name): job(look, name, None, str(folder / name / "export")) for name in ("tensors", "stages")}
    return Results(jobs, {(what, name): ("learned", name) for what, name in jobs if what in ("went on", "loaded")})


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_learns_what_the_default_trainer_learns(seen, name):
    (expected,) = seen["expected", MODELS[name]]
    for results in seen["learned", name]:
        assert results.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(results[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
    assert not expected["values/new"].any() and np.abs(expected["values/trained"]).max() > 0.01
    assert "weight/score.bias" in expected and "weight/lm_head.weight" not in expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_export_is_a_token_classifier_with_the_values(seen, folder, name):
    values = seen["learned", name][0]["values/trained"]
    model = AutoModelForTokenClassification.from_pretrained(folder / name / "export").eval()
    assert model.config.num_labels == 1
    batch = with_returns(0)
    ids = torch.from_numpy(batch.tokens["token_ids"].astype(np.int64))
    for first, last in zip(batch.offsets, batch.offsets[1:], strict=False):
        given = model(input_ids=ids[None, first:last]).logits[0, :, 0].detach().numpy()
        np.testing.assert_allclose(values[first + 1 : last], given[:-1], rtol=1e-4, atol=1e-5)
        assert values[first] == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_restored_critic_goes_on_to_the_bit(seen, name):
    for learned, (metrics, values) in zip(seen["learned", name], seen["went on", name], strict=True):
        assert np.array_equal(values, learned["values/trained"])
        for step, found in enumerate(metrics, start=2):
            assert all(learned[f"metric/{step}/{metric}"] == value for metric, value in found.items())


@pytest.mark.parametrize("name", ["tensors", "stages"])
def test_an_exported_critic_is_loaded_with_its_head(seen, name):
    for values in seen["loaded", name]:
        np.testing.assert_allclose(values, seen["learned", name][0]["values/trained"], rtol=1e-5, atol=1e-6)
