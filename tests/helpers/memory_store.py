"""A store in this process, and its ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from deepep_rt.comm.store import StoreCommunicator


class Store:
    """The methods of a store. `fails`: whether the process that held it has ended."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.fails = False

    def set(self, key: str, value: bytes) -> None:
        self._check_alive()
        assert len(value) <= 8 << 20, "a TCPStore drops clients that send more"
        self.held[key] = value

    def get(self, key: str) -> bytes:
        self._check_alive()
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        self._check_alive()
        return all(key in self.held for key in keys)

    def delete_key(self, key: str) -> bool:
        self._check_alive()
        return self.held.pop(key, None) is not None

    def _check_alive(self) -> None:
        if self.fails:
            raise RuntimeError("Connection reset by peer\nwith a long trace")


def make_ranks(num_ranks: int = 3) -> list[StoreCommunicator]:
    """Make the communicators of all ranks over one store."""
    store = Store()
    return [StoreCommunicator(store, "test", rank, num_ranks) for rank in range(num_ranks)]


def on_all(ranks: list[StoreCommunicator], call: Any) -> list[Any]:
    """Run a call on each rank at the same time, and return the results."""
    found: list[Any] = [None] * len(ranks)

    def run(i: int) -> None:
        found[i] = call(ranks[i])

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its exception."""
    try:
        return call()
    except Exception as error:
        return error
