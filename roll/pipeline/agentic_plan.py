"""Preflight of an agentic run: its environments, environment managers, and the chat template that renders turns.

Every problem is reported with its path in the configuration.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from roll.agentic.base import ResetAnswer, TextGame, Unavailable, observation_from
from roll.agentic.endpoint.session import SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS, parser_for
from roll.agentic.episode import ManagerSettings, Observation
from roll.agentic.library.agent import AgentEnv
from roll.agentic.library.dialogue import DialogueEnv
from roll.agentic.manager import ENVIRONMENT_MANAGERS, EnvManagerFactory
from roll.agentic.registry import ENVIRONMENTS, check_env_type, class_of, make_env
from roll.agentic.tools.base import CALL_BEGIN, CALL_END, ToolUnavailable
from roll.agentic.tools.environment import ToolEnv, configured_tools, with_tools
from roll.agentic.worker import described
from roll.configs import derived
from roll.configs.errors import ConfigProblem, Problems
from roll.configs.plugins import problem
from roll.configs.run import AgenticConfig, CustomEnvConfig
from roll.data.chat import ChatTurns, RawTurns, TemplateRefused, TurnTemplate, require_append_only

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_CALL = f"{CALL_BEGIN}{{}}{CALL_END}"
"""A turn that no tool and no environment sees, and which a `ToolEnv` answers as it answers calls."""

AgentSessions = Callable[[ManagerSettings], SessionSettings]


@dataclass(frozen=True)
class AgenticPlan:
    """The environment managers of an agentic run, and the template that renders its turns."""

    config: AgenticConfig
    template: TurnTemplate
    managers: dict[str, EnvManagerFactory]
    """Factory of the environment manager, by tag."""
    agents: dict[str, AgentSessions] = field(default_factory=dict)
    """Tag -> function from `ManagerSettings` to session settings, for environments that are agents."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the environments and their shares; see `Prepared.source`."""
        shares = derived.used_tags(self.config, self.config.train_env_manager)
        envs = {tag: _identity(self.config.custom_envs[tag]) for tag in shares}
        return xxhash.xxh3_128_hexdigest(json.dumps([list(shares.items()), envs], default=repr).encode())


def _identity(env: CustomEnvConfig) -> list[Any]:
    return [env.env_type, env.env_config, *([env.tools, env.tool_settings] if env.tools else ())]


def plan_agentic(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems
) -> AgenticPlan | None:
    """Resolve environments, managers and template. None without a tokenizer, or after a problem (see ``problems``)."""
    managers: dict[str, EnvManagerFactory] = {}
    for tag, env in config.custom_envs.items():
        problems.found += check_env_type(tag, env.env_type, env.env_config)
        path = f"custom_envs.{tag}.env_manager_cls"
        problems.attempt(_agents_fit, env, path)
        problems.attempt(_tools_fit, env, f"custom_envs.{tag}.")
        factory = problems.attempt(ENVIRONMENT_MANAGERS.load, env.env_manager_cls, path)
        if factory is not None:
            managers[tag] = factory
    if tokenizer is None:
        return None
    template = problems.attempt(_template, config, tokenizer)
    if template is None or problems.found:
        return None
    problems.found += _template_problems(config, template)
    agents = {
        tag: problems.attempt(_agent_sessions, tag, env, config, tokenizer)
        for tag, env in config.custom_envs.items()
        if env.env_manager_cls == "agent"
    }
    return AgenticPlan(config, template, managers, {tag: each for tag, each in agents.items() if each is not None})


def _agents_fit(env: CustomEnvConfig, path: str) -> None:
    """Require the manager `agent` for classes derived from `AgentEnv`, and forbid it for other imported classes."""
    kind = class_of(env.env_type) if ":" in env.env_type else None
    if kind is None:
        return
    if issubclass(kind, AgentEnv) and env.env_manager_cls != "agent":
        message = f"`{env.env_type}` is an agent, and `{env.env_manager_cls}` conducts no agents"
        raise problem(path, message, f"set `{path}: agent`")
    if env.env_manager_cls == "agent" and not issubclass(kind, AgentEnv):
        message = f"`agent` conducts agents, and `{env.env_type}` is none"
        raise problem(path, message, f"derive it from {AgentEnv.__module__}.{AgentEnv.__name__}, or change the manager")


def _tools_fit(env: CustomEnvConfig, at: str) -> None:
    """Require tools that can be made, around an environment that has room for them."""
    if not env.tools:
        if env.tool_settings:
            raise problem(f"{at}tool_settings", "there are no tools to set", f"name some (`{at}tools`)")
        return
    if env.env_manager_cls == "agent":
        message = f"`{env.env_type}` runs agents, and an agent calls its tools itself"
        raise problem(f"{at}tools", message, "give them to the agent")
    kind = class_of(env.env_type)
    if kind is not None and issubclass(kind, ToolEnv):
        message = f"`{env.env_type}` has tools of its own, and calls would not reach them"
        raise problem(f"{at}tools", message, f"set `{at}env_config.tools` instead")
    seconds = configured_tools(env.tools, env.tool_settings, at)[1].turn_timeout_seconds
    if seconds >= env.step_timeout_seconds:
        message = f"the calls of a turn may take {seconds:g} s, and a step {env.step_timeout_seconds:g} s"
        remedy = f"set it below `{at}step_timeout_seconds`, or raise that"
        raise problem(f"{at}tool_settings.turn_timeout_seconds", message, remedy)


def _agent_sessions(
    tag: str, env: CustomEnvConfig, config: AgenticConfig, tokenizer: PreTrainedTokenizerBase
) -> AgentSessions:
    """Return an agent's session settings except its limits. The tool-call parser is the configured one, or else the one
    that fits the chat template."""
    options = env.env_config
    named = options.get("tool_parser")
    if named is None:
        named = parser_for(tokenizer.get_chat_template()) if config.template == "chat" else "none"
    if named is None:
        message = "it is not known how the chat template writes tool calls"
        remedy = f"name the parser of its calls: {', '.join(PARSERS)} (`none`: calls stay text)"
        raise problem(f"custom_envs.{tag}.env_config.tool_parser", message, remedy)
    return partial(
        SessionSettings,
        parser=PARSERS[named],
        earlier_reasoning=options.get("earlier_reasoning", "keep"),
        untrained_models=frozenset(options.get("untrained_models") or ()),
        ignore_response_format=options.get("ignore_response_format", False),
    )


def _template(config: AgenticConfig, tokenizer: PreTrainedTokenizerBase) -> TurnTemplate:
    refuses = config.on_control_tokens == "refuse"
    if config.template == "raw":
        turns = config.raw_turns
        texts = turns.message_separator, turns.prompt_end, turns.response_end
        return RawTurns(tokenizer, *texts, refuse_control_tokens=refuses)
    if not tokenizer.chat_template:
        message = "chat, but the tokenizer has no chat template"
        raise problem("template", message, "set `template: raw`, or take an instruction-tuned model")
    return ChatTurns(tokenizer, config.chat_template_kwargs, refuse_control_tokens=refuses)


def _template_problems(config: AgenticConfig, template: TurnTemplate) -> Iterator[ConfigProblem]:
    """Try the template on the first observation of each environment, and on an answer of its tools.

    For built-in environments the observation is the real one, for others a plain text.
    """
    for tag, env in config.custom_envs.items():
        at = f"custom_envs.{tag}"
        try:
            trial = _trial(env)
            if env.env_manager_cls == "trajectory":
                require_append_only(template, trial.first.messages, trial.first.tools)
            else:
                template.prompt(trial.first.messages, trial.first.tools)
            if trial.answer is not None:
                _require_tools_written(env, template, trial.first, trial.answer)
        except TemplateRefused as refused:
            remedy = "change what the environment says (`env_config`), or take another model or template"
            yield ConfigProblem(at, str(refused), remedy)
        except ToolUnavailable as missing:
            where = f"{at}.tools" if env.tools else f"{at}.env_config"
            yield ConfigProblem(where, str(missing), "mend that, or leave the tool out")
        except Unavailable as missing:
            yield ConfigProblem(f"{at}.env_config", str(missing), "mend that")
        except _TooLate as late:
            yield ConfigProblem(f"{at}.reset_timeout_seconds", str(late), "find what it waits for, or raise it")
        else:
            if trial.longest is not None and trial.longest > env.max_steps:
                long = f"a dialogue may have {trial.longest} answers, and one that is cut at `max_steps` has no result"
                remedy = f"set it to {trial.longest} or more, or `{at}.env_config.max_turns` to {env.max_steps}"
                yield ConfigProblem(f"{at}.max_steps", long, remedy)


def _require_tools_written(
    env: CustomEnvConfig, template: TurnTemplate, first: Observation, answer: Observation
) -> None:
    """Raise `TemplateRefused` unless the policy would read which tools there are, and what they answer."""
    offered = template.prompt(first.messages, first.tools)
    if first.tools and np.array_equal(offered, template.prompt(first.messages)):
        raise TemplateRefused(
            "the chat template does not write which tools there are (set `describe_in_prompt: true` in the "
            "`tool_settings`, and perhaps `answer_role: user`)"
        )
    if env.env_manager_cls == "trajectory":
        template.begin(first.messages, first.tools).glue(np.zeros(0, dtype=np.int32), answer.messages)
    else:
        template.prompt([*first.messages, {"role": "assistant", "content": _NO_CALL}, *answer.messages], first.tools)


class _TooLate(Exception):
    """A reset did not finish within its timeout."""


class _Anything(TextGame):
    """Stand-in for an environment that is not made before the run."""

    def _begin(self, seed: int | None) -> ResetAnswer:
        return "observation", {}


@dataclass(frozen=True)
class _Trial:
    """Answers of an environment that was tried before the run."""

    first: Observation
    answer: Observation | None
    """What a policy reads that calls a tool; None: there are no tools."""
    longest: int | None
    """Largest number of answers in a dialogue; None: it is none."""


def _trial(env: CustomEnvConfig) -> _Trial:
    """Try an environment. Raises `_TooLate`, `ToolUnavailable`, and `Unavailable` for all else."""
    bare = make_env(env.env_type, env.env_config) if env.env_type in ENVIRONMENTS.built_in else _Anything()
    made = with_tools(bare, env.tools, env.tool_settings)
    done: Future[_Trial] = Future()

    def reset() -> None:
        try:
            first, answer = observation_from(*made.reset(seed=0)), None
            if isinstance(made, ToolEnv):
                text, reward, _, _, info = made.step(_NO_CALL)
                answer = observation_from(text, info, reward=reward)
            done.set_result(_Trial(first, answer, bare.longest if isinstance(bare, DialogueEnv) else None))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=reset, name="first reset", daemon=True).start()
    try:
        wait([done], env.reset_timeout_seconds)
        if not done.done():
            raise _TooLate(f"the first reset of `{env.env_type}` took longer than {env.reset_timeout_seconds:g} s")
        return done.result()
    except (_TooLate, ToolUnavailable, Unavailable):
        raise
    except Exception as error:
        raise Unavailable(f"the first reset of `{env.env_type}` failed: {described(error)}") from error
    finally:
        made.close()
