"""Ports for the servers of tests."""

import random
import socket
from pathlib import Path

LOWEST = 10_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port on which nothing listens, from below those that the kernel gives to clients.

    A port of the kernel's own range can become a client's before the server listens on it.
    """
    clients_from = int(RANGE.read_text().split()[0])
    while True:
        port = random.randrange(LOWEST, max(clients_from, LOWEST + 1000))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
