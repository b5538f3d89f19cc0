"""Options of `hf_infer`. Loads no library of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from roll.configs.errors import ConfigProblem, problems_of
from roll.configs.plugins import made


@dataclass(frozen=True)
class HFInferConfig:
    """Keys of `strategy_config` for `hf_infer`."""

    max_running_requests: Annotated[int, Field(ge=1)] = 256
    """Requests decoded at once; more wait."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Most prompt tokens, with padding, in one forward pass."""
    threads: Annotated[int | None, Field(ge=1)] = None
    """Number of torch's computing threads on a CPU. Default: torch's own."""


def parse_options(strategy_config: dict[str, Any], path: str = "strategy_args.strategy_config") -> HFInferConfig:
    """Return checked options. Raises `ConfigError` with every unknown key and wrong value."""
    return made("hf_infer", HFInferConfig, strategy_config, path)


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    return problems_of(lambda: parse_options(strategy_config, path))
