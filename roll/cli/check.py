"""`roll check FILE`: can this configuration work, what will it do, what does it need, and will it fit?

The command starts nothing and needs neither a GPU nor the model. Requirements that only the machine of the run must
meet are listed as needs. Exit code 0: the configuration can work. 2: it cannot, and every problem is named with a
remedy; or it does not fit into memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from roll.check.config import check_elsewhere
from roll.check.memory import estimate_memory
from roll.check.memory import render as render_memory
from roll.check.needs import Need, missing_packages, needs
from roll.check.plan import plan, render
from roll.configs import derived
from roll.configs.errors import ConfigError, count
from roll.configs.loader import load_config
from roll.configs.run import PipelineConfig

FITS, BAD_CONFIGURATION = 0, 2

_EPILOG = """\
examples:
  roll check examples/quickstart/rlvr.yaml
  roll check examples/qwen2.5-7B-rlvr_fsdp2/rlvr_config.yaml --gpu-memory 40
  roll check run.yaml actor_train.strategy_args.strategy_config.gradient_checkpointing=true

exit codes: 0 it can work; 2 it cannot, every problem named with a remedy, or what it needs is more than the GPUs have.
"""


def main(arguments: Sequence[str]) -> int:
    """Check the configuration named on the command line; return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, [*options.overrides, *_gpu_memory(options.gpu_memory)])
        missing = check_elsewhere(config)
        print(render(plan(config)), flush=True)
        _look_up(config, with_model=not missing and _model_is_here(config))
    except ConfigError as error:
        problems = count(len(error.problems), "problem")
        print("\n\n".join([f"{options.config} cannot run ({problems})", *map(str, error.problems)]), file=sys.stderr)
        return BAD_CONFIGURATION
    estimate = estimate_memory(config)
    print(f"\n{render_memory(estimate)}\n\n{_render_needs(needs(config, estimate))}")
    if not estimate.misfits:
        return FITS
    gib = config.cluster.device_memory_gib
    print(f"\n{options.config} will not fit into {gib:g} GiB; docs/memory.md says what to change", file=sys.stderr)
    return BAD_CONFIGURATION


def _parser() -> argparse.ArgumentParser:
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
    return parser


def _gpu_memory(gib: str | None) -> list[str]:
    return [] if gib is None else [f"cluster.device_memory_gib={gib}"]


def _model_is_here(config: PipelineConfig) -> bool:
    return (Path(derived.model_path(config, config.actor_train)) / "config.json").is_file()


def _look_up(config: PipelineConfig, *, with_model: bool) -> None:
    """Look up everything that the configuration names: algorithms, engine options, environments, verifiers.

    Prompts are included only with the model. Raises `ConfigError`.
    """
    from roll.pipeline.preflight import look_up

    look_up(config, with_model=with_model, without=missing_packages(config))


def _render_needs(found: Sequence[Need]) -> str:
    width = max(len(need.what) for need in found)
    lines = [f"  [{'x' if need.here else ' '}] {need.what:<{width}}  {need.state}" for need in found]
    return "\n".join(["what the run needs ([x]: it is here)", *lines])
