"""The weights of a model in megatron-core's layout: loaded from a checkpoint, and streamed back under its names.

One table maps both ways. A rule names the tensors as they are in a checkpoint, the dimension that tensor-parallel ranks
split, and how the shares of several tensors are fused into one. Each tensor is cut before it is fused, so a rank reads
only its share, and splitting a share gives contiguous pieces of the tensors.

Streaming gathers one tensor at a time over tensor- and expert-parallel ranks and sends it to the other pipeline stages.
(The experts of one layer are one tensor in a Hugging Face model.) Beside the model, memory never holds more than that
tensor and its shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from roll.trainers.base import TrainerSetup
from roll.trainers.checkpoint_files import CheckpointFiles
from roll.trainers.megatron.facts import ModelFacts
from roll.trainers.model import model_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def hugging_face_model(setup: TrainerSetup) -> PreTrainedModel:
    """Return a model like the one that the trainer began with, but of the trainer's kind and without weights."""
    trusted, kind = setup.model_args.trust_remote_code, setup.kind
    labels = {} if kind == "policy" else {"num_labels": 1}
    config = AutoConfig.from_pretrained(setup.model_path, trust_remote_code=trusted, **labels)
    with torch.device("meta"):
        model = model_class(kind).from_config(config, trust_remote_code=trusted)
    if kind == "policy":
        try:
            model.generation_config = GenerationConfig.from_pretrained(setup.model_path)
        except OSError:
            pass  # A model without generation_config.json is complete.
    return model


MODEL_EXPERTS = {
    "gate_proj": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "down_proj": "model.layers.{layer}.mlp.experts.down_proj",
}
"""Word in an expert's names on disk -> the Hugging Face model's parameter that holds all experts of a layer."""


@dataclass(frozen=True)
class OwnParameter:
    """A parameter of this rank."""

    place: Place
    parameter: nn.Parameter


@dataclass(frozen=True)
class Piece:
    """The part of one Hugging Face tensor that a parameter of this rank holds."""

    name: str
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset in the whole tensor, per dimension."""
    shape: tuple[int, ...]
    """Shape without the rows that pad the vocabulary."""


@dataclass(frozen=True)
class Copies:
    """The ranks that hold the same parameter with the same values."""

    group: dist.ProcessGroup
    """The ranks among them that split the parameter's optimizer state."""
    number: int
    """Number of this rank among all of them."""
    count: int


@dataclass(frozen=True)
class Streamed:
    """One step of the stream: the tensors that one rule gives in one layer. Known to all ranks."""

    stage: int
    """Pipeline stage that has the tensors."""
    rule: int
    layer: int | None
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole tensors, padding included."""


class ModelWeights:
    """This rank's parameters and their counterparts in the checkpoint."""

    def __init__(self, chunks: Sequence[GPTModel], facts: ModelFacts) -> None:
        """Find this rank's parameters and plan the stream. Collective."""
        self.facts = facts
        self._rules = weight_rules(facts)
        self._own = [own for chunk in chunks for own in self._parameters_of(chunk)]
        self._mark_shares()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._plan = self._make_plan()

    def fill(self, files: CheckpointFiles) -> None:
        """Copy the values from a checkpoint. Raises ``ValueError`` naming a tensor that is missing or has another
        shape."""
        needed = (own for own in self._own if not self._rules[own.place.rule].may_be_new)
        lacking = files.missing(name for own in needed for name in self._names(own.place))
        if lacking:
            raise ValueError(f"the checkpoint lacks {', '.join(lacking[:3])} ({len(lacking)} tensors missing)")
        with torch.no_grad():
            for own in self._own:
                is_new = files.missing(self._names(own.place))
                own.parameter.copy_(torch.zeros_like(own.parameter) if is_new else self._read(files, own))

    @property
    def names(self) -> list[str]:
        """Names of all tensors of the Hugging Face model, on whichever stage they are."""
        return [name for step in self._plan for name in step.names]

    @property
    def parameters(self) -> list[OwnParameter]:
        """This rank's parameters, except copies of another stage's: a shared one is listed on its first stage only."""
        return [own for own in self._own if not self._is_copy(own)]

    @property
    def parameters_and_copies(self) -> list[OwnParameter]:
        """All parameters of this rank."""
        return list(self._own)

    def copies(self, own: OwnParameter) -> Copies:
        """Return which ranks have this parameter."""
        rule = self._rules[own.place.rule]
        if rule.is_expert:
            group, shift = parallel_state.get_expert_data_parallel_group(), own.place.expert
        else:
            group, shift = parallel_state.get_data_parallel_group(with_context_parallel=True), 0
        equal = self._tensor_group(rule) if rule.shared_dim is None else None
        number, count = group.rank(), group.size()
        if equal is not None:
            number, count = number * equal.size() + equal.rank(), count * equal.size()
        # Shift the numbering by the expert, so that not every expert's first part falls to the first rank.
        return Copies(group, (number + shift) % count, count)

    def pieces(self, own: OwnParameter) -> list[Piece]:
        """Return the pieces of Hugging Face tensors that a parameter holds, in the order of `split`."""
        rule, place = self._rules[own.place.rule], own.place
        group = self._tensor_group(rule)
        pieces, rows_before = [], 0
        parts = rule.fusion.split(torch.empty(own.parameter.shape, device="meta"))
        names = self._model_names(place)
        for number, part in enumerate(parts):
            whole = self._full_shape(rule, tuple(part.shape), group.size())
            offsets = tuple(group.rank() * size if dim == rule.shared_dim else 0 for dim, size in enumerate(part.shape))
            shape = tuple(part.shape)
            if rule.is_vocabulary:
                whole = (self.facts.vocabulary, *whole[1:])
                first = min(offsets[0], whole[0])
                shape, offsets = (min(shape[0], whole[0] - first), *shape[1:]), (first, *offsets[1:])
            if not rule.is_expert:
                pieces.append(Piece(names[number], whole, offsets, shape))
                continue
            rows = sum(len(other) for other in parts) * (group.size() if rule.shared_dim == 0 else 1)
            if place.expert is None:
                raise ValueError(f"{rule.megatron} is of experts, and its place names none")
            at = (place.expert, rows_before + offsets[0], *offsets[1:])
            pieces.append(Piece(names[0], (self._experts(), rows, *whole[1:]), at, (1, *shape)))
            rows_before += whole[0]
        return pieces

    def split(self, own: OwnParameter, tensor: Tensor) -> list[Tensor]:
        """Split a tensor of the parameter's shape into its pieces."""
        parts = self._rules[own.place.rule].fusion.split(tensor)
        return [
            part[: piece.shape[0]] if len(piece.shape) == part.ndim else part[None]
            for part, piece in zip(parts, self.pieces(own), strict=True)
        ]

    def join(self, own: OwnParameter, pieces: Sequence[Tensor]) -> Tensor:
        """Undo `split`; rows that pad the vocabulary are zeros."""
        rule = self._rules[own.place.rule]
        parts = [piece[0] if rule.is_expert else piece for piece in pieces]
        if rule.is_vocabulary:
            parts = [_padded(parts[0], len(own.parameter))]
        return rule.fusion.join(parts)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full float32 tensors in the names of the Hugging Face model, tied ones once, on every rank. Collective.

        A tensor is valid until the next one is drawn.
        """
        groups: dict[tuple[int, int | None], list[Tensor]] = {}
        for own in self._own:
            groups.setdefault((own.place.rule, own.place.layer), []).append(own.parameter.detach())
        for step in self._plan:
            here = step.stage == self._stages.rank()
            tensors = self._gather(self._rules[step.rule], groups[step.rule, step.layer]) if here else None
            for number, (name, shape) in enumerate(zip(step.names, step.shapes, strict=True)):
                full = self._from_stage(step.stage, tensors[number] if tensors else None, shape)
                yield name, (full[: self.facts.vocabulary] if self._rules[step.rule].is_vocabulary else full).float()

    def _parameters_of(self, chunk: GPTModel) -> Iterator[OwnParameter]:
        layers = chunk.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        experts = self.facts.experts
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first_expert = experts.experts // ranks * parallel_state.get_expert_model_parallel_rank() if experts else 0
        for name, parameter in chunk.named_parameters():
            yield OwnParameter(find_place(self._rules, name, first_layer, first_expert), parameter)

    def _mark_shares(self) -> None:
        """Mark parameters that differ between tensor-parallel ranks: the norm of the gradient counts all others once.

        megatron-core marks them itself only when it initialises the values.
        """
        for own in self._own:
            dim = self._rules[own.place.rule].shared_dim
            if dim is not None and not hasattr(own.parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(own.parameter, is_parallel=True, dim=dim, stride=1)

    def _names(self, place: Place) -> list[str]:
        return self._rules[place.rule].names(place.layer, place.expert)

    def _model_names(self, place: Place) -> list[str]:
        """Return names in the Hugging Face model, which has the experts of a layer in one parameter."""
        names = self._names(place)
        if not self._rules[place.rule].is_expert:
            return names
        fused = next(fused for word, fused in MODEL_EXPERTS.items() if word in names[0])
        return [fused.format(layer=place.layer)]

    def _tensor_group(self, rule: Rule) -> dist.ProcessGroup:
        if rule.is_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    def _read(self, files: CheckpointFiles, own: OwnParameter) -> Tensor:
        rule, parameter = self._rules[own.place.rule], own.parameter
        group = self._tensor_group(rule)
        expected = rule.fusion.split(torch.empty(parameter.shape, device="meta"))
        parts = []
        for name, part in zip(self._names(own.place), expected, strict=True):
            self._check_shape(files, name, rule, tuple(part.shape), group.size())
            share = part.shape[rule.shared_dim or 0]
            tensor = files.read(name, rule.shared_dim, group.rank() * share, (group.rank() + 1) * share)
            parts.append(_padded(tensor, share) if rule.is_vocabulary else tensor)
        return rule.fusion.join(parts)

    def _check_shape(self, files: CheckpointFiles, name: str, rule: Rule, part: tuple[int, ...], shares: int) -> None:
        wanted = self._full_shape(rule, part, shares)
        if rule.is_vocabulary:
            wanted = (self.facts.vocabulary, *wanted[1:])
        found = files.shape(name)
        if found != wanted:
            raise ValueError(f"{name} is {found} in the checkpoint, {wanted} in the model")

    @staticmethod
    def _full_shape(rule: Rule, part: tuple[int, ...], shares: int) -> tuple[int, ...]:
        return tuple(size * shares if dim == rule.shared_dim else size for dim, size in enumerate(part))

    def _make_plan(self) -> list[Streamed]:
        """Return the steps of all stages, in the order of a checkpoint."""
        own = list(dict.fromkeys(self._step_of(own) for own in self._own if not self._is_copy(own)))
        by_stage: list[list[Streamed]] = [[] for _ in range(self._stages.size())]
        dist.all_gather_object(by_stage, own, group=self._stages)
        last = len(self._rules)
        return sorted(
            (step for steps in by_stage for step in steps),
            key=lambda step: (_position(step.layer, step.rule, last), step.rule),
        )

    def _experts(self) -> int:
        if self.facts.experts is None:
            raise ValueError("a rule is for experts, and this model has none")
        return self.facts.experts.experts

    def _is_copy(self, own: OwnParameter) -> bool:
        """Return True if another stage holds the parameter too: a tied output layer on the last stage."""
        return self.facts.tied and self._rules[own.place.rule].megatron == "output_layer.weight"

    def _step_of(self, own: OwnParameter) -> Streamed:
        rule, place = self._rules[own.place.rule], own.place
        parts = rule.fusion.split(torch.empty(own.parameter.shape, device="meta"))
        shapes = [self._full_shape(rule, tuple(part.shape), self._tensor_group(rule).size()) for part in parts]
        names = self._model_names(place)
        if rule.is_expert:
            rows = sum(shape[0] for shape in shapes)
            shapes = [(self._experts(), rows, *shapes[0][1:])]
        return Streamed(self._stages.rank(), place.rule, place.layer, tuple(names), tuple(shapes))

    def _gather(self, rule: Rule, shares: list[Tensor]) -> list[Tensor]:
        """Return whole tensors from this rank's shares of one parameter, or of all its experts."""
        if not rule.is_expert:
            return self._gather_shares(rule, shares[0])
        stacked = torch.stack([torch.cat(self._gather_shares(rule, share)) for share in shares])
        return [torch.cat(_gathered(stacked, parallel_state.get_expert_model_parallel_group()))]

    def _gather_shares(self, rule: Rule, share: Tensor) -> list[Tensor]:
        if rule.shared_dim is None:
            return [share]
        by_rank = [rule.fusion.split(each) for each in _gathered(share, self._tensor_group(rule))]
        return [torch.cat(parts, dim=rule.shared_dim) for parts in zip(*by_rank, strict=True)]

    def _from_stage(self, stage: int, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        if self._stages.size() == 1:
            if tensor is None:
                raise ValueError("the only stage lacks a tensor of its own")
            return tensor
        like = self._own[0].parameter
        full = torch.empty(shape, dtype=like.dtype, device=like.device) if tensor is None else tensor.contiguous()
        dist.broadcast(full, group=self._stages, group_src=stage)
        return full


def _position(layer: int | None, rule: int, rules: int) -> float:
    """Return a sort key: first the embedding, then the layers, then what follows them."""
    if layer is not None:
        return layer
    return -1.0 if rule == 0 else float("inf")


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """Return the tensor padded below with zeros to ``rows`` rows."""
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks of the group."""
    if group.size() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return tensors
