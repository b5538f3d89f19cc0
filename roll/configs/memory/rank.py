"""One rank of a trainer: the records and helpers of the trainers' memory arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from roll.configs.engine_options import Options
from roll.configs.memory import activations
from roll.configs.memory.activations import MicroBatch
from roll.configs.memory.adapters import Learned, adapted_layers
from roll.configs.memory.records import ELEMENT_BYTES, Part, Phase
from roll.configs.memory.shapes import ModelShape
from roll.configs.schema import WorkerConfig
from roll.configs.wording import count

BACKWARD_BEGINS, BACKWARD_ENDS, UPDATE = "the backward pass begins", "the backward pass ends", "the optimizer steps"
LOG_PROBABILITIES, PUBLICATION = "log-probabilities", "weights are gathered"
STATE_BYTES = 12
"""Bytes per parameter in a training state: the weight and two moments in float32."""


@dataclass(frozen=True)
class Trainer:
    """One rank, with the facts that decide its memory."""

    config: WorkerConfig
    shape: ModelShape
    ranks: int
    on_gpu: bool
    learns: bool
    train: MicroBatch
    infer: MicroBatch

    @property
    def element(self) -> int:
        """Bytes of a number in computing."""
        return ELEMENT_BYTES[self.config.model_args.dtype]

    @property
    def options(self) -> Options:
        """Options of the strategy."""
        return Options.of(self.config)

    @property
    def has_adapters(self) -> bool:
        """True if only adapters learn."""
        return self.learns and self.config.model_args.lora_target is not None

    @cached_property
    def learned(self) -> Learned:
        """The elements that learn; meaningful only if ``learns``."""
        if self.has_adapters:
            return Learned.adapters(self.shape, self.config.model_args)
        return Learned.all_weights(self.shape)

    @property
    def stored(self) -> int:
        """Bytes of a number of the model when loaded: weights that learn are float32."""
        return self.element if self.has_adapters or not self.learns else 4

    @property
    def adapted(self) -> Sequence[tuple[int, int]]:
        """Inputs and outputs of the linear layers of one layer that have adapters."""
        return adapted_layers(self.shape, self.config.model_args.lora_target) if self.has_adapters else ()

    @property
    def layer_bytes(self) -> float:
        """Bytes that a layer keeps for its backward pass, per token."""
        attention, packs = self.config.model_args.attn_implementation, self.config.use_sequence_packing
        width = self.train.width if attention == "eager" else 0
        one = activations.layer_bytes(self.shape, self.element, eager_width=width)
        if packs and attention == "sdpa" and not (self.on_gpu and self.element == 2):
            one += activations.joined_bytes(self.shape, self.element)
        if self.has_adapters:
            rank = self.config.model_args.lora_rank
            one += activations.adapter_bytes(self.shape, len(self.adapted), rank, self.element)
        return one


@dataclass(frozen=True)
class TrainerMemory:
    """Memory of one rank."""

    always: tuple[Part, ...]
    phases: tuple[Phase, ...]
    elsewhere: tuple[Part, ...] = ()
    """States of each rank that are kept on the host."""
    state: float = 0.0
    """Bytes of the rank's part of a training state in a checkpoint."""

    @property
    def peak(self) -> float:
        """Largest number of bytes on the device."""
        return sum(part.size for part in self.always) + max(phase.size for phase in self.phases)


def states(name: str, parameters: int, ranks: int, size: float, what: str) -> Part:
    """Return a part of ``size`` bytes per parameter, split over ranks."""
    share = f" / {count(ranks, 'rank')}" if ranks > 1 else ""
    return Part(name, parameters * size / ranks, f"{billions(parameters)} x {size} bytes ({what}){share}")


def billions(parameters: float) -> str:
    """Format a number of parameters in words."""
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} million"


def one_matrix(shape: ModelShape) -> Phase:
    """Return the weight update of a trainer that sends weights tensor by tensor."""
    return Phase(PUBLICATION, (Part("one matrix", 4 * shape.largest_matrix, "whole, in float32"),))
