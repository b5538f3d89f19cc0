"""What `deepspeed_train` keeps of itself: a restored trainer goes on where the saved one was, at any stage of ZeRO, on
any number of ranks, and where `fsdp2_train` was too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roll.configs.roles import ModelArguments, TrainingArguments
from roll.trainers.state import SavedState, write_state
from tests.tiers import need, soak_but
from tests.trainers.histories import Histories, assert_alike, assert_alike_in_bfloat16, assert_equal_to_the_bit, refuse
from tests.trainers.ranks import Job, Results, run_job
from tests.trainers.tiny_models import OBJECTIVE, make_batch, write_model

need("deepspeed")
pytestmark = pytest.mark.tier("all")

TRAINING = TrainingArguments(
    learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="linear", adam_epsilon=1e-4
)
"""A schedule and a bias correction that tell the steps apart."""
HISTORIES = Histories(make_batch, OBJECTIVE)


@dataclass(frozen=True)
class Trainer:
    """Which one, and how it is told to work."""

    strategy: str = "deepspeed_train"
    zero: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def job(self, work, model_path: str, argument: Any, ranks: int) -> Job:
        options = {"zero_optimization": self.zero} if self.strategy == "deepspeed_train" else {}
        setup = {
            "training_args": TRAINING,
            "max_tokens": 14,
            "model_args": ModelArguments(dtype=self.dtype),
            "strategy_config": {"process_group_timeout_seconds": 60, **options},
        }
        return Job(work, self.strategy, model_path, argument, setup, ranks)


CPU = {"device": "cpu"}
TRAINERS = {
    "fsdp2": Trainer("fsdp2_train"),
    "ZeRO 0": Trainer(zero={"stage": 0}),
    "ZeRO 1": Trainer(zero={"stage": 1}),
    "ZeRO 2": Trainer(zero={"stage": 2}),
    "ZeRO 3": Trainer(zero={"stage": 3, "sub_group_size": 1000}),
    "ZeRO 1, bfloat16": Trainer(zero={"stage": 1}, dtype="bfloat16"),
    "ZeRO 3, bfloat16": Trainer(zero={"stage": 3}, dtype="bfloat16"),
    "ZeRO 2, optimizer on the CPU": Trainer(zero={"stage": 2, "offload_optimizer": CPU}),
    "ZeRO 3, all on the CPU": Trainer(zero={"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
}
ELSEWHERE = {
    "ZeRO 3": ("ZeRO 1", "ZeRO 0", "fsdp2"),
    "ZeRO 1": ("ZeRO 3", "ZeRO 2, optimizer on the CPU"),
    "ZeRO 2": ("ZeRO 3",),
    "ZeRO 0": ("ZeRO 2",),
    "fsdp2": ("ZeRO 3", "ZeRO 0"),
    "ZeRO 1, bfloat16": ("ZeRO 3, bfloat16",),
}
"""Saved by two ranks of the one, restored by one rank of each other."""
PAIRS = [(saver, other) for saver, others in ELSEWHERE.items() for other in others]
PAIRS_FOR_EACH_CHANGE = {
    ("ZeRO 3", "fsdp2"),
    ("ZeRO 1", "ZeRO 2, optimizer on the CPU"),
    ("fsdp2", "ZeRO 3"),
    ("ZeRO 1, bfloat16", "ZeRO 3, bfloat16"),
}
SAVERS_FOR_EACH_CHANGE = {saver for saver, _ in PAIRS_FOR_EACH_CHANGE}


def save_untrained(trainer, folder):
    write_state(Path(folder), trainer.setup.rank, trainer.snapshot())
    return HISTORIES.trained(trainer, [2, 3])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """Of odd sizes, which do not divide by the ranks."""
    return write_model(tmp_path_factory.mktemp("model"), tied=False, hidden_size=15, head_dim=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def two_ranks(model_path, folder):
    """By trainer and what it did: what each rank saw in an undisturbed history, and in a resumed one."""
    works = {"undisturbed": HISTORIES.save_and_go_on, "resumed": HISTORIES.go_on}
    jobs = {
        (name, work): trainer.job(works[work], model_path, str(folder / name), ranks=2)
        for name, trainer in TRAINERS.items()
        for work in works
    }
    return Results(jobs, {(name, "resumed"): (name, "undisturbed") for name in TRAINERS})


@pytest.fixture(scope="module")
def one_rank(model_path, folder):
    """By the trainer that saved and the one that went on; what the former saved is there."""
    return Results(
        {
            (saver, other): TRAINERS[other].job(HISTORIES.go_on, model_path, str(folder / saver), ranks=1)
            for saver, other in PAIRS
        }
    )


@pytest.mark.parametrize("name", soak_but(SAVERS_FOR_EACH_CHANGE, TRAINERS))
def test_a_restored_trainer_goes_on_to_the_bit(two_ranks, name):
    expected_by_rank = two_ranks[name, "undisturbed"]
    for expected, found in zip(expected_by_rank, two_ranks[name, "resumed"], strict=True):
        assert_equal_to_the_bit(found, expected)


@pytest.mark.parametrize(("saver", "other"), soak_but(PAIRS_FOR_EACH_CHANGE, PAIRS))
def test_another_number_of_ranks_and_another_stage_go_on_alike(two_ranks, one_rank, saver, other):
    expected, _ = two_ranks[saver, "undisturbed"]
    alike = assert_alike if TRAINERS[saver].dtype == "float32" else assert_alike_in_bfloat16
    alike(one_rank[saver, other][0], expected)


def test_a_state_from_before_the_first_update_has_no_moments(model_path, tmp_path):
    trainer, folder = TRAINERS["ZeRO 3"], str(tmp_path)
    (expected,) = run_job(trainer.job(save_untrained, model_path, folder, ranks=1))
    assert all(name.startswith("weight/") for name in SavedState(tmp_path).names())
    assert_equal_to_the_bit(run_job(trainer.job(HISTORIES.go_on, model_path, folder, ranks=1))[0], expected)


@pytest.mark.parametrize("name", soak_but(SAVERS_FOR_EACH_CHANGE, TRAINERS))
def test_each_rank_writes_its_share_of_float32(two_ranks, folder, name):
    assert two_ranks[name, "undisturbed"]
    sizes = [path.stat().st_size for path in sorted((folder / name).glob("rank-*.safetensors"))]
    assert len(sizes) == 2 and max(sizes) < 1.4 * min(sizes)
    state = SavedState(folder / name)
    assert len(state.names()) == 3 * len(state.weights())
    assert str(state.read("weight/lm_head.weight", (0, 0), (23, 15)).dtype) == "torch.float32"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tied": False, "hidden_size": 16}, r"[23, 16] in the model and [23, 15]"),
        ({"tied": True, "hidden_size": 15}, "lm_head.weight"),
    ],
    ids=["wider", "tied"],
)
def test_the_state_of_another_model_is_refused_by_name(two_ranks, folder, tmp_path, other, message):
    assert two_ranks["ZeRO 3", "undisturbed"]
    path = write_model(tmp_path, head_dim=8, **other)
    (refusal,) = run_job(TRAINERS["ZeRO 2"].job(refuse, path, str(folder / "ZeRO 3"), ranks=1))
    assert "another model" in refusal and message in refusal
