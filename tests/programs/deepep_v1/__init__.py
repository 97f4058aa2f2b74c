"""A program as people wrote them for DeepEP V1, with checks of the results. Only its import differs.

It runs on the host backend (`tests/programs/compat.py`) and on GPUs (`tests/gpu/test_compat_on_gpus.py`). A `World` gives the device, and
decides whether Buffers use a process group of `torch.distributed` or a communicator.
"""

from .errors import run_errors
from .growth import run_growth
from .handles import run_handles_taken_apart
from .internode import run_internode, run_internode_growth
from .low_latency import run_low_latency, run_quantised_rows, run_smaller_maxima, run_two_in_flight
from .masks import run_lost_ranks, run_masks
from .normal import run_normal, run_ranks_only
from .results import run_copied_results, run_gradients
from .world import (
    HIDDEN,
    World,
    deep_ep,
    difference,
    from_fp8,
    layout_of,
    routing,
    settings_of_deepep_tests,
    tokens_in_ranks,
    world_of_a_group,
)

__all__ = [
    "HIDDEN",
    "World",
    "deep_ep",
    "difference",
    "from_fp8",
    "layout_of",
    "routing",
    "run_copied_results",
    "run_errors",
    "run_gradients",
    "run_growth",
    "run_handles_taken_apart",
    "run_lost_ranks",
    "run_internode",
    "run_internode_growth",
    "run_low_latency",
    "run_masks",
    "run_normal",
    "run_quantised_rows",
    "run_ranks_only",
    "run_smaller_maxima",
    "run_two_in_flight",
    "settings_of_deepep_tests",
    "tokens_in_ranks",
    "world_of_a_group",
]
