"""`roll check-env`: is this environment fit to be trained in?

Exit code 0: it passed every check. 1: it did not, and the report says why. 2: there is no such environment, or its
options are wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from omegaconf import OmegaConf

from roll.agentic.conformance import check_env, render_report
from roll.agentic.registry import check_env_type
from roll.configs.errors import ConfigError, ConfigProblem, nearest_name_hint
from roll.configs.loader import load_config
from roll.configs.run import AgenticConfig

PASSED, FAILED, BAD_CONFIGURATION = 0, 1, 2

_EPILOG = """\
examples:
  roll check-env frozen_lake size=8 is_slippery=true
  roll check-env my_package.games:Chess
  roll check-env --config run.yaml lake
"""


def main(arguments: Sequence[str]) -> int:
    """Check the environment named on the command line; return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll check-env",
        description="Play an environment with odd actions, and look for what would go wrong in training.",
        epilog=_EPILOG,
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
    return parser


def _chosen(name: str, config: str | None, options: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the type and options of the environment. Raises `ConfigError`."""
    own = _options(options)
    if config is None:
        env_type, env_config = name, own
    else:
        loaded = load_config(config)
        if not isinstance(loaded, AgenticConfig):
            remedy = "name a configuration of `pipeline: agentic`"
            raise ConfigError([ConfigProblem("pipeline", f"{loaded.pipeline} has no environments", remedy)])
        if name not in loaded.custom_envs:
            remedy = nearest_name_hint(name, loaded.custom_envs)
            raise ConfigError([ConfigProblem("custom_envs", f"there is no tag `{name}`", remedy)])
        env = loaded.custom_envs[name]
        env_type, env_config = env.env_type, {**env.env_config, **own}
    problems = check_env_type(name, env_type, env_config)
    if problems:
        raise ConfigError(problems)
    return env_type, env_config


def _options(options: Sequence[str]) -> dict[str, Any]:
    wrong = [option for option in options if "=" not in option]
    if wrong:
        raise ConfigError([ConfigProblem(each, "is no option", "write `key=value`") for each in wrong])
    given = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(list(options))))  # never a list
    return dict(given)
