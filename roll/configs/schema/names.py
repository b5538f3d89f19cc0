"""Names that a configuration may use for what is registered elsewhere: a test compares both sides."""

from __future__ import annotations

TRAIN_STRATEGIES = ("fsdp2_train", "deepspeed_train", "megatron_train")
"""Trainers; they also drive the forward-only reference."""
FORWARD_STRATEGIES = ("hf_infer",)
"""What drives the forward-only reference beside them, and cannot train: a whole model on each device."""
PACKING_STRATEGIES = ("fsdp2_train", "deepspeed_train")
"""Trainers that can pack samples into rows; so can `FORWARD_STRATEGIES`."""
ADAPTER_STRATEGIES = ("fsdp2_train",)
"""Trainers of adapters (LoRA)."""
ADAPTER_KEYS = ("lora_target", "lora_rank", "lora_alpha")
"""Keys of `model_args` that say what adapters are."""
INFER_STRATEGIES = ("hf_infer", "sglang", "vllm")
"""Generation engines."""
SCORE_STRATEGIES = ("hf_infer",)
"""Engines of reward models."""
BUILTIN_VERIFIERS = ("math", "exact", "numeric", "reasoning_gym", "code")
"""Verifiers known by name; any other is an import path."""
MODEL_REWARDS = ("reward_model", "judge")
"""Rewards that ask a model, with keys of their own; they are named where verifiers are."""
ROLL_KNOBS: dict[str, tuple[str, str]] = {
    "tis_lower_bound": ("tis", "lower"),
    "tis_upper_bound": ("tis", "upper"),
    "topr_positive_weight": ("topr", "positive_weight"),
    "topr_negative_weight": ("topr", "negative_weight"),
    "cispo_epsilon_low": ("cispo", "epsilon_low"),
    "cispo_epsilon_high": ("cispo", "epsilon_high"),
    "cispo_use_unified_mask": ("cispo", "use_unified_mask"),
    "kimi15_tau": ("kimi15", "tau"),
}
"""Knobs of policy losses under the names that users of ROLL know, directly in `actor_train`: name -> (loss, knob)."""
