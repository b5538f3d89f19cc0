"""The rule about options of engines and trainers: options that the arithmetic reads have the right type and range."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.derived import present_roles
from roll.configs.engine_options import Options, is_too_large
from roll.configs.errors import ConfigProblem
from roll.configs.schema import FORWARD_STRATEGIES, LARGEST_NUMBER, PipelineConfig
from roll.configs.wording import shown


def options_are_usable(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject values that `engine_options` does not allow."""
    for name, role in present_roles(config).items():
        if name != "actor_infer" and role.strategy_args.strategy_name in FORWARD_STRATEGIES:
            continue
        for option, value, allowed in Options.of(role).wrong():
            path = f"{name}.strategy_args.strategy_config.{option}"
            reason = f"is beyond {LARGEST_NUMBER:g}" if is_too_large(value) else "is not usable"
            yield ConfigProblem(path, f"{shown(value)} {reason}", f"write {allowed}")
