"""Hints with the nearest valid name, for messages about data sets, domains and verifiers."""

from __future__ import annotations

from collections.abc import Iterable

from roll.configs.wording import nearest


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean `x`?`` if a known name is similar, else the list of the known names (at most twelve)."""
    known = sorted(known)
    near = nearest(name, known)
    if near is not None:
        return f"did you mean `{near}`?"
    shown = ", ".join(f"`{each}`" for each in known[:12])
    more = f" and {len(known) - 12} more" if len(known) > 12 else ""
    return f"known: {shown}{more}" if known else "there is none to choose from"
