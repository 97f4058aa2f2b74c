"""Work out the results of dispatch and combine from the inputs of all ranks, by plain loops over tokens.

This code is independent of `deepep_rt.backends.host`: it has no messages, counts or positions. It appends rows to lists in the documented
order. Sums have the documented order and roundings, bit for bit. Every function takes the inputs of all ranks. `make_inputs` depends on
(seed, rank) alone, so each rank can make the inputs of all ranks without communication.

`RankInputs.x` may have any dtype, also one of `ml_dtypes`. Compressed rows are those of the library, which tests/arrays checks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepep_rt.arrays.compressed_rows import compress as compressed
from deepep_rt.arrays.compressed_rows import expand


@dataclass
class RankInputs:
    """The arguments of dispatch on one rank.

    Attributes:
        x: `[num_tokens, hidden]`, any dtype.
        topk_idx: `[num_tokens, num_topk]` int32 or int64, global expert numbers, -1 for none.
        topk_weights: `[num_tokens, num_topk]` float32, or None.
        scales: `[num_tokens, n]` of a 4-byte type, or of any type in low-latency calls; or None.
    """

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray | None = None
    scales: np.ndarray | None = None


@dataclass
class Received:
    """The expected result of dispatch on one rank. Rows past `num_kept` are padding.

    Attributes:
        x, scales: Rows and scales; padding is zero here and undefined in the library.
        topk_idx: Local expert numbers, -1 for experts of other ranks and in padding.
        topk_weights: 0 for experts of other ranks and in padding.
        src_idx: `[num_rows, 2]` int32: source rank, source token; -1 in padding.
        num_recv: Rows that were sent here, dropped ones included.
        num_recv_per_expert: (token, choice) entries of each local expert, aligned up; entries of dropped rows count.
        num_kept: Rows that were not dropped.
    """

    x: np.ndarray
    scales: np.ndarray | None
    topk_idx: np.ndarray
    topk_weights: np.ndarray | None
    src_idx: np.ndarray
    num_recv: int
    num_recv_per_expert: list[int]
    num_kept: int


def expected_dispatch(
    rank: int,
    all_inputs: Sequence[RankInputs],
    num_experts: int,
    *,
    num_worst_tokens: int | None = None,
    expert_alignment: int = 1,
) -> Received:
    """Work out what rank `rank` receives if each rank r dispatches `all_inputs[r]`.

    Args:
        rank: The receiver.
        all_inputs: Inputs of all ranks, in rank order; their number is the number of ranks.
        num_experts: Experts over all ranks.
        num_worst_tokens: Rows of the result of `rank`, or None for as many as arrive.
        expert_alignment: Counts for each expert are rounded up to a multiple of it.
    """
    mine = all_inputs[rank]
    first, last = _experts_of(rank, len(all_inputs), num_experts)
    rows: list[tuple[int, int]] = []
    entries = dict.fromkeys(range(first, last), 0)
    for source, inputs in enumerate(all_inputs):
        for token, chosen in enumerate(inputs.topk_idx.tolist()):
            local = [e for e in chosen if first <= e < last]
            if local:
                rows.append((source, token))
            for expert in local:
                entries[expert] += 1
    size = len(rows) if num_worst_tokens is None else num_worst_tokens
    num_kept = min(size, len(rows))
    out = Received(
        x=np.zeros((size, *mine.x.shape[1:]), mine.x.dtype),
        scales=None if mine.scales is None else np.zeros((size, mine.scales.shape[1]), mine.scales.dtype),
        topk_idx=np.full((size, mine.topk_idx.shape[1]), -1, mine.topk_idx.dtype),
        topk_weights=None if mine.topk_weights is None else np.zeros((size, mine.topk_idx.shape[1]), np.float32),
        src_idx=np.full((size, 2), -1, np.int32),
        num_recv=len(rows),
        num_recv_per_expert=[(n + expert_alignment - 1) // expert_alignment * expert_alignment for n in entries.values()],
        num_kept=num_kept,
    )
    for row, (source, token) in enumerate(rows[:num_kept]):
        inputs = all_inputs[source]
        out.x[row] = inputs.x[token]
        out.src_idx[row] = source, token
        if out.scales is not None:
            out.scales[row] = inputs.scales[token]
        for k, expert in enumerate(inputs.topk_idx[token]):
            if first <= expert < last:
                out.topk_idx[row, k] = expert - first
                if out.topk_weights is not None:
                    out.topk_weights[row, k] = inputs.topk_weights[token, k]
    return out


def expected_sums(
    rank: int,
    all_inputs: Sequence[RankInputs],
    all_y: Sequence[np.ndarray],
    num_experts: int,
    *,
    node_size: int | None = None,
    all_worst: Sequence[int | None] | None = None,
    all_weights: Sequence[np.ndarray] | None = None,
    biases: Sequence[np.ndarray] = (),
    compress: str | None = None,
    path: str = "hierarchical",
) -> tuple[np.ndarray, np.ndarray | None]:
    """Work out what rank `rank` gets back if each rank r dispatches `all_inputs[r]` and then combines `all_y[r]`.

    A node's rows of a token are added up in float32 and rank order. The sum of a node other than that of `rank` is rounded to the rows'
    type. Then the nodes' sums are added up in node order, and the biases. Weights are added up in the same order, and not rounded.

    Args:
        rank: The rank of the tokens.
        all_inputs: What all ranks dispatched.
        all_y: For each rank, its rows for combine, `[rows it received, hidden]`.
        num_experts: Experts over all ranks.
        node_size: Ranks of a node; default: all ranks.
        all_worst: `num_worst_tokens` of each rank's dispatch; dropped rows add nothing. Default: none are dropped.
        all_weights: For each rank `[rows it received, num_topk]` float32 to be added up too, or None.
        biases: `[num_tokens of rank, hidden]` arrays to add at the end.
        compress: The form of rows on the way. With several nodes, it is the form of the rounded sums of other nodes, or on the direct
            `path` of their rows, whose sum is not rounded then.
        path: Between nodes.

    Returns:
        `[num_tokens, hidden]` of the rows' type, and `[num_tokens, num_topk]` float32 (None without `all_weights`).
    """
    num_ranks, num_tokens, dtype = len(all_inputs), len(all_inputs[rank].topk_idx), all_y[rank].dtype
    node_size = node_size or num_ranks

    def sent(row: np.ndarray) -> np.ndarray:
        return row if compress is None else expand(compressed(row[None], compress), row.size, compress)[0]

    terms: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in range(num_tokens)]
    for peer in range(num_ranks):
        worst = all_worst[peer] if all_worst is not None else None
        received = expected_dispatch(peer, all_inputs, num_experts, num_worst_tokens=worst)
        given = all_weights[peer] if all_weights is not None else np.zeros((len(received.x), 1), np.float32)
        for row in range(received.num_kept):
            source, token = received.src_idx[row]
            if source == rank:
                term = all_y[peer][row].astype(np.float32)
                is_far = peer // node_size != rank // node_size
                if node_size == num_ranks or (is_far and path == "direct"):
                    term = sent(term)
                terms[token][peer] = term, given[row]
    x = np.zeros((num_tokens, all_y[rank].shape[1]), np.float32)
    weights = np.zeros((num_tokens, 1 if all_weights is None else all_weights[rank].shape[1]), np.float32)
    for token in range(num_tokens):
        for node in range(num_ranks // node_size):
            mine = [terms[token][peer] for peer in sorted(terms[token]) if peer // node_size == node]
            if mine:
                row, weight = np.zeros_like(x[token]), np.zeros_like(weights[token])
                for term, share in mine:
                    row, weight = row + term, weight + share
                if node != rank // node_size and (compress is None or path == "hierarchical"):
                    row = sent(rounded(row, dtype).astype(np.float32))
                x[token], weights[token] = x[token] + row, weights[token] + weight
        for bias in biases:
            with np.errstate(all="ignore"):  # an inf - inf stands in the caller's numbers
                x[token] = x[token] + bias[token].astype(np.float32)
    return rounded(x, dtype), None if all_weights is None else weights


@dataclass
class ExpertRows:
    """The expected result of dispatch with `layout="expert"` on one rank.

    Attributes:
        x, scales: Rows and scales; padding is zero here.
        weights: `[rows]`, 0 in padding.
        src_idx: `[rows, 3]` int32: source rank, source token, choice; -1 in padding.
        experts: `[rows]` int32, -1 in padding.
        offsets: `[num_local_experts + 1]`, at most the number of rows.
        num_recv: Rows with their padding, dropped ones included.
        num_recv_per_expert: Of each expert, aligned up.
    """

    x: np.ndarray
    scales: np.ndarray | None
    weights: np.ndarray | None
    src_idx: np.ndarray
    experts: np.ndarray
    offsets: list[int]
    num_recv: int
    num_recv_per_expert: list[int]


def expected_expert_rows(
    rank: int,
    all_inputs: Sequence[RankInputs],
    num_experts: int,
    *,
    num_worst_tokens: int | None = None,
    expert_alignment: int = 1,
) -> ExpertRows:
    """Work out what rank `rank` receives with `layout="expert"`. The arguments are those of `expected_dispatch`."""
    mine = all_inputs[rank]
    first, last = _experts_of(rank, len(all_inputs), num_experts)
    rows: list[tuple[int, int, int, int] | None] = []
    offsets, counts = [0], []
    choices = [inputs.topk_idx.tolist() for inputs in all_inputs]  # faster to loop over than arrays
    for expert in range(first, last):
        begin = len(rows)
        for source, tokens in enumerate(choices):
            for token, chosen in enumerate(tokens):
                rows += [(expert - first, source, token, k) for k, e in enumerate(chosen) if e == expert]
        while len(rows) % expert_alignment:
            rows.append(None)
        counts.append(len(rows) - begin)
        offsets.append(len(rows))
    num_recv = len(rows)
    size = num_recv if num_worst_tokens is None else num_worst_tokens
    out = ExpertRows(
        x=np.zeros((size, *mine.x.shape[1:]), mine.x.dtype),
        scales=None if mine.scales is None else np.zeros((size, mine.scales.shape[1]), mine.scales.dtype),
        weights=None if mine.topk_weights is None else np.zeros(size, np.float32),
        src_idx=np.full((size, 3), -1, np.int32),
        experts=np.full(size, -1, np.int32),
        offsets=[min(offset, size) for offset in offsets],
        num_recv=num_recv,
        num_recv_per_expert=counts,
    )
    for row, origin in enumerate(rows[:size]):
        if origin is not None:
            expert, source, token, k = origin
            out.x[row] = all_inputs[source].x[token]
            out.src_idx[row] = source, token, k
            out.experts[row] = expert
            if out.scales is not None:
                out.scales[row] = all_inputs[source].scales[token]
            if out.weights is not None:
                out.weights[row] = all_inputs[source].topk_weights[token, k]
    return out


def check_expert_rows(
    result: object, expected: ExpertRows, *, has_counts: bool = True, by_column: bool = False, with_padding: bool = False
) -> None:
    """Compare a `DispatchResult` of `layout="expert"` with `expected`, bit for bit. An AssertionError names the array.

    Args:
        result: The `DispatchResult`, of NumPy arrays.
        expected: Of `expected_expert_rows`.
        has_counts: Whether the host knows the counts (no `num_worst_tokens`).
        by_column: Whether scales lie by column.
        with_padding: Whether padding has to be zero.
    """
    assert result.recv_topk_idx is None
    checked = np.ones(len(expected.x), bool) if with_padding else expected.experts >= 0
    assert result.recv_x.shape == expected.x.shape, (result.recv_x.shape, expected.x.shape)
    same_bits("recv_x", result.recv_x[checked], expected.x[checked])
    if expected.scales is None:
        assert result.recv_x_scales is None
    else:
        scales = np.asarray(result.recv_x_scales)
        if by_column:
            assert scales.shape == (expected.scales.shape[1], (len(checked) + 3) // 4 * 4), scales.shape
            scales = np.ascontiguousarray(scales.T[: len(checked)])
        same_bits("recv_x_scales", scales[checked], expected.scales[checked])
    if expected.weights is None:
        assert result.recv_topk_weights is None
    else:
        same_bits("recv_topk_weights", result.recv_topk_weights, expected.weights)
    same_bits("recv_src_idx", result.recv_src_idx, expected.src_idx)
    same_bits("recv_expert_idx", result.recv_expert_idx, expected.experts)
    same_bits("expert_offsets", result.expert_offsets, np.array(expected.offsets, np.int32))
    assert [int(v) for v in np.asarray(result.num_recv_tokens)] == [expected.num_recv]
    assert [int(v) for v in np.asarray(result.num_recv_tokens_per_expert)] == expected.num_recv_per_expert
    assert result.num_recv_tokens_per_expert_list == (expected.num_recv_per_expert if has_counts else None)
    assert result.handle.num_recv_rows == len(expected.x)
    assert result.handle.layout == "expert"


def rows_by_token(
    rank: int,
    all_inputs: Sequence[RankInputs],
    num_experts: int,
    y: np.ndarray,
    expected: ExpertRows,
    *,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Add up the rows of each token that lie expert by expert, in float32 and in the order of the token's choices, as `combine` does.

    Args:
        rank: The rank of the rows.
        all_inputs: Inputs of all ranks.
        num_experts: Experts over all ranks.
        y: `[rows, hidden]`, expert by expert.
        expected: The dispatch that brought the rows.
        weights: `[rows]` float32 to multiply the rows by, or None.

    Returns:
        Rows in the order of `expected_dispatch`, of the type of `y`.
    """
    received = expected_dispatch(rank, all_inputs, num_experts)
    row_of = {tuple(map(int, origin)): row for row, origin in enumerate(expected.src_idx) if origin[0] >= 0}
    out = np.zeros((len(received.x), y.shape[1]), y.dtype)
    for i, (source, token) in enumerate(received.src_idx):
        total = np.zeros(y.shape[1], np.float32)
        for k in range(all_inputs[source].topk_idx.shape[1]):
            row = row_of.get((int(source), int(token), k))
            if row is not None:
                term = y[row].astype(np.float32)
                total = total + (term if weights is None else weights[row] * term)
        out[i] = total.astype(y.dtype)
    return out


def check_sums(
    got: object,
    rank: int,
    all_inputs: Sequence[RankInputs],
    all_y: Sequence[np.ndarray],
    num_experts: int,
    **options: object,
) -> None:
    """Compare a `CombineResult` of NumPy arrays with `expected_sums`, bit for bit. An AssertionError names the array."""
    x, weights = expected_sums(rank, all_inputs, all_y, num_experts, **options)
    same_bits("x", got.x, x)
    if weights is None:
        assert got.topk_weights is None
    else:
        same_bits("topk_weights", got.topk_weights, weights)


def check_dispatch(result: object, expected: Received, *, has_counts: bool = True, with_idx: bool = True) -> None:
    """Compare a `DispatchResult` of NumPy arrays with `expected`, bit for bit. An AssertionError names the array.

    Args:
        result: The `DispatchResult`.
        expected: Of `expected_dispatch`.
        has_counts: Whether the host knows the counts (no `num_worst_tokens`).
        with_idx: Whether `topk_idx` was given to the call.
    """
    kept = expected.num_kept
    same_bits("recv_x", result.recv_x[:kept], expected.x[:kept])
    assert result.recv_x.shape == expected.x.shape, (result.recv_x.shape, expected.x.shape)
    if expected.scales is None:
        assert result.recv_x_scales is None
    else:
        same_bits("recv_x_scales", result.recv_x_scales[:kept], expected.scales[:kept])
        assert result.recv_x_scales.shape == expected.scales.shape
    same_bits("recv_src_idx", result.recv_src_idx[:kept], expected.src_idx[:kept])
    assert result.recv_src_idx.shape == expected.src_idx.shape
    for name, wanted in (("recv_topk_idx", expected.topk_idx), ("recv_topk_weights", expected.topk_weights)):
        got = getattr(result, name)
        if wanted is None or not with_idx:
            assert got is None, f"{name} is there, but was not asked for"
        else:
            same_bits(name, got, wanted)
    assert [int(v) for v in np.asarray(result.num_recv_tokens)] == [expected.num_recv]
    assert [int(v) for v in np.asarray(result.num_recv_tokens_per_expert)] == expected.num_recv_per_expert
    if has_counts:
        assert result.num_recv_tokens_per_expert_list == expected.num_recv_per_expert
        assert all(type(n) is int for n in result.num_recv_tokens_per_expert_list)
    else:
        assert result.num_recv_tokens_per_expert_list is None
    assert result.handle.num_recv_rows == len(expected.x)


def make_inputs(
    seed: int,
    rank: int,
    num_tokens: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    *,
    skip_probability: float = 0.0,
    pattern: str = "random",
    idx_dtype: str = "int64",
    dtype: str | np.dtype = "float32",
    num_scales: int = 0,
    num_ranks: int = 1,
) -> RankInputs:
    """Make random inputs of one rank. The same arguments give the same inputs on every machine.

    Args:
        seed: Decides the random numbers, together with `rank`.
        rank: The rank.
        num_tokens: Rows of every array.
        hidden: Elements of a row of `x`.
        num_topk: Columns of `topk_idx`.
        num_experts: Experts over all ranks.
        skip_probability: Share of the entries of `topk_idx` that are -1.
        pattern: "random": distinct experts; "one_rank": all of them on the last of `num_ranks` ranks (with repetitions if it
            holds fewer than `num_topk`); "skewed": a few experts get most tokens.
        idx_dtype: "int32" or "int64".
        dtype: Of `x`: float types get normal random values, 1-byte types random bytes.
        num_scales: float32 scales of a row; 0 for none.
        num_ranks: Needed by "one_rank" only.
    """
    rng = np.random.default_rng([seed, rank])
    kind = np.dtype(dtype)
    if kind.itemsize == 1:
        x = rng.integers(0, 256, (num_tokens, hidden), np.uint8).view(kind)
    else:
        x = rng.standard_normal((num_tokens, hidden)).astype(np.float32).astype(kind)
    idx = np.empty((num_tokens, num_topk), idx_dtype)
    for token in range(num_tokens):
        idx[token] = _choose(rng, pattern, num_topk, num_experts, num_ranks)
    idx[rng.random(idx.shape) < skip_probability] = -1
    weights = rng.random((num_tokens, num_topk), np.float32) + np.float32(0.01)
    scales = rng.random((num_tokens, num_scales), np.float32) if num_scales else None
    return RankInputs(x, idx, weights, scales)


def _choose(rng: np.random.Generator, pattern: str, num_topk: int, num_experts: int, num_ranks: int) -> np.ndarray:
    if pattern == "random":
        return rng.choice(num_experts, num_topk, replace=False)
    if pattern == "one_rank":
        local = num_experts // num_ranks
        return num_experts - local + rng.choice(local, num_topk, replace=num_topk > local)
    if pattern == "skewed":
        share = 0.5 ** np.arange(num_experts) + 1e-6
        return rng.choice(num_experts, num_topk, replace=False, p=share / share.sum())
    raise ValueError(f"pattern is {pattern!r}")


def _experts_of(rank: int, num_ranks: int, num_experts: int) -> tuple[int, int]:
    each = num_experts // num_ranks
    return rank * each, (rank + 1) * each


def same_bits(name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    """Compare two arrays bit for bit."""
    assert got.dtype == wanted.dtype, f"{name}: dtype {got.dtype}, expected {wanted.dtype}"
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
    same = np.ascontiguousarray(got).view(np.uint8).reshape(-1) == np.ascontiguousarray(wanted).view(np.uint8).reshape(-1)
    if not same.all():
        where = np.unravel_index(int(np.argmin(same)) // got.itemsize, got.shape)
        raise AssertionError(f"{name}{list(map(int, where))} is {got[where]!r}, expected {wanted[where]!r}")


def expected_choice_sums(
    rank: int,
    all_inputs: Sequence[RankInputs],
    outputs: Sequence[np.ndarray],
    received: Sequence[ExpertRows],
    *,
    weighted: bool = False,
    biases: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """Work out what `combine(reduce="topk")` gives rank `rank`.

    Args:
        rank: The rank of the tokens.
        all_inputs: Inputs of all ranks.
        outputs: Rows of each rank's experts.
        received: What each rank received.
        weighted: Whether rows are multiplied by their weights.
        biases: Arrays that are added to the sum.
    """
    terms: dict[tuple[int, int], np.ndarray] = {}
    for rows, got in zip(outputs, received, strict=True):
        for row, (source, token, choice) in enumerate(got.src_idx):
            if source == rank:
                factor = got.weights[row] if weighted else np.float32(1)
                terms[token, choice] = factor * rows[row].astype(np.float32)
    mine, dtype = all_inputs[rank], outputs[0].dtype
    total = np.zeros((len(mine.topk_idx), outputs[0].shape[1]), np.float32)
    for token, choice in sorted(terms):
        total[token] += terms[token, choice]
    for bias in biases:
        total += bias.astype(np.float32)
    return rounded(total, dtype)


def returned_weights(rank: int, all_inputs: Sequence[RankInputs], received: Sequence[ExpertRows]) -> np.ndarray:
    """Work out the weights that combine returns to the choices of a rank's tokens. The arguments are those of `expected_choice_sums`."""
    weights = np.zeros(all_inputs[rank].topk_idx.shape, np.float32)
    for got in received:
        for row, (source, token, choice) in enumerate(got.src_idx):
            if source == rank:
                weights[token, choice] = got.weights[row]
    return weights


def rounded(values: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    """Round float32 to a type. NaN of bfloat16 becomes the one that a GPU's conversion gives."""
    made = values.astype(dtype)
    if made.dtype.name == "bfloat16":
        made.view(np.uint16)[np.isnan(values)] = 0x7FFF
    return made
