"""Generation engines by name. An engine's module, and with it its libraries, is imported only when it is chosen."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from roll.configs.errors import ConfigError, ConfigProblem
from roll.runtime.plugins import registered_class

INFER_STRATEGIES: dict[str, str] = {
    "hf_infer": "roll.engines.hf.strategy:HFInferStrategy",
    "sglang": "roll.engines.sglang.strategy:SGLangInferStrategy",
    "vllm": "roll.engines.vllm.strategy:VLLMInferStrategy",
}
"""Strategy name -> ``module:class``."""

OPTION_CHECKS: dict[str, str] = {
    "hf_infer": "roll.engines.hf.options:check_options",
    "sglang": "roll.engines.sglang.options:check_options",
    "vllm": "roll.engines.vllm.options:check_options",
}
"""Strategy name -> ``module:function`` that checks its ``strategy_config``."""


def infer_strategy_class(name: str, own: str | None = None) -> type:
    """Return the engine class registered under ``name``, or its subclass ``own`` (see `registered_class`).

    Raises ``ConfigError`` with the nearest valid name if ``name`` is not registered.
    """
    if name not in INFER_STRATEGIES:
        nearest = difflib.get_close_matches(name, INFER_STRATEGIES, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"known: {', '.join(sorted(INFER_STRATEGIES))}"
        raise ConfigError([ConfigProblem("strategy_args.strategy_name", f"unknown generation engine {name!r}", hint)])
    return registered_class(INFER_STRATEGIES, name, own)


def infer_option_check(name: str) -> Callable[[dict[str, Any], str], list[ConfigProblem]]:
    """Return the function that checks an engine's ``strategy_config``: (options, their path) -> problems.

    Imports no engine.
    """
    module, function = OPTION_CHECKS[name].split(":")
    return getattr(importlib.import_module(module), function)
