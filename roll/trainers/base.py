"""The arguments from which one rank of a trainer is built. Loads no torch, so that checks may use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll.configs.roles import ModelArguments, PictureSampling, TrainingArguments, WorkerConfig
from roll.configs.strategies import FORWARD_STRATEGIES, TRAINERS, strategy_class

if TYPE_CHECKING:
    from roll.trainers.trainer import ForwardStrategy, TrainStrategy

ModelKind = Literal["policy", "value"]


@dataclass(frozen=True)
class MicroBatchLimits:
    """Size limits of a micro-batch."""

    max_tokens: int | None
    """Number of padded tokens, or of real ones if samples are packed; None: no limit."""
    max_samples: int
    """Limit on samples; used only if `max_tokens` is None."""
    packed: bool = False
    """True if samples stand one behind the other in a single row, without padding."""


@dataclass(frozen=True)
class TrainerSetup:
    """One rank of a trainer, or of a forward-only role such as the reference."""

    config: WorkerConfig
    """Configuration of the role."""
    model_path: str
    """Folder or hub name."""
    total_optimizer_steps: int
    """Number of optimizer steps in the whole run, for the learning-rate schedule."""
    seed: int
    kind: ModelKind = "policy"
    """Output of the model for each token: log-probabilities, or a value."""
    forward_only: bool = False
    """True if the role has no optimizer, and weights in the precision of `model_args`."""
    pictures: PictureSampling | None = None
    """How the pictures that it learns from are drawn; None for a model of text."""
    end_tokens: tuple[int, ...] = ()
    """Further tokens that end a response, which the generation settings of the exported model are to name."""
    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """Port at which the ranks meet, on the host of rank 0."""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def model_args(self) -> ModelArguments:
        """Arguments of the model's loading."""
        return self.config.model_args

    @property
    def training_args(self) -> TrainingArguments:
        """Optimizer and schedule."""
        return self.config.training_args

    @property
    def strategy_config(self) -> dict[str, Any]:
        """Options of the trainer."""
        return self.config.strategy_args.strategy_config

    @property
    def train_limits(self) -> MicroBatchLimits:
        """Limits for passes with gradients."""
        config = self.config
        tokens = config.max_tokens_per_microbatch_in_train if config.use_dynamic_batching_in_train else None
        return MicroBatchLimits(tokens, self.training_args.per_device_train_batch_size, config.use_sequence_packing)

    @property
    def infer_limits(self) -> MicroBatchLimits:
        """Limits for passes without gradients."""
        config = self.config
        tokens = config.max_tokens_per_microbatch_in_infer if config.use_dynamic_batching_in_infer else None
        return MicroBatchLimits(tokens, config.infer_batch_size, config.use_sequence_packing)

    @property
    def trains_adapters(self) -> bool:
        """True if the weights of the model are frozen and adapters (LoRA) are trained instead."""
        return self.model_args.lora_target is not None and not self.forward_only


def build_trainer(name: str, setup: TrainerSetup, own: str | None = None) -> TrainStrategy:
    """Return one rank of the trainer ``name``, or of its subclass ``own``, not yet initialised."""
    return strategy_class(TRAINERS, name, own)(setup)


def build_forward_strategy(name: str, setup: TrainerSetup, own: str | None = None) -> ForwardStrategy:
    """Return one rank of a forward-only role, of strategy ``name`` or its subclass ``own``, not yet initialised."""
    return strategy_class(FORWARD_STRATEGIES, name, own)(setup)
