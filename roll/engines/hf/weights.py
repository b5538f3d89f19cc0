"""The weights of an engine that computes in its own process: taken in beside the steps, checked, and exchanged at once.

The prepared tensors wait on the host until the engine pauses. On a CPU they then become the parameters themselves, so a
weight update copies nothing that lies in lasting memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from roll.engines.base import EngineFailed, Layout, PreparedWeights, checked
from roll.engines.hf.model import add_adapter
from roll.weights.adapters import adapted_layers, adapter_shapes, base_checksums, linear_layers
from roll.weights.buckets import DTYPES, HeldWeights, WeightBucket, copy_with_checksum, tensor_checksum, views
from roll.weights.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from transformers import PreTrainedModel


class ModelEngine:
    """A model whose weights are replaced while it is in use."""

    def __init__(self, model: PreTrainedModel | ModelMixin, adapter_rank: int | None = None) -> None:
        """``adapter_rank``: rank of the adapters that weight updates bring; None if they bring all weights."""
        self.version = 0
        self._model = model
        self._device = model.device
        self._names = CheckpointNames.like(model)
        self._adapter_rank = adapter_rank
        self._layers = {} if adapter_rank is None else linear_layers(model)
        self._adapter: dict[str, torch.nn.Parameter] = {}
        """The matrices that the model computes with, by the names under which they are published."""

    def stage_weights(self, buckets: Iterable[WeightBucket], version: int) -> PreparedWeights:
        """Prepare a weight update without touching the model. Any thread may call this while another runs `step`.

        The prepared tensors are on the host, by parameter, in the model's precision (buffers: in the precision that
        came, which the model takes over). If the model computes on a CPU, a tensor that is a whole parameter, already
        has this precision and lies in lasting memory is used in place, and any other is copied. Checksums are those of
        the prepared tensors in the precision that came, so that a loss of digits shows. Raises ``WeightMismatch``
        naming the tensor, or whatever ``buckets`` raises.
        """
        if self._adapter_rank is not None:
            return self._stage_adapter(list(buckets), version, self._adapter_rank)
        own, uncast = self._held_tensors(), self._names.uncast
        tensors: dict[str, torch.Tensor] = {}
        checksums: dict[str, int] = {}
        layout: Layout = {}
        in_place = False
        for name, dtype, shape, (tensor, bucket) in checked(_arriving(buckets), self._names.shapes):
            part = self._names.parts[name]
            layout[name] = dtype, tuple(shape)
            parameter = own[part.parameter]
            held_dtype = tensor.dtype if name in uncast else parameter.dtype
            if not part.is_whole:
                if part.parameter not in tensors:
                    tensors[part.parameter] = torch.empty(parameter.shape, dtype=held_dtype)
                copy = part.of(tensors[part.parameter]).copy_(tensor)
                checksums[name] = tensor_checksum(copy.to(tensor.dtype))
                continue
            tensors[part.parameter], checksums[name] = self._take(name, held_dtype, tensor, bucket)
            in_place |= tensors[part.parameter] is tensor and self._device.type == "cpu"
        count = sum(parameter.numel() for parameter in own.values())
        return PreparedWeights(HeldWeights(version, count, checksums, in_place), tensors, layout)

    def _stage_adapter(self, buckets: list[WeightBucket], version: int, rank: int) -> PreparedWeights:
        """Prepare an adapter as `stage_weights` does a whole model."""
        adapted = adapted_layers((name for bucket in buckets for name, *_ in bucket.tensors), self._layers)
        shapes = adapter_shapes(adapted, self._layers, rank)
        tensors: dict[str, torch.Tensor] = {}
        checksums: dict[str, int] = {}
        layout: Layout = {}
        for name, dtype, shape, (tensor, bucket) in checked(_arriving(buckets), shapes):
            layout[name] = dtype, tuple(shape)
            tensors[name], checksums[name] = self._take(name, tensor.dtype, tensor, bucket)
        in_place = self._device.type == "cpu" and any(bucket.lasting for bucket in buckets)
        count = sum(tensor.numel() for tensor in tensors.values())
        return PreparedWeights(HeldWeights(version, count, checksums, in_place), tensors, layout)

    def base_checksums(self) -> dict[str, int]:
        """Return the checksums of the model in its precision; see `InferStrategy.base_checksums`."""
        return base_checksums(self._names.of(self._held_tensors().items()), self._names, self._model.dtype)

    def _held_tensors(self) -> dict[str, torch.Tensor]:
        """Return all that a weight update replaces, by its name in memory. A sleep makes new buffers."""
        buffers = {name: self._model.get_buffer(name) for name in self._names.buffers}
        return {**dict(self._model.named_parameters()), **buffers}

    def _take(
        self, name: str, dtype: torch.dtype, tensor: torch.Tensor, bucket: WeightBucket
    ) -> tuple[torch.Tensor, int]:
        """Return the tensor as the model will hold it (on a device: as it will be copied there), and its checksum."""
        if tensor.dtype != dtype:  # the model keeps some tensors in a precision of their own
            converted = tensor.to(dtype)
            return converted, tensor_checksum(converted.to(tensor.dtype))
        if self._device.type == "cpu" and not bucket.lasting:
            return copy_with_checksum(tensor)
        if bucket.verified:
            return tensor, bucket.verified[name]
        return tensor, tensor_checksum(tensor)

    def load_weights(self, staged: PreparedWeights) -> HeldWeights:
        """Replace all weights by staged ones; later tokens carry their version.

        On a CPU the staged tensors become the parameters. A device's memory is written in place and read back for the
        checksums. Raises ``EngineFailed`` if loading fails halfway.
        """
        if self._adapter_rank is not None:
            return self._load_adapter(staged, self._adapter_rank)
        held, own = staged.held, self._held_tensors()
        try:
            for name, parameter in own.items():
                tensor = staged.content[name]
                if self._device.type == "cpu" or tensor.dtype != parameter.dtype:  # the latter: a buffer
                    parameter.data = tensor.to(self._device)
                else:
                    parameter.data.copy_(tensor)
        except Exception as error:
            raise EngineFailed(f"weights of version {held.version} were only partly loaded: {error!r}") from error
        self.version = held.version
        if self._device.type == "cpu":
            return held
        parts = ((name, part.of(own[part.parameter])) for name, part in self._names.parts.items())
        return replace(
            held,
            checksums={name: tensor_checksum(part.to(DTYPES[staged.layout[name][0]])) for name, part in parts},
        )

    def _load_adapter(self, staged: PreparedWeights, rank: int) -> HeldWeights:
        """Replace the adapter by a staged one, and put the first one into the model; see `load_weights`."""
        held = staged.held
        try:
            if self._adapter.keys() != staged.content.keys():
                self._adapter = add_adapter(self._model, adapted_layers(staged.content, self._layers), rank)
            for name, tensor in staged.content.items():
                self._adapter[name].data = tensor.to(self._device)
        except Exception as error:
            raise EngineFailed(f"weights of version {held.version} were only partly loaded: {error!r}") from error
        self.version = held.version
        if self._device.type == "cpu":
            return held
        return replace(held, checksums={name: tensor_checksum(each) for name, each in self._adapter.items()})


def _arriving(
    buckets: Iterable[WeightBucket],
) -> Iterator[tuple[str, str, Sequence[int], tuple[torch.Tensor, WeightBucket]]]:
    """Yield name, dtype and shape of the tensors of a weight update, each with the tensor and its bucket."""
    for bucket in buckets:
        for (name, dtype, shape, _), (_, tensor) in zip(bucket.tensors, views(bucket), strict=True):
            yield name, dtype, shape, (tensor, bucket)
