"""The table of scenarios. The first words of a row say what it protects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from oracle import RankInputs
from scenarios import Again, Scenario, Sum

from deepep_rt.arrays.compressed_rows import COMPRESSIONS

Rows = Iterator[Scenario]
LAYOUTS = ("token", "expert")
FORMATS = (
    dict(use_fp8=False),
    dict(use_fp8=True),
    dict(use_fp8=True, round_scale=True),
    dict(use_fp8=True, use_ue8m0=True),
    dict(use_fp8=True, round_scale=True, use_ue8m0=True),
)
"""Formats of the rows of low-latency dispatches."""

WEIGHTS, WEIGHTED, BOTH = Sum(weights=True), Sum(weights=True, weighted=True), (Sum(), Sum(reduce="topk"))
SPECIAL = tuple(replace(one, values="special") for one in BOTH)
WIDE, INT32 = dict(dtype="float32"), dict(idx_dtype="int32")


def tokens(*numbers: int, more: int = 0) -> Callable[[int], int]:
    """Give the ranks these numbers of tokens, again and again, and `more` for each lower rank."""
    return lambda rank: numbers[rank % len(numbers)] + more * rank


# --- throughput calls --------------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "one choice, one expert on a rank": dict(topk=1, each=1, hidden=16),
    "expert numbers of 32 bits": dict(each=8, hidden=64, dtype="bfloat16", drawn=INT32),
    "long rows": dict(topk=8, each=32, hidden=2880, dtype="bfloat16", drawn=dict(skip_probability=0.3)),
    "few choices": dict(topk=9, each=16, hidden=48, dtype="float16", drawn=dict(skip_probability=0.9, **INT32)),
    "a choice for each lane of a warp": dict(topk=32, each=32, hidden=112, drawn=dict(pattern="skewed")),
    "FP8, all to one rank": dict(topk=8, each=8, hidden=512, dtype="float8_e4m3fn", scales=4, drawn=dict(pattern="one_rank")),
    "the other FP8": dict(hidden=256, dtype="float8_e5m2", scales=1, drawn=dict(pattern="skewed")),
    "bytes that go nowhere": dict(each=6, hidden=144, dtype="uint8", scales=2, drawn=dict(skip_probability=1.0)),
    "signed bytes": dict(topk=6, each=8, dtype="int8", drawn=dict(pattern="one_rank", skip_probability=0.5, **INT32)),
}
OF_SUMS = list(KINDS.items())[:5]
PLAIN, FP8, SKEWED, NOWHERE = (list(KINDS.values())[number] for number in (1, 5, 6, 7))
FEW = {"no tokens": tokens(0), "tokens of the first rank": tokens(7, *[0] * 63), "tokens of each second rank": tokens(0, 7)}
LIMITS: dict[str, Callable[[int, int, int], int]] = {
    "the most": lambda rank, arriving, most: most,
    "all that arrives": lambda rank, arriving, most: arriving,
    "half of it": lambda rank, arriving, most: arriving // 2,
    "one or two": lambda rank, arriving, most: 1 + rank % 2,
    "nothing": lambda rank, arriving, most: 0,
    "all on some ranks": lambda rank, arriving, most: arriving * (rank % 2),
}


def choose(numbers: Callable[[int, int, int], Any], at: Any = slice(None), rest: int | None = None) -> Any:
    """Return a change of inputs: choices `at` become `numbers(rank, ranks, experts of a rank)`, and all others `rest`, if given."""

    def change(one: RankInputs, rank: int, ranks: int, each: int) -> None:
        one.topk_idx[:] = one.topk_idx if rest is None else rest
        one.topk_idx[at] = numbers(rank, ranks, each)

    return change


def dispatches() -> Rows:
    last = choose(lambda rank, ranks, each: ranks * each - 1)
    for layout in LAYOUTS:
        by = dict(layout=layout)
        for words, kind in KINDS.items():
            yield Scenario(f"{words}, by {layout}", **by, **kind)
        for (few, number), kind in product(FEW.items(), (PLAIN, FP8)):
            options = dict(expert_alignment=8) if layout == "expert" else {}
            yield Scenario(f"{few}, {kind['dtype']}, by {layout}", tokens=number, options=options, **by, **kind)
        yield Scenario(f"a full Buffer, by {layout}", tokens=tokens(64), **by, **PLAIN)
        yield Scenario(f"no weights, by {layout}", tokens=tokens(6), weights=False, **by)
        yield Scenario(
            f"a token names an expert in each choice, by {layout}", tokens=tokens(3), changed=last, sums=(WEIGHTS,), **by
        )
        for alignment in (2, 16, 100, 128):
            options = dict(expert_alignment=alignment)
            yield Scenario(f"counts aligned to {alignment}, by {layout}", tokens=tokens(9), options=options, **by, **PLAIN)
        how = dict(drawn=INT32, scales=1, buffer=dict(num_max_tokens_per_rank=16), again=(Again(True, True),), **by)
        how |= dict(options=dict(expert_alignment=2, **({} if layout == "token" else dict(zero_padding=True))))
        for words, limit in LIMITS.items():
            sums = (Sum(values="integers"),)
            yield Scenario(f"room for {words}, by {layout}", tokens=tokens(3, more=1), worst=limit, sums=sums, **how)
        for width, channels in (("bfloat16", 16), ("float8_e4m3fn", 16), ("bfloat16", 32)):
            words, buffer = f"{layout}, {width}, {channels} to a scale", dict(dtype=width)
            how = dict(hidden=512, dtype="uint8", scales=512 // channels // 4, drawn=dict(packed=True), buffer=buffer, **by)
            yield Scenario(f"numbers of 4 bits, by {words}", tokens=tokens(*range(64, 0, -9)), **how)
            yield Scenario(f"plain rows after those of 4 bits, by {words}", tokens=tokens(7), hidden=512, dtype=width, **by)
    for alignment, kind in product((2, 100, 128), (PLAIN, SKEWED)):
        options = dict(expert_alignment=alignment, zero_padding=True)
        yield Scenario(f"zeros up to a multiple of {alignment}, {kind['dtype']}", "expert", tokens(9), options=options, **kind)
    for first, kind in ((1, FP8), (9, FP8), (9, NOWHERE)):
        options = dict(scales_layout="column", zero_padding=kind is NOWHERE)
        yield Scenario(
            f"columns of scales, {first} tokens, {kind['dtype']}", "expert", tokens(first, more=1), options=options, **kind
        )


def handles() -> Rows:
    for layout in LAYOUTS:
        options = {} if layout == "token" else dict(layout="expert", zero_padding=True, scales_layout="column")
        again = [
            Again(*given, "bfloat16", 1, {} if any(given) else options)
            for given in ((True, True), (False, False), (True, False)) * 2
        ]
        how = dict(each=8, hidden=128, drawn=dict(skip_probability=0.4), options=dict(expert_alignment=4))
        yield Scenario(f"other rows along a routing, by {layout}", layout, tokens(4, 9, 14), **how, again=again, overwrites=True)


def conversions() -> Rows:
    for dtype, layout, options in product(("bfloat16", "float16", "float32"), LAYOUTS, FORMATS[1:]):
        how = dict(options=options, again=(Again(options=options),))
        yield Scenario(f"{dtype} becomes FP8, {options}, by {layout}", layout, tokens(4, 9), hidden=512, dtype=dtype, **how)


def sums() -> Rows:
    usual = dict(tokens=tokens(5, 0, 12, 3), hidden=48, buffer=WIDE)
    for dtype in ("float32", "bfloat16", "float16"):
        given = [Sum(weights=True, biases=number) for number in (0, 1, 2, 2)] + [Sum()]
        how = dict(topk=6, each=8, drawn=dict(skip_probability=0.3), **usual)
        yield Scenario(f"sums, biases and weights of {dtype}", dtype=dtype, sums=given, **how)
        yield Scenario(f"whole numbers in {dtype} are exact", dtype=dtype, sums=(Sum(values="integers"),), **usual)
    everywhere = choose(lambda rank, ranks, each: np.arange(8) % ranks * each)
    given = (Sum(weights=True, biases=2, values="ordered"),)
    yield Scenario(
        "terms in rank order, a node before the next", tokens=tokens(2), topk=8, each=8, changed=everywhere, sums=given
    )
    given = [Sum(values="ties", biases=number) for number in (1, 2)]
    yield Scenario(
        "one rounding, ties to even; NaN has one form", tokens=tokens(12), topk=1, each=1, dtype="bfloat16", sums=given
    )
    onwards = choose(lambda rank, ranks, each: (rank + 1) % ranks * each, 1, rest=-1)
    given = [Sum(), Sum(biases=1)]
    yield Scenario(
        "tokens without experts get biases", tokens=tokens(3), dtype="float16", changed=onwards, sums=given, buffer=WIDE
    )
    more = {**LIMITS, "more than arrives": lambda rank, arriving, most: arriving + 5}
    for words in ("half of it", "all on some ranks", "more than arrives"):
        how = dict(worst=more[words], again=(Again(),), sums=[Sum(weights=True, values="integers")] * 2)
        yield Scenario(f"dropped rows add nothing, room for {words}", tokens=tokens(4, more=1), **how)
    for words, kind in OF_SUMS:
        how = dict(options=dict(expert_alignment=3), sums=(Sum(biases=1), replace(WEIGHTED, biases=1), WEIGHTS))
        yield Scenario(f"sums by expert, {words}", "expert", tokens(6, more=1), **how, **kind)
    for words, expert in (("the last rank", -1), ("no rank", None)):
        changed = choose(
            lambda rank, ranks, each, expert=expert: -1 if expert is None else ranks * each - 1, np.s_[:, 1], rest=-1
        )
        given = [replace(WEIGHTED, reduce=reduce) for reduce in ("rank", "topk")]
        yield Scenario(f"sums of tokens that go to {words}", "expert", tokens(5), changed=changed, sums=given)


def choice_sums() -> Rows:
    given = [replace(one, reduce="topk") for one in (WEIGHTED, Sum(weights=True, biases=1), replace(WEIGHTED, biases=2), Sum())]
    for (words, kind), worst in product(OF_SUMS, (None, lambda rank, arriving, most: 30)):
        how = dict(options=dict(expert_alignment=3), worst=worst, sums=given)
        room = "all rows" if worst is None else "30 rows"
        yield Scenario(f"sums in the order of choices, room for {room}, {words}", "expert", tokens(40, 0, 41, 42), **how, **kind)


def compressed() -> Rows:
    forms = (*COMPRESSIONS, None, *COMPRESSIONS)
    usual = dict(tokens=tokens(9, 0, 17, 4), topk=3, each=3, hidden=384, drawn=dict(skip_probability=0.2))
    for dtype in ("bfloat16", "float16", "float32"):
        given = [Sum(weights=True, biases=2, compress=form) for form in forms]
        yield Scenario(f"compressed rows of {dtype}", dtype=dtype, sums=given, **usual)
    for (nodes, path), dtype in product(((0, "hierarchical"), (2, "hierarchical"), (2, "direct")), ("bfloat16", "float32")):
        how: dict[str, Any] = dict(
            buffer=lambda ranks, nodes=nodes, path=path: dict(ranks_per_node=ranks // nodes if nodes else 1, path=path),
            needs=lambda ranks, nodes=nodes: ranks % max(nodes, 1) == 0 and ranks > max(nodes, 1),
        )
        given = [Sum(weights=True, biases=1, compress=form) for form in forms]
        yield Scenario(
            f"what crosses {nodes or 'all'} nodes is compressed, {path}, {dtype}", dtype=dtype, sums=given, **how, **usual
        )
    given = [replace(one, compress=form) for one in (WEIGHTS, WEIGHTED) for form in COMPRESSIONS]
    yield Scenario("sums of rows by expert are rounded, then compressed", "expert", dtype="bfloat16", sums=given, **usual)


# --- low-latency calls -------------------------------------------------------------------------------------------------------------


def special_numbers(one: RankInputs, rank: int, ranks: int, each: int) -> None:
    """Write zeros, infinities, NaN, the smallest numbers, and groups of very different magnitudes."""
    rng, hidden = np.random.default_rng([10, rank]), one.x.shape[1]
    one.x[:] = (one.x.astype(np.float32) * np.exp2(rng.integers(-100, 100, (len(one.x), 1)))).astype(one.x.dtype)
    one.x[0] = 0
    one.x[1, :3] = np.nan, 1, -np.nan
    one.x[2, 130:132] = np.inf, -np.inf
    one.x[3, :128] = np.nan
    one.x.view(np.uint16)[4] = rng.integers(0, 1 << 16, hidden)
    one.x.view(np.uint16)[5] = rng.integers(0, 1 << 7, hidden)  # subnormal
    one.x[6, ::2] = -0.0


def weights_that_need_an_order(one: RankInputs, rank: int, ranks: int, each: int) -> None:
    terms = np.array([1.0, 1e8, -1e8, 3.0, 2e8, -2e8, 0.01], np.float32)
    one.topk_weights[:] = np.random.default_rng([12, rank]).choice(terms, one.topk_weights.shape)


def _random_for(one: RankInputs) -> np.random.Generator:
    """Return random numbers that differ between rounds."""
    return np.random.default_rng(one.topk_weights.view(np.uint32).ravel()[:8])


def look_like_empty_memory(one: RankInputs, rank: int, ranks: int, each: int) -> None:
    """Write words with which inboxes mark memory that no row has reached, and words near them, to rows and scales."""
    rng = _random_for(one)
    for array in (one.x, one.scales):
        if array is None or not len(array):
            continue
        words = array.view(np.uint8).reshape(len(array), -1)
        words[rng.random(words.shape) < 0.3] = 0xFF
        words[rng.random(len(words)) < 0.2] = 0xFF
        keys = np.arange(words.shape[1] // 4, dtype=np.uint32)
        for row in np.flatnonzero(rng.random(len(words)) < 0.7):  # its vectors exclude the keys below that number, at most 128
            words[row, : 4 * len(keys)] = (~(keys % rng.integers(1, 200, dtype=np.uint32))).view(np.uint8)


def quantised(num_bytes: int, scales: str = "", num_scales: int = 0) -> Callable[[RankInputs, int, int, int], None]:
    """Replace rows by random bytes, so many for each, with scales of that dtype."""

    def change(one: RankInputs, rank: int, ranks: int, each: int) -> None:
        rng, count = _random_for(one), len(one.x)
        one.x, one.scales = rng.integers(0, 256, (count, num_bytes), np.uint8), None
        if scales:
            num_scale_bytes = num_scales * np.dtype(scales).itemsize
            one.scales = rng.integers(0, 256, (count, num_scale_bytes), np.uint8).view(scales)
        look_like_empty_memory(one, rank, ranks, each)

    return change


OPAQUE: dict[str, dict[str, Any]] = {
    "FP8 with float32 scales": dict(dtype="float8_e4m3fn", scales=2),
    "the other FP8 without scales": dict(dtype="float8_e5m2", changed=look_like_empty_memory),
    "signed bytes": dict(dtype="int8", scales=1, changed=look_like_empty_memory),
    "MXFP4": dict(dtype="uint8", changed=quantised(128, "uint8", 8)),
    "NVFP4": dict(dtype="uint8", changed=quantised(128, "float8_e4m3fn", 16)),
    "bytes with packed scales": dict(dtype="uint8", changed=quantised(256, "int32", 1)),
    "few bytes with many scales": dict(dtype="uint8", changed=quantised(16, "uint8", 341)),
    "the most bytes": dict(dtype="uint8", changed=quantised(496)),
}
"""Kinds of rows of low-latency dispatches that the program has quantised."""


def few_tokens(words: str, number: Callable[[int], int] | None = None, skip: float = 0.2, **more: Any) -> Scenario:
    """Make a row of low-latency calls. Every second seed has special outputs of experts."""
    seed = more.pop("seed", 1)
    more = {
        "drawn": dict(skip_probability=skip),
        "hidden": 256,
        "dtype": "bfloat16",
        "options": FORMATS[0],
        "sums": (BOTH, SPECIAL)[seed % 2],
        **more,
    }
    return Scenario(f"low latency, {words}", "low_latency", number or tokens(5, 0, 16, 3), seed=seed, **more)


def low_latency() -> Rows:
    for seed, options in enumerate(FORMATS):
        yield few_tokens(f"{options}", seed=seed, options=options)
    for idx_dtype, pattern in product(("int32", "int64"), ("random", "one_rank", "skewed")):
        yield few_tokens(f"{idx_dtype}, {pattern}", drawn=dict(idx_dtype=idx_dtype, pattern=pattern))
    for few, number in FEW.items():
        yield few_tokens(few, number, options=FORMATS[1])
        yield few_tokens(f"{few}, all to one rank", number, drawn=dict(skip_probability=0.2, pattern="one_rank"))
    yield few_tokens("tokens that go nowhere", skip=1.0, options=FORMATS[1])
    full = choose(lambda rank, ranks, each: ranks * each - 1, np.s_[:, 0], rest=-1)
    yield few_tokens("an expert with all tokens", tokens(16), changed=full, seed=6, options=FORMATS[1])
    twice = choose(lambda rank, ranks, each: np.arange(8)[:, None] % (ranks * each), np.s_[:, ::2])
    for options in FORMATS[:2]:
        yield few_tokens(f"experts that are chosen twice, {options}", tokens(8), 0.0, changed=twice, options=options)
    yield few_tokens("one choice and one expert each", topk=1, each=1, options=FORMATS[1])
    yield few_tokens("hidden of no multiple of 128", hidden=24)
    for options in FORMATS[1:4]:
        yield few_tokens(f"special numbers in {options}", tokens(12), changed=special_numbers, options=options)
    for words, kind in OPAQUE.items():
        yield few_tokens(f"quantised rows, {words}", tokens(5, 0, 16, 3), **kind)
        yield few_tokens(f"{words}, hooks", tokens(1, 2), **kind, hooks=True, early=(True,), sums=(Sum(),))
    for words, size in (("half a group of 128 channels", 90), ("an odd number of scales", 91)):
        changed = quantised(1440, "uint8", size)
        yield few_tokens(f"quantised rows, {words}", tokens(3, 5), hidden=2880, dtype="uint8", changed=changed)
    for most, number in ((16, tokens(16, 3)), (5, tokens(5, 0, 3)), (1, tokens(1))):
        options = FORMATS[1] | dict(num_max_tokens=most)
        yield few_tokens(f"at most {most} tokens of a rank", number, options=options)
    full = choose(lambda rank, ranks, each: ranks * each - 1, rest=-1)
    options = FORMATS[0] | dict(num_max_tokens=2)
    yield few_tokens("rows that do not fit in fewer rows", tokens(2), 0.0, changed=full, options=options)
    yield few_tokens("fewer quantised rows", tokens(2, 1), options=options, **OPAQUE["NVFP4"])
    given = [replace(one, values=values) for one in BOTH for values in ("ones", "negative zeros")]
    yield few_tokens("sums that depend on the order", tokens(8), 0.0, changed=weights_that_need_an_order, sums=given)


def low_latency_choices() -> Rows:
    small = dict(number=tokens(8, 5, 0, 3), buffer=dict(num_max_tokens_per_rank=8))
    for seed in range(6):
        named = ("some ranks", "no rank")[seed % 2]
        yield few_tokens(f"combine names {named}, {seed}", seed=seed, sums=[replace(one, named=named) for one in BOTH], **small)
        yield few_tokens(f"rows that combine did not name, in later calls, {seed}", seed=seed + 50, **small)
    for seed in range(4):
        given = (Sum(reduce="topk", named="some choices"), Sum(reduce="topk"))
        yield few_tokens(f"combine names some choices, {seed}", seed=seed, sums=given, **small)
        few = choose(lambda rank, ranks, each: np.random.default_rng(rank).integers(-1, 3, (tokens(8, 5, 0, 3)(rank), 4)))
        yield few_tokens(f"several choices of an expert, {seed}", changed=few, seed=seed, **small)
    yield few_tokens("rows that do not fit add nothing", changed=choose(lambda rank, ranks, each: 0), **small)


def low_latency_compressed() -> Rows:
    for seed, (number, form) in product(range(4), enumerate((None, *COMPRESSIONS, *reversed(COMPRESSIONS), None))):
        given = (Sum(compress=form, values="special" if seed == 3 else "normal"),)
        how = dict(hidden=512, sums=given, early=(bool(seed % 2),), hooks=seed == 2, seed=seed)
        yield few_tokens(f"rows as {form} between others, {seed}, {number}", **how)


# --- random calls ------------------------------------------------------------------------------------------------------------------


def drawn(
    layout: str, seed: int, most: int, *, dtypes: Sequence[str] = (), scales: Sequence[int] = (0, 1), **fixed: Any
) -> Scenario:
    """Draw a scenario with at most `most` tokens. `dtypes`: of x and of sums."""
    rng = np.random.default_rng([seed, 11, len(layout)])  # the same on all ranks, so that they make the same choices
    sizes = rng.integers(0, most + 1 if seed % 6 else 1, 64)
    options: dict[str, Any] = {}
    how: dict[str, Any] = dict(
        tokens=lambda rank: int(sizes[rank]),
        drawn=dict(
            skip_probability=float(rng.choice([0.0, 0.3, 0.9])),
            pattern=str(rng.choice(["random", "one_rank", "skewed"])),
            idx_dtype=str(rng.choice(["int32", "int64"])),
        ),
    )
    if layout == "low_latency":
        special = ("normal", "special")[rng.integers(2)]
        options = FORMATS[rng.integers(len(FORMATS))]
        sums = (Sum(reduce=("rank", "topk")[rng.integers(2)], values=special),)
        how |= dict(dtype="bfloat16", early=(bool(rng.integers(2)),), hooks=bool(rng.integers(2)), sums=sums)
        if rng.integers(3) == 0:
            options = FORMATS[0]
            how |= list(OPAQUE.values())[rng.integers(len(OPAQUE))]
        if rng.integers(3) == 0:
            options = options | dict(num_max_tokens=int(rng.integers(max(sizes[:8]), most + 1)) or 1)
    else:
        alignment, room, share = int(rng.choice([1, 2, 3, 8])), rng.integers(4), rng.random(64)
        limits = {0: lambda rank, arriving, most: most, 1: lambda rank, arriving, most: int(share[rank] * arriving * 1.2)}
        how |= dict(worst=limits.get(int(room)), scales=int(rng.choice(scales)), seed=1000 + seed)
        how["dtype"] = str(rng.choice(dtypes or ["float32", "bfloat16", "float8_e4m3fn"]))
        of_sums = str(rng.choice(dtypes or ["float32", "bfloat16", "float16"]))
        options = dict(expert_alignment=alignment, **(dict(zero_padding=bool(rng.integers(2))) if layout == "expert" else {}))
        weights, weighted, biases = (int(number) for number in rng.integers((2, 2, 3)))
        first = Sum(of_sums, bool(weights), bool(weights and weighted and layout == "expert"), biases)
        how["again"] = (Again(),) if rng.integers(2) else ()
        how["sums"] = (first, replace(first, reduce="topk")) if layout == "expert" else (first,)
    return Scenario(f"random calls, {layout} {seed}", layout, **{"seed": 2000 + seed, "options": options, **how, **fixed})


def random_calls() -> Rows:
    for seed in range(60):
        yield drawn("token", seed, 24, buffer=dict(num_max_tokens_per_rank=24, **WIDE))
    for seed in range(40):
        yield drawn(LAYOUTS[seed % 3 > 0], 100 + seed, 11, topk=5, each=8, hidden=48, buffer=WIDE)


def random_low_latency() -> Rows:
    for seed in range(40):
        yield drawn("low_latency", seed, 16, hidden=256)


THROUGHPUT = (dispatches, handles, conversions, sums, choice_sums, compressed, random_calls)
LOW_LATENCY = (low_latency, low_latency_choices, low_latency_compressed, random_low_latency)
TABLE = {group.__name__: tuple(group()) for group in (*THROUGHPUT, *LOW_LATENCY)}
"""Rows of a group that follow each other and have the same settings share a Buffer."""
