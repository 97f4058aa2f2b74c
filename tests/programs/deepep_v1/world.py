"""The ranks and the device of the program, its data, and its measure of errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from process_group import in_reverse

import deepep_rt.compat as deep_ep
from deepep_rt.torch import communicator

if TYPE_CHECKING:
    from mpi4py import MPI

HIDDEN = 1024


@dataclass
class World:
    """The ranks and the device of the program."""

    comm: MPI.Intracomm  # the ranks, in the order of `group`
    device: str
    group: Any = None  # a process group of these ranks
    num_tokens: int = 60

    @property
    def rank(self) -> int:
        return self.comm.Get_rank()

    @property
    def num_ranks(self) -> int:
        return self.comm.Get_size()

    @contextmanager
    def buffer(self, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **options: Any) -> Iterator[deep_ep.Buffer]:
        ranks = {"comm": self.comm} if self.group is None else {}
        made = deep_ep.Buffer(self.group, num_nvl_bytes, num_rdma_bytes, **ranks, explicitly_destroy=True, **options)
        assert (made.rank, made.group_size) == (self.rank, self.num_ranks)
        yield made
        made.destroy()

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 * seed + self.rank)

    def random_rows(self, num_tokens: int, seed: int, hidden: int = HIDDEN) -> torch.Tensor:
        """Return normally distributed rows, bfloat16."""
        return torch.randn((num_tokens, hidden), device=self.device, generator=self.generator(seed)).to(torch.bfloat16)

    def random_weights(self, num_tokens: int, num_topk: int, seed: int) -> torch.Tensor:
        """Return weights between 0 and 1, float32."""
        return torch.rand((num_tokens, num_topk), dtype=torch.float32, device=self.device, generator=self.generator(seed))

    def ones(self, *shape: int) -> torch.Tensor:
        """Return a tensor of ones, float32."""
        return torch.ones(shape, dtype=torch.float32, device=self.device)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of each rank. They may differ in their numbers of rows."""
        bits = tensor.cpu().contiguous()
        return [
            torch.from_numpy(rows).view(tensor.dtype).to(tensor.device)
            for rows in self.comm.allgather(bits.view(torch.uint8).numpy())
        ]


@contextmanager
def world_of_a_group(comm: MPI.Intracomm, device: str) -> Iterator[World]:
    """Make a World with a gloo group of the ranks of `comm`."""
    with in_reverse(comm):
        yield World(communicator(), device, dist.group.WORLD)


@contextmanager
def settings_of_deepep_tests(device: str) -> Iterator[None]:
    """Make bfloat16 the default dtype and `device` the default device of new tensors, as DeepEP's tests do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return 0 for equal tensors, otherwise about half the mean square error relative to the mean square."""
    a, b = a.double(), b.double()
    norm = (a * a + b * b).sum()
    return 0.0 if norm == 0 else float(1 - 2 * (a * b).sum() / norm)


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().view(x.shape[0], -1, 128)
    scales = groups.abs().amax(2).clamp(min=1e-4) / 448
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales


def from_fp8(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, scales = pair
    if scales.dtype == torch.int32:  # four exponents
        scales = (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
    return (x.float().view(*x.shape[:-1], -1, 128) * scales[..., None]).view(x.shape).to(torch.bfloat16)


def routing(world: World, seed: int, num_tokens: int, num_topk: int, num_experts: int, skip: float = 0.1) -> torch.Tensor:
    """Return random expert numbers, of which the share `skip` is -1."""
    topk_idx = world.random_weights(num_tokens, num_experts, seed).topk(num_topk, dim=1)[1]
    skipped = world.random_weights(num_tokens, num_topk, seed + 1) < skip
    return topk_idx.masked_fill(skipped, -1).to(deep_ep.topk_idx_t)


def tokens_in_ranks(topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> torch.Tensor:
    """Return whether each token goes to each rank, `[num_tokens, num_ranks]` bool, by comparison with each rank's experts."""
    each = num_experts // num_ranks
    return torch.stack([((topk_idx >= r * each) & (topk_idx < (r + 1) * each)).any(1) for r in range(num_ranks)], 1)


def layout_of(buffer: deep_ep.Buffer, topk_idx: torch.Tensor, num_experts: int) -> dict[str, torch.Tensor]:
    """Return the results of `get_dispatch_layout` as arguments of `dispatch`."""
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    return dict(zip(names, buffer.get_dispatch_layout(topk_idx, num_experts), strict=False))
