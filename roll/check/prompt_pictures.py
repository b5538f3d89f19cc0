"""What a run needs if its prompts have pictures (vision-language models)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs import derived
from roll.configs.errors import ConfigProblem
from roll.configs.run import PromptConfig
from roll.configs.strategies import Engine, Trainer, strategies_of, strategy_of


def prompt_picture_problems(config: PromptConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each key that does not go with pictures in prompts."""
    roles = derived.present_roles(config)
    for role, section in roles.items():
        strategy = strategy_of(role, section)
        if isinstance(strategy, Engine | Trainer) and not strategy.sees:
            kind, name = strategies_of(role), section.strategy_args.strategy_name
            able = [f"`{each}`" for each, record in kind.built_in.items() if record.sees]
            message = f"{name} cannot be given the pictures in the prompts"
            yield ConfigProblem(f"{role}.strategy_args.strategy_name", message, f"use {' or '.join(able)}")
        if section.use_sequence_packing:
            message = "pictures give tokens positions in three dimensions, and packed rows have positions in one"
            yield ConfigProblem(f"{role}.use_sequence_packing", message, "set it to false")
        if derived.context_ranks(section) > 1:
            path = f"{role}.strategy_args.strategy_config.context_parallel_size"
            yield ConfigProblem(path, "a picture's positions are not split over ranks", "write 1")
    if config.actor_train.model_args.lora_target is not None:
        message = "adapters are not supported for prompts with pictures"
        yield ConfigProblem("actor_train.model_args.lora_target", message, "leave it out, and train all weights")
    if config.teacher is not None:
        message = "a teacher is not supported for prompts with pictures"
        yield ConfigProblem("teacher", message, "leave it out, or take the pictures out of the prompts")
    if "critic" in roles:
        message = "a critic is not supported for prompts with pictures: transformers has no value model that sees them"
        yield ConfigProblem("critic", message, "use an `adv_estimator` without one, such as `grpo`")
