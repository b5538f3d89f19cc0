"""Trainers, generation engines and engines of reward models, by the name in `strategy_args.strategy_name`.

The record of a strategy holds the facts that are needed before its libraries are imported. A new strategy needs a
module and a record here. An external one is named by an import path or an entry point, and its record has the default
values.

`strategy_config` goes to the engine unchanged, and each strategy knows its own option names. Some options are needed
earlier, to compute ranks and memory even where the engine is not installed. `OPTIONS` has their types; a rule checks
them, and the arithmetic reads them only through `Options`, which rejects undeclared names, so no option is read
unchecked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from roll.configs.errors import ConfigError, ConfigProblem, problems_of
from roll.configs.fields import is_too_large
from roll.configs.plugins import Kind, PlugIn, converted, import_object, load_subclass, made
from roll.configs.rewards import RewardConfig
from roll.configs.roles import FORWARD_ROLES, WorkerConfig
from roll.distribution import install_command


@dataclass(frozen=True)
class Strategy(PlugIn):
    """A trainer or an engine."""

    install: str = ""
    """Command that installs its required modules, with notes."""
    options: str | None = None
    """Import path of a dataclass of all options, or of a function (options, their path) -> problems that checks
    `strategy_config`. Its module imports no engine library. None: the class of the strategy may have such a function as
    a static method ``check_options``."""
    package_tells: str | None = None
    """Description, for messages, of the option names that can only be checked where its package is installed."""
    chooses_attention: bool = False
    """True if it uses `model_args.attn_implementation`; other strategies have their own attention."""
    replicates: bool = False
    """True if each device holds a whole model and only the work is divided."""

    @property
    def package(self) -> str | None:
        """The first module that it requires; None if there is none."""
        return self.requires[0] if self.requires else None


@dataclass(frozen=True)
class Trainer(Strategy):
    """A trainer, or a strategy that computes log-probabilities only."""

    learns: bool = True
    """False if it is for forward-only roles."""
    packs: bool = False
    """True if it can train on samples packed into rows."""
    adapters: bool = False
    """True if it can train adapters (LoRA)."""
    receives: bool = False
    """True if a forward-only role with this strategy can take new weights while it runs."""
    draws: bool = False
    """True if it can train models of pictures as well as models of text."""
    replays_routing: bool = False
    """True if it can send tokens to recorded experts."""
    sees: bool = False
    """True if prompts may have pictures (vision-language models)."""
    layout: str | None = None
    """Import path of the function that checks how a role's model is split over its devices; see
    `roll.trainers.megatron.facts.layout_problems`."""


@dataclass(frozen=True)
class Engine(Strategy):
    """A generation engine."""

    largest_adapter: float = 0
    """Largest LoRA rank for which weight updates may carry adapters only; 0: they always carry all weights."""
    draws: bool = False
    """True if it draws pictures, False if it generates text."""
    records_routing: bool = False
    """True if it can return the experts of each token."""
    sees: bool = False
    """True if prompts may have pictures (vision-language models)."""


TRAINERS = Kind(
    "trainer",
    "roll.trainers",
    {
        "fsdp2_train": Trainer(
            "roll.trainers.fsdp2:Fsdp2TrainStrategy",
            options="roll.trainers.options:Fsdp2Options",
            layout="roll.trainers.options:fsdp2_layout_problems",
            chooses_attention=True,
            packs=True,
            adapters=True,
            receives=True,
            draws=True,
            replays_routing=True,
            sees=True,
        ),
        "deepspeed_train": Trainer(
            "roll.trainers.deepspeed:DeepSpeedTrainStrategy",
            requires=("deepspeed",),
            install=install_command("deepspeed"),
            options="roll.trainers.options:check_deepspeed_options",
            package_tells="the names under `zero_optimization`",
            chooses_attention=True,
            packs=True,
            replays_routing=True,
        ),
        "megatron_train": Trainer(
            "roll.trainers.megatron.strategy:MegatronTrainStrategy",
            requires=("megatron",),
            install=install_command("megatron"),
            options="roll.trainers.options:MegatronOptions",
            layout="roll.trainers.megatron.facts:layout_problems",
            packs=True,
            replays_routing=True,
        ),
    },
    Trainer,
    "package.module:Class",
    base="roll.trainers.trainer:TrainStrategy",
)
FORWARD_STRATEGIES = replace(
    TRAINERS,
    built_in={
        **TRAINERS.built_in,
        "hf_infer": Trainer(
            "roll.trainers.trainer:HfReplicaStrategy",
            options="roll.trainers.options:HfReplicaOptions",
            chooses_attention=True,
            replicates=True,
            learns=False,
            packs=True,
            receives=True,
            draws=True,
            replays_routing=True,
            sees=True,
        ),
    },
    base="roll.trainers.trainer:ForwardStrategy",
)
"""Strategies of forward-only roles: the trainers, and `hf_infer` with a whole model on each device."""
ENGINES = Kind(
    "generation engine",
    "roll.engines",
    {
        "diffusers_infer": Engine(
            "roll.engines.pictures:DiffusersInferStrategy",
            requires=("diffusers",),
            install=install_command("diffusers"),
            options="roll.engines.options:DiffusersInferConfig",
            replicates=True,
            largest_adapter=math.inf,
            draws=True,
        ),
        "hf_infer": Engine(
            "roll.engines.hf.strategy:HFInferStrategy",
            options="roll.engines.options:HFInferConfig",
            chooses_attention=True,
            replicates=True,
            largest_adapter=math.inf,
            records_routing=True,
            sees=True,
        ),
        "sglang": Engine(
            "roll.engines.sglang.strategy:SGLangInferStrategy",
            requires=("sglang",),
            install=f"{install_command('sglang')}, in an environment of its own: docs/engines.md",
            options="roll.engines.options:check_sglang_options",
            package_tells="the names in `strategy_config`",
            records_routing=True,
        ),
        "vllm": Engine(
            "roll.engines.vllm.strategy:VLLMInferStrategy",
            requires=("vllm",),
            install=f"{install_command('vllm')}; on a CPU as in docs/engines.md",
            options="roll.engines.options:check_vllm_options",
            package_tells="the names in `strategy_config`",
            largest_adapter=512,
            records_routing=True,
            sees=True,
        ),
    },
    Engine,
    "package.module:Class",
    base="roll.engines.base:InferStrategy",
)
SCORERS = Kind(
    "engine of reward models",
    "roll.scorers",
    {"hf_infer": Strategy("roll.rewards.classifier:HFClassifier", chooses_attention=True, replicates=True)},
    Strategy,
    "package.module:Class",
)


def strategies_of(role: str) -> Kind[Any]:
    """Return the kind of strategy that a role takes; a reward model is ``rewards.<name>``."""
    if role.startswith("rewards."):
        return SCORERS
    if role == "actor_infer":
        return ENGINES
    return FORWARD_STRATEGIES if role in FORWARD_ROLES else TRAINERS


def strategy_of(role: str, section: WorkerConfig | RewardConfig) -> Any:
    """Return the record of a role's strategy; None if its name is not known, which a rule reports."""
    name = section.strategy_args.strategy_name
    try:
        return strategies_of(role).find(name, role)
    except ConfigError:
        return None


def strategy_class(kind: Kind[Any], name: str, own: str | None = None, path: str = "strategy_args") -> type:
    """Return the class of a strategy, or its subclass at the import path ``own`` (`strategy_cls`).

    Raises `ConfigError` if a name or a module is not known, or if ``own`` is not derived from the class.
    """
    base: Any = kind.load(name, f"{path}.strategy_name")
    return base if own is None else load_subclass(own, base, f"{path}.strategy_cls")


def option_problems(kind: Kind[Any], name: str, strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return the problems of the ``strategy_config`` at ``path``. Loads no library of a built-in strategy."""
    record = kind.find(name, path)
    if record.options is not None:
        check: Callable[..., Iterable[ConfigProblem]] = import_object(record.options)
        if isinstance(check, type):
            return problems_of(partial(made, name, check, strategy_config, path))
    elif name in kind.built_in:
        return []
    else:
        check = getattr(kind.load(name, path), "check_options", lambda options, path: [])
    return list(check(strategy_config, path))


_Count = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(gt=0, le=1)]
# vLLM and DeepSpeed also accept a whole number that is written as `2e9`.
_AS_WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
_Bytes = Annotated[int, Field(ge=0), _AS_WHOLE]
_Size = Annotated[int, Field(ge=1), _AS_WHOLE]
# DeepSpeed, like transformers' trainer, takes `auto` for a key's default.
_SizeOrAuto = _Size | Literal["auto"]
_Section = dict[str, Any] | Literal["auto"] | None
_Device = Literal["none", "cpu", "nvme", "auto"]
_Stage = Annotated[int, Field(ge=0, le=3), _AS_WHOLE]
_Offload = Literal["none", "cpu"]
_Granularity = Literal["full", "selective"] | None
_Method = Literal["uniform", "block"] | None

OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {
        "gpu_memory_utilization": _Share,
        "kv_cache_memory_bytes": _Bytes | None,
        "max_num_batched_tokens": _Size | None,
        "max_num_seqs": _Size | None,
        "enforce_eager": bool,
        "enable_prefix_caching": bool | None,
    },
    "sglang": {
        "mem_fraction_static": _Share | None,
        "max_running_requests": _Count | None,
        "chunked_prefill_size": int | None,
        "disable_cuda_graph": bool,
        "sampling_mask_max_tokens": _Count,
    },
    "diffusers_infer": {"max_running_requests": _Count},
    "hf_infer": {"max_running_requests": _Count, "max_prefill_tokens": _Count},
    "fsdp2_train": {
        "reshard_after_forward": bool,
        "gradient_checkpointing": bool,
        "offload": _Offload,
        "context_parallel_size": _Count,
        "compile": bool,
    },
    "deepspeed_train": {
        "gradient_checkpointing": bool,
        "compile": bool,
        "zero_optimization": dict[str, Any],
        "zero_optimization.stage": _Stage,
        "zero_optimization.reduce_bucket_size": _SizeOrAuto,
        "zero_optimization.offload_optimizer": _Section,
        "zero_optimization.offload_optimizer.device": _Device,
        "zero_optimization.offload_param": _Section,
        "zero_optimization.offload_param.device": _Device,
    },
    "megatron_train": {
        "tensor_model_parallel_size": _Count,
        "pipeline_model_parallel_size": _Count,
        "expert_model_parallel_size": _Count,
        "expert_tensor_parallel_size": _Count | None,
        "context_parallel_size": _Count,
        "sequence_parallel": bool,
        "use_distributed_optimizer": bool,
        "transformer_impl": Literal["auto", "local", "transformer_engine"],
        "recompute_granularity": _Granularity,
        "recompute_method": _Method,
        "recompute_num_layers": _Count | None,
    },
}
"""Strategy -> path of an option -> its type; None and `auto` leave the choice to the engine. The entry of `hf_infer` is
for the generation engine; forward-only roles have no options with it."""
_NOTHING = object()


def _checked(kind: Any, value: Any) -> Any:
    """Return a value converted to a type; `_NOTHING` if it does not fit."""
    try:
        return _NOTHING if is_too_large(value) else converted(value, kind, strict=True)
    except ValidationError:
        return _NOTHING


@dataclass(frozen=True)
class Options:
    """The declared options of one ``strategy_config``."""

    strategy: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, role: WorkerConfig | RewardConfig) -> Options:
        """Return the options of a role."""
        return cls(role.strategy_args.strategy_name, role.strategy_args.strategy_config)

    def get(self, path: str, default: Any) -> Any:
        """Return the value at ``path``, or ``default`` if it is left out or not allowed (another rule reports that).

        Raises ``KeyError`` for an option that is not declared.
        """
        if self.strategy not in OPTIONS:  # nothing is known of the options of a strategy from outside
            return default
        value = _checked(OPTIONS[self.strategy][path], self._given(path))
        return default if value in (_NOTHING, None, "auto") else value

    @property
    def invents_weights(self) -> bool:
        """True if the engine starts with dummy weights and loads none from files."""
        return self.strategy == "vllm" and self.config.get("load_format") == "dummy"

    def wrong(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield path, value and type of each value that is not allowed."""
        for path, kind in OPTIONS.get(self.strategy, {}).items():
            value = self._given(path)
            if value is not _NOTHING and _checked(kind, value) is _NOTHING:
                yield path, value, kind

    def _given(self, path: str) -> Any:
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key, _NOTHING) if isinstance(value, Mapping) else _NOTHING
        return value
