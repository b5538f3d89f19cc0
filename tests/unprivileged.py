"""Processes for which the permissions of files count although the tests run as root."""

from __future__ import annotations

import ctypes
import os

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE = 1
_CAP_DAC_READ_SEARCH = 2

_prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: little is safe after a fork
_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def obey_permissions() -> None:
    """To be called between fork and exec (`preexec_fn`): the new program, and all that it starts, can write only where
    the modes of files and folders let it."""
    if os.getuid() != 0:
        return
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        if _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot give up a capability")
