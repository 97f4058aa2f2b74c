"""Ports for the stores of torch.distributed."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """One that nobody listens on, below those that Linux gives to connections: one of these would soon be taken by another program."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
