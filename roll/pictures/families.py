"""Adapters for the families of image models: encoding of prompts, inputs of the transformer, guidance and decoding.

Each family is one record, `Family`, under the class of its diffusers pipeline. Its functions take the pipeline's own
parts, so that they compute what the pipeline's call computes. `roll.configs.pictures` has what needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from roll.configs.pictures import PictureModel
from roll.configs.roles import PictureSampling

Embeddings = dict[str, Tensor]
"""Embeddings of one prompt, without a batch dimension, or of a batch, under the names of the transformer's inputs."""
Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


@dataclass(frozen=True)
class Family:
    """Adapter for the models of one diffusers pipeline class."""

    encode: Callable[[Any, str, int, torch.device], Embeddings]
    """(pipeline, prompt, tokens, device) -> its embeddings. All prompts have embeddings of the same shape."""
    latent_shape: Callable[[PictureModel, Grid], tuple[int, ...]]
    """Shape of an image's latents, as the transformer takes them."""
    time_steps: float
    """The transformer's time step at noise level 1."""
    inputs: Callable[[PictureModel, PictureSampling, Tensor, Embeddings], dict[str, Any]]
    """(model, sampling, latents, embeddings of the batch) -> other inputs of the transformer."""
    guided: Callable[[Tensor, Tensor, float], Tensor]
    """(velocity for the prompt, for the negative prompt, scale) -> velocity with classifier-free guidance."""
    decode: Callable[[Any, Tensor, Grid, torch.dtype], Tensor]
    """(VAE, latents of one image in float32, grid, dtype of the VAE) -> image in [-1, 1], ``[3, height, width]``."""
    spaced: bool = True
    """True if the pipeline spaces noise levels evenly from 1 to 1 / steps before shifting them, False if its scheduler
    chooses them."""


def _encode_sd3(pipeline: Any, prompt: str, tokens: int, device: torch.device) -> Embeddings:
    words, _, pooled, _ = pipeline.encode_prompt(
        prompt, prompt, prompt, device=device, do_classifier_free_guidance=False, max_sequence_length=tokens
    )
    return {"encoder_hidden_states": words[0], "pooled_projections": pooled[0]}


def _encode_flux(pipeline: Any, prompt: str, tokens: int, device: torch.device) -> Embeddings:
    words, pooled, _ = pipeline.encode_prompt(prompt, None, device=device, max_sequence_length=tokens)
    return {"encoder_hidden_states": words[0], "pooled_projections": pooled[0]}


def _encode_qwen(pipeline: Any, prompt: str, tokens: int, device: torch.device) -> Embeddings:
    """Pad the embeddings to ``tokens``, with a mask, so that prompts of any length share a batch and its bits."""
    words, _ = pipeline.encode_prompt(prompt, device=device, max_sequence_length=tokens)
    known = words.shape[1]
    return {
        "encoder_hidden_states": functional.pad(words[0], (0, 0, 0, tokens - known)),
        "encoder_hidden_states_mask": torch.arange(tokens, device=device) < known,
    }


def _patched_shape(model: PictureModel, grid: Grid) -> tuple[int, ...]:
    patch = int(model.transformer["patch_size"])
    return model.transformer["in_channels"], grid[0] * patch, grid[1] * patch


def _packed_shape(model: PictureModel, grid: Grid) -> tuple[int, ...]:
    return grid[0] * grid[1], model.transformer["in_channels"]


def _no_inputs(model: PictureModel, sampling: PictureSampling, latents: Tensor, embeddings: Embeddings) -> Embeddings:
    return {}


def _flux_inputs(
    model: PictureModel, sampling: PictureSampling, latents: Tensor, embeddings: Embeddings
) -> dict[str, Any]:
    """Return the positions of text and image tokens, and the guidance that a distilled model reads."""
    (rows, columns), device = model.grid(sampling), latents.device
    places = torch.cartesian_prod(
        torch.zeros(1, device=device),
        torch.arange(rows, dtype=torch.float32, device=device),
        torch.arange(columns, dtype=torch.float32, device=device),
    )
    words = embeddings["encoder_hidden_states"].shape[1]
    scale = torch.full((len(latents),), sampling.guidance_scale, device=device) if model.embeds_guidance else None
    return {"img_ids": places, "txt_ids": torch.zeros(words, 3, device=device), "guidance": scale}


def _qwen_inputs(
    model: PictureModel, sampling: PictureSampling, latents: Tensor, embeddings: Embeddings
) -> dict[str, Any]:
    return {"img_shapes": [[(1, *model.grid(sampling))]] * len(latents)}


def _guided(towards: Tensor, away: Tensor, scale: float) -> Tensor:
    return away + scale * (towards - away)


def _guided_with_norm(towards: Tensor, away: Tensor, scale: float) -> Tensor:
    """Keep the norm of each token's velocity for the prompt, as Qwen-Image's pipeline does."""
    combined = _guided(towards, away, scale)
    return combined * (towards.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


def _unpacked(latents: Tensor, grid: Grid) -> Tensor:
    """Return packed latents ``[tokens, 4 channels]`` as ``[channels, height, width]``."""
    rows, columns = grid
    blocks = latents.reshape(rows, columns, -1, 2, 2).permute(2, 0, 3, 1, 4)
    return blocks.reshape(-1, 2 * rows, 2 * columns)


def _decode(vae: Any, latents: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    decoded: Tensor = vae.decode(scaled[None].to(dtype), return_dict=False)[0][0]
    return decoded


def _decode_flux(vae: Any, latents: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    return _decode(vae, _unpacked(latents, grid), grid, dtype)


def _decode_qwen(vae: Any, latents: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Decode a video of one frame, whose latents have a mean and a deviation per channel."""
    mean, std = (
        torch.tensor(values, device=latents.device)[:, None, None]
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    scaled = _unpacked(latents, grid) * std + mean
    decoded: Tensor = vae.decode(scaled[None, :, None].to(dtype), return_dict=False)[0][0, :, 0]
    return decoded


FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(_encode_sd3, _patched_shape, 1000.0, _no_inputs, _guided, _decode, spaced=False),
    "FluxPipeline": Family(_encode_flux, _packed_shape, 1.0, _flux_inputs, _guided, _decode_flux),
    "QwenImagePipeline": Family(_encode_qwen, _packed_shape, 1.0, _qwen_inputs, _guided_with_norm, _decode_qwen),
}
"""Class of a diffusers pipeline -> how its models compute."""
