"""TCP ports for processes that meet later.

A port is chosen now, told to others, and opened seconds or minutes afterwards. From the range that systems give to
outgoing connections (on Linux 32768 to 60999, unless set otherwise) any connection could take it in between, and the
run would end with "address already in use". So it comes from below, above the ports that Ray gives to its workers
(10002 to 19999) and below those that Kubernetes gives to services (30000 to 32767).
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

PORTS = range(20000, 30000)
_TRIALS = 100


def free_port() -> int:
    """A TCP port that is free on all interfaces of this host, from `PORTS`."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As `free_port`, ``count`` different ones. ``OSError`` if none is found."""
    chance = random.SystemRandom()  # processes that were seeded alike must not choose alike
    with ExitStack() as stack:
        return [_bound(stack.enter_context(socket.socket()), chance) for _ in range(count)]


def _bound(probe: socket.socket, chance: random.Random) -> int:
    """All probes are held until the last one is bound, so that no port is found twice."""
    for port in chance.sample(PORTS, _TRIALS):
        try:
            probe.bind(("", port))
        except OSError:
            continue
        return port
    raise OSError(f"{_TRIALS} TCP ports from {PORTS[0]} to {PORTS[-1]} were tried, and none is free")
