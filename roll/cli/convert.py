"""`roll convert FILE --from SYSTEM`: translates another system's configuration or command line into a file of ours.

Nothing of the other system is run or imported. A key whose meaning differs here gets a comment. Settings that are lost,
have no effect here or are missing are listed at the end of the file, and printed.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from roll.check.config import LACKING, check_elsewhere, leave_out_without_effect
from roll.cli.main import FAILURE, SUCCESS, command_parser
from roll.configs.dialects import SYSTEMS, roll, trl
from roll.configs.dialects.rules import Path as Key
from roll.configs.dialects.rules import Translation, nested, rule_of
from roll.configs.dialects.sources import STRAY, is_computed, read_keys
from roll.configs.errors import ConfigError, problems_of
from roll.configs.fields import kind_at
from roll.configs.loader import config_from_tree, dump_yaml
from roll.configs.plugins import problem
from roll.configs.run import AgenticConfig, RLVRConfig, RunConfig
from roll.tracking.files import say

WIDTH = 120

ORIGINS: dict[str, Callable[[Mapping[Key, Any]], Translation]] = {
    "roll": lambda given: roll.translate(nested(given)),
    **{name: system.translate for name, system in SYSTEMS.items()},
}
"""Name of a system -> function that translates its keys."""

_EPILOG = """\
examples:
  roll convert agentic.yaml --from roll -o ours.yaml
  roll convert run_qwen3-8b.sh --from verl
  roll convert grpo.py --from trl
  roll convert rl.toml --from prime-rl

FILE is YAML, TOML, a Python script (its literal arguments), or anything else: a shell script, or a command in a file.
It is read, never run. Then: roll check ours.yaml

exit codes: 0 written; 2 FILE cannot be read, nothing in it is a key of that system, or its trainer is none of those
that are read; 1 OUT cannot be written.
"""


def main(arguments: Sequence[str]) -> int:
    """Convert the file named on the command line; return the exit code."""
    parser = command_parser(
        "convert",
        "Write another system's configuration as one of ours, with a comment at each changed meaning.",
        _EPILOG,
    )
    parser.add_argument("file", metavar="FILE", help="configuration or command line of the other system")
    parser.add_argument("--from", dest="origin", required=True, choices=list(ORIGINS), help="the other system")
    parser.add_argument("-o", dest="out", metavar="OUT", help="file to write, which must not exist; default: print")
    options = parser.parse_args(arguments)
    done = converted(read_text(options.file), options.file, options.origin)
    if options.out is None:
        say(written(done, options.file))
        return SUCCESS
    try:
        with Path(options.out).open("x", encoding="utf-8") as file:
            file.write(written(done, options.file) + "\n")
    except OSError as error:
        say(f"cannot write {options.out}: {error.strerror or error}", error=True)
        return FAILURE
    say("\n".join([f"{options.out}: {len(done.values)} keys from {options.file}", *_summary(done)]))
    return SUCCESS


def read_text(name: str) -> str:
    """Return the text of a file. Raises `ConfigError` if it cannot be read."""
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as cause:
        raise problem(name, f"cannot be read: {cause}", "give the path of a text file") from cause


def converted(text: str, source: str, origin: str) -> Translation:
    """Return the translation of a text; ``source`` is its file name. Raises `ConfigError`."""
    given = read_keys(text, source)
    strays = given.pop(STRAY, [])
    telling = trl.COMPUTED if origin == "trl" else ()
    plain = {
        key: str(value) if is_computed(value) else value
        for key, value in given.items()
        if key[0] in telling or not is_computed(value)
    }
    if not any(_is_known(key, origin) for key in given):
        remedy = f"give a configuration of {origin}, or another `--from`"
        raise problem(source, f"has no key of {origin} that can be read", remedy)
    done = ORIGINS[origin](plain)
    if done.problems and origin == "trl" and done.problems[0].path in str(given.get(("entry",))).split():
        raise ConfigError(done.problems[:1])
    for words in strays:
        done.lost.append(f"{words}: words of the command line that are neither `key=value` nor of a flag")
    for key, value in given.items():
        if key not in plain:
            done.lose(".".join(key), value, "the script computes it: write it by hand")
    done.values = {key: value for key, value in done.values.items() if value is not None}
    for name in sorted({name for value in done.values.values() for name in _variables(value)} - os.environ.keys()):
        done.lack(f"variable {name}", "set it before `roll` runs, or write its value")
    for each in done.problems:
        done.lack(each.path, each.message)
    inert: dict[str, str] = {}
    config: RunConfig | None = None
    try:
        config = config_from_tree(done.tree())
        inert = leave_out_without_effect(config)
    except ConfigError as error:
        config = error.rest
        for each in error.problems if origin == "roll" else ():  # unknown keys of ROLL are still in the file
            done.lack(each.path, each.message)
    named = {line.partition(":")[0] for line in done.missing}
    for each in problems_of(partial(check_elsewhere, config)) if config is not None else ():
        if each.path in LACKING and each.path not in named:
            done.lack(each.path, each.message)  # `roll check` names what else is wrong
    for path, sentence in inert.items():
        for key in [key for key in done.values if ".".join(key) == path or ".".join(key).startswith(f"{path}.")]:
            del done.values[key]
            done.without_effect.append(sentence)
    return done


def _is_known(key: Key, origin: str) -> bool:
    """Return True for a key of that system. ``entry``, the program that a command starts, does not count."""
    if origin == "roll":
        kinds = (kind_at(config, key) for config in (RLVRConfig, AgenticConfig))
        return key[-1] in roll.ADVICE or rule_of(key, roll.RULES) is not None or any(kind is not None for kind in kinds)
    return key != ("entry",) and rule_of(key, SYSTEMS[origin].RULES) is not None


def _variables(value: Any) -> list[str]:
    """Return the environment variables that a value refers to."""
    return re.findall(r"\$\{oc\.env:(\w+)\}", str(value))


def written(done: Translation, source: str) -> str:
    """Return the YAML of a translation, with its comments."""
    head = [f"# {source}, a configuration of {done.origin}, as `roll convert` reads it."]
    if done.missing:
        head.append("# `roll check` will ask for what is listed as missing at the end.")
    return "\n".join([*head, *_lines(done.tree(), done.notes, ()), *_comments(_summary(done))])


def _lines(tree: Mapping[str, Any], notes: Mapping[Key, str], parts: Key) -> list[str]:
    lines: list[str] = []
    indent = "  " * len(parts)
    for key, value in tree.items():
        path = (*parts, key)
        if isinstance(value, dict) and value:
            lines += [f"{indent}{dump_yaml({key: 0}).partition(':')[0]}:", *_lines(value, notes, path)]
            continue
        plain = textwrap.indent(dump_yaml({key: value}).rstrip("\n"), indent)
        note = " ".join(notes[path].split()) if path in notes else None
        if note is not None and "\n" not in plain and len(plain) + len(note) + 4 <= WIDTH:
            plain += f"  # {note}"
        elif note is not None:
            lines += _wrapped(note, f"{indent}# ")
        lines.append(plain)
    return lines


def _summary(done: Translation) -> list[str]:
    lines: list[str] = []
    for title, sentences in (
        ("missing: to be added by hand", done.missing),
        ("lost: not here", done.lost),
        ("without effect here, and left out", done.without_effect),
    ):
        if sentences:
            lines += ["", title, *(f"  {sentence}" for sentence in dict.fromkeys(sentences))]
    return lines


def _comments(lines: Sequence[str]) -> list[str]:
    return [each for line in lines for each in (_wrapped(line, "# ") if line else [""])]


def _wrapped(text: str, prefix: str) -> list[str]:
    """Return a text as comment lines. Its line breaks become spaces, so that all of it stays in the comment."""
    flat = " ".join(text.split()) if not text.startswith("  ") else "  " + " ".join(text.split())
    return textwrap.wrap(flat, WIDTH, initial_indent=prefix, subsequent_indent=prefix + "    ", break_on_hyphens=False)
