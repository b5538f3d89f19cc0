"""What learns in a trainer: all weights, or adapters (LoRA) beside weights that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll.configs.memory.shapes import ModelShape
from roll.configs.schema import ModelArguments

EVERYWHERE = "all-linear"


@dataclass(frozen=True)
class Learned:
    """Elements that have gradients and moments."""

    parameters: int
    """All of them."""
    in_layer: int
    """In one layer."""
    outside: int
    """In no layer: embedding, last norm, output layer."""
    head: int
    """In the output layer's weight."""
    largest: int
    """In the largest matrix."""

    @classmethod
    def all_weights(cls, shape: ModelShape) -> Learned:
        """The whole model learns."""
        head = 0 if shape.value_head else shape.embedding_parameters
        return cls(shape.parameters, shape.layer_parameters, shape.root_parameters, head, shape.largest_matrix)

    @classmethod
    def adapters(cls, shape: ModelShape, arguments: ModelArguments) -> Learned:
        """Two matrices beside each linear layer that is named: ``[rank, inputs]`` and ``[outputs, rank]``."""
        rank, layers = arguments.lora_rank, adapted_layers(shape, arguments.lora_target)
        in_layer = sum(rank * (inputs + outputs) for inputs, outputs in layers)
        largest = max((rank * max(sizes) for sizes in layers), default=0)
        return cls(shape.layers * in_layer, in_layer, 0, 0, largest)


def adapted_layers(shape: ModelShape, wanted: list[str] | str | None) -> Sequence[tuple[int, int]]:
    """Inputs and outputs of the linear layers of one layer that are named, by the end of their names. Experts are kept
    in one tensor and have none. A name that the model does not have is an error elsewhere."""
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
