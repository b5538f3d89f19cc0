"""`hf_infer` as the reference: the log-probabilities of a forward-only `fsdp2_train`, from whole models that share the
batch, and nothing that a role which learns would need."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from roll.configs.errors import ConfigError
from roll.configs.roles import ModelArguments
from roll.configs.strategies import FORWARD_STRATEGIES, option_problems
from roll.trainers.base import build_forward_strategy, build_trainer
from roll.trainers.trainer import ForwardStrategy
from tests.trainers.moves import Moves, on_a_gpu, places_of_states
from tests.trainers.ranks import Job, run_here, run_job
from tests.trainers.tiny_models import make_batch, write_model
from tests.trainers.trainers import trainer_setup

STRATEGIES = ("fsdp2_train", "hf_infer")
TEMPERATURE = 0.7
BATCHES = {
    "many": make_batch(),
    "fewer than the ranks": make_batch(3, lengths=(6,)),
    "one token": make_batch(4, lengths=(1, 8, 1)),
}
LAYOUTS = {
    "padded": {"max_tokens": 14},
    "padded, samples counted": {"max_tokens": None, "max_samples": 2},
    "packed": {"max_tokens": 14, "packed": True},
    "packed, bfloat16": {"max_tokens": 14, "packed": True, "model_args": ModelArguments(dtype="bfloat16")},
}
RANKS = [1, pytest.param(2, marks=pytest.mark.tier("all"))]


@dataclass(frozen=True)
class Seen:
    """What one rank of the role gave, and how many tokens its model computed on."""

    logprobs: dict[str, np.ndarray]
    computed: dict[str, int]


def reference(trainer: ForwardStrategy, _: None) -> Seen:
    """Log-probabilities of all batches."""
    counted: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, given: counted.append(given["input_ids"].numel()), with_kwargs=True
    )
    logprobs, computed = {}, {}
    for name, batch in BATCHES.items():
        counted.clear()
        logprobs[name] = trainer.log_probs(batch, TEMPERATURE)
        computed[name] = sum(counted)
    return Seen(logprobs, computed)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Results by rank, by strategy, layout and number of ranks."""
    folder = tmp_path_factory.mktemp("models")
    models = {"padded": write_model(folder / "tied"), "other": write_model(folder / "untied", tied=False)}

    @functools.cache
    def find(strategy: str, layout: str, ranks: int) -> list[Seen]:
        setup = {"forward_only": True, **LAYOUTS[layout]}
        job = Job(reference, strategy, models.get(layout, models["other"]), setup=setup, ranks=ranks)
        return run_job(job) if ranks > 1 else run_here(job)

    return find


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_those_of_the_default_trainer(seen, layout, ranks, leave_process_group):
    expected = seen("fsdp2_train", layout, 1)[0].logprobs
    # A number of bfloat16 has eight bits, whichever way it was reached.
    tolerance = 1e-5 if "bfloat16" not in layout else 0.1
    for rank in seen("hf_infer", layout, ranks):
        assert rank.logprobs.keys() == expected.keys()
        for name, values in expected.items():
            assert rank.logprobs[name].dtype == np.float32
            np.testing.assert_allclose(rank.logprobs[name], values, rtol=0, atol=tolerance, err_msg=name)
    assert np.ptp(expected["many"]) > 1


@pytest.mark.tier("all")
def test_replicas_share_the_samples_and_compute_no_stand_ins(seen, leave_process_group):
    alone, shared = seen("hf_infer", "packed", 1), seen("hf_infer", "packed", 2)
    tokens = {name: int(batch.lengths.sum()) for name, batch in BATCHES.items()}
    assert alone[0].computed == tokens
    assert {name: sum(rank.computed[name] for rank in shared) for name in tokens} == tokens
    assert [rank.computed["many"] for rank in shared] == [20, 19]
    # A sharded model needs all of its ranks for every pass.
    assert sum(rank.computed["fewer than the ranks"] for rank in seen("fsdp2_train", "packed", 2)) > 6


def test_its_weights_leave_the_device_and_come_back(tmp_path, leave_process_group):
    trainer = build_forward_strategy("hf_infer", trainer_setup(write_model(tmp_path), forward_only=True))
    trainer.initialize()
    with Moves() as moves:
        trainer.offload_states()
    assert not moves.any(), "on a CPU nobody else waits for them"
    on_a_gpu(trainer)
    for move, place in ((trainer.offload_states, "cpu"), (trainer.load_states, "cuda")):
        with Moves() as moves:
            move()
        assert moves.left_out(place, places_of_states(trainer)) == set()


@pytest.mark.parametrize("changes", [{"forward_only": False}, {"forward_only": True, "kind": "value"}])
def test_a_role_that_learns_is_refused(tmp_path, changes):
    setup = trainer_setup(str(tmp_path), **changes)
    with pytest.raises(ConfigError, match="there is no trainer `hf_infer`"):
        build_trainer("hf_infer", setup)
    with pytest.raises(ValueError, match="a role that learns needs a trainer"):
        build_forward_strategy("hf_infer", setup)


def test_options_are_checked():
    check = partial(option_problems, FORWARD_STRATEGIES, "hf_infer")
    assert check({"process_group_timeout_seconds": 5.0}, "here") == []
    (unknown,) = check({"reshard_after_forward": True}, "here")
    assert unknown.path == "here.reshard_after_forward"
    (wrong,) = check({"process_group_timeout_seconds": 0}, "here")
    assert wrong.path == "here.process_group_timeout_seconds"
