"""Trainers, generation engines and engines of reward models, by the name in `strategy_args.strategy_name`.

The record of a strategy is all that is known of it before its libraries are loaded. A new one is a module and a record
here; one from outside has an import path or an entry point, and the defaults of these records.

`strategy_config` goes to the engine unchanged, and each strategy knows its own option names. But ranks and memory are
computed from some options before an engine is asked, even if it is not installed. These are declared in `OPTIONS` with
their allowed values; a rule checks them, and the arithmetic reads them only through `Options`, which rejects undeclared
names, so no option is read unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from roll.configs.errors import ConfigError, ConfigProblem, problems_of
from roll.configs.fields import COUNT, LARGEST_NUMBER, NUCLEUS, Range
from roll.configs.plugins import Kind, PlugIn, import_object, load_subclass, made
from roll.configs.rewards import RewardConfig
from roll.configs.roles import WorkerConfig


@dataclass(frozen=True)
class Strategy(PlugIn):
    """A trainer or an engine."""

    install: str = ""
    """The command that installs what it requires, and notes."""
    options: str | None = None
    """Import path of a dataclass of all options, or of the function that checks `strategy_config`: (options, their
    path) -> problems. Loads no library. None: the class may have such a static method, ``check_options``."""
    package_tells: str | None = None
    """The names in `strategy_config` that only its package knows; without it they cannot be checked."""
    chooses_attention: bool = False
    """True if `model_args.attn_implementation` is its attention; others have their own."""
    replicates: bool = False
    """True if each device holds a whole model, and the devices share out the work only."""

    @property
    def package(self) -> str | None:
        """The module that it requires; None if there is none."""
        return self.requires[0] if self.requires else None


@dataclass(frozen=True)
class Trainer(Strategy):
    """A trainer, or a strategy that computes log-probabilities only."""

    learns: bool = True
    """False if it drives forward-only roles alone."""
    packs: bool = False
    """True if it can train on samples packed into rows."""
    adapters: bool = False
    """True if it can train adapters (LoRA)."""
    layout: str | None = None
    """Import path of the function that checks how a role's model is split over its devices; see
    `roll.trainers.megatron.facts.layout_problems`."""


TRAINERS = Kind(
    "trainer",
    "roll.trainers",
    {
        "fsdp2_train": Trainer(
            "roll.trainers.fsdp2:Fsdp2TrainStrategy",
            options="roll.trainers.options:Fsdp2Options",
            chooses_attention=True,
            packs=True,
            adapters=True,
        ),
        "deepspeed_train": Trainer(
            "roll.trainers.deepspeed:DeepSpeedTrainStrategy",
            requires=("deepspeed",),
            install='pip install "roll[deepspeed]"',
            options="roll.trainers.options:check_deepspeed_options",
            package_tells="the names under `zero_optimization`",
            chooses_attention=True,
            packs=True,
        ),
        "megatron_train": Trainer(
            "roll.trainers.megatron.strategy:MegatronTrainStrategy",
            requires=("megatron",),
            install='pip install "roll[megatron]"',
            options="roll.trainers.options:MegatronOptions",
            layout="roll.trainers.megatron.facts:layout_problems",
        ),
    },
    Trainer,
    "package.module:Class",
)
FORWARD_STRATEGIES = Kind(
    "trainer",
    "roll.trainers",
    {
        **TRAINERS.built_in,
        "hf_infer": Trainer(
            "roll.trainers.trainer:HfReplicaStrategy",
            options="roll.trainers.options:HfReplicaOptions",
            chooses_attention=True,
            replicates=True,
            learns=False,
            packs=True,
        ),
    },
    Trainer,
    "package.module:Class",
)
"""Strategies of roles that compute only: the trainers, and a whole model on each device."""
ENGINES = Kind(
    "generation engine",
    "roll.engines",
    {
        "hf_infer": Strategy(
            "roll.engines.hf.strategy:HFInferStrategy",
            options="roll.engines.options:check_hf_options",
            chooses_attention=True,
            replicates=True,
        ),
        "sglang": Strategy(
            "roll.engines.sglang.strategy:SGLangInferStrategy",
            requires=("sglang",),
            install='pip install "roll[sglang]", in an environment of its own: docs/engines.md',
            options="roll.engines.options:check_sglang_options",
            package_tells="the names in `strategy_config`",
        ),
        "vllm": Strategy(
            "roll.engines.vllm.strategy:VLLMInferStrategy",
            requires=("vllm",),
            install="pip install vllm, on a CPU make venv-for-tests: docs/engines.md",
            options="roll.engines.options:check_vllm_options",
            package_tells="the names in `strategy_config`",
        ),
    },
    Strategy,
    "package.module:Class",
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
    return FORWARD_STRATEGIES if role == "reference" else TRAINERS


def strategy_of(role: str, section: WorkerConfig | RewardConfig) -> Any:
    """Return the record of a role's strategy; None if its name is not known, which a rule reports."""
    name = section.strategy_args.strategy_name
    try:
        return strategies_of(role).find(name, role)
    except ConfigError:
        return None


StrategyRecord = TypeVar("StrategyRecord", bound=Strategy)


def strategy_class(kind: Kind[StrategyRecord], name: str, own: str | None = None, path: str = "strategy_args") -> type:
    """Return the class of a strategy, or its subclass at the import path ``own`` (`strategy_cls`).

    Raises `ConfigError` if a name or a module is not known, or if ``own`` is not derived from the class.
    """
    base: Any = kind.load(name, f"{path}.strategy_name")
    return base if own is None else load_subclass(own, base, f"{path}.strategy_cls")


def option_problems(kind: Kind[Any], name: str, strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path``. Loads no library of a built-in strategy."""
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


_ABSENT = object()
_AUTO = "auto"
"""A value for which DeepSpeed, like transformers' trainer, uses a key's default."""


@dataclass(frozen=True)
class Option:
    """The allowed values of one option."""

    words: str
    """Description for messages: ``a whole number >= 1``."""
    takes: Callable[[Any], bool]
    left_out: tuple[str | None, ...] = ()
    """Values for which the engine uses its own default."""

    def __str__(self) -> str:
        others = ["`null`" if value is None else f"`{value}`" for value in self.left_out]
        return ", or ".join([self.words, *others])


def _number(limits: Range, *left_out: str | None) -> Option:
    return Option(f"a number {limits}", lambda value: _is_number(value) and limits.contains(value), left_out)


def _whole(limits: Range, *left_out: str | None, as_float: bool = False) -> Option:
    """Declare a whole number; with ``as_float`` the engine also accepts ``2e9``."""

    def takes(value: Any) -> bool:
        is_whole = isinstance(value, int) or (as_float and isinstance(value, float) and value.is_integer())
        return is_whole and _is_number(value) and limits.contains(value)

    return Option(f"a whole number {limits}".rstrip(), takes, left_out)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not is_too_large(value)


def is_too_large(value: Any) -> bool:
    """Return True if a value is a number too large for the arithmetic."""
    return isinstance(value, int | float) and abs(value) > LARGEST_NUMBER


def _one_of(*choices: str | int, left_out: tuple[str | None, ...] = ()) -> Option:
    words = f"one of {', '.join(f'`{choice}`' for choice in choices)}"
    return Option(words, lambda value: not isinstance(value, bool) and value in choices, left_out)


def _section(*left_out: str | None) -> Option:
    return Option("a mapping", lambda value: isinstance(value, Mapping), left_out)


_SWITCH = Option("true or false", lambda value: isinstance(value, bool))
_DEVICE = _one_of("none", "cpu", "nvme", left_out=(_AUTO,))

OPTIONS: dict[str, dict[str, Option]] = {
    "vllm": {
        "gpu_memory_utilization": _number(NUCLEUS),
        "kv_cache_memory_bytes": _whole(Range(at_least=0), None, as_float=True),
        "max_num_batched_tokens": _whole(COUNT, None, as_float=True),
        "max_num_seqs": _whole(COUNT, None, as_float=True),
        "enforce_eager": _SWITCH,
    },
    "sglang": {
        "mem_fraction_static": _number(NUCLEUS, None),
        "max_running_requests": _whole(COUNT, None),
        "chunked_prefill_size": _whole(Range(), None),
        "disable_cuda_graph": _SWITCH,
        "sampling_mask_max_tokens": _whole(COUNT),
    },
    "hf_infer": {"max_running_requests": _whole(COUNT), "max_prefill_tokens": _whole(COUNT)},
    "fsdp2_train": {
        "reshard_after_forward": _SWITCH,
        "gradient_checkpointing": _SWITCH,
        "offload": _one_of("none", "cpu"),
    },
    "deepspeed_train": {
        "gradient_checkpointing": _SWITCH,
        "zero_optimization": _section(),
        "zero_optimization.stage": _one_of(0, 1, 2, 3),
        "zero_optimization.reduce_bucket_size": _whole(COUNT, _AUTO, as_float=True),
        "zero_optimization.offload_optimizer": _section(None, _AUTO),
        "zero_optimization.offload_optimizer.device": _DEVICE,
        "zero_optimization.offload_param": _section(None, _AUTO),
        "zero_optimization.offload_param.device": _DEVICE,
    },
    "megatron_train": {
        "tensor_model_parallel_size": _whole(COUNT),
        "pipeline_model_parallel_size": _whole(COUNT),
        "expert_model_parallel_size": _whole(COUNT),
        "expert_tensor_parallel_size": _whole(COUNT, None),
        "sequence_parallel": _SWITCH,
        "use_distributed_optimizer": _SWITCH,
        "recompute_granularity": _one_of("full", "selective", left_out=(None,)),
        "recompute_method": _one_of("uniform", "block", left_out=(None,)),
        "recompute_num_layers": _whole(COUNT, None),
    },
}
"""Strategy -> path of an option -> allowed values. The entry of `hf_infer` is for the engine; the reference has no
options."""


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
        value = self._given(path)
        return value if OPTIONS[self.strategy][path].takes(value) else default

    def wrong(self) -> Iterator[tuple[str, Any, Option]]:
        """Yield path, value and option of each value that is not allowed."""
        for path, option in OPTIONS.get(self.strategy, {}).items():
            value = self._given(path)
            if value is not _ABSENT and value not in option.left_out and not option.takes(value):
                yield path, value, option

    def _given(self, path: str) -> Any:
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        return value
