"""Rules about rewards that use a model: reward models on devices, and judges behind an address.

A key that only another kind of reward reads is an error, so that no key is silently ignored.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from roll.check.rules import is_worker_of_roll
from roll.configs.derived import model_path, reward_timeout
from roll.configs.errors import ConfigProblem, choose_among, shown, without_effect
from roll.configs.fields import changes
from roll.configs.rewards import JudgeConfig
from roll.configs.run import ImageConfig, PromptConfig

JUDGE_FIELDS = ("prompt", "response", "ground_truth")
"""Names that a judge's template may contain, in braces."""
REQUEST_FIELDS = ("model", "messages", "temperature", "max_tokens", "stream", "n")
"""Fields of a request that the judge sets itself."""

_MODEL_KEYS = ("model_args", "strategy_args", "device_mapping", "infer_batch_size", "worker_cls", "reward_model")
_UNREAD_KEYS = {
    "reward_model": ("verifier_args", "num_workers", "judge", "weights"),
    "judge": (*_MODEL_KEYS, "verifier_args", "weights"),
}
"""Verifier -> keys that it does not read. All other verifiers read neither `judge` nor `_MODEL_KEYS`."""
_REMEDIES = {
    "verifier_args": "remove it; the settings of this kind of reward have keys of their own (docs/rewards.md)",
    "num_workers": "remove it; there is one process for each device of `device_mapping`",
    "judge": "set `verifier: judge`, or remove this key",
    "weights": "remove it; this kind of reward returns one number",
}
_NAME_IN_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_]\w*")


def rewards_fit_their_kind(config: PromptConfig) -> Iterator[ConfigProblem]:
    """Reject keys that a reward's kind does not read, a reward model without a model, and too long timeouts.

    A timeout may not exceed `stall_timeout_seconds`: only a verdict counts as progress, so the run would be stopped
    while it waits for one. Devices, engine and classes of a reward model are checked by the rules of all roles.
    """
    for name, reward in config.rewards.items():
        for key in _UNREAD_KEYS.get(reward.verifier, (*_MODEL_KEYS, "judge")) if reward.verifier else ():
            remedy = _REMEDIES.get(key, "set `verifier: reward_model`, or remove this key")
            for path, value in changes(reward, key):
                if key == "worker_cls" and is_worker_of_roll(reward.worker_cls):
                    continue
                reason = f"the verifier {shown(reward.verifier)} does not read this key"
                yield without_effect(f"rewards.{name}.{path}", value, reason, remedy)
        if reward.verifier == "reward_model" and not model_path(config, reward):
            remedy = "set `reward_pretrain`, or the model of this reward here"
            yield ConfigProblem(f"rewards.{name}.model_args.model_name_or_path", "no reward model is given", remedy)
        seconds, limit = reward_timeout(reward), config.stall_timeout_seconds
        if seconds > limit:
            message = f"{seconds:g} s for one verdict are more than the {limit:g} s for which a run may stall"
            remedy = "lower it, or raise `stall_timeout_seconds`"
            yield ConfigProblem(f"rewards.{name}.timeout_seconds", message, remedy)


def weights_are_weights(config: PromptConfig) -> Iterator[ConfigProblem]:
    """Reject `weights` that are not finite, or that are all 0."""
    for name, reward in config.rewards.items():
        for part, weight in reward.weights.items():
            if not math.isfinite(weight):
                yield ConfigProblem(f"rewards.{name}.weights.{part}", f"{weight} is no weight", "give a finite number")
        if reward.weights and not any(reward.weights.values()):
            remedy = "give one of them another weight, or remove the key"
            yield ConfigProblem(f"rewards.{name}.weights", "all weights are 0, so every score would be 0", remedy)


def judges_are_complete(config: PromptConfig) -> Iterator[ConfigProblem]:
    """Require a usable configuration of each judge.

    It has an address, a model, an existing key, consistent time limits, a template that shows the response, and answers
    that can become a score.
    """
    for name, reward in config.rewards.items():
        path, judge = f"rewards.{name}.judge", reward.judge
        if reward.verifier != "judge":
            continue
        if judge is None:
            remedy = "add `judge: {base_url: http://..., model: ...}`"
            yield ConfigProblem(path, "a judge needs an address and a model", remedy)
            continue
        yield from _address_problems(f"{path}.base_url", judge.base_url)
        if not judge.model:
            yield ConfigProblem(f"{path}.model", "no model is named", "write the name that the address has for it")
        if judge.api_key_env is not None:
            yield from _key_problems(f"{path}.api_key_env", judge.api_key_env)
        for key in judge.extra_body:
            if key in REQUEST_FIELDS:
                remedy = "use the judge's own key for it" if key in vars(judge) else "leave it out"
                yield ConfigProblem(f"{path}.extra_body.{key}", "the judge fills this field itself", remedy)
        seconds, whole = judge.request_timeout_seconds, reward_timeout(reward)
        if seconds > whole:
            message = f"{seconds:g} s for one answer are more than the {whole:g} s for all attempts"
            remedy = f"raise `rewards.{name}.timeout_seconds`, or lower this"
            yield ConfigProblem(f"{path}.request_timeout_seconds", message, remedy)
        yield from _template_problems(f"{path}.template", judge, draws=isinstance(config, ImageConfig))
        if judge.score_min >= judge.score_max:
            message = f"{judge.score_max:g} is not above score_min {judge.score_min:g}"
            yield ConfigProblem(f"{path}.score_max", message, "give the judge's worst and best score")
        if judge.score_pattern is not None:
            yield from _pattern_problems(f"{path}.score_pattern", judge.score_pattern)
            if judge.score_field is not None:
                message = f"{shown(judge.score_field)}, but `score_pattern` is set, too"
                yield ConfigProblem(f"{path}.score_field", message, "keep one of the two")


def _address_problems(path: str, url: str) -> Iterator[ConfigProblem]:
    form = "write it like `http://127.0.0.1:8000/v1`"
    if not url:
        yield ConfigProblem(path, "no address is given", form)
        return
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        yield ConfigProblem(path, f"{shown(url)} is no address", form)
    elif "@" in parts.netloc:
        remedy = "put the key into an environment variable and name that in `api_key_env`"
        yield ConfigProblem(path, "the address contains a user or a password", remedy)
    elif parts.query or parts.fragment:
        yield ConfigProblem(path, f"{shown(url)} goes on after the path", form)
    elif parts.path.rstrip("/").endswith("/completions"):
        remedy = "leave `/chat/completions` out: it is added"
        yield ConfigProblem(path, f"{shown(url)} is the address of one call", remedy)


def _key_problems(path: str, variable: str) -> Iterator[ConfigProblem]:
    """Check the variable of the API key. Messages do not show its name: a user may have written the key itself."""
    if not _ENVIRONMENT_NAME.fullmatch(variable):
        remedy = "write the name of the variable, not the key: `OPENAI_API_KEY`"
        yield ConfigProblem(path, "the value is no name of an environment variable", remedy)
    elif not os.environ.get(variable):
        remedy = "write the name of the variable, and `export` it where the run is started"
        yield ConfigProblem(path, "no environment variable of this name is set", remedy)


def _template_problems(path: str, judge: JudgeConfig, draws: bool) -> Iterator[ConfigProblem]:
    if judge.template is None:
        if judge.score_pattern is not None or judge.score_field is not None:
            message = "the built-in question asks for a line `Score: N`, and the score is looked for elsewhere"
            yield ConfigProblem(path, message, "write a template that asks for what is looked for")
        return
    names = _NAME_IN_BRACES.findall(judge.template)
    for name in dict.fromkeys(names):
        if name not in JUDGE_FIELDS:
            message = f"`{{{name}}}` is nothing that a template can contain"
            yield ConfigProblem(path, message, choose_among(name, JUDGE_FIELDS))
    if draws and "response" in names:
        message = "`{response}` is the text of a response, and this run draws pictures"
        yield ConfigProblem(path, message, "leave it out: the picture comes before the question")
    elif not draws and "response" not in names:
        yield ConfigProblem(path, "the response is not shown to the judge", "write `{response}` where it belongs")


def _pattern_problems(path: str, pattern: str) -> Iterator[ConfigProblem]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield ConfigProblem(path, f"{shown(pattern)} is no regular expression ({error})", "correct it")
        return
    if groups == 0:
        remedy = r"put parentheses around the number: `Score: (\d+)`"
        yield ConfigProblem(path, f"{shown(pattern)} has no group that would be the score", remedy)
