"""What `roll` imports and calls of vLLM, DeepSpeed, megatron-core and young parts of torch is there, and our very calls
fit its signatures, also those that only GPUs reach. SGLang is not installed; beside its tests is a recorded table.

Sources are read, nothing is imported. With ``make contracts VLLM=<version>`` those of another release.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from roll.configs.strategies import OPTIONS
from roll.trainers.fsdp2 import sharding_policies
from roll.trainers.megatron.facts import ModelFacts, read_facts
from roll.trainers.options import PASSED_ON, DeepSpeedOptions, MegatronOptions, engine_config
from roll.weights.publisher import IpcConnection, packed
from tests import tiers
from tests.contracts.sources import VARIABLE, Missing, Module, Sources, folders, unpacked
from tests.contracts.uses import IMPLEMENTED, ROLL, Use, misfit, unlike, uses_of
from tests.engines.sglang_interface import TABLE
from tests.engines.test_vllm_options import arguments
from tests.trainers.megatron_models import MODELS

pytestmark = [pytest.mark.tier("all"), pytest.mark.timeout(300)]

AT_LEAST = {"vllm": 90, "deepspeed": 28, "megatron": 100, "torch": 8}
"""Library -> different names of it that are found in our sources. Fewer would mean that the search has grown blind."""
YOUNG = (
    "torch.distributed.fsdp.",
    "torch.distributed.tensor.",
    "torch.distributed.device_mesh.",
    "torch.nn.attention.",
)
PASSES_ON = {"vllm.distributed.weight_transfer.base.WeightTransferEngine.__init__"}
"""Functions that one of ours calls with what it was itself given."""
LIBRARIES = [name for name in AT_LEAST if not os.environ.get(VARIABLE) or unpacked(name)]


def sources_of(library: str) -> Sources:
    """The sources, or a skipped test if they are not here."""
    if unpacked(library) is None:
        tiers.need("megatron.core" if library == "megatron" else library)
    return sources()


@cache
def sources() -> Sources:
    return Sources(folders())


@cache
def uses(library: str) -> list[Use]:
    if library != "torch":
        return uses_of(library, sources())
    texts = {str(path.relative_to(ROLL)): path.read_text() for path in ROLL.rglob("*.py")}
    files = {name: text for name, text in texts.items() if any(module[:-1] in text for module in YOUNG)}
    return [use for use in uses_of(library, sources(), files) if use.name.startswith(YOUNG)]


def dictionaries(name: str) -> list[dict]:
    """What is passed as a whole dictionary to a function of a library."""
    if name.endswith(".AsyncEngineArgs"):
        return [arguments(device=device, tensor_parallel_size=size) for device in ("cpu", "cuda") for size in (1, 2)]
    if name.endswith(".TransformerConfig"):
        return transformer_settings()
    if name.endswith(".finalize_model_grads"):
        return [{key: None for key in call} for call in final_calls()]
    if name.endswith(".fully_shard"):
        setup = SimpleNamespace(device="cuda", model_args=SimpleNamespace(dtype="bfloat16"), pictures=None)
        return [{"mesh": None} | sharding_policies(setup, SimpleNamespace(offload=place)) for place in ("none", "cpu")]
    raise KeyError(f"{name} is passed a dictionary, and no contract says what is in it")


@cache
def transformer_settings() -> list[dict]:
    """Settings of each family of models."""
    elsewhere = ast.literal_eval(sources().find("roll.trainers.megatron.model._USED_ELSEWHERE").node.value)
    options = {name: value for name, value in vars(MegatronOptions()).items() if name not in elsewhere}
    return [dict(facts.layers) | options for facts in model_facts()]


@cache
def model_facts() -> list[ModelFacts]:
    """What is read of a model of each family."""
    found = []
    for make in MODELS.values():
        with TemporaryDirectory() as folder:
            make().config.save_pretrained(folder)
            found.append(read_facts(folder, False, "policy"))
    return found


@cache
def final_calls() -> list[list[str]]:
    """Keywords with which the schedules of megatron-core call what sums the gradients."""
    schedules = sources().module("megatron.core.pipeline_parallel.schedules")
    calls = [node for node in ast.walk(schedules.tree) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func).endswith(".finalize_model_grads_func")]
    assert found and all(len(call.args) == 2 for call in found)
    return [[each.arg for each in call.keywords] for call in found]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_that_is_used_exists_and_every_call_fits(library):
    here = sources_of(library)
    found = uses(library)
    assert len({use.name for use in found}) >= AT_LEAST[library]
    problems = []
    for use in found:
        if use.has_dictionary and use.name in PASSES_ON:
            continue
        passed = dictionaries(use.name) if use.has_dictionary else [{}]
        problems.append((use.place, use.name, use.problem(here, passed)))
    assert "\n".join(" ".join(each) for each in problems if each[2]) == ""


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_name_that_a_file_imports_is_among_them(library):
    """Counted by text, so that the search cannot miss a file."""
    sources_of(library)
    prefix = (
        f"(?:{'|'.join(map(re.escape, YOUNG))})".replace(r"\.)", r"\.?)") if library == "torch" else rf"{library}\b"
    )
    names = set()
    for path in ROLL.rglob("*.py"):
        for line in re.findall(rf"^\s*from ({prefix}.*) import \(?(.*?)\)?$", path.read_text(), re.MULTILINE):
            names |= {f"{line[0]}.{name.split(' as ')[0].strip()}" for name in line[1].split(",") if name.strip()}
    assert names and names <= {use.name for use in uses(library)}


def test_sglang_has_what_is_imported_of_it():
    used = {use.name for use in uses_of("sglang", sources())}
    assert used == TABLE["imports"].keys() and set(TABLE["imports"].values()) == {None}


@pytest.mark.skipif("megatron" not in LIBRARIES, reason="another library is looked at")
def test_every_schedule_takes_what_the_trainer_passes_and_gives_what_its_sum_takes():
    here = sources_of("megatron")
    (call,) = [use.call for use in uses("megatron") if use.call and use.name.endswith("no_pipelining")]
    for name in ("without", "with"):
        function = f"forward_backward_pipelining_{name}_interleaving"
        assert misfit(call, here.signature(here.find(f"megatron.core.pipeline_parallel.schedules.{function}"))) is None


@pytest.mark.skipif("vllm" not in LIBRARIES, reason="another library is looked at")
def test_variables_and_settings_of_vllm_exist():
    here = sources_of("vllm")
    known = {each.value for each in ast.walk(here.module("vllm.envs").tree) if isinstance(each, ast.Constant)}
    text = (ROLL / "engines" / "vllm" / "strategy.py").read_text()
    variables = set(re.findall(r'"(VLLM_[A-Z0-9_]+)"', text))
    assert len(variables) == 4 and variables <= known
    settings = here.signature(here.find("vllm.config.WeightTransferConfig")).parameters
    assert arguments()["weight_transfer_config"].keys() <= settings.keys()


@pytest.mark.skipif("vllm" not in LIBRARIES, reason="another library is looked at")
def test_messages_of_a_push_by_cuda_ipc_are_those_that_vllm_takes():
    module, messages = "vllm.distributed.weight_transfer.ipc_engine", []
    client = SimpleNamespace(
        init_weight_transfer_engine=messages.append,
        start_weight_update=lambda: None,
        update_weights=messages.append,
        finish_weight_update=lambda: None,
    )
    chunks = packed(
        [("a", torch.ones(3))], 64, [], lambda size, device: (torch.empty(size, dtype=torch.uint8), ("gpu", ()))
    )
    IpcConnection(client).send(chunks, [[{"gpu": ()}]])
    here = sources_of("vllm")
    for name, message in zip(("IPCWeightTransferInitInfo", "IPCWeightTransferUpdateInfo"), messages, strict=True):
        here.signature(here.find(f"{module}.{name}")).bind(**message)


def keys_read_by_deepspeed(here: Sources) -> set[str]:
    """Words that the code of its configuration gives a name, keeps in a table, or looks up."""
    modules, found = ["deepspeed.runtime.config"], set()
    for name in modules:  # those that it imports, and those that they import, are appended
        module = here.module(name)
        if module is None or len(name.split(".")) < 3:
            continue
        imports = [node for node in module.tree.body if isinstance(node, ast.ImportFrom)]
        origins = {module.absolute(node) for node in imports}
        modules += sorted(each for each in origins - set(modules) if each.endswith(("config", "constants")))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assign) and node in module.tree.body:
                found |= {node.value} if isinstance(node.value, ast.Constant) else set()
                found |= set(node.value.keys) if isinstance(node.value, ast.Dict) else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get"):
                found |= set(node.args[:1])
    return {each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def fields_of_deepspeed(here: Sources, name: str) -> set[str]:
    """Fields of a section of DeepSpeed's configuration, with their other names."""
    fields = here.signature(here.find(f"deepspeed.runtime.{name}")).parameters
    defaults = [each.default for each in fields.values() if isinstance(each.default, ast.Call)]
    aliases = {word.value.value for call in defaults for word in call.keywords if word.arg == "alias"}
    return fields.keys() | aliases


def unknown_to_deepspeed(here: Sources) -> set[str]:
    """Keys that DeepSpeed gets from us, or that `roll` reads in what it gets, and does not have."""
    config = engine_config(DeepSpeedOptions(), bfloat16=True, max_grad_norm=1.0)
    unknown = (config.keys() | PASSED_ON | config["data_types"].keys()) - keys_read_by_deepspeed(here)
    unknown |= config["bf16"].keys() - fields_of_deepspeed(here, "precision_config.DeepSpeedBF16Config")
    zero = {path.removeprefix("zero_optimization.") for path in OPTIONS["deepspeed_train"] if "." in path}
    for section, model in [
        ("", "config.DeepSpeedZeroConfig"),
        ("offload_optimizer.", "offload_config.DeepSpeedZeroOffloadOptimizerConfig"),
        ("offload_param.", "offload_config.DeepSpeedZeroOffloadParamConfig"),
    ]:
        keys = {path.removeprefix(section) for path in zero if path.startswith(section)}
        unknown |= {key for key in keys if "." not in key} - fields_of_deepspeed(here, f"zero.{model}")
    return unknown


@pytest.mark.skipif("deepspeed" not in LIBRARIES, reason="another library is looked at")
def test_keys_of_deepspeeds_configuration_exist():
    sources_of("deepspeed")
    assert unknown_to_deepspeed(sources()) == set()


@pytest.mark.skipif("deepspeed" not in LIBRARIES, reason="another library is looked at")
@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("constants", "log_level"),
        ("constants", "grad_accum_dtype"),
        ("precision_config", "enabled"),
        ("zero.config", "stage"),
        ("zero.offload_config", "device"),
    ],
)
def test_a_key_that_deepspeed_renames_is_found(module, word):
    sources_of("deepspeed")
    assert unknown_to_deepspeed(with_renamed(f"deepspeed.runtime.{module}", word)) == {word}


CORE = "megatron.core"
LAYERS = {
    "decoder": ["transformer.transformer_block.TransformerBlock"],
    "layers": ["transformer.transformer_layer.TransformerLayer"],
    "self_attention": ["transformer.attention.SelfAttention"],
    "mlp": ["transformer.mlp.MLP", "transformer.moe.moe_layer.MoELayer"],
    "router": ["transformer.moe.router.TopKRouter"],
    "experts": ["transformer.moe.experts.SequentialMLP", "transformer.moe.experts.TEGroupedMLP"],
    "local_experts": ["transformer.mlp.MLP"],
    "embedding": ["models.common.embeddings.language_model_embedding.LanguageModelEmbedding"],
    "word_embeddings": ["tensor_parallel.layers.VocabParallelEmbedding"],
    "output_layer": ["tensor_parallel.layers.ColumnParallelLinear"],
    "linear_qkv": ["tensor_parallel.layers.ColumnParallelLinear"],
    "linear_fc1": ["tensor_parallel.layers.ColumnParallelLinear"],
    "linear_fc2": ["tensor_parallel.layers.RowParallelLinear"],
    "linear_proj": ["tensor_parallel.layers.RowParallelLinear"],
}
"""Member of a model of megatron-core -> what it may be. Its norms are of other libraries, or ours."""


def unknown_to_megatron(here: Sources) -> set[str]:
    """Parameters in the table of weights that no model of megatron-core has."""
    from roll.trainers.megatron.weights import weight_rules

    unknown = set()
    for facts in model_facts():
        for rule in weight_rules(facts):
            owners = [here.find(f"{CORE}.models.gpt.GPTModel")]
            for part in re.sub(r"\.\{\w+\}", "", rule.megatron).split("."):
                if not any(here.member(owner, part) for owner in owners):
                    unknown |= {rule.megatron}
                    break
                if part not in LAYERS:
                    break
                owners = [here.find(f"{CORE}.{name}") for name in LAYERS[part]]
    return {name for name in unknown if not name.endswith(("layer_norm_weight", "weight{expert}"))}


@pytest.mark.skipif("megatron" not in LIBRARIES, reason="another library is looked at")
def test_parameters_in_the_table_of_weights_exist():
    sources_of("megatron")
    assert unknown_to_megatron(sources()) == set()


@pytest.mark.skipif("megatron" not in LIBRARIES, reason="another library is looked at")
@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("transformer.transformer_layer", "self_attention"),
        ("transformer.attention", "linear_qkv"),
        ("transformer.mlp", "linear_fc1"),
        ("transformer.moe.experts", "local_experts"),
        ("transformer.transformer_block", "final_layernorm"),
        ("models.gpt.gpt_model", "embedding"),
    ],
)
def test_a_parameter_that_megatron_renames_is_found(module, word):
    sources_of("megatron")
    unknown = unknown_to_megatron(with_renamed(f"{CORE}.{module}", word))
    assert unknown and all(word in name for name in unknown)


def with_renamed(module: str, word: str) -> Sources:
    """The sources as if a library had renamed something in one module."""
    changed = Module(module, sources().module(module).file)
    text, count = re.subn(rf"\b{word}\b", f"{word}_now", changed.file.read_text())
    assert count
    changed.tree = ast.parse(text)
    return sources().replacing(changed)


@pytest.mark.parametrize(
    ("file", "module", "word"),
    [
        ("engines/vllm/worker.py", "vllm.lora.layers.base_linear", "lora_a_stacked"),
        ("engines/vllm/worker.py", "vllm.v1.worker.gpu_worker", "weight_transfer_engine"),
        ("engines/vllm/worker.py", "vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
        ("engines/vllm/worker.py", "vllm.distributed.weight_transfer.base", "device"),
        ("engines/vllm/strategy.py", "vllm.v1.worker.gpu_worker", "kv_cache"),
        ("trainers/deepspeed.py", "deepspeed.runtime.zero.stage3", "loss_scale"),
        ("trainers/deepspeed.py", "deepspeed.accelerator.real_accelerator", "DS_ACCELERATOR"),
        ("trainers/megatron/strategy.py", "megatron.core.optimizer.optimizer", "main_param"),
        ("trainers/megatron/strategy.py", "megatron.core.optimizer.distrib_optimizer", "param_map"),
        ("trainers/megatron/weights.py", "megatron.core.tensor_parallel.layers", "tensor_model_parallel"),
    ],
)
def test_a_name_that_a_library_renames_is_found(file, module, word):
    library = module.partition(".")[0]
    if library not in LIBRARIES:
        pytest.skip("another library is looked at")
    sources_of(library)
    here = with_renamed(module, word)
    found = uses_of(library, here, {file: (ROLL / file).read_text()})
    assert any(use.symbol is None and word in use.name for use in found)


LIBRARY = """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["keep", "wait"]

class Base(ABC):
    def __init__(self): self.place = "here"
    source: object
    @abstractmethod
    def send(self, name, *, size=1): ...

class Engine(Base):
    def __init__(self, size): self.size = size
    def pause(self, mode: Mode = "keep"): ...
    async def ask(self): ...
    async def stream(self): yield 1
    @staticmethod
    def shape(rows): ...

@dataclass
class Settings:
    rows: int
    columns: int = field(default=1)
    cells: int = field(init=False, default=0)

def wrap(engine, **settings): ...
"""
OURS = """
from fakelib import Base, Engine, Settings, Unknown
import fakelib

def made(engine: Engine | None, size: int):
    {line}

class Mine(Base):
    def {method}: ...

class Held(Engine):
    number: int
    def send(self, name, *, size=1): ...
    def told(self):
        self.mine = self.size, self.place, self.mine, self.told, self.{own}
"""


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("engine.pause('wait')", None),
        ("engine.pause(mode='hold')", "mode='hold' is none of ['keep', 'wait']"),
        ("engine.pause('keep', 1)", "too many positional arguments"),
        ("engine.pause(moed='keep')", "got an unexpected keyword argument 'moed'"),
        ("engine.halt()", "the library has no such name"),
        ("engine.size + engine.source + len(getattr(engine, 'size'))", None),
        ("getattr(engine, 'sizes', None)", "the library has no such name"),
        ("Engine.shape(3)", None),
        ("fakelib.Engine()", "missing a required argument: 'size'"),
        ("made = Engine(2); made.pause(1, 2)", "too many positional arguments"),
        ("Settings(1, 2)", None),
        ("Settings(rows=1, cells=2)", "got an unexpected keyword argument 'cells'"),
        ("Settings()", "missing a required argument: 'rows'"),
        ("fakelib.wrap(engine, rows=1)", None),
        ("fakelib.unwrap(engine)", "the library has no such name"),
        ("engine.send('a', size=2)", None),
        ("await engine.ask()", None),
        ("self._answer(engine.ask())", None),
        ("engine.stream()", None),
        ("engine.ask()", "has to be awaited"),
        ("await engine.pause()", "is awaited, but gives nothing to wait for"),
        ("self._answer(engine.pause())", "is awaited, but gives nothing to wait for"),
    ],
)
def test_what_does_not_fit_is_found(tmp_path, line, problem):
    (tmp_path / "fakelib.py").write_text(LIBRARY)
    here = Sources([tmp_path])
    text = OURS.format(line=line, method="send(self, name, *, size=1)", own="mine")
    found = uses_of("fakelib", here, {"x.py": text})
    problems = [use.problem(here) for use in found if not use.name.endswith("Unknown")]
    assert [each for each in problems if each] == ([problem] if problem else [])
    assert any(use.name == "fakelib.Unknown" and use.problem(here) for use in found)


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("send(self, size)", "send('size',) is called with ('name', 'size')"),
        ("other(self)", "the library has no such name"),
    ],
)
def test_a_method_that_does_not_take_the_place_of_the_librarys_is_found(tmp_path, method, problem):
    (tmp_path / "fakelib.py").write_text(LIBRARY.replace("Unknown", "Base"))
    text = OURS.replace(", Unknown", "").format(line="...", method=method, own="mine")
    found = uses_of("fakelib", Sources([tmp_path]), {"x.py": text})
    (wrong,) = [use for use in found if use.problem(Sources([tmp_path]))]
    assert wrong.problem(Sources([tmp_path])) == problem


@pytest.mark.tier("quick")
@pytest.mark.parametrize("name", ["gone", "number"])
def test_a_name_of_ones_own_object_that_neither_class_gives_it_is_found(tmp_path, name):
    """``number`` is only declared."""
    (tmp_path / "fakelib.py").write_text(LIBRARY)
    text = OURS.replace(", Unknown", "").format(line="...", method="send(self, name, *, size=1)", own=name)
    found = uses_of("fakelib", Sources([tmp_path]), {"x.py": text})
    assert [use.name for use in found if use.symbol is None] == [f"fakelib.Engine.{name}"]


@pytest.mark.tier("quick")
def test_every_method_of_a_protocol_is_wanted(tmp_path, monkeypatch):
    (tmp_path / "fakelib.py").write_text(
        "from typing import Protocol\nclass Client(Protocol):\n    def send(self): ...\n    def stop(self): ..."
    )
    monkeypatch.setitem(IMPLEMENTED, "x.py:Mine", "fakelib.Client")
    found = uses_of("fakelib", Sources([tmp_path]), {"x.py": "class Mine:\n    def send(self): ..."})
    assert [use.name for use in found if use.symbol is None] == ["x.py:Mine lacks stop"]


@pytest.mark.tier("quick")
def test_arguments_of_a_method_of_ours_must_be_the_librarys():
    def theirs(self, a, *, b=0): ...

    signature = inspect.signature(theirs.__get__(object()))
    for text, fits in [("a, b", True), ("b, a", False), ("a", False), ("a, *args, **more", True)]:
        method = ast.parse(f"def theirs(self, {text}): ...").body[0]
        assert (unlike(method, signature) is None) == fits


@pytest.mark.tier("soak")
@pytest.mark.parametrize("library", [name for name in LIBRARIES if unpacked(name) is None])
def test_signatures_read_from_sources_are_those_of_the_running_library(library):
    here, compared = sources_of(library), 0
    symbols = {use.name: use.symbol for use in uses(library) if use.call and use.symbol}
    for name, symbol in symbols.items():
        running = importlib.import_module(symbol.module.name)
        for part in name.removeprefix(f"{symbol.module.name}.").split("."):
            running = getattr(running, part)
        try:
            found = inspect.signature(running).parameters
        except (ValueError, TypeError):
            continue
        parameters = [each for each in found if each not in ("self", "cls")]
        if parameters != ["args", "kwargs"]:  # what a decorator of the library leaves
            assert sorted(parameters) == sorted(here.signature(symbol).parameters), name
            compared += 1
    assert compared >= AT_LEAST[library] // 5


def test_a_library_without_sources_is_named():
    with pytest.raises(Missing, match="no_such_library has no sources"):
        sources().find("no_such_library.x")
