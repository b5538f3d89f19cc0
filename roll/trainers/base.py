"""Arguments for building one rank of a trainer. Imports no torch, so that configuration checks can use this module."""

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
    """Maximum tokens, counted with padding, or without it if samples are packed. None: no limit."""
    max_samples: int
    """Maximum samples; used only if `max_tokens` is None."""
    packed: bool = False
    """True if samples are concatenated into a single row without padding (sequence packing)."""


@dataclass(frozen=True)
class TrainerSetup:
    """Arguments for building one rank of a trainer, or of a forward-only role such as the reference."""

    config: WorkerConfig
    """Configuration of the role."""
    model_path: str
    """Folder of the model, or its name on the Hugging Face hub."""
    total_optimizer_steps: int
    """Number of optimizer steps in the whole run, for the learning-rate schedule."""
    seed: int
    kind: ModelKind = "policy"
    """Output of the model for each token: a log-probability (policy) or a value (critic)."""
    forward_only: bool = False
    """True if the role has no optimizer. Its weights are then stored in the precision of `model_args`."""
    pictures: PictureSampling | None = None
    """Sampling settings of the pictures that an image model trains on; None for a text model."""
    replays_routing: bool = False
    """True to send tokens to the experts that the engine chose, as far as a batch has them."""
    packed: bool | None = None
    """True if samples are packed into rows. None until the model is loaded, on which `auto` depends."""
    end_tokens: tuple[int, ...] = ()
    """Additional end-of-sequence tokens to list in the generation settings of an exported model."""
    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """Rendezvous port of the process group, on the host of rank 0."""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def model_args(self) -> ModelArguments:
        """Arguments for loading the model."""
        return self.config.model_args

    @property
    def training_args(self) -> TrainingArguments:
        """Arguments of the optimizer and its learning-rate schedule."""
        return self.config.training_args

    @property
    def strategy_config(self) -> dict[str, Any]:
        """Options of the trainer, as written in the configuration."""
        return self.config.strategy_args.strategy_config

    @property
    def train_limits(self) -> MicroBatchLimits:
        """Micro-batch size limits for forward-backward passes."""
        config = self.config
        tokens = config.max_tokens_per_microbatch_in_train if config.use_dynamic_batching_in_train else None
        return MicroBatchLimits(tokens, self.training_args.per_device_train_batch_size, self.packs)

    @property
    def infer_limits(self) -> MicroBatchLimits:
        """Micro-batch size limits for forward-only passes."""
        config = self.config
        tokens = config.max_tokens_per_microbatch_in_infer if config.use_dynamic_batching_in_infer else None
        return MicroBatchLimits(tokens, config.infer_batch_size, self.packs)

    @property
    def packs(self) -> bool:
        """True if samples are packed into rows. A strategy that does not load its model here packs only if told to."""
        return self.config.use_sequence_packing is True if self.packed is None else self.packed

    @property
    def trains_adapters(self) -> bool:
        """True if the model's weights are frozen and LoRA adapters are trained instead."""
        return self.model_args.lora_target is not None and not self.forward_only


def build_trainer(name: str, setup: TrainerSetup, own: str | None = None) -> TrainStrategy:
    """Return one uninitialised rank of the trainer ``name``, or of the user's subclass ``own`` of it."""
    return strategy_class(TRAINERS, name, own)(setup)


def build_forward_strategy(name: str, setup: TrainerSetup, own: str | None = None) -> ForwardStrategy:
    """Return one uninitialised rank of the forward-only strategy ``name``, or of the user's subclass ``own`` of it."""
    return strategy_class(FORWARD_STRATEGIES, name, own)(setup)
