"""Data embedded in a page: JSON that no text of a model can break out of."""

from __future__ import annotations

import json
from typing import Any

_UNSAFE = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def embedded(data: Any) -> str:
    """Return compact JSON for the inside of a `<script>` element.

    The characters with which markup could begin or end become JSON escapes. The text therefore holds no ``</script>``
    and no ``<!--``, and parses to exactly the same data. Numbers are written so that they read back to the same bits.
    Raises `ValueError` for a number that is not finite.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)
