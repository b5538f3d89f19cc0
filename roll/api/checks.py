"""`roll.check`: the findings of the command `roll check`, as Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roll.api.configuration import Given, Source, with_given
from roll.check.config import check_elsewhere
from roll.check.data import has_model
from roll.check.memory import MemoryEstimate, estimate_memory
from roll.check.plan import Need, missing_packages, needs, plan_rows
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.given import holding_given
from roll.configs.run import RunConfig


@dataclass(frozen=True)
class Check:
    """Result of checking a configuration without running it."""

    problems: list[ConfigProblem]
    """Reasons why the run cannot work, each with the key's path and a remedy. Empty if there are none."""
    config: RunConfig | None = None
    """The resolved configuration; None if a key or a value is invalid."""
    plan: list[tuple[str, str]] = field(default_factory=list)
    """The run's arithmetic as pairs of subject and sentence, such as ``("batch", "64 prompts x 8 samples = ...")``."""
    needs: list[Need] = field(default_factory=list)
    """Models, packages and devices that the run needs, and whether this machine has them."""
    memory: MemoryEstimate | None = None

    @property
    def ok(self) -> bool:
        """True if there are no problems. Missing needs do not count, since the run may be meant for another machine."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.problems:
            return "\n\n".join(map(str, self.problems))
        width = max((len(name) for name, _ in self.plan), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self.plan)

    __repr__ = __str__


def check(
    config: Source,
    *,
    reward: Given = None,
    loss: Given = None,
    advantage: Given = None,
    env: Given = None,
    overrides: Sequence[str] = (),
) -> Check:
    """Check a configuration: whether it can work, what it will do, what it needs, and its memory. Starts nothing.

    Takes the same arguments as `roll.train`. Prompts are checked only if the model is available, because its tokenizer
    decides which of them are too long.
    """
    from roll.pipeline.preflight import look_up

    typed = None
    try:
        typed, pickles = with_given(config, overrides, reward, loss, advantage, env, here=False)
        with holding_given(pickles):
            missing = check_elsewhere(typed)
            model = Path(derived.model_path(typed, typed.actor_train))
            with_model = not missing and has_model(model)
            look_up(typed, with_model=with_model, without=missing_packages(typed))
    except ConfigError as error:
        return Check(error.problems, typed)
    estimate = estimate_memory(typed)
    return Check([], typed, plan_rows(typed), needs(typed, estimate), estimate)
