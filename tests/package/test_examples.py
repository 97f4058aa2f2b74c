"""Run the examples, which check their own results, on the host backend."""

import importlib.util
import json
import re
import sys

import pytest
from launch import QUICK_XLA, environment, python_on, run_command, run_example
from paths import ROOT


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, ""), (3, ""), pytest.param(4, "2", marks=pytest.mark.full)])
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
    _, errors = run_command(*words, status=1)
    assert "EPUnavailableError: backend='cuda', but rank 0 cannot use a GPU" in errors
    assert "cupy" not in errors.lower()


@pytest.mark.parametrize(
    ("num_ranks", "options", "kind"),
    [
        (1, [], "FP8"),
        pytest.param(4, [], "FP8", marks=pytest.mark.full),
        pytest.param(4, ["--bf16"], "bfloat16", marks=pytest.mark.full),
    ],
)
def test_low_latency_decode(num_ranks, options, kind):
    lines = run_example(num_ranks, "low_latency_decode.py", *options)
    assert lines[-1] == "OK"
    assert f"{kind} dispatch" in lines[0]
    assert [line.split()[0] for line in lines[1:-1]] == ["one_batch", "two_micro_batches"]
    assert all(" us a step" in line for line in lines[1:-1])


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, ""), (4, "2")])
def test_moe_jax(num_ranks, ranks_per_node):
    first, *steps, last, end = run_example(num_ranks, "moe_jax.py", **QUICK_XLA, DEEPEP_RT_RANKS_PER_NODE=ranks_per_node)
    assert first.startswith(f"host: {num_ranks} ranks")
    assert [line.split(":")[0] for line in steps] == [f"step {step:3}" for step in range(0, 50, 6)]
    assert "largest difference" in last
    assert end == "OK"


@pytest.mark.full
@pytest.mark.parametrize("options", [[], ["--even"]])
def test_overlap_micro_batches(options):
    line, end = run_example(2, "overlap_micro_batches.py", *options)
    assert end == "OK"
    assert re.search(r": \d+ us overlapped, \d+ us one after the other, same bits$", line)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_overlap_is_drawn(tmp_path, kind):
    picture = tmp_path / f"timeline.{kind}"
    run_example(2, "overlap_micro_batches.py", "--picture", str(picture))
    assert picture.stat().st_size > 10_000


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@needs_torch
def test_elastic_training():
    """Kill ranks in both passes and between steps. The others go on, and new processes take experts back."""
    words = sys.executable, "examples/elastic_training.py", "--backend", "host", "--seed", "1", "--steps", "40"
    first, *changes, last, end = run_command(*words, **environment())[0].splitlines()
    assert first.startswith("step 1: host, 3 ranks start; members (0, 1, 2), loss ")
    kills = [found for line in changes if (found := re.search(r"killed \((.+)\), next step finished .+ s later", line))]
    assert [found[1] for found in kills] == ["forward", "backward", "between steps"]
    assert sum("started and joined" in line for line in changes) == 3
    assert int(last.split()[1].rstrip(":")) >= 40
    assert end == "OK"


@needs_torch
def test_elastic_decode():
    words = sys.executable, "examples/elastic_decode.py", "--backend", "host", "--seed", "1"
    *phases, end = run_command(*words, **environment())[0].splitlines()
    parts = [re.fullmatch(r"(.+): [\d.]+ ms a step, longest pause [\d.]+ ms", line)[1] for line in phases]
    assert [part.split()[0] for part in parts] == ["host,", "rank", "members", "members", "rank"]
    assert [part.rpartition(" ")[2] for part in parts] == ["ranks", "masked", "shrink", "admit", "joined"]
    assert end == "OK"


@pytest.mark.full
@needs_torch
def test_profile_step(tmp_path):
    """Write a trace for each rank, with the ranges of all steps. If matplotlib is there, draw them."""
    first, *steps, end = run_example(2, "profile_step.py", "--out", str(tmp_path), "--shared")
    assert first.startswith("host: 2 ranks")
    assert [line.partition(": ")[0] for line in steps] == [
        "64 tokens of each rank",
        "64 tokens of each rank, rank 1 is late",
        "8 tokens of each rank, low latency",
    ]
    assert end == "OK"
    traces = trace_picture().read(tmp_path)
    assert list(traces) == [0, 1]
    many, late, few = traces[0].steps
    assert late[2] == steps[1].partition(": ")[0]
    parts = [name for *_, name in traces[0].rows(*many[:2])["host"]]
    assert parts[:3] == ["attention", "shared expert", "dispatch: 64 rows of 256 bytes"]
    assert [name.partition(":")[0] for name in parts[3:]] == ["experts", "combine"]
    assert "low_latency_dispatch: 8 rows of 256 bytes" in [name for *_, name in traces[1].rows(*few[:2])["host"]]
    if importlib.util.find_spec("matplotlib"):
        trace_picture().draw(traces, tmp_path / "timeline.png")
        assert (tmp_path / "timeline.png").stat().st_size > 10_000


GEMM = (
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<int> > >(int)"
)
SILU = "void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel(at::TensorIteratorBase&)>(int, float)"


def gpu_trace(rank, begin):
    """Make a trace as torch.profiler writes it on a GPU, with one step on two streams. Times are microseconds."""
    kernels = [
        *(("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 7, 20, 110), ("route", 7, 131, 14), ("dispatch", 7, 147, 90)),
        *(("expand_rows", 7, 239, 80), (GEMM, 7, 321, 150), (SILU, 7, 473, 20), ("sum_expert_rows", 7, 495, 60)),
        *(("combine", 7, 557, 70), ("ll_dispatch", 7, 630, 18), (GEMM, 20, 140, 100), ("not in the step", 7, 900, 50)),
    ]
    ranges = [("step", 0, 700), ("attention", 5, 30), ("dispatch: 8192 rows of 4096 bytes", 40, 130), ("wait", 200, 490)]
    host = {"ph": "X", "pid": 812 + rank, "tid": 812 + rank}
    numbers = {"External id": 3, "device": rank, "context": 1, "correlation": 41, "registers per thread": 64, "shared memory": 0}
    numbers |= {"queued": 0, "blocks per SM": 1.0, "warps per SM": 8.0, "grid": [132, 1, 1], "block": [256, 1, 1]}
    events = [{"ph": "M", "name": "process_name", "pid": 812 + rank, "tid": 0, "ts": begin, "args": {"name": "python"}}]
    for name, start, duration in ranges:
        at = {"name": name, "ts": begin + start, "dur": duration}
        events.append({**host, "cat": "user_annotation", **at, "args": {"External id": 3, "Record function id": 0, "Ev Idx": 1}})
        on_gpu = {"ph": "X", "cat": "gpu_user_annotation", "pid": rank, "tid": 7, "args": {"External id": 3}}
        events.append({**on_gpu, **at, "ts": begin + start + 15})
    for name, stream, start, duration in kernels:
        launch = {"ts": begin + start - 12, "dur": 4.5, "args": {"cbid": 652, "correlation": 41}}
        events.append({**host, "cat": "cuda_driver", "name": "cuLaunchKernelEx", **launch})
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": stream, "ts": begin + start, "dur": duration}
        events.append({**kernel, "args": {**numbers, "stream": stream}})
    memset = {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": rank, "tid": 7, "ts": begin + 12, "dur": 1.2}
    events.append({**memset, "args": {"device": rank, "context": 1, "stream": 7, "correlation": 40, "bytes": 512}})
    flow = {"ph": "s", "id": 41, "pid": 812 + rank, "tid": 812 + rank, "ts": begin + 8, "cat": "ac2g", "name": "ac2g"}
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1790857026 * 10**9,
        "displayTimeUnit": "ms",
        "traceEvents": [*events, flow],
    }


def trace_picture():
    spec = importlib.util.spec_from_file_location("trace_picture", ROOT / "examples/trace_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_traces_of_gpus_are_drawn(tmp_path, kind):
    pytest.importorskip("matplotlib")
    for rank in (10, 9):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(gpu_trace(rank, 4714066267000.25 + 7 * (rank - 9))))
    program = trace_picture()
    traces = program.read(tmp_path)
    assert list(traces) == [9, 10]
    (begin, end, name) = traces[10].steps[0]
    assert (begin - traces[9].steps[0][0], end - begin, name) == (7000, 700_000, "step")
    rows = traces[9].rows(begin, end)
    assert list(rows) == ["host", "stream 7", "stream 20"]
    assert [part[2].partition(":")[0] for part in rows["host"]] == ["attention", "dispatch", "wait"]
    kinds = [program.kind_of(kernel[2]) for kernel in sorted(rows["stream 7"])]
    expected = ["other", "matrix products", "route", "dispatch", "rows by expert", "matrix products", "other", "rows by expert"]
    assert kinds == [*expected, "combine", "low latency"]
    picture = tmp_path / f"timeline.{kind}"
    program.draw(traces, picture)
    assert picture.stat().st_size > 10_000
    if kind == "svg":
        drawn = picture.read_text()
        assert all(f"<!-- {text} -->" in drawn for text in ("rank 10, stream 20", "step: 707 µs", "dispatch", "rows by expert"))


def test_wrong_traces(tmp_path):
    program = trace_picture()
    with pytest.raises(SystemExit, match=r"has no traces; expected files such as rank0\.json"):
        program.read(tmp_path)
    pytest.importorskip("matplotlib")
    (tmp_path / "rank0.json").write_text('{"traceEvents": []}')
    with pytest.raises(SystemExit, match="expected the same number of steps on all"):
        program.draw(program.read(tmp_path), tmp_path / "timeline.png")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_experts_as_rows_arrive():
    line, end = run_example(2, "experts_as_rows_arrive.py")
    assert line == "host: 2 ranks, 64 tokens each, the same bits with signals and without"
    assert end == "OK"
