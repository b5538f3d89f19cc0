"""Translation of the configuration keys of other systems.

Each system has one module: a table of its keys, and functions for settings that follow from several keys. With them the
loader reads files in ROLL's dialect, `roll convert` translates files, and messages about unknown keys name ours.

Several systems share key names; the full path of a key and the keys below it decide which system is meant. ROLL's keys
have advice of their own (`roll.ADVICE`), since many files of ours are edited ROLL files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

from roll.configs.dialects import prime_rl, roll, slime, trl, verl
from roll.configs.dialects.rules import Path, Rule, leaves, rule_of

SYSTEMS = {"verl": verl, "trl": trl, "slime": slime, "prime-rl": prime_rl}
"""Name of a system in `roll convert --from` -> its module. ROLL is not among them."""


def foreign_hint(path: Sequence[Any], value: Any = None) -> str | None:
    """Return the remedy for a key or section of another system; None if no other system has it."""
    parts = tuple(part for each in path for part in str(each).split("."))
    found = [*leaves(value, parts)] if isinstance(value, Mapping) and value else [(parts, value)]
    keys = [key for key, _ in found]
    owners = [system for system in SYSTEMS if len(parts) == 1 and parts[0] in _sections(system)]
    if owners:
        fits = {system: sum(rule_of(key, SYSTEMS[system].RULES) is not None for key in keys) for system in owners}
        best = [system for system in owners if fits[system] == max(fits.values())]
        names, commands = (
            " or ".join(SYSTEMS[each].ORIGIN for each in best),
            " or ".join(f"`--from {each}`" for each in best),
        )
        command = f"`roll convert FILE --from {best[0]}`" if len(best) == 1 else f"`roll convert FILE` with {commands}"
        return f"this is a section of {names}: {command}"
    hits = [hit for key in dict.fromkeys([parts, *keys]) for hit in _hits(key)]
    if not hits:
        return None
    _, _, name, system, rule = max(hits, key=lambda hit: hit[:2])
    return f"{SYSTEMS[system].ORIGIN}'s `{name}`: {_advice(rule)}"


def spelling_hint(path: Sequence[Any], value: Any) -> str | None:
    """Return the remedy for a value in ROLL's spelling; None for any other value."""
    found = rule_of(tuple(map(str, path)), roll.RULES)
    if found is None or found[1].to != "=" or not isinstance(value, str):
        return None
    ours = found[1].values.get(value)
    return None if ours is None else f"write `{ours}`, as ROLL's `{value}` is called here"


def _hits(key: Path) -> Iterator[tuple[int, bool, str, str, Rule]]:
    """Yield each key of another system that ends in the same parts as ``key``.

    Each hit is the number of equal parts, True if the value goes into the same role, the equal parts as text, the
    system and the rule. One equal part is enough only if the name is distinctive.
    """
    for pattern, name, telling, system, rule in _patterns():
        both = zip(reversed(key), reversed(pattern), strict=False)
        near = len([*takewhile(lambda pair: pair[0].replace("-", "_") == pair[1], both)])
        if near > 1 or (near == 1 and telling):
            end = ".".join(name.split(".")[-near:])
            yield near, rule.to is not None and rule.to.split(".")[0] == key[0], end, system, rule


@cache
def _patterns() -> list[tuple[Path, str, bool, str, Rule]]:
    found = []
    for system, module in SYSTEMS.items():
        for pattern, rule in module.RULES.items():
            section, _, name = pattern.rpartition(".")
            if "*" not in name and name != "entry":
                telling = not section or any(sign in name for sign in "_-")
                found.append((tuple(pattern.replace("-", "_").split(".")), pattern, telling, system, rule))
    return found


@cache
def _sections(system: str) -> set[str]:
    first = {pattern.partition(".")[0] for pattern in SYSTEMS[system].RULES if "." in pattern}
    return {name for name in first if "*" not in name}


def _advice(rule: Rule) -> str:
    if rule.advice or rule.lost:
        return rule.advice or rule.note
    if rule.to is None:
        return f"remove it: {rule.note}"
    if len(rule.values) == 1 and True in rule.values:
        return f"write `{rule.to}: {rule.values[True]}`"
    return f"write `{rule.to}`" + (f"; {rule.note}" if rule.note else "")
