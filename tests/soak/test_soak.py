"""Run `python -m deepep_rt soak`: it passes without damage, and finds each damage."""

import json
import re
import shlex
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from paths import PROGRAMS

pytest.importorskip("typer")
pytest.importorskip("ml_dtypes")

import low_latency_oracle
import ml_dtypes
import oracle
from launch import python_on, run_command

from deepep_rt import EPConfigError, soak
from deepep_rt.arrays.compressed_rows import compress, expand
from deepep_rt.soak import arrays as soak_arrays
from deepep_rt.soak import buffers as soak_buffers
from deepep_rt.soak import ending
from deepep_rt.soak import plan as soak_plan
from deepep_rt.soak.arrays import Arrays, row_keys
from deepep_rt.soak.expected import ExpertRouting, Routing, after_compression, to_fp8

DAMAGED = PROGRAMS / "damaged_soak.py"


DAMAGES = {
    "dispatch": "recv_x",
    "scales": "recv_x_scales",
    "experts": "recv_topk_idx",
    "swapped": "recv_x",
    "later": "recv_x",
    "combine": "x",
    "weights": "topk_weights",
    "unwritten": "x",
    "counts": "num_recv_tokens_per_expert",
    "rows": "recv_x",
    "sums": "x",
}
"""The damages of `damaged_soak`, and the array that each damages."""


def run(num_ranks, *words, **settings):
    """Run a command on `num_ranks` ranks. Return its standard output and standard error."""
    return run_command(*python_on(num_ranks, *words), **settings)


def run_soak(num_ranks, *options, **settings):
    return run(num_ranks, "-m", "deepep_rt", "soak", "--backend", "host", *options, **settings)


def damaged(num_ranks, folder, damages, *options, **settings):
    return run(num_ranks, DAMAGED, folder, "--backend", "host", *options, "--", *damages, **settings)


# --- damage ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run with each damage. Return the folder of the reports, and the output."""
    folder = tmp_path_factory.mktemp("damaged")
    printed, _ = damaged(2, folder, DAMAGES, "--rounds", "100", "--rounds-per-buffer", "8", "--seed", "3")
    return folder, printed


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(reports, damage):
    folder, printed = reports
    found = json.loads((folder / f"{damage}.json").read_text())
    assert found["status"] == "mismatch"
    first = found["mismatches"][0]
    assert (first["rank"], first["array"]) == (1, DAMAGES[damage])
    assert first["expected"] != first["found"]
    assert f"--seed 3 --round {first['seen_in_round']}" in first["command"]
    text = f"MISMATCH on rank 1 in round {first['round']}"
    assert any(line.startswith(text) and "of seed 3" in line for line in printed.splitlines())
    for word in ("first differing byte", first["command"], first["expected"], first["found"]):
        assert word in printed


def test_a_flipped_bit_is_shown_as_it_is(reports):
    first = json.loads((reports[0] / "combine.json").read_text())["mismatches"][0]
    assert first["differing_bytes"] == 1
    assert first["first_byte"] == first["bytes"] - 1
    at = first["first_byte"] - first["shown_from"]
    wanted, got = (bytes.fromhex(first[name]) for name in ("expected", "found"))
    assert wanted[at] ^ got[at] == 0x10


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"later", "unwritten"}))
def test_the_printed_command_repeats_the_round(reports, damage):
    """With the same damage only that round runs, and fails in the same mode."""
    first, again = (json.loads((reports[0] / f"{damage}{which}.json").read_text()) for which in ("", "_again"))
    same = ("rank", "round", "call", "array", "first_byte", "expected", "found")
    assert [again["mismatches"][0][name] for name in same] == [first["mismatches"][0][name] for name in same]
    assert again["rounds"] == 1


@pytest.mark.full
def test_the_printed_command_passes_without_damage(reports):
    words = shlex.split(json.loads((reports[0] / "combine.json").read_text())["mismatches"][0]["command"])
    assert words[:6] == ["mpirun", "-n", "2", "python", "-m", "deepep_rt"]
    printed, _ = run(2, "-m", "deepep_rt", *words[6:])
    assert "passed: 1 round " in printed


@pytest.mark.full
@pytest.mark.parametrize(
    ("damage", "ranks", "options", "rank", "call"),
    [
        ("roundings", 4, ["--rounds", "32"], 3, "combine"),
        ("compression", 2, ["--rounds", "60", "--hidden", "256"], 1, ".* with compress="),
    ],
)
def test_damage_between_nodes_is_found(damage, ranks, options, rank, call, tmp_path):
    """Sums of nodes that are not rounded, and wrong compressed rows."""
    damaged(ranks, tmp_path, [damage], *options, "--seed", "3", "--ranks-per-node", "2")
    first, again = (json.loads((tmp_path / f"{damage}{which}.json").read_text())["mismatches"][0] for which in ("", "_again"))
    assert (first["rank"], first["array"]) == (rank, "x")
    assert re.match(call, first["call"])
    assert again["found"] == first["found"], "the command declares the same nodes"


@pytest.mark.parametrize(
    ("damage", "seed", "words"),
    [
        ("raise", 5, ["rank 1", "RuntimeError", "fire"]),
        pytest.param("sleep", 5, ["rank 1", "waited"], marks=pytest.mark.full),
        # in a Buffer that masks silent ranks
        pytest.param("silent", 7, ["ranks [1]", "masked", "timeout_s=2"], marks=pytest.mark.full),
    ],
)
def test_one_rank_ends_all_with_its_name(damage, seed, words, tmp_path):
    options = "--rounds", "9999", "--seed", str(seed), "--timeout-s", "2"
    printed, errors = damaged(2, tmp_path, [damage], *options, status=None, limit_s=60)
    for word in (*words, f"--seed {seed} --round"):
        assert word in printed + errors, printed + errors
    assert "MISMATCH" not in printed + errors, "differences that follow from a silent rank are not reported"
    assert json.loads((tmp_path / f"{damage}.json").read_text())["status"] == "error"


# --- interruption ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_run_prints_its_result_so_far(signal_number, tmp_path):
    """Interrupt one rank. Launchers differ in what they send, and to which ranks."""
    options = "--backend", "host", "--minutes", "60", "--progress-s", "0.01", "--json", tmp_path / "soak.json"
    printed, errors = run(2, PROGRAMS / "interrupted_soak.py", signal_number.value, *options, status=130)
    assert "Traceback" not in errors, errors
    assert re.match(r"interrupted: \d\d+ rounds in .* on 2 ranks ", printed), printed
    document = json.loads((tmp_path / "soak.json").read_text())
    assert (document["status"], document["ranks_counted"], document["mismatches"]) == ("interrupted", 2, [])
    assert document["calls"]["dispatch"]["count"] > 0


# --- no damage ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_rounds_pass(num_ranks, tmp_path):
    report = tmp_path / "folder" / "soak.json"
    printed, progress = run_soak(num_ranks, "--rounds", "40", "--rounds-per-buffer", "8", "--seed", num_ranks, "--json", report)
    found = json.loads(report.read_text())
    assert (found["status"], found["rounds"], found["num_ranks"], found["seed"]) == ("passed", 40, num_ranks, num_ranks)
    assert found["buffers"] == 5
    assert found["checked_bytes"] > 10**6
    for call in ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine"):
        times = found["calls"][call]
        assert times["count"] > 0
        assert 0 < times["p50_us"] <= times["p99_us"] <= times["max_us"]
        assert call in printed
    assert "40 rounds" in printed
    assert "soak:" in progress


def test_groups_run_beside_each_other(tmp_path):
    """Each of its own size, with a seed and a report of its own."""
    report = tmp_path / "soak.json"
    printed, _ = run_soak(3, "--groups", "2,1", "--rounds", "16", "--seed", 5, "--sleep-every", 4, "--json", report)
    found = [json.loads((tmp_path / f"soak-{number}.json").read_text()) for number in range(2)]
    assert [(one["status"], one["num_ranks"], one["seed"], one["rounds"]) for one in found] == [
        ("passed", 2, 5, 16),
        ("passed", 1, 6, 16),
    ]
    assert all(one["sleeps"] for one in found)
    assert printed.count("passed: 16 rounds") == 2


@pytest.mark.full
def test_minutes_end_the_run(tmp_path):
    report = tmp_path / "soak.json"
    _, progress = run_soak(2, "--minutes", "0.03", "--progress-s", "0.5", "--json", report)
    found = json.loads(report.read_text())
    assert found["status"] == "passed"
    assert 1.8 <= found["seconds"] < 30
    in_buffer = found["rounds"] % found["settings"]["rounds_per_buffer"]  # ranks synchronize at the end of a Buffer too
    assert in_buffer % 16 == 0 or found["rounds"] % 16 == 0
    assert re.search(r"soak: .*round \d+", progress)


def test_plans_draw_every_option():
    """Some hundred plans contain every option. No round runs."""

    def buffers_of(on_gpu, **more):
        options = soak_buffers.Options(seed=1, num_ranks=4, on_gpu=on_gpu, **more)
        return [soak_buffers.buffer_of(options, number) for number in range(40)]

    options = soak_buffers.Options(seed=1, num_ranks=4, on_gpu=True)
    rounds = [soak_plan.round_of(options, number) for number in range(1500)]
    assert {plan.kind for plan in rounds} == {"throughput", "expert_rows", "low_latency", "graph"}
    calls = [call for plan in rounds if plan.kind == "throughput" for call in plan.calls]
    values = {name: {getattr(call, name) for call in calls} for name in vars(calls[0])}
    assert {"bfloat16", "float32", "float8_e4m3fn", "uint8"} <= values["dtype"]
    assert values["mode"] == {"plain", "async", "event", "stream"}
    assert values["biases"] == {0, 1, 2}
    assert values["compress"] == {None, "fp8", "log10"}
    assert {True, False} == values["is_repeat"] == values["has_weights"] == values["sums_weights"]
    assert any(plan.worst is not None for plan in rounds)
    assert any(plan.worst is None for plan in rounds)
    assert any(0 in plan.tokens for plan in rounds)
    assert any(plan.keep_rounds for plan in rounds)
    assert any(max(plan.delays_s) > 0 for plan in rounds)
    assert {plan.sleep for plan in rounds} == {"", "keep", "lose"}
    assert {plan.trims for plan in rounds} == {True, False}
    often = soak_buffers.Options(seed=1, num_ranks=4, on_gpu=True, sleep_every=1)
    assert {soak_plan.round_of(often, number).sleep for number in range(50)} == {"keep", "lose"}
    assert {buffer.ranks_per_node for buffer in buffers_of(on_gpu=True)} == {None}, "a host of GPUs may lack a transport"
    on_host = buffers_of(on_gpu=False)
    assert {buffer.ranks_per_node for buffer in on_host} == {None, 1, 2}
    assert {buffer.path for buffer in on_host} == {"auto", "hierarchical", "direct"}
    assert {buffer.num_max_recv_tokens is None for buffer in on_host} == {True, False}
    assert {buffer.ranks_per_node for buffer in buffers_of(on_gpu=True, ranks_per_node=2)} == {2}
    by_expert = [call for plan in rounds if plan.kind == "expert_rows" for call in plan.calls]
    for name in ("is_repeat", "by_column", "has_weights", "zero_padding", "sums_weights", "is_weighted"):
        assert {getattr(call, name) for call in by_expert} == {True, False}, name
    assert {call.biases for call in by_expert} == {0, 1}
    assert {call.reduce for call in by_expert} == {"rank", "topk"}
    assert {call.compress for call in by_expert} == {None, "fp8", "log10"}
    steps = [step for plan in rounds for step in plan.steps]
    assert {(step.compress, step.reduce_early) for step in steps} == {
        *((form, True) for form in (None, "fp8", "log10")),
        (None, False),
    }
    steps = [call for plan in rounds if plan.kind == "low_latency" for call in plan.steps]
    for name in (
        "use_fp8",
        "use_ue8m0",
        "hook",
        "zero_copy",
        "out",
        "reduce_early",
        "early_weights",
        "stats",
        "has_excluded",
        "is_quantised",
        "has_fewer",
    ):
        assert {getattr(step, name) for step in steps} == {True, False}, name
    assert any(len(plan.steps) > 1 for plan in rounds if plan.kind == "low_latency")


def test_a_fifth_of_the_combines_compress_rows():
    """Rows with other numbers of channels are not compressed, and GPUs without FP8 use the other format alone."""

    def drawn(**settings):
        options = soak_buffers.Options(seed=2, num_ranks=4, on_gpu=True, **settings)
        rounds = [soak_plan.round_of(options, number) for number in range(1500)]
        return [call.compress for plan in rounds for call in plan.calls]

    found = drawn(hidden=7168)
    assert 0.17 < sum(form is not None for form in found) / len(found) < 0.23
    assert set(drawn(hidden=7184)) == {None}
    assert set(drawn(hidden=7168, has_fp8=False)) == {None, "log10"}


def test_a_plan_comes_from_the_seed_alone():
    options = soak_buffers.Options(seed=9, num_ranks=3, on_gpu=False)
    assert soak_plan.round_of(options, 77) == soak_plan.round_of(options, 77)
    assert soak_plan.round_of(options, 77) != soak_plan.round_of(soak_buffers.Options(seed=10, num_ranks=3, on_gpu=False), 77)
    for rank in range(3):
        mine = soak_plan.experts_of(options, soak_plan.round_of(options, 77), 0, rank)
        assert np.array_equal(mine, soak_plan.experts_of(options, soak_plan.round_of(options, 77), 0, rank))


# --- the expected bytes and the oracle of the tests --------------------------------------------------------------------------------


def test_generated_bytes_do_not_change():
    """A receiver on another machine generates the same bytes, even with another NumPy. All rows differ."""
    keys = row_keys(12345, np.arange(3), np.array([7, 8, 9]))
    words = Arrays(on_gpu=False).words(keys, 4)
    assert words.dtype == np.uint32
    assert len(np.unique(words)) == words.size
    assert np.array_equal(words, Arrays(on_gpu=False).words(row_keys(12345, np.arange(3), np.array([7, 8, 9])), 4))
    assert not np.array_equal(words, Arrays(on_gpu=False).words(row_keys(12346, np.arange(3), np.array([7, 8, 9])), 4))


def test_positions_agree_with_the_oracle():
    options = soak_buffers.Options(seed=4, num_ranks=3, on_gpu=False, rounds_per_buffer=4)
    for number in range(40):
        plan, experts = soak_plan.round_of(options, number), soak_buffers.buffer_of(options, number // 4).num_experts
        choices = [soak_plan.experts_of(options, plan, 0, rank) for rank in range(3)]
        inputs = [oracle.RankInputs(np.zeros((len(idx), 4), np.float32), idx) for idx in choices]
        for rank in range(3):
            worst = plan.worst and plan.worst[rank]
            mine = Routing(choices, rank, experts, plan.worst)
            theirs = oracle.expected_dispatch(rank, inputs, experts, num_worst_tokens=worst)
            assert np.array_equal(np.stack(mine.kept, axis=1), theirs.src_idx[: theirs.num_kept])
            assert np.array_equal(mine.local_choices, theirs.topk_idx)
            assert (mine.num_sent_here, mine.num_per_expert.tolist()) == (theirs.num_recv, theirs.num_recv_per_expert)
            found = ExpertRouting(choices, rank, experts, 10)
            wanted = low_latency_oracle.expected_dispatch(rank, inputs, experts).entries
            for expert, entries in enumerate(wanted):
                at = found.entries.expert == expert
                rows = zip(found.entries.source[at], found.entries.token[at], found.entries.choice[at], strict=True)
                assert [*rows] == entries[:10]
        fits = [ExpertRouting(choices, rank, experts, 10).fits.sum() for rank in range(3)]
        kept = [len(ExpertRouting(choices, rank, experts, 10).entries.expert) for rank in range(3)]
        assert sum(fits) == sum(kept)


@pytest.mark.parametrize(("round_scale", "ue8m0"), [(False, False), (True, False), (True, True)])
def test_fp8_agrees_with_the_oracle(round_scale, ue8m0):
    arrays = Arrays(on_gpu=False)
    rows = arrays.numbers(row_keys(5, np.arange(6)), 256, "bfloat16")
    codes, scales = to_fp8(arrays, rows, round_scale=round_scale, ue8m0=ue8m0)
    wanted, factors = low_latency_oracle.to_fp8(rows.view(ml_dtypes.bfloat16), round_scale)
    if ue8m0:
        factors = factors.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert codes.tobytes() == wanted.tobytes()
    assert scales.tobytes() == factors.tobytes()


@pytest.mark.parametrize("form", ["fp8", "log10"])
def test_compressed_rows_agree_with_the_library(form):
    """Soak computes the values after the way without packing rows, so that it can do so on a GPU."""
    arrays, draw = Arrays(on_gpu=False), np.random.default_rng(8)
    made = [
        arrays.to_float32(arrays.numbers(row_keys(5, np.arange(40)), 384, dtype), dtype)
        for dtype in ("bfloat16", "float16", "float32")
    ]
    made.append(draw.standard_normal((40, 384), np.float32))
    made.append(draw.lognormal(0, 6, (40, 384)).astype(np.float32) * np.sign(made[3]))
    made.append(np.where(draw.random((40, 384)) < 0.05, made[-1], np.float32(0)))  # most channels are zero
    made.append(np.ldexp(made[3], draw.integers(-140, 100, (40, 1))))  # also tiny
    made.append(np.repeat(made[3][:, :1], 384, axis=1))  # all channels are equal, so all lower bits are set
    made.append(-np.zeros((3, 384), np.float32))
    made.append(np.zeros((0, 384), np.float32))
    rows = np.concatenate(made)
    wanted = expand(compress(rows, form), 384, form)
    assert after_compression(arrays, rows, form).tobytes() == wanted.tobytes()


def test_compressed_rows_on_a_gpu_come_in_parts(monkeypatch):
    arrays = soak_arrays.Arrays(on_gpu=False)
    rows = np.random.default_rng(3).standard_normal((50, 256), np.float32)
    whole = after_compression(arrays, rows, "log10")
    monkeypatch.setattr(soak_arrays, "_CHUNK_BYTES", 7 * 1024)
    assert after_compression(arrays, rows, "log10").tobytes() == whole.tobytes()


def test_fp8_ties_go_to_even():
    values = np.zeros((1, 128), np.float32)
    values[0, :4] = 448, 17, 19, -17  # between 16 and 18, and 18 and 20
    codes, _ = to_fp8(Arrays(on_gpu=False), (values.view(np.uint32) >> 16).astype(np.uint16), round_scale=False, ue8m0=False)
    assert codes.view(ml_dtypes.float8_e4m3fn)[0, :4].astype(np.float32).tolist() == [448, 16, 20, -16]


# --- the command line --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(minutes=0), "--minutes is 0"),
        (dict(rounds=0), "--rounds is 0"),
        (dict(round=-1, seed=1), "--round is -1"),
        (dict(since=3), "--since is 3"),
        (dict(round=3, since=4, seed=1), "--since is 4"),
        (dict(round=3), "--seed"),
        (dict(backend="cpu"), "--backend is 'cpu'"),
        (dict(timeout_s=0.0), "--timeout-s is 0"),
        (dict(progress_s=-1.0), "--progress-s is -1"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(EPConfigError, match=message):
        soak.Asked(**options).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "/proc/nowhere/soak.json"], "--json"),
        (["--hidden", "7"], "hidden=7"),
        (["--groups", "2,2"], "--groups is '2,2'; expected numbers of ranks"),
    ],
)
def test_runs_that_cannot_start_are_errors(options, message):
    words = [sys.executable, "-m", "deepep_rt", "soak", "--backend", "host", "--rounds", "1", *options]
    _, errors = run_command(*words, status=1)
    assert message in errors
    assert "Traceback" not in errors


# --- parts -------------------------------------------------------------------------------------------------------------------------


def test_differences_are_found_on_a_gpu():
    """On a GPU, a comparison returns numbers even if no byte differs, and the host reads them later."""
    arrays = Arrays(on_gpu=False)
    arrays.on_gpu = True
    want = np.arange(40, dtype=np.uint8)
    got = want.copy()
    assert arrays.difference(got, want)[0] == 0
    got[[37, 39]] = 0
    found = arrays.difference(got, want)
    assert found[:3].tolist() == [2, 37, 32]
    assert found[3:19].tolist() == [*range(32, 40), *[39] * 8]
    assert found[19:27].tolist() == [32, 33, 34, 35, 36, 0, 38, 0]


@pytest.mark.parametrize(
    ("call", "nodes", "seed"),
    [
        ("none", 1, 1),
        *(pytest.param("none", 2, seed, marks=pytest.mark.full) for seed in (1, 5)),
        pytest.param("low_latency_dispatch", 1, 1, marks=pytest.mark.full),
    ],
)
def test_rounds_for_gpus(call, nodes, seed, tmp_path):
    """Run graphs, streams and comparisons of GPU rounds, with NumPy for CuPy. On one node, some combines compress rows.

    On two nodes, ranks with room hear later of a dispatch that brings another rank too many rows. With seed 5 such a round has no delays.
    """
    sizes = ["--hidden", "256", "--tokens", "32", "--low-latency-tokens", "8", "--topk", "2", "--experts", "4"]
    options = ["--rounds", "80", "--rounds-per-buffer", "20", "--seed", str(seed), "--json", tmp_path / "soak.json", *sizes]
    options += ["--ranks-per-node", str(2 // nodes)]
    run(2, PROGRAMS / "soak_as_on_gpus.py", call, *options, status=int(call != "none"))
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["status"] == ("passed" if call == "none" else "mismatch")
    assert found["settings"]["on_gpu"]
    for first in found["mismatches"][:1]:
        assert (first["rank"], first["array"], first["first_byte"] % 128) == (1, "recv_x", 0)
        assert first["call"].startswith(call)
        assert "of local expert" in first["row"]


def test_the_watchdog_ends_a_silent_rank(monkeypatch, capfd):
    ended = threading.Event()
    comm = SimpleNamespace(Get_rank=lambda: 3, Abort=lambda status: ended.set())
    monkeypatch.setattr(ending, "_GRACE_S", 0.0)
    watchdog = ending.Watchdog(comm, lambda: "round 7 of seed 1, combine")
    with watchdog:
        watchdog.feed(0.1)
        assert ended.wait(20)
    printed = capfd.readouterr().err
    assert "rank 3: no progress for" in printed
    assert "in round 7 of seed 1, combine" in printed
    assert "test_the_watchdog_ends_a_silent_rank" in printed, "the stack shows where the rank hangs"
