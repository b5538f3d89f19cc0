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
from typing import TYPE_CHECKING

import xxhash

from roll.agentic.base import Unavailable, observation_from
from roll.agentic.endpoint.session import SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS, parser_for
from roll.agentic.episode import ManagerSettings, Observation
from roll.agentic.library.agent import AgentEnv
from roll.agentic.manager import ENVIRONMENT_MANAGERS, EnvManagerFactory
from roll.agentic.registry import ENVIRONMENTS, check_env_type, class_of, make_env
from roll.agentic.tools.base import ToolUnavailable
from roll.agentic.worker import described
from roll.configs import derived
from roll.configs.errors import ConfigProblem, Problems
from roll.configs.plugins import problem
from roll.configs.run import AgenticConfig, CustomEnvConfig
from roll.data.chat import ChatTurns, RawTurns, TemplateRefused, TurnTemplate, require_append_only

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIAL = ({"role": "user", "content": "observation"},)

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
        envs = {tag: [self.config.custom_envs[tag].env_type, self.config.custom_envs[tag].env_config] for tag in shares}
        return xxhash.xxh3_128_hexdigest(json.dumps([list(shares.items()), envs], default=repr).encode())


def plan_agentic(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems
) -> AgenticPlan | None:
    """Resolve environments, managers and template. None without a tokenizer, or after a problem (see ``problems``)."""
    managers: dict[str, EnvManagerFactory] = {}
    for tag, env in config.custom_envs.items():
        problems.found += check_env_type(tag, env.env_type, env.env_config)
        path = f"custom_envs.{tag}.env_manager_cls"
        problems.attempt(_agents_fit, env, path)
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
    if config.template == "raw":
        turns = config.raw_turns
        return RawTurns(tokenizer, turns.message_separator, turns.prompt_end, turns.response_end)
    if not tokenizer.chat_template:
        message = "chat, but the tokenizer has no chat template"
        raise problem("template", message, "set `template: raw`, or take an instruction-tuned model")
    return ChatTurns(tokenizer, config.chat_template_kwargs)


def _template_problems(config: AgenticConfig, template: TurnTemplate) -> Iterator[ConfigProblem]:
    """Render the first observation of each environment with the template, and yield the problems.

    Built-in environments are reset for it; others are represented by a short text.
    """
    for tag, env in config.custom_envs.items():
        try:
            first = _first_observation(env) if env.env_type in ENVIRONMENTS.built_in else Observation(_TRIAL)
            if env.env_manager_cls == "trajectory":
                require_append_only(template, first.messages, first.tools)
            else:
                template.prompt(first.messages, first.tools)
        except TemplateRefused as refused:
            remedy = "change what the environment says (`env_config`), or take another model or template"
            yield ConfigProblem(f"custom_envs.{tag}", str(refused), remedy)
        except ToolUnavailable as missing:
            yield ConfigProblem(f"custom_envs.{tag}.env_config", str(missing), "mend that, or leave the tool out")
        except Unavailable as missing:
            yield ConfigProblem(f"custom_envs.{tag}.env_config", str(missing), "mend that")
        except _TooLate as late:
            yield ConfigProblem(
                f"custom_envs.{tag}.reset_timeout_seconds", str(late), "find what it waits for, or raise it"
            )


class _TooLate(Exception):
    """A reset did not finish within its timeout."""


def _first_observation(env: CustomEnvConfig) -> Observation:
    """Return an environment's first observation. Raises `_TooLate`, `ToolUnavailable`, and `Unavailable` for other
    failures."""
    made = make_env(env.env_type, env.env_config)
    answer: Future[Observation] = Future()

    def reset() -> None:
        try:
            answer.set_result(observation_from(*made.reset(seed=0)))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=reset, name="first reset", daemon=True).start()
    try:
        wait([answer], env.reset_timeout_seconds)
        if not answer.done():
            raise _TooLate(f"the first reset of `{env.env_type}` took longer than {env.reset_timeout_seconds:g} s")
        return answer.result()
    except (_TooLate, ToolUnavailable, Unavailable):
        raise
    except Exception as error:
        raise Unavailable(f"the first reset of `{env.env_type}` failed: {described(error)}") from error
    finally:
        made.close()
