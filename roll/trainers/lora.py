"""LoRA (arXiv 2106.09685): train low-rank adapters beside frozen weights, with peft's layers.

peft's layers are injected into the model without a wrapper, so the model keeps its class, forward pass and head.
Adapters are float32. The frozen base model has the compute precision, because it receives no updates. By default,
adapters are merged into the weights sent to engines and exports, so engines, checksums and exports see a plain model.
With `weight_update.content: adapter`, only the adapters are sent, to engines that have the same base model.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from roll.configs.errors import ConfigProblem, choose_among, problems_of
from roll.configs.plugins import problem
from roll.configs.roles import ModelArguments
from roll.data.pictures import policy_class
from roll.distribution import install_command
from roll.trainers.model import decoder_layers
from roll.weights.adapters import PREFIX, matrix_names
from roll.weights.buckets import dtype_name, tensor_bytes

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name of the model's only adapter in peft."""
EVERYWHERE = "all-linear"
INSTALL = install_command("peft")
OWNER = "actor_train.model_args"
"""Configuration path of the arguments of the only model that may have adapters."""
FOLDER = "adapter"
"""Folder of the adapter in an export, beside the merged model."""
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def check_adapters(
    model_path: str, arguments: ModelArguments, path: str, pictures: bool = False
) -> list[ConfigProblem]:
    """Return the problems of the LoRA settings in ``arguments``. Loads no weights.

    ``path`` is the configuration path of ``arguments``. ``pictures``: the model is an image model.
    """
    if importlib.util.find_spec("peft") is None:
        return [ConfigProblem(f"{path}.lora_target", "adapters need peft, which is not installed", INSTALL)]
    if pictures:
        from roll.pictures.model import empty_transformer

        drawer = empty_transformer(model_path)
        return problems_of(lambda: resolve_targets(drawer, arguments.lora_target or EVERYWHERE, path))
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=arguments.trust_remote_code)
    with torch.device("meta"):
        skeleton = policy_class(config).from_config(config, trust_remote_code=arguments.trust_remote_code)
    return problems_of(lambda: resolve_targets(skeleton, arguments.lora_target or EVERYWHERE, path))


@dataclass(frozen=True)
class Base:
    """Identity of the base model that adapters belong to: checksum and dtype of all frozen weights."""

    checksum: str
    dtype: str

    def difference(self, other: Mapping[str, str]) -> str | None:
        """Return why adapters of the base model ``other`` do not fit this one; None if they fit."""
        if other["dtype"] != self.dtype:
            return f"for base weights in {other['dtype']}, here they are in {self.dtype}: set `model_args.dtype` back"
        if other["checksum"] != self.checksum:
            return (
                f"for another base model (checksum of the frozen weights {other['checksum']}, here {self.checksum}): "
                "start from the model that they were trained on"
            )
        return None


def resolve_targets(model: PreTrainedModel, wanted: list[str] | str, path: str = OWNER) -> list[str]:
    """Return the module names to give peft as ``target_modules``, with ``all-linear`` expanded.

    peft matches them against the ends of full module names. ``wanted`` is a list of names, or names separated by
    commas; ``path`` is the configuration path of the model's arguments. Only linear layers inside decoder layers can
    have adapters. Raises `ConfigError` naming each wanted module that is none, and the nearest valid name.
    """
    names = [name.strip() for name in (wanted.split(",") if isinstance(wanted, str) else wanted)]
    layers = {id(layer) for layer in decoder_layers(model)}
    adaptable = {
        f"{root}.{name}"
        for root, layer in model.named_modules()
        if id(layer) in layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    known = sorted({name.rpartition(".")[2] for name in adaptable})
    if names == [EVERYWHERE]:
        return known
    unknown = [name for name in names if not any(_is_target(module, name) for module in adaptable)]
    if unknown:
        modules = [name for name, _ in model.named_modules() if name]
        reasons = []
        for name in unknown:
            exists = any(_is_target(module, name) for module in modules)
            reason = "no linear layer of the decoder layers" if exists else "no module of this model"
            reasons.append(f"{name!r} is {reason}")
        raise problem(f"{path}.lora_target", ", ".join(reasons), choose_among(unknown[0], [*known, EVERYWHERE]))
    return names


def _is_target(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


@dataclass(frozen=True)
class Adapters:
    """The LoRA adapters injected into a model, which may have been sharded since."""

    layers: Mapping[str, LoraLayer]
    """Module name in the base model -> peft's layer, which holds the adapter."""
    config: LoraConfig
    base: Base

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the model without its adapters within the block. Compute no gradients there."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
            # peft freezes disabled adapters. FSDP checks which parameters are trainable only once, at its first
            # forward pass, which may be this one, so they must stay trainable.
            for parameter in _matrices(layer):
                parameter.requires_grad_(True)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)

    def merged(
        self, parameters: Iterable[tuple[str, nn.Parameter]], full: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with adapters merged in, float32, one at a time, under the names of the base model.

        ``parameters`` are the model's named parameters. ``full`` returns a parameter as a full (unsharded) float32
        tensor. Collective if ``full`` is.
        """
        for plain, weight in self.base_weights(parameters, full):
            layer = self.layers.get(plain.removesuffix(".weight"))
            if layer is not None:
                down, up = (full(matrix).to(weight.device) for matrix in _matrices(layer))
                weight = torch.addmm(weight, up, down, alpha=layer.scaling[ADAPTER])
            yield plain, weight

    def base_weights(
        self, parameters: Iterable[tuple[str, nn.Parameter]], full: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the base model, without adapters; otherwise like `merged`."""
        for name, parameter in parameters:
            if not is_adapter(name):
                yield name.replace(".base_layer.", "."), full(parameter)

    def published(self, full: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA matrices alone, float32, one at a time, in the format of `roll.weights.adapters`. The second
        matrix includes the LoRA scaling. Collective if ``full`` is."""
        for name, layer in self.layers.items():
            down, up = matrix_names(name)
            yield down, full(_matrices(layer)[0])
            yield up, full(_matrices(layer)[1]) * layer.scaling[ADAPTER]

    def export(self, full: Callable[[Tensor], Tensor], wanted: bool) -> Callable[[str], None] | None:
        """Copy the LoRA matrices, and return a function that writes them into a given export folder in peft's format.

        ``full`` returns a parameter as a full tensor. With ``wanted`` false, copies nothing and returns None.
        Collective if ``full`` is.
        """
        tensors = {}
        for name, matrix in self._matrices_in_files():
            whole = full(matrix)
            if wanted:
                tensors[name] = whole.to("cpu", copy=True)
        return partial(self._write, tensors) if wanted else None

    def _matrices_in_files(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the LoRA matrices of all layers with their names in peft's files."""
        for name, layer in self.layers.items():
            yield from zip(matrix_names(name), _matrices(layer), strict=True)

    def _write(self, tensors: Mapping[str, Tensor], path: str) -> None:
        folder = Path(path) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), folder / _WEIGHTS, {"format": "pt", "base": json.dumps(vars(self.base))})
        self.config.save_pretrained(str(folder))

    def read_export(self, path: str) -> dict[nn.Parameter, Tensor]:
        """Read an exported adapter. Return this model's parameter -> its values.

        Raises `ValueError` if there is no adapter, or if its base model, layers, rank or ``lora_alpha`` differ.
        """
        folder = Path(path) / FOLDER
        if not (folder / _WEIGHTS).is_file():
            raise ValueError(f"{path} has no {FOLDER}/{_WEIGHTS}; a trainer of adapters loads its own exports only")
        scale = json.loads((folder / _CONFIG).read_text())["lora_alpha"]
        if scale != self.config.lora_alpha:
            raise ValueError(f"the adapter in {folder} has lora_alpha {scale}, this trainer {self.config.lora_alpha}")
        found: dict[nn.Parameter, Tensor] = {}
        with safe_open(folder / _WEIGHTS, "pt") as file:
            base = json.loads((file.metadata() or {}).get("base", "null"))
            difference = "for a base model that it does not name" if base is None else self.base.difference(base)
            if difference is not None:
                raise ValueError(f"the adapter in {folder} was made {difference}")
            names = set(file.keys())
            for name, matrix in self._matrices_in_files():
                if name not in names:
                    raise ValueError(f"the adapter in {folder} has nothing for {name.removeprefix(PREFIX)}")
                found[matrix] = file.get_tensor(name)
                names.remove(name)
                if found[matrix].shape != matrix.shape:
                    raise ValueError(
                        f"{name} is {tuple(found[matrix].shape)} in {folder}, {tuple(matrix.shape)} in the model"
                    )
        if names:
            raise ValueError(f"the adapter in {folder} is for more layers than this trainer has: {sorted(names)[0]}")
        return found


def is_adapter(name: str) -> bool:
    """Return True if ``name`` is the name of a LoRA parameter."""
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def _matrices(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A ``[rank, inputs]`` and B ``[outputs, rank]``."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def add_adapters(
    model: PreTrainedModel, arguments: ModelArguments, model_path: str, task: str | None = "CAUSAL_LM"
) -> Adapters:
    """Add LoRA adapters to an unsharded model in place, and freeze its other weights.

    The first matrix of each adapter is random (torch's default generator) and the second one zero, so outputs do not
    change yet. ``task`` is the task type to record in peft's files. Raises `ConfigError` for an unknown target.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=2 * arguments.lora_rank if arguments.lora_alpha is None else arguments.lora_alpha,
        target_modules=resolve_targets(model, arguments.lora_target or EVERYWHERE),
        lora_dropout=0.0,
        bias="none",
        task_type=task,
        base_model_name_or_path=model_path,
    )
    base = fingerprint(model)
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for layer in layers.values():
        for matrix in _matrices(layer):
            # peft creates them in the layer's dtype.
            matrix.data = matrix.data.float()
    model.eval()
    return Adapters(layers, config, base)


def fingerprint(model: nn.Module) -> Base:
    """Return the identity of a base model, computed from all its weights. The model is unsharded and on the CPU."""
    digest = xxhash.xxh3_64()
    dtypes = set()
    for name, parameter in model.named_parameters():
        dtypes.add(dtype_name(parameter.dtype))
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(tensor_bytes(parameter).data)
    return Base(digest.hexdigest(), " and ".join(sorted(dtypes)))
