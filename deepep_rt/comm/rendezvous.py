"""Where the processes of a Buffer with slots meet: a store that outlives them, and the Buffer's name in it."""

from __future__ import annotations

import itertools
from typing import Any

from .. import _env
from .._checks import argument_error
from ..errors import EPConfigError
from .communicator import Communicator
from .liveness import own_identity
from .membership import Membership, Store
from .store_client import StoreClient

_METHODS = ("set", "get", "check", "delete_key", "add", "compare_set")
_unnamed: dict[str, itertools.count[int]] = {}
"""Counts the Buffers without a name of their own, by store."""


def check_place(place: Any) -> None:
    """Raise EPConfigError unless a Buffer can meet there."""
    if (
        place is None
        or place == "auto"
        or (not isinstance(place, str) and all(callable(getattr(place, m, None)) for m in _METHODS))
    ):
        return
    if isinstance(place, str):
        host, _, port = place.partition("/")[0].rpartition(":")
        if host and port.isdigit():
            return
    expected = '"auto", "host:port", "host:port/name", or a store of torch.distributed'
    raise argument_error(place, "rendezvous", expected, "Pass one of them.", EPConfigError)


class Rendezvous:
    """A store and a name. All processes give it the same arguments.

    Args:
        place: "host:port" or "host:port/name" of `python -m deepep_rt store`; "auto": such a server, which rank 0 starts; or an object with
            the methods of `torch.distributed.Store`.
        comm: The ranks that make the Buffer together. None: this process joins, and needs a place that exists.
        timeout_s: The limit for the connection.

    Raises:
        EPConfigError: if the place is none.
        EPUnavailableError: if the store does not answer.
    """

    def __init__(self, place: Any, comm: Communicator | None, timeout_s: float) -> None:
        check_place(place)
        self.place: Any = place
        """The place, for processes that join."""
        if place in (None, "auto"):
            if comm is None:
                raise EPConfigError('rendezvous="auto"; expected the place of an existing Buffer. Pass its `buffer.rendezvous`.')
            self.place = _start_server(comm)
        name, key = "", "a store of the program"
        if isinstance(self.place, str):
            key, _, name = self.place.partition("/")
            host, _, port = key.rpartition(":")
            self.store: Store = StoreClient(host, int(port), _env.store_token(), timeout_s)
        else:
            self.store = self.place
        if not name:
            name = str(next(_unnamed.setdefault(key, itertools.count())))
            name = name if comm is None else comm.bcast(name)
        if isinstance(self.place, str):
            self.place = f"{key}/{name}"
        self.name = f"deepep_rt/{name}"

    def close(self) -> None:
        """End the connection that this has made."""
        if isinstance(self.store, StoreClient):
            self.store.close()

    def membership(self, num_slots: int, timeout_s: float, settings: str) -> Membership:
        """Make the part of this process in the agreement. If it ends, others hear of it from the store, if that tells."""
        made = Membership(self.store, self.name, num_slots, timeout_s, settings)
        self.introduce(made)
        return made

    def introduce(self, membership: Membership) -> None:
        """Tell the others under which name they can watch this process."""
        membership.tell(own_identity())
        if (will := getattr(self.store, "will", None)) is not None:
            will(f"{self.name}/gone/{membership.process}", "its process has ended")


def _start_server(comm: Communicator) -> str:
    """Start a server in a process of its own, which ends after its last client. Collective."""
    from .store_server import start_in_background

    found: tuple[str, int] | str = ""
    if comm.Get_rank() == 0:
        try:
            found = start_in_background(_env.store_token())
        except Exception as error:
            comm.bcast(str(error))
            raise
    found = comm.bcast(found)
    if isinstance(found, str):
        raise EPConfigError(f'rendezvous="auto": rank 0 could not start a store: {found}')
    return f"{found[0]}:{found[1]}"
