"""Mapping between Hugging Face tensors and parameters of megatron-core: one table, used in both directions.

A rule names the tensors as they are in a checkpoint, the dimension that tensor-parallel ranks split, and how the shares
of several tensors are fused into one. Each tensor is cut before it is fused, so a rank reads only its share, and
splitting a share gives contiguous pieces of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from roll.strategies.train.megatron.facts import ModelFacts


class Fusion(Protocol):
    """A way to fuse shares of several tensors into the share of one, and to split it again."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Fuse the parts into one tensor."""

    def split(self, joined: Tensor) -> list[Tensor]:
        """Return the parts; copies if they are not contiguous."""


class Alone:
    """One tensor, unchanged."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the only tensor; see `Fusion.join`."""
        return parts[0]

    def split(self, joined: Tensor) -> list[Tensor]:
        """Return the tensor as the only part; see `Fusion.split`."""
        return [joined]


class Halves:
    """Two tensors, the rows of one after those of the other."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put one tensor above the other; see `Fusion.join`."""
        return torch.cat(list(parts))

    def split(self, joined: Tensor) -> list[Tensor]:
        """Return the upper and the lower half; see `Fusion.split`."""
        return list(joined.chunk(2))


@dataclass(frozen=True)
class QueryGroups:
    """Queries, keys and values, interleaved: for each group its queries, its key, its value."""

    queries: int
    """Number of query heads in a group."""
    head_size: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Interleave queries, keys and values by group; see `Fusion.join`."""
        groups = len(parts[1]) // self.head_size
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)

    def split(self, joined: Tensor) -> list[Tensor]:
        """Return queries, keys and values of all groups; see `Fusion.split`."""
        rows = [self.queries * self.head_size, self.head_size, self.head_size]
        groups = joined.reshape(-1, sum(rows), *joined.shape[1:])
        return [part.flatten(0, 1) for part in groups.split(rows, dim=1)]


@dataclass(frozen=True)
class Rule:
    """One parameter of megatron-core. ``{layer}`` and ``{expert}`` stand for numbers counted over the whole model."""

    megatron: str
    hugging_face: tuple[str, ...]
    shared_dim: int | None
    """Dimension that tensor-parallel ranks split; None: each rank has the whole tensor."""
    fusion: Fusion = Alone()
    is_vocabulary: bool = False
    """True if rows are padded to equal shares."""
    may_be_new: bool = False
    """True if a checkpoint may lack it, as one of another kind of model does. It then begins with zeros."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern that matches the parameter's name."""
        text = re.escape(self.megatron)
        for word in ("layer", "expert"):
            text = text.replace(rf"\{{{word}\}}", rf"(?P<{word}>\d+)")
        return re.compile(text)

    @property
    def is_expert(self) -> bool:
        """True if there is one such parameter per expert."""
        return "{expert}" in self.megatron

    def names(self, layer: int | None, expert: int | None) -> list[str]:
        """Return the names of the tensors in a checkpoint."""
        return [name.format(layer=layer, expert=expert) for name in self.hugging_face]


def weight_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the table for a model: every parameter that megatron-core may have for it, in the order of a checkpoint.

    Transformer Engine stores a norm with the linear layer after it and numbers experts differently, so some tensors
    have two names in megatron-core.
    """
    groups = QueryGroups(facts.heads // facts.query_groups, facts.head_size)
    here, there = "decoder.layers.{layer}.", "model.layers.{layer}."
    attention = f"{there}self_attn."

    def qkv(kind: str) -> tuple[str, ...]:
        return tuple(f"{attention}{part}_proj.{kind}" for part in "qkv")

    def gate_and_up(block: str) -> tuple[str, ...]:
        return f"{there}{block}.gate_proj.weight", f"{there}{block}.up_proj.weight"

    def norm(names: Sequence[str], tensor: str) -> list[Rule]:
        return [Rule(here + name, (there + tensor,), None) for name in names]

    fc1_names = "mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"
    fc2_names = "mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"
    expert = "mlp.experts.{expert}"
    return (
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0, is_vocabulary=True),
        Rule(here + "self_attention.linear_qkv.weight", qkv("weight"), 0, groups),
        Rule(here + "self_attention.linear_qkv.bias", qkv("bias"), 0, groups),
        Rule(here + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), 1),
        *norm(["self_attention.q_layernorm.weight"], "self_attn.q_norm.weight"),
        *norm(["self_attention.k_layernorm.weight"], "self_attn.k_norm.weight"),
        Rule(here + "mlp.linear_fc1.weight", gate_and_up("mlp"), 0, Halves()),
        Rule(here + "mlp.linear_fc2.weight", (there + "mlp.down_proj.weight",), 1),
        Rule(here + "mlp.router.weight", (there + "mlp.gate.weight",), None),
        *(Rule(here + name, gate_and_up(expert), 0, Halves()) for name in fc1_names),
        *(Rule(here + name, (f"{there}{expert}.down_proj.weight",), 1) for name in fc2_names),
        *norm(
            ["input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"],
            "input_layernorm.weight",
        ),
        *norm(
            ["pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"],
            "post_attention_layernorm.weight",
        ),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), None),
        *_head_rules(facts),
    )


def _head_rules(facts: ModelFacts) -> list[Rule]:
    if facts.kind == "value":
        return [Rule(f"output_layer.{part}", (f"score.{part}",), None, may_be_new=True) for part in ("weight", "bias")]
    head = "model.embed_tokens.weight" if facts.tied else "lm_head.weight"
    return [Rule("output_layer.weight", (head,), 0, is_vocabulary=True)]


@dataclass(frozen=True)
class Place:
    """Position of a parameter in the model."""

    rule: int
    """Number of the rule in the table."""
    layer: int | None
    expert: int | None


def find_place(rules: Sequence[Rule], name: str, first_layer: int, first_expert: int) -> Place:
    """Return the place of the parameter ``name`` of a model chunk.

    The chunk counts its layers from ``first_layer`` of the model, and its experts from ``first_expert``. Raises
    ``KeyError`` if the table has no such parameter.
    """
    for number, rule in enumerate(rules):
        match = rule.pattern.fullmatch(name)
        if match:
            found = {word: int(value) for word, value in match.groupdict().items()}
            layer, expert = found.get("layer"), found.get("expert")
            return Place(
                number,
                None if layer is None else first_layer + layer,
                None if expert is None else first_expert + expert,
            )
    raise KeyError(f"parameter {name!r} of megatron-core has no rule in the table of weights")
