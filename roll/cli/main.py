"""The command line: checks everything, prints what will happen, runs, and returns a reliable exit code.

Modules of other commands are imported only when called, so that each command starts quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.check.config import check_config, loaded, read_config
from roll.check.plan import plan
from roll.configs.errors import ConfigError, ConfigProblem, choose_among, count
from roll.configs.loader import dump_config, parse_yaml
from roll.configs.run import RunConfig
from roll.distribution import version
from roll.runtime.process import freeze_at_exit
from roll.tracking.files import printed, say
from roll.tracking.run_directory import RunDirectory, RunExists, RunUnusable
from roll.tracking.status import DriverWatch, StatusFile
from roll.tracking.summary import describe_error, fail_unfinished

if TYPE_CHECKING:
    from roll.pipeline.preflight import Prepared, PreparedSFT
    from roll.pipeline.recorder import FinalStatus, RunRecorder
    from roll.pipeline.resume import Restarts, ResumePoint


@dataclass(frozen=True)
class Command:
    """A command of `roll`."""

    usage: str
    """Argument shown after the command's name."""
    help: str
    entry: str = ""
    """Import path of a function that takes the arguments and returns the exit code; empty for `train`."""


COMMANDS = {
    "train": Command("FILE", "run the training that a file describes; `roll --config FILE` is the same"),
    "check": Command("FILE", "can it work, what does it need, how much memory; starts nothing", "roll.cli.check:main"),
    "simulate": Command(
        "FILE", "how long would a step take, who would wait, what would it cost", "roll.cli.simulate:main"
    ),
    "advise": Command(
        "RUN|FILE",
        "what holds a run up, and which changes would help; the best settings of a file",
        "roll.cli.advise:main",
    ),
    "init": Command("FILE", "write a configuration from a few answers", "roll.cli.init:main"),
    "convert": Command("FILE", "another system's configuration as one of ours", "roll.cli.convert:main"),
    "check-env": Command("ENV", "is this environment fit to be trained in", "roll.cli.check:check_environment"),
    "check-agent": Command("FILE", "what would go wrong if these agents were trained", "roll.cli.check:check_agents"),
    "serve": Command(
        "MODEL", "a finished model, at an address for OpenAI's and Anthropic's clients", "roll.cli.serve:main"
    ),
    "chat": Command("MODEL", "talk to a finished model", "roll.cli.chat:main"),
    "doctor": Command("RUN", "who waits for whom in a run, and what became of it", "roll.doctor:main"),
    "report": Command("RUN", "a run as one page, to be opened in a browser", "roll.report.page:main"),
    "completion": Command("SHELL", "completion of commands, files and keys", "roll.cli.completion:main"),
}


SUCCESS, FAILURE, BAD_CONFIGURATION = 0, 1, 2
DRIVER = "driver"
LAST_WORDS_SECONDS = 10.0
"""Maximum seconds for the last messages of a process before it is killed; writing may hang on the disk."""

_COMMANDS = "\n".join(f"  roll {f'{name} {command.usage}':<18}  {command.help}" for name, command in COMMANDS.items())
_EPILOG = f"""\
commands:
{_COMMANDS}
  roll --version

examples:
  roll train examples/quickstart/rlvr.yaml
  roll check examples/qwen2.5-7B-rlvr_fsdp2/rlvr_config.yaml --gpu-memory 40
  roll simulate examples/qwen2.5-7B-rlvr_fsdp2/rlvr_config.yaml --sweep ratio=0,1,2
  roll advise output/quickstart/latest
  roll convert run_qwen3-8b.sh --from verl -o run.yaml
  roll check-env frozen_lake size=8
  roll check-agent examples/agent-tool-cpu/agent.yaml
  roll serve output/quickstart/latest
  roll chat output/quickstart/latest
  roll doctor output/quickstart/latest
  roll report output/quickstart/latest
  roll train run.yaml --tune 4 --max-lag 1
  roll train run.yaml max_steps=20 actor_train.training_args.learning_rate=1e-4 'rewards.math.tag_included=[gsm8k]'

The configuration is checked as a whole and its arithmetic printed before anything starts.
exit codes: 0 the run reached its last step; 2 the configuration cannot work, every problem named with a remedy;
1 anything else, the cause in one line and its traceback in the run's log.
"""

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `roll` or `examples/start_pipeline.py`; return the exit code."""
    started = time.monotonic()
    atexit.unregister(freeze_at_exit)  # from an earlier call
    atexit.register(freeze_at_exit)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is not None and command.entry:
        try:
            return printed(partial(resolve_name(command.entry), arguments[1:]))
        except ConfigError as error:
            say("\n\n".join(map(str, error.problems)), error=True)
            return BAD_CONFIGURATION
        except KeyboardInterrupt:
            say("interrupted", error=True)
            return FAILURE
    if arguments == ["--version"]:
        say(f"roll {version()}")
        return SUCCESS
    if (wrong := _no_command(arguments)) is not None:
        say(wrong, error=True)
        return BAD_CONFIGURATION
    parser = _parser(arguments)
    options = parser.parse_intermixed_args(arguments)
    if options.max_lag is not None and options.tune is None:
        parser.error("--max-lag belongs to --tune")
    if options.tune is not None:
        from roll.cli.tune import tune

        return tune(options)
    load = partial(read_config, options.config, options.overrides, say)
    return run_to_its_end(options.config, load, started).exit_code


@dataclass(frozen=True)
class Ended:
    """The outcome of an attempt to run."""

    exit_code: int
    failed: tuple[RunConfig, RunDirectory] | None = None
    """Configuration and folder of a run that failed after it had begun and was not interrupted."""
    restarts: Restarts | None = None
    """Counter of its failures, if it has failed."""
    refused: bool = False
    """True if nothing was started, for a reason that may be temporary."""
    run: RunDirectory | None = None
    """Folder of the run; None if nothing was started."""
    problems: Sequence[ConfigProblem] = ()
    """Reasons why the configuration was refused."""


def run_to_its_end(
    path: str,
    load: Callable[[], RunConfig],
    started: float,
    begins: Callable[[RunDirectory], object] = lambda run: None,
) -> Ended:
    """Run the configuration that ``load`` returns, with the restarts that it allows.

    ``path``: name of the configuration in messages. ``begins`` is called with the folder of the run before it starts.
    Returns how the first attempt ended, with the exit code of the last one.
    """
    ended = attempt_run(path, load, started, begins=begins)
    if ended.failed is None:
        return ended

    def attempt(config: RunConfig) -> Ended:
        return attempt_run(path, lambda: config, time.monotonic(), ended.restarts)

    again = begin_again(*ended.failed, attempt, ended.restarts)
    return replace(ended, exit_code=again)


def begin_again(
    config: RunConfig,
    run: RunDirectory,
    attempt: Callable[[RunConfig], Ended],
    restarts: Restarts | None = None,
) -> int:
    """Retry a failed run from its newest checkpoint, as often as its configuration allows; return the exit code.

    An attempt that is refused (because a cluster, a judge or a disk is still unavailable) counts as a failure.
    ``restarts``: the failures so far.
    """
    from roll.pipeline.resume import Restarts

    restarts = restarts or Restarts()
    while (again := restarts.after_failure(config, run)) is not None:
        config, words = again
        try:
            end_in_order_on_signals()
            say(words)
            time.sleep(config.restarts.delay_seconds)
        except KeyboardInterrupt:
            say("interrupted before it began again", error=True)
            return FAILURE
        ended = attempt(config)
        if ended.failed is not None:
            config, run = ended.failed
        elif not ended.refused:
            return ended.exit_code
    return FAILURE


def attempt_run(
    path: str,
    load: Callable[[], RunConfig],
    started: float,
    restarts: Restarts | None = None,
    begins: Callable[[RunDirectory], object] = lambda run: None,
) -> Ended:
    """Check the configuration that ``load`` returns and run it to its end.

    ``restarts``: the failures of earlier attempts. ``path`` and ``begins``: see `run_to_its_end`.
    """
    try:
        prepared, run, point = _check(load)
    except ConfigError as error:
        say(refusal(path, error, "; nothing was started"), error=True)
        return Ended(BAD_CONFIGURATION, refused=True, problems=error.problems)
    except (KeyboardInterrupt, SystemExit) as error:
        say(f"ended while the configuration was checked: {error!r}; nothing was started", error=True)
        return Ended(FAILURE)
    if point is not None and _has_ended(point, prepared.config):
        return Ended(SUCCESS, run=run)
    from roll.pipeline.resume import Restarts, look_again, take_out_of_the_way

    restarts = restarts or Restarts()
    try:
        with run.held():
            begins(run)
            if point is not None:
                point = look_again(point, prepared.config, prepared.source)
                if _has_ended(point, prepared.config):
                    return Ended(SUCCESS, run=run)
                try:
                    take_out_of_the_way(point, prepared.config.max_ckpt_to_keep)
                except (OSError, ValueError) as error:
                    raise RunUnusable(f"the run in {run.root} cannot go on: {error}") from error
            watch = DriverWatch(prepared.config.stall_timeout_seconds)
            with StatusFile(run.status, watch, _interrupt, partial(end_process, run)) as status:
                outcome = _run(prepared, run, status, point, started, restarts)
    except ConfigError as error:  # another process changed the run in the meantime
        say(refusal(path, error, "; nothing was started"), error=True)
        return Ended(BAD_CONFIGURATION, refused=True, problems=error.problems)
    except (RunExists, RunUnusable) as error:
        say(str(error), error=True)
        return Ended(FAILURE, refused=isinstance(error, RunUnusable))
    if outcome == "success":
        return Ended(SUCCESS, run=run)
    return Ended(FAILURE, (prepared.config, run) if outcome == "failed" else None, restarts, run=run)


def _no_command(arguments: Sequence[str]) -> str | None:
    """Return an error message for a command line without a command or an option; None if it has one."""
    if not arguments:
        return f"no command given\n\ncommands:\n{_COMMANDS}\n\nroll --help says more"
    first = arguments[0]
    if first in COMMANDS or first.startswith("-") or "=" in first:
        return None
    if first.endswith((".yaml", ".yml")):
        return f"`{first}` is no command; to train as it says: roll train {first}"
    return f"`{first}` is no command; {choose_among(first, COMMANDS)}"


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for `roll train FILE`, or for `roll --config FILE`, which means the same."""
    trains, keys = arguments[:1] == ["train"], "[key=value ...] [--tune N [--max-lag N]]"
    parser = argparse.ArgumentParser(
        prog="roll",
        usage=f"roll train FILE {keys}" if trains else f"roll COMMAND ... | roll --config FILE {keys}",
        description="Train a language model, by reinforcement learning or supervised, as a YAML file describes it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if trains:
        parser.add_argument("command", choices=["train"], help="run the training that FILE describes")
        parser.add_argument("config", metavar="FILE", help="YAML file; keys: docs/configuration.md")
    else:
        parser.add_argument("--config", required=True, metavar="FILE", help="YAML file; keys: docs/configuration.md")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="dotted keys that replace values of the file"
    )
    tune_help = "first make up to N short probes, and keep what makes a step shorter without changing what is learned"
    parser.add_argument("--tune", type=int, metavar="N", help=tune_help)
    lag_help = "with --tune: also try other ratios, with which tokens are up to N versions old"
    parser.add_argument("--max-lag", type=int, metavar="N", help=lag_help)
    return parser


def command_parser(name: str, description: str, epilog: str = "", *, of_run: bool = False) -> argparse.ArgumentParser:
    """Return the parser of `roll NAME`. With ``of_run`` it takes a configuration file and overrides."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"roll {name}", description=description, epilog=epilog, formatter_class=raw)
    if of_run:
        overrides_help = "dotted keys that replace values of the file"
        parser.add_argument("config", metavar="FILE", help="YAML file; keys: docs/configuration.md")
        parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides_help)
    return parser


def dotted_options(given: Sequence[str], what: str = "option") -> dict[str, Any]:
    """Return options written as `key=value`, the values in YAML. Raises `ConfigError` for others; ``what``: their noun
    in messages."""
    wrong = [ConfigProblem(each, f"is no {what}", "write `key=value`") for each in given if "=" not in each]
    if wrong:
        raise ConfigError(wrong)
    for each in given:
        key, _, value = each.partition("=")
        parse_yaml(value, f"command line, {key}")
    try:
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(list(given))))  # never a list
    except OmegaConfBaseException as error:
        raise ConfigError([ConfigProblem("command line", str(error).split("\n")[0], "correct the value")]) from error


def _check(load: Callable[[], RunConfig]) -> tuple[Prepared | PreparedSFT, RunDirectory, ResumePoint | None]:
    """Check everything that can be known before Ray or a model starts. Raises `ConfigError`."""
    gc.disable()  # scanning the objects of imports again and again takes a fifth of the time
    try:
        config = check_config(loaded(load))
        say(plan(config))
        from roll.pipeline.preflight import prepare
        from roll.pipeline.resume import find_resume_point

        prepared = prepare(config)
        point = find_resume_point(prepared.config, prepared.source)
        return prepared, _create_run_directory(prepared.config) if point is None else point.run, point
    finally:
        gc.enable()


def refusal(path: str, error: ConfigError, effect: str = "") -> str:
    """Return the message about a configuration that cannot run: a line that ends with ``effect``, then each problem."""
    problems = count(len(error.problems), "problem")
    return "\n\n".join([f"{path} cannot run ({problems}){effect}", *map(str, error.problems)])


def _create_run_directory(config: RunConfig) -> RunDirectory:
    try:
        run = RunDirectory.create(config.output_dir, config.exp_name)
    except (OSError, ValueError) as error:
        path = "output_dir" if config.output_dir is not None else "exp_name"
        message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        remedy = "name a new or empty folder that can be written"
        raise ConfigError([ConfigProblem(path, message, remedy)]) from error
    run.write_config(dump_config(config))
    return run


def _has_ended(point: ResumePoint, config: RunConfig) -> bool:
    """Return True, and print it, if the run has no steps left."""
    if not point.has_ended(config.max_steps):
        return False
    say("\n".join([*point.notes, f"the run in {point.run.root} has all its {config.max_steps} steps"]))
    return True


def _run(
    prepared: Prepared | PreparedSFT,
    run: RunDirectory,
    status_file: StatusFile,
    point: ResumePoint | None,
    started: float,
    restarts: Restarts,
) -> FinalStatus:
    from roll.tracking.logs import configure_logging, native_output_kept

    config = prepared.config
    with ExitStack() as stack:
        try:
            stack.enter_context(native_output_kept(run.logs, DRIVER))
            from roll.pipeline.main import run_pipeline
            from roll.pipeline.preflight import Prepared
            from roll.pipeline.recorder import RunRecorder
            from roll.pipeline.sft import run_sft
            from roll.runtime.placement import ray_session

            configure_logging(run.logs, DRIVER, console=True)
            after_step = None if point is None else point.last_record
            recorder = RunRecorder(config, run, started=started, decoder=prepared.tokenizer, after_step=after_step)
        except OSError as error:
            raise RunUnusable(f"cannot write to {run.root}: {error}") from error
        if point is not None:
            recorder.event("\n".join([f"the run goes on after step {point.step}", *point.notes]))
        try:
            with ray_session(config.cluster, link=run.logs / "ray"):
                end_in_order_on_signals()
                if isinstance(prepared, Prepared):
                    running = run_pipeline(prepared, recorder, status_file, point, restarts)
                else:
                    running = run_sft(prepared, recorder, status_file, point)
                outcome = asyncio.run(to_its_end(running, recorder, status_file))
        except (KeyboardInterrupt, Exception) as error:
            outcome = _outcome(error, status_file)
        status_file.ending()
        status = recorder.close(*outcome)
        say(f"files and logs of the run: {run.root}")
        if status == "interrupted":
            say(how_to_go_on(run))
        return status


def how_to_go_on(run: RunDirectory) -> str:
    """Return the advice on resuming an interrupted run, given its undamaged checkpoints."""
    from roll.pipeline.checkpoints import newest_whole

    again = f"the same command with resume_from_checkpoint={run.root}"
    newest, damages = newest_whole(run.checkpoints)
    if newest is not None:
        return f"to go on after step {newest.step}: {again}"
    if damages:
        return "no checkpoint is whole: begin a new run in another folder"
    return f"no checkpoint was saved (`save_steps`): {again} begins again there"


async def to_its_end(
    run: Awaitable[None], recorder: RunRecorder, status_file: StatusFile
) -> tuple[FinalStatus, BaseException | str | None]:
    """Await the run; return its final status and the cause.

    A failure is recorded before the event loop is closed, because closing waits for threads and one of them may hang.
    The run has a task of its own: in Python 3.11 a failed task group leaves its owner marked as cancelled, and here
    that mark must mean only that the run was interrupted.
    """
    running = asyncio.ensure_future(run)
    try:
        await running
    except (asyncio.CancelledError, Exception) as error:
        task = asyncio.current_task()
        outcome = _outcome(error, status_file, interrupted=task is not None and task.cancelling() > 0)
        recorder.ended(*outcome)
        return outcome
    finally:
        status_file.ending()
    return "success", None


def _outcome(
    error: BaseException, status_file: StatusFile, interrupted: bool = False
) -> tuple[FinalStatus, BaseException | str]:
    """Return the final status and its cause. ``interrupted``: a signal came before the error was raised."""
    stuck = status_file.stuck_because
    if isinstance(error, Exception):
        logger.info("the run failed", exc_info=error)
        if interrupted and stuck is None:
            return "interrupted", f"interrupted by a signal; then {describe_error(error)}"
        return "failed", error
    if stuck is None:
        return "interrupted", "interrupted by a signal"
    logger.error("%s; the run is ended", stuck)
    return "failed", stuck


def end_process(run: RunDirectory, reason: str) -> None:
    """Kill this process, whatever its threads do. This is the last resort. Worker processes end with it."""

    def last_words() -> None:
        say(f"{reason}; the process is ended", error=True)
        fail_unfinished(run.summary, reason)
        logger.error("%s; the process is ended", reason)

    words = threading.Thread(target=last_words, daemon=True)
    words.start()
    words.join(LAST_WORDS_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt() -> None:
    """Send SIGINT, as Ctrl-C does.

    The first one asks the event loop to end; a stuck loop does not react. The second one is raised in the code that is
    stuck. Native code reacts to neither and ends with the process.
    """
    os.kill(os.getpid(), signal.SIGINT)


def end_in_order_on_signals() -> None:
    """Make SIGTERM end a run in the same orderly way as Ctrl-C, in place of Ray's handler.

    Background jobs of a shell ignore SIGINT by default. It is handled here, since it was sent on purpose.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))


if __name__ == "__main__":
    sys.exit(main())
