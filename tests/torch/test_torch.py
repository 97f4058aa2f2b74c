"""Test deepep_rt.torch on the host backend, and run the programs of tests/programs that need PyTorch."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
from launch import run_checks, run_example
from ports import free_port

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def test_communicators_are_returned_as_they_are() -> None:
    from mpi4py import MPI

    from deepep_rt.comm.store import StoreCommunicator
    from deepep_rt.torch import communicator

    store = StoreCommunicator(None, "none", 0, 1)
    for ranks in (MPI.COMM_WORLD, MPI.COMM_SELF, MPI.COMM_NULL, store):
        assert communicator(ranks) is ranks


@pytest.mark.parametrize("group", ["x", 3, -101, [0, 1], object(), type])
def test_wrong_groups(group: object) -> None:
    from deepep_rt import EPConfigError, compat
    from deepep_rt.torch import communicator

    for make in (communicator, compat.Buffer):
        with pytest.raises(EPConfigError, match=r"group=.*; expected a process group.*mpi4py"):
            make(group)


def test_ranks_that_are_not_in_a_group() -> None:
    import torch.distributed as dist

    from deepep_rt import EPConfigError
    from deepep_rt.torch import communicator

    with pytest.raises(EPConfigError, match="not in the group"):
        communicator(dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("found", [[(0, 2), None], [(0, 1), (0, 1)], [(0, 2), (1, 2), (0, 2)], [(0, 1), (1, 2)]])
def test_ranks_that_one_mpirun_did_not_start(monkeypatch: pytest.MonkeyPatch, found: list[tuple[int, int] | None]) -> None:
    """One mpirun started no rank, or not all ranks, or each rank had another one."""
    from deepep_rt.torch import process_group

    monkeypatch.setattr(process_group, "gather", lambda value, group: found)
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))  # a call of MPI might never return
    assert process_group.mpi_communicator(None) is None


def test_an_mpi4py_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepep_rt.torch import process_group

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("cannot load MPI library")

    monkeypatch.setitem(sys.modules, "mpi4py", Broken("mpi4py"))
    assert process_group.rank_and_size_from_mpi() is None


def test_rows_that_kernels_can_read() -> None:
    """Gradients may be transposed, or parts of another tensor."""
    import torch

    from deepep_rt.torch.tensor_ops import aligned

    flat = torch.arange(65, dtype=torch.float32)
    for rows in (flat[1:].view(4, 16), flat[:64].view(16, 4).T, torch.ones(1, 1).expand(4, 16)):
        found = aligned(rows)
        assert torch.equal(found, rows)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
    good = flat[:64].view(4, 16)
    assert aligned(good).data_ptr() == good.data_ptr()


def test_dispatch_layout_ignores_numbers_out_of_range() -> None:
    import torch

    from deepep_rt.torch.tensor_ops import dispatch_layout

    per_rank, per_expert, in_rank = dispatch_layout(torch.tensor([[0, 3], [-1, 4], [9, -5]]), 4, 2)
    assert (per_rank.tolist(), per_expert.tolist()) == ([1, 1], [1, 0, 0, 1])
    assert in_rank.tolist() == [[True, True], [False, False], [False, False]]


@pytest.mark.filterwarnings("ignore")  # PyTorch warns that nested tensors are a prototype
def test_tensors_without_rows() -> None:
    """The error comes before any conversion."""
    import torch
    from mpi4py import MPI

    from deepep_rt import Buffer, EPInputError
    from deepep_rt.torch import combine, dispatch

    x, idx = torch.ones((4, 256)), torch.zeros((4, 2), dtype=torch.int64)
    sizes = dict(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=2, dtype="float32", backend="host")
    with Buffer(MPI.COMM_SELF, **sizes) as buffer:
        sent = dispatch(buffer, x, idx)
        for wrong in (x.to_sparse(), x.to_mkldnn(), torch.nested.nested_tensor([x, x])):
            for fp8 in (False, True):
                with pytest.raises(EPInputError, match=r"x is a .* tensor; expected a dense"):
                    dispatch(buffer, wrong, idx, fp8=fp8)
            with pytest.raises(EPInputError, match=r"x is a .* tensor; expected a dense"):
                combine(buffer, wrong, sent.handle)
        with pytest.raises(EPInputError, match=r"topk_idx is a torch\.sparse_coo tensor"):
            dispatch(buffer, x, idx.to_sparse())


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"),
    [pytest.param(1, "", marks=pytest.mark.full), (2, ""), pytest.param(4, "2", marks=pytest.mark.full)],
)
def test_gradients_and_groups(num_ranks: int, ranks_per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs run in one job, because importing PyTorch takes longer than most of the checks."""
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", ranks_per_node)
    output = run_checks(num_ranks, "torch_autograd", "torch_grouped", "torch_groups")
    assert "check_a_layer" in output
    assert "check_experts_of_bfloat16_rows" in output
    assert "check_subgroups" in output


@pytest.mark.parametrize(("capability", "counts", "is_zero"), [(10, [0, 128, 0], True), (10, None, True), (9, None, False)])
def test_gradients_of_experts_without_rows(
    monkeypatch: pytest.MonkeyPatch, capability: int, counts: list[int] | None, is_zero: bool
) -> None:
    """Grouped products on Blackwell write anything for them. Those on Hopper write zeros."""
    import torch

    from deepep_rt.torch import grouped

    monkeypatch.setattr(grouped, "_capability", lambda device: (capability, 0))
    matrices = torch.full((3, 2, 2), torch.nan)
    matrices[1] = 5
    found = grouped._without_rows_zero(matrices, torch.tensor([0, 128, 128], dtype=torch.int32), counts)
    assert (found[1] == 5).all()
    assert bool((found[[0, 2]] == 0).all()) == is_zero


def test_counters_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product of a dispatch gets a counter of its own."""
    from deepep_rt.arrays.frameworks import VIEWS
    from deepep_rt.arrays.view import View
    from deepep_rt.torch import grouped

    monkeypatch.setattr(grouped, "_zero", lambda device: "new")
    sent = SimpleNamespace(views={"tickets": View(640, (2, 4), "int32", 0, None, VIEWS)}, tickets_taken=0)
    tickets = [grouped._ticket(sent) for _ in range(4)]
    assert [ticket.data_ptr() for ticket in tickets[:2]] == [640, 656]  # Triton compiles a version for each alignment
    assert tickets[2:] == ["new", "new"]


def test_matrices_that_grouped_products_refuse_are_copied() -> None:
    import torch

    from deepep_rt.torch import grouped

    whole = torch.arange(2 * 8 * 24, dtype=torch.float32).bfloat16().view(2, 8, 24)
    for fits in (whole, whole[:, :, :8], whole.transpose(1, 2), whole[:, ::2], whole[1:]):
        assert grouped._in_lines(fits) is fits
    flat = torch.arange(2 * 8 * 24 + 1, dtype=torch.float32).bfloat16()
    for odd in (
        flat[1:].view(2, 8, 24),  # its address
        whole.view(2, 16, 12)[:, :, :8],  # the distance of its rows
        whole[:, :1].expand(2, 8, 24),
        whole[:, :, ::3],
    ):
        made = grouped._in_lines(odd)
        assert made.is_contiguous()
        assert made.data_ptr() % 16 == 0
        assert torch.equal(made, odd)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_backward_passes_of_all_ranks(num_ranks: int) -> None:
    assert "check_whatever_needs_a_gradient" in run_checks(num_ranks, "torch_ties")


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, ""), pytest.param(2, "1", marks=pytest.mark.full)])
def test_compiled_functions(num_ranks: int, ranks_per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", ranks_per_node)
    assert "check_operators" in run_checks(num_ranks, "torch_compiled")


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "options"), [(1, "", []), (4, "2", []), (2, "", ["--distributed", "gloo"])]
)
def test_example(num_ranks: int, ranks_per_node: str, options: list[str]) -> None:
    """The example itself compares its loss curve with that of one rank."""
    more = dict(MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1", DEEPEP_RT_RANKS_PER_NODE=ranks_per_node)
    lines = run_example(num_ranks, "moe_torch.py", *options, **more)
    assert lines[0].startswith(f"host: {num_ranks} ranks")
    steps = [line for line in lines if line.startswith("step ")]
    first, last = ([float(word.strip(",")) for word in line.split() if "." in word] for line in (steps[0], steps[-1]))
    assert all(b < 0.8 * a for a, b in zip(first, last, strict=True))
    assert lines[-1] == "OK"
