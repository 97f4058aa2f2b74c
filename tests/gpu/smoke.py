"""One dispatch, one combine and the copy ceiling, in ten seconds. Run it before the long tests."""

import torch
from mpi4py import MPI

from deepep_rt import Buffer

comm = MPI.COMM_WORLD
torch.cuda.set_device(comm.rank % torch.cuda.device_count())
ranks = comm.size
with Buffer(comm, num_max_tokens_per_rank=512, hidden=7168, num_topk=4, num_experts=8 * ranks, timeout_s=5) as buffer:
    x = torch.randn(100, 7168, device="cuda").bfloat16()
    idx = torch.randint(0, 8 * ranks, (100, 4), device="cuda")
    weights = torch.rand(100, 4, device="cuda")
    sent = buffer.dispatch(x, idx, weights)
    back = buffer.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights)
    copies = torch.stack([(idx // 8 == r).any(1) for r in range(ranks)]).sum(0)
    error = (back.x.float() - x.float() * copies[:, None]).abs().max().item()
    ceiling = buffer.copy_ceiling()
    if comm.rank == 0:
        print(
            f"rows {tuple(sent.recv_x.shape)}, error {error:.3g}, weights equal: {torch.equal(back.topk_weights, weights)}, "
            f"{ceiling / 1e9:.0f} GB/s"
        )
    assert error < 0.1
    assert torch.equal(back.topk_weights, weights)
