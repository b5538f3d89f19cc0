"""Errors of a configuration that cannot work: every problem at once, each with its path and a remedy.

The command line turns a `ConfigError` into exit code 2 and a plain message; nothing else ever becomes exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigProblem:
    """One wrong key or value."""

    path: str
    """Dotted path of the key, for example ``actor_train.training_args.learning_rate``."""
    message: str
    """Description of the problem, with the value."""
    remedy: str
    """Suggested correction."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}\n    -> {self.remedy}"


class ConfigError(Exception):
    """A configuration with at least one problem."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        if not problems:
            raise ValueError("a ConfigError needs at least one problem")
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
