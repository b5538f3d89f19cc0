"""Ports that are told now and opened later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from roll.runtime.placement import PORTS, free_port

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_it_is_in_the_range_and_can_be_opened():
    for _ in range(50):
        port = free_port()
        with socket.create_server(("127.0.0.1", port)):
            assert port in PORTS


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.create_server(("", free_port())) as taken:  # where no outgoing connection takes it afterwards
        port = taken.getsockname()[1]
        monkeypatch.setattr("roll.runtime.placement.PORTS", [port])
        monkeypatch.setattr("roll.runtime.placement._TRIALS", 1)
        with pytest.raises(OSError, match=f"1 TCP ports from {port} to {port} were tried, and none is free"):
            free_port()
    assert free_port() == port


@pytest.mark.skipif(
    not EPHEMERAL.exists() or EPHEMERAL.read_text().split() != ["32768", "60999"],
    reason="the system's range is not Linux' usual one",
)
def test_no_outgoing_connection_takes_one():
    for _ in range(200):
        with socket.socket() as outgoing:
            outgoing.bind(("127.0.0.1", 0))
            assert outgoing.getsockname()[1] not in PORTS


def test_processes_with_the_same_seed_choose_differently():
    random.seed(0)
    first = [free_port() for _ in range(5)]
    random.seed(0)
    assert [free_port() for _ in range(5)] != first
