"""`roll check FILE`: can this configuration work, what will it do, what does it need, and will it fit?

The command starts nothing and needs neither a GPU nor the model. Requirements that only the machine of the run must
meet are listed as needs. With `--exact N` it runs N steps against a plain loop, on the machine of the run.

`roll check-env`: is this environment fit to be trained in?
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from roll.check.config import LACKING, check_elsewhere, loaded, read_config
from roll.check.data import has_model
from roll.check.memory import estimate_memory
from roll.check.memory import render as render_memory
from roll.check.plan import Need, missing_packages, needs, plan
from roll.cli.main import attempt_run, refusal
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem, count, nearest_name_hint
from roll.configs.loader import load_config
from roll.configs.plugins import problem
from roll.configs.run import AGENTS, AgenticConfig, PipelineConfig
from roll.tracking.logs import give_away_output
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import describe_error

PASSED, FAILED, BAD_CONFIGURATION = 0, 1, 2

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
    parser = argparse.ArgumentParser(
        prog="roll check",
        description="Say whether a configuration can work, what it will do, what it needs and how much memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="FILE", help="YAML file; keys: docs/configuration.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that replace values of the file")
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
        return PASSED
    gib = config.cluster.device_memory_gib
    print(f"\n{options.config} will not fit into {gib:g} GiB; docs/memory.md says what to change", file=sys.stderr)
    return BAD_CONFIGURATION


def _exact(file: str, overrides: Sequence[str], steps: int) -> int:
    """Run ``steps`` steps at ratio 0, repeat them as a plain loop, and say in what they differ first.

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
        # A process of its own: libraries write what they like there, and its memory ends with it.
        setup: dict[str, Any] = {"initializer": give_away_output, "initargs": (run.logs, "plain_loop")}
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **setup) as process:
            try:
                difference = process.submit(compared_with_plain_loop, config, run).result()
            except KeyboardInterrupt:
                for child in active_children():  # the executor would wait for it
                    child.terminate()
                raise
    except KeyboardInterrupt:  # a second one may come while the executor shuts down
        print("interrupted", file=sys.stderr)
        return FAILED
    except Exception as error:
        print(f"the plain loop failed: {describe_error(error)}\nits output: {run.logs}/plain_loop.out", file=sys.stderr)
        return FAILED
    if difference is None:
        print(f"the run and the plain loop have computed the same in {count(steps, 'step')}, to the last bit")
        return PASSED
    print(f"the run and the plain loop differ first in {difference}", file=sys.stderr)
    return FAILED


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

    parser = argparse.ArgumentParser(
        prog="roll check-env",
        description="Play an environment with odd actions, and look for what would go wrong in training.",
        epilog=_ENV_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    try:
        env_type, env_config = _chosen(options.env, options.config, options.options)
    except ConfigError as error:
        print("\n\n".join(map(str, error.problems)), file=sys.stderr)
        return BAD_CONFIGURATION
    report = check_env(
        env_type, env_config, episodes=options.episodes, seed=options.seed, deadline_seconds=options.deadline
    )
    print(render_report(report))
    return PASSED if report.passed else FAILED


def _chosen(name: str, config: str | None, options: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the type and options of the environment. Raises `ConfigError`."""
    from roll.agentic.registry import check_env_type

    wrong = [option for option in options if "=" not in option]
    if wrong:
        raise ConfigError([ConfigProblem(each, "is no option", "write `key=value`") for each in wrong])
    own = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(list(options))))  # never a list
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
