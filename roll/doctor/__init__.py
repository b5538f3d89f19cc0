"""`roll doctor`: explains the state of a run. With ``--gpu`` it tests the code paths that need GPUs on this machine."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Examine a run, or with ``--gpu`` this machine; return the exit code."""
    if "--gpu" in arguments:
        from roll.doctor import gpus

        return gpus.main(arguments)
    from roll.doctor import diagnosis

    return diagnosis.main(arguments)
