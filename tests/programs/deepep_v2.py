"""A program for DeepEP V2: all modes of ElasticBuffer's calls, and each field of its handle, against an oracle that sees all ranks' tokens.

    mpirun -n 3 python deepep_v2.py

The GPU tests run the same checks with `device` set to "cuda".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from expect import raises
from mpi4py import MPI
from process_group import in_reverse
from spmd import main

import deepep_rt.compat as deep_ep
from deepep_rt import EPAsleepError, EPConfigError, EPDestroyedError, EPInputError, EPUnavailableError
from deepep_rt.config import usual_sms

device = "cpu"
HIDDEN, TOPK, LOCAL_EXPERTS, MOST = 256, 4, 4, 24


@contextmanager
def elastic(comm: MPI.Intracomm, **options: Any) -> Iterator[deep_ep.ElasticBuffer]:
    settings = dict(num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True)
    buffer = deep_ep.ElasticBuffer(None, comm=comm, **{**settings, **options})
    yield buffer
    buffer.destroy()


@dataclass
class Tokens:
    """The tokens of one rank."""

    x: Any
    idx: torch.Tensor
    weights: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        return self.x[0] if isinstance(self.x, tuple) else self.x


def tokens_of(rank: int, num_ranks: int, seed: int, kind: str = "bfloat16", idx_dtype: torch.dtype = torch.int64) -> Tokens:
    """Make the tokens of any rank, so that each rank knows those of all."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    count = MOST - 3 * rank if seed % 3 else (0, 5, MOST)[(rank + seed) % 3]
    scores = torch.rand(count, num_ranks * LOCAL_EXPERTS, generator=generator)
    idx = scores.argsort(1)[:, :TOPK].contiguous()
    idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
    weights = torch.rand(idx.shape, generator=generator)
    rows = torch.randn(count, HIDDEN, generator=generator)
    x: Any = rows.bfloat16()
    if kind == "float8":
        x = rows.to(torch.float8_e4m3fn), torch.rand(count, HIDDEN // 128, generator=generator)
    elif kind == "packed":  # 4-bit numbers with a byte of scales for 32 of them, 4 in a word
        x = (
            torch.randint(0, 256, (count, HIDDEN // 2), dtype=torch.uint8, generator=generator),
            torch.randint(0, 1 << 30, (count, HIDDEN // 128), dtype=torch.int32, generator=generator),
        )
    return Tokens(
        tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device), idx.to(device, idx_dtype), weights.to(device)
    )


@dataclass
class Row:
    """A token that a rank receives."""

    source: int
    token: int
    choices: list[int]  # of this rank

    @property
    def key(self) -> tuple[int, int]:
        return self.source, self.token


def rows_of(rank: int, everyone: list[Tokens]) -> list[Row]:
    """List what a rank receives, by source rank and token."""
    found = []
    for source, tokens in enumerate(everyone):
        for token, experts in enumerate((tokens.idx // LOCAL_EXPERTS).tolist()):
            choices = [k for k, expert in enumerate(experts) if expert == rank and tokens.idx[token, k] >= 0]
            if choices:
                found.append(Row(source, token, choices))
    return found


def expanded_of(rank: int, everyone: list[Tokens], rows: list[Row], alignment: int) -> tuple[list[Any], list[int]]:
    """List the expanded rows (row, choice), with None for padding, and the number of each expert's."""
    places: list[Any] = []
    counts = []
    for expert in range(LOCAL_EXPERTS):
        mine = [
            (row, k)
            for row in rows
            for k in row.choices
            if everyone[row.source].idx[row.token, k].item() == rank * LOCAL_EXPERTS + expert
        ]
        counts.append(len(mine))
        places += mine + [None] * (-len(mine) % alignment)
    return places, counts


def parts(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape)), (got.dtype, got.shape, want.dtype, want.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def expect_tables(
    handle: deep_ep.EPHandle, rank: int, everyone: list[Tokens], alignment: int, most: int, has_sync: bool, num_scaleup: int
) -> None:
    """Check each public field."""
    rows, num_ranks = rows_of(rank, everyone), len(everyone)
    places, counts = expanded_of(rank, everyone, rows, alignment)
    aligned = [-(-count // alignment) * alignment for count in counts]
    assert (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank) == (
        LOCAL_EXPERTS * num_ranks,
        alignment,
        most,
    )
    per_rank = [sum(row.source == source for row in rows) for source in range(num_ranks)]
    per_rank = [sum(per_rank[index::num_scaleup]) for index in range(num_scaleup)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == list(itertools.accumulate(per_rank))
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    ends = list(itertools.accumulate(aligned))
    if handle.do_expand:
        ends = [end - size + count for end, size, count in zip(ends, aligned, counts, strict=True)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    fields = ("psum_num_recv_tokens_per_scaleup_rank", "num_unaligned_recv_tokens_per_expert", "psum_num_recv_tokens_per_expert")
    for name in (*fields, "recv_src_metadata", "dst_buffer_slot_idx"):
        table = getattr(handle, name)
        assert (table.dtype, table.device.type) == (torch.int32, device), name
    assert handle.num_recv_tokens_per_expert_list == (aligned if has_sync else [])
    assert handle.num_recv_tokens == (len(rows) if has_sync else num_ranks * most)
    worst = num_ranks * most * min(TOPK, LOCAL_EXPERTS) + (alignment - 1) * LOCAL_EXPERTS
    assert handle.num_expanded_tokens == (sum(aligned) if has_sync else -(-worst // alignment) * alignment)
    table = handle.recv_src_metadata
    assert tuple(table.shape) == (handle.num_recv_tokens, 2 + TOPK)
    assert table[:, 0].tolist() == [row.source * most + row.token for row in rows] + [-1] * (len(table) - len(rows))
    assert table[: len(rows), 1].tolist() == [row.source * TOPK + row.choices[0] for row in rows]
    place_of = {(place[0].key, place[1]): at for at, place in enumerate(places) if place}
    wanted = [[place_of.get((row.key, k), -1) if handle.do_expand else -1 for k in range(TOPK)] for row in rows]
    assert table[: len(rows), 2:].tolist() == wanted
    mine, slots = everyone[rank], []
    sent = [0] * num_ranks
    for experts in mine.idx.tolist():
        line, seen = [], set()
        for expert in experts:
            target = expert // LOCAL_EXPERTS
            line.append(-1 if expert < 0 or target in seen else rank * most + sent[target])
            seen |= {target} - {-1}
        for target in seen:
            sent[target] += 1
        slots.append(line)
    assert handle.dst_buffer_slot_idx.tolist() == slots


def expect_dispatched(
    got: Any, rank: int, everyone: list[Tokens], do_expand: bool, alignment: int, *, zero: bool = False
) -> None:
    """Check rows, expert numbers and weights, bit for bit."""
    received, experts, weights = got
    rows = rows_of(rank, everyone)
    places: list[Any] = expanded_of(rank, everyone, rows, alignment)[0] if do_expand else [(row, None) for row in rows]
    for part, found in enumerate(parts(received)):
        for at, place in enumerate(places):
            if place is not None:
                same(found[at], parts(everyone[place[0].source].x)[part][place[0].token])
            elif zero:
                assert not found[at].contiguous().view(torch.uint8).any()
    if do_expand:
        assert experts is None
        if weights is not None:
            wanted = [everyone[p[0].source].weights[p[0].token, p[1]].item() if p else 0.0 for p in places]
            assert weights[: len(places)].tolist() == wanted
        return
    for at, row in enumerate(rows):
        idx = everyone[row.source].idx[row.token]
        assert experts[at].tolist() == [idx[k].item() % LOCAL_EXPERTS if k in row.choices else -1 for k in range(TOPK)]
        assert experts.dtype == idx.dtype
        if weights is not None:
            mine = everyone[row.source].weights[row.token]
            assert weights[at].tolist() == [mine[k].item() if k in row.choices else 0.0 for k in range(TOPK)]
    assert (experts[len(rows) :] == -1).all()


def expect_combined(
    buffer: deep_ep.ElasticBuffer, handle: deep_ep.EPHandle, rank: int, everyone: list[Tokens], alignment: int, seed: int
) -> None:
    """Send rows back that each rank can compute of all ranks. Sums of small whole numbers are exact in any order."""
    rows = rows_of(rank, everyone)
    places, _ = expanded_of(rank, everyone, rows, alignment)
    count = max(handle.routing.num_recv_rows, 0)
    y = torch.full((count, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
    kept = places if handle.do_expand else [(row, None) for row in rows]
    for at, place in enumerate(kept):
        if place is not None:
            y[at] = float(1 + place[0].token % 4 + (place[1] or 0))
    shape = (count,) if handle.do_expand else (count, TOPK)
    weights = torch.zeros(shape, device=device)
    for at, place in enumerate(kept):
        if place is not None:
            mine = everyone[place[0].source].weights[place[0].token]
            weights[at] = (
                mine[place[1]]
                if handle.do_expand
                else torch.where(torch.tensor([k in place[0].choices for k in range(TOPK)], device=device), mine, 0.0)
            )
    own = everyone[rank]
    biases = [torch.full((len(own.idx), HIDDEN), value, dtype=torch.bfloat16, device=device) for value in (2.0, 3.0)]
    bias: Any = (None, biases[0], tuple(biases))[seed % 3]
    given = {} if handle.do_expand and not buffer.allow_multiple_reduction else {"topk_weights": weights}
    out, back, event = buffer.combine(y, handle, bias=bias, **given)
    assert event.event is None
    for token, experts in enumerate(own.idx.tolist()):
        chosen = [k for k, expert in enumerate(experts) if expert >= 0]
        targets = {experts[k] // LOCAL_EXPERTS for k in chosen}
        total = (0.0, 2.0, 5.0)[seed % 3]
        total += sum(1 + token % 4 + k for k in chosen) if handle.do_expand else len(targets) * (1 + token % 4)
        assert (out[token].float() == total).all(), (token, out[token, 0], total)
        if given:
            wanted = [own.weights[token, k].item() if k in chosen else 0.0 for k in range(TOPK)]
            assert back[token].tolist() == wanted
    if not given:
        assert back is None


def run(
    comm: MPI.Intracomm,
    buffer: deep_ep.ElasticBuffer,
    seed: int,
    do_expand: bool,
    has_sync: bool,
    kind: str = "bfloat16",
    **options: Any,
) -> None:
    """Dispatch anew and along the handle, and combine."""
    rank, alignment, most = comm.Get_rank(), (1, 8)[seed % 2], (MOST, MOST + 8)[seed % 4 == 3]
    idx_dtype = (torch.int64, torch.int32)[seed % 2]
    everyone = [tokens_of(source, comm.Get_size(), seed, kind, idx_dtype) for source in range(comm.Get_size())]
    mine, num_experts = everyone[rank], LOCAL_EXPERTS * comm.Get_size()
    stats = torch.ones(LOCAL_EXPERTS, dtype=torch.int32, device=device)
    common = dict(do_expand=do_expand, use_tma_aligned_col_major_sf=bool(seed % 2), **options)
    given = dict(num_experts=num_experts, num_max_tokens_per_rank=most, expert_alignment=alignment, do_cpu_sync=has_sync)
    given["cumulative_local_expert_recv_stats"] = stats
    given["topk_weights"] = mine.weights if seed % 5 else None
    *got, handle, event = buffer.dispatch(mine.x, mine.idx, **given, **common)
    assert event.event is None
    mine.idx.add_(0)
    expect_dispatched(got, rank, everyone, do_expand, alignment)
    if got[1] is not None:
        got[1].fill_(77)  # programs change the expert numbers in place
    assert (stats - 1).tolist() == handle.num_unaligned_recv_tokens_per_expert.tolist()
    expect_tables(handle, rank, everyone, alignment, most, has_sync, buffer.num_scaleup_ranks)
    if isinstance(got[0], tuple) and seed % 2 and len(got[0][0]):
        assert got[0][1].stride()[0] == 1
        assert got[0][1].stride()[1] % 4 == 0
    *again, same_handle, _ = buffer.dispatch(
        mine.x, handle=handle, do_zero_padding=do_expand, topk_weights=mine.weights, **common
    )
    assert same_handle is handle
    expect_dispatched(again, rank, everyone, do_expand, alignment, zero=True)
    expect_combined(buffer, handle, rank, everyone, alignment, seed)


def check_all_modes(comm: MPI.Intracomm) -> None:
    """Plain and expanded, with and without CPU sync, and each form of rows."""
    for multiple in (True, False):
        with elastic(comm, allow_multiple_reduction=multiple) as buffer:
            assert buffer.get_physical_domain_size()[0] * buffer.num_nvlink_ranks == buffer.num_ranks == comm.Get_size()
            seeds = itertools.count(1)
            for do_expand, has_sync in itertools.product((False, True), (True, False)):
                for kind in ("bfloat16", "float8", "packed"):
                    run(comm, buffer, next(seeds), do_expand, has_sync, kind)


def check_a_process_group(comm: MPI.Intracomm) -> None:
    """Its order of ranks counts."""
    with in_reverse(comm):
        buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
        assert (buffer.rank_idx, buffer.num_ranks) == (dist.get_rank(), comm.Get_size())
        assert deep_ep.ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, MOST, HIDDEN) == buffer.num_bytes
        everyone = [tokens_of(rank, comm.Get_size(), 1) for rank in range(comm.Get_size())]
        mine = everyone[buffer.rank_idx]
        *got, _, _ = buffer.dispatch(mine.x, mine.idx, mine.weights, num_experts=LOCAL_EXPERTS * comm.Get_size())
        expect_dispatched(got, buffer.rank_idx, everyone, False, 1)
        buffer.destroy()
        comm.Barrier()  # the first rank of the group holds its store


def check_sleep(comm: MPI.Intracomm) -> None:
    """Handles work after it. Calls meanwhile raise, also ones that would make another Buffer."""
    with elastic(comm) as buffer:
        run(comm, buffer, 1, False, True)
        mine = tokens_of(comm.Get_rank(), comm.Get_size(), 4)
        *_, handle, _ = buffer.dispatch(mine.x, mine.idx, num_experts=LOCAL_EXPERTS * comm.Get_size())
        for _ in range(2):
            buffer.sleep()
            for call in (lambda: buffer.dispatch(mine.x, handle=handle), lambda: buffer.combine(mine.x, handle), buffer.sleep):
                with raises(EPAsleepError, "wake()"):
                    call()
            buffer.wake()
            with raises(EPInputError, "awake"):
                buffer.wake()
            assert len(buffer.dispatch(mine.x, handle=handle)[0]) == handle.num_recv_tokens
            run(comm, buffer, 2, True, True)
    with raises(EPDestroyedError, "destroyed"):
        buffer.sleep()


def check_sizes(comm: MPI.Intracomm) -> None:
    """By bytes, by numbers, and calls with fewer and more tokens than the constructor was told. One Buffer serves smaller numbers."""
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint(comm, MOST, HIDDEN, TOPK)
    assert hint % (2 << 20) == 0
    with elastic(comm, num_bytes=hint, num_max_tokens_per_rank=0, hidden=0, num_topk=0) as buffer:
        assert buffer.num_bytes == hint
        run(comm, buffer, 2, False, True)
        with raises(EPInputError, "num_max_tokens_per_rank=0", "constructor"):
            buffer.dispatch(
                torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device),
                torch.zeros(1, TOPK, dtype=torch.int64),
                num_experts=LOCAL_EXPERTS * comm.Get_size(),
            )
        comm.Barrier()
    with elastic(comm) as buffer:
        for seed in (1, 2, 3, 5, 7):
            run(comm, buffer, seed, bool(seed % 2), False)
        assert len(buffer._buffers.living) == 2, "one of the first size, and one for more tokens"


def check_domains(comm: MPI.Intracomm) -> None:
    with elastic(comm, allow_hybrid_mode=False) as buffer:
        assert buffer.get_logical_domain_size() == (1, comm.Get_size())
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, comm.Get_rank())
        assert buffer.get_theoretical_num_sms(64, 8) == usual_sms(comm.Get_size(), buffer.get_physical_domain_size()[0])
        assert buffer.get_theoretical_num_qps(24) == 9 <= buffer.num_allocated_qps
        buffer.barrier()
        run(comm, buffer, 4, True, True, num_sms=8, num_qps=3, previous_event=buffer.capture(), allocate_on_comm_stream=True)
    with raises(EPDestroyedError, "destroyed"):
        buffer.dispatch(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))


def check_what_is_refused(comm: MPI.Intracomm) -> None:
    """Each error names the argument. What other DeepEP methods do is said where they are called."""
    num_experts = LOCAL_EXPERTS * comm.Get_size()
    x, idx = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=device), torch.zeros(2, TOPK, dtype=torch.int64, device=device)
    idx += torch.arange(TOPK, device=device)
    with elastic(comm) as buffer, elastic(comm) as other:
        *_, foreign, _ = other.dispatch(x, idx, num_experts=num_experts)
        *_, plain, _ = buffer.dispatch(x, idx, num_experts=num_experts)
        *_, expanded, _ = buffer.dispatch(x, idx, num_experts=num_experts, do_expand=True)
        for words, call in (
            ("do_zero_padding=True", lambda: buffer.dispatch(x, idx, num_experts=num_experts, do_zero_padding=True)),
            ("topk_idx=None", lambda: buffer.dispatch(x, num_experts=num_experts)),
            ("num_experts=None", lambda: buffer.dispatch(x, idx)),
            ("topk_idx with handle", lambda: buffer.dispatch(x, idx, handle=plain)),
            ("do_cpu_sync=True with handle", lambda: buffer.dispatch(x, handle=plain, do_cpu_sync=True)),
            ("num_experts=1", lambda: buffer.dispatch(x, handle=plain, num_experts=1)),
            ("expert_alignment=3", lambda: buffer.dispatch(x, handle=plain, expert_alignment=3)),
            ("do_expand=False", lambda: buffer.dispatch(x, handle=expanded)),
            (
                "num_max_tokens_per_rank=1 tokens",
                lambda: buffer.dispatch(x, idx, num_experts=num_experts, num_max_tokens_per_rank=1),
            ),
            ("x[1].shape=[1, 2]", lambda: buffer.dispatch((x, torch.ones(1, 2, device=device)), idx, num_experts=num_experts)),
            ("previous_event=", lambda: buffer.dispatch(x, idx, num_experts=num_experts, previous_event=3)),
            ("handle=", lambda: buffer.combine(x, 3)),
            ("handle is of another ElasticBuffer", lambda: buffer.combine(x, foreign)),
            ("handle is of another ElasticBuffer", lambda: buffer.dispatch(x, handle=foreign)),
            (
                "cumulative_local_expert_recv_stats.shape=[3]",
                lambda: buffer.dispatch(x, handle=plain, cumulative_local_expert_recv_stats=x[0, :3]),
            ),
            ("do_handle_copy='no'", lambda: buffer.dispatch(x, idx, num_experts=num_experts, do_handle_copy="no")),
            ("num_sms=", lambda: buffer.combine(x, plain, num_sms=-1)),
        ):
            with raises(EPInputError, words):
                call()
        comm.Barrier()
        for name, instead in (
            ("engram_write", "framework"),
            ("pp_send", "torch.distributed.send"),
            ("agrs_new_session", "all_gather"),
        ):
            assert not hasattr(buffer, name)
            with raises(EPUnavailableError, f"ElasticBuffer.{name}", instead):
                getattr(buffer, name)
        run(comm, buffer, 6, False, True)
    for options, words in (
        (dict(num_cpu_bytes=1), "num_cpu_bytes=1"),
        (dict(num_max_tokens_per_rank=0), "num_max_tokens_per_rank=0"),
        (dict(deterministic="yes"), "deterministic='yes'"),
        (dict(num_gpu_timeout_secs=0), "num_gpu_timeout_secs=0"),
    ):
        with raises(EPConfigError, words), elastic(comm, **options):
            pass
    comm.Barrier()


if __name__ == "__main__":
    main(__name__)
