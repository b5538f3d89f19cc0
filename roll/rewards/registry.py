"""Verifiers by name or import path. Their arguments are checked against their signature before anything starts.

A verifier is a function or coroutine function. Parameters with names in `VERIFIER_FIELDS` are filled from the judged
response, all others from `verifier_args`. It returns a number, or a mapping with a `score` and other numbers; with
`weights`, the score is a weighted sum of these. A subclass of `PreparedVerifier` is a verifier too: its constructor
takes the `verifier_args`, and `__call__` takes the fields. A new built-in verifier is a function and a line in
`roll.configs.rewards.VERIFIERS`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roll.configs.derived import reward_timeout
from roll.configs.errors import ConfigError, ConfigProblem, choose_among, nearest_name_hint
from roll.configs.plugins import checked_arguments, made, parameters_of, problem, require, takes_anything
from roll.configs.rewards import VERIFIERS, JudgeConfig, RewardConfig
from roll.data.pictures import decoded
from roll.data.records import Prompt
from roll.rewards.base import (
    VERIFIER_FIELDS,
    PreparedVerifier,
    RewardInput,
    RewardNonsense,
    RewardOutput,
    VerifierUnavailable,
)

JUDGE_REQUIRES = ("aiohttp",)  # requirements/judge.txt


@dataclass(frozen=True)
class Verifier:
    """A verifier with checked arguments, ready to be called."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    """Names of the fields passed to the function."""
    needs_ground_truth: bool = False
    needs_image: bool = False
    is_async: bool = False
    requires: tuple[str, ...] = ()
    timeout_score: float | None = None
    max_concurrency: int | None = None
    """Largest number of responses judged at a time in all processes together; None: no limit besides the processes."""
    secrets: tuple[str, ...] = ()
    """Environment variables with secrets that the processes need."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Name of a returned number -> its weight in the score. Empty: the verifier returns the score itself."""
    prepared: PreparedVerifier | None = None
    """The verifier object; None if the verifier is a function."""

    def __call__(self, record: RewardInput) -> Any:
        """Return the verifier's unchecked result (see `checked_output`), or its coroutine if it is async."""
        values = record.fields()
        if "pictures" in self.fields:
            values["pictures"] = [decoded(picture) for picture in record.pictures]
        return self.function(**{name: values[name] for name in self.fields}, **self.arguments)

    def fault_of(self, ground_truth: Any) -> str | None:
        """Return the reason why a ground truth is unusable; None if it is usable or the verifier does not check it."""
        if self.prepared is None:
            return None
        try:
            self.prepared.check_ground_truth(ground_truth)
        except ValueError as cause:
            return str(cause)
        return None


def resolve_verifier(config: RewardConfig, path: str) -> Verifier:
    """Find a verifier and check its arguments. ``path`` is the configuration path, for example ``rewards.math``.

    Imports nothing large except the module that a user names. Raises `ConfigError` with every problem.
    """
    if config.judge is not None:
        return _judge(config.judge, path)
    name, where = config.verifier, f"{path}.verifier"
    record = VERIFIERS.find(name, where)
    function: Any = VERIFIERS.load(name, where)
    parameters = parameters_of(function, name, where)
    given, where_given = config.verifier_args, f"{where}_args"
    arguments: dict[str, Any] = {}
    prepared: Any = None
    if isinstance(function, type) and issubclass(function, PreparedVerifier):
        limit = {"timeout_seconds": reward_timeout(config)} if "timeout_seconds" in parameters else {}
        filled = {*VERIFIER_FIELDS, *limit}
        function = prepared = made(name, partial(function, **limit), given, where_given, filled=filled, strict=False)
        parameters = parameters_of(function, name, where)
    elif isinstance(function, type) and not _is_score(function):
        remedy = "name a function, an object to call, or a class derived from roll.rewards.base.PreparedVerifier"
        raise problem(where, f"`{name}` is a class: a call makes an object of it, not a score", remedy)
    else:
        arguments = checked_arguments(name, parameters, given, where_given, filled=VERIFIER_FIELDS)
    anything = takes_anything(parameters)
    _check_numbers(name, config.weights, _known_numbers(function), path)
    return Verifier(
        name=name,
        function=function,
        arguments=arguments,
        fields=VERIFIER_FIELDS if anything else tuple(key for key in VERIFIER_FIELDS if key in parameters),
        needs_ground_truth=_is_required(parameters, "ground_truth"),
        needs_image=_is_required(parameters, "image"),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        requires=record.requires,
        timeout_score=record.timeout_score,
        max_concurrency=prepared.max_concurrency if prepared is not None else None,
        secrets=prepared.secrets if prepared is not None else (),
        weights=config.weights,
        prepared=prepared,
    )


def check_sight(verifier: Verifier, draws: bool, path: str) -> None:
    """Raise `ConfigError` if a verifier cannot judge what the run generates: images if ``draws``, else texts.

    ``path`` is the configuration path of its reward.
    """
    if draws and "image" not in verifier.fields:
        remedy = "use one with a parameter `image`, for example `shapes` or `ocr` (docs/rewards.md)"
        raise problem(f"{path}.verifier", f"`{verifier.name}` does not look at the picture", remedy)
    if verifier.needs_image and not draws:
        raise problem(
            f"{path}.verifier", f"`{verifier.name}` judges pictures, and this run generates text", "use another"
        )


def check_machine(verifier: Verifier, path: str) -> None:
    """Raise `ConfigError` if a verifier cannot work on this machine, or if a service leaves out a needed number.

    ``path`` is its reward's configuration path.
    """
    if verifier.prepared is None:
        return
    try:
        answered = verifier.prepared.check_machine()
    except VerifierUnavailable as cause:
        raise problem(f"{path}.verifier", str(cause), "correct it, or choose another verifier") from cause
    _check_numbers(verifier.name, verifier.weights, answered, path)


def _known_numbers(function: Any) -> Collection[str] | None:
    """Return the names of the numbers that a verifier returns; None if they are not known before a run."""
    if isinstance(function, PreparedVerifier):
        return function.numbers
    returned = getattr(function, "__annotations__", {}).get("return")
    return ("score",) if returned in (float, "float") else None


def _check_numbers(name: str, weights: Mapping[str, float], returned: Collection[str] | None, path: str) -> None:
    """Raise `ConfigError` with each name that is needed for the score and not among the numbers ``returned``."""
    missing = [] if returned is None else [each for each in weights or ("score",) if each not in returned]
    if missing and not weights:
        message = f"`{name}` answers without a `score`, only with {', '.join(f'`{each}`' for each in returned or ())}"
        raise problem(f"{path}.verifier", message, f"name what counts, for example `{path}.weights: {{NAME: 1}}`")
    if missing:
        remedy = {each: choose_among(each, returned or ()) for each in missing}
        message = f"`{name}` returns no number of this name"
        raise ConfigError([ConfigProblem(f"{path}.weights.{each}", message, remedy[each]) for each in missing])


def _is_required(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters and parameters[name].default is inspect.Parameter.empty


def _judge(config: JudgeConfig, path: str) -> Verifier:
    """Return the verifier of a judge, which has its own configuration section instead of `verifier_args`."""
    require(JUDGE_REQUIRES, "judge", f"{path}.verifier")
    from roll.rewards.judge import Judge

    judge = Judge(config)
    return Verifier(
        name=f"judge at {config.base_url}",
        function=judge,
        fields=("prompt", "messages", "response", "ground_truth", "image"),
        needs_ground_truth=judge.needs_ground_truth,
        is_async=True,
        requires=JUDGE_REQUIRES,
        max_concurrency=config.max_concurrency,
        secrets=(config.api_key_env,) if config.api_key_env else (),
    )


def checked_output(verifier_name: str, value: Any, weights: Mapping[str, float] | None = None) -> RewardOutput:
    """Convert a verifier's result to a `RewardOutput`.

    With ``weights``, the score is the weighted sum of the numbers named there, which may include ``score``; all numbers
    are also metrics. Raises `RewardNonsense` if a value is not a finite number, or if a needed number is missing.
    """
    if isinstance(value, RewardOutput):
        value = {**value.metrics, "score": value.score}
    if not isinstance(value, Mapping):
        value = {"score": value}
    for name in weights or ("score",):
        if name not in value:
            raise RewardNonsense(f"verifier `{verifier_name}` answered {_short(value)}, which has no `{name}`")
    numbers = {str(key): _number(verifier_name, each, value) for key, each in value.items()}
    if weights:
        total = sum(weight * numbers[name] for name, weight in weights.items())
        return RewardOutput(_number(verifier_name, total, value), numbers)
    return RewardOutput(numbers.pop("score"), numbers)


def route_domains(rewards: Mapping[str, RewardConfig]) -> dict[str, str]:
    """Return a mapping from each domain to the name of the reward that judges it."""
    return {domain: name for name, config in rewards.items() for domain in config.tag_included or [name]}


def check_prompts(
    routes: Mapping[str, str], verifiers: Mapping[str, Verifier], prompts: Iterable[Prompt], path: str
) -> list[ConfigProblem]:
    """Return a problem for each domain with prompts that no reward can judge.

    These are prompts of a domain without a reward, prompts without the ground truth that their reward needs, and
    prompts with an unusable ground truth. ``routes``: domain -> reward name. ``verifiers``: reward name -> verifier,
    without reward models. ``path``: configuration path of the prompts.
    """
    problems: dict[tuple[str, str], ConfigProblem] = {}
    for prompt in prompts:
        reward = routes.get(prompt.domain)
        if reward is None:
            message = f"no reward judges the domain `{prompt.domain}` (prompt {prompt.prompt_id})"
            hint = nearest_name_hint(prompt.domain, routes)
            remedy = f"call a reward `{prompt.domain}`, or add that to the `tag_included` of one; {hint}"
            problems.setdefault(("domain", prompt.domain), ConfigProblem(path, message, remedy))
        elif prompt.ground_truth is None and reward in verifiers and verifiers[reward].needs_ground_truth:
            message = f"prompt {prompt.prompt_id} has no ground truth, which `rewards.{reward}` needs"
            remedy = "give each prompt of this domain a `ground_truth` (or `answer`)"
            problems.setdefault(("truth", prompt.domain), ConfigProblem(path, message, remedy))
        elif reward in verifiers and (fault := verifiers[reward].fault_of(prompt.ground_truth)):
            message = f"`rewards.{reward}` cannot judge prompt {prompt.prompt_id}: {fault}"
            remedy = f"correct its `ground_truth` (docs/rewards.md), and those of other prompts of `{prompt.domain}`"
            problems.setdefault(("truth", prompt.domain), ConfigProblem(path, message, remedy))
    return list(problems.values())


def _number(verifier_name: str, value: Any, answer: Any) -> float:
    """Return ``value`` as a float. Numpy numbers are accepted, texts are not."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardNonsense(f"verifier `{verifier_name}` answered {_short(answer)}, which is no finite number")
    return number


def _is_score(kind: type) -> bool:
    """Return True if `checked_output` takes objects of a class for scores."""
    return hasattr(kind, "__float__") or issubclass(kind, (RewardOutput, Mapping))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
