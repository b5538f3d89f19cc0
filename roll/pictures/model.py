"""A flow-matching image model in diffusers' format: the trained transformer, and the frozen text encoders and VAE.

Engine and trainer both predict velocities with `velocity` and encode prompts with `FrozenParts` (each prompt separately
and once), so their results for the same latent differ at most by rounding. Weights are read from safetensors only.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from safetensors import safe_open
from torch import Tensor, nn

from roll.algorithms import flow
from roll.configs.roles import PictureSampling

# diffusers' progress bars and log messages at each start would hide a run's own warnings.
diffusers_logging.disable_progress_bar()
diffusers_logging.set_verbosity_error()
TIME_STEPS = 1000.0
"""The time step that the model expects at noise level 1."""
KEPT_PROMPTS = 1024
"""Number of prompts whose embeddings are cached in host memory (LRU). With a T5 encoder, each takes 5 MB."""


def load_transformer(path: str, dtype: torch.dtype) -> SD3Transformer2DModel:
    """Load the transformer of the diffusers pipeline in the folder ``path``, on the CPU and without dropout.

    Raises ``OSError`` if its safetensors files are missing.
    """
    model: SD3Transformer2DModel = SD3Transformer2DModel.from_pretrained(
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


def empty_transformer(path: str) -> SD3Transformer2DModel:
    """Return the transformer of the pipeline in the folder ``path`` on the meta device (without weights)."""
    settings = SD3Transformer2DModel.load_config(path, subfolder="transformer")
    with torch.device("meta"):
        return SD3Transformer2DModel.from_config(settings)


@dataclass(frozen=True)
class Schedule:
    """The noise levels of the denoising steps, and the distributions of the stochastic ones."""

    sampling: PictureSampling
    levels: Tensor
    """float32 ``[steps + 1]``: noise levels from 1 to 0."""
    latent_shape: tuple[int, ...]
    """Shape of an image's latents: channels, height, width."""

    @classmethod
    def of(cls, sampling: PictureSampling, path: str) -> Schedule:
        """Return the schedule for these settings. ``sampling.shift`` defaults to that of the pipeline in ``path``."""
        shift = sampling.shift
        if shift is None:
            shift = float(_settings(Path(path) / "scheduler" / "scheduler_config.json").get("shift", 1.0))
        transformer, vae = (_settings(Path(path) / part / "config.json") for part in ("transformer", "vae"))
        scale = 2 ** (len(vae.get("block_out_channels") or vae["decoder_block_out_channels"]) - 1)
        shape = transformer["in_channels"], sampling.height // scale, sampling.width // scale
        return cls(sampling, flow.levels(sampling.num_inference_steps, shift), shape)

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
        return flow.log_prob(drawn, mean, std, self.sampling.log_prob)

    def divergences(self, mean: Tensor, reference: Tensor, std: Tensor) -> Tensor:
        """Return the KL divergence of each step's Gaussian from the reference's, ``[batch]``, in nats.

        ``mean`` and ``reference`` are ``[batch, ...]``. As for log-probabilities, it is per dimension or summed over
        them (`sampling.log_prob`).
        """
        return flow.kl(mean, reference, std, self.sampling.log_prob)

    def entropies(self, std: Tensor, dimensions: int) -> Tensor:
        """Return the entropy of each step's Gaussian, ``[batch]``, in nats: per dimension or summed over the
        ``dimensions`` of a latent, as for log-probabilities (`sampling.log_prob`)."""
        each = std.log() + 0.5 * (1 + np.log(2 * np.pi))
        return each if self.sampling.log_prob == "mean" else each * dimensions


def _settings(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return settings


@dataclass(frozen=True)
class Conditions:
    """Prompt embeddings that condition the transformer."""

    tokens: Tensor
    """``[batch, tokens, size]``: embeddings per token."""
    pooled: Tensor
    """``[batch, size]``: pooled embeddings."""
    negative: Conditions | None = None
    """Embeddings of the negative prompt; None without classifier-free guidance."""

    def repeated(self, times: int) -> Conditions:
        """Return the conditions with each row repeated ``times`` times."""
        tokens, pooled = (each.repeat_interleave(times, dim=0) for each in (self.tokens, self.pooled))
        return Conditions(tokens, pooled, None if self.negative is None else self.negative.repeated(times))


def velocity(model: nn.Module, latents: Tensor, levels: Tensor, conditions: Conditions, guidance: float) -> Tensor:
    """Return the predicted velocities, float32, in the shape of the latents ``[batch, channels, height, width]``.

    ``levels`` are the noise levels, float32 ``[batch]``. If ``conditions`` include negative ones (classifier-free
    guidance with scale ``guidance``), both predictions are computed in one forward pass.
    """
    negative = conditions.negative
    if negative is None:
        return _velocity(model, latents, levels, conditions.tokens, conditions.pooled)
    tokens, pooled = (torch.cat(pair) for pair in _pairs(negative, conditions))
    away, towards = _velocity(model, latents.repeat(2, 1, 1, 1), levels.repeat(2), tokens, pooled).chunk(2)
    return away + guidance * (towards - away)


def _pairs(one: Conditions, other: Conditions) -> list[tuple[Tensor, Tensor]]:
    return [(one.tokens, other.tokens), (one.pooled, other.pooled)]


def _velocity(model: nn.Module, latents: Tensor, levels: Tensor, tokens: Tensor, pooled: Tensor) -> Tensor:
    result: Tensor = model(
        hidden_states=latents.to(tokens.dtype),
        timestep=levels * TIME_STEPS,
        encoder_hidden_states=tokens,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    return result.float()


class FrozenParts:
    """The frozen text encoders and VAE of a pipeline, with a cache of prompt embeddings."""

    def __init__(
        self, path: str, transformer: SD3Transformer2DModel, dtype: torch.dtype, device: torch.device, *, decodes: bool
    ) -> None:
        """Load the parts from the pipeline in ``path``; the VAE only if the caller ``decodes`` latents."""
        index = json.loads((Path(path) / "model_index.json").read_text(encoding="utf-8"))
        # diffusers requires None to be passed for components that the index marks as missing.
        own = {name: None for name, entry in index.items() if entry == [None, None]} | {"transformer": transformer}
        if not decodes:
            own["vae"] = None
        self._pipeline = StableDiffusion3Pipeline.from_pretrained(path, dtype=dtype, use_safetensors=True, **own)
        for part in self._parts():
            part.eval().requires_grad_(False).to(device)
        self._device = device
        self._dtype = dtype
        self._known: OrderedDict[tuple[str, int], tuple[Tensor, Tensor]] = OrderedDict()

    def move(self, device: torch.device) -> None:
        """Move the frozen parts to another device."""
        for part in self._parts():
            part.to(device)

    def conditions(self, prompts: list[str], sampling: PictureSampling) -> Conditions:
        """Return the embeddings of the prompts, one row each, with negative ones if there is guidance."""
        length = sampling.max_sequence_length
        tokens, pooled = self._stacked(prompts, length)
        if sampling.guidance_scale == 1:
            return Conditions(tokens, pooled)
        return Conditions(tokens, pooled, Conditions(*self._stacked([sampling.negative_prompt] * len(prompts), length)))

    @torch.no_grad()
    def picture(self, latents: Tensor) -> np.ndarray:
        """Decode latents ``[channels, height, width]`` to an RGB image, uint8 ``[height, width, 3]``."""
        vae = self._pipeline.vae
        scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        decoded = vae.decode(scaled[None].to(self._dtype), return_dict=False)[0][0]
        return (decoded.float() / 2 + 0.5).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()

    def latent_shape(self, sampling: PictureSampling) -> tuple[int, int, int]:
        """Return (channels, height, width) of an image's latents."""
        scale = self._pipeline.vae_scale_factor
        channels = self._pipeline.transformer.config.in_channels
        return channels, sampling.height // scale, sampling.width // scale

    def _parts(self) -> list[nn.Module]:
        pipeline = self._pipeline
        parts = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3, pipeline.vae)
        return [part for part in parts if part is not None]

    def _stacked(self, prompts: list[str], length: int) -> tuple[Tensor, Tensor]:
        embedded = [self._embedded(prompt, length) for prompt in prompts]
        tokens, pooled = (torch.stack(rows).to(self._device) for rows in zip(*embedded, strict=True))
        return tokens, pooled

    @torch.no_grad()
    def _embedded(self, prompt: str, length: int) -> tuple[Tensor, Tensor]:
        key = prompt, length
        if key not in self._known:
            tokens, _, pooled, _ = self._pipeline.encode_prompt(
                prompt,
                prompt,
                prompt,
                device=self._device,
                do_classifier_free_guidance=False,
                max_sequence_length=length,
            )
            self._known[key] = tokens[0].to("cpu", self._dtype), pooled[0].to("cpu", self._dtype)
            if len(self._known) > KEPT_PROMPTS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
