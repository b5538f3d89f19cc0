"""The arguments from which every trainer is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.schema import ModelArguments, TrainingArguments
from roll.strategies.train.microbatches import MicroBatchLimits


@dataclass(frozen=True)
class TrainerSetup:
    """One rank of a trainer, or of a forward-only role such as the reference."""

    model_path: str
    """Folder or hub name."""
    rank: int
    world_size: int
    master_address: str
    master_port: int
    device: Literal["cpu", "cuda"]
    model_args: ModelArguments
    training_args: TrainingArguments
    total_optimizer_steps: int
    """Number of optimizer steps in the whole run, for the learning-rate schedule."""
    train_limits: MicroBatchLimits
    infer_limits: MicroBatchLimits
    """Limits for passes without gradients."""
    kind: Literal["policy", "value"]
    """Output of the model for each token: log-probabilities, or a value."""
    forward_only: bool
    """True if the role has no optimizer, and weights in the precision of `model_args`."""
    seed: int
    strategy_config: dict[str, Any]

    @property
    def packs(self) -> bool:
        """True if some passes are over packed rows."""
        return self.train_limits.packed or self.infer_limits.packed

    @property
    def trains_adapters(self) -> bool:
        """True if the weights of the model are frozen and adapters (LoRA) are trained instead."""
        return self.model_args.lora_target is not None and not self.forward_only

    @property
    def rendezvous(self) -> str:
        """Address at which the ranks meet, in the format of `torch.distributed`."""
        return f"tcp://{self.master_address}:{self.master_port}"
