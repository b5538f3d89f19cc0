"""`roll check FILE`: reports if a configuration can work, what it will do, what it needs, and if it fits into memory.

The command starts nothing and needs neither a GPU nor the model. Requirements that only the machine of the run must
meet are listed as needs. With `--exact N` it runs N steps, on the machine of the run, and compares them with a plain
loop.

`roll check-env` tests if an environment is fit for training, `roll check-agent` finds what would go wrong in training
the agents of a configuration. Both play a few episodes in this process, without Ray and without training.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll.check.config import LACKING, check_elsewhere, loaded, read_config
from roll.check.data import has_model
from roll.check.memory import estimate_memory
from roll.check.memory import render as render_memory
from roll.check.plan import Need, missing_packages, needs, plan
from roll.cli.main import BAD_CONFIGURATION, FAILURE, SUCCESS, attempt_run, command_parser, dotted_options, refusal
from roll.configs import derived
from roll.configs.errors import ConfigError, count, nearest_name_hint
from roll.configs.loader import load_config
from roll.configs.plugins import problem
from roll.configs.run import AGENTS, AgenticConfig, PipelineConfig
from roll.tracking.files import say
from roll.tracking.logs import give_away_output
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import describe_error

if TYPE_CHECKING:
    import numpy as np

    from roll.agentic.episode import Policy, SampledTurn

_EPILOG = """\
examples:
  roll check examples/quickstart/rlvr.yaml
  roll check examples/qwen2.5-7B-rlvr_fsdp2/rlvr_config.yaml --gpu-memory 40
  roll check run.yaml actor_train.strategy_args.strategy_config.gradient_checkpointing=true
  roll check run.yaml --exact 3

exit codes: 0 it can work; 2 it cannot, every problem named with a remedy, or what it needs is more than the GPUs have;
1 with --exact: the run failed, or did not compute what the plain loop computes.
"""


def main(arguments: Sequence[str]) -> int:
    """Check the configuration named on the command line; return the exit code."""
    parser = command_parser(
        "check",
        "Say whether a configuration can work, what it will do, what it needs and how much memory.",
        _EPILOG,
        of_run=True,
    )
    parser.add_argument(
        "--gpu-memory", metavar="GIB", help="memory of one GPU in GiB, as the key cluster.device_memory_gib"
    )
    exact_help = "run N steps at ratio 0 and as a plain loop, and name the first tensor that differs"
    parser.add_argument("--exact", metavar="N", type=_steps, help=exact_help)
    options = parser.parse_intermixed_args(arguments)
    gpu_memory = [] if options.gpu_memory is None else [f"cluster.device_memory_gib={options.gpu_memory}"]
    try:
        if options.exact is not None:
            return _exact(options.config, options.overrides, options.exact)
        told: list[str] = []
        try:
            overrides = [*options.overrides, *gpu_memory]
            config = loaded(lambda: read_config(options.config, overrides, told.append), here=False)
        finally:
            print(*told, sep="\n", end="\n\n" if told else "", flush=True)
        missing = check_elsewhere(config, LACKING if told else ())
        lacking = [problem for problem in missing if problem.path in LACKING]
        print(plan(config), flush=True)
        from roll.pipeline.preflight import look_up

        model = Path(derived.model_path(config, config.actor_train))
        look_up(
            config,
            with_model=not missing and has_model(model),  # prompts are looked up with the model only
            without=missing_packages(config),
        )
    except ConfigError as error:
        print(refusal(options.config, error), file=sys.stderr)
        return BAD_CONFIGURATION
    estimate = estimate_memory(config)
    asked_for = [Need(problem.path, f"not in the file: {problem.remedy}", False) for problem in lacking]
    found = [*asked_for, *needs(config, estimate)]
    width = max(len(need.what) for need in found)
    print(f"\n{render_memory(estimate)}\n\nwhat the run needs ([x]: it is here)")
    for need in found:
        print(f"  [{'x' if need.here else ' '}] {need.what:<{width}}  {need.state}")
    if not estimate.misfits:
        return SUCCESS
    gib = config.cluster.device_memory_gib
    print(f"\n{options.config} will not fit into {gib:g} GiB; docs/memory.md says what to change", file=sys.stderr)
    return BAD_CONFIGURATION


def _exact(file: str, overrides: Sequence[str], steps: int) -> int:
    """Run ``steps`` steps at ratio 0, repeat them as a plain loop, and report the first difference.

    Raises `ConfigError`.
    """
    from roll.pipeline.exact import compared_with_plain_loop, exact_config

    config = read_config(file, overrides, print)
    if not isinstance(config, PipelineConfig):
        remedy = "compare a run of `pipeline: rlvr` or `agentic`, or leave `--exact` out"
        raise problem("pipeline", f"{config.pipeline} has no rollouts that a plain loop could repeat", remedy)
    config = exact_config(config, steps)
    ended = attempt_run(file, lambda: config, time.monotonic())
    run = RunDirectory.latest(config.exp_name)
    if ended.exit_code != 0 or run is None:
        return ended.exit_code
    print(f"the same {count(steps, 'step')} as a plain loop ...", flush=True)
    try:
        # In a separate process: output of libraries stays out of the terminal, and its memory is freed at the end.
        setup: dict[str, Any] = {"initializer": give_away_output, "initargs": (run.logs, "plain_loop")}
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **setup) as process:
            try:
                difference = process.submit(compared_with_plain_loop, config, run).result()
            except KeyboardInterrupt:
                for child in active_children():  # the executor would wait for it
                    child.terminate()
                raise
    except Exception as error:
        print(f"the plain loop failed: {describe_error(error)}\nits output: {run.logs}/plain_loop.out", file=sys.stderr)
        return FAILURE
    if difference is None:
        print(f"the run and the plain loop have computed the same in {count(steps, 'step')}, to the last bit")
        return SUCCESS
    print(f"the run and the plain loop differ first in {difference}", file=sys.stderr)
    return FAILURE


def _steps(text: str) -> int:
    steps = int(text) if text.isdecimal() else 0
    if steps < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: write 1 or more")
    return steps


_ENV_EPILOG = """\
examples:
  roll check-env frozen_lake size=8 is_slippery=true
  roll check-env my_package.games:Chess
  roll check-env --config run.yaml lake

exit codes: 0 it passed every check; 1 it did not, and the report says why; 2 there is no such environment, or its
options are wrong.
"""


def check_environment(arguments: Sequence[str]) -> int:
    """Check the environment named on the command line; return the exit code."""
    from roll.agentic.conformance import check_env, render_report

    parser = command_parser(
        "check-env", "Play an environment with odd actions, and look for what would go wrong in training.", _ENV_EPILOG
    )
    parser.add_argument(
        "env", metavar="ENV", help="environment as in `env_type`, or with --config a tag of `custom_envs`"
    )
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="options of the environment, as in `env_config`"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file whose `custom_envs` describe the environment")
    parser.add_argument("--episodes", type=int, default=20, help="episodes played (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--deadline", type=float, default=10.0, help="longest time of one call in seconds (default 10)")
    options = parser.parse_intermixed_args(arguments)
    _refuse_too_small({"--episodes": (options.episodes, 1), "--seed": (options.seed, 0)})
    if not 0 < options.deadline < math.inf:
        raise problem("--deadline", f"{options.deadline:g} s is no time limit", "write a number above 0")
    env_type, env_config = _chosen(options.env, options.config, options.options)
    report = check_env(
        env_type, env_config, episodes=options.episodes, seed=options.seed, deadline_seconds=options.deadline
    )
    print(render_report(report))
    return SUCCESS if report.passed else FAILURE


def _refuse_too_small(numbers: Mapping[str, tuple[int, int]]) -> None:
    """Raise `ConfigError` for the first number below its least value. ``numbers``: option -> number and least value."""
    for name, (number, least) in numbers.items():
        if number < least:
            raise problem(name, f"{number} is too small", f"write {least} or more")


def _chosen(name: str, config: str | None, options: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the type and options of the environment. Raises `ConfigError`."""
    from roll.agentic.registry import check_env_type

    own = dotted_options(options)
    if config is None:
        env_type, env_config = name, own
    else:
        loaded = load_config(config)
        if not isinstance(loaded, AgenticConfig):
            remedy = "name a configuration of `pipeline: agentic`"
            raise problem("pipeline", f"{loaded.pipeline} has no environments", remedy)
        if name not in loaded.custom_envs:
            raise problem("custom_envs", f"there is no tag `{name}`", nearest_name_hint(name, loaded.custom_envs))
        env = loaded.custom_envs[name]
        env_type, env_config = env.env_type, {**env.env_config, **own}
    problems = check_env_type(name, env_type, env_config)
    if problems:
        raise ConfigError(problems)
    if env_type in AGENTS:
        message = "an agent takes no actions that could be tried: it asks a model for them by HTTP"
        raise problem("env_type", message, "play it with `roll check-agent FILE`")
    return env_type, env_config


_AGENT_EPILOG = """\
examples:
  roll check-agent examples/agent-tool-cpu/agent.yaml
  roll check-agent run.yaml --stand-in --episodes 1

The policy is the configured model, loaded here with hf_infer whatever engine the run has. With --stand-in it is none,
but writes a call of a tool or a sentence, so only a tokenizer is needed.
exit codes: 0 each episode came to its end; 1 one failed, and the report says why; 2 the configuration cannot work.
"""


def check_agents(arguments: Sequence[str]) -> int:
    """Play the agents of the configuration named on the command line; return the exit code."""
    parser = command_parser(
        "check-agent",
        "Play a few episodes of a configuration's agents, and say what would go wrong in training.",
        _AGENT_EPILOG,
        of_run=True,
    )
    parser.add_argument("--episodes", type=int, default=4, help="episodes of each agent (default 4)")
    parser.add_argument("--stand-in", action="store_true", help="play with a stand-in for the model")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = loaded(lambda: read_config(options.config, options.overrides, say), here=False)
        if not isinstance(config, AgenticConfig):
            remedy = "name a configuration of `pipeline: agentic`"
            raise problem("pipeline", f"{config.pipeline} has no agents", remedy)
        check_elsewhere(config)
        _refuse_too_small({"--episodes": (options.episodes, 1)})
        return asyncio.run(_rehearsed(config, options.episodes, options.stand_in))
    except ConfigError as error:
        say(refusal(options.config, error), error=True)
        return BAD_CONFIGURATION


async def _rehearsed(config: AgenticConfig, episodes: int, stand_in: bool) -> int:
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
    async with _rehearsing(config, stand_in) as policy:
        for tag, sessions in plan.agents.items():
            settings = sessions(manager_settings(config, tag, config.train_env_manager, arguments))
            reader = TurnReader(plan.template, tokenizer, settings.parser)
            played = await Rehearsal(tag, config.custom_envs[tag], reader, settings).play(seeds, policy)
            say(f"\n{report(tag, played, settings)}")
            failed |= any(each.failure is not None for each in played)
    return FAILURE if failed else SUCCESS


@asynccontextmanager
async def _rehearsing(config: AgenticConfig, stand_in: bool) -> AsyncIterator[Policy | None]:
    """Provide the configured model as a policy; None for a stand-in. Raises `ConfigError` if it cannot be loaded."""
    if stand_in:
        yield None
        return
    import torch

    from roll.engines.local import running_engine, sampled_turn
    from roll.engines.worker import EngineSpec
    from roll.pipeline.rollouts import sampling_params

    role, longest, numbers = config.actor_infer, derived.sequence_length(config), itertools.count()
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
