"""`fsdp2_train`: the default trainer. Applies PyTorch's `fully_shard` to each decoder layer and to the whole model.

The same code runs on one rank or many (measured on CPU with a 0.8 M parameter model: sharding over one rank costs 1 to
4 % of a step of 128 samples or more). Weights, gradients and optimizer state are float32; forward and backward passes
use the configured precision, float16 with loss scaling. On a CPU with the same ranks and threads, results are bitwise
reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from roll.algorithms.metrics import PartMetrics
from roll.configs.plugins import made
from roll.trainers.base import MicroBatchLimits, TrainerSetup
from roll.trainers.compiling import compile_layers
from roll.trainers.context_parallel import ContextForward, ContextGroup, install_context_parallel
from roll.trainers.lora import add_adapters, is_adapter
from roll.trainers.model import ModelExport, decoder_layers, forward_pass, load_weights, stored_dtype
from roll.trainers.options import Fsdp2Options
from roll.trainers.state import MOMENTS, Part, SavedState, StateSnapshot, UnfitState
from roll.trainers.step import MicroBatch, TrainingStep, plan_micro_batches
from roll.trainers.trainer import TrainStrategy, build_optimizer, clip_gradients, divide_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.data.records import SampleBatch
    from roll.trainers.pictures import PictureExport


LARGEST_SCALE, SMALLEST_SCALE = 2.0**24, 2.0**-4
"""Limits of the loss scale. Gradients that overflow even at the smallest scale are wrong, not merely large."""
GROWTH_INTERVAL = 200
"""Consecutive updates without an overflow after which the scale is doubled. A skipped update wastes a batch of
rollouts, so larger scales are tried rarely."""


@dataclass
class LossScale:
    """Factor of the loss in float16, in which many gradients would underflow to zero. Constant 1 unless ``dynamic``.

    Gradients are accumulated in float32 and divided by the scale. An overflow halves it, and the update is skipped. All
    ranks see the same gradient norm, so all have the same scale.
    """

    dynamic: bool
    value: float = 1.0
    good_updates: int = 0
    """Updates since the scale last changed."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Return the initial loss scale for training in ``dtype``."""
        return cls(dynamic=True, value=2.0**14) if dtype == "float16" else cls(dynamic=False)

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update. ``finite``: its gradients did not overflow."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good_updates = max(SMALLEST_SCALE, self.value / 2), 0
            return
        self.good_updates += 1
        if self.good_updates >= GROWTH_INTERVAL:
            self.value, self.good_updates = min(LARGEST_SCALE, self.value * 2), 0


def _sharded(parameter: Tensor) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise TypeError(f"FSDP2 shards all parameters, and here is a {type(parameter).__name__}")
    return parameter


class Fsdp2TrainStrategy(TrainStrategy):
    """One rank of the FSDP2 trainer; see `TrainStrategy` for the contract of each method."""

    def __init__(self, setup: TrainerSetup) -> None:
        super().__init__(setup)
        self.options = made("fsdp2_train", Fsdp2Options, setup.strategy_config, "strategy_config")
        self.loss_scale = LossScale.of(setup.model_args.dtype)
        self._batch_scale = self.loss_scale.value
        """Factor of the losses of the present batch, and of its gradients so far."""
        self._magnitude = 0.0
        """`TrainingStep.magnitude` of the present batch so far."""
        self.context: ContextGroup | None = None
        """This rank's context group; None if each rank has whole rows."""

    def initialize(self) -> None:
        setup = self.setup
        self.join_ranks(self.options.process_group_timeout_seconds)
        # With adapters, the frozen base model is loaded in its configured precision.
        model, head = self.load_model(self.options.gradient_checkpointing, mapped=not setup.trains_adapters)
        if self.options.context_parallel_size > 1:
            if setup.pictures is not None:
                raise ValueError("context_parallel_size: models of pictures are not split by position; write 1")
            self.context = ContextGroup.join(setup.device, setup.world_size, self.options.context_parallel_size)
            install_context_parallel(model, setup, self.context)
        # Adapters can be added to whole models only, so before sharding. Each rank draws the same random numbers.
        task = "CAUSAL_LM" if setup.pictures is None else None
        adapters = setup.trains_adapters
        self.adapters = add_adapters(model, setup.model_args, setup.model_path, task) if adapters else None
        if self.options.compile:
            compile_layers(decoder_layers(model), self.device)
        self.model = self._shard(model)
        if stored_dtype(setup) == torch.float32:
            self.model.float()
        if self.context is None:
            self.forward = forward_pass(setup, self.model, head, self.device)
        else:
            self.forward = ContextForward(
                self.context, setup.kind, self.model, head, self.device, replays=setup.replays_routing
            )
        self._reshard()
        if not setup.forward_only:
            self.optimizer = build_optimizer(self.model.parameters(), setup.training_args, fused=True)
            self.start_schedule()

    def without_adapters(self) -> AbstractContextManager[None]:
        return super().without_adapters() if self.adapters is None else self.adapters.disabled()

    def step_means(self, batch: SampleBatch) -> np.ndarray:
        found = super().step_means(batch)
        self._reshard()
        return found

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights, with LoRA adapters merged; see `TrainStrategy`."""
        if self.adapters is None:
            yield from self._gathered(torch.float32)
        else:
            self._reshard()
            yield from self.adapters.merged(self.model.named_parameters(), self._full)

    def published_weights(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        if self.adapters is not None:
            return super().published_weights(dtype)
        return self._as_in_checkpoint(self._gathered(dtype))

    def _gathered(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        for name, parameter in self.model.named_parameters():
            yield name, self._full(parameter, dtype)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapters is None:
            return super().base_weights()
        self._reshard()
        return self.adapters.base_weights(self.model.named_parameters(), self._full)

    def published_adapters(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapters is None:
            return super().published_adapters()
        self._reshard()
        return self.adapters.published(self._full)

    def export(self) -> ModelExport | PictureExport | None:
        """Return a copy of the model, plus the LoRA adapter if one is trained; see `TrainStrategy`."""
        if self.adapters is None:
            return super().export()
        # First, because it is collective, and rank 0 may fail in what follows.
        adapter = self.adapters.export(self._full, wanted=self.setup.rank == 0)
        export = super().export()
        return None if export is None else replace(export, beside=adapter)

    def load(self, path: str) -> None:
        """Load an exported model's weights, or only its adapter if adapters are trained; see `TrainStrategy`."""
        self._reshard()
        if self.adapters is not None:
            source = self.adapters.read_export(path)
        else:
            own = dict(self.model.named_parameters())
            shapes = {name: parameter.shape for name, parameter in own.items()}
            weights = load_weights(path, self.setup, shapes)
            source = {parameter: weights[name] for name, parameter in own.items()}
        with torch.no_grad():
            for parameter, weight in source.items():
                self._write(parameter, weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._reshard()
        super().load_weights(weights)

    def snapshot(self) -> StateSnapshot:
        self._reshard()
        parts, updates = [], {}
        for name, parameter in self._learning():
            state = self.optimizer.state.get(parameter, {})
            tensors = {"weight": parameter.detach(), **{key: state[key] for key in MOMENTS if key in state}}
            for kind, tensor in tensors.items():
                local, offsets = _box(tensor)
                parts.append(Part(f"{kind}/{name}", local.to("cpu", copy=True), tuple(tensor.shape), offsets))
            if state:
                updates[name] = int(state["step"])
        facts: dict[str, Any] = {"optimizer_steps": self.optimizer_steps, "updates": updates}
        if self.loss_scale.dynamic:
            facts |= {"loss_scale": self.loss_scale.value, "good_updates": self.loss_scale.good_updates}
        if self.adapters is not None:
            facts["base"] = vars(self.adapters.base)
        return StateSnapshot(parts, facts, self.setup.world_size)

    def restore(self, state: SavedState) -> None:
        self._reshard()
        self._require_own_base(state)
        state.require_weights(name for name, _ in self._learning())
        for name, parameter in self._learning():
            with torch.no_grad():
                _fill(parameter, f"weight/{name}", state)
            if name not in state.facts["updates"]:
                continue
            own_state = {key: torch.zeros_like(parameter, requires_grad=False) for key in MOMENTS}
            for key, tensor in own_state.items():
                _fill(tensor, f"{key}/{name}", state)
            # Fused AdamW keeps its step counters beside the weights.
            step = torch.tensor(float(state.facts["updates"][name]), dtype=torch.float32, device=parameter.device)
            self.optimizer.state[parameter] = {"step": step, **own_state}
        self.optimizer_steps = state.facts["optimizer_steps"]
        if self.loss_scale.dynamic:
            self.loss_scale.value = state.facts.get("loss_scale", self.loss_scale.value)
            self.loss_scale.good_updates = state.facts.get("good_updates", 0)

    def _rows(self, batch: SampleBatch, limits: MicroBatchLimits) -> list[list[int]]:
        if self.context is None:
            return super()._rows(batch, limits)
        place, size = self.setup.rank // self.context.size, self.setup.world_size // self.context.size
        return plan_micro_batches(batch.lengths, size, limits)[place]

    def _shared(self, values: np.ndarray) -> np.ndarray:
        if self.context is None:
            return super()._shared(values)
        shared = torch.from_numpy(values)
        dist.all_reduce(shared, group=self.context.data)
        return shared.numpy()

    def _joined(
        self, join: Callable[[dist.ProcessGroup | None], tuple[dict[str, float], float]]
    ) -> tuple[dict[str, float], float]:
        return join(None if self.context is None else self.context.data)

    def _shard(self, model: PreTrainedModel) -> PreTrainedModel:
        settings = {
            "mesh": init_device_mesh(self.setup.device, (self.setup.world_size,)),
            **sharding_policies(self.setup, self.options),
        }
        for layer in decoder_layers(model):
            fully_shard(layer, reshard_after_forward=self.options.reshard_after_forward, **settings)
        # The backward pass begins with the LM head, so the root module's own parameters stay gathered until then.
        return fully_shard(model, reshard_after_forward=False, **settings)

    def _reshard(self) -> None:
        """Free gathered weights that a forward-only pass left behind.

        They take memory, and the module's parameters are not the shards until they are freed.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trained parameters, which a snapshot contains: all of them, or only the adapters."""
        for name, parameter in self.model.named_parameters():
            if self.adapters is None or is_adapter(name):
                yield name, parameter

    def _require_own_base(self, state: SavedState) -> None:
        """Raise `UnfitState` unless the state was saved for this trainer's base model.

        Adapters are valid only for their base model, which is not part of a snapshot.
        """
        base = state.facts.get("base")
        if (base is None) != (self.adapters is None):
            kinds = {True: "all weights", False: "adapters (LoRA)"}
            raise UnfitState(
                f"{state.folder} is the state of training {kinds[base is None]}, and this trainer trains "
                f"{kinds[self.adapters is None]}"
            )
        if self.adapters is None or base is None:
            return
        difference = self.adapters.base.difference(base)
        if difference is not None:
            raise UnfitState(f"the adapters in {state.folder} were made {difference}")

    def _write(self, parameter: Tensor, weight: Tensor) -> None:
        own = _sharded(parameter)
        # Every rank has the whole weight, so each cuts out its own shard without communication.
        shard = distribute_tensor(weight.to(self.device), own.device_mesh, own.placements, src_data_rank=None)
        own.to_local().copy_(shard.to_local())

    def _read(self, parameter: Tensor) -> Tensor:
        # `_full` returns float32, which is lossless.
        return self._full(parameter).to(parameter.dtype)

    def _full(self, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the full (unsharded) parameter in float32, or in a smaller ``dtype`` if it is sharded. Collective."""
        # Gathering is faster between devices than between host memories.
        weight = _sharded(parameter.detach().to(self.device))
        if self.setup.world_size == 1:
            return weight.to_local().float()
        if dtype.itemsize < weight.dtype.itemsize:
            return _sharded(weight.to(dtype)).full_tensor()  # fewer bytes are gathered, of the same values
        return weight.full_tensor().float()

    def _for_each_token(
        self, batch: SampleBatch, compute: Callable[[Iterator[MicroBatch]], Iterable[Tensor]]
    ) -> np.ndarray:
        values = super()._for_each_token(batch, compute)
        self._reshard()
        return values

    def _accumulate(self, step: TrainingStep, rows: Sequence[Sequence[int]], temperature: float) -> list[PartMetrics]:
        parts = []
        self._scale_for(step)
        for micro_batch in step.micro_batches(rows, self.device, self.setup.train_limits.packed):
            outputs = self.forward.outputs(micro_batch, temperature, step.needs_entropy_gradient)
            loss, metrics = step.loss(micro_batch, *outputs)
            # Sharding averages gradients over ranks, but the ranks' contributions must be summed.
            (loss * (self.setup.world_size * self._batch_scale)).backward()
            parts.append(metrics)
        return parts

    def _scale_for(self, step: TrainingStep) -> None:
        """Set the factor of the losses: of a batch in parts its sums would overflow long before its mean does."""
        self._magnitude = step.magnitude + (0.0 if step.is_first else self._magnitude)
        size = max(1.0, self._magnitude) if self.loss_scale.dynamic else 1.0
        # Powers of two, so that the gradients of earlier parts change no bit.
        scale = self.loss_scale.value / 2.0 ** round(math.log2(size))
        if not step.is_first and scale != self._batch_scale:
            divide_gradients(self.model.parameters(), self._batch_scale / scale)
        self._batch_scale = scale

    def _divide_gradients(self, divisor: float) -> None:
        divide_gradients(self.model.parameters(), divisor)

    def _update(self, nothing_to_learn: bool) -> tuple[float, bool]:
        if self.loss_scale.dynamic:
            divide_gradients(self.model.parameters(), self._batch_scale)
        grad_norm = float(clip_gradients(self.model.parameters(), self.setup.training_args.max_grad_norm))
        updates = not nothing_to_learn and math.isfinite(grad_norm)
        self.loss_scale.update(math.isfinite(grad_norm))
        if updates:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm, updates

    @property
    def _states_move(self) -> bool:
        # States offloaded to host memory for good occupy no device.
        return super()._states_move and self.options.offload == "none"


def sharding_policies(setup: TrainerSetup, options: Fsdp2Options) -> dict[str, Any]:
    """Return the mixed-precision and offload policies for `fully_shard`."""
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, setup.model_args.dtype),
            reduce_dtype=torch.float32,
            # An image model needs its time steps in float32, and its other inputs already have the right dtype.
            cast_forward_inputs=setup.pictures is None,
        )
    }
    if options.offload == "cpu":
        # Pinned memory allows copies during computation. It does not exist without a GPU.
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=setup.device == "cuda")
    return policies


def _box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard, and its offsets in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    local = tensor.to_local()
    # Rows are split as `torch.chunk` does: ceil(rows / ranks) each, and fewer or none on the last ranks.
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * rows, tensor.shape[0])
    return local, (first, *(0,) * (tensor.ndim - 1))


def _fill(tensor: Tensor, name: str, state: SavedState) -> None:
    state.require_shape(name, tensor.shape)
    local, offsets = _box(tensor)
    if local.numel():
        local.copy_(state.read(name, offsets, local.shape))
