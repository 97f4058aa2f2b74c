"""Define `python -m deepep_rt doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .._console import console, printing
from ..comm.rendezvous import check_place
from ..errors import EPConfigError
from ..network import TRANSPORTS
from .options import Dtype, Hidden, Json, RanksPerNode, Slots, Tokens, TopK

_WIDTH_OF_LOGS = 150  # enough for the table of 8 GPUs


def doctor(
    backend: Annotated[
        str, typer.Option(help="Backend of the Buffers: auto, cuda (no usable GPU is an error) or host.")
    ] = "auto",
    ranks: Annotated[int | None, typer.Option(help="Ranks of the Buffer. Default: those of this mpirun, or else 8.")] = None,
    tokens: Tokens = 4096,
    hidden: Hidden = 7168,
    topk: TopK = 8,
    experts: Annotated[int | None, typer.Option(help="Experts over all ranks. Default: 32 for each rank.")] = None,
    dtype: Dtype = "bfloat16",
    slots: Slots = 2,
    low_latency: Annotated[bool, typer.Option("--low-latency", help="Include the memory of the low-latency calls.")] = False,
    ranks_per_node: RanksPerNode = None,
    transport: Annotated[str, typer.Option(help="Transport between nodes: auto, nvshmem, nixl or mpi.")] = "auto",
    max_ranks: Annotated[int | None, typer.Option(help="Say whether a Buffer with so many slots works here.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --max-ranks: connect to the store where its ranks meet.")
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Measure latency and bandwidth between the ranks of this mpirun or torchrun.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find what is wrong on this machine. Under mpirun, examine all ranks. Exit status 1 if Buffers cannot work."""
    from ..doctor import report

    if backend not in ("auto", "cuda", "host"):
        raise EPConfigError(f"--backend={backend!r}; expected auto, cuda or host. Choose one of them.")
    if transport not in TRANSPORTS:
        raise EPConfigError(f"--transport={transport!r}; expected auto, nvshmem, nixl or mpi. Choose one of them.")
    sizes = dict(
        num_max_tokens_per_rank=tokens,
        hidden=hidden,
        num_topk=topk,
        **({} if experts is None else {"num_experts": experts}),
        dtype=dtype,
        num_slots=slots,
        low_latency=low_latency,
        ranks_per_node=ranks_per_node,
    )
    if rendezvous is not None and max_ranks is None:
        raise EPConfigError(f"--rendezvous={rendezvous!r}; expected it only with --max-ranks. Pass both.")
    if rendezvous == "auto":
        raise EPConfigError(
            "--rendezvous='auto'; expected the address of a store that runs. Leave it out: rank 0 starts that store."
        )
    check_place(rendezvous)
    job, prints = report.examine(
        sizes, ranks, backend, transport=transport, measure_network=network, max_ranks=max_ranks, rendezvous=rendezvous
    )
    if not prints:  # status 0: a launcher that sees a rank fail ends the others, perhaps before rank 0 has printed
        return
    found = report.findings(job)
    with printing():
        if as_json:
            print(json.dumps(report.as_json(job, found), indent=2))
        else:
            report.show(job, found, console(_WIDTH_OF_LOGS))
    raise typer.Exit(1 if report.is_broken(found) else 0)
