"""The choice of the transport between the nodes of a Buffer: NVSHMEM, or a relay over MPI."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import _env
from ..comm.communicator import Communicator
from ..comm.timed_collectives import host_identity
from ..errors import EPUnavailableError
from ..network import Choice, NetworkOptions
from .nics import list_nics, nvshmem_objection

_log = logging.getLogger("deepep_rt")

_RELAY_REMEDY = "Start the program with mpirun, pass an mpi4py communicator, and let mpi4py start MPI with MPI_THREAD_MULTIPLE"
_warned: set[str] = set()


class RankFacts(NamedTuple):
    """What a rank finds on its host.

    Attributes:
        host: Identity of the host, which begins with its name.
        no_nic: The reason why NVSHMEM cannot send through a NIC; empty if it can.
        no_relay: The reason why a relay cannot send over the communicator; empty if it can.
        wish: The setting by which the user chose a transport of NVSHMEM; empty if there is none.
    """

    host: str
    no_nic: str
    no_relay: str
    wish: str = ""


def choose_transport(transport: str, facts: Sequence[RankFacts]) -> Choice:
    """Choose the transport. All ranks get the same result from the same facts.

    Between the GPUs of one host, NVSHMEM needs no NIC.

    Args:
        transport: `NetworkOptions.transport`.
        facts: Those of each rank.

    Returns:
        "nvshmem" or "mpi", with the reason.

    Raises:
        EPUnavailableError: if the requested transport, or with "auto" any transport, cannot work.
    """
    is_one_host, wish = len({fact.host for fact in facts}) == 1, _first(facts, "wish")
    no_nic = "" if is_one_host or wish else _first(facts, "no_nic")
    no_relay = _first(facts, "no_relay")
    if transport == "nvshmem":
        if no_nic:
            raise EPUnavailableError(
                f"transport='nvshmem', but {no_nic}; expected a NIC that NVSHMEM can use on every host. Pass transport='mpi', or name "
                f"NVSHMEM's own transport with nvshmem_remote_transport."
            )
        return Choice("nvshmem", "transport='nvshmem' was passed")
    if transport == "mpi":
        if no_relay:
            raise EPUnavailableError(f"transport='mpi', but {no_relay}; expected MPI for the relay. {_RELAY_REMEDY}.")
        return Choice("mpi", "transport='mpi' was passed")
    if not no_nic:
        found = "all ranks are on one host" if is_one_host else "every host has a NIC that NVSHMEM can use"
        return Choice("nvshmem", wish or found)
    if no_relay:
        raise EPUnavailableError(
            f"transport='auto', but neither transport can work: {no_nic}, and {no_relay}; expected a NIC for NVSHMEM on every host, or "
            f"MPI. {_RELAY_REMEDY}."
        )
    return Choice("mpi", no_nic)


def _first(facts: Sequence[RankFacts], name: str) -> str:
    """Return the first text of this name that is not empty, with its rank and host; otherwise an empty text."""
    found = ((rank, fact.host.partition(" ")[0], getattr(fact, name)) for rank, fact in enumerate(facts))
    return next((f"rank {rank} on {host} has {text}" for rank, host, text in found if text), "")


def find_facts(comm: Communicator, network: NetworkOptions) -> RankFacts:
    """Return what this rank finds."""
    remote = _env.nvshmem_transport() or network.nvshmem_remote_transport or ""
    return facts_of(host_identity(), remote, list_nics(), comm.relay_objection)


def facts_of(host: str, remote: str, nics: Sequence[Mapping[str, Any]], no_relay: str) -> RankFacts:
    """Make the facts of a rank.

    Args:
        host: Identity of its host, which begins with the host's name.
        remote: The transport of NVSHMEM that the user chose, or an empty text.
        nics: The result of `nics.list_nics`.
        no_relay: As in `RankFacts`.
    """
    setting = f"NVSHMEM_REMOTE_TRANSPORT={remote}"
    wish, no_nic = (setting, "") if remote not in ("", "none") else ("", setting if remote else nvshmem_objection(nics))
    return RankFacts(host, no_nic, no_relay, wish)


def agree_on_transport(comm: Communicator, network: NetworkOptions | None) -> Choice:
    """Choose the transport of a Buffer with several nodes. Collective.

    Args:
        comm: The ranks.
        network: The options that the ranks agreed on.

    Raises:
        EPUnavailableError: on every rank, if no transport can work.
        EPTimeoutError: if a rank does not come.
    """
    network = network or NetworkOptions()
    facts = [RankFacts(*found) for found in comm.allgather(tuple(find_facts(comm, network)))]
    choice = choose_transport(network.transport, facts)
    if choice.name == "mpi" and network.transport == "auto" and comm.Get_rank() == 0 and choice.reason not in _warned:
        _warned.add(choice.reason)
        _log.warning("MPI carries the rows between nodes, and not NVSHMEM, because %s", choice.reason)
    return choice
