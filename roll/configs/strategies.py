"""Trainers, generation engines and engines of reward models, by the name in `strategy_args.strategy_name`.

The record of a strategy is all that is known of it before its libraries are loaded. A new one is a module and a record
here; one from outside has an import path or an entry point, and the defaults of these records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.plugins import Kind, PlugIn, import_object, load_subclass
from roll.configs.rewards import RewardConfig
from roll.configs.roles import WorkerConfig


@dataclass(frozen=True)
class Strategy(PlugIn):
    """A trainer or an engine."""

    install: str = ""
    """The command that installs what it requires, and notes."""
    options: str | None = None
    """Import path of the function that checks `strategy_config`: (options, their path) -> problems. Loads no library.
    None: the class may have such a static method, ``check_options``."""
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
            options="roll.trainers.base:check_fsdp2_options",
            chooses_attention=True,
            packs=True,
            adapters=True,
        ),
        "deepspeed_train": Trainer(
            "roll.trainers.deepspeed:DeepSpeedTrainStrategy",
            requires=("deepspeed",),
            install='pip install "roll[deepspeed]"',
            options="roll.trainers.deepspeed_options:check_options",
            package_tells="the names under `zero_optimization`",
            chooses_attention=True,
            packs=True,
        ),
        "megatron_train": Trainer(
            "roll.trainers.megatron.strategy:MegatronTrainStrategy",
            requires=("megatron",),
            install='pip install "roll[megatron]"',
            options="roll.trainers.megatron.facts:check_options",
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
            "roll.trainers.replica:HfReplicaStrategy",
            options="roll.trainers.base:check_replica_options",
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
    elif name in kind.built_in:
        return []
    else:
        check = getattr(kind.load(name, path), "check_options", lambda options, path: [])
    return list(check(strategy_config, path))
