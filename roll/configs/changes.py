"""The difference between two configurations, with a judgement for each key: what may a resumed run change?

Most keys say how a run is carried out and may change freely. Some say what is learned: changing them makes the rest of
the run a different experiment, so the user must confirm it. A few fix the meaning of numbers in a checkpoint; with
other values these would mean something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from roll.configs import derived
from roll.configs.schema import ADAPTER_KEYS, PipelineConfig
from roll.configs.wording import masked, shown

Judgement = Literal["harmless", "needs confirmation", "impossible"]

IMPOSSIBLE = {
    "pipeline": "a checkpoint is of one pipeline",
    "seed": "it decides which group is made of what",
    "rollout_batch_size": "checkpoints count groups in batches of this size",
    **{f"actor_train.model_args.{key}": "adapters in a checkpoint are of this shape and scale" for key in ADAPTER_KEYS},
}
"""Key -> why it cannot change. Changes of prompts or environments are judged elsewhere."""

HARMLESS = (
    "exp_name",
    "output_dir",
    "cluster*",
    "max_steps",
    "save_steps",
    "max_ckpt_to_keep",
    "eval_steps",
    "logging_steps",
    "console_output",
    "track_with*",
    "tracker_*",
    "num_logged_samples",
    "resume_from_checkpoint",
    "accept_config_changes",
    "restarts*",
    "stall_timeout_seconds",
    "chaos*",
    "actor_infer.*timeout_seconds",
    *(
        f"{role}.{key}"
        for role in ("actor_train", "actor_infer", "reference", "critic")
        for key in (
            "device_mapping*",
            "strategy_args.strategy_name",
            "strategy_args.strategy_config*",
            "infer_batch_size",
            "use_dynamic_batching*",
            "max_tokens_per_microbatch*",
            "use_sequence_packing",
            "training_args.per_device_train_batch_size",
        )
    ),
    "rewards.*.num_workers",
    "rewards.*.max_retries",
    "rewards.*.device_mapping*",
    "rewards.*.infer_batch_size",
    "rewards.*.reward_model.batch_wait_seconds",
    "rewards.*.judge.base_url",
    "rewards.*.judge.api_key_env",
    "rewards.*.judge.max_concurrency",
    "rewards.*.judge.request_*",
    "actor_infer.max_replica_restarts",
    "actor_infer.num_gpus_per_engine",
    "max_group_retries",
    "max_consecutive_refunds",
    "env_workers*",
    "weight_update.transport",
    "weight_update.dual_buffer",
    "weight_update.*bucket_size_mb",
    "weight_update.checkpoint_dir",
    "weight_update.timeout_seconds",
    "weight_update.canary*",
    "val_batch_size",
    "validation*",
    "val_env_manager*",
    "mismatch_alarm",
    "mismatch_action",
)
"""Patterns of keys that change how a run is carried out, but not what it learns."""


AFTER_THE_ROLLOUT = (
    "pretrain",
    "actor_train*",
    "reference*",
    "critic*",
    "value_clip",
    "old_logprobs",
    "train_infer_correction*",
    "allow_uncorrected_off_policy",
    "reward_clip",
    "norm_mean_type",
    "norm_std_type",
    "length_penalty*",
    "max_len_mask",
    "difficulty_*",
    "zero_variance_mask",
    "adv_estimator_args*",
    "whiten_advantages",
    "advantage_clip",
    "ppo_epochs",
    "loss_agg_mode",
    "use_kl_loss",
    "kl_*",
    "add_token_level_kl",
    "init_kl_coef",
    "target_kl",
    "entropy_loss_coef",
    "episode_reward_weight",
    "step_reward_weight",
    "async_generation_ratio",
    "max_staleness",
    "consumption",
    "staleness_policy",
    "weight_update*",
)
"""Patterns of keys that cannot change a finished group. (Prompts and the initial model are judged elsewhere.) If a key
is missing here, a resumed run repeats rollouts without need."""


@dataclass(frozen=True)
class Change:
    """One key whose value differs."""

    path: str
    before: Any
    after: Any
    judgement: Judgement
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.path}: {shown(self.before)} -> {shown(self.after)} ({self.judgement}{reason})"


def changes(before: PipelineConfig, after: PipelineConfig) -> list[Change]:
    """List the keys in which two resolved configurations differ, in the order of their paths. Secrets are masked."""
    old, new = _everything(before), _everything(after)
    falls_back = _falls_back(before, after) or _falls_back(after, before)
    return [
        _judged(path, old.get(path), new.get(path), falls_back)
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    ]


def _falls_back(config: PipelineConfig, other: PipelineConfig) -> bool:
    """Return True if ``other`` is the fallback of ``config`` after failures (`restarts.synchronous_after`)."""
    if config.restarts.synchronous_after is None:
        return False
    fallback = derived.synchronous(config)
    return all(vars(fallback)[key] == vars(other)[key] for key in derived.SYNCHRONOUS_KEYS)


def rollout_settings(config: PipelineConfig) -> dict[str, Any]:
    """Return the keys that decide what a finished group is: how it was sampled, judged and filtered.

    Values are JSON-compatible, and secrets are masked.
    """
    settings = {
        path: value
        for path, value in _leaves(masked(asdict(config)), "")
        if not any(fnmatchcase(path, pattern) for pattern in (*HARMLESS, *AFTER_THE_ROLLOUT))
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _everything(config: PipelineConfig) -> dict[str, Any]:
    """Return all keys, plus values that follow from several of them.

    Devices and batch limits may change freely, but not the number of samples that one optimizer step trains on.
    """
    everything = dict(_leaves(masked(asdict(config)), ""))
    for name, role in derived.trained_roles(config).items():
        if role.training_args.gradient_accumulation_steps is not None:
            everything[f"(samples of an optimizer step of {name})"] = derived.optimizer_batch_size(config, role)
    return everything


def _judged(path: str, before: Any, after: Any, falls_back: bool) -> Change:
    if path in IMPOSSIBLE:
        return Change(path, before, after, "impossible", IMPOSSIBLE[path])
    if falls_back and path in derived.SYNCHRONOUS_KEYS:
        return Change(path, before, after, "harmless", "`restarts.synchronous_after` allows both")
    harmless = any(fnmatchcase(path, pattern) for pattern in HARMLESS)
    return Change(path, before, after, "harmless" if harmless else "needs confirmation")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
