"""Verifiers by name or import path, checked against their signature before anything starts.

A verifier is a plain function (or coroutine function). Its parameter names say what it needs: names in
`VERIFIER_FIELDS` are filled from the judged response, the others from `verifier_args`. It returns a number, or a
mapping with a `score` and further numbers. A subclass of `PreparedVerifier` is a verifier too: its constructor takes
the `verifier_args`, its calls take the fields. A new built-in verifier is one file and one line in `BUILT_IN`.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.configs.derived import reward_timeout
from roll.configs.errors import ConfigError, ConfigProblem, nearest_name_hint
from roll.configs.rewards import JudgeConfig, RewardConfig
from roll.data.records import Prompt
from roll.rewards.base import (
    VERIFIER_FIELDS,
    PreparedVerifier,
    RewardInput,
    RewardNonsense,
    RewardOutput,
    VerifierUnavailable,
)
from roll.runtime.plugins import converted_arguments, import_object


@dataclass(frozen=True)
class BuiltIn:
    """The import path and the requirements of a built-in verifier."""

    import_path: str
    requires: tuple[str, ...] = ()
    """Modules that it imports when it first judges; workers import them when they start."""
    timeout_score: float | None = None
    """Score of a response that cannot be judged in time; ``None`` makes that a failure of the reward."""


BUILT_IN = {
    "exact": BuiltIn("roll.rewards.verifiers:exact"),
    "numeric": BuiltIn("roll.rewards.verifiers:numeric"),
    # An expression that takes ten seconds to evaluate is not an answer. If it were a failure, the policy could make
    # whole groups disappear by writing such expressions.
    "math": BuiltIn("roll.rewards.verifiers:math_answer", ("math_verify",), timeout_score=0.0),
    "reasoning_gym": BuiltIn("roll.rewards.verifiers:reasoning_gym_task", ("reasoning_gym",), timeout_score=0.0),
    # The verifier limits the time of programs itself, so exceeding the worker's limit is a fault of the machine.
    "code": BuiltIn("roll.rewards.code:CodeVerifier"),
}


JUDGE_REQUIRES = ("aiohttp",)  # requirements/judge.txt


@dataclass(frozen=True)
class Verifier:
    """A checked verifier, ready to be called."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    """Names of the fields passed to the function."""
    needs_ground_truth: bool = False
    is_async: bool = False
    requires: tuple[str, ...] = ()
    timeout_score: float | None = None
    max_concurrency: int | None = None
    """Number of responses judged at a time over all processes; ``None``: as many as the processes take."""
    secrets: tuple[str, ...] = ()
    """Environment variables that its processes need."""
    prepared: PreparedVerifier | None = None
    """The function as a `PreparedVerifier`, if it is one."""

    def __call__(self, record: RewardInput) -> Any:
        """Return the function's unchecked result (see `checked_output`), or its coroutine if it is async."""
        values = record.fields()
        return self.function(**{name: values[name] for name in self.fields}, **self.arguments)

    def fault_of(self, ground_truth: Any) -> str | None:
        """Return why a ground truth is unusable; None if it is usable or the verifier does not check it."""
        if self.prepared is None:
            return None
        try:
            self.prepared.check_ground_truth(ground_truth)
        except ValueError as cause:
            return str(cause)
        return None


def resolve_verifier(config: RewardConfig, path: str) -> Verifier:
    """Find a verifier and check its arguments. ``path`` is the configuration path, for example ``rewards.math``.

    Imports nothing heavy except the module that a user names. Raises `ConfigError` with every problem.
    """
    name = config.verifier
    if not name:
        raise _error(f"{path}.verifier", "no verifier is named", nearest_name_hint("", BUILT_IN))
    if config.judge is not None:
        return _judge(config.judge, path)
    built_in = BUILT_IN.get(name, BuiltIn(name))
    _require(built_in.requires, name, path)
    function = _import_function(built_in.import_path, f"{path}.verifier")
    parameters = _parameters(function, f"{path}.verifier")
    arguments: dict[str, Any] = {}
    prepared: PreparedVerifier | None = None
    if isinstance(function, type) and issubclass(function, PreparedVerifier):
        function = prepared = _prepared(function, parameters, config, path)
        parameters = _parameters(function, f"{path}.verifier")
    else:
        arguments = _checked_arguments(parameters, config, path)
    takes_anything = _takes_anything(parameters)
    truth = parameters.get("ground_truth")
    return Verifier(
        name=name,
        function=function,
        arguments=arguments,
        fields=VERIFIER_FIELDS if takes_anything else tuple(key for key in VERIFIER_FIELDS if key in parameters),
        needs_ground_truth=truth is not None and truth.default is inspect.Parameter.empty,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        requires=built_in.requires,
        timeout_score=built_in.timeout_score,
        max_concurrency=prepared.max_concurrency if prepared is not None else None,
        prepared=prepared,
    )


def check_machine(verifier: Verifier, path: str) -> None:
    """Raise `ConfigError` if a verifier cannot work on this machine. ``path`` is its reward's configuration path."""
    if verifier.prepared is None:
        return
    try:
        verifier.prepared.check_machine()
    except VerifierUnavailable as cause:
        raise _error(f"{path}.verifier", str(cause), "mend that, or choose another verifier") from cause


def _prepared(
    made_by: type[PreparedVerifier], parameters: Mapping[str, inspect.Parameter], config: RewardConfig, path: str
) -> Any:
    limit = {"timeout_seconds": reward_timeout(config)} if "timeout_seconds" in parameters else {}
    settable = {key: each for key, each in parameters.items() if key not in limit}
    arguments = _checked_arguments(settable, config, path)
    try:
        return made_by(**limit, **arguments)
    except ValueError as cause:
        raise _error(f"{path}.verifier_args", str(cause), "change one of them") from cause


def _checked_arguments(parameters: Mapping[str, inspect.Parameter], config: RewardConfig, path: str) -> dict[str, Any]:
    """Return the `verifier_args`, converted to the types of the parameters. Raises `ConfigError`."""
    named = {
        key: each
        for key, each in parameters.items()
        if each.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    problems = _argument_problems(config, parameters, named, _takes_anything(parameters), path)
    arguments, value_problems = converted_arguments(config.verifier_args, named, f"{path}.verifier_args")
    if problems or value_problems:
        raise ConfigError(problems + value_problems)
    return arguments


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def _judge(config: JudgeConfig, path: str) -> Verifier:
    """Return the verifier of a judge, which has its own configuration section instead of `verifier_args`."""
    _require(JUDGE_REQUIRES, "judge", path)
    from roll.rewards.judge import Judge

    judge = Judge(config)
    return Verifier(
        name=f"judge at {config.base_url}",
        function=judge,
        fields=("prompt", "messages", "response", "ground_truth"),
        needs_ground_truth=judge.needs_ground_truth,
        is_async=True,
        requires=JUDGE_REQUIRES,
        max_concurrency=config.max_concurrency,
        secrets=(config.api_key_env,) if config.api_key_env else (),
    )


def _require(modules: Iterable[str], name: str, path: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            package = module.replace("_", "-")
            raise _error(f"{path}.verifier", f"`{name}` needs the package `{package}`", f"pip install {package}")


def checked_output(verifier_name: str, value: Any) -> RewardOutput:
    """Convert a verifier's result to a `RewardOutput`. Raises `RewardNonsense` if a value is not a finite number."""
    if isinstance(value, RewardOutput):
        return RewardOutput(
            _number(verifier_name, value.score, value),
            {key: _number(verifier_name, each, value) for key, each in value.metrics.items()},
        )
    if not isinstance(value, Mapping):
        return RewardOutput(_number(verifier_name, value, value))
    if "score" not in value:
        raise RewardNonsense(f"verifier `{verifier_name}` answered {_short(value)}, which has no `score`")
    numbers = {str(key): _number(verifier_name, each, value) for key, each in value.items()}
    return RewardOutput(numbers.pop("score"), numbers)


def route_domains(rewards: Mapping[str, RewardConfig], path: str = "rewards") -> dict[str, str]:
    """Return domain tag -> name of the reward that judges it. Raises `ConfigError` if two rewards claim a domain."""
    routes: dict[str, str] = {}
    problems = []
    for name, config in rewards.items():
        for domain in config.tag_included or [name]:
            owner = routes.setdefault(domain, name)
            if owner != name:
                message = f"the domain `{domain}` already belongs to the reward `{owner}`"
                problems.append(ConfigProblem(f"{path}.{name}.tag_included", message, "name each domain once"))
    if problems:
        raise ConfigError(problems)
    return routes


def check_prompts(
    routes: Mapping[str, str], verifiers: Mapping[str, Verifier], prompts: Iterable[Prompt], path: str
) -> list[ConfigProblem]:
    """Return a problem for each kind of prompt that no reward can judge.

    These are prompts of a domain without a reward, prompts without the ground truth that their reward needs, and
    prompts with an unusable ground truth. ``verifiers`` is by reward name (reward models have none), ``path`` the
    configuration path of the prompts.
    """
    problems: dict[tuple[str, str], ConfigProblem] = {}
    for prompt in prompts:
        reward = routes.get(prompt.domain)
        if reward is None:
            message = f"no reward judges the domain `{prompt.domain}` (prompt {prompt.prompt_id})"
            hint = nearest_name_hint(prompt.domain, routes)
            remedy = f"add `{prompt.domain}` to the `tag_included` of a reward; {hint}"
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


def _error(path: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([ConfigProblem(path, message, remedy)])


def _import_function(import_path: str, path: str) -> Callable[..., Any]:
    if ":" not in import_path:
        hint = nearest_name_hint(import_path, BUILT_IN)
        remedy = f"{hint}; or use an import path `package.module:function`"
        raise _error(path, f"`{import_path}` is no verifier", remedy)
    try:
        found = import_object(import_path)
    except ImportError as cause:
        remedy = "correct it, or make the module importable from the working folder or PYTHONPATH"
        raise _error(path, str(cause), remedy) from cause
    if not callable(found):
        raise _error(path, f"`{import_path}` is a {type(found).__name__}", "name a function")
    return found


def _parameters(function: Callable[..., Any], path: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # annotations that only a type checker can resolve: their values are not converted
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as cause:
        raise _error(path, f"the signature cannot be read ({cause})", "wrap it in a Python function") from cause


def _argument_problems(
    config: RewardConfig,
    parameters: Mapping[str, inspect.Parameter],
    named: Mapping[str, inspect.Parameter],
    takes_anything: bool,
    path: str,
) -> list[ConfigProblem]:
    """Return problems for required parameters that nothing fills, and for `verifier_args` that fill nothing."""
    problems = []
    for key, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty
        if required and parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            message = f"`{config.verifier}` takes `{key}` by position only"
            problems.append(ConfigProblem(f"{path}.verifier", message, "parameters are filled by name"))
        elif required and key in named and key not in VERIFIER_FIELDS and key not in config.verifier_args:
            message = f"`{config.verifier}` needs `{key}`, which is neither set nor known of a response"
            remedy = f"set `{path}.verifier_args.{key}`; {nearest_name_hint(key, VERIFIER_FIELDS)}"
            problems.append(ConfigProblem(f"{path}.verifier", message, remedy))
    settable = set(named) - set(VERIFIER_FIELDS)
    for key in config.verifier_args:
        if key in VERIFIER_FIELDS:
            message = f"`{key}` is filled from the response that is judged"
            problems.append(ConfigProblem(f"{path}.verifier_args.{key}", message, "leave it out"))
        elif key not in settable and not takes_anything:
            message = f"`{config.verifier}` has no argument `{key}`"
            problems.append(ConfigProblem(f"{path}.verifier_args.{key}", message, nearest_name_hint(key, settable)))
    return problems


def _number(verifier_name: str, value: Any, answer: Any) -> float:
    """Return ``value`` as a float. Numpy's numbers are accepted, text is not."""
    is_number = isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, str))
    try:
        number = float(value) if is_number else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardNonsense(f"verifier `{verifier_name}` answered {_short(answer)}, which is no finite number")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
