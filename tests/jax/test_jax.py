"""Test deepep_rt.jax inside of compiled functions, on the host backend."""

from __future__ import annotations

import importlib.util

import pytest
from launch import launch, run_checks
from ports import free_port


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
@pytest.mark.parametrize(("program", "num_ranks"), [("in_jit", 2), ("decode_in_jit", 1), ("decode_in_jit", 4)])
def test_inside_of_compiled_functions(program: str, num_ranks: int) -> None:
    run_checks(num_ranks, program)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
def test_shard_map_over_processes() -> None:
    assert launch(2, "jax_shard_map", f"127.0.0.1:{free_port()}").count("passed") == 2
