"""Families of image models in diffusers' format, and what a pipeline's settings files say. Reads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roll.configs.roles import PictureSampling

MODEL_INDEX = "model_index.json"
"""Index file that marks a folder as a diffusers pipeline."""
KEPT_PROMPTS = 1024
"""Number of prompts whose embeddings each process caches in host memory (LRU). With a T5 encoder, each takes 5 MB."""


@dataclass(frozen=True)
class PictureFamily:
    """Properties that all models of a diffusers pipeline class share."""

    title: str
    """Name of the models, for messages."""
    guidance: Literal["guidance_scale", "true_cfg_scale"]
    """The key of `sampling` that is the scale of classifier-free guidance."""
    packs: bool
    """True if the pipeline packs 2 x 2 latent pixels into a token itself; False if the transformer has patches."""
    long_encoder: str
    """The part of the pipeline that reads `max_sequence_length` tokens of a prompt."""
    has_short_encoders: bool = True
    """True if there are encoders (CLIP) that read as many tokens as their tokenizer allows."""
    template_tokens: int = 0
    """Tokens of a prompt's embeddings that are not the prompt's own."""


FAMILIES: dict[str, PictureFamily] = {
    "StableDiffusion3Pipeline": PictureFamily(
        "Stable Diffusion 3 or 3.5", "guidance_scale", packs=False, long_encoder="text_encoder_3"
    ),
    "FluxPipeline": PictureFamily("FLUX.1", "true_cfg_scale", packs=True, long_encoder="text_encoder_2"),
    "QwenImagePipeline": PictureFamily(
        "Qwen-Image",
        "true_cfg_scale",
        packs=True,
        long_encoder="text_encoder",
        has_short_encoders=False,
        template_tokens=5,
    ),
}
"""Class of a diffusers pipeline -> the family of its models."""


@dataclass(frozen=True)
class PictureModel:
    """A diffusers pipeline, as described by its settings files. The settings of a missing file are empty."""

    family: PictureFamily
    index: Mapping[str, Any]
    """Class of the pipeline, and library and class of each of its parts."""
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> PictureModel:
        """Read the settings of the pipeline in the folder ``path``. ``KeyError`` if its class is not in `FAMILIES`."""
        index = settings(Path(path) / MODEL_INDEX)
        transformer, vae = (settings(Path(path) / part / "config.json") for part in ("transformer", "vae"))
        scheduler = settings(Path(path) / "scheduler" / "scheduler_config.json")
        return cls(FAMILIES[index.get("_class_name", "")], index, transformer, vae, scheduler)

    @property
    def pipeline(self) -> str:
        """Class of the pipeline."""
        return str(self.index["_class_name"])

    @property
    def vae_scale(self) -> int:
        """Number of pixels per latent pixel, in each direction."""
        if "temperal_downsample" in self.vae:
            return int(2 ** len(self.vae["temperal_downsample"]))
        channels = self.vae.get("block_out_channels") or self.vae.get("decoder_block_out_channels") or [1]
        return int(2 ** (len(channels) - 1))

    @property
    def token_pixels(self) -> int:
        """Number of pixels per token of the transformer, in each direction."""
        return self.vae_scale * (2 if self.family.packs else int(self.transformer.get("patch_size", 1)))

    @property
    def most_pixels(self) -> int | None:
        """Largest height and width that the transformer has positions for; None if there is no limit."""
        positions = self.transformer.get("pos_embed_max_size")
        return int(positions) * self.token_pixels if positions else None

    @property
    def embeds_guidance(self) -> bool:
        """True if the transformer was distilled with guidance and reads its scale as an input (FLUX.1-dev)."""
        return bool(self.transformer.get("guidance_embeds"))

    def grid(self, sampling: PictureSampling) -> tuple[int, int]:
        """Return the number of rows and columns of an image's tokens."""
        return sampling.height // self.token_pixels, sampling.width // self.token_pixels

    def guidance(self, sampling: PictureSampling) -> float:
        """Return the scale of classifier-free guidance; 1 is none."""
        scales = {"guidance_scale": sampling.guidance_scale, "true_cfg_scale": sampling.true_cfg_scale}
        return scales[self.family.guidance]

    def longest_prompt(self, sampling: PictureSampling, short: int) -> int:
        """Return the number of tokens from which on prompts are cut by all text encoders.

        ``short`` is the limit of the tokenizer of those with few tokens.
        """
        has_long = self.index.get(self.family.long_encoder, [None])[0] is not None
        own = sampling.max_sequence_length - self.family.template_tokens if has_long else 0
        return max(own, short) if self.family.has_short_encoders else own


def settings(file: Path) -> dict[str, Any]:
    """Return the settings in a JSON file; nothing if it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
