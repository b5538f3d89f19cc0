"""Preflight of the agentic pipeline: its environments, their managers, and a template that can write turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from roll.agentic.env.base import observation_from
from roll.agentic.env.registry import BUILT_IN, check_env_type, make_env
from roll.agentic.env_manager.registry import EnvManagerFactory, manager_factory
from roll.agentic.episode import Observation
from roll.agentic.tools.base import ToolUnavailable
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.schema import AgenticConfig, CustomEnvConfig, PipelineConfig
from roll.data.chat_turns import ChatTurns, RawTurns, TemplateRefused, TurnTemplate, require_append_only

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.pipeline.agentic import AgenticSide
    from roll.pipeline.preflight import Prepared, Problems
    from roll.pipeline.rollout_side import RunDevices
    from roll.tracking.run_directory import RunDirectory

_TRIAL = ({"role": "user", "content": "observation"},)


@dataclass(frozen=True)
class AgenticPlan:
    """The `RolloutPlan` of the agentic pipeline."""

    template: TurnTemplate
    managers: dict[str, EnvManagerFactory]
    """Factory of the environment manager, by tag."""

    def fingerprint(self, config: PipelineConfig) -> str:
        """Implement `RolloutPlan.fingerprint`."""
        config = derived.agentic(config)
        shares = derived.used_tags(config, config.train_env_manager)
        envs = {tag: [config.custom_envs[tag].env_type, config.custom_envs[tag].env_config] for tag in shares}
        return xxhash.xxh3_128_hexdigest(json.dumps([list(shares.items()), envs], default=repr).encode())

    def build(
        self, prepared: Prepared, run: RunDirectory, on_event: Callable[[str], None], devices: RunDevices
    ) -> AgenticSide:
        """Implement `RolloutPlan.build`."""
        from roll.pipeline.agentic import AgenticSide

        return AgenticSide(prepared, self, str(run.logs.absolute()), on_event)


def plan_agentic(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems
) -> AgenticPlan | None:
    """Look up the named environments, managers and template; what is wrong goes into ``problems``."""
    managers: dict[str, EnvManagerFactory] = {}
    for tag, env in config.custom_envs.items():
        problems.found += check_env_type(tag, env.env_type, env.env_config)
        path = f"custom_envs.{tag}.env_manager_cls"
        factory = problems.attempt(partial(manager_factory, env.env_manager_cls, path))
        if factory is not None:
            managers[tag] = factory
    if tokenizer is None:
        return None
    template = problems.attempt(lambda: _template(config, tokenizer))
    if template is None or problems.found:
        return None
    problems.found += _template_problems(config, template)
    return AgenticPlan(template, managers)


def _template(config: AgenticConfig, tokenizer: PreTrainedTokenizerBase) -> TurnTemplate:
    if config.template == "raw":
        turns = config.raw_turns
        return RawTurns(tokenizer, turns.message_separator, turns.prompt_end, turns.response_end)
    if not tokenizer.chat_template:
        message = "chat, but the tokenizer has no chat template"
        remedy = "set `template: raw`, or take an instruction-tuned model"
        raise ConfigError([ConfigProblem("template", message, remedy)])
    return ChatTurns(tokenizer, config.chat_template_kwargs)


def _template_problems(config: AgenticConfig, template: TurnTemplate) -> Iterator[ConfigProblem]:
    """Try the template on the first observation of each environment.

    For built-in environments it is the real one, for others a plain text.
    """
    for tag, env in config.custom_envs.items():
        try:
            first = _first_observation(env) if env.env_type in BUILT_IN else Observation(_TRIAL)
            if env.env_manager_cls == "trajectory":
                require_append_only(template, first.messages, first.tools)
            else:
                template.prompt(first.messages, first.tools)
        except TemplateRefused as refused:
            remedy = "change what the environment says (`env_config`), or take another model or template"
            yield ConfigProblem(f"custom_envs.{tag}", str(refused), remedy)
        except ToolUnavailable as missing:
            yield ConfigProblem(f"custom_envs.{tag}.env_config", str(missing), "mend that, or leave the tool out")


def _first_observation(env: CustomEnvConfig) -> Observation:
    made = make_env(env.env_type, env.env_config)
    try:
        return observation_from(*made.reset(seed=0))
    finally:
        made.close()
