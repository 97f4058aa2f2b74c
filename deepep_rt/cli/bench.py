"""Define `python -m deepep_rt bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._console import printing
from ..bench import run
from .options import Json


def bench(
    what: Annotated[str, typer.Argument(help="throughput, low-latency, all, or jitter.")] = "all",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: bench-DATE-TIME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Make a few calls of each type only, as a trial.")] = False,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Compare with these results or references; may be repeated.")
    ] = None,
    from_: Annotated[
        list[Path] | None, typer.Option("--from", metavar="FILE", help="Draw this result without measuring; may be repeated.")
    ] = None,
    backend: Annotated[str, typer.Option(help="cuda, host (NumPy and MPI, at small sizes), or auto.")] = "auto",
    hidden: Annotated[int | None, typer.Option(help="Elements of a row. Default: 7168; 512 without a GPU.")] = None,
    topk: Annotated[int | None, typer.Option(help="Experts of a token. Default: 8.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts over all ranks. Default: 256.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where this is no git checkout.")] = None,
    model: Annotated[
        bool,
        typer.Option("--model", help="Measure nothing: predict calls over several nodes. --from gives the near figures."),
    ] = False,
    nodes: Annotated[str | None, typer.Option(help="Model: numbers of nodes. Default: 1,2,4 and so on up to 256.")] = None,
    node_size: Annotated[int | None, typer.Option(help="Model: ranks of a node. Default: those of --from, or 8.")] = None,
    near_gb_s: Annotated[
        float | None, typer.Option(help="Model: GB/s between GPUs of a node. Default: of --from, or H200.")
    ] = None,
    near_us: Annotated[float | None, typer.Option(help="Model: microseconds of an empty call in a node.")] = None,
    nic: Annotated[
        str, typer.Option(help="Model: kind of NIC of each rank: ib-ndr, roce-100, efa-200, tcp-25 or others.")
    ] = "ib-ndr",
    nic_gb_s: Annotated[float | None, typer.Option(help="Model: line rate of a rank's NIC, or of its share of one.")] = None,
    nic_share: Annotated[float | None, typer.Option(help="Model: part of the line rate that rows reach. Default: 0.864.")] = None,
    nic_us: Annotated[
        float | None, typer.Option(help="Model: microseconds of an empty call over the network. Default: 24.3.")
    ] = None,
    nic_message_us: Annotated[float, typer.Option(help="Model: microseconds of a NIC or proxy for each message.")] = 0.0,
    tokens: Annotated[int, typer.Option(help="Model: tokens of a rank in a throughput call.")] = 4096,
    low_latency_tokens: Annotated[int, typer.Option(help="Model: tokens of a rank in a low-latency call.")] = 128,
    groups: Annotated[int, typer.Option(help="Model: most nodes of a token in throughput calls; 0: no limit.")] = 4,
    as_json: Json = False,
) -> None:
    """Measure the speed of calls on all ranks. Write a report with pictures. Example: mpirun -n 8 python -m deepep_rt bench."""
    if model:
        from ..bench import model_report

        asked = model_report.Asked(
            nodes=nodes,
            node_size=node_size,
            near_gb_s=near_gb_s,
            near_us=near_us,
            nic=nic,
            nic_gb_s=nic_gb_s,
            nic_share=nic_share,
            nic_us=nic_us,
            nic_message_us=nic_message_us,
            tokens=tokens,
            low_latency_tokens=low_latency_tokens,
            hidden=7168 if hidden is None else hidden,
            topk=8 if topk is None else topk,
            experts=256 if experts is None else experts,
            groups=groups,
        )
        with printing():
            model_report.run(asked, from_ or [], out, as_json=as_json)
    elif from_:
        run.draw(from_, out, compare or [])
    else:
        sizes = run.AskedSizes(hidden, topk, experts)
        run.measure(what, out, compare or [], quick=quick, backend=backend, sizes=sizes, commit=commit)
