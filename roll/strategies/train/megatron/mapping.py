"""Which Hugging Face tensors a parameter of megatron-core is made of: one table, read in both directions.

A rule names the tensors as they lie in a checkpoint, the dimension that tensor-parallel ranks share out, and how the
shares of several tensors become one. As each tensor is cut before they are joined, a rank reads nothing but its share,
and a share taken apart gives contiguous pieces of the tensors.
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
    """How shares of several tensors become the share of one, and back."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor from the parts."""

    def split(self, joined: Tensor) -> list[Tensor]:
        """The parts; copies where they are not contiguous."""


class Alone:
    """One tensor, unchanged."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Fusion.join`. The tensor itself."""
        return parts[0]

    def split(self, joined: Tensor) -> list[Tensor]:
        """See `Fusion.split`. The tensor itself."""
        return [joined]


class Halves:
    """The rows of one after those of the other."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Fusion.join`. One above the other."""
        return torch.cat(list(parts))

    def split(self, joined: Tensor) -> list[Tensor]:
        """See `Fusion.split`. The upper and the lower half."""
        return list(joined.chunk(2))


@dataclass(frozen=True)
class QueryGroups:
    """Queries, keys and values, interleaved: for each group its queries, its key, its value."""

    queries: int
    """Query heads of a group."""
    head_size: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Fusion.join`. Queries, keys and values, interleaved by group."""
        groups = len(parts[1]) // self.head_size
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)

    def split(self, joined: Tensor) -> list[Tensor]:
        """See `Fusion.split`. Queries, keys and values of all groups."""
        rows = [self.queries * self.head_size, self.head_size, self.head_size]
        groups = joined.reshape(-1, sum(rows), *joined.shape[1:])
        return [part.flatten(0, 1) for part in groups.split(rows, dim=1)]


@dataclass(frozen=True)
class Rule:
    """A parameter of megatron-core. ``{layer}`` and ``{expert}`` stand for numbers counted over the whole model."""

    megatron: str
    hugging_face: tuple[str, ...]
    shared_dim: int | None
    """What tensor-parallel ranks share out; None: each has all of it."""
    fusion: Fusion = Alone()
    is_vocabulary: bool = False
    """Rows are padded to equal shares."""
    may_be_new: bool = False
    """A checkpoint without it is of a model of another kind; it begins with zeros."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the parameter's name."""
        text = re.escape(self.megatron)
        for word in ("layer", "expert"):
            text = text.replace(rf"\{{{word}\}}", rf"(?P<{word}>\d+)")
        return re.compile(text)

    @property
    def is_expert(self) -> bool:
        """Whether there is one for each expert."""
        return "{expert}" in self.megatron

    def names(self, layer: int | None, expert: int | None) -> list[str]:
        """Names of the tensors in a checkpoint."""
        return [name.format(layer=layer, expert=expert) for name in self.hugging_face]


def weight_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """The table for a model: every parameter that megatron-core may have for it, in the order of a checkpoint.

    Transformer Engine keeps a norm with the linear layer after it and numbers experts differently, so some tensors have
    two names on the side of megatron-core.
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
    """Where a parameter stands in the model."""

    rule: int
    """Number in the table."""
    layer: int | None
    expert: int | None


def find_place(rules: Sequence[Rule], name: str, first_layer: int, first_expert: int) -> Place:
    """What the parameter ``name`` of a model chunk is; the chunk counts its layers from ``first_layer`` of the model,
    and its experts from ``first_expert``. ``KeyError`` if the table has no such parameter."""
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
