"""Free TCP ports for processes that connect later.

A port is chosen now, sent to other processes, and opened seconds or minutes later. In between, an outgoing connection
could take a port from the range that the system uses for them (on Linux 32768 to 60999 by default), and the run would
fail with "address already in use". The port therefore comes from below that range, above the ports that Ray gives to
its workers (10002 to 19999) and below those that Kubernetes gives to services (30000 to 32767).
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

PORTS = range(20000, 30000)
_TRIALS = 100


def free_port() -> int:
    """Return a TCP port from `PORTS` that is free on all interfaces of this host."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return ``count`` different free ports, like `free_port`. ``OSError`` if none is found."""
    chance = random.SystemRandom()  # equally seeded processes must not choose the same ports
    with ExitStack() as stack:
        return [_bound(stack.enter_context(socket.socket()), chance) for _ in range(count)]


def _bound(probe: socket.socket, chance: random.Random) -> int:
    """Bind the probe to a free port. All probes stay bound until the last one is, so that no port is found twice."""
    for port in chance.sample(PORTS, _TRIALS):
        try:
            probe.bind(("", port))
        except OSError:
            continue
        return port
    raise OSError(f"{_TRIALS} TCP ports from {PORTS[0]} to {PORTS[-1]} were tried, and none is free")
