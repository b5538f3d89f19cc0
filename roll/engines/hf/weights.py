"""Weight updates of an engine that computes in this process: staged and verified during decoding, then swapped in.

The staged tensors stay in host memory until the engine pauses. On a CPU they then become the model's parameters
themselves, so a weight update in persistent shared memory is loaded without copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from roll.engines.base import BusyClock, Completion, EngineFailed, Layout, PreparedWeights, TokenChunk, checked
from roll.engines.hf.model import add_adapter
from roll.weights.adapters import adapted_layers, adapter_shapes, base_checksums, linear_layers
from roll.weights.buckets import DTYPES, HeldWeights, WeightBucket, copy_with_checksum, tensor_checksum, views
from roll.weights.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    from roll.engines.hf.engine import ActiveRequest


class ModelEngine:
    """Base class of engines with a queue of requests, and a model whose weights can be updated while it generates."""

    def __init__(self, model: PreTrainedModel | ModelMixin, adapter_rank: int | None = None) -> None:
        """``adapter_rank``: rank of the LoRA adapters in weight updates; None: updates contain all weights."""
        self.version = 0
        self.clock = BusyClock()
        self.generated_tokens = 0
        self.asleep = False
        """True between `sleep` and `wake`."""
        self._waiting: deque[ActiveRequest] = deque()
        self._events: list[tuple[ActiveRequest, Completion | TokenChunk | Exception]] = []
        self._model = model
        self._device = model.device
        self._names = CheckpointNames.like(model)
        self._adapter_rank = adapter_rank
        self._layers = {} if adapter_rank is None else linear_layers(model)
        self._adapter: dict[str, torch.nn.Parameter] = {}
        """Name in weight updates -> LoRA matrix in the model."""

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._waiting)

    def submit(self, active: ActiveRequest) -> None:
        """Queue a validated request, whose id is unique in the engine."""
        self._waiting.append(active)

    def refuse(self, active: ActiveRequest, error: Exception) -> None:
        """Report an error as the request's result."""
        self._events.append((active, error))

    def take_events(self) -> list[tuple[ActiveRequest, Completion | TokenChunk | Exception]]:
        """Return the completions and errors since the last call, and the chunks of streaming requests (except their
        last token, which comes with the completion)."""
        events, self._events = self._events, []
        return events

    def figures(self) -> dict[str, Any]:
        """Return what the engine's statistics have besides those of every engine."""
        return {}

    def drop_caches(self) -> None:
        """Free the KV cache, if the engine has one."""

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory. Idempotent."""
        if self.asleep:
            return
        self.drop_caches()
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.asleep = True

    def wake(self) -> None:
        """Move the weights back to the device. The next step recomputes the KV cache."""
        self._move(self._device)
        self.asleep = False

    def _move(self, device: torch.device) -> None:
        self._model.to(device)

    def stage_weights(self, buckets: Iterable[WeightBucket], version: int) -> PreparedWeights:
        """Prepare a weight update without changing the model. May be called from any thread, also during a step.

        Returns tensors in host memory, by parameter name, in the model's dtype; buffers keep the received dtype, which
        the model adopts. On a CPU, a tensor is used without a copy if it is a whole parameter, has the model's dtype
        and is in persistent memory (`WeightBucket.lasting`). Checksums are computed from the prepared tensors, cast
        back to the received dtype, so that a loss of precision is detected. Raises ``WeightMismatch`` naming the
        tensor, or any error of ``buckets``.
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
        """Prepare a LoRA adapter; see `stage_weights`."""
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
        """Return the checksums of the model in its own dtype; see `InferStrategy.base_checksums`."""
        return base_checksums(self._names.of(self._held_tensors().items()), self._names, self._model.dtype)

    def _held_tensors(self) -> dict[str, torch.Tensor]:
        """Return name in the model -> tensor that updates replace. Not cached, because `sleep` replaces buffers."""
        buffers = {name: self._model.get_buffer(name) for name in self._names.buffers}
        return {**dict(self._model.named_parameters()), **buffers}

    def _take(
        self, name: str, dtype: torch.dtype, tensor: torch.Tensor, bucket: WeightBucket
    ) -> tuple[torch.Tensor, int]:
        """Return a received tensor in the form that will be loaded, and its checksum."""
        if tensor.dtype != dtype:  # the model keeps some tensors in another dtype
            converted = tensor.to(dtype)
            return converted, tensor_checksum(converted.to(tensor.dtype))
        if self._device.type == "cpu" and not bucket.lasting:
            return copy_with_checksum(tensor)
        if bucket.verified:
            return tensor, bucket.verified[name]
        return tensor, tensor_checksum(tensor)

    def load_weights(self, staged: PreparedWeights) -> HeldWeights:
        """Replace all weights by staged ones. Tokens sampled from now on carry the new version.

        On a CPU the staged tensors become the parameters. On a GPU, they are copied into the parameters and read back
        for the checksums. Raises ``EngineFailed`` if loading fails halfway.
        """
        held, rank = staged.held, self._adapter_rank
        try:
            loaded = self._load(staged) if rank is None else self._load_adapter(staged, rank)
        except Exception as error:
            raise EngineFailed(f"weights of version {held.version} were only partly loaded: {error!r}") from error
        self.version = held.version
        if self._device.type == "cpu":
            return held
        return replace(held, checksums={name: tensor_checksum(tensor) for name, tensor in loaded})

    def _load(self, staged: PreparedWeights) -> Iterable[tuple[str, torch.Tensor]]:
        """Replace all weights. Return them by checkpoint name, in the dtype in which they were received."""
        own = self._held_tensors()
        for name, parameter in own.items():
            tensor = staged.content[name]
            if self._device.type == "cpu" or tensor.dtype != parameter.dtype:  # the latter: a buffer
                parameter.data = tensor.to(self._device)
            else:
                parameter.data.copy_(tensor)
        parts = ((name, part.of(own[part.parameter])) for name, part in self._names.parts.items())
        return ((name, part.to(DTYPES[staged.layout[name][0]])) for name, part in parts)

    def _load_adapter(self, staged: PreparedWeights, rank: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Inject the first adapter into the model, or replace it by a later one. Return its matrices."""
        if self._adapter.keys() != staged.content.keys():
            self._adapter = add_adapter(self._model, adapted_layers(staged.content, self._layers), rank)
        for name, tensor in staged.content.items():
            self._adapter[name].data = tensor.to(self._device)
        return self._adapter.items()


def _arriving(
    buckets: Iterable[WeightBucket],
) -> Iterator[tuple[str, str, Sequence[int], tuple[torch.Tensor, WeightBucket]]]:
    """Yield (name, dtype, shape, (tensor, bucket)) of each tensor of a weight update."""
    for bucket in buckets:
        for (name, dtype, shape, _), (_, tensor) in zip(bucket.tensors, views(bucket), strict=True):
            yield name, dtype, shape, (tensor, bucket)
