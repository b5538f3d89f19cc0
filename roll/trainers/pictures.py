"""A flow-matching image model in a trainer: log-probabilities of recorded denoising steps, and its export.

For each step of a sample, the model predicts the velocity at the recorded latent. The velocity determines the step's
Gaussian, and thus the log-probability of the recorded next latent. All steps of a micro-batch share one forward pass.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import ModelMixin
from safetensors import SafetensorError
from torch import Tensor

from roll.configs.pictures import MODEL_INDEX
from roll.pictures.model import FrozenParts, Schedule, load_transformer
from roll.runtime.process import keep_blocks_of
from roll.trainers.base import TrainerSetup
from roll.trainers.state import PICTURES
from roll.trainers.step import MEANS, REFERENCE_MEANS, MicroBatch


def prepare_pictures(setup: TrainerSetup, gradient_checkpointing: bool, dtype: torch.dtype) -> ModelMixin:
    """Return a rank's denoising transformer, unsharded, on the CPU and without dropout."""
    model = load_transformer(setup.model_path, dtype)
    if setup.device == "cpu":
        keep_blocks_of(model.num_parameters())
    model.requires_grad_(not setup.forward_only)
    if gradient_checkpointing and not setup.forward_only:
        model.enable_gradient_checkpointing()
    return model


class PictureForward:
    """Forward pass of an image model; the counterpart of `HfForward`."""

    def __init__(self, setup: TrainerSetup, model: ModelMixin, device: torch.device) -> None:
        """Load the text encoders for ``model``, which may be sharded. Raise ``ValueError`` for a text model."""
        if setup.pictures is None:
            raise ValueError("these log-probabilities are those of pictures")
        self._model = model
        self._device = device
        self._schedule = Schedule.of(setup.pictures, setup.model_path)
        dtype = getattr(torch, setup.model_args.dtype)
        self._frozen = FrozenParts(setup.model_path, model, dtype, device, decodes=False)

    def outputs(self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, ...]:
        """Return log-probabilities and entropies of the targets, ``[rows, kept]``; see `HfForward.outputs`.

        With the reference's means in the micro-batch, their KL divergences from it follow, in closed form. The entropy
        depends only on the noise level and has no gradient. ``temperature`` has no meaning here and is ignored. With
        ``sampling.log_prob: guard`` the log-probabilities are those of `guarded_log_prob`, only good for a ratio to the
        recorded ones.
        """
        mean, std = self._moments(micro_batch)
        entropies = self._schedule.entropies(std, mean[0].numel())
        found = [self._log_probs(micro_batch, mean, std), entropies]
        if self._schedule.sampling.log_prob == "guard":
            drawn, old_mean = self._of_steps(micro_batch, "latents", 1), self._of_steps(micro_batch, MEANS)
            steps = micro_batch.targets.flatten()
            found[0] = self._schedule.guarded_log_probs(drawn, mean, old_mean, std, steps)
        if REFERENCE_MEANS in micro_batch.pictures:
            reference = self._of_steps(micro_batch, REFERENCE_MEANS)
            found.append(self._schedule.divergences(mean, reference, std))
        return tuple(values.reshape(micro_batch.targets.shape) for values in found)

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities of the targets, ``[rows, kept]``."""
        return self._log_probs(micro_batch, *self._moments(micro_batch)).reshape(micro_batch.targets.shape)

    def means(self, micro_batch: MicroBatch) -> Tensor:
        """Return the means of the targets' Gaussians, float32 ``[rows, kept, ...]`` in the shape of the latents."""
        return self._moments(micro_batch)[0].unflatten(0, micro_batch.targets.shape)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Raise ``RuntimeError``: image models have no critic."""
        raise RuntimeError("a model of pictures gives no values")

    def move(self, device: torch.device) -> None:
        """Move the frozen text encoders to a device."""
        self._frozen.move(device)

    def _of_steps(self, micro_batch: MicroBatch, name: str, shift: int = 0) -> Tensor:
        """Return a field's entries of the targets, ``[rows x kept, ...]``; ``shift`` counts from them."""
        # The prompt counts as one token, so position 0 predicts the first recorded step.
        entries = torch.from_numpy(micro_batch.pictures[name]).to(self._device)
        return entries[:, micro_batch.positions + shift].flatten(0, 1)

    def _log_probs(self, micro_batch: MicroBatch, mean: Tensor, std: Tensor) -> Tensor:
        return self._schedule.log_probs(self._of_steps(micro_batch, "latents", 1), mean, std)

    def _moments(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return mean ``[rows x kept, ...]`` and standard deviation ``[rows x kept]`` of each target's Gaussian."""
        fields, kept = micro_batch.pictures, micro_batch.targets.shape[1]
        before = self._of_steps(micro_batch, "latents")
        schedule, steps = self._schedule, micro_batch.targets.flatten()
        prompts = [str(prompt) for prompt in fields["prompts"]]
        conditions = self._frozen.conditions(prompts, schedule.sampling).repeated(kept)
        return schedule.moments(before, schedule.velocity(self._model, before, steps, conditions), steps)


@dataclass(frozen=True)
class PictureExport:
    """A copy of an image model that any thread may write to disk; see `ModelExport`."""

    model: ModelMixin
    source: str
    """Folder of the diffusers pipeline that the model was loaded from; its other components are copied."""
    beside: Callable[[str], None] | None = None
    """Optional function that writes additional files into the folder."""

    def write(self, path: str) -> None:
        """Write a complete pipeline into the folder ``path``, for ``DiffusionPipeline.from_pretrained``.

        Raises `OSError` naming the folder.
        """
        index = Path(self.source) / MODEL_INDEX
        parts = [name for name, kind in json.loads(index.read_text(encoding="utf-8")).items() if _is_part(kind)]
        Path(path).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(index, Path(path) / MODEL_INDEX)
        for part in parts:
            if part != PICTURES[0]:
                _copy_part(Path(self.source) / part, Path(path) / part)
        try:
            self.model.save_pretrained(Path(path) / PICTURES[0], safe_serialization=True)
        except SafetensorError as cause:
            raise OSError(f"cannot write the model into {path}: {cause}") from cause
        if self.beside is not None:
            self.beside(path)


def _is_part(kind: object) -> bool:
    """Return True if an entry of a pipeline's index names a component that exists (its library and its class)."""
    return isinstance(kind, list) and None not in kind


def _copy_part(source: Path, target: Path) -> None:
    """Copy the folder of a frozen component; weights become hard links if possible. Pickles are left out."""
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns("*.bin"), copy_function=_link_or_copy, dirs_exist_ok=True
    )


def _link_or_copy(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)  # of a checkpoint that was cut off; it may be a link to the source
    if source.endswith(".safetensors"):  # settings are small, and someone may edit them
        with suppress(OSError):
            os.link(Path(source).resolve(), target)
            return
    shutil.copyfile(source, target)
