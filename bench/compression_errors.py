"""Print how much compressed rows lose, as a table in Markdown: `python bench/compression_errors.py`.

The rows are float32. The first columns are the norm of the error of a row, relative to the norm of the row (the median of the rows). The
last columns are the largest relative error of a channel, among channels of at least 1/64 of the largest one in their group of 128.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from deepep_rt.arrays.compressed_rows import COMPRESSIONS, compress, expand
from deepep_rt.arrays.dtypes import FP8_GROUP
from deepep_rt.bench.report import markdown_table

HIDDEN, NUM_ROWS, SEED = 7168, 128, 0
LARGE = 2.0**-6


def make_rows() -> dict[str, np.ndarray]:
    """Make rows of each distribution, `[NUM_ROWS, HIDDEN]` float32."""
    draw, shape = np.random.default_rng(SEED), (NUM_ROWS, HIDDEN)
    made = {
        "normal": draw.standard_normal(shape),
        "heavy-tailed, Student t, 3 degrees of freedom": draw.standard_t(3, shape),
        "heavy-tailed, Student t, 1.5 degrees of freedom": draw.standard_t(1.5, shape),
        "sparse, normal, 5 % nonzero": draw.standard_normal(shape) * (draw.random(shape) < 0.05),
        "wide, lognormal, sigma 3": draw.lognormal(0, 3, shape) * draw.choice([-1, 1], shape),
    }
    return {name: rows.astype(np.float32) for name, rows in made.items()}


def after_rounding(rows: np.ndarray, form: str) -> np.ndarray:
    """Return float32 rows after a rounding to bfloat16, or after their way as compressed rows."""
    if form == "bfloat16":
        return rows.astype(ml_dtypes.bfloat16).astype(np.float32)
    return expand(compress(rows, form), HIDDEN, form)


def errors_of(rows: np.ndarray, form: str) -> tuple[float, float]:
    """Return the median of the relative errors of rows, and the largest relative error of a large channel."""
    exact, error = rows.astype(np.float64), after_rounding(rows, form).astype(np.float64) - rows
    of_rows = np.linalg.norm(error, axis=1) / np.linalg.norm(exact, axis=1)
    groups = abs(exact).reshape(-1, FP8_GROUP)
    is_large = (groups >= LARGE * groups.max(axis=1, keepdims=True)) & (groups > 0)
    of_channels = abs(error).reshape(-1, FP8_GROUP)[is_large] / groups[is_large]
    return float(np.median(of_rows)), float(of_channels.max())


def main() -> None:
    """Print the table."""
    forms = ("bfloat16", *COMPRESSIONS)
    heads = ["rows", *(f"row, {form}" for form in forms), *(f"channel, {form}" for form in forms)]
    lines = []
    for name, rows in make_rows().items():
        found = [errors_of(rows, form) for form in forms]
        lines.append([name, *(f"{100 * error:#.2g} %" for error, _ in found), *(f"{100 * error:#.2g} %" for _, error in found)])
    print(markdown_table(heads, lines))


if __name__ == "__main__":
    main()
