"""Run the examples, which check their own results, on the host backend."""

import importlib.util
import re
import subprocess

import pytest
from launch import QUICK_XLA, python_on, run_example
from paths import ROOT


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, ""), (3, ""), (4, "2")])
def test_dispatch_combine(num_ranks, ranks_per_node):
    sizes = ["--tokens", "40", "--hidden", "256"]
    lines = run_example(num_ranks, "dispatch_combine.py", *sizes, DEEPEP_RT_RANKS_PER_NODE=ranks_per_node)
    assert lines[-1] == "OK"
    assert [line.split()[0] for line in lines[1:-1]] == ["dispatch", "combine"]
    assert all("GB/s" in line for line in lines[:-1])
    assert all(("other ranks" in line) == (num_ranks > 1) for line in lines[:-1])
    assert ("% of the copy ceiling" in lines[1]) == (num_ranks > 1)


def test_cuda_without_a_gpu():
    """Expect the Buffer's error, and not CuPy's error about a missing driver."""
    from deepep_rt.backends.agreement import why_no_gpu

    if why_no_gpu() is None:
        pytest.skip("there is a GPU")
    words = python_on(2, "examples/dispatch_combine.py", "--backend", "cuda", "--tokens", "8")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode
    assert "EPUnavailableError: backend='cuda', but rank 0 cannot use a GPU" in done.stderr
    assert "cupy" not in done.stderr.lower()


@pytest.mark.parametrize(("num_ranks", "options", "kind"), [(1, [], "FP8"), (4, [], "FP8"), (4, ["--bf16"], "bfloat16")])
def test_low_latency_decode(num_ranks, options, kind):
    lines = run_example(num_ranks, "low_latency_decode.py", *options)
    assert lines[-1] == "OK"
    assert f"{kind} dispatch" in lines[0]
    assert [line.split()[0] for line in lines[1:-1]] == ["one_batch", "two_micro_batches"]
    assert all(" us a step" in line for line in lines[1:-1])


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, ""), (4, "2")])
def test_moe_jax(num_ranks, ranks_per_node):
    first, *steps, last, end = run_example(num_ranks, "moe_jax.py", **QUICK_XLA, DEEPEP_RT_RANKS_PER_NODE=ranks_per_node)
    assert first.startswith(f"host: {num_ranks} ranks")
    assert [line.split(":")[0] for line in steps] == [f"step {step:3}" for step in range(0, 50, 6)]
    assert "largest difference" in last
    assert end == "OK"


@pytest.mark.parametrize("options", [[], ["--even"]])
def test_overlap_micro_batches(options):
    line, end = run_example(2, "overlap_micro_batches.py", *options)
    assert end == "OK"
    assert re.search(r": \d+ us overlapped, \d+ us one after the other, same bits$", line)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_overlap_is_drawn(tmp_path, kind):
    picture = tmp_path / f"timeline.{kind}"
    run_example(2, "overlap_micro_batches.py", "--picture", str(picture))
    assert picture.stat().st_size > 10_000
