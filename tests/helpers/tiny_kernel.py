"""A kernel of a few lines with two headers, for tests of the compiler."""

from __future__ import annotations

from pathlib import Path

from deepep_rt.kernels.table import Kernel

TINY = Kernel("tiny", "    u64 out;\n    i32 count[kNumRanks];\n", threads="kTinyThreads", shared="kTinyShared")
CONSTANTS = {
    "kNumRanks": 3,
    "kNumLocalExperts": 2,
    "kTinyThreads": 64,
    "kTinyShared": 1024,
    "kFactor": 7,
    "kUnused": 5,
    "kFactorial": 1,
}
SOURCE = """\
#include "inner.cuh"
extern "C" __global__ void __launch_bounds__(kTinyThreads) tiny(const __grid_constant__ Params p) {
  __shared__ int held[100];
  held[threadIdx.x] = p.count[0];
  __syncthreads();
  reinterpret_cast<int*>(p.out)[threadIdx.x] = twice(held[63 - threadIdx.x]);
}
"""


def write_sources(folder: Path) -> None:
    """Write the kernel and its headers."""
    (folder / "tiny.cu").write_text(SOURCE)
    (folder / "inner.cuh").write_text(
        '#pragma once\n#include "innermost.cuh"\n__device__ int twice(int x) { return 2 * scaled(x); }\n'
        "static_assert(sizeof(RouteMessage) > 0);\n"
    )
    (folder / "innermost.cuh").write_text("#pragma once\n__device__ int scaled(int x) { return kFactor * x; }\n")
