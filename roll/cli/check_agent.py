"""`roll check-agent FILE`: what would go wrong if the agents of a configuration were trained?

A few episodes of each agent are played in this process, without Ray and without training.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from roll.check.config import check_elsewhere, loaded, read_config
from roll.cli.main import refusal
from roll.configs import derived
from roll.configs.errors import ConfigError
from roll.configs.plugins import problem
from roll.configs.run import AgenticConfig
from roll.tracking.files import say

if TYPE_CHECKING:
    import numpy as np

    from roll.agentic.episode import Policy, SampledTurn

PASSED, FAILED, BAD_CONFIGURATION = 0, 1, 2
_EPILOG = """\
examples:
  roll check-agent examples/agent-tool-cpu/agent.yaml
  roll check-agent run.yaml --stand-in --episodes 1

The policy is the configured model, loaded here with hf_infer whatever engine the run has. With --stand-in it is none,
but writes a call of a tool or a sentence, so only a tokenizer is needed.
exit codes: 0 each episode came to its end; 1 one failed, and the report says why; 2 the configuration cannot work.
"""


def main(arguments: Sequence[str]) -> int:
    """Play the agents of the configuration named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="roll check-agent",
        description="Play a few episodes of a configuration's agents, and say what would go wrong in training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="FILE", help="YAML file; keys: docs/configuration.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that replace values of the file")
    parser.add_argument("--episodes", type=int, default=4, help="episodes of each agent (default 4)")
    parser.add_argument("--stand-in", action="store_true", help="play with a stand-in for the model")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = loaded(lambda: read_config(options.config, options.overrides, say), here=False)
        if not isinstance(config, AgenticConfig):
            remedy = "name a configuration of `pipeline: agentic`"
            raise problem("pipeline", f"{config.pipeline} has no agents", remedy)
        check_elsewhere(config)
        if options.episodes < 1:
            raise problem("--episodes", f"{options.episodes} episodes show nothing", "play at least one")
        return asyncio.run(_played(config, options.episodes, options.stand_in))
    except ConfigError as error:
        say(refusal(options.config, error), error=True)
        return BAD_CONFIGURATION
    except KeyboardInterrupt:
        say("interrupted", error=True)
        return FAILED


async def _played(config: AgenticConfig, episodes: int, stand_in: bool) -> int:
    from roll.agentic.endpoint.turns import TurnReader
    from roll.agentic.rehearsal import Rehearsal, report
    from roll.pipeline.agentic import TRAINING, environment_seed, manager_settings
    from roll.pipeline.preflight import agentic_plan

    tokenizer, plan = agentic_plan(config)
    if not plan.agents:
        remedy = "set `env_type: agent` and `env_manager_cls: agent` of one; others are checked by `roll check-env`"
        raise problem("custom_envs", "no environment is an agent", remedy)
    arguments = config.actor_infer.generating_args
    seeds = [environment_seed(config, TRAINING, number) for number in range(episodes)]
    failed = False
    who = "a stand-in" if stand_in else derived.model_path(config, config.actor_infer)
    say(f"the policy is {who}")
    async with _policy(config, stand_in) as policy:
        for tag, sessions in plan.agents.items():
            settings = sessions(manager_settings(config, tag, config.train_env_manager, arguments))
            reader = TurnReader(plan.template, tokenizer, settings.parser)
            played = await Rehearsal(tag, config.custom_envs[tag], reader, settings).play(seeds, policy)
            say(f"\n{report(tag, played, settings)}")
            failed |= any(each.failure is not None for each in played)
    return FAILED if failed else PASSED


@asynccontextmanager
async def _policy(config: AgenticConfig, stand_in: bool) -> AsyncIterator[Policy | None]:
    """Give the configured model as a policy; None for a stand-in. Raises `ConfigError` if it cannot be loaded."""
    if stand_in:
        yield None
        return
    import torch

    from roll.engines.local import running_engine, sampled_turn
    from roll.engines.worker import EngineSpec
    from roll.pipeline.rollouts import sampling_params

    role, longest, numbers = config.actor_infer, derived.sequence_length(config), count()
    model, usual = role.model_args, sampling_params(role.generating_args, longest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = derived.model_path(config, role)
    spec = EngineSpec("hf_infer", {}, path, model.dtype, "sdpa", model.trust_remote_code, longest)
    async with running_engine(spec, cast(Any, device), "pretrain") as engine:

        async def policy(
            prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
        ) -> SampledTurn:
            seed, stops = config.seed + next(numbers), usual.stop_strings + stop_strings
            sampling = replace(usual, max_new_tokens=max_new_tokens, seed=seed, stop_strings=stops)
            return await sampled_turn(engine, prompt_token_ids, sampling)

        yield policy
