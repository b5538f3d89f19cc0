"""What the loaders of SGLang and vLLM do with the tensors that `roll` publishes, for each family of models.

The library's own model is made tiny on the CPU, filled with NaN, and loads a publication in which every element is a
different number. Then each number must be in some parameter, and no parameter may hold NaN. Kernels are not called,
so modules of SGLang that need a GPU, and packages that it needs and that are not installed, are empty here.

    python -m tests.contracts.loaders sglang|vllm FAMILY...

prints one line of JSON per family. A process of its own is needed: both libraries keep global state.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from roll.engines.sglang.loader import place_of
from roll.weights.checkpoint_names import CheckpointNames
from tests.contracts.sources import VARIABLE
from tests.weights.test_checkpoint_names import in_memory as all_tensors
from tests.weights.test_checkpoint_names import make

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
"""SGLang has the latent attention of DeepSeek on a CPU with these positions only."""
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}, "gemma": {}, "gemma2": {},
    "gemma3_text": {}, "phi3": {}, "olmo2": {}, "granite": {}, "qwen2_moe": {}, "qwen3_moe": {"mlp_only_layers": []},
    "mixtral": {}, "deepseek_v2": {"rope_parameters": YARN}, "deepseek_v3": {"rope_parameters": YARN}, "olmoe": {},
    "glm4_moe": {}, "ernie4_5_moe": {}, "phimoe": {"lm_head_bias": True, "attention_bias": True}, "granitemoe": {},
    "minimax_m2": {}, "flex_olmo": {},
}  # fmt: skip
"""Family -> settings beside those of `make`."""
FILES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma3_text": {"_attn_implementation": "eager"},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
}
"""Family -> entries of the ``config.json`` of its published checkpoints that transformers no longer writes."""
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}


def publication(family: str) -> tuple[PretrainedConfig, dict[str, Tensor], dict[str, Tensor]]:
    """The configuration of a tiny model, its tensors as they are published, each element another even number, and
    the same under their names in memory."""
    model = make(family, **SIZES | copy.deepcopy(CONFIGS[family]))
    model.config.architectures = [type(model).__name__]
    for name, value in FILES.get(family, {}).items():
        setattr(model.config, name, value)
    in_memory, start = {}, 1
    for name, tensor in all_tensors(model):
        in_memory[name] = 2 * torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        start += tensor.numel()
    assert start < 2**23, "float32 has no more even numbers"
    return model.config, dict(CheckpointNames.like(model).of(in_memory.items())), in_memory


def load(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """Let a model load; return the tensors of which it did not take each element, the parameters that are not filled,
    and the error, if it raised one."""
    parameters, errors = dict(model.named_parameters()), []
    with torch.no_grad():
        for tensor in (*parameters.values(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        try:
            model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
        except Exception as error:  # an unknown name ends some loaders, in many ways
            errors = [f"{type(error).__name__}: {error}"]
    held = torch.cat([tensor.detach().float().flatten() for tensor in (*parameters.values(), *model.buffers())])
    held = torch.cat([held, held - 1])  # SGLang's loader of Gemma adds 1 to norms
    return {
        "ignored": [name for name, tensor in tensors.items() if not torch.isin(tensor, held).all()],
        "unfilled": [name for name, parameter in parameters.items() if parameter.isnan().any()],
        "errors": errors,
    }


def report(model: nn.Module, tensors: dict[str, Tensor], in_memory: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return what `load` finds, the kinds of tensors, those of which a wrong name is not noticed, and the tensors that
    are not taken under their names in memory."""
    kinds = {place_of(name)[1]: name for name in tensors}
    wrong = {kind: re.sub(r"(\w+\.\w+)$", r"lost_\1", name) for kind, name in kinds.items()}
    unnoticed = [
        kind
        for kind, own in kinds.items()
        if not any(load(model, {wrong[kind] if name == own else name: each for name, each in tensors.items()}).values())
    ]
    return load(model, tensors) | {
        "kinds": [*kinds],
        "unnoticed": unnoticed,
        "ignored_in_memory": load(model, in_memory)["ignored"],
    }


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are empty here: any name of them is a mock."""

    NAMES = ("IPython", "gguf", "sgl_kernel", "torchvision", "sglang.kernels.jit.utils.compile.paths")

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        absent = any(name == each or name.startswith(f"{each}.") for each in self.NAMES)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__version__ = "99"
        module.__getattr__ = lambda name: _mock(name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _mock(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def start_sglang() -> Callable[[PretrainedConfig], nn.Module]:
    """Import SGLang from its unpacked wheel, as one process of one; return what makes a model."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.path.insert(0, os.environ[VARIABLE])
    sys.meta_path.insert(0, _Absent())
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.runtime_context import get_context, get_parallel

    arguments = get_context().override_server_args(device="cpu").install()
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/group", 0, "gloo")
    sizes = dict.fromkeys(("pp", "attn_dp", "attn_tp", "attn_dcp", "moe_ep", "moe_dp", "moe_tp"), 1)
    ranks = dict.fromkeys(("tp", "pp", "attn_dp", "attn_tp", "attn_cp", "moe_ep", "moe_tp"), 0)
    alone = {f"{name}_size": one for name, one in sizes.items()} | {
        f"{name}_rank": zero for name, zero in ranks.items()
    }
    get_parallel().override_permanently(**alone)
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention_flags(arguments)
    models = Path(os.environ[VARIABLE]) / "sglang" / "srt" / "models"

    def make_model(config: PretrainedConfig) -> nn.Module:
        (architecture,) = config.architectures
        defines = re.compile(rf"^class {architecture}\b", re.MULTILINE)
        (file,) = (file for file in sorted(models.glob("*.py")) if defines.search(file.read_text()))
        module = importlib.import_module(f"sglang.srt.models.{file.stem}")
        return getattr(module, architecture)(config=config)

    return make_model


def start_vllm() -> Callable[[PretrainedConfig], nn.Module]:
    """Make vLLM one process of one; return what makes a model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    def make_model(config: PretrainedConfig) -> nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            settings = EngineArgs(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
            whole = settings.create_engine_config()
        with set_current_vllm_config(whole):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/group", 0, "gloo")
            destroy_model_parallel()  # a group for experts is made for mixtures only
            initialize_model_parallel()
            return initialize_model(whole)

    return make_model


def main() -> None:
    """Print the reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=["sglang", "vllm"])
    parser.add_argument("families", nargs="+")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    publications = {family: publication(family) for family in arguments.families}
    make_model = {"sglang": start_sglang, "vllm": start_vllm}[arguments.library]()
    for family, (config, *tensors) in publications.items():
        print(json.dumps({family: report(make_model(config), *tensors)}), flush=True)


if __name__ == "__main__":
    main()
