"""Sizes of models, from the `config.json` of a folder or from a table of published models, which need not be present.

Only sizes that decide memory are kept: matrices are counted, positions and tokens are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ShapeUnknown(ValueError):
    """Raised if the sizes of a model are unknown. The message says what would help."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements. A decoder with gated feed-forward layers and grouped-query attention (Qwen, Llama, ...)."""

    vocabulary: int
    hidden: int
    intermediate: int
    """Width of the feed-forward part of a dense layer."""
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool
    """True if the output layer is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Number of experts; 0: every layer is dense."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    value_head: bool = False
    """True for a critic: a number per token replaces the output layer."""

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: queries, keys, values and output, with their biases and norms."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        biases = queries + 2 * keys if self.qkv_bias else 0
        norms = 2 * self.head_size if self.qk_norm else 0
        return 2 * self.hidden * queries + 2 * self.hidden * keys + biases + norms

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def dense_parameters(self) -> int:
        """Parameters of one layer's feed-forward part, or of the router that chooses experts."""
        return self.hidden * self.experts if self.experts else 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, with its two norms."""
        return self.attention_parameters + self.expert_parameters + self.dense_parameters + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding: a row for each token of the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm, and the output layer if it is separate."""
        if self.value_head:
            return self.embedding_parameters + 2 * self.hidden + 1
        return self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest parameter."""
        experts = self.expert_parameters * 2 // 3  # gate and up projections of all experts are one tensor
        return max(self.embedding_parameters, self.hidden * self.intermediate, experts)

    def cache_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


def _qwen25(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool) -> ModelShape:
    vocabulary = 151_936 if tied else 152_064
    size = hidden // heads
    return ModelShape(vocabulary, hidden, intermediate, layers, heads, kv_heads, size, tied, qkv_bias=True)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(151_936, hidden, intermediate, layers, heads, 8, 128, tied, qk_norm=True)


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(128_256, hidden, intermediate, layers, heads, 8, hidden // heads, tied)


KNOWN: dict[str, ModelShape] = {
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen25(2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 28, 4, tied=False),
    "qwen2.5-14b": _qwen25(5120, 13824, 48, 40, 8, tied=False),
    "qwen2.5-32b": _qwen25(5120, 27648, 64, 40, 8, tied=False),
    "qwen2.5-72b": _qwen25(8192, 29568, 80, 64, 8, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "qwen3-30b-a3b": ModelShape(
        151_936, 2048, 6144, 48, 32, 4, 128, False,
        qk_norm=True, experts=128, experts_per_token=8, expert_intermediate=768,
    ),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, tied=False),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, tied=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, tied=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, tied=True),
}  # fmt: skip
"""Published sizes: the `config.json` of the repositories Qwen/Qwen2.5-*, Qwen/Qwen3-* and meta-llama/Llama-3.*."""

_VARIANT = re.compile(r"-(instruct|base|it|chat|thinking|\d{4})$")
_BIASED_FAMILIES = ("qwen2", "qwen2_moe")
_NORMED_FAMILIES = ("qwen3", "qwen3_moe")


def find_shape(model: str) -> ModelShape:
    """Return the sizes of a model by its folder or hub name. Raises `ShapeUnknown`."""
    folder = Path(model)
    if (folder / "config.json").is_file():
        return _from_folder(folder)
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while _VARIANT.search(name):
        name = _VARIANT.sub("", name)
    if name not in KNOWN:
        raise ShapeUnknown(
            f"the sizes of {model} are not known: give a folder with its config.json, or a hub name of Qwen2.5, Qwen3 "
            "or Llama 3"
        )
    return KNOWN[name]


def _from_folder(folder: Path) -> ModelShape:
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _from_facts(facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShapeUnknown(f"{folder / 'config.json'} does not tell the sizes of a decoder: {error!r}") from error


def _from_facts(facts: Mapping[str, Any]) -> ModelShape:
    family, heads, hidden = facts["model_type"], int(facts["num_attention_heads"]), int(facts["hidden_size"])
    return ModelShape(
        vocabulary=int(facts["vocab_size"]),
        hidden=hidden,
        intermediate=int(facts["intermediate_size"]),
        layers=int(facts["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(facts.get("num_key_value_heads") or heads),
        head_size=int(facts.get("head_dim") or hidden // heads),
        tied=bool(facts.get("tie_word_embeddings", family in _BIASED_FAMILIES)),
        qkv_bias=bool(facts.get("attention_bias", False)) or family in _BIASED_FAMILIES,
        qk_norm=family in _NORMED_FAMILIES,
        experts=int(facts.get("num_experts") or facts.get("num_local_experts") or 0),
        experts_per_token=int(facts.get("num_experts_per_tok") or 0),
        expert_intermediate=int(facts.get("moe_intermediate_size") or 0),
    )
