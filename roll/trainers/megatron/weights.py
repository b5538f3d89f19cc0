"""Conversion between megatron-core's weight layout and Hugging Face checkpoints, in both directions.

One table of rules serves both. A rule maps a megatron-core parameter to its tensors in a checkpoint, with the dimension
that tensor-parallel ranks split, and how several tensors are fused into one (query, key and value, for example).
Tensors are split over ranks before they are fused, so a rank reads only its share, and undoing the fusion of a share
yields contiguous slices of the tensors.

The export gathers one tensor at a time over tensor- and expert-parallel ranks and broadcasts it to the other pipeline
stages. (The experts of one layer are one tensor in a Hugging Face model.) No more memory is needed besides the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from roll.trainers.base import TrainerSetup
from roll.trainers.megatron.facts import ModelFacts
from roll.trainers.model import model_class
from roll.trainers.state import CheckpointFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Fusion:
    """Interleaving of the rows of several tensors in one: each group holds some blocks of every tensor, in turn.

    For grouped-query attention, a group is one key-value head: its queries, its key, its value."""

    shares: tuple[int, ...] = (1,)
    """Number of blocks of each tensor per group."""
    block: int | None = None
    """Rows per block. None: there is only one group, so the tensors are concatenated."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Fuse the tensors into one. A single tensor is returned unchanged."""
        if len(parts) == 1:
            return parts[0]
        groups = 1 if self.block is None else len(parts[-1]) // (self.shares[-1] * self.block)
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)

    def split(self, joined: Tensor) -> list[Tensor]:
        """Split a fused tensor into its parts. Non-contiguous parts are copies."""
        block = len(joined) // sum(self.shares) if self.block is None else self.block
        groups = joined.reshape(-1, block * sum(self.shares), *joined.shape[1:])
        return [part.flatten(0, 1) for part in groups.split([share * block for share in self.shares], dim=1)]


ALONE, ONE_ABOVE_THE_OTHER = Fusion(), Fusion((1, 1))


@dataclass(frozen=True)
class Rule:
    """Mapping of one megatron-core parameter to checkpoint tensors.

    In names, ``{layer}`` and ``{expert}`` stand for numbers counted over the whole model."""

    megatron: str
    hugging_face: tuple[str, ...]
    shared_dim: int | None
    """Dimension that tensor-parallel ranks split. None: replicated on all of them."""
    fusion: Fusion = ALONE
    is_vocabulary: bool = False
    """True if rows are tokens of the vocabulary, padded to equal shares for the tensor-parallel ranks."""
    may_be_new: bool = False
    """True if the parameter may be missing in a checkpoint (the head of a new value model). It is then set to 0."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches the parameter's name in megatron-core."""
        text = re.escape(self.megatron)
        for word in ("layer", "expert"):
            text = text.replace(rf"\{{{word}\}}", rf"(?P<{word}>\d+)")
        return re.compile(text)

    @property
    def is_expert(self) -> bool:
        """True if there is one such parameter per MoE expert."""
        return "{expert}" in self.megatron


def weight_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules for every parameter that megatron-core may have for this model, in the order of a checkpoint.

    Transformer Engine fuses a norm with the linear layer after it and names experts differently, so some tensors have
    two possible names in megatron-core, and two rules.
    """
    # Grouped-query attention: each group holds its query heads, its key head, its value head.
    heads_per_group = facts.layers["num_attention_heads"] // facts.layers["num_query_groups"]
    groups = Fusion((heads_per_group, 1, 1), facts.layers["kv_channels"])
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
        Rule(here + "mlp.linear_fc1.weight", gate_and_up("mlp"), 0, ONE_ABOVE_THE_OTHER),
        Rule(here + "mlp.linear_fc2.weight", (there + "mlp.down_proj.weight",), 1),
        Rule(here + "mlp.router.weight", (there + "mlp.gate.weight",), None),
        *(Rule(here + name, gate_and_up(expert), 0, ONE_ABOVE_THE_OTHER) for name in fc1_names),
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


def hugging_face_model(setup: TrainerSetup) -> PreTrainedModel:
    """Return the trainer's model as a transformers model of the same kind, on the meta device (without weights)."""
    trusted, kind = setup.model_args.trust_remote_code, setup.kind
    labels = {} if kind == "policy" else {"num_labels": 1}
    config = AutoConfig.from_pretrained(setup.model_path, trust_remote_code=trusted, **labels)
    with torch.device("meta"):
        model = model_class(kind, config).from_config(config, trust_remote_code=trusted)
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
"""Part of an expert tensor's checkpoint name -> the transformers parameter that holds all experts of a layer."""


@dataclass(frozen=True)
class OwnParameter:
    """A megatron-core parameter on this rank, and the rule that maps it to a checkpoint."""

    parameter: nn.Parameter
    number: int
    """Index of the rule in the table."""
    rule: Rule
    layer: int | None
    expert: int | None

    @property
    def names(self) -> list[str]:
        """Checkpoint names of the tensors that are fused in the parameter."""
        return [name.format(layer=self.layer, expert=self.expert) for name in self.rule.hugging_face]


@dataclass(frozen=True)
class Piece:
    """The slice of one Hugging Face tensor that a parameter of this rank holds."""

    name: str
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset in the full tensor, per dimension."""
    shape: tuple[int, ...]
    """Shape of the slice, without padding rows of the vocabulary."""


@dataclass(frozen=True)
class Copies:
    """The ranks that hold a replica of a parameter."""

    group: dist.ProcessGroup
    """The subset of the ranks that shards the parameter's optimizer state."""
    number: int
    """Index of this rank among the replicas."""
    count: int


@dataclass(frozen=True)
class Streamed:
    """One unit of the weight export: the tensors that one rule yields for one layer. Identical on all ranks."""

    stage: int
    """Pipeline stage that holds the tensors."""
    rule: int
    """Index of the rule in the table."""
    layer: int | None
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, full shape) of each tensor."""

    @property
    def order(self) -> tuple[float, int]:
        """Sort key, in the order of a checkpoint: the embedding, the layers, then final norm and head."""
        if self.layer is not None:
            return self.layer, self.rule
        return -1 if self.rule == 0 else math.inf, self.rule


class ModelWeights:
    """This rank's megatron-core parameters, and their conversion from and to Hugging Face tensors."""

    def __init__(self, chunks: Sequence[GPTModel], facts: ModelFacts) -> None:
        """Match this rank's parameters with their rules, and plan the export. Collective."""
        self.facts = facts
        self._rules = weight_rules(facts)
        self.parameters_and_copies = [own for chunk in chunks for own in self._parameters_of(chunk)]
        """All parameters of this rank, including a tied output layer."""
        copied = "output_layer.weight" if facts.tied else None
        self.parameters = [own for own in self.parameters_and_copies if own.rule.megatron != copied]
        """This rank's parameters except a tied output layer, which counts as the embedding of the first stage."""
        self._mark_shares()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._plan = self._make_plan()
        self.names = [name for step in self._plan for name, _ in step.tensors]
        """Names of all tensors of the Hugging Face model, over all pipeline stages."""

    def fill(self, files: CheckpointFiles) -> None:
        """Load the values from a checkpoint. Raises ``ValueError`` naming a tensor that is missing or does not fit."""
        needed = (own for own in self.parameters_and_copies if not own.rule.may_be_new)
        lacking = files.missing(name for own in needed for name in own.names)
        if lacking:
            raise ValueError(f"the checkpoint lacks {', '.join(lacking[:3])} ({len(lacking)} tensors missing)")
        with torch.no_grad():
            for own in self.parameters_and_copies:
                if files.missing(own.names):
                    own.parameter.zero_()
                else:
                    own.parameter.copy_(self._joined(own, [_read(files, part) for part in self._parts(own)]))

    def copies(self, own: OwnParameter) -> Copies:
        """Return which ranks hold a replica of this parameter."""
        if own.expert is not None:
            group, shift = parallel_state.get_expert_data_parallel_group(), own.expert
        else:
            group, shift = parallel_state.get_data_parallel_group(with_context_parallel=True), 0
        number, count = group.rank(), group.size()
        if own.rule.shared_dim is None:
            equal = self._tensor_group(own.rule)
            number, count = number * equal.size() + equal.rank(), count * equal.size()
        # Rotate by the expert, so that rank 0 does not save the first rows of every expert.
        return Copies(group, (number + shift) % count, count)

    def pieces(self, own: OwnParameter) -> list[Piece]:
        """Return the slices of Hugging Face tensors that a parameter holds, in the order of `split`."""
        parts = self._parts(own)
        if own.expert is None:
            return parts
        # transformers holds all experts of a layer in one tensor, and concatenates each expert's gate and up matrices.
        name = next(fused for word, fused in MODEL_EXPERTS.items() if word in parts[0].name).format(layer=own.layer)
        rows = sum(part.whole_shape[0] for part in parts)
        pieces, rows_before = [], 0
        for part in parts:
            whole = (self.facts.experts, rows, *part.whole_shape[1:])
            offsets = (own.expert, rows_before + part.offsets[0], *part.offsets[1:])
            pieces.append(Piece(name, whole, offsets, (1, *part.shape)))
            rows_before += part.whole_shape[0]
        return pieces

    def split(self, own: OwnParameter, tensor: Tensor) -> list[Tensor]:
        """Split a tensor of the parameter's shape into the slices that `pieces` describes."""
        parts = zip(own.rule.fusion.split(tensor), self.pieces(own), strict=True)
        return [part[: piece.shape[0]] if own.expert is None else part[None] for part, piece in parts]

    def join(self, own: OwnParameter, pieces: Sequence[Tensor]) -> Tensor:
        """Undo `split`. Padding rows of the vocabulary are set to 0."""
        return self._joined(own, [piece if own.expert is None else piece[0] for piece in pieces])

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full weight in float32 under its Hugging Face name, on every rank. Collective.

        Tied weights are yielded once. A tensor is valid until the next one is requested.
        """
        groups: dict[tuple[int, int | None], list[Tensor]] = {}
        for own in self.parameters_and_copies:
            groups.setdefault((own.number, own.layer), []).append(own.parameter.detach())
        for step in self._plan:
            here = step.stage == self._stages.rank()
            tensors = self._gather(self._rules[step.rule], groups[step.rule, step.layer]) if here else None
            for number, (name, shape) in enumerate(step.tensors):
                # Cut off padding rows of the vocabulary.
                own_tensor = None if tensors is None else tensors[number][: shape[0]]
                yield name, self._from_stage(step.stage, own_tensor, shape).float()

    def _parameters_of(self, chunk: GPTModel) -> Iterator[OwnParameter]:
        """Yield the parameters of a chunk, with layer and expert numbers of the whole model (megatron-core's names
        count them from the chunk's first layer and the rank's first expert)."""
        layers, ranks = chunk.decoder.layers, parallel_state.get_expert_model_parallel_world_size()
        first = {
            "layer": layers[0].layer_number - 1 if len(layers) else 0,
            "expert": self.facts.experts // ranks * parallel_state.get_expert_model_parallel_rank(),
        }
        for name, parameter in chunk.named_parameters():
            matches = ((number, rule.pattern.fullmatch(name)) for number, rule in enumerate(self._rules))
            number, match = next(((number, match) for number, match in matches if match), (0, None))
            if match is None:
                raise KeyError(f"parameter {name!r} of megatron-core has no rule in the table of weights")
            found = {word: first[word] + int(value) for word, value in match.groupdict().items()}
            yield OwnParameter(parameter, number, self._rules[number], found.get("layer"), found.get("expert"))

    def _mark_shares(self) -> None:
        """Mark parameters that are split over tensor-parallel ranks; the gradient norm counts all others only once.

        megatron-core sets these marks only when it initialises the values itself.
        """
        for own in self.parameters_and_copies:
            dim = own.rule.shared_dim
            if dim is not None and not hasattr(own.parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(own.parameter, is_parallel=True, dim=dim, stride=1)

    def _make_plan(self) -> list[Streamed]:
        """Return the export's units over all pipeline stages, in the order of a checkpoint. Collective."""
        steps: dict[Streamed, None] = {}
        for own in self.parameters:
            # All experts of a layer are slices of the same tensors.
            tensors = {piece.name: piece.whole_shape for piece in self.pieces(own)}
            steps[Streamed(self._stages.rank(), own.number, own.layer, tuple(tensors.items()))] = None
        by_stage: list[list[Streamed]] = [[] for _ in range(self._stages.size())]
        dist.all_gather_object(by_stage, list(steps), group=self._stages)
        return sorted((step for steps in by_stage for step in steps), key=lambda step: step.order)

    def _tensor_group(self, rule: Rule) -> dist.ProcessGroup:
        if rule.is_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    def _parts(self, own: OwnParameter) -> list[Piece]:
        """Return this rank's slice of each checkpoint tensor that is fused in a parameter."""
        rule, group = own.rule, self._tensor_group(own.rule)
        parts = []
        for name, part in zip(
            own.names, rule.fusion.split(torch.empty(own.parameter.shape, device="meta")), strict=True
        ):
            shape = tuple(part.shape)
            whole = tuple(size * group.size() if dim == rule.shared_dim else size for dim, size in enumerate(shape))
            offsets = tuple(size * group.rank() if dim == rule.shared_dim else 0 for dim, size in enumerate(shape))
            if rule.is_vocabulary:
                first = min(offsets[0], self.facts.vocabulary)
                whole, offsets = (self.facts.vocabulary, *whole[1:]), (first, *offsets[1:])
                shape = (min(shape[0], whole[0] - first), *shape[1:])
            parts.append(Piece(name, whole, offsets, shape))
        return parts

    def _joined(self, own: OwnParameter, parts: list[Tensor]) -> Tensor:
        if own.rule.is_vocabulary:
            (part,) = parts
            parts = [torch.cat([part, part.new_zeros(len(own.parameter) - len(part), *part.shape[1:])])]
        return own.rule.fusion.join(parts)

    def _gather(self, rule: Rule, shares: list[Tensor]) -> list[Tensor]:
        """Gather full tensors from the ranks' shares of one parameter, or of all experts of a layer. Collective."""
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
        """Broadcast a tensor from pipeline stage ``stage``; the other stages pass None. Collective."""
        if tensor is None:
            like = self.parameters_and_copies[0].parameter
            tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        if self._stages.size() > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self._stages, group_src=stage)
        return tensor


def _read(files: CheckpointFiles, part: Piece) -> Tensor:
    found = files.shape(part.name)
    if found != part.whole_shape:
        raise ValueError(f"{part.name} is {found} in the checkpoint, {part.whole_shape} in the model")
    return files.read(part.name, part.offsets, part.shape)


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather a tensor from all ranks of the group. Collective."""
    if group.size() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return tensors
