"""The command line in this process, and what it loads; as a script, in a process that has done nothing else."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass

ENGINES = {"ray", "vllm", "sglang", "deepspeed", "megatron", "reasoning_gym", "accelerate", "peft"}
"""What takes seconds to load, and what nobody needs to see that a key is wrong."""


@dataclass
class Finished:
    exit_code: int
    stdout: str
    stderr: str
    loaded: list[str]
    """Of torch and the engines, what the process had imported by then."""


def run_here(arguments: Sequence[str]) -> Finished:
    """The command with these arguments."""
    from roll.cli.main import main

    said, complained = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(complained):
        try:
            exit_code = main(list(arguments))
        except SystemExit as end:
            exit_code = end.code
    loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", *ENGINES}
    return Finished(exit_code, said.getvalue(), complained.getvalue(), sorted(loaded))


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    json.dump({name: asdict(run_here(arguments)) for name, arguments in commands.items()}, sys.stdout)
