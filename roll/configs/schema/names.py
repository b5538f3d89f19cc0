"""Names that a configuration may use for things registered elsewhere; a test compares both sides."""

from __future__ import annotations

TRAIN_STRATEGIES = ("fsdp2_train", "deepspeed_train", "megatron_train")
"""Trainers; they also drive the forward-only reference."""
FORWARD_STRATEGIES = ("hf_infer",)
"""Engines for the forward-only reference that cannot train, besides the trainers: a whole model on each device."""
PACKING_STRATEGIES = ("fsdp2_train", "deepspeed_train")
"""Trainers that can pack samples into rows; so can `FORWARD_STRATEGIES`."""
ADAPTER_STRATEGIES = ("fsdp2_train",)
"""Trainers of adapters (LoRA)."""
ADAPTER_KEYS = ("lora_target", "lora_rank", "lora_alpha")
"""Keys of `model_args` that describe adapters."""
INFER_STRATEGIES = ("hf_infer", "sglang", "vllm")
"""Generation engines."""
SCORE_STRATEGIES = ("hf_infer",)
"""Engines of reward models."""
BUILTIN_VERIFIERS = ("math", "exact", "numeric", "reasoning_gym", "code")
"""Verifiers known by name; any other is an import path."""
MODEL_REWARDS = ("reward_model", "judge")
"""Rewards that ask a model, with keys of their own; a user selects them with the key `verifier`."""
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
"""Arguments of policy losses under the names that users of ROLL know, directly in `actor_train`: name -> (loss,
argument)."""
