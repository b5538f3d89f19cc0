"""Wording of messages: how they format values and suggest names; secrets are masked here too.

A key is secret by its name. Its value appears in no message and in no saved configuration.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(r"secret|passw(or)?d|api_?key|credential|(^|[_-])token$", re.IGNORECASE)
_LONGEST_SHOWN = 80


def is_secret(name: str) -> bool:
    """Return True if a key's name marks its value as a secret (``hf_token``, ``api_key``; not ``max_new_tokens``).

    ``api_key_env`` is not secret: it only names the variable that holds the key.
    """
    return _SECRET_NAME.search(name) is not None and name != "api_key_env"


def masked(tree: Any) -> Any:
    """Return a copy of a plain tree with the values of secret keys replaced."""
    if isinstance(tree, dict):
        return {
            key: MASK if is_secret(key) and value is not None and not isinstance(value, bool) else masked(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [masked(value) for value in tree]
    return tree


def shown(value: Any, name: str = "") -> str:
    """Format a value for a message: like YAML flow style, shortened, masked if its key ``name`` is secret."""
    if is_secret(name) and value is not None:
        return MASK
    text = json.dumps(masked(value), ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to ``name``; None if none is similar."""
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def choose_among(name: str, known: Iterable[str]) -> str:
    """Return the remedy for a wrong name: the nearest known name, and all of them."""
    names = list(known)
    match = nearest(name, names)
    guess = f"did you mean `{match}`? " if match else ""
    return f"{guess}known: {', '.join(f'`{item}`' for item in names)}"


def count(number: int, word: str) -> str:
    """Format a number with its noun: ``1 sample``, ``2 samples``, ``2 batches``."""
    plural = word + ("es" if word.endswith(("s", "sh", "ch")) else "s")
    return f"{number:,} {word if number == 1 else plural}"
