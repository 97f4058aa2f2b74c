"""Draw the Buffers of a soak run and their sizes from the seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._checks import is_int_in_range
from ..arrays.compressed_rows import COMPRESSIONS
from ..arrays.dtypes import FP8_GROUP
from ..config import MAX_RANKS_PER_NODE, PATHS
from ..errors import EPConfigError

BUFFERS, ROUNDS, POOLS, CHOICES, EXCLUDED, SLEEPS = range(6)
"""Streams of random numbers of one seed."""


class Shape(NamedTuple):
    """Sizes that kernels are compiled for. There are few, so that a long run compiles each kernel once."""

    hidden: int
    topk: int
    local_experts: int
    tokens: int
    dtype: str
    num_slots: int
    low_latency: bool
    on_timeout: str = "raise"


_GPU_SHAPES = (
    Shape(7168, 8, 32, 128, "bfloat16", 3, True),
    Shape(7168, 8, 32, 4096, "bfloat16", 2, False),
    Shape(2048, 6, 8, 64, "float32", 4, True, "mask"),
    Shape(4104, 4, 5, 200, "float32", 2, True),  # rows that are no multiple of 128 bytes, without FP8
    Shape(512, 1, 1, 32, "bfloat16", 1, True),
    Shape(5120, 9, 16, 1024, "float16", 3, False),
)
_HOST_SHAPES = (
    Shape(128, 4, 4, 24, "bfloat16", 3, True),
    Shape(32, 2, 3, 96, "float32", 2, False),
    Shape(1024, 8, 8, 16, "float32", 4, True, "mask"),
    Shape(264, 6, 2, 20, "float32", 2, True),
    Shape(512, 1, 1, 9, "bfloat16", 1, True),
)


@dataclass(frozen=True)
class Options:
    """Everything that a plan depends on. The options that are None by default are then those of the shape."""

    seed: int  # of all random choices
    num_ranks: int
    on_gpu: bool  # draw the larger shapes for GPUs, and rounds with CUDA graphs
    rounds_per_buffer: int = 200  # rounds before the next Buffer is made
    sleep_every: int = 50  # a Buffer sleeps before one of so many rounds, on average
    has_fp8: bool = True  # draw FP8 conversion in low-latency dispatches, and combines with rows as FP8
    tokens: int | None = None  # most tokens of a rank in Buffers of the throughput mode alone
    low_latency_tokens: int | None = None  # most tokens of a rank in Buffers of both modes
    hidden: int | None = None  # elements of a row
    topk: int | None = None  # experts of a token
    experts: int | None = None  # over all ranks
    has_slots: bool = False  # ranks come and go: Buffers of both modes on one host, whose time-outs raise
    ranks_per_node: int | None = None  # None: on the host backend, some Buffers declare nodes. On GPUs, a node is a host

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("rounds_per_buffer", 1), ("sleep_every", 1)):
            if not is_int_in_range(value := getattr(self, name), least, 1 << 62):
                option = "--" + name.replace("_", "-")
                raise EPConfigError(f"{option} is {value}; expected a whole number from {least} on. Choose another one.")


@dataclass(frozen=True)
class BufferPlan:
    """One Buffer and its sizes."""

    number: int
    shape: Shape
    num_experts: int
    num_sms: int
    low_latency_sms: int
    has_graph: bool
    ranks_per_node: int | None
    path: str
    num_max_recv_tokens: int | None

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `Buffer`."""
        shape = self.shape
        return dict(
            num_max_tokens_per_rank=shape.tokens,
            hidden=shape.hidden,
            num_topk=shape.topk,
            num_experts=self.num_experts,
            dtype=shape.dtype,
            num_slots=shape.num_slots,
            low_latency=shape.low_latency,
            on_timeout=shape.on_timeout,
            num_sms=self.num_sms,
            low_latency_sms=self.low_latency_sms,
            ranks_per_node=self.ranks_per_node,
            path=self.path,
            num_max_recv_tokens=self.num_max_recv_tokens,
        )


class Draw:
    """Random choices of a plan."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def number(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))


@functools.lru_cache(maxsize=4)
def buffer_of(options: Options, number: int) -> BufferPlan:
    """Draw the Buffer of rounds `number * rounds_per_buffer` and following."""
    draw = Draw(options.seed, BUFFERS, number)
    shapes: tuple[Shape, ...] = _GPU_SHAPES if options.on_gpu else _HOST_SHAPES
    if options.has_slots:
        shapes = tuple(shape for shape in shapes if shape.low_latency and shape.on_timeout == "raise")
    shape = shapes[(number + options.seed) % len(shapes)]
    asked_tokens = options.low_latency_tokens if shape.low_latency else options.tokens
    ranks = options.num_ranks
    experts = options.experts or shape.local_experts * ranks
    shape = shape._replace(
        hidden=options.hidden or shape.hidden,
        topk=options.topk or min(shape.topk, experts),
        tokens=asked_tokens or shape.tokens,
        local_experts=experts // ranks,
    )
    return BufferPlan(
        number=number,
        shape=shape,
        num_experts=experts,
        num_sms=draw.one_of(8, 16, 24, 32),
        low_latency_sms=draw.one_of(32, 64, 128),
        has_graph=options.on_gpu and shape.low_latency,
        ranks_per_node=_ranks_per_node(draw, options),
        path=draw.one_of(*PATHS),
        num_max_recv_tokens=draw.one_of(None, ranks * shape.tokens, draw.number(shape.tokens, ranks * shape.tokens)),
    )


def compressions_of(options: Options, shape: Shape) -> list[str | None]:
    """List the forms of compressed rows that a combine may take. [None]: none."""
    if shape.hidden % FP8_GROUP:
        return [None]
    return [form for form in COMPRESSIONS if form != "fp8" or options.has_fp8]


def _ranks_per_node(draw: Draw, options: Options) -> int | None:
    """Draw the ranks of a declared node. Several nodes of one GPU host need a transport that the host may lack, so GPUs draw none."""
    divisors = [size for size in range(1, min(options.num_ranks, MAX_RANKS_PER_NODE + 1)) if options.num_ranks % size == 0]
    if options.ranks_per_node is None and not options.on_gpu and not options.has_slots and divisors and draw.chance(0.5):
        return int(draw.one_of(*divisors))
    return options.ranks_per_node
