"""The command line: check everything, say what will happen, run, and end with an exit code that can be trusted.

0: the run reached its last step. 2: the configuration cannot work (said before Ray or a model starts, without a
traceback). 1: anything else, the cause in one line and its traceback in the run's log.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from roll.configs.checks import check_config
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.loader import dump_config, load_config
from roll.configs.plan import plan, render
from roll.configs.schema import RLVRConfig

SUCCESS, FAILURE, BAD_CONFIGURATION = 0, 1, 2

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `examples/start_pipeline.py` and of the console command `roll`."""
    started = time.monotonic()
    options = _parser().parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        check_config(config)
        print(render(plan(config)), flush=True)
        from roll.pipeline.preflight import prepare

        prepared = prepare(config)
        run = _create_run_directory(config)
    except ConfigError as error:
        print(f"{options.config}: the configuration cannot work\n{error}", file=sys.stderr)
        return BAD_CONFIGURATION
    return _run(prepared, run, started)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a language model by reinforcement learning, as a YAML file describes it.",
        epilog="Example: --config examples/quickstart/rlvr.yaml max_steps=20 actor_train.training_args.learning_rate=1e-4",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file; keys: docs/configuration.md")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted keys that replace values of the file"
    )
    return parser


def _create_run_directory(config: RLVRConfig):  # noqa: ANN202 - the class is imported late, to answer quickly
    from roll.tracking.run_directory import RunDirectory

    try:
        run = RunDirectory.create(config.output_dir, config.exp_name)
    except (OSError, ValueError) as error:
        path = "output_dir" if config.output_dir is not None else "exp_name"
        raise ConfigError([ConfigProblem(path, str(error), "name a new or empty folder that can be written")]) from error
    run.write_config(dump_config(config))
    return run


def _run(prepared, run, started: float) -> int:  # noqa: ANN001 - as above
    from roll.distributed.placement import RaySession, local_cpu_slots
    from roll.pipeline.recorder import RunRecorder
    from roll.pipeline.rlvr import run_rlvr
    from roll.tracking.logs import configure_logging

    configure_logging(run.logs, "driver", console=True)
    recorder = RunRecorder(prepared.config, run, started=started)
    cluster = prepared.config.cluster
    try:
        with RaySession(cluster, local_cpus=local_cpu_slots(cluster)):
            _interrupt_on_terminate()
            asyncio.run(run_rlvr(prepared, recorder))
    except KeyboardInterrupt:
        status = recorder.close("interrupted", "interrupted by a signal")
    except Exception as error:
        logger.info("the run failed", exc_info=error)
        status = recorder.close("failed", error)
    else:
        status = recorder.close("success")
    print(f"files and logs of the run: {run.root}", flush=True)
    return SUCCESS if status == "success" else FAILURE


def _interrupt_on_terminate() -> None:
    """Let SIGTERM end a run in the same orderly way as Ctrl-C (Ray has put a handler of its own in place)."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))


if __name__ == "__main__":
    sys.exit(main())
