"""Conversion between the tensor names of a transformers model in memory and those of its checkpoint.

Weight updates use the names of the checkpoint. A checkpoint has the model's parameters and its persistent buffers (such
as a bias that only routes tokens to experts). In memory, transformers joins some of these tensors into one parameter,
such as the experts of a layer, and renames others. Engines have their own loaders, which know the names of checkpoints.
They may skip unknown names silently, and would then compute with old weights. `parameters` converts the tensors of a
weight update back for a transformers model.

The conversion is that of transformers' ``save_pretrained``. It runs once, on a model without memory, to make a table:
which part of which parameter is each tensor of the checkpoint? With this table, tensors are renamed and split one
parameter at a time, without copies, and joined again. A model with equal names in memory and checkpoint is unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.weights.buckets import WeightMismatch

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint as part of a parameter. ``stride`` and ``offset`` are in elements of the parameter."""

    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    """True if the part is the whole parameter, with the same shape."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a parameter as a view. The parameter must be contiguous."""
        if self.is_whole:
            return tensor
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class CheckpointNames:
    """Table of the checkpoint names of a model.

    If the conversion of a parameter is more than taking views of it, the parameter keeps its name in memory.
    """

    def __init__(self, model: PreTrainedModel | ModelMixin) -> None:
        """Make the table for a model that was created from its configuration, best on the device ``meta``.

        A model loaded from files could have the names of an older checkpoint.
        """
        self.buffers = [name for name in model.state_dict() if _is_float_buffer(model, name)]
        """Names in memory of the persistent floating-point buffers."""
        tensors = {**dict(model.named_parameters()), **{name: model.get_buffer(name) for name in self.buffers}}
        stand_ins = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
        owners = {tensor.untyped_storage()._cdata: name for name, tensor in stand_ins.items()}
        found: dict[str, dict[str, Part]] = {name: {} for name in stand_ins}
        for name, tensor in _reverted(model, stand_ins).items():
            owner = owners.get(tensor.untyped_storage()._cdata)
            if owner is not None:
                whole = tensor.shape == stand_ins[owner].shape and tensor.is_contiguous()
                found[owner][name] = Part(
                    owner, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), whole
                )
        self._shapes = {name: tuple(tensor.shape) for name, tensor in stand_ins.items()}
        self._parts = {name: self._complete(name, parts) for name, parts in found.items()}
        self.parts = {name: part for parts in self._parts.values() for name, part in parts.items()}
        """Checkpoint name -> part, in the order of the model's parameters. Tied tensors appear once."""

    @classmethod
    def like(cls, model: PreTrainedModel | ModelMixin) -> CheckpointNames:
        """Return the table of a model that may be loaded from files, be sharded, or have adapters."""
        with torch.device("meta"):
            if not _is_of_transformers(model):
                return cls(type(model).from_config(model.config))
            return cls(type(model)(copy.deepcopy(model.config)))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name -> shape."""
        return {name: part.shape for name, part in self.parts.items()}

    @property
    def uncast(self) -> frozenset[str]:
        """Checkpoint names of the buffers, which are sent in their own precision; some need more than the weights."""
        return frozenset(part_name for name in self.buffers for part_name in self._parts[name])

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert whole parameters and buffers, under their names in memory, to tensors under checkpoint names.

        The results are views of the given tensors. Raises ``ValueError`` for a tensor that the model does not have or
        that has another shape in the model.
        """
        for name, tensor in tensors:
            if self._shapes.get(name) != tuple(tensor.shape):
                raise ValueError(f"{name} is {tuple(tensor.shape)}, in the model {self._shapes.get(name, 'unknown')}")
            parts = self._parts[name]
            memory = tensor if len(parts) == 1 else tensor.contiguous()
            for part_name, part in parts.items():
                yield part_name, part.of(memory)

    def parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Undo `of`: yield each parameter or buffer under its name in memory, as soon as all its parts have arrived.

        A parameter of several parts is joined in new memory; others are passed on unchanged. Raises `WeightMismatch`
        naming a tensor that is unknown, comes twice, has the wrong shape, or is missing at the end.
        """
        missing = {name: dict(parts) for name, parts in self._parts.items()}
        memory: dict[str, Tensor] = {}
        for name, tensor in tensors:
            part = self.parts.get(name)
            if part is None or missing[part.parameter].pop(name, None) is None:
                raise WeightMismatch(f"tensor {name!r} {'is not in the model' if part is None else 'came twice'}")
            if tuple(tensor.shape) != part.shape:
                raise WeightMismatch(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model's has {part.shape}")
            if part.is_whole:
                yield part.parameter, tensor
                continue
            if part.parameter not in memory:
                memory[part.parameter] = tensor.new_empty(self._shapes[part.parameter])
            part.of(memory[part.parameter]).copy_(tensor)
            if not missing[part.parameter]:
                yield part.parameter, memory.pop(part.parameter)
        lacking = [name for parts in missing.values() for name in parts]
        if lacking:
            raise WeightMismatch(f"tensor {lacking[0]!r} is missing ({len(lacking)} missing in all)")

    def _complete(self, name: str, parts: dict[str, Part]) -> dict[str, Part]:
        """Return the parts of a parameter, or the whole parameter as one part if they do not cover it."""
        shape = self._shapes[name]
        if sum(torch.Size(part.shape).numel() for part in parts.values()) == torch.Size(shape).numel():
            return parts
        return {name: Part(name, shape, torch.empty(shape, device="meta").stride(), 0, is_whole=True)}


def _is_float_buffer(model: nn.Module, name: str) -> bool:
    module, _, own_name = name.rpartition(".")
    buffer = model.get_submodule(module)._buffers.get(own_name)
    return buffer is not None and buffer.is_floating_point()


class _Uncopied(TorchFunctionMode):
    """A mode in which ``contiguous()`` returns the tensor itself, so that the results of a conversion stay views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _is_of_transformers(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _reverted(model: PreTrainedModel | ModelMixin, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under their checkpoint names. For diffusers these are the names in memory."""
    if not _is_of_transformers(model):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    with _Uncopied():
        reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted
