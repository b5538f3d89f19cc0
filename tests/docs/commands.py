"""Judges commands: each is one that exists, with files, sub-commands, flags, targets and keys that exist.

A command that is cheap is really run, by `test_commands.py`. One that takes long stands in `INSTEAD`, with what is done
in its place and why.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from roll.cli.main import COMMANDS
from roll.distribution import NAME
from tests.docs.pages import ROOT, Page

PROGRAMS = ("roll", "python", "make", "pip", "ray", "eval", "pytest", "tensorboard", "export", "source", "kill")
INSTEAD = {
    "roll train": "`roll check` looks up all that a run looks up before it starts; whole runs are in tests/pipeline",
    "roll check-agent": "the file exists; its model is made first, and tests/cli/test_check_agent.py plays agents",
    "roll doctor --gpu": "it takes minutes: tests/doctor/test_gpus.py",
    "roll serve": "it serves until it is ended, and chats by itself: tests/cli/test_serve.py",
    "make": "the target and its variables exist; a target installs packages or takes minutes to hours",
    "python script": "the file and its flags exist; tests/examples and tests/benchmarks run what they do",
    "pip": "the extra or the list of packages exists; tests install nothing",
    "ray": "Ray's own command line reads it; a cluster would outlive the test",
    "pytest": "the files exist; they are run with all tests",
    "tensorboard": "it serves until it is ended",
}
"""Kinds of commands that are not run as they stand: what is done in their place, and why."""

_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|<[^>]+>|\.\.\.|…")
_SUBSTITUTED = re.compile(r"\$\((?P<command>[^()]+)\)")


@dataclass(frozen=True)
class Command:
    """One command of a page, as its words."""

    where: str
    words: tuple[str, ...]
    inline: bool = False
    """Within a sentence: it may have placeholders, and is not run."""

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def program(self) -> str:
        return self.words[0]


def commands_of(page: Page) -> list[Command]:
    """The commands of a page: all lines of blocks that begin with one, and code within sentences that does."""
    found = []
    for block in page.blocks:
        if block.language == "bash" or (block.language == "" and _begins_with_a_program(block.text)):
            for number, line in _logical_lines(block.text):
                found += _parsed(f"{page.name}:{block.line + number}", line)
    for number, code in page.inline:
        if re.match(r"(roll|make|\.venv/bin/\w+|python|pip install|ray|pytest|tensorboard|eval) [\w<.\"'-]", code):
            found += _parsed(f"{page.name}:{number}", code, inline=True)
    return found


def untold(page: Page) -> list[str]:
    """Blocks that neither say what they are nor begin with a program."""
    return [block.where for block in page.blocks if block.language == "" and not _begins_with_a_program(block.text)]


def hidden_commands(page: Page) -> list[str]:
    """Lines that look like commands in blocks that are not taken for such."""
    return [
        f"{block.where}: {line}"
        for block in page.blocks
        if block.language == "text"
        for line in block.text.splitlines()
        if re.match(r"\$ |(roll|make|ray|pip|python|\.venv/bin/\w+) [\w./-]+( |$)", line)
    ]


def problems_of_commands(page: Page, folder: Path) -> list[str]:
    """Commands of a page that cannot be given in ``folder``, where its reader is."""
    made: set[str] = set()
    found = []
    for command in commands_of(page):
        reason = _problem(command, folder, made)
        if reason:
            found.append(f"{command.where}: {command}: {reason}")
    return found


def train_as_check(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The words of `roll check` for a command that trains, `roll check --exact` among them; None for others."""
    if words[:2] == ("roll", "train"):
        tuned = [words.index(option) for option in ("--tune", "--max-lag") if option in words]
        return ("check", *(word for place, word in enumerate(words[2:], 2) if not {place, place - 1} & set(tuned)))
    if words[:2] == ("roll", "check") and "--exact" in words:
        steps = words.index("--exact")
        return (*words[1:steps], *words[steps + 2 :])
    if words[:2] in (("roll", "--config"), ("python", "examples/start_pipeline.py")):
        rest = [word for word in words[1:] if word not in ("examples/start_pipeline.py", "--config")]
        return ("check", *rest)
    return None


def _problem(command: Command, folder: Path, made: set[str]) -> str | None:
    judge = _JUDGES.get(command.program)
    if judge is None:
        return f"`{command.program}` is none of the programs that are checked"
    return judge(command, folder, made)


def _roll(command: Command, folder: Path, made: set[str]) -> str | None:
    words = command.words[1:]
    if not words:
        return None
    if words[0].startswith("-") and words[0] not in ("--config", "--help"):
        return f"there is no flag {words[0]}"
    if not words[0].startswith("-") and not _is_placeholder(words[0]) and words[0] not in COMMANDS:
        return f"there is no command {words[0]}"
    if words[0] == "init" and len(words) > 1:
        made.add(words[1])
    if words[0] in ("train", "check", "check-agent", "--config") and len(words) > 1:
        return _missing(words[1], command, folder, made)
    return None


def _python(command: Command, folder: Path, made: set[str]) -> str | None:
    words = command.words[1:]
    if words[:1] == ("-m",):
        if words[1] in ("pip", "pytest"):
            return _problem(Command(command.where, words[1:], command.inline), folder, made)
        return None if find_spec(words[1]) else f"there is no module {words[1]}"
    if not words:
        return None
    missing = _missing(words[0], command, folder, made)
    if missing or _is_placeholder(words[0]):
        return missing
    known = _flags(folder / words[0])
    for word in words[1:]:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            return f"{words[0]} has no flag {flag}"
    if words[0] == "examples/start_pipeline.py" and "--config" in words:
        return _missing(words[words.index("--config") + 1], command, folder, made)
    return None


def _make(command: Command, folder: Path, made: set[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):(?!=)", text, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) [?:]?=", text, re.MULTILINE))
    for word in command.words[1:]:
        name, equals, _ = word.partition("=")
        if word.startswith("-") or _is_placeholder(word):
            continue
        if name not in (variables if equals else targets):
            return f"the Makefile has no {'variable' if equals else 'target'} {name}"
    return None


def _pip(command: Command, folder: Path, made: set[str]) -> str | None:
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]["optional-dependencies"]
    )
    words = [word for word in command.words[1:] if word not in ("install", "-e", "--editable", "--no-deps")]
    for before, word in zip([""] + words, words, strict=False):
        own = re.fullmatch(rf"(?:{NAME}|\.)\[([\w,-]+)\]", word)
        if own and not set(own[1].split(",")) <= extras:
            return f"there is no extra {own[1]}"
        if before == "-r":
            return _missing(word, command, folder, made)
        if not own and not word.startswith("-") and (reason := foreign_package(word)):
            return reason
    return None


def foreign_package(word: str) -> str | None:
    """Why a package that a text tells to install is none of ours; None if it is."""
    name = re.split(r"[\[<>=!~ ]", word)[0].lower().replace("_", "-")
    if name == "roll":
        return "the package `roll` of the index is somebody else's"
    if name in {NAME, "vllm", "flash-attn", "."} | _required() or (ROOT / word).is_dir() or _is_placeholder(word):
        return None
    return f"{word} is no requirement of ours"


@cache
def _required() -> set[str]:
    """Packages in our lists of requirements."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "requirements").glob("*.txt")]
    lines = [line for text in texts for line in text.splitlines() if re.match(r"[A-Za-z]", line)]
    return {re.split(r"[\[<>=!~ ]", line)[0].lower().replace("_", "-") for line in lines}


def _ray(command: Command, folder: Path, made: set[str]) -> str | None:
    import click

    with warnings.catch_warnings():  # of Ray's own modules
        warnings.simplefilter("ignore")
        from ray.scripts.scripts import cli

    name, arguments = command.words[1], list(command.words[2:])
    found = cli.commands.get(name)
    if found is None:
        return f"ray has no command {name}"
    try:
        found.make_context(name, arguments, resilient_parsing=False)
    except click.UsageError as error:
        return error.format_message()
    return None


def _pytest(command: Command, folder: Path, made: set[str]) -> str | None:
    files = [word for word in command.words[1:] if "/" in word or word.endswith(".py")]
    return next(filter(None, (_missing(file, command, folder, made) for file in files)), None)


def _eval(command: Command, folder: Path, made: set[str]) -> str | None:
    inner = _SUBSTITUTED.search(command.words[1])
    if inner is None:
        return "nothing is evaluated"
    return _problem(Command(command.where, tuple(_words(inner["command"]))), folder, made)


def _nothing(command: Command, folder: Path, made: set[str]) -> str | None:
    return None


_JUDGES: dict[str, Callable[[Command, Path, set[str]], str | None]] = {
    "roll": _roll,
    "python": _python,
    "make": _make,
    "pip": _pip,
    "ray": _ray,
    "pytest": _pytest,
    "eval": _eval,
    "tensorboard": _nothing,
    "export": _nothing,
    "source": _nothing,
    "kill": _nothing,
}


def _missing(name: str, command: Command, folder: Path, made: set[str]) -> str | None:
    """Why a file that is read is not there; a page may have saved it, or a command before may have made it."""
    if name in made or (folder / name).exists() or (command.inline and (_is_placeholder(name) or "/" not in name)):
        return None
    return f"{name} is neither in the repository nor saved by the page"


def _is_placeholder(word: str) -> bool:
    return bool(_PLACEHOLDER.fullmatch(word))


def _begins_with_a_program(text: str) -> bool:
    lines = [line for _, line in _logical_lines(text)]
    words = _words(lines[0]) if lines else []
    return bool(words) and words[0] in PROGRAMS and (len(words) > 1 or words[0] == "roll")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number (from 0) and text of each line, continued ones joined, comments and empty ones left out."""
    start, joined = 0, ""
    for number, line in enumerate(text.splitlines()):
        start = start if joined else number
        joined += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if joined.strip() and not joined.lstrip().startswith("#"):
            yield start, joined
        joined = ""


def _parsed(where: str, line: str, inline: bool = False) -> Iterator[Command]:
    words: list[str] = []
    for word in [*_words(line), "&&"]:
        if word not in ("&&", ";", "|"):
            words.append(word)
            continue
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
            words.pop(0)
        if words:
            yield Command(where, tuple(words), inline)
        words = []


def _words(line: str) -> list[str]:
    """Words of a line; the line as one word, which is no program, where a quote is not closed."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return [line]
    return [word.removeprefix(".venv/bin/") for word in words[:1]] + words[1:]


@cache
def _flags(script: Path) -> set[str]:
    """Flags that a script's argument parser is given."""
    calls = (node for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    found = {"--help"}
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            found |= {word.value for word in call.args if isinstance(word, ast.Constant)}
    return found | ({"--config"} if script.name == "start_pipeline.py" else set())
