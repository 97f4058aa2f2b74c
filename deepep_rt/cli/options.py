"""Define the options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Tokens = Annotated[int, typer.Option(help="num_max_tokens_per_rank.")]
Hidden = Annotated[int, typer.Option(help="Elements of a row.")]
TopK = Annotated[int, typer.Option(help="Experts of a token.")]
Experts = Annotated[int, typer.Option(help="Experts over all ranks.")]
Dtype = Annotated[str, typer.Option(help="Widest element type of a row.")]
Slots = Annotated[int, typer.Option(help="num_slots.")]
RanksPerNode = Annotated[int | None, typer.Option(help="Ranks of a node. Default: DEEPEP_RT_RANKS_PER_NODE, or all of them.")]
