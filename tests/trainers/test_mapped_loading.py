"""How `fsdp2_train` loads a model of a shorter precision: the same weights, and no rank holds a whole model."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from roll.configs.roles import ModelArguments
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.model import mapped_dtype, prepare_model
from tests.trainers.nursery import on_ranks
from tests.trainers.ranks import Job, run_here, run_job
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import trainer_setup

MIB = 2**20
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}


def in_precision(folder: Path, dtype: torch.dtype, keep: str | None = None) -> str:
    """The same model in a file of this precision; the tensor ``keep`` stays as it is."""
    file = folder / "model.safetensors"
    weights = {name: tensor if name == keep else tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return str(folder)


@pytest.fixture
def models(tmp_path) -> tuple[str, str]:
    """A model in bfloat16, and the same numbers in a file of float32."""
    short = in_precision(Path(write_model(tmp_path / "short", tied=False)), torch.bfloat16)
    write_model(tmp_path / "long", tied=False)
    save_file(
        {name: tensor.float() for name, tensor in load_file(Path(short, "model.safetensors")).items()},
        tmp_path / "long" / "model.safetensors",
        {"format": "pt"},
    )
    return short, str(tmp_path / "long")


def loaded_and_trained(trainer, _):
    dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    before = weights_of(trainer)
    return dtypes, before, trainer.train_step(make_batch(), OBJECTIVE, 0.9), weights_of(trainer)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.tier("all"))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_are_float32_and_the_steps_those_of_a_float32_file(models, ranks, dtype):
    run = run_here if ranks == 1 else run_job
    setup = {"model_args": ModelArguments(dtype=dtype)}
    short, long = (run(Job(loaded_and_trained, "fsdp2_train", path, setup=setup, ranks=ranks)) for path in models)
    whole = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).state_dict()
    for (dtypes, before, metrics, after), (_, _, long_metrics, long_after) in zip(short, long, strict=True):
        assert dtypes == {"torch.float32"} and before.keys() == whole.keys()
        assert all(np.array_equal(before[name], weight.numpy()) for name, weight in whole.items())
        assert metrics == long_metrics
        assert all(np.array_equal(after[name], weight) for name, weight in long_after.items())


def test_a_model_with_constants_of_its_own_is_loaded_in_its_own_precision(tmp_path):
    """Gemma multiplies embeddings by a constant that is in no file, and that bfloat16 would round."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=23, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    setup = trainer_setup(str(tmp_path), model_args=ModelArguments(attn_implementation="eager"))
    assert mapped_dtype(setup) == torch.bfloat16
    model = prepare_model(setup, gradient_checkpointing=False, mapped=True).model
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    buffers = dict(whole.named_buffers())
    assert any("embed_scale" in name for name in buffers)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_adapters_are_drawn_for_the_base_in_its_own_precision(models):
    setup = {"model_args": ModelArguments(dtype="float32", lora_target="all-linear", lora_rank=2)}
    short, long = (run_here(Job(adapters, "fsdp2_train", path, setup=setup, ranks=1))[0] for path in models)
    assert short.keys() == long.keys() and all(np.array_equal(short[name], long[name]) for name in short)


def adapters(trainer, _) -> dict[str, np.ndarray]:
    return {
        name: parameter.full_tensor().detach().numpy().copy()
        for name, parameter in trainer.model.named_parameters()
        if "lora" in name
    }


def test_a_precision_is_taken_over_only_if_all_tensors_have_it(tmp_path):
    path = write_model(tmp_path)
    assert mapped_dtype(trainer_setup(path)) == torch.float32
    in_precision(tmp_path, torch.float16)
    assert mapped_dtype(trainer_setup(path)) == torch.float16
    write_model(tmp_path)
    in_precision(tmp_path, torch.bfloat16, keep="model.norm.weight")
    assert mapped_dtype(trainer_setup(path)) == torch.float32
    assert mapped_dtype(trainer_setup(path, forward_only=True, model_args=ModelArguments(dtype="bfloat16"))) == (
        torch.bfloat16
    ), "what is never updated is stored as it computes"


def test_a_damaged_or_missing_file_is_named_as_before(tmp_path):
    path = write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(Exception, match="header"):
        prepare_model(trainer_setup(path), gradient_checkpointing=False, mapped=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        prepare_model(trainer_setup(path), gradient_checkpointing=False, mapped=True)


def anonymous_bytes() -> int:
    """Memory of this process that is not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Loaded(Exception):
    """The model is loaded and divided."""


def stop(*_: object) -> None:
    raise Loaded


def most_while_loading(rank: int, port: int, paths: tuple[str, str]) -> tuple[int, int]:
    """The most that loading added to this process's own memory, and the number of its weights."""
    small, path = paths
    AutoModelForCausalLM.from_pretrained(small)  # What is imported for it is not what is measured.
    trainer = Fsdp2TrainStrategy(trainer_setup(path, rank=rank, world_size=2, port=port))
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    # The first pass gathers the layers; that is computing.
    with patch("roll.trainers.fsdp2.forward_pass", stop), pytest.raises(Loaded):
        trainer.initialize()
    done.set()
    watcher.join()
    return peak - before, sum(parameter.numel() for parameter in trainer.model.parameters())


@pytest.mark.tier("all")
def test_no_rank_needs_memory_for_the_whole_model(tmp_path):
    small = write_model(tmp_path / "small")
    path = in_precision(Path(write_model(tmp_path / "large", **WIDE)), torch.bfloat16)
    for peak, parameters in on_ranks(most_while_loading, (small, path), ranks=2):
        shares = parameters / 2 * (2 + 4)
        assert peak < shares + 20 * MIB < 4 * parameters, f"{peak / MIB:.0f} MiB for {parameters:,} weights"
