"""`roll.check`: what `roll check` says, as data."""

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
    """Facts about a configuration, known before it runs."""

    problems: list[ConfigProblem]
    """Reasons why it cannot work, each with its path and a remedy; empty if it can."""
    config: RunConfig | None = None
    """The resolved configuration; None if a key or a value is wrong."""
    plan: list[tuple[str, str]] = field(default_factory=list)
    """What it comes to, as pairs of subject and sentence, such as ``("batch", "64 prompts x 8 samples = ...")``."""
    needs: list[Need] = field(default_factory=list)
    """Models, packages and devices that the run needs, and whether they are here."""
    memory: MemoryEstimate | None = None

    @property
    def ok(self) -> bool:
        """True if nothing is wrong. Needs that are not here do not count, since the run may be for another machine."""
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
    """Say whether a configuration can work, what it will do, what it needs and how much memory. Starts nothing.

    Takes what `roll.train` takes. Prompts are looked at if the model is here, since its tokenizer cuts them.
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
