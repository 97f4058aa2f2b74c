"""Many random rounds in a row through one Buffer, with every option on and off."""

from __future__ import annotations

import time

import numpy as np
import oracle
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, outputs_of_all

NUM_ROUNDS = 60


def check_random_rounds(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    results = []
    with make_buffer(comm, num_experts=experts, num_max_tokens_per_rank=24) as buffer:
        for number in range(NUM_ROUNDS):
            rng = np.random.default_rng([11, number])  # the same on all ranks, so that they make the same choices
            sizes = rng.integers(0, 25 if number % 5 else 1, ranks)
            inputs = inputs_of_all(
                comm,
                1000 + number,
                lambda r, sizes=sizes: int(sizes[r]),
                hidden=32,
                num_topk=4,
                num_experts=experts,
                skip_probability=float(rng.choice([0.0, 0.3, 0.9])),
                pattern=str(rng.choice(["random", "one_rank", "skewed"])),
                idx_dtype=str(rng.choice(["int32", "int64"])),
                dtype=str(rng.choice(["float32", "bfloat16", "float8_e4m3fn"])),
                num_scales=int(rng.integers(0, 2)),
            )
            worst = [int(n) for n in rng.integers(0, 24 * ranks + 1, ranks)] if rng.random() < 0.3 else None
            mine = inputs[rank]
            if rng.integers(0, ranks) == rank and number % 3 == 0:
                time.sleep(0.01)  # so that ranks run at different speeds
            limit = worst[rank] if worst else None
            alignment = int(rng.choice([1, 8]))
            sent = buffer.dispatch(
                mine.x,
                mine.topk_idx,
                mine.topk_weights,
                x_scales=mine.scales,
                num_worst_tokens=limit,
                expert_alignment=alignment,
            )
            expected = oracle.expected_dispatch(rank, inputs, experts, num_worst_tokens=limit, expert_alignment=alignment)
            results.append((sent, expected, worst is None))
            dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
            outputs = outputs_of_all(inputs, experts, number, 32, dtype, worst=worst)
            back = buffer.combine(outputs[rank], sent.handle)
            oracle.check_sums(back, rank, inputs, outputs, experts, node_size=buffer.config.node_size, all_worst=worst)
        for sent, expected, has_counts in results:  # later calls do not change results
            oracle.check_dispatch(sent, expected, has_counts=has_counts)


if __name__ == "__main__":
    main(__name__, "prepared_throughput")
