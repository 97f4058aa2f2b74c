"""Run `python -m deepep_rt bench` without GPUs: output of rank 0, pictures and report."""

import dataclasses
import itertools
import os
import pty
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser

import pytest
from paths import ROOT

pytest.importorskip("typer")
pytest.importorskip("matplotlib", reason="matplotlib comes with deepep_rt[bench]")

from launch import python_on, run_bench
from markdown_it import MarkdownIt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from without import without

from deepep_rt._install import pip_install
from deepep_rt.bench import figures as bench_figures
from deepep_rt.bench import page as bench_page
from deepep_rt.bench import report
from deepep_rt.bench.references import is_shown, load
from deepep_rt.bench.results import Sizes, low_latency_rows, read, throughput_rows
from deepep_rt.cli import app as cli

PEERS = ROOT / "bench/reference/h200x8_peers.json"
THROUGHPUT = ROOT / "bench/results/h200x4_2026-11-22.json"
LOW_LATENCY = ROOT / "bench/results/h200x4_2026-11-22_low_latency.json"
NVSHMEM = ROOT / "bench/results/h200x4_2026-11-22_low_latency_nvshmem.json"
RESULTS = [THROUGHPUT, LOW_LATENCY, NVSHMEM]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Run all benchmarks quickly on two ranks. Return folder, standard output and standard error."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    done = run_bench(2, "bench", "--quick", "--out", folder, "--compare", PEERS)
    return folder, done.stdout, done.stderr


class Report(HTMLParser):
    """Tables, pictures and text of a rendered report."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.pictures, self.text, self.tags = [], [], "", []
        self.feed(MarkdownIt("commonmark").enable("table").render(text))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag == "img":
            self.pictures.append(dict(attrs)["src"])

    def handle_data(self, data):
        self.text += data
        if self.tags[-1] in ("th", "td"):
            self.tables[-1][-1][-1] += data.strip()


# --- running -----------------------------------------------------------------------------------------------------------------------


def test_a_run_writes_results_pictures_and_a_report(measured):
    folder, printed, _ = measured
    assert sorted(path.name for path in folder.iterdir()) == [
        "low_latency.json", "low_latency.png", "report.md", "throughput.json", "throughput.png",
    ]  # fmt: skip
    throughput, low_latency = (read(folder / f"{name}.json") for name in ("throughput", "low_latency"))
    assert len(throughput_rows(throughput)) == 2 * 15
    assert [row.tokens for row in low_latency_rows(low_latency)] == [1, 4, 16, 64]
    for name in ("throughput", "low_latency"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = Report((folder / "report.md").read_text())
    assert page.text.count("host backend: the same calls in NumPy and MPI") == 2, "both sections name the host backend"
    assert "A quick run" in page.text
    assert "Another problem was measured there" in page.text
    for row in throughput_rows(throughput):
        assert [row.work, str(row.tokens), f"{row.us:.1f}"] in [line[:3] for line in page.tables[0]]
    assert not re.findall("SMs|ceiling", page.text), "the host has no SMs, and its messages are no limit for copies within a rank"
    assert str(folder / "report.md") in printed
    compressed = [row for row in throughput_rows(throughput) if row.percent_of_combine is not None]
    assert {row.work for row in compressed} == {"combine_fp8", "combine_log10"}
    assert "Combine with compressed rows" in page.text
    for row in compressed:
        assert [f"{row.percent_of_combine:.1f}", str(row.row_bytes)] in [line[3:5] for line in page.tables[1]]


def test_only_rank_0_prints(measured):
    _, printed, progress = measured
    assert printed.count("the report is") == 1
    assert printed.count("remote GB/s") == 1
    assert not re.findall("SMs|ceiling", printed + progress)
    steps = [line for line in progress.splitlines() if " done; " in line]
    assert 4 <= len(steps) <= 40
    assert len(steps) == len(set(steps))
    assert steps[0] == "throughput: 0 of 30 done; dispatch_bf16_unknown, 64 tokens"
    assert steps[-1].startswith("low-latency: 3 of 4 done")


def test_mpirun_on_a_terminal_shows_a_bar(tmp_path):
    """A rank's standard error is a pipe. The bar is shown if mpirun's standard error is a terminal."""
    ours, theirs = pty.openpty()
    command = python_on(2, "-m", "deepep_rt", "bench", "low-latency", "--backend", "host", "--quick", "--out", tmp_path)
    shown = b""

    def read():
        nonlocal shown
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, timeout=200, cwd=ROOT, check=False
    )
    os.close(theirs)
    reader.join(10)
    text = shown.decode(errors="replace")
    assert done.returncode == 0, text
    assert "━" in text
    assert "3/4" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert " done; " not in text


ERRORS = [(["--compare", "missing.json"], "missing.json cannot be read"), (["--experts", "7"], "num_experts=7")]
ERRORS_OF_BENCH = [
    (["nonsense"], "what='nonsense'; expected one of throughput, low-latency, all, jitter"),
    (["--backend", "gpu"], "expected auto, cuda or host"),
    (["--from", "missing.json"], "missing.json cannot be read"),
    (["--from", PEERS], "Pass a result of bench/throughput.py"),
    (["--out", "pyproject.toml"], "Choose another folder with --out"),
]
ERRORS_OF_PROGRAMS = [
    (["--json", "."], "--json=. cannot be written: it is a folder. Choose another file with --json"),
    (["--json", "pyproject.toml/result.json"], "Choose another file with --json"),
]


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        *(("bench", *error) for error in ERRORS + ERRORS_OF_BENCH),
        *(("bench/throughput.py", *error) for error in ERRORS + ERRORS_OF_PROGRAMS),
        ("bench/throughput.py", ["--nccl"], "--nccl: rank 0: the host backend has no NCCL"),
        *(pytest.param("bench/low_latency.py", *error, marks=pytest.mark.full) for error in ERRORS + ERRORS_OF_PROGRAMS),
    ],
)
def test_errors_are_printed_once_and_before_measuring(program, options, message, tmp_path):
    out = ["--out", tmp_path] if program == "bench" and "--out" not in options else []
    error = run_bench(2, program, *options, *out, status=1).stderr  # at full size, which would take minutes
    assert error.count("error: ") == 1
    assert error.startswith("error: ") or program == "bench"
    assert message in error
    assert "Traceback" not in error


def test_a_rank_that_fails_alone_ends_the_others(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("""
from mpi4py import MPI
from deepep_rt import EPConfigError; from deepep_rt.bench import ranks as bench_ranks
with bench_ranks.fail_together(MPI.COMM_WORLD) as comm:
    if comm.rank == 1:
        raise EPConfigError("out of luck")
    comm.Barrier()
""")
    done = subprocess.run(python_on(3, script), capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert "rank 1: error: out of luck; the other ranks are ended" in done.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-m deepep_rt bench --quick --out", "need matplotlib"),
        ("-m deepep_rt bench --from bench/results/h200x8_2026-11-22.json --out", "need matplotlib"),
        ("bench/predict.py --out", "need matplotlib"),
        ("bench/throughput.py --backend host --quick --json", "this benchmark needs rich, which is not installed."),
        ("bench/low_latency.py --backend host --quick --json", "this benchmark needs rich, which is not installed."),
    ],
)
def test_a_missing_library_is_named_before_the_run(command, message, tmp_path):
    blocked, out = tmp_path / "blocked", tmp_path / "out"
    blocked.mkdir()
    words = [sys.executable, *command.split(), str(out)]
    environment = {**os.environ, **without(blocked, "rich" if "rich" in message else "matplotlib")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert message in done.stderr
    assert f"Run {pip_install('bench')}.\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


# --- existing results --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(tmp_path, capsys):
    """Draw the committed results. Return the report, the output and the folder."""
    options = [word for path in RESULTS for word in ("--from", str(path))]
    with pytest.raises(SystemExit) as caught:
        cli.run(["bench", *options, "--compare", str(PEERS), "--compare", str(LOW_LATENCY), "--out", str(tmp_path)])
    assert not caught.value.code
    return Report((tmp_path / "report.md").read_text()), capsys.readouterr().out, tmp_path


def test_a_report_of_existing_results(drawn):
    page, printed, folder = drawn
    assert page.pictures == ["throughput.png", "low_latency.png", "low_latency_2.png"]
    assert {path.name for path in folder.iterdir()} == {"report.md", *page.pictures}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in page.pictures)
    assert printed.count("4 x NVIDIA H200") == 3 + printed.count("Theirs: 4 x NVIDIA H200")
    result = read(LOW_LATENCY)
    row = next(row for row in low_latency_rows(result) if row.tokens == 128)
    lines = [line for table in page.tables for line in table]
    assert ["128", *(f"{getattr(row, name):.1f}" for name in report.low_latency_columns(result).values())] in lines
    assert ["both_fp8", "128", f"{row.graph_both_us:.1f}", "104.7", "-"] in lines, "8 ranks do not compare with 4"
    through = next(row for row in low_latency_rows(read(NVSHMEM)) if row.tokens == 128)
    ratio = f"{row.graph_both_us / through.graph_both_us:.2f}"
    assert ["both_fp8", "128", f"{through.graph_both_us:.1f}", f"{row.graph_both_us:.1f}", ratio] in lines
    commit = result["commit"]["id"]
    assert f"Compared with commit {commit[:12]}" in page.text
    assert page.text.count(commit) >= 1
    assert "host backend" not in page.text
    for text in (result["date"], result["boundary"], result["mpi"], "580.159.04", "hidden 7168, top-8 of 256"):
        assert text in page.text


def test_the_report_leaves_out_references_without_common_figures():
    """The host backend measures other numbers of tokens than the references."""
    result = read(THROUGHPUT)
    result["rows"] = [{**row, "tokens": 64} for row in result["rows"] if row["tokens"] == 4096 and row["sms"] == 24]
    result["settings"] = {**result["settings"], "backend": "host"}
    v1 = load(PEERS)[0]
    assert not is_shown(result, v1)
    result["rows"][-1]["tokens"] = 4096
    assert is_shown(result, v1)
    low_latency = read(LOW_LATENCY)
    assert [is_shown(low_latency, reference) for reference in load(PEERS)] == [True, False, False]
    result["rows"][-1]["tokens"] = 64
    text = Report(bench_page.section(result, load(PEERS), "")).text
    assert "DeepEP" not in text
    assert "Another problem" not in text


def test_texts_of_a_result_cannot_break_the_report():
    result, reference = read(THROUGHPUT), load(PEERS)[0]
    result["machine"] = machine = "<script>`a` | *b* ![c](d) &amp; \\</script>"
    report = Report(bench_page.section(result, [dataclasses.replace(reference, name=machine)], "e.png"))
    assert report.text.count(machine) == 4, "in the heading, the facts, the note and the comparison"
    assert "script" not in report.tags
    assert report.pictures == ["e.png"]


# --- pictures ----------------------------------------------------------------------------------------------------------------------


def references():
    return [reference for path in (PEERS, LOW_LATENCY) for reference in load(path)]


def lines_of(axes):
    return {tuple(map(tuple, line.get_xydata())) for line in axes.get_lines()}


def labels_of(axes):
    return {text.get_text() for text in axes.texts}


def test_bandwidth_against_sms():
    result = read(THROUGHPUT)
    figure = bench_figures.throughput(result, references())
    assert "4 x NVIDIA H200, hidden 7168, top-8 of 256" in figure.get_suptitle()
    assert result["date"] in figure.get_suptitle()
    panels = {axes.get_title("left"): axes for axes in figure.axes}
    assert len(panels) == 3 * 2
    for work, tokens in itertools.product(("dispatch_bf16", "dispatch_fp8", "combine_bf16"), (4096, 8192)):
        axes = panels[f"{bench_figures.WORKS[work]}, {tokens} tokens a rank"]
        drawn = lines_of(axes)
        assert tuple((int(sms), gb_s) for sms, gb_s in result["copy_ceiling_gb_s"]["by_sms"].items()) in drawn
        rows = [row for row in throughput_rows(result) if row.work.startswith(work) and row.tokens == tokens]
        for name in {row.work for row in rows}:
            assert tuple(sorted((row.sms, row.remote_gb_s) for row in rows if row.work == name)) in drawn
        assert axes.get_ylim()[0] == 0
        assert "copy ceiling" in labels_of(axes)
    v1 = load(PEERS)[0].throughput
    axes = panels["Combine, BF16, 4096 tokens a rank"]
    assert tuple((sms, v1["combine_bf16", 4096, sms].remote_gb_s) for sms in (24, 48, 64)) in lines_of(axes)
    assert labels_of(axes) == {"copy ceiling", "this run", "DeepEP V1, 8 ranks", "DeepEP V2, 8 ranks"}
    assert "DeepEP V1, 8 ranks,\nrouting unknown" in labels_of(panels["Dispatch, BF16, 8192 tokens a rank"])
    assert {axes.get_xlabel() for axes in figure.axes} == {"", "SMs of a call"}
    assert {axes.get_ylabel() for axes in figure.axes} == {"", "GB/s from other ranks"}


def test_results_of_one_number_of_sms_are_drawn_against_tokens(measured):
    """Nothing is drawn as a single dot, and the host has no copy ceiling."""
    result = read(measured[0] / "throughput.json")
    figure = bench_figures.throughput(result)
    panels = {axes.get_title("left"): axes for axes in figure.axes if axes.get_visible()}
    assert set(panels) == set(bench_figures.WORKS.values())
    assert all(len(line) == 2 for axes in panels.values() for line in lines_of(axes))
    for work in ("combine_fp8", "combine_log10"):
        axes, rows = panels[bench_figures.WORKS[work]], [row for row in throughput_rows(result) if row.work == work]
        assert tuple((row.tokens, row.remote_gb_s) for row in rows) in lines_of(axes)
        assert tuple((row.tokens, row.remote_gb_s * row.percent_of_combine / 100) for row in rows) in lines_of(axes)
        assert labels_of(axes) == {"this run", "in the time of\na plain combine"}
    assert labels_of(panels["Combine, BF16"]) == {"this run"}
    assert "rows at the\ncopy ceiling" not in labels_of(bench_page.picture(read(measured[0] / "low_latency.json"), []).axes[2])
    assert {axes.get_xlabel() for axes in panels.values()} == {"", "tokens of a rank"}
    lowest = [axes for axes in panels.values() if axes.get_xlabel()]
    assert len(lowest) == 3, "one in each column"


def test_latency_against_tokens():
    result = read(NVSHMEM)
    figure = bench_figures.low_latency(result, references())
    dispatch, combine, both = figure.axes
    rows = low_latency_rows(result)
    for axes, name in ((dispatch, "graph_dispatch_us"), (combine, "graph_combine_us"), (both, "graph_both_us")):
        assert tuple((row.tokens, getattr(row, name)) for row in rows) in lines_of(axes)
        assert axes.get_xlabel() == "tokens of a rank"
        assert axes.get_xscale() == axes.get_yscale() == "log"
    assert dispatch.get_ylabel() == "µs"
    assert ((1, 27.7), (8, 32.5), (32, 45.2), (128, 104.7)) in lines_of(both)
    assert tuple((row.tokens, row.step_p50_us) for row in rows) in lines_of(both)
    near = low_latency_rows(read(LOW_LATENCY))
    assert tuple((row.tokens, row.graph_combine_us) for row in near) in lines_of(combine)
    # the dotted line: each of four ranks receives 0.9 of the tokens
    sizes, ceiling = Sizes.of(result), result["copy_ceiling_gb_s"]["used"]
    floor = tuple((row.tokens, sizes.remote_bytes("combine_bf16", row.tokens) / ceiling / 1e3) for row in rows)
    assert floor in lines_of(combine)
    assert floor[0][1] == pytest.approx(3 * 0.9 * 2 * 7168 / ceiling / 1e3, rel=0.01)


def pictures():
    for path in RESULTS:
        for name, others in (("alone", []), ("compared", references()), ("crowded", references() * 2)):
            yield pytest.param(read(path), others, id=f"{path.stem}-{name}")


@pytest.mark.parametrize(("result", "others"), list(pictures()))
def test_labels_are_legible(result, others):
    """Labels are inside the picture, do not overlap, and have enough contrast."""
    figure = bench_page.picture(result, others)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    edge = figure.bbox
    heading = next(text for text in figure.texts if text.get_text() == figure.get_suptitle()).get_window_extent(renderer)
    assert edge.x0 <= heading.x0
    assert heading.x1 <= edge.x1
    for axes in figure.axes:
        boxes = {text.get_text() + str(i): text for i, text in enumerate(axes.texts)}
        extents = {label: type(text).mro()[1].get_window_extent(text, renderer) for label, text in boxes.items()}
        for (one, a), (other, b) in itertools.combinations(extents.items(), 2):
            overlap = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert overlap <= 2.5, f"{one} and {other} overlap by {overlap:.1f} pixels in {axes.get_title('left')}"
        for label, box in extents.items():
            assert box.x1 <= edge.x1 + 1, f"{label} leaves the picture"
            assert axes.bbox.y0 - 8 <= box.y0, label
            assert box.y1 <= axes.bbox.y1 + 8, label
        for text in boxes.values():
            assert contrast(text.get_color(), bench_figures.GROUND) > 4, text.get_text()


def contrast(one, other):
    """Return the contrast of WCAG 2, from 1 to 21."""

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_one_rank_shows_its_own_bandwidth():
    result = read(THROUGHPUT)
    result["num_ranks"] = 1
    result["rows"] = [{**row, "remote_gb_s": 0.0} for row in result["rows"]]
    figure = bench_figures.throughput(result)
    assert figure.axes[0].get_ylabel() == "GB/s, own rank"
    assert any(row["gb_s"] == y for row in result["rows"] for line in figure.axes[0].get_lines() for y in line.get_ydata())


def test_labels_move_as_little_as_possible():
    assert bench_figures.place_labels([0.2, 0.5, 0.8], [0.1] * 3) == pytest.approx([0.2, 0.5, 0.8])
    assert bench_figures.place_labels([0.5, 0.5], [0.1, 0.1]) == pytest.approx([0.45, 0.55])
    assert bench_figures.place_labels([0.0, 0.0, 1.0], [0.1, 0.2, 0.1]) == pytest.approx([0.05, 0.2, 0.95])
