"""Compiled layers give the losses, gradients and log-probabilities of layers that are not, and are compiled once.

Most tests here trace layers without generating code, which takes half a minute on a CPU: what is traced, how often, and
what layers and sizes share are the same with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.configs.roles import ModelArguments
from roll.trainers.base import build_trainer
from roll.trainers.compiling import VARIANTS
from roll.trainers.trainer import ForwardStrategy, TrainStrategy
from tests.tiers import need
from tests.trainers.nursery import on_ranks
from tests.trainers.ranks import Job, _train, run_here, run_job
from tests.trainers.test_packed_training import full_batch
from tests.trainers.test_router_replay import write_moe
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import ALMOST_SGD, trainer_setup

GENTLE = replace(ALMOST_SGD, learning_rate=0.05)
"""Larger steps let rounding grow beyond 1e-5 in later ones."""
LENGTHS = ((9, 5, 12, 3, 7, 2), (8, 8, 4, 3), (20, 17, 13), (5, 4), (11, 11, 11, 10), (6, 5, 4), (16, 15, 2))
WARM_UP = 2
"""Batches after which everything is compiled."""
OPTIONS = {"process_group_timeout_seconds": 300}
CASES: dict[str, dict[str, Any]] = {
    "padded": {"strategy_config": {"offload": "cpu"}},
    "packed, checkpointing, adapters": {
        "packed": True,
        "strategy_config": {"gradient_checkpointing": True},
        "model_args": ModelArguments(lora_target="q_proj,v_proj"),
    },
}

pytestmark = pytest.mark.tier("all")


@pytest.fixture
def traced_only(leave_process_group) -> Iterator[None]:
    """Generate no code, and forget what other tests compiled."""
    torch._dynamo.reset()
    torch.compiler.set_default_backend("eager")
    yield
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


def train(trainer: TrainStrategy, _: object) -> dict[str, Any]:
    """Results by name, and the number of compiled graphs after each batch."""
    results: dict[str, Any] = {}
    graphs = []
    for step, lengths in enumerate(LENGTHS):
        batch = make_batch(step, lengths)
        results[f"{step}/logprobs"] = trainer.log_probs(batch, 0.7)
        if getattr(trainer, "adapters", None) is not None:  # those of DeepSpeed have none
            results[f"{step}/base"] = trainer.base_log_probs(batch, 0.7)
        metrics = trainer.train_step(batch, OBJECTIVE, 0.9)
        results |= {f"{step}/{name}": np.array(value) for name, value in metrics.items()}
        trainer.offload_states()
        trainer.load_states()
        graphs.append(compilations())
    results |= {f"weight/{name}": weight for name, weight in weights_of(trainer).items()}
    return results | {"graphs": graphs}


def trace(rank: int, port: int, job: Job) -> Any:
    """A rank that generates no code, with the number of graphs from its own start."""
    torch.compiler.set_default_backend("eager")
    counters.clear()
    return _train(rank, port, job)


def compared(
    work: Any, path: str, argument: Any = None, ranks: int = 1, strategy: str = "fsdp2_train", **setup: Any
) -> list[int]:
    """Require the same results with compiled layers; return the numbers of compiled graphs."""
    options = OPTIONS | setup.pop("strategy_config", {})
    setup = {"max_tokens": 25, "training_args": GENTLE, **setup}
    found = []
    for compiled in (False, True):
        changes = setup | {"strategy_config": options | {"compile": compiled}}
        job = Job(work, strategy, path, argument, changes, ranks)
        counters.clear()
        if strategy == "deepspeed_train":
            found.append(on_ranks(trace, job, ranks=ranks, engine="deepspeed")[0])
        else:
            found.append((run_here if ranks == 1 else run_job)(job)[0])
    expected, results = found
    none, graphs = expected.pop("graphs"), results.pop("graphs")
    assert not any(none) and results.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    return graphs


@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_train_like_others_and_are_not_compiled_for_each_length(tmp_path, case, traced_only):
    graphs = compared(train, write_model(tmp_path), **CASES[case])
    assert 0 < graphs[WARM_UP - 1] == graphs[-1] < VARIANTS


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_trains_compiled_layers_like_others(tmp_path, stage):
    need("deepspeed")
    options = {"zero_optimization": {"stage": stage}, "gradient_checkpointing": stage == 2}
    graphs = compared(train, write_model(tmp_path), ranks=2, strategy="deepspeed_train", strategy_config=options)
    assert 0 < graphs[WARM_UP - 1] == graphs[-1] < VARIANTS


def train_once(trainer: TrainStrategy, _: object) -> dict[str, Any]:
    return {"loss": trainer.train_step(make_batch(), OBJECTIVE, 0.9)["loss"], "graphs": [compilations()]}


def test_layers_share_what_is_compiled(tmp_path, traced_only):
    paths = [write_model(tmp_path / str(layers), num_hidden_layers=layers) for layers in (1, 4)]
    first, second = (compared(train_once, path)[0] for path in paths)
    assert first > 0 and second == 0


def criticise(trainer: TrainStrategy, _: object) -> dict[str, Any]:
    batch = full_batch()
    losses = [trainer.train_step(batch, ValueObjective(8), 1.0)["loss"] for _ in range(3)]
    return {"loss": np.array(losses), "values": trainer.values(batch), "graphs": [compilations()]}


def lend(reference: ForwardStrategy, _: object) -> dict[str, Any]:
    return {"logprobs": reference.log_probs(make_batch(), 1.0), "graphs": [compilations()]}


def test_a_critic_and_a_reference_can_be_compiled(tmp_path, traced_only):
    path = write_model(tmp_path)
    assert compared(criticise, path, kind="value")[0]
    assert compared(lend, path, forward_only=True, packed=True)[0]


def test_a_mixture_of_experts_can_be_compiled(tmp_path, traced_only):
    graphs = compared(train, write_moe(tmp_path, top_k=2))
    assert 0 < graphs[WARM_UP - 1] == graphs[-1] < VARIANTS


def test_a_model_of_pictures_can_be_compiled(tmp_path, traced_only):
    need("diffusers")
    from tests.tiny_pictures import make_pipeline
    from tests.trainers.test_picture_trainer import PLAIN, recorded

    model = str(make_pipeline(tmp_path))
    assert compared(draw, model, recorded(model, PLAIN), pictures=PLAIN, max_tokens=None, max_samples=4)[0]


def draw(trainer: TrainStrategy, batch: Any) -> dict[str, Any]:
    metrics = trainer.train_step(batch, PolicyObjective(max_response_length=2, pg_variant="vanilla"), 1.0)
    logprobs = trainer.log_probs(batch, 1.0)
    return {"norm": metrics["grad_norm"], "logprobs": logprobs, "graphs": [compilations()]}


@pytest.mark.tier("soak")
@pytest.mark.parametrize("changes", [{}, {"packed": True, "strategy_config": {"context_parallel_size": 2}}])
def test_generated_code_trains_like_others_on_two_ranks(tmp_path, changes):
    """Weights are freed between the forward and the backward pass, and gathered again."""
    path = write_model(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    assert compared(train, path, ranks=2, **changes)[-1]


def test_a_missing_compiler_is_told_before_training(tmp_path, leave_process_group):
    torch._dynamo.reset()
    trainer = build_trainer("fsdp2_train", trainer_setup(write_model(tmp_path), strategy_config={"compile": True}))
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(RuntimeError, match="strategy_config.compile: torch cannot compile for cpu"):
        trainer.initialize()
