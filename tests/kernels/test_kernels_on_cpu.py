"""The CUDA kernels, compiled for the CPU, compared with the oracles. All ranks run in this process, and threads in random order.

Each test tries a few orders. `KERNELS_ON_CPU_SEEDS=500 python -m pytest tests/kernels/test_kernels_on_cpu.py` tries more. The name of a
failed test ends with its seed, and `KERNELS_ON_CPU_SEEDS=17:18` runs this seed alone.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
from scenario_table import FORMATS, OPAQUE, TABLE

from deepep_rt import EPTimeoutError
from deepep_rt.backends.cuda import expert_rows
from deepep_rt.cuda import driver
from deepep_rt.kernels import tuning
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.device_arrays import DeviceArray, array_at
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import (
    COMPRESSED,
    LONG_COMPRESSED,
    LOW_LATENCY,
    THROUGHPUT,
    LowLatencyRound,
    ThroughputRound,
    assert_same,
    broken,
    compressed_low_latency_rounds,
    compressed_rounds,
    expert_rounds,
    fails,
    inputs_of,
    long_compressed_rounds,
    low_latency_rounds,
    opaque_rounds,
    overlapped_rounds,
    prepared_rounds,
    prepared_throughput_rounds,
    run_rounds,
    run_table,
    seeds,
    throughput_rounds,
)

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")


@pytest.mark.parametrize("seed", seeds(6))
def test_low_latency(seed):
    with Machine(2, seed, num_sms=(None, 1, 2)[seed % 3], weak_memory=seed % 2 == 1) as machine:
        low_latency_rounds(machine, machine.buffers(**LOW_LATENCY), seed, 6)


@pytest.mark.parametrize("seed", seeds(len(OPAQUE)))
def test_quantised_rows(seed):
    """Rows that the program has quantised, between others, with hooks and without."""
    kind = list(OPAQUE.values())[seed % len(OPAQUE)]
    with Machine(2, seed, num_sms=(None, 1, 2)[seed % 3], weak_memory=seed % 2 == 1) as machine:
        buffers = machine.buffers(**LOW_LATENCY)
        low_latency_rounds(machine, buffers, seed, 4, options=FORMATS[0], **kind)
        opaque_rounds(machine, buffers, seed, 4)
        assert "ll_dispatch_opaque" in machine.launched


@pytest.mark.parametrize("seed", seeds(4))
def test_open_hooks(seed):
    with Machine(2, seed, weak_memory=seed % 4 == 1) as machine:
        overlapped_rounds(machine, machine.buffers(**LOW_LATENCY, num_slots=2 + seed % 2), seed, 8)


@pytest.mark.parametrize("seed", seeds(4))
def test_prepared_low_latency(seed):
    """Between ordinary calls, and matched with ordinary calls of another rank. In one, the rows come back compressed; in one, the program
    has quantised them.
    """
    options = dict(compress="log10", reduce=True) if seed == 3 else dict(hooks=seed == 1)
    if seed == 2:
        options |= dict(format=None, options=FORMATS[0], **OPAQUE["NVFP4"])
    with Machine(3, seed, num_sms=(None, 1)[seed % 2], weak_memory=seed == 1) as machine:
        sizes = dict(num_experts=6, hidden=512 if seed == 3 else 256)
        prepared_rounds(machine, machine.buffers(**{**LOW_LATENCY, **sizes}), seed, 4, **options)


def test_all_methods_of_copy_ceilings_move_the_same_rows(monkeypatch):
    num_ranks, num_rows, row_bytes = shape = 3, 3, 64
    with Machine(num_ranks, 1) as machine:
        buffers = machine.buffers(num_max_tokens_per_rank=16, hidden=256, num_topk=1, num_experts=num_ranks)
        regions = [[one._backend.runtime.address_of_region(name) for one in buffers] for name in ("pool", "landing")]
        sources, landings = ([array_at(ptr, shape, "uint8") for ptr in region] for region in regions)
        for rank in range(num_ranks):
            sources[rank][...], landings[rank][...] = np.random.default_rng(rank).integers(1, 256, shape), 0
        checked = []

        def elapsed_ms(begin, end):
            end.synchronize()
            rank = machine._driver.current_rank
            for target, landing in enumerate(landings):
                assert np.array_equal(landing[rank], 0 * landing[rank] if target == rank else sources[rank][target])
                landing[rank] = 0
            checked.append(rank)
            return 10.0

        monkeypatch.setattr(driver, "elapsed_ms", elapsed_ms)
        arguments = dict(row_bytes=row_bytes, num_rows=num_rows, iterations=2)
        found = machine.each_rank(lambda rank: buffers[rank].copy_ceilings(**arguments))
    assert sorted(checked) == sorted(3 * len(found[0]) * list(range(num_ranks)))
    rate = 2 * num_rows * row_bytes * (num_ranks - 1) / 10e-3
    assert found == [pytest.approx(dict.fromkeys(("kernel", "kernel on all SMs", "copy engines"), rate))] * num_ranks


@pytest.mark.parametrize("seed", seeds(2))
def test_many_tokens(seed):
    """Another kernel combines many tokens."""
    with Machine(4, seed) as machine:
        sizes = dict(num_max_tokens_per_rank=12, num_topk=4, num_experts=8, low_latency_sms=1)
        low_latency_rounds(machine, machine.buffers(**{**LOW_LATENCY, **sizes}), seed, 3, reduce=True)
        assert "ll_combine_large" in machine.launched


@pytest.mark.parametrize("seed", seeds(3))
def test_long_low_latency_rows(seed):
    """Threads have several columns of a row, and some lanes lack the last one. Few and many tokens."""
    with Machine(2, seed, num_sms=(None, 1)[seed % 2], weak_memory=seed == 1) as machine:
        sizes = dict(num_max_tokens_per_rank=(4, 4, 8)[seed], hidden=1152, num_topk=4, num_experts=8, low_latency_sms=1)
        low_latency_rounds(machine, machine.buffers(**{**LOW_LATENCY, **sizes}), seed, 3)
        assert "ll_combine_large" in machine.launched if seed == 2 else "ll_combine" in machine.launched


@pytest.mark.parametrize("seed", seeds(4))
def test_compressed_low_latency_rows(seed):
    """In both kernels, and with hooks."""
    sizes = dict(hidden=512, **(dict(num_max_tokens_per_rank=12, low_latency_sms=1) if seed == 3 else {}))
    with Machine(2, seed, num_sms=(None, 1)[seed % 2], weak_memory=seed == 1) as machine:
        compressed_low_latency_rounds(machine, machine.buffers(**{**LOW_LATENCY, **sizes}), seed, 5)
        prefix = "ll_combine_large_" if seed == 3 else "ll_combine_"
        assert {f"{prefix}fp8", f"{prefix}log10"} & set(machine.launched)


def test_compressed_low_latency_rows_with_masks():
    """A silent rank is masked while others wait for its rows."""
    with Machine(3, 1) as machine:
        buffers = machine.buffers(**{**LOW_LATENCY, "num_experts": 6, "hidden": 512}, on_timeout="mask")
        compressed_low_latency_rounds(machine, buffers, 1, 2)
        made = LowLatencyRound(machine, buffers, 9, calling=[0, 2], reduce=True, compress="log10").all()
        machine.run()
        made.check(live=[0, 2])


@pytest.mark.parametrize("seed", seeds(2))
def test_quantised_rows_with_masks(seed):
    """A silent rank is masked while others wait for its rows."""
    kind = dict(options=FORMATS[0], **list(OPAQUE.values())[3 + seed % 2])
    with Machine(3, seed) as machine:
        buffers = machine.buffers(**{**LOW_LATENCY, "num_experts": 6}, on_timeout="mask")
        low_latency_rounds(machine, buffers, seed, 2, reduce=True, **kind)
        for number in (8, 9):
            made = LowLatencyRound(machine, buffers, number, calling=[0, 2], reduce=True, **kind).all()
            machine.run()
            made.check(live=[0, 2])


@pytest.mark.parametrize("seed", seeds(2))
def test_mask_mode(seed):
    with Machine(2, seed) as machine:
        low_latency_rounds(machine, machine.buffers(**LOW_LATENCY, on_timeout="mask"), seed, 3, reduce=True)


@pytest.mark.parametrize("seed", seeds(2))
def test_silent_rank_is_masked(seed):
    """The other ranks go on without it, in this call and in the next ones."""
    with Machine(3, seed) as machine:
        buffers = machine.buffers(**{**LOW_LATENCY, "num_experts": 6}, on_timeout="mask")
        LowLatencyRound(machine, buffers, seed, reduce=True).all()
        machine.run()
        rounds = [LowLatencyRound(machine, buffers, seed + i, calling=[0, 2], reduce=True).all() for i in (1, 2)]
        machine.run()
        for made in rounds:
            made.check(live=[0, 2])
        assert [buffers[r].query_masked_ranks() for r in (0, 2)] == [[1], [1]]


def test_silent_rank_is_named():
    with Machine(2, 0) as machine:
        buffers = machine.buffers(**LOW_LATENCY)
        LowLatencyRound(machine, buffers, 1, calling=[0], hooks=False).all()
        machine.run()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1"):
            LowLatencyRound(machine, buffers, 2, calling=[0]).all()


# --- throughput -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_throughput(arch, seed):
    with Machine(3, seed, arch, num_sms=(None, 1)[seed % 2], weak_memory=seed % 4 > 1) as machine:
        throughput_rounds(machine, machine.buffers(**THROUGHPUT), seed, 4)


@pytest.mark.parametrize("seed", seeds(1))
def test_copies_of_own_rows(seed, monkeypatch):
    """Combines of few ranks read such rows where they lie. With many blocks and no copy blocks, they do not."""
    monkeypatch.setattr(tuning, "_FEW_BLOCKS", 0)
    monkeypatch.setattr(tuning, "_COPY_BLOCKS", {})
    with Machine(3, seed) as machine:
        throughput_rounds(machine, machine.buffers(**THROUGHPUT), seed, 3)


@pytest.mark.parametrize("seed", seeds(3))
def test_copy_blocks(seed, monkeypatch):
    """With many blocks, some blocks of combine copy, and the others reduce. Several warps share the last tokens."""
    monkeypatch.setattr(tuning, "_FEW_BLOCKS", 2)
    monkeypatch.setattr(tuning, "_COPY_BLOCKS", {90: 1 + seed % 2})
    with Machine(3 + seed % 2, seed, num_sms=(None, 1)[seed % 2], weak_memory=seed == 2) as machine:
        throughput_rounds(machine, machine.buffers(**{**THROUGHPUT, "num_experts": 12, "num_sms": 3}), seed, 3)


@pytest.mark.parametrize("seed", seeds(4))
def test_prepared_throughput(seed):
    """Along one routing, matched with ordinary calls of another rank, on one node and on two."""
    sizes = dict(num_experts=4, ranks_per_node=2) if seed == 3 else dict(num_experts=6)
    with Machine(4 if seed == 3 else 3, seed, num_sms=(None, 1)[seed % 2], weak_memory=seed == 2) as machine:
        prepared_throughput_rounds(machine, machine.buffers(**{**THROUGHPUT, **sizes}), seed, 4)


@pytest.mark.parametrize("seed", seeds(2))
def test_expert_rows(seed, monkeypatch):
    monkeypatch.setattr(expert_rows, "CHOICES_PER_BLOCK", 32)  # several blocks find the rows of these few tokens
    with Machine(3, seed, ("sm_80", "sm_90")[seed % 2], weak_memory=seed % 2 == 1) as machine:
        expert_rounds(machine, machine.buffers(**THROUGHPUT), seed, 4)


def test_expert_rows_of_a_lost_rank():
    """Rank 1 makes no second call. The rows of rank 0 become NaN, and its tables stay within their memory."""
    with Machine(2, 3) as machine:
        buffers = machine.buffers(**{**THROUGHPUT, "num_experts": 4})
        inputs, options = inputs_of(buffers[0].config, 8), dict(layout="expert", num_worst_tokens=160)

        def dispatch(rank):
            mine = inputs[rank]
            x, idx, weights = machine.put(rank, mine.x), machine.put(rank, mine.topk_idx), machine.put(rank, mine.topk_weights)
            sent = buffers[rank].dispatch(x, idx, weights, **options)
            return sent.recv_x, sent.expert_offsets

        for x, offsets in machine.each_rank(dispatch):
            assert offsets[-1] > 0
            assert not np.isnan(x[: offsets[-1]].astype(np.float32)).any()
        x, offsets = dispatch(0)
        machine.run()
        assert (np.diff(offsets) >= 0).all()
        assert offsets[-1] <= 160
        assert np.isnan(x[: offsets[-1]].astype(np.float32)).all()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1"):
            dispatch(0)


@pytest.mark.parametrize("seed", seeds(2))
def test_sleep(seed):
    """Memory loses its contents meanwhile. Handles and prepared calls of before give the same bits after it, and calls go on."""
    sizes = {**THROUGHPUT, "hidden": 256, "low_latency": True, "low_latency_sms": 2}
    with Machine(3, seed, weak_memory=seed == 1, can_sleep=True) as machine:
        buffers = machine.buffers(**sizes)
        inputs = inputs_of(buffers[0].config, seed)
        steps, arrays = [], []
        for rank, buffer in enumerate(buffers):
            x, idx, weights = (machine.put(rank, getattr(inputs[rank], name)) for name in ("x", "topk_idx", "topk_weights"))
            steps.append(buffer.prepare_throughput(x, buffer.dispatch(x, idx, num_worst_tokens=120).handle))
            arrays.append((x, idx, weights))
        low_latency = inputs[0].x.shape[0] and all(one.topk_weights is not None for one in inputs)
        quick = (
            [buffer.prepare_low_latency(*given, use_fp8=False) for buffer, given in zip(buffers, arrays, strict=True)]
            if low_latency
            else []
        )

        def run(rank):
            sent = steps[rank].dispatch()
            rows = DeviceArray(rank, sent.views["x"].ptr, sent.views["x"].shape, "bfloat16")
            back = steps[rank].combine(rows).views["x"]
            views = quick[rank].dispatch().views["x"]
            return back, quick[rank].combine(DeviceArray(rank, views.ptr, views.shape, "bfloat16")).views["x"]

        def values():
            found = machine.each_rank(run)
            return [[array_at(view.ptr, view.shape, view.dtype).copy() for view in views] for views in found]

        wanted = values()
        for cycle in range(3):
            for step in ("sleep", "wake"):
                for buffer in buffers:
                    getattr(buffer, step)()
            if cycle % 2:
                throughput_rounds(machine, buffers, seed + cycle, 2)
                low_latency_rounds(machine, buffers, seed + cycle, 2)
            for got, want in zip(values(), wanted, strict=True):
                for one, other in zip(got, want, strict=True):
                    assert_same(one, other)


@pytest.mark.parametrize("seed", seeds(2))
def test_results_that_fill_the_pool(seed):
    """The pools grow: results are not copied, and have the same bits. It shrinks when they are gone."""
    with Machine(3, seed, weak_memory=seed == 1, can_sleep=True) as machine:
        buffers = machine.buffers(**THROUGHPUT, statistics=True)
        rounds = [ThroughputRound(machine, buffers, 100 * seed + i) for i in range(7)]
        run_rounds(machine, rounds)
        rounds[0].check()
        grown = [buffer.statistics().pool.capacity_bytes for buffer in buffers]
        assert all(buffer.statistics().pool.results_copied == 0 for buffer in buffers)
        for step in ("sleep", "wake"):
            for buffer in buffers:
                getattr(buffer, step)(**({"keep_results": True} if step == "sleep" else {}))
        for made in rounds:
            made.check()
        del made
        rounds.clear()
        gc.collect()
        given_back = [buffer.trim() for buffer in buffers]
        assert min(given_back) > 0
        assert [buffer.statistics().pool.capacity_bytes + size for buffer, size in zip(buffers, given_back, strict=True)] == grown
        throughput_rounds(machine, buffers, seed, 2)


def test_kernels_overlap():
    """A low-latency call starts while the one before it ends. A dispatch starts when no block of its routing waits for a rank."""
    sizes = {**THROUGHPUT, "num_experts": 4, "hidden": 256, "low_latency": True, "low_latency_sms": 2}
    with Machine(2, 1) as machine:
        buffers = machine.buffers(**sizes)
        throughput_rounds(machine, buffers, 1, 3)
        assert not machine.overlapped
        low_latency_rounds(machine, buffers, 1, 3)
        assert ("ll_dispatch", "ll_combine") in machine.overlapped


@pytest.mark.parametrize("seed", seeds(3))
def test_compressed_rows(seed):
    with Machine(3, seed, num_sms=(None, 1)[seed % 2], weak_memory=seed == 1) as machine:
        compressed_rounds(machine, machine.buffers(**COMPRESSED), seed, 3)


@pytest.mark.parametrize("seed", seeds(2))
def test_long_compressed_rows(seed):
    with Machine(2, seed, weak_memory=seed == 1) as machine:
        long_compressed_rounds(machine, machine.buffers(**{**LONG_COMPRESSED, "num_experts": 4}), seed, 2)


def without_fp8(machine, buffers, seed, count):
    compressed_rounds(machine, buffers, seed, count, kinds=("log10", None))


def test_compressed_rows_on_old_gpus():
    """GPUs without FP8 refuse it, and the copy engine of other ranks changes nothing."""
    with Machine(2, 1, ["sm_80", "sm_90"], weak_memory=True) as machine:
        without_fp8(machine, machine.buffers(**{**COMPRESSED, "num_experts": 4}), 1, 2)


@pytest.mark.parametrize("seed", seeds(2))
def test_mixed_architectures(seed):
    """GPUs with and without the copy engine and FP8 work together."""
    with Machine(2, seed, ["sm_80", "sm_90"], weak_memory=seed % 2 == 1) as machine:
        throughput_rounds(machine, machine.buffers(**{**THROUGHPUT, "num_experts": 4}), seed, 3)
        buffers = machine.buffers(**LOW_LATENCY)
        low_latency_rounds(machine, buffers, seed, 3, format=dict(use_fp8=False))
        for buffer in buffers:  # real ranks exchange this when they make the Buffer
            buffer._backend.low_latency.kernels.archs_without_fp8 = {0: "sm_80"}
        made = LowLatencyRound(machine, buffers, 1, format=dict()).all()  # with FP8, which one rank cannot convert to
        machine.run()
        made.round.row = replace(made.round.row, options=dict(use_fp8=False))
        made.check()


@pytest.mark.full
@pytest.mark.parametrize("group", ["sums", "low_latency_choices"])
def test_rows_of_the_table(group):
    """The rows that programs run on the host backend and on GPUs."""
    run_table(2, TABLE[group])


# --- broken kernels -------------------------------------------------------------------------------------------------------------------


BROKEN = [
    pytest.param(
        overlapped_rounds,
        "low_latency/low_latency.cuh",
        r"if \(!has_room && ",
        "if (false && ",
        id="no-wait-for-acknowledgements",
    ),
    pytest.param(
        low_latency_rounds,
        "low_latency/ll_combine_receive.cuh",
        r"st_vec\(from, empty_vec\(\)\);",
        "",
        id="rows-are-not-reset",
    ),
    pytest.param(
        compressed_low_latency_rounds,
        "low_latency/ll_combine_compressed.cuh",
        r"is_written\(held.first\) && ",
        "",
        id="codes-are-not-awaited",
    ),
    pytest.param(
        compressed_low_latency_rounds,
        "low_latency/ll_combine_compressed.cuh",
        r"if \(leads_group\(\)\) st_relaxed",
        "if (leads_group() && c.scale != kEmptySentinel) st_relaxed",
        id="scales-are-not-reset",
    ),
    pytest.param(
        opaque_rounds,
        "low_latency/ll_opaque_rows.cuh",
        r" && key\[j\] != kEmptySentinel",
        "",
        id="keys-are-not-awaited",
    ),
    pytest.param(
        opaque_rounds,
        "low_latency/ll_opaque_rows.cuh",
        r"if \(lane_idx\(\) == 0\) st_relaxed_sys\(key_of\(first, j\), kEmptySentinel\);",
        "",
        id="keys-are-not-reset",
    ),
    pytest.param(
        opaque_rounds,
        "low_latency/ll_opaque_rows.cuh",
        r"while \(__any_sync\(~0u, !is_written\(with_key\(vec, key\)\)\)\) \+\+key;",
        "",
        id="bytes-that-look-like-empty-memory",
    ),
    pytest.param(
        low_latency_rounds,
        "low_latency/ll_dispatch_send.cuh",
        r"next;\n    __syncthreads\(\);",
        "next;",
        id="no-barrier-of-a-block",
    ),
    pytest.param(
        throughput_rounds,
        "common/work.cuh",
        r"num_blocks, 1\) == gridDim.x - 1",
        "num_blocks, 1) == 0",
        id="flag-of-the-first-block",
    ),
    pytest.param(
        expert_rounds, "experts/expand_rows.cu", r"min\(begin \+ kTailRows, p.num_rows\)", "begin", id="padding-is-not-marked"
    ),
    pytest.param(
        expert_rounds, "experts/combine_choices.cu", r"ok = wait_epoch\(p, flags [^;]*;", ";", id="sums-of-choices-do-not-wait"
    ),
    pytest.param(
        expert_rounds,
        "experts/combine_choices.cu",
        r"before \+ num_done == routes.num_items",
        "before == 0",
        id="flag-after-the-first-items",
    ),
    pytest.param(
        long_compressed_rounds,
        "throughput/combine_compressed.cu",
        r"if \(lane == 0\) bulk_wait_read<1>\(\);",
        "",
        id="stage-is-filled-too-early",
    ),
    pytest.param(
        long_compressed_rounds,
        "throughput/combine_compressed.cu",
        r"__syncwarp\(\);  // all lanes have read the part and written its channels",
        "",
        id="chunk-leaves-before-it-is-whole",
    ),
    pytest.param(
        compressed_rounds,
        "common/compressed.cuh",
        r"for \(int step = 1; step < 8;",
        "for (int step = 1; step < 4;",
        id="half-a-group",
    ),
    pytest.param(throughput_rounds, "throughput/combine.cuh", r"ok = wait_epoch\(p, flags [^;]*;", ";", id="sums-do-not-wait"),
]


@pytest.mark.full
@pytest.mark.parametrize(("run_rounds", "file", "pattern", "replacement"), BROKEN)
def test_broken_kernels_fail(tmp_path, run_rounds, file, pattern, replacement):
    folder = broken(tmp_path, file, pattern, replacement)
    sizes = {
        throughput_rounds: THROUGHPUT,
        compressed_rounds: {**COMPRESSED, "num_experts": 4},
        long_compressed_rounds: {**LONG_COMPRESSED, "num_experts": 4, "hidden": 1280, "num_max_tokens_per_rank": 160},
        compressed_low_latency_rounds: {**LOW_LATENCY, "hidden": 512},
    }.get(run_rounds, LOW_LATENCY)
    options = dict(num_sms=1) if "common/work.cuh" in file else {}  # the second block starts after the first one has ended
    if file.endswith(("ll_combine_compressed.cuh", "ll_opaque_rows.cuh")):
        options["weak_memory"] = True  # words arrive in another order than they were stored
    assert fails(folder, lambda machine, seed: run_rounds(machine, machine.buffers(**sizes), seed, 8), **options)


BULK_FENCE = r"fence_release_sys\(\);\n(    for \(; signalled < now;)"
"""Of the signal warp, which follows bulk copies."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "pattern", "replacement"),
    [
        pytest.param("throughput/combine.cu", r"fence_release_sys\(\);\n      raise_flag", "raise_flag", id="no-fence"),
        pytest.param("throughput/combine.cuh", BULK_FENCE, r"\1", id="no-fence-of-the-signal-warp"),
        pytest.param("throughput/combine.cuh", BULK_FENCE, r"\1", id="compressed-no-fence-of-the-signal-warp"),
        pytest.param(
            "throughput/combine_compressed.cu",
            r"fence_release_sys\(\);\n      raise_flag",
            "raise_flag",
            id="compressed-no-fence",
        ),
        pytest.param(
            "throughput/combine_compressed.cu",
            r" fence_bulk_copies_of_shared\(\);",
            "if (next.row == 0 && part == kParts - 1) fence_bulk_copies_of_shared();",
            id="part-is-loaded-again-without-a-fence",
        ),
        pytest.param(
            "throughput/combine_compressed.cu",
            r"fence_bulk_copies_of_shared\(\);",
            "if (place.row == 0) fence_bulk_copies_of_shared();",
            id="chunk-leaves-without-a-fence",
        ),
        pytest.param("throughput/combine.cu", r"kRowBytes\);\n    __syncwarp\(\);", "kRowBytes);", id="no-wait-for-other-lanes"),
        pytest.param(
            "throughput/recv_window.cuh",
            r"others \|= static_cast<u32>\(first\) \^ epoch;",
            "",
            id="no-wait-for-a-word",
        ),
    ],
)
def test_missing_memory_order_fails(request, tmp_path, file, pattern, replacement):
    folder = broken(tmp_path, file, pattern, replacement)
    options = dict(arch="sm_90" if "bulk" in pattern or pattern == BULK_FENCE else "sm_80", weak_memory=True)
    is_compressed = "compressed" in file or "compressed" in request.node.callspec.id
    run_rounds, sizes = (without_fp8, {**COMPRESSED, "num_experts": 4}) if is_compressed else (throughput_rounds, THROUGHPUT)
    assert fails(folder, lambda machine, seed: run_rounds(machine, machine.buffers(**sizes), seed, 8), **options)
