"""The forward pass and every loss of a trainer on a GPU, with tensors that say they are on `cuda` and hold nothing: two
devices in one operation raise an error, as they do there. Nothing is computed, so no value is looked at.

torch without CUDA refuses the device; a library of one line (`fake_cuda.cpp`) makes it known. It stays in the process.
Not reached so: the backward pass and FSDP2, which ask for streams; packed rows, whose lengths are read back; and the
engine `hf_infer`, whose cache is made of a list of numbers on the device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    unset_fake_temporarily,
)

from roll.algorithms.objective import ValueObjective
from roll.trainers import step as steps
from roll.trainers.model import HfForward, prepare_model
from roll.trainers.step import Objective, TrainingStep, results_by_token
from tests.trainers.test_packed_training import BY_NAME, OF_WHOLE_RESPONSES, full_batch
from tests.trainers.tiny_models import write_model
from tests.trainers.trainers import trainer_setup

pytestmark = pytest.mark.tier("all")
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def known_device(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    library, torch_folder = tmp_path_factory.mktemp("device") / "fake_cuda.so", Path(torch.__file__).parent
    source = Path(__file__).with_name("fake_cuda.cpp")
    places = ["-I", torch_folder / "include", "-L", torch_folder / "lib", "-lc10"]
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library, *places], check=True)
    ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(monkeypatch):
    """Fake tensors; reading one back gives ones."""

    def numpy(tensor):
        assert tensor.device.type == "cpu", f"can't convert {tensor.device} to numpy"
        return np.ones(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    monkeypatch.setattr(FakeTensor, "numpy", numpy, raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def losses(model_path: str, objectives: Sequence[Objective], device: torch.device = CUDA) -> list[torch.Tensor]:
    """The loss of a batch by each objective. The model is on ``cuda``, the batch on ``device``."""
    kind = "value" if isinstance(objectives[0], ValueObjective) else "policy"
    with unset_fake_temporarily():
        model = prepare_model(trainer_setup(model_path, kind=kind), gradient_checkpointing=False).model
        model = model.to("meta")
    forward, batch, found = HfForward(kind, model.to_empty(device=CUDA), None, CUDA), full_batch(), []
    rows = [[*range(len(batch))]]
    for objective in objectives:
        step = TrainingStep.of(batch, objective)
        (micro_batch,) = step.micro_batches(rows, device)
        outputs = forward.outputs(micro_batch, 0.8, step.needs_entropy_gradient)
        found.append(step.loss(micro_batch, *outputs)[0])
    compute = forward.values if kind == "value" else partial(forward.logprobs, temperature=0.8)
    results_by_token(batch, rows, device, False, lambda parts: map(compute, parts))
    return found


@pytest.mark.parametrize("objectives", [[*BY_NAME, *OF_WHOLE_RESPONSES], [ValueObjective(8)]], ids=["policy", "value"])
def test_losses_are_computed_on_one_device(model_path, fake, objectives):
    assert {loss.device for loss in losses(model_path, objectives)} == {CUDA}


def test_a_batch_left_on_the_host_is_found(model_path, fake):
    with pytest.raises(FakeTensorDeviceMismatchError):
        losses(model_path, BY_NAME[:1], torch.device("cpu"))


def test_one_field_left_on_the_host_is_found(model_path, fake, monkeypatch):
    build = steps.build_micro_batch

    def built(*arguments):
        micro_batch = build(*arguments)
        micro_batch.fields["advantages"] = micro_batch.fields["advantages"].cpu()
        return micro_batch

    monkeypatch.setattr(steps, "build_micro_batch", built)
    with pytest.raises(FakeTensorDeviceMismatchError):
        losses(model_path, BY_NAME[:1])
