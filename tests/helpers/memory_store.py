"""A store in this process, and its ranks as threads."""

from __future__ import annotations

import threading
from typing import Any

from deepep_rt.comm.store import StoreCommunicator


class Store:
    """What a store does, in this process. `fails`: whoever held it is gone."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.fails = False

    def set(self, key: str, value: bytes) -> None:
        self._look()
        assert len(value) <= 8 << 20, "as TCPStore says it, and drops the client"
        self.held[key] = value

    def get(self, key: str) -> bytes:
        self._look()
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        self._look()
        return all(key in self.held for key in keys)

    def delete_key(self, key: str) -> bool:
        self._look()
        return self.held.pop(key, None) is not None

    def _look(self) -> None:
        if self.fails:
            raise RuntimeError("Connection reset by peer\nwith a long trace")


def on_all(ranks: list[StoreCommunicator], call: Any) -> list[Any]:
    """What a call gives on each rank."""
    found: list[Any] = [None] * len(ranks)

    def run(i: int) -> None:
        found[i] = call(ranks[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found
