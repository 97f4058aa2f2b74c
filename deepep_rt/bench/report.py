"""Make the tables of results, and print them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .._console import console
from .references import Pair, Reference, difference_note, low_latency_parts, pair_rows, ratio_note
from .results import (
    BYTE_FORMULA,
    Sizes,
    ceiling_note,
    format_us,
    fp8_or_bf16,
    has_one_number_of_sms,
    low_latency_rows,
    on_gpu,
    row_bytes,
    throughput_rows,
    title,
)

_WIDTH_OF_LOGS = 120
_WITHIN_A_RANK = ("copy_expert", "permute_expert")
"""Works whose bytes cross no link."""

_LOW_LATENCY_COLUMNS = {
    "graph D": "graph_dispatch_us",
    "D quantised": "graph_dispatch_quantised_us",
    "graph C": "graph_combine_us",
    "C fp8": "graph_combine_fp8_us",
    "C log10": "graph_combine_log10_us",
    "graph D+C": "graph_both_us",
    "D+C cold": "graph_cold_us",
    "step p50": "step_p50_us",
    "step p99": "step_p99_us",
    "D send": "dispatch_send_us",
    "D recv": "dispatch_receive_us",
    "C send": "combine_send_us",
    "C recv": "combine_receive_us",
    "one by one": "call_us",
    "host D": "host_dispatch_us",
    "host C": "host_combine_us",
    "prepared one by one": "prepared_call_us",
    "host D prepared": "host_prepared_dispatch_us",
    "host C prepared": "host_prepared_combine_us",
}


_Columns = dict[str, Callable[[Any], str]]
"""A table of columns: the heading of each, and the function that makes its cell from a row."""

_WORK_COLUMNS: _Columns = {
    "work": lambda row: row.work,
    "tokens": lambda row: str(row.tokens),
    "SMs": lambda row: str(row.sms),
    "us": lambda row: format_us(row.us),
}


def low_latency_columns(result: Mapping[str, Any]) -> dict[str, str]:
    """Headings of the columns that a low-latency result fills, and the fields of `LowLatencyRow` that they show."""
    rows = low_latency_rows(result)
    return {head: name for head, name in _LOW_LATENCY_COLUMNS.items() if any(getattr(row, name) is not None for row in rows)}


class ResultTable(NamedTuple):
    """A table of a result, for the terminal and for the report."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


def print_result(result: Mapping[str, Any], references: Iterable[Reference] = ()) -> None:
    """Print the tables of a result, and the comparisons with other systems."""
    if throughput_rows(result):
        print_table(throughput_table(result))
        if table := compression_table(result):
            print_table(table)
        for reference in references:
            if table := throughput_comparison(result, reference):
                print_table(table)
            elif reference.throughput:
                _console().print(f"compared with {reference.name}: no figure for this work and these numbers of tokens")
    if low_latency_rows(result):
        print_table(low_latency_table(result, references))


def _table(result: Mapping[str, Any], title: str, columns: _Columns, rows: Iterable[Any], caption: str) -> ResultTable:
    """Make a table. Leave out columns without a meaning on the host backend: SMs, and the share of what links of GPUs carry."""
    without = set() if on_gpu(result) else {"% of ceiling", *(["SMs"] if has_one_number_of_sms(result) else [])}
    kept = {head: cell for head, cell in columns.items() if head not in without}
    return ResultTable(title, list(kept), [[cell(row) for cell in kept.values()] for row in rows], caption)


def throughput_table(result: Mapping[str, Any]) -> ResultTable:
    """Make the table of all rows of a throughput result."""
    ceiling, rows = result["copy_ceiling_gb_s"]["used"], throughput_rows(result)
    caption = f"GB/s: {BYTE_FORMULA}."
    caption += f" Copy ceiling of this run: {ceiling_note(result)}." if on_gpu(result) else ""
    caption += "".join(f" {work} was not measured: {reason}." for work, reason in (result.get("left_out") or {}).items())
    columns: _Columns = {
        **_WORK_COLUMNS,
        "GB/s": lambda row: f"{row.gb_s:.4g}",
        "remote GB/s": lambda row: "-" if row.work in _WITHIN_A_RANK else f"{row.remote_gb_s:.4g}",
        "% of ceiling": lambda row: (
            "-" if row.work in _WITHIN_A_RANK or not ceiling else f"{100 * row.remote_gb_s / ceiling:.1f}"
        ),
        "host us": lambda row: format_us(row.host_us),
    }
    if any(row.host_prepared_us is not None for row in rows):  # older results have none
        columns["prepared us"] = lambda row: format_us(row.host_prepared_us)
        caption += " Host us: the time of the host in a call. Prepared us: the same in a prepared call."
    return _table(result, title(result), columns, rows, caption)


def compression_table(result: Mapping[str, Any]) -> ResultTable | None:
    """Make the table of combines with compressed rows. Return None if there are none, as in older results."""
    plain_bytes = row_bytes("combine_bf16", Sizes.of(result).hidden)
    rows = [row for row in throughput_rows(result) if row.percent_of_combine is not None and row.row_bytes is not None]
    same = "tokens and SMs" if on_gpu(result) else "tokens"
    caption = (
        f"% of combine: the time, of that of combine_bf16 with the same {same} in this run. Row bytes: the bytes of a row on the way, "
        "which GB/s counts. In the picture, the broken line is the bandwidth if the same bytes took as long as a plain combine."
    )
    columns: _Columns = {
        **_WORK_COLUMNS,
        "% of combine": lambda row: f"{row.percent_of_combine:.1f}",
        "row bytes": lambda row: str(row.row_bytes),
        "% of BF16 bytes": lambda row: f"{100 * row.row_bytes / plain_bytes:.1f}",
    }
    return _table(result, "combine with compressed rows", columns, rows, caption) if rows else None


def throughput_comparison(result: Mapping[str, Any], reference: Reference) -> ResultTable | None:
    """Make the table of a result and a reference. Return None if they share no work with the same number of tokens."""
    pairs, sizes = pair_rows(throughput_rows(result), reference.throughput), Sizes.of(result)
    if not on_gpu(result) and has_one_number_of_sms(result):
        pairs = [pair for pair in pairs if pair.sms == "best"]
    if not pairs:
        return None
    is_same_problem = not difference_note(sizes, reference)
    columns: dict[str, Callable[[Pair], str]] = {
        "work": lambda pair: pair.work,
        "tokens": lambda pair: str(pair.tokens),
        "SMs": lambda pair: str(pair.sms),
        "µs": lambda pair: format_us(pair.ours.us),
        "their µs": lambda pair: format_us(pair.theirs.us),
        "remote GB/s": lambda pair: f"{pair.ours.remote_gb_s:.4g}",
        "their remote GB/s": lambda pair: f"{pair.theirs.remote_gb_s:.4g}",
        "ratio": lambda pair: pair.ratio(is_same_problem),
    }
    caption = f"Theirs: {reference.where}. {ratio_note(sizes, reference)}"
    return _table(result, f"compared with {reference.name}", columns, pairs, caption)


def low_latency_table(result: Mapping[str, Any], references: Iterable[Reference] = ()) -> ResultTable:
    """Make the table of a low-latency result, with a column for each reference that has times of both calls."""
    both, sizes = f"both_{fp8_or_bf16(result)}", Sizes.of(result)
    others = [reference for reference in references if any(part == both for part, _ in reference.low_latency)]
    cautions = dict.fromkeys(filter(None, (difference_note(sizes, reference) for reference in others)))
    columns, cells = low_latency_columns(result), []
    cold = "; cold: after a kernel that fills the caches" if "D+C cold" in columns else ""
    caption = " ".join([f"us; D: dispatch, C: combine{cold}. {result['boundary']}.", *cautions])
    for row in low_latency_rows(result):
        theirs = [reference.low_latency.get((both, row.tokens)) for reference in others]
        figures = [getattr(row, column) for column in columns.values()]
        cells.append([str(row.tokens), *map(format_us, [*figures, *theirs])])
    heads = ["tokens", *columns, *(f"{reference.name.partition(' (')[0]} D+C" for reference in others)]
    return ResultTable(title(result), heads, cells, caption)


def low_latency_comparison(result: Mapping[str, Any], reference: Reference) -> ResultTable | None:
    """Make the table of a low-latency result and a reference. Return None if they share no part with the same number of tokens."""
    other = difference_note(Sizes.of(result), reference)
    rows = [
        [part, str(tokens), format_us(us), format_us(their), "-" if other else f"{their / us:.2f}"]
        for part, by_tokens in low_latency_parts(result).items()
        for tokens, us in by_tokens.items()
        if us is not None and (their := reference.low_latency.get((part, tokens))) is not None
    ]
    caption = f"Theirs: {reference.where}. {other or ratio_note(Sizes.of(result), reference)}"
    return ResultTable("", ["part", "tokens", "us", "their us", "ratio"], rows, caption) if rows else None


def markdown_table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Write a table in Markdown. The first column is aligned left, the others right."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(markdown_text(str(cell)) for cell in line)} |" for line in lines)


def markdown_text(text: str) -> str:
    """Escape characters of Markdown, because texts come from files too."""
    return re.sub(r"[\\`*\[\]<&|]", r"\\\g<0>", text)


def _console() -> Console:
    return console(_WIDTH_OF_LOGS)


def _columns_that_fit(widths: Sequence[int], limit: int) -> list[list[int]]:
    """Distribute columns over tables of at most `limit` characters. Each table begins with the first column."""
    parts = [[0]]
    for i in range(1, len(widths)):
        if len(parts[-1]) > 1 and 1 + sum(widths[j] for j in (*parts[-1], i)) > limit:
            parts.append([0])
        parts[-1].append(i)
    return parts


def print_table(table: ResultTable) -> None:
    """Print a table. Columns that do not fit follow in another table, which repeats the first column."""
    out = _console()
    heading, heads, rows, caption = table
    least, most = (
        [3 + max(map(len, (*texts(head), *(row[i] for row in rows)))) for i, head in enumerate(heads)]
        for texts in (str.split, lambda head: [head])
    )
    parts = _columns_that_fit(least, out.width)
    for columns in parts:
        part = Table(title=heading if columns is parts[0] else None)
        is_wide = 1 + sum(most[i] for i in columns) > out.width
        for i in columns:
            part.add_column(heads[i].replace(" ", "\n") if is_wide else heads[i], justify="right" if i else "left")
        for row in rows:
            part.add_row(*(row[i] for i in columns))
        out.print(part)
    out.print(f"{caption}\n")
