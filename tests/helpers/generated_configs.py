"""Configurations from hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.config import MAX_ROW_BYTES, MAX_TOPK, Config


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Valid configurations of every shape."""
    num_ranks = draw(st.integers(1, 8))
    local = draw(st.integers(1, 64))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn"]))
    itemsize = DTYPES[dtype].itemsize
    return Config(
        num_ranks=num_ranks,
        num_max_tokens_per_rank=draw(st.integers(1, 8192)),
        hidden=draw(st.integers(1, MAX_ROW_BYTES // 16)) * (16 // itemsize),
        num_topk=draw(st.integers(1, min(MAX_TOPK, num_ranks * local))),
        num_experts=num_ranks * local,
        dtype=dtype,
        num_slots=draw(st.integers(1, 8)),
    )
