"""Run the benchmark without a GPU, and read and compare its result."""

import json
import os
import subprocess

import pytest
from launch import python_on, run_bench
from paths import ROOT

pytest.importorskip("rich")

from deepep_rt.bench import report
from deepep_rt.bench.ranks import check_writable
from deepep_rt.bench.references import Pair, Point, difference_note, load, pair_rows
from deepep_rt.bench.results import Row, Sizes, read, throughput_rows
from deepep_rt.errors import EPConfigError

PEERS = ROOT / "bench/reference/h200x8_peers.json"
PROVENANCE = ("date", "commit", "versions", "boundary", "machine", "settings")
WORKS = {
    *(f"dispatch_{dtype}_{routing}" for dtype in ("bf16", "fp8") for routing in ("unknown", "known", "worst")),
    *("combine_bf16", "combine_expert", "combine_topk", "copy_expert", "permute_expert"),
    *("dispatch_expert_unknown", "dispatch_expert_known", "combine_fp8", "combine_log10"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run small sizes, and 4096 tokens because the reference has them. Return the output and the result file."""
    file = tmp_path_factory.mktemp("bench") / "result.json"
    sizes = ["--quick", "--tokens", "16,4096", "--hidden", "128", "--experts", "16", "--sms", "24,64"]
    return run_bench(2, "bench/throughput.py", *sizes, "--json", file, "--compare", PEERS).stdout, file


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for path, is_file in ((tmp_path, False), (tmp_path / "new", False), (tmp_path / "result.json", True)):
        with pytest.raises(EPConfigError, match=r"cannot be written.*with --there"):
            check_writable(None, path, "--there", is_file=is_file)


def test_folders_are_created(tmp_path):
    for _ in range(2):
        check_writable(None, tmp_path / "new" / "folder", "--out")
        check_writable(None, tmp_path / "other" / "result.json", "--json", is_file=True)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {"new", "new/folder", "other"}


def test_low_latency(tmp_path):
    file = tmp_path / "result.json"
    sizes = ["--tokens", "1,8", "--hidden", "128", "--experts", "16"]
    printed = run_bench(2, "bench/low_latency.py", *sizes, "--json", file, "--compare", PEERS).stdout
    assert "27.7" in printed, "DeepEP V1 with one token"
    assert "V2" not in printed, "the reference has no such figures"
    result = json.loads(file.read_text())
    assert [row["tokens"] for row in result["rows"]] == [1, 8]
    for row in result["rows"]:
        assert min(row["call_us"], row["host_dispatch_us"], row["host_combine_us"]) > 0
        assert row["graph_both_us"] is None, "no graphs without a GPU"
    assert all(result[name] for name in (*PROVENANCE, "low_latency_sms"))


def test_result_file(run):
    result = json.loads(run[1].read_text())
    assert {(row["work"], row["tokens"], row["sms"]) for row in result["rows"]} == {
        (work, tokens, sms) for work in WORKS for tokens in (16, 4096) for sms in (24, 64)
    }
    for row in result["rows"]:
        assert row["us"] > 0
        assert row["gb_s"] > row["remote_gb_s"] > 0
        assert (row["host_us"] is None) == row["work"].endswith("unknown")
        is_prepared = row["work"] in ("dispatch_bf16_known", "dispatch_fp8_known", "combine_bf16")
        assert (row["host_prepared_us"] is not None) == is_prepared
    ceiling = result["copy_ceiling_gb_s"]
    assert ceiling["used"] == ceiling["by_method"]["messages"] == max(ceiling["by_sms"].values()) > 0
    assert result["num_ranks"] == 2
    assert all(result[name] for name in (*PROVENANCE, "byte_formula"))


def test_bytes_are_received_rows_times_row_bytes(run):
    rows = json.loads(run[1].read_text())["rows"]
    found = {row["work"]: row["gb_s"] * 1e3 * row["us"] for row in rows if row["tokens"] == 16 and row["sms"] == 24}
    row_bytes = {work: 128 + 4 if "fp8" in work else 256 for work in WORKS}
    row_bytes |= {"combine_fp8": 128 + 16, "combine_log10": 128 + 32 + 16}  # as they travel: a multiple of 16
    assert all(row["row_bytes"] == row_bytes[row["work"]] for row in rows)
    num_rows = {round(found[work] / row_bytes[work], 6) for work in WORKS}
    assert len(num_rows) == 1
    assert 16 < num_rows.pop() <= 32  # top-8 of 16 experts: most tokens go to both ranks


def test_table_and_comparison_are_printed(run):
    printed = run[0]
    assert "ceiling" not in printed
    assert "prepared us" in printed
    assert "compared with DeepEP V1" in printed
    assert "compared with DeepEP V2" in printed
    assert "best" in printed


def test_compressed_combines_compare_with_the_plain_one(run):
    result = read(run[1])
    rows = {(row.work, row.tokens, row.sms): row for row in throughput_rows(result)}
    for (work, tokens, sms), row in rows.items():
        if work in ("combine_fp8", "combine_log10"):
            assert row.percent_of_combine == pytest.approx(100 * row.us / rows["combine_bf16", tokens, sms].us)
        else:
            assert row.percent_of_combine is None
    assert result["left_out"] == {}
    table = report.compression_table(result)
    assert len(table.rows) == 2 * 2 * 2
    row = rows["combine_log10", 4096, 64]
    assert ["combine_log10", "4096", "64", f"{row.us:.1f}", f"{row.percent_of_combine:.1f}", "176", "68.8"] in table.rows
    assert "combine with compressed rows" in run[0]


def test_older_results_have_no_compressed_combines(capsys):
    result = read(ROOT / "bench/results/h200x8_2026-11-22.json")
    assert report.compression_table(result) is None
    report.print_result(result)
    printed = capsys.readouterr().out
    assert "compressed rows:" in printed, "the convention of bytes"
    assert "not measured" not in printed
    assert "% of combine" not in printed


def test_compressed_low_latency_combines_have_columns():
    """Older results have none, and neither have sizes that rows cannot be compressed for."""
    result = read(ROOT / "bench/results/h200x4_2026-11-22_low_latency.json")
    heads = list(report.low_latency_columns(result))
    assert not {"C fp8", "C log10"} & set(heads)
    result["rows"][-1].update(graph_combine_fp8_us=7.5, graph_combine_log10_us=None)
    with_fp8 = list(report.low_latency_columns(result))
    assert with_fp8 == [*heads[:2], "C fp8", *heads[2:]]


@pytest.mark.full
def test_works_that_are_not_possible_are_left_out(tmp_path):
    """Compressed rows need a multiple of 128 channels. The other works are measured, and the reason stands below the table."""
    file = tmp_path / "result.json"
    sizes = ["--quick", "--tokens", "16", "--hidden", "192", "--sms", "8"]
    printed = run_bench(2, "bench/throughput.py", *sizes, "--json", file).stdout
    result = read(file)
    assert {row.work for row in throughput_rows(result)} == WORKS - {"combine_fp8", "combine_log10"}
    assert set(result["left_out"]) == {"combine_fp8", "combine_log10"}
    assert "expected a multiple of 128 with compress='fp8'" in result["left_out"]["combine_fp8"]
    assert "combine_fp8 was not measured: hidden=192" in " ".join(printed.split())


@pytest.mark.full
def test_chosen_works(tmp_path):
    file, sizes = tmp_path / "result.json", ["--quick", "--tokens", "16", "--hidden", "128", "--sms", "8"]
    printed = run_bench(2, "bench/throughput.py", *sizes, "--works", "combine_fp8,dispatch_bf16_known", "--json", file).stdout
    rows = throughput_rows(read(file))
    assert [row.work for row in rows] == ["combine_fp8", "dispatch_bf16_known"]
    assert rows[0].percent_of_combine is None, "the plain combine was not measured"
    assert "combine_bf16" not in printed
    error = run_bench(2, "bench/throughput.py", "--works", "combine_fp8,permute", status=2).stderr
    assert "'permute' is no work; expected some of dispatch_bf16_unknown, " in error


@pytest.mark.full
@pytest.mark.parametrize("work", ["combine_fp8", "combine_log10"])
def test_wrong_sums_of_compressed_rows_are_found(work, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(f"""
from mpi4py import MPI
from deepep_rt import EPError
from deepep_rt.backends.host import throughput as host
from deepep_rt.bench import throughput
expand = host.expand
def wrong(rows, hidden, compression):
    made = expand(rows, hidden, compression)
    if MPI.COMM_WORLD.rank == 1 and "combine_" + compression == "{work}":
        made[3:4, 5] *= 2
    return made
host.expand = wrong
settings = throughput.Settings(backend="host", hidden=128, experts=16, tokens=(16,), sms=(8,), quick=True)
try:
    throughput.run(MPI.COMM_WORLD, settings)
except EPError as error:
    print(error)
""")
    done = subprocess.run(python_on(2, script), capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
    assert done.stdout.count(f"{work}: ") == 2, done.stdout + done.stderr
    assert "of the 16 checked sums of rank 1 differ" in done.stdout


def test_peer_figures():
    first, second, _ = load(PEERS)
    assert "H200" in first.where
    assert first.name.startswith("DeepEP V1")
    assert first.throughput["dispatch_bf16_known", 4096, 24].us == 1001.9
    assert first.throughput["dispatch_bf16_unknown", 8192, 24].us == 2029.9
    assert first.low_latency["both_fp8", 1] == 27.7
    assert first.low_latency["dispatch_bf16", 128] == 61.9
    assert second.throughput
    assert not second.low_latency
    assert not any(reference.throughput for reference in load(PEERS)[2:])  # figures of another type


def test_references_without_num_ranks_and_settings(tmp_path):
    """Files from other sources have no keys for the problem."""
    found = json.loads(PEERS.read_text())
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({name: value for name, value in found.items() if name not in ("num_ranks", "settings")}))
    assert load(plain) == load(PEERS)
    found["num_ranks"] = 4
    plain.write_text(json.dumps(found))
    assert load(plain)[0].sizes == (4, 7168, 8, 256)


def test_expected_rows_agree_with_measured_rows():
    """The file of references has the number of received rows. Our results give it by bytes and times."""
    sizes = load(PEERS)[0].sizes
    assert round(8 * sizes.rows_per_peer(4096)) == pytest.approx(21673, abs=20)
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        result = read(path)
        for row in throughput_rows(result):
            expected = Sizes.of(result).remote_bytes(row.work, row.tokens)
            assert row.remote_gb_s * row.us * 1e3 == pytest.approx(expected, rel=0.01)


def test_bandwidth_of_references_comes_from_their_own_sizes():
    reference = load(PEERS)[0]
    point = reference.throughput["combine_bf16", 4096, 24]
    assert point.remote_gb_s == pytest.approx(21673 * 7 / 8 * 2 * 7168 / 957.4 / 1e3, rel=0.002)


def test_other_problems_are_named():
    sizes = load(PEERS)[0].sizes
    assert difference_note(sizes, load(PEERS)[0]) == ""
    assert "ranks 8 (here 4)" in difference_note(sizes._replace(num_ranks=4), load(PEERS)[0])


def test_compare_pairs_equal_work_and_the_best():
    def row(sms, us):
        return Row("combine_bf16", 4096, sms, us, 1.0, 1.0)

    theirs = {("combine_bf16", 4096, 24): Point(990.0, 1.0), ("combine_bf16", 4096, 64): Point(960.0, 1.0)}
    first, best = pair_rows([row(24, 900.0), row(32, 800.0)], theirs)
    assert first == ("combine_bf16", 4096, 24, (900.0, 1.0), (990.0, 1.0))
    assert best == ("combine_bf16", 4096, "best", (800.0, 1.0), (960.0, 1.0))
    assert (first.ratio(same_problem=True), best.ratio(same_problem=True)) == ("1.10", "1.20")
    assert pair_rows([row(24, 900.0)], {("combine_bf16", 8192, 24): Point(1.0, 1.0)}) == []


def test_other_problems_compare_by_bandwidth(capsys):
    """4 ranks send fewer rows than 8, so their times do not compare."""
    ours, theirs = Point(500.0, 300.0), Point(1000.0, 250.0)
    pair = Pair("combine_bf16", 4096, 24, ours, theirs)
    assert pair.ratio(same_problem=False) == "1.20"
    assert pair._replace(theirs=Point(1000.0, 0.0)).ratio(same_problem=False) == "-"
    result = read(ROOT / "bench/results/h200x4_2026-11-22.json")
    report.print_result(result, load(PEERS))
    printed = " ".join(capsys.readouterr().out.split())
    assert "of remote bandwidth" in printed
    assert "ranks 8 (here 4)" in printed


@pytest.mark.parametrize("columns", [79, 120, 200])
def test_no_column_head_is_cut(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("h200x4_2026-11-22", "h200x4_2026-11-22_low_latency"):
        result = read(ROOT / f"bench/results/{name}.json")
        report.print_result(result, [*load(PEERS), *load(ROOT / f"bench/results/{name}.json")])
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "…" in line]
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if line.startswith("│") and not line.endswith("│")]
    words = " ".join(lines).split()
    for head in ("remote", "ceiling", "their", "DeepEP", "V1", "D+C", "one", "C", "recv", "p99"):
        assert head in words


def test_copies_within_a_rank_have_no_share_of_the_links(capsys):
    report.print_result(read(ROOT / "bench/results/h200x2_2026-11-26.json"))
    lines = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if "_expert" in line]
    shares = {line[1]: line[6:8] for line in lines}
    assert shares["copy_expert"] == shares["permute_expert"] == ["-", "-"]
    assert "-" not in shares["dispatch_expert_known"]


def test_one_rank_has_no_remote_bandwidth(capsys):
    result = read(ROOT / "bench/results/h200x4_2026-11-22.json")
    report.print_result(result)
    assert "345.8 GB/s remote" in " ".join(capsys.readouterr().out.split())
    report.print_result({**result, "num_ranks": 1})
    printed = " ".join(capsys.readouterr().out.split())
    assert "345.8 GB/s within the one rank" in printed
    assert "345.8 GB/s remote" not in printed


def test_a_result_compares_with_itself(run, capsys):
    (reference,) = load(run[1])
    result = read(run[1])
    rows = throughput_rows(result)
    pairs = pair_rows(rows, reference.throughput)
    assert len(pairs) == len(rows) + 2 * len(WORKS)
    assert all(pair.ours == pair.theirs for pair in pairs)
    report.print_result(result, [reference])
    assert "1.00" in capsys.readouterr().out
