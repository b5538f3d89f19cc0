"""The trained elements: all weights, or adapters (LoRA) beside frozen weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll.configs.memory.shapes import ModelShape
from roll.configs.schema import ModelArguments

EVERYWHERE = "all-linear"


@dataclass(frozen=True)
class Learned:
    """Number of elements that have gradients and moments."""

    parameters: int
    """All elements."""
    in_layer: int
    """In one layer."""
    outside: int
    """Elements outside the layers: embedding, last norm, output layer."""
    head: int
    """In the output layer's weight."""
    largest: int
    """In the largest matrix."""

    @classmethod
    def all_weights(cls, shape: ModelShape) -> Learned:
        """Count the whole model."""
        head = 0 if shape.value_head else shape.embedding_parameters
        return cls(shape.parameters, shape.layer_parameters, shape.root_parameters, head, shape.largest_matrix)

    @classmethod
    def adapters(cls, shape: ModelShape, arguments: ModelArguments) -> Learned:
        """Count two matrices beside each named linear layer: ``[rank, inputs]`` and ``[outputs, rank]``."""
        rank, layers = arguments.lora_rank, adapted_layers(shape, arguments.lora_target)
        in_layer = sum(rank * (inputs + outputs) for inputs, outputs in layers)
        largest = max((rank * max(sizes) for sizes in layers), default=0)
        return cls(shape.layers * in_layer, in_layer, 0, 0, largest)


def adapted_layers(shape: ModelShape, wanted: list[str] | str | None) -> Sequence[tuple[int, int]]:
    """Return inputs and outputs of the linear layers of one layer that are named, by the end of their names.

    Experts are kept in one tensor and have none. Another rule reports a name that the model does not have.
    """
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    known = {
        "q_proj": (shape.hidden, queries),
        "k_proj": (shape.hidden, keys),
        "v_proj": (shape.hidden, keys),
        "o_proj": (queries, shape.hidden),
    }
    if not shape.experts:
        known |= {
            "gate_proj": (shape.hidden, shape.intermediate),
            "up_proj": (shape.hidden, shape.intermediate),
            "down_proj": (shape.intermediate, shape.hidden),
        }
    names = wanted.split(",") if isinstance(wanted, str) else wanted or []
    ends = {name.strip().rpartition(".")[2] for name in names}
    return list(known.values()) if ends == {EVERYWHERE} else [known[name] for name in known if name in ends]
