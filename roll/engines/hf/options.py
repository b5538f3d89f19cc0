"""Options of `hf_infer`: what they are, and what is wrong with a user's. Loads no library of models."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from roll.configs.errors import ConfigError, ConfigProblem


@dataclass(frozen=True)
class HFInferConfig:
    """Keys of `strategy_config` for `hf_infer`."""

    max_running_requests: int = 256
    """Requests decoded at once; more wait."""
    max_prefill_tokens: int = 8192
    """Most prompt tokens, with padding, in one forward pass."""
    threads: int | None = None
    """Number of torch's computing threads on a CPU. Default: torch's own."""

    @classmethod
    def parse(cls, strategy_config: dict[str, Any], path: str = "strategy_args.strategy_config") -> HFInferConfig:
        """Check a user's options and return them. Raises ``ConfigError`` with every unknown key and wrong value."""
        known = [entry.name for entry in fields(cls)]
        problems = []
        for key, value in strategy_config.items():
            key_path = f"{path}.{key}"
            if key not in known:
                nearest = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean `{nearest[0]}`?" if nearest else f"known: {', '.join(known)}"
                problems.append(ConfigProblem(key_path, "hf_infer has no such option", hint))
            elif not _is_positive_integer(value) and not (key == "threads" and value is None):
                problems.append(ConfigProblem(key_path, f"{value!r} is not usable", "a whole number of at least 1"))
        if problems:
            raise ConfigError(problems)
        return cls(**strategy_config)


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    try:
        HFInferConfig.parse(strategy_config, path)
    except ConfigError as error:
        return error.problems
    return []


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
