"""Permissions of files that count although the tests run as root."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522
_WORDS = ctypes.c_uint32 * 6
"""Twice: effective, permitted, inheritable."""
_OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, in the first word."""
_PR_SET_SECUREBITS = 28
_NO_SETUID_FIXUP = 4
"""access(2) asks for what is effective, not for what root might have."""


@contextmanager
def obeying_permissions() -> Iterator[None]:
    """This thread, and the threads that it starts in the block, can write only where the modes of files and folders let
    them. Linux keeps capabilities by thread; what is not effective can be taken up again. Programs that are started get
    all of them."""
    if os.getuid() != 0:
        yield
        return
    before = _WORDS()
    _capabilities("capget", before)
    _set_secure_bits(_NO_SETUID_FIXUP)
    _capabilities("capset", _WORDS(before[0] & ~_OVERRIDES, *before[1:]))
    try:
        yield
    finally:
        _capabilities("capset", before)
        _set_secure_bits(0)


def _capabilities(name: str, words: ctypes.Array[ctypes.c_uint32]) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    _call(name, ctypes.byref(header), ctypes.byref(words))


def _set_secure_bits(bits: int) -> None:
    _call("prctl", ctypes.c_int(_PR_SET_SECUREBITS), *map(ctypes.c_ulong, (bits, 0, 0, 0)))


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")
