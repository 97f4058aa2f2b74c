"""Ports for the stores of torch.distributed."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return an unused port below the range that Linux assigns to connections. Another program could soon get a port of that range."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
