"""What the tests of trainers share."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from roll.configs.schema import TrainingArguments

ALMOST_SGD = TrainingArguments(learning_rate=0.5, adam_epsilon=1.0, max_grad_norm=0.0)
"""With epsilon 1 the first update is -lr g / (|g| + 1): smooth in the gradient, so weights reveal it to rounding."""


def free_ports(count: int) -> list[int]:
    """Different ports, as all are held until the last one is found."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.socket()) for _ in range(count)]
        for server in servers:
            server.bind(("127.0.0.1", 0))
        return [server.getsockname()[1] for server in servers]
