"""A checkpoint of another model is found before anything loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roll.configs.loader import config_from_tree
from roll.pipeline.checkpoints import Checkpoint, DriverState
from roll.pipeline.resume import model_problems
from roll.rollout.journal import RolloutProgress
from roll.trainers.state import StateSnapshot, whole, write_state

TENSORS = {
    "model.embed_tokens.weight": (7, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.1.mlp.up_proj.weight": (6, 4),
}


@dataclass
class Case:
    folder: Path

    def model(self, tensors: dict[str, tuple[int, ...]]) -> None:
        (self.folder / "model").mkdir()
        save_file({name: torch.zeros(shape) for name, shape in tensors.items()},
                  self.folder / "model" / "model.safetensors")  # fmt: skip

    def problems(self, state: dict[str, tuple[int, ...]], **keys):
        """Of a checkpoint whose trainer had these tensors."""
        progress = RolloutProgress(3, 12, {}, (3,))
        checkpoint = Checkpoint(self.folder / "step-3", DriverState(progress, "prompts"))
        parts = [whole(f"weight/{name}", torch.zeros(shape)) for name, shape in state.items()]
        write_state(checkpoint.role("actor_train"), 0, StateSnapshot(parts, {}))
        return model_problems(config_from_tree({"pretrain": str(self.folder / "model")} | keys), checkpoint)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


def test_the_same_model_goes_on_also_where_files_name_heads_and_experts_otherwise(case):
    case.model(TENSORS | {"lm_head.weight": (7, 4), "model.layers.1.mlp.experts.0.up_proj.weight": (3, 4)})
    fused = {"model.layers.1.mlp.experts.gate_up_proj": (2, 6, 4), "score.weight": (1, 4)}
    assert case.problems(TENSORS | fused) == []


def test_adapters_of_some_layers_and_files_with_layers_that_are_left_out_go_on(case):
    case.model(TENSORS)
    layers = [name for name in TENSORS if ".layers." in name]
    assert case.problems({f"{layers[0].removesuffix('.weight')}.lora_A.default.weight": (2, 4)}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.embed_tokens.weight": (9, 4)}, "another model: model.embed_tokens.weight is [9, 4] in the checkpoint"),
        ({"model.layers.2.mlp.up_proj.weight": (6, 4)}, "another model, of 2 layers, not 3"),
    ],
)
def test_another_size_or_depth_is_said(case, changes, said):
    case.model(TENSORS)
    (problem,) = case.problems(TENSORS | changes)
    assert problem.path == "pretrain" and said in problem.message and "step 3" in problem.message


def test_the_key_that_names_the_model_is_the_one_reported(case):
    case.model(TENSORS)
    arguments = {"model_args": {"model_name_or_path": str(case.folder / "model")}}
    (problem,) = case.problems({"model.embed_tokens.weight": (9, 4)}, actor_train=arguments)
    assert problem.path == "actor_train.model_args.model_name_or_path"


def test_a_role_that_comes_later_is_refused_by_its_name_and_a_model_of_a_hub_is_left_to_its_trainer(case):
    case.model(TENSORS)
    critic = {"critic": {}, "adv_estimator": "gae"}
    (problem,) = case.problems(TENSORS, **critic)
    assert problem.path == "critic" and "the run has trained without it" in problem.message
    assert case.problems({"model.embed_tokens.weight": (9, 4)}, pretrain="owner/name") == []


def test_a_folder_without_readable_weights_is_said(case):
    (case.folder / "model").mkdir()
    (problem,) = case.problems(TENSORS)
    assert "holds neither model.safetensors" in problem.message
