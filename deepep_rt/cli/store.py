"""Define `python -m deepep_rt store`."""

from __future__ import annotations

from typing import Annotated

import typer

from .._console import printing
from ..comm import store_server


def store(
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that other hosts reach needs DEEPEP_RT_STORE_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. Default: any free one.")] = 0,
    ends_with_last_client: Annotated[
        bool, typer.Option("--ends-with-last-client", help="End when the last client has gone, or none came for 60 s.")
    ] = False,
) -> None:
    """Serve a store where ranks meet. Print its address, and run until SIGTERM or Ctrl-C."""
    with printing():
        store_server.serve(host, port, ends_with_last_client=ends_with_last_client)
