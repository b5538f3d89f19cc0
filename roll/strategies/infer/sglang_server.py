"""The process of SGLang's server: reads its arguments as JSON from standard input and serves until its owner has ended.

It is started as ``python -m``, so that SGLang's own processes, which begin by importing this module, find it again.
"""

from __future__ import annotations

import json
import sys

from roll.strategies.infer.mapped_memory import end_with


def main() -> None:
    """Serve. Returns only when the server ends."""
    orders = json.load(sys.stdin)
    # SGLang's processes end with this one by themselves.
    end_with(orders["owner"])
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(**orders["arguments"])
    from sglang.launch_server import run_server

    run_server(arguments)


if __name__ == "__main__":
    main()
