"""What every trainer is built from."""

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
    """Of the whole run: what the learning rate's schedule counts on."""
    train_limits: MicroBatchLimits
    infer_limits: MicroBatchLimits
    """Of passes without gradients."""
    kind: Literal["policy", "value"]
    """What the model gives for each token: log-probabilities, or a value."""
    forward_only: bool
    """No optimizer, and weights in the precision of `model_args`."""
    seed: int
    strategy_config: dict[str, Any]

    @property
    def packs(self) -> bool:
        """Some passes are over packed rows."""
        return self.train_limits.packed or self.infer_limits.packed

    @property
    def trains_adapters(self) -> bool:
        """Whether the weights of the model stay as they are, and adapters (LoRA) learn in their stead."""
        return self.model_args.lora_target is not None and not self.forward_only

    @property
    def rendezvous(self) -> str:
        """Where the ranks meet, as `torch.distributed` writes it."""
        return f"tcp://{self.master_address}:{self.master_port}"
