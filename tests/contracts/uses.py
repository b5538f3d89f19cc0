"""What `roll` uses of a library, found in our sources: names that are imported, members that are read, calls, and
methods of ours that take the place of the library's.

What an object is follows from imports, annotations and constructors in the same function. `OBJECTS` says the rest.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import MappingProxyType, NoneType

import roll
from tests.contracts.sources import Function, Missing, Sources, Symbol

ROLL = Path(roll.__file__).parent

VLLM, CORE, ZERO = "vllm.distributed.weight_transfer", "megatron.core", "deepspeed.runtime.zero"
OBJECTS: dict[str, dict[str, str]] = {
    "engines/vllm/strategy.py": {
        "self._live_engine()": "vllm.v1.engine.async_llm.AsyncLLM",
        "engine": "vllm.v1.engine.async_llm.AsyncLLM",
        "engine.vllm_config": "vllm.config.VllmConfig",
        "engine.vllm_config.scheduler_config": "vllm.config.SchedulerConfig",
        "config.model_config": "vllm.config.ModelConfig",
        "config.speculative_config": "vllm.config.SpeculativeConfig",
        "_offload:config": "vllm.config.VllmConfig",
        "_updates:output": "vllm.outputs.RequestOutput",
        "_updates:completion": "vllm.outputs.CompletionOutput",
        "_score:output": "vllm.outputs.RequestOutput",
        "_score:position[token]": "vllm.logprobs.Logprob",
        "output.logprobs": "vllm.logprobs.FlatLogprobs",
        "take_output:span": "vllm.outputs.WeightVersionSpan",
    },
    "engines/vllm/worker.py": {
        "_repack_shared:module": "vllm.model_executor.layers.linear.LinearBase",
        "_repack_shared:method": "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase",
        "self.model.load_weights": "vllm.model_executor.models.qwen2.Qwen2ForCausalLM.load_weights",
        "_repack_experts:module": "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts",
        "kernel.fused_experts.process_weights_after_loading": (
            "vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEExperts.process_weights_after_loading"
        ),
        "getattr(module, 'quant_method', None)": (
            "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase"
        ),
        "self.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "self.model_config": "vllm.config.ModelConfig",
        "roll_held_adapter:model": "vllm.model_executor.models.qwen2.Qwen2ForCausalLM",
        "roll_held_adapter:module": "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA",
        "readable_tensors:model": "vllm.model_executor.models.qwen2.Qwen2ForCausalLM",
    },
    "weights/publisher.py": {
        "connect": f"{VLLM}.WeightTransferTrainerFactory.trainer_init",
        "engine.source": f"{VLLM}.TrainerWeightTransferEngine.source",
        "engine.send_weights": f"{VLLM}.TrainerWeightTransferEngine.send_weights",
        "disconnect:engine": f"{VLLM}.TrainerWeightTransferEngine",
    },
    "trainers/deepspeed.py": {
        "self.deepspeed": "deepspeed",
        "_set_state:utils": "deepspeed.utils",
        "self.engine": "deepspeed.DeepSpeedEngine",
        "self.engine.optimizer.loss_scale": f"{ZERO}.stage_1_and_2.DeepSpeedZeroOptimizer.loss_scale",
        "self.engine.optimizer.fp32_groups_gradients_flat": (
            "deepspeed.runtime.bf16_optimizer.BF16_Optimizer.fp32_groups_gradients_flat"
        ),
    },
    "trainers/megatron/model.py": {
        "model": f"{CORE}.models.gpt.GPTModel",
        "model.embedding": f"{CORE}.models.common.embeddings.language_model_embedding.LanguageModelEmbedding",
        "mlp": f"{CORE}.transformer.spec_utils.ModuleSpec",
        "mlp.submodules": f"{CORE}.transformer.moe.moe_layer.MoESubmodules",
        "packed_seq_params": f"{CORE}.packed_seq_params.PackedSeqParams",
    },
    "trainers/megatron/strategy.py": {
        "chunk": f"{CORE}.distributed.DistributedDataParallel",
        "_forward:chunk": f"{CORE}.models.gpt.GPTModel",
        "wrapped[0]": f"{CORE}.distributed.DistributedDataParallel",
        "buffer": f"{CORE}.distributed.param_and_grad_buffer._ParamAndGradBuffer",
        "_shared_out_masters:buffer": "builtin",
        "self.optimizer": f"{CORE}.optimizer.optimizer.ChainedOptimizer",
        "Masters:optimizer": f"{CORE}.optimizer.optimizer.ChainedOptimizer",
        "_shared_out_masters:optimizer": f"{CORE}.optimizer.distrib_optimizer.DistributedOptimizer",
        "part": f"{CORE}.optimizer.optimizer.MegatronOptimizer",
        "_accumulate:part": "builtin",
        "set_state:part": "builtin",
        "get_forward_backward_func()": f"{CORE}.pipeline_parallel.schedules.forward_backward_no_pipelining",
        "wrap_for_gradients:config": f"{CORE}.transformer.transformer_config.TransformerConfig",
        "unsynchronised:config": f"{CORE}.transformer.transformer_config.TransformerConfig",
    },
    "trainers/megatron/weights.py": {
        "chunk": f"{CORE}.models.gpt.GPTModel",
        "chunk.decoder": f"{CORE}.transformer.transformer_block.TransformerBlock",
        "layers[0]": f"{CORE}.transformer.transformer_layer.TransformerLayer",
    },
}
"""File of ours -> expression, or function and expression -> what it is in the library. A function's entry wins;
`builtin` says that the expression is nothing of the library's there."""

OWN, KEYWORD = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY

IMPLEMENTED = {"weights/publisher.py:RayEngineCalls": f"{VLLM}.VLLMWeightSyncClient"}
"""Classes of ours that a library calls without being their base."""

EXTENDS = {"engines/vllm/worker.py:WorkerCalls": "vllm.v1.worker.gpu_worker.Worker"}
"""Classes of ours that a library adds to the bases of one of its own."""

ALSO = {
    "engines/vllm/worker.py": ("vllm.v1.worker.gpu.model_runner.GPUModelRunner.get_model",),
    "trainers/deepspeed.py": (f"{ZERO}.stage3.DeepSpeedZeroOptimizer_Stage3.loss_scale",),
}
"""File of ours -> what its expressions stand for beside what `OBJECTS` says."""

WORDS = {
    "engines/vllm/strategy.py": {"kv_cache": "vllm.v1.worker.gpu_worker", "weights": "vllm.v1.worker.gpu_worker"},
    "trainers/deepspeed.py": {
        "DS_ACCELERATOR": "deepspeed.accelerator.real_accelerator",
        "LOCAL_RANK": "deepspeed.comm.comm",
        "__compatible_ops__": "deepspeed.comm.torch",
    },
    "trainers/megatron/strategy.py": {
        "main_param": f"{CORE}.optimizer.optimizer",
        "param_map": f"{CORE}.optimizer.distrib_optimizer",
        "param": f"{CORE}.optimizer.distrib_optimizer",
        "wd_mult": f"{CORE}.optimizer",
    },
    "trainers/megatron/weights.py": {"tensor_model_parallel": f"{CORE}.tensor_parallel.layers"},
    "trainers/megatron/model.py": {"sequence_parallel": f"{CORE}.distributed.finalize_model_grads"},
}
"""File of ours -> key, tag, variable, or attribute of a tensor -> module of the library that writes or reads it."""

AWAITING = ("self._answer",)
"""Methods of ours that await what they are given."""


@dataclass(frozen=True)
class Use:
    """One use of a library, in one place."""

    place: str
    """File and line."""
    name: str
    """What is used, by the library's name for it."""
    symbol: Symbol | None
    """None if the library does not have it."""
    call: ast.Call | None = None
    override: Function | None = None
    """Method of ours that takes the place of the symbol."""
    awaited: bool = False
    """True if the call is awaited."""

    def problem(self, sources: Sources, passed: Sequence[Mapping[str, object]] = ({},)) -> str | None:
        """Return what is wrong; None if nothing. ``passed``: dictionaries that the call passes on."""
        if self.symbol is None:
            return "the library has no such name"
        if self.override is not None:
            return unlike(self.override, sources.signature(self.symbol))
        if self.call is None:
            return None
        try:
            signature = sources.signature(self.symbol)
        except Missing as error:
            return str(error)
        if self.awaited != is_awaitable(self.symbol):
            return "is awaited, but gives nothing to wait for" if self.awaited else "has to be awaited"
        return next(filter(None, (misfit(self.call, signature, each) for each in passed)), None)

    @property
    def has_dictionary(self) -> bool:
        """True if the call passes a dictionary or a list whose contents the line does not show."""
        call = self.call
        return call is not None and (
            any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords)
        )


def uses_of(library: str, sources: Sources, files: Mapping[str, str] | None = None) -> list[Use]:
    """Return all uses of a library. ``files``: path below `roll` -> text; by default those on the disk."""
    if files is None:
        found = {str(path.relative_to(ROLL)): path.read_text(encoding="utf-8") for path in ROLL.rglob("*.py")}
        files = {name: text for name, text in sorted(found.items()) if library in text}
    return [use for name, text in files.items() for use in _File(name, library, sources).uses(ast.parse(text))]


class _File:
    """Walks one file; `scopes` has what names mean, function by function."""

    def __init__(self, name: str, library: str, sources: Sources) -> None:
        self.name, self.library, self.sources = name, library, sources
        self.objects = OBJECTS.get(name, {})
        self.functions: list[str] = []
        self.own: list[set[str]] = []
        """Names that the classes around the place give their objects."""
        self.awaited: set[ast.AST] = set()
        self.scopes: list[dict[str, tuple[Symbol | None, bool]]] = [{}]
        """Name -> what it is, and whether it is an object of that class (or the class, function, module itself)."""
        self.found: list[Use] = []

    def uses(self, tree: ast.Module) -> list[Use]:
        for node in ast.walk(tree):  # names that a file imports mean the same in all its functions
            if isinstance(node, (ast.ImportFrom, ast.Import)):
                self._import(node)
        self._walk(tree)
        for name in ALSO.get(self.name, ()):
            if self._is_ours(name):
                self._find(tree, name)
        for word, module in WORDS.get(self.name, {}).items():
            if self._is_ours(module):
                theirs = self.sources.module(module)
                known = theirs is not None and word in words(theirs.tree) and word in words(tree)
                self._add(tree, f"{module}: {word!r}", Symbol(theirs, theirs.tree, "") if known else None)
        return self.found

    def _is_ours(self, name: str | None) -> bool:
        return name is not None and name.partition(".")[0] == self.library

    def _add(self, node: ast.AST, name: str, symbol: Symbol | None, **more: ast.AST | bool) -> None:
        self.found.append(Use(f"roll/{self.name}:{getattr(node, 'lineno', 0)}", name, symbol, **more))  # type: ignore[arg-type]

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            full = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            if self._is_ours(full):
                name = alias.asname or alias.name
                self.scopes[0][name] = (self._find(node, full), False)

    def _find(self, node: ast.AST, full: str, note: bool = True) -> Symbol | None:
        try:
            symbol = self.sources.find(full)
        except Missing:
            symbol = None
        if note or symbol is None:
            self._add(node, full, symbol)
        return symbol

    def _walk(self, node: ast.AST) -> None:
        opens = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if opens:
            self.functions.append(node.name)  # type: ignore[attr-defined]
            self.scopes.append({})
            self._enter(node)
        if isinstance(node, ast.ClassDef):
            self.own.append(_own_names(node))
        if isinstance(node, ast.Await):
            self.awaited.add(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in AWAITING:
            self.awaited |= set(node.args)
        for child in ast.iter_child_nodes(node):
            self._walk(child)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            self._learn(node)
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Attribute):
            self._meaning(node, note=True)
        if opens:
            self.functions.pop()
            self.scopes.pop()
        if isinstance(node, ast.ClassDef):
            self.own.pop()

    def _enter(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef):
            bases = [self._meaning(each.value if isinstance(each, ast.Subscript) else each)[0] for each in node.bases]
            stated = IMPLEMENTED.get(f"{self.name}:{node.name}")
            if stated and self._is_ours(stated):
                bases.append(self._find(node, stated))
            extended = EXTENDS.get(f"{self.name}:{node.name}")
            if extended and self._is_ours(extended):
                self.scopes[-1]["self"] = (self._find(node, extended), True)
            for owner in filter(None, bases):
                self.scopes[-1] |= {"self": (owner, True), "super()": (owner, True)}
                self._overrides(node, owner)
            return
        assert isinstance(node, Function)
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            if argument.annotation is not None:
                self.scopes[-1][argument.arg] = (self._annotated(argument.annotation), True)

    def _overrides(self, node: ast.ClassDef, owner: Symbol) -> None:
        own = {each.name for each in node.body if isinstance(each, Function)}
        for name in self.sources.abstract_methods(owner) - own:
            self._add(node, f"{self.name}:{node.name} lacks {name}", None)
        for method in node.body:
            if isinstance(method, Function) and not method.name.startswith("__"):
                theirs = self.sources.member(owner, method.name)
                if theirs is not None and theirs.is_function and self._is_ours(theirs.module.name):
                    self._add(method, str(theirs), theirs, override=method)

    def _annotated(self, annotation: ast.expr) -> Symbol | None:
        if isinstance(annotation, ast.BinOp):
            return self._annotated(annotation.left) or self._annotated(annotation.right)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self._annotated(ast.parse(annotation.value, mode="eval").body)
        symbol = self._meaning(annotation)[0] if isinstance(annotation, (ast.Name, ast.Attribute)) else None
        return symbol if symbol is not None and symbol.is_class else None

    def _learn(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        symbol = self._annotated(node.annotation) if isinstance(node, ast.AnnAssign) else None
        if symbol is None and isinstance(node.value, ast.Call):
            made, is_object = self._meaning(node.value.func)
            symbol = made if made is not None and made.is_class and not is_object else None
        if symbol is not None:
            self.scopes[-1] |= {ast.unparse(target): (symbol, True) for target in targets}

    def _meaning(self, node: ast.expr, note: bool = False) -> tuple[Symbol | None, bool]:
        """Return what an expression is: a symbol, and whether the expression is an object of this class."""
        text = ast.unparse(node)
        stated = [self.objects.get(f"{function}:{text}") for function in reversed(self.functions)]
        stated = [each for each in [*stated, self.objects.get(text)] if each]
        if stated and not self._is_ours(stated[0]):
            return None, False
        if note and isinstance(node, ast.Attribute):
            self._member(node, node.value, node.attr)
        if stated:
            symbol = self._find(node, stated[0], note and not _is_class(stated[0]))
            return symbol, symbol is not None and symbol.is_class
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if isinstance(node, ast.Attribute):
            owner, _ = self._meaning(node.value)
            member = owner and self.sources.member(owner, node.attr)
            return member or None, False
        return None, False

    def _member(self, node: ast.AST, value: ast.expr, name: str) -> None:
        owner, _ = self._meaning(value)
        if owner is None or not isinstance(owner.node, (ast.Module, ast.ClassDef)):
            return
        member = self.sources.member(owner, name)
        if member is None and ast.unparse(value) == "self" and name in self.own[-1]:
            return
        if member is None or self._is_ours(member.module.name):
            self._add(node, f"{owner}.{name}" if member is None else str(member), member)

    def _call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            self._member(node, node.args[0], node.args[1].value)
            return
        symbol, is_object = self._meaning(node.func)
        if symbol is not None and is_object:
            symbol = self.sources.member(symbol, "forward") or self.sources.member(symbol, "__call__")
        if symbol is None and isinstance(node.func, ast.Attribute):
            owner, _ = self._meaning(node.func.value)
            symbol = owner and self.sources.member(owner, node.func.attr)
        if symbol is not None and (symbol.is_class or symbol.is_function) and self._is_ours(symbol.module.name):
            self._add(node, str(symbol), symbol, call=node, awaited=node in self.awaited)


def _own_names(node: ast.ClassDef) -> set[str]:
    """Return what a class of ours defines or assigns; an annotation alone does neither."""
    names = {each.name for each in node.body if isinstance(each, Function)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            names.add(each.attr)
    for each in node.body:
        targets = each.targets if isinstance(each, ast.Assign) else [each.target] if _has_value(each) else []
        names |= {ast.unparse(target) for target in targets}
    return names


def _has_value(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def words(tree: ast.AST) -> set[str]:
    """Return all strings, and all names of attributes."""
    found = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found | {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}


def is_awaitable(symbol: Symbol) -> bool:
    """Return True if a call of the symbol has to be awaited."""
    node = symbol.node
    if isinstance(node, ast.AsyncFunctionDef):
        return not any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(node))
    text = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns is not None else ""
    return text.partition("[")[0].rpartition(".")[2] in ("Awaitable", "Coroutine", "Future", "Task")


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


def misfit(call: ast.Call, signature: Signature, passed: Mapping[str, object] = MappingProxyType({})) -> str | None:
    """Return why a call does not fit; values are looked at where they are constants and the signature names the
    possible. ``passed`` has the contents of a dictionary that the call passes on."""
    arguments = [each for each in call.args if not isinstance(each, ast.Starred)]
    stated = {each.arg: each.value for each in call.keywords if each.arg}
    try:
        bound = signature.bind(*arguments, **stated, **passed)
    except TypeError as error:
        return str(error)
    for name, given in bound.arguments.items():
        value = given.value if isinstance(given, ast.Constant) else given
        possible = possible_values(signature.parameters[name])
        if possible and isinstance(value, (str, int, float, bool, NoneType)) and value not in possible:
            return f"{name}={value!r} is none of {possible}"
    return None


def possible_values(parameter: Parameter) -> list[object]:
    """Those that an annotation lists as literals."""
    annotation = parameter.annotation
    if not isinstance(annotation, ast.Subscript) or not ast.unparse(annotation.value).endswith("Literal"):
        return []
    return [each.value for each in ast.walk(annotation.slice) if isinstance(each, ast.Constant)]


def unlike(ours: Function, theirs: Signature) -> str | None:
    """Why a method of ours cannot take the place of a library's; its arguments must have the same names and order."""
    arguments = [each.arg for each in [*ours.args.posonlyargs, *ours.args.args]][1:] + [
        each.arg for each in ours.args.kwonlyargs
    ]
    wanted = [name for name, each in theirs.parameters.items() if each.kind in (OWN, KEYWORD)]
    catches_all = ours.args.vararg is not None or ours.args.kwarg is not None
    if arguments == wanted or (catches_all and arguments == wanted[: len(arguments)]):
        return None
    return f"{ours.name}{tuple(arguments)} is called with {tuple(wanted)}"
