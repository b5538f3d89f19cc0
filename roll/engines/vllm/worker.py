"""Code that runs inside vLLM's worker processes: loads weight buckets, and returns checksums of the loaded weights.

Both use vLLM's interfaces for reinforcement learning: a weight transfer engine registered by name, and a worker
extension whose methods can be called on all workers. Weights are memory-mapped from shared memory that the trainer (or
the engine's process) has filled, never unpickled. vLLM's layer-wise reload converts them to its kernels' layout.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll.data.records import derive_seed
from roll.engines.options import VLLM_BUCKET_BACKEND, VLLM_OWNER_VARIABLE
from roll.engines.process_engine import Layout
from roll.runtime.usage import memory_in_use
from roll.weights.adapters import matrix_names
from roll.weights.buckets import BucketLocation, WeightBucket, end_with, map_file, tensor_checksum, views
from roll.weights.mapped import MappedMemory

Shape = tuple[int, ...]
_INSPECTED_BYTES = 64 * 1024**2
"""Maximum number of bytes of weights that are read back after an update."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty initialisation arguments: mapped memory needs no rendezvous."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Location and contents of a weight bucket."""

    path: str
    offset: int
    size: int
    tensors: list[tuple[str, str, Shape, int]]
    """Entries in the format of `WeightBucket.tensors`."""
    region: tuple[int, int] | None = None
    """That of `BucketLocation`."""


class BucketTransferEngine(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """vLLM weight transfer engine that loads buckets from mapped memory."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory = MappedMemory()
        # It warns at every update about layers without own weights. `roll_unloaded_parameters` checks completeness.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing: mapped memory needs no setup."""

    def start_weight_update(self) -> None:
        """Prepare all layers for loading checkpoint tensors again."""
        self.loaded: set[str] = set()
        self.wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Load a bucket's tensors into the model. Layers whose tensors are incomplete keep views of its memory."""
        if update_info.region is None:
            memory = map_file(update_info.path, update_info.offset, update_info.size)
        else:
            location = BucketLocation(update_info.path, update_info.offset, update_info.region)
            memory = self.memory.read(location, update_info.size)
        tensors = [(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in update_info.tensors]
        bucket = WeightBucket(tensors, memory)
        weights = [(name, tensor.to(self.device)) for name, tensor in views(bucket)]
        self.loaded |= set(self.model.load_weights(weights) or ())

    def finish_weight_update(self) -> None:
        """Convert the loaded tensors to the kernels' layout."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.quantization is None:
            _repack_shared(self.model)
            if self.device.type == "cpu":
                _repack_experts(self.model)

    def shutdown(self) -> None:
        """Do nothing: no resource is held between updates."""


def _repack_shared(model: torch.nn.Module) -> None:
    """Post-process shared parameters in all layers that use them.

    vLLM's reload does so only in the layer under whose name the weight was sent. On a CPU, a tied output head would
    otherwise keep using its packed copy of the first weights.
    """
    owners: dict[int, list[torch.nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)


def _repack_experts(model: torch.nn.Module) -> None:
    """Pack MoE experts for CPU kernels. vLLM does so at the first load only, and would use the unpacked weights of
    later updates as if they were packed."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


# Otherwise a worker whose owner was killed would hold its memory and devices forever. (Before workers exist, vLLM's
# engine process waits for its owner, and ends by itself after some minutes.)
if VLLM_OWNER_VARIABLE in os.environ and os.environ[VLLM_OWNER_VARIABLE] != str(os.getpid()):
    end_with(int(os.environ[VLLM_OWNER_VARIABLE]))

WeightTransferEngineFactory.register_engine(VLLM_BUCKET_BACKEND, BucketTransferEngine)


class WorkerCalls:
    """vLLM worker extension: methods that the strategy calls on all workers. vLLM's worker class inherits from it."""

    weight_transfer_engine: Any
    model_config: Any
    model_runner: Any

    def roll_memory(self) -> dict[str, float]:
        """Return the memory of this worker."""
        return memory_in_use()

    def roll_unloaded_parameters(self) -> list[str]:
        """Return the parameters that the last update did not load. [] for a quantised model, whose scales are
        computed."""
        engine = self.weight_transfer_engine
        if not isinstance(engine, BucketTransferEngine) or self.model_config.quantization is not None:
            return []
        return sorted(engine.wanted - engine.loaded)

    def roll_held_checksums(self, layout: Layout, version: int | None = None) -> dict[str, int]:
        """Return name -> checksum of the tensors that this worker holds in the checkpoint's layout.

        With a ``version``, only of a sample, which differs from version to version. Tensors that were repacked for
        kernels are left out."""
        shapes = {name: tuple(shape) for name, (_, shape) in layout.items()}
        readable = {
            name: tensor
            for name, tensor in readable_tensors(self.model_runner.get_model(), shapes)
            if str(tensor.dtype) == f"torch.{layout[name][0]}"
        }
        chosen = readable if version is None else sample_of(readable, version)
        return {name: tensor_checksum(readable[name]) for name in chosen}

    def roll_held_adapter(self, layout: Layout) -> dict[str, int | None]:
        """Return name -> checksum of the adapter's tensors in this worker's layers. None: the worker has only a part of
        the tensor. Tensors that are in no layer are left out."""
        model = self.model_runner.get_model()
        fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        found: dict[str, int | None] = {}
        for path, module in model.named_modules():
            if not isinstance(module, BaseLinearLayerWithLoRA):
                continue
            root, _, own = path.rpartition(".")
            parts = zip(fused.get(own, [own]), module.lora_a_stacked, module.lora_b_stacked, strict=False)
            for part, *matrices in parts:
                for name, slots in zip(matrix_names(f"{root}.{part}"), matrices, strict=True):
                    if name in layout:
                        _, (rows, columns) = layout[name]
                        held = slots[0, 0, :rows, :columns]  # the only adapter is in the only slot
                        found[name] = tensor_checksum(held) if held.shape == (rows, columns) else None
        return found


def sample_of(tensors: dict[str, torch.Tensor], version: int) -> list[str]:
    """Return the names of a pseudorandom sample of tensors, determined by ``version``, of at most `_INSPECTED_BYTES` in
    total (but at least one tensor)."""
    sample: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: derive_seed(version, name)):
        size += tensors[name].nbytes
        if sample and size > _INSPECTED_BYTES:
            break
        sample.append(name)
    return sample


def readable_tensors(model: torch.nn.Module, shapes: dict[str, Shape]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of checkpoint tensors that can be read from vLLM's parameters: unchanged ones, the first
    rows of a padded vocabulary, and row blocks of fused projections (``packed_modules_mapping``). ``shapes``: those of
    the checkpoint."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for own_name, parameter in model.named_parameters():
        name = own_name.replace(".base_layer.", ".")  # layers wrapped for LoRA
        choices = [[name]]
        for fused_name, parts in fused.items():
            if f".{fused_name}." in name:
                choices.append([name.replace(f".{fused_name}.", f".{part}.") for part in parts])
        for names in choices:
            if not parameter.dim() or not all(shapes.get(part) for part in names):
                continue
            rows, held = [shapes[part][0] for part in names], parameter.shape[0]
            fits = held >= rows[0] if len(names) == 1 else held == sum(rows)
            if fits and parameter.shape[1:] == shapes[names[0]][1:]:
                yield from zip(names, parameter[: sum(rows)].split(rows), strict=True)
