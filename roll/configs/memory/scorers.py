"""Memory of one process of a reward model: weights, and a forward pass over one batch of conversations."""

from __future__ import annotations

from roll.configs import derived
from roll.configs.memory import activations
from roll.configs.memory.rank import billions
from roll.configs.memory.records import ELEMENT_BYTES, Part, Phase
from roll.configs.memory.shapes import ModelShape
from roll.configs.schema import PipelineConfig, RewardConfig

SCORING = "a batch is scored"


def scorer_memory(config: PipelineConfig, reward: RewardConfig, shape: ModelShape) -> tuple[Part, Phase]:
    """Return the weights and the phase in which a batch is scored; ``shape`` is that of a model with a scalar head.

    A conversation is assumed to have the same number of tokens for the reward model as for the policy.
    """
    element, longest = ELEMENT_BYTES[reward.model_args.dtype], derived.sequence_length(config)
    length = min(longest, reward.reward_model.max_length or longest)
    tokens = reward.infer_batch_size * length
    one = activations.forward_only_bytes(shape, element)
    seen = length * (2 + 4 * shape.heads if reward.model_args.attn_implementation == "eager" else 1)
    keys = shape.cache_bytes_per_token(element)
    each = f"{element} bytes ({reward.model_args.dtype})"
    return (
        Part("weights", shape.parameters * element, f"{billions(shape.parameters)} x {each}"),
        Phase(
            SCORING,
            (
                Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer"),
                Part("attention", seen * tokens, f"a mask, and with eager scores: {tokens:,} x {length:,} tokens"),
                Part("keys and values", keys * tokens, f"{keys / 1024:,.0f} KiB a token: transformers keeps them"),
            ),
        ),
    )
