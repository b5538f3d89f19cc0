"""The commands of `roll`. Their modules are imported when called, so that each command answers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """A command of `roll`."""

    usage: str
    """Argument shown after the command's name."""
    help: str
    module: str | None
    """Module with ``main(arguments) -> exit code``; None: the command that trains."""


COMMANDS = {
    "train": Command("FILE", "run the training that a file describes; `roll --config FILE` is the same", None),
    "check": Command("FILE", "can it work, what does it need, how much memory; starts nothing", "roll.pipeline.check"),
    "init": Command("FILE", "write a configuration from a few answers", "roll.pipeline.init"),
    "check-env": Command("ENV", "is this environment fit to be trained in", "roll.pipeline.check_env"),
    "doctor": Command("RUN", "who waits for whom in a run, and what became of it", "roll.pipeline.doctor.command"),
    "report": Command("RUN", "a run as one page, to be opened in a browser", "roll.tracking.report.command"),
    "completion": Command("SHELL", "completion of commands, files and keys", "roll.pipeline.completion"),
}


def other_command(name: str) -> Callable[[Sequence[str]], int] | None:
    """Return the entry point of a command that does not train; None if ``name`` is no such command."""
    command = COMMANDS.get(name)
    if command is None or command.module is None:
        return None
    return import_module(command.module).main
