"""Hints for a key that is unknown here and known elsewhere, from the tables of all systems but ROLL's.

ROLL's keys have advice of their own (`roll.ADVICE`), since a file of ours is often one of ROLL's that was edited.
"""

from __future__ import annotations

from functools import cache

from roll.configs.dialects import prime_rl, slime, trl, verl
from roll.configs.dialects.rules import Rule

_SYSTEMS = {"verl": verl.RULES, "trl": trl.RULES, "slime": slime.RULES, "prime-rl": prime_rl.RULES}
"""Name after `roll convert --from` -> its table."""
_NAMES = {"verl": verl.ORIGIN, "trl": trl.ORIGIN, "slime": slime.ORIGIN, "prime-rl": prime_rl.ORIGIN}


def foreign_hint(name: str) -> str | None:
    """Return what to write in place of a key of another system; None if no other system has a key of this name."""
    for spelling in dict.fromkeys((name, name.replace("_", "-"))):
        if spelling in _keys():
            system, rule = _keys()[spelling]
            return f"{_NAMES[system]}'s `{spelling}`: {_advice(rule)}"
    if name in _sections():
        system = _sections()[name]
        return f"this is a section of {_NAMES[system]}: `roll convert FILE --from {system}`"
    return None


@cache
def _keys() -> dict[str, tuple[str, Rule]]:
    found: dict[str, tuple[str, Rule]] = {}
    for system, rules in _SYSTEMS.items():
        for pattern, rule in rules.items():
            section, _, name = pattern.rpartition(".")
            telling = not section or any(sign in name for sign in "_-")  # `name` or `mode` alone say nothing
            if "*" not in name and name != "entry" and telling:
                found.setdefault(name, (system, rule))
    return found


@cache
def _sections() -> dict[str, str]:
    first = {
        pattern.partition(".")[0]: system for system, rules in _SYSTEMS.items() for pattern in rules if "." in pattern
    }
    return {name: system for name, system in first.items() if "*" not in name}


def _advice(rule: Rule) -> str:
    if rule.advice or rule.lost:
        return rule.advice or rule.note
    if rule.to is None:
        return f"remove it: {rule.note}"
    if len(rule.values) == 1 and True in rule.values:
        return f"write `{rule.to}: {rule.values[True]}`"
    return f"write `{rule.to}`" + (f"; {rule.note}" if rule.note else "")
