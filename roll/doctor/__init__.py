"""`roll doctor`: who waits for whom in a run, and what became of it. With ``--gpu``: whether the paths that need GPUs
work on this machine."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Examine a run, or this machine; return the exit code. Of a machine nothing is imported that needs its GPUs."""
    if "--gpu" in arguments:
        from roll.doctor import gpus

        return gpus.main(arguments)
    from roll.doctor import diagnosis

    return diagnosis.main(arguments)
