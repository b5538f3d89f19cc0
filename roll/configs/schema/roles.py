"""The roles that run a model on devices, and the keys that each of them does not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.schema.arguments import (
    DataArguments,
    GeneratingArguments,
    ModelArguments,
    StrategyArguments,
    TrainingArguments,
)
from roll.configs.schema.names import FORWARD_STRATEGIES, INFER_STRATEGIES, TRAIN_STRATEGIES
from roll.configs.schema.options import ANY_FINITE, COUNT, NOT_NEGATIVE, POSITIVE, DeviceMapping, option


@dataclass
class TrainStrategyArguments(StrategyArguments):
    """The engine of a trained role, or of a forward-only one."""

    strategy_name: str = option("fsdp2_train", help="Registered trainer.")


@dataclass
class ReferenceStrategyArguments(StrategyArguments):
    """The engine of the reference."""

    strategy_name: str = option(
        "fsdp2_train", help="Registered trainer, or `hf_infer`: a whole model on each device, which share the batch."
    )


@dataclass
class InferStrategyArguments(StrategyArguments):
    """The engine that generates."""

    strategy_name: str = option("hf_infer", help="Registered generation engine.")


@dataclass
class WorkerConfig:
    """A role that runs a model on devices."""

    model_args: ModelArguments = option(factory=ModelArguments, help="How the model is loaded.")
    training_args: TrainingArguments = option(factory=TrainingArguments, help="Optimizer and batch arithmetic.")
    data_args: DataArguments = option(
        factory=DataArguments, help="Prompts (under `actor_train`: the training prompts)."
    )
    generating_args: GeneratingArguments = option(factory=GeneratingArguments, help="Sampling (under `actor_infer`).")
    strategy_args: StrategyArguments = option(factory=StrategyArguments, help="Engine of the role.")
    device_mapping: DeviceMapping = option(
        None, help="Devices of the role: `[0, 1]`, `\"0-3\"`, `\"0,2,5-7\"`, `list(range(0,4))` or a sum of such lists."
    )
    infer_batch_size: int = option(
        16, help="Samples per forward pass when log-probabilities are computed (without dynamic batching).", range=COUNT
    )
    worker_cls: str | None = option(None, help="Import path of a worker class to use in place of the built-in one.")
    use_dynamic_batching_in_train: bool = option(
        True, help="Build training micro-batches by token budget in place of a fixed number of samples."
    )
    max_tokens_per_microbatch_in_train: int = option(
        8192,
        help="Tokens per rank in one training micro-batch (dynamic batching): with padding, or without it where "
        "samples are packed.",
        range=COUNT,
    )
    use_dynamic_batching_in_infer: bool = option(
        True, help="Build forward-only micro-batches by token budget."
    )
    max_tokens_per_microbatch_in_infer: int = option(
        16384, help="Tokens per rank in one forward-only micro-batch (dynamic batching), counted alike.", range=COUNT
    )
    use_sequence_packing: bool = option(
        False,
        help="Put the samples of a micro-batch one behind the other in a single row, without padding, for training and "
        "for log-probabilities. Same results; a model that would mix samples is refused (`docs/trainers.md`).",
    )


@dataclass
class ActorTrainConfig(WorkerConfig):
    """The trained policy."""

    strategy_args: TrainStrategyArguments = option(factory=TrainStrategyArguments, help="Engine of the role.")
    pg_variant: str = option("ppo", help="Policy loss: a name from `docs/algorithms/policy_losses.md`.")
    pg_variant_args: dict[str, Any] = option(
        factory=dict, help="Knobs of the policy loss, listed on the same page; those of another loss are an error."
    )
    tis_lower_bound: float | None = option(
        None, help="ROLL's name of `lower`, a knob of `tis`.", range=ANY_FINITE
    )
    tis_upper_bound: float | None = option(
        None, help="ROLL's name of `upper`, a knob of `tis`.", range=ANY_FINITE
    )
    topr_positive_weight: float | None = option(
        None, help="ROLL's name of `positive_weight`, a knob of `topr`.", range=ANY_FINITE
    )
    topr_negative_weight: float | None = option(
        None, help="ROLL's name of `negative_weight`, a knob of `topr`.", range=ANY_FINITE
    )
    cispo_epsilon_low: float | None = option(
        None, help="ROLL's name of `epsilon_low`, a knob of `cispo`.", range=ANY_FINITE
    )
    cispo_epsilon_high: float | None = option(
        None, help="ROLL's name of `epsilon_high`, a knob of `cispo`.", range=ANY_FINITE
    )
    cispo_use_unified_mask: bool | None = option(None, help="ROLL's name of `use_unified_mask`, a knob of `cispo`.")
    kimi15_tau: float | None = option(
        None, help="ROLL's name of `tau`, a knob of `kimi15`.", range=ANY_FINITE
    )


@dataclass
class ActorInferConfig(WorkerConfig):
    """The engine that generates."""

    strategy_args: InferStrategyArguments = option(factory=InferStrategyArguments, help="Engine of the role.")
    num_gpus_per_engine: int = option(
        1, help="Devices of one engine replica; the number of replicas follows.", range=COUNT
    )
    max_replica_restarts: int = option(
        3, help="Restarts of dead engine replicas over the run before it fails.", range=NOT_NEGATIVE
    )
    request_timeout_seconds: float = option(
        600.0, help="A request that has not ended after this time fails with the replica's name.", range=POSITIVE
    )
    silence_timeout_seconds: float = option(
        300.0,
        help="A replica whose engine gives no sign of life for this long is replaced. Must be longer than the longest "
        "step, one in which many long prompts are prefilled.",
        range=POSITIVE,
    )


@dataclass
class ReferenceConfig(WorkerConfig):
    """The frozen reference policy."""

    strategy_args: ReferenceStrategyArguments = option(factory=ReferenceStrategyArguments, help="Engine of the role.")


@dataclass
class CriticConfig(WorkerConfig):
    """A trained value model."""

    strategy_args: TrainStrategyArguments = option(factory=TrainStrategyArguments, help="Engine of the role.")


ROLES = ("actor_train", "actor_infer", "reference", "critic")
"""Roles that run a model on devices."""
TRAINED_ROLES = ("actor_train", "critic")
"""Roles that are trained."""
STRATEGIES_OF_ROLES = {
    "actor_train": TRAIN_STRATEGIES,
    "actor_infer": INFER_STRATEGIES,
    "reference": TRAIN_STRATEGIES + FORWARD_STRATEGIES,
    "critic": TRAIN_STRATEGIES,
}
"""Allowed values of `strategy_args.strategy_name`."""
TRAINING_ONLY_KEYS = (
    "training_args",
    "data_args",
    "use_dynamic_batching_in_train",
    "max_tokens_per_microbatch_in_train",
)
FORWARD_ONLY_KEYS = ("infer_batch_size", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer")
UNREAD_KEYS: dict[str, tuple[str, ...]] = {
    "actor_train": ("generating_args",),
    "actor_infer": TRAINING_ONLY_KEYS + FORWARD_ONLY_KEYS + ("use_sequence_packing",),
    "reference": TRAINING_ONLY_KEYS + ("generating_args",),
    "critic": ("generating_args", "data_args"),
}
"""Keys that a role has by its type but that nothing reads; setting one is an error."""
UNREAD_PATHS = tuple(f"{role}.{key}" for role, keys in UNREAD_KEYS.items() for key in keys)
"""Paths of these keys; neither documented nor suggested."""
