"""A flow-matching image model in diffusers' format: the trained transformer, and the frozen text encoders and VAE.

Engine and trainer both predict velocities with `Schedule.velocity` and encode prompts with `FrozenParts` (each prompt
separately and once), so their results for the same latent differ at most by rounding. What differs between families of
models is in `roll.pictures.families`. Weights are read from safetensors only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.utils import logging as diffusers_logging
from safetensors import safe_open
from torch import Tensor, nn

from roll.algorithms import flow
from roll.configs.pictures import KEPT_PROMPTS, MODEL_INDEX, PictureModel, settings
from roll.configs.roles import PictureSampling
from roll.pictures.families import FAMILIES, Embeddings, Family

# diffusers' progress bars and log messages at each start would hide a run's own warnings.
diffusers_logging.disable_progress_bar()
diffusers_logging.set_verbosity_error()


def load_transformer(path: str, dtype: torch.dtype) -> ModelMixin:
    """Load the transformer of the diffusers pipeline in the folder ``path``, on the CPU and without dropout.

    Raises ``OSError`` if its safetensors files are missing.
    """
    model: ModelMixin = _transformer_class(path).from_pretrained(
        path, subfolder="transformer", dtype=dtype, use_safetensors=True
    )
    if dtype != torch.float32:
        _widen_buffers(model, Path(path) / "transformer")
    return model.eval()


def _widen_buffers(model: nn.Module, folder: Path) -> None:
    """Reload buffers in float32 from ``folder``: loading the model rounded them, and trainers send them in float32."""
    buffers = dict(model.named_buffers())
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            for name in buffers.keys() & set(stored.keys()):
                buffers[name].data = stored.get_tensor(name).float()


def empty_transformer(path: str) -> ModelMixin:
    """Return the transformer of the pipeline in the folder ``path`` on the meta device (without weights)."""
    made = _transformer_class(path)
    with torch.device("meta"):
        model: ModelMixin = made.from_config(made.load_config(path, subfolder="transformer"))
    return model


def _transformer_class(path: str) -> Any:
    return getattr(diffusers, PictureModel.read(path).transformer["_class_name"])


@dataclass(frozen=True)
class Conditions:
    """Prompt embeddings that condition the transformer, one row per image."""

    embeddings: Embeddings
    """``[batch, ...]`` each, under the names of the transformer's inputs."""
    negative: Embeddings | None = None
    """Embeddings of the negative prompt; None without classifier-free guidance."""

    def repeated(self, times: int) -> Conditions:
        """Return the conditions with each row repeated ``times`` times."""
        negative = None if self.negative is None else _repeated(self.negative, times)
        return Conditions(_repeated(self.embeddings, times), negative)

    @classmethod
    def joined(cls, rows: Sequence[Conditions]) -> Conditions:
        """Concatenate conditions to one batch. All have negative ones, or none has."""
        negative = [row.negative for row in rows if row.negative is not None]
        return cls(_joined([row.embeddings for row in rows]), _joined(negative) if negative else None)


def _repeated(rows: Embeddings, times: int) -> Embeddings:
    return {name: each.repeat_interleave(times, dim=0) for name, each in rows.items()}


def _joined(rows: Sequence[Embeddings]) -> Embeddings:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class Schedule:
    """The denoising steps of a pipeline with given sampling settings: their noise levels, their velocities, and the
    distributions of the stochastic ones."""

    sampling: PictureSampling
    model: PictureModel
    levels: Tensor
    """float32 ``[steps + 1]``: noise levels from 1 to 0."""

    @classmethod
    def of(cls, sampling: PictureSampling, path: str) -> Schedule:
        """Return the schedule for these settings, with the noise levels of the pipeline in the folder ``path``.

        ``sampling.shift`` takes the place of the shift in the pipeline's settings, which may depend on the resolution.
        """
        model = PictureModel.read(path)
        family, steps = FAMILIES[model.pipeline], sampling.num_inference_steps
        changed = {} if sampling.shift is None else {"shift": sampling.shift, "use_dynamic_shifting": False}
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler", **changed)
        rows, columns = model.grid(sampling)
        known = scheduler.config
        shift = calculate_shift(
            rows * columns, known.base_image_seq_len, known.max_image_seq_len, known.base_shift, known.max_shift
        )
        spaced = np.linspace(1.0, 1 / steps, steps).tolist() if family.spaced else None
        scheduler.set_timesteps(steps, sigmas=spaced, mu=shift)
        return cls(sampling, model, scheduler.sigmas)

    @cached_property
    def family(self) -> Family:
        """Adapter for the pipeline's models."""
        return FAMILIES[self.model.pipeline]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of an image's latents, as the transformer takes them."""
        return self.family.latent_shape(self.model, self.model.grid(self.sampling))

    def velocity(self, transformer: nn.Module, latents: Tensor, steps: Tensor, conditions: Conditions) -> Tensor:
        """Return the predicted velocities, float32, in the shape of the latents ``[batch, ...]``.

        ``steps`` (int64 ``[batch]``) are the numbers of the steps to take. With classifier-free guidance both
        predictions are computed in one forward pass.
        """
        levels, negative = self.levels.to(latents.device)[steps], conditions.negative
        if negative is None:
            return self._predicted(transformer, latents, levels, conditions.embeddings)
        both = _joined([negative, conditions.embeddings])
        away, towards = self._predicted(transformer, torch.cat([latents] * 2), levels.repeat(2), both).chunk(2)
        return self.family.guided(towards, away, self.model.guidance(self.sampling))

    def _predicted(self, transformer: nn.Module, latents: Tensor, levels: Tensor, embeddings: Embeddings) -> Tensor:
        result: Tensor = transformer(
            hidden_states=latents.to(embeddings["encoder_hidden_states"].dtype),
            timestep=levels * self.family.time_steps,
            **embeddings,
            **self.family.inputs(self.model, self.sampling, latents, embeddings),
            return_dict=False,
        )[0]
        return result.float()

    def moments(
        self, latents: Tensor, velocities: Tensor, steps: Tensor, noisy: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return mean ``[batch, ...]`` and standard deviation ``[batch]`` of the next latents.

        ``steps`` (int64 ``[batch]``) are the numbers of the steps to take. Rows that are not ``noisy`` (bool
        ``[batch]``; default: all are) take the deterministic ODE step, with deviation 0.
        """
        levels = self.levels.to(latents.device)
        noise = self.sampling.noise_level if noisy is None else noisy * self.sampling.noise_level
        return flow.step_moments(
            self.sampling.kind,
            latents,
            velocities,
            levels[steps],
            levels[steps + 1],
            noise,
            float(self.levels[1]),
        )

    def log_probs(self, drawn: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return the log-probability of each latent ``drawn`` from its Gaussian, float32 ``[batch]``, in nats."""
        return flow.log_prob(drawn, mean, std, self._reduce)

    def guarded_log_probs(self, drawn: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor, steps: Tensor) -> Tensor:
        """Return `flow.guarded_log_prob` of each latent ``drawn``, float32 ``[batch]``.

        For ``sampling.log_prob: guard``. ``steps`` (int64 ``[batch]``) are the numbers of the steps. A step's gradient
        is divided by its length in noise levels, relative to the mean length of the steps among which the trained ones
        lie, so that the size of gradients stays.
        """
        lengths = -self.levels.diff().to(steps.device)
        weights = lengths[: self.sampling.reach].mean() / lengths[steps]
        return flow.guarded_log_prob(drawn, mean, old_mean, std, weights)

    def divergences(self, mean: Tensor, reference: Tensor, std: Tensor) -> Tensor:
        """Return the KL divergence of each step's Gaussian from the reference's, ``[batch]``, in nats.

        ``mean`` and ``reference`` are ``[batch, ...]``. As for log-probabilities, it is per dimension or summed over
        them (`sampling.log_prob`).
        """
        return flow.kl(mean, reference, std, self._reduce)

    def entropies(self, std: Tensor, dimensions: int) -> Tensor:
        """Return the entropy of each step's Gaussian, ``[batch]``, in nats: per dimension or summed over the
        ``dimensions`` of a latent, as for log-probabilities (`sampling.log_prob`)."""
        each = std.log() + 0.5 * (1 + np.log(2 * np.pi))
        return each if self._reduce == "mean" else each * dimensions

    @property
    def _reduce(self) -> flow.Reduce:
        return "sum" if self.sampling.log_prob == "sum" else "mean"


class FrozenParts:
    """The frozen text encoders and VAE of a pipeline, with a cache of prompt embeddings."""

    def __init__(
        self, path: str, transformer: nn.Module, dtype: torch.dtype, device: torch.device, *, decodes: bool
    ) -> None:
        """Load the parts from the pipeline in ``path``; the VAE only if the caller ``decodes`` latents."""
        self._model = PictureModel.read(path)
        self._family = FAMILIES[self._model.pipeline]
        index = settings(Path(path) / MODEL_INDEX)
        # diffusers requires None to be passed for components that the index marks as missing.
        own = {name: None for name, entry in index.items() if entry == [None, None]} | {"transformer": transformer}
        if not decodes:
            own["vae"] = None
        pipeline = getattr(diffusers, self._model.pipeline)
        self._pipeline = pipeline.from_pretrained(path, dtype=dtype, use_safetensors=True, **own)
        for part in self._parts():
            part.eval().requires_grad_(False).to(device)
        self._device = device
        self._dtype = dtype
        self._known: OrderedDict[tuple[str, int], Embeddings] = OrderedDict()

    def move(self, device: torch.device) -> None:
        """Move the frozen parts to another device."""
        for part in self._parts():
            part.to(device)

    def conditions(self, prompts: list[str], sampling: PictureSampling) -> Conditions:
        """Return the embeddings of the prompts, one row each, with negative ones if there is guidance."""
        length = sampling.max_sequence_length
        embeddings = self._stacked(prompts, length)
        if self._model.guidance(sampling) == 1:
            return Conditions(embeddings)
        return Conditions(embeddings, self._stacked([sampling.negative_prompt] * len(prompts), length))

    @torch.no_grad()
    def picture(self, latents: Tensor, sampling: PictureSampling) -> np.ndarray:
        """Decode the latents of one image to RGB, uint8 ``[height, width, 3]``."""
        decoded = self._family.decode(self._pipeline.vae, latents, self._model.grid(sampling), self._dtype)
        return (decoded.float() / 2 + 0.5).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()

    def _parts(self) -> list[nn.Module]:
        parts = self._pipeline.components.items()
        return [part for name, part in parts if isinstance(part, nn.Module) and name != "transformer"]

    def _stacked(self, prompts: list[str], length: int) -> Embeddings:
        embedded = [self._embedded(prompt, length) for prompt in prompts]
        return {name: torch.stack([each[name] for each in embedded]).to(self._device) for name in embedded[0]}

    @torch.no_grad()
    def _embedded(self, prompt: str, length: int) -> Embeddings:
        key = prompt, length
        if key not in self._known:
            found = self._family.encode(self._pipeline, prompt, length, self._device)
            self._known[key] = {
                name: part.to("cpu", self._dtype if part.is_floating_point() else part.dtype)
                for name, part in found.items()
            }
            if len(self._known) > KEPT_PROMPTS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
