"""Test `deepep_rt.compat.nixl_ep`: its signatures, the shim, refusals, and ranks that come and go on the host backend."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
from paths import PROGRAMS, ROOT, pythonpath

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

EMPTY = inspect.Parameter.empty
# NIXL 1.4.0 (ai-dynamo/nixl 8770b655), examples/device/ep/nixl_ep: names in order, with their defaults.
SIGNATURES = {
    "__init__": {
        "disable_ll_nvlink": False,
        "explicitly_destroy": False,
        "rank": 0,
        "low_latency_mode": True,
        "group": None,
        "comm": None,
        "tcp_store_group": None,
        "timeout_ms": 30_000,
    },
    "destroy": {},
    "is_sm90_compiled": {},
    "set_num_sms": {"new_num_sms": EMPTY},
    "capture": {},
    "get_low_latency_buffer_size_hint": {
        "num_max_dispatch_tokens_per_rank": EMPTY,
        "hidden": EMPTY,
        "num_ranks": EMPTY,
        "num_experts": EMPTY,
    },
    "get_rdma_size_hint": {"num_max_dispatch_tokens_per_rank": EMPTY, "hidden": EMPTY, "num_ranks": EMPTY, "num_experts": EMPTY},
    "get_comm_stream": {},
    "get_local_buffer_tensor": {"dtype": EMPTY, "size": None, "offset": 0, "use_rdma_buffer": False},
    "get_dispatch_config": {"num_ranks": EMPTY},
    "get_combine_config": {"num_ranks": EMPTY},
    "get_dispatch_layout": {
        "topk_idx": EMPTY,
        "num_experts": EMPTY,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "low_latency_dispatch": {
        "x": EMPTY,
        "topk_idx": EMPTY,
        "num_max_dispatch_tokens_per_rank": EMPTY,
        "num_experts": None,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "dispatch": {"args": EMPTY, "kwargs": EMPTY},
    "low_latency_combine": {
        "x": EMPTY,
        "topk_idx": EMPTY,
        "topk_weights": EMPTY,
        "handle": EMPTY,
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
        "out": None,
        "combine_wait_recv_cost_stats": None,
    },
    "combine": {"args": EMPTY, "kwargs": EMPTY},
    "ht_dispatch": {
        "x": EMPTY,
        "handle": None,
        "num_tokens_per_rank": None,
        "num_tokens_per_rdma_rank": None,
        "is_token_in_rank": None,
        "num_tokens_per_expert": None,
        "topk_idx": None,
        "topk_weights": None,
        "expert_alignment": 1,
        "config": None,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "ht_combine": {
        "x": EMPTY,
        "handle": EMPTY,
        "topk_weights": None,
        "bias": None,
        "config": None,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "update_mask_buffer": {"rank_to_mask": EMPTY, "mask": False},
    "query_mask_buffer": {"mask_status": EMPTY},
    "clean_mask_buffer": {},
    "get_next_combine_buffer": {"handle": EMPTY},
    "update_memory_buffers": {"num_ranks": EMPTY, "num_experts_per_rank": EMPTY, "num_rdma_bytes": EMPTY, "num_nvl_bytes": 0},
    "set_tcp_store_group": {"tcp_store_group": EMPTY},
    "connect_ranks": {"remote_ranks": EMPTY, "activate": True},
    "disconnect_ranks": {"remote_ranks": EMPTY},
    "barrier": {},
}
STATIC = {
    "is_sm90_compiled",
    "set_num_sms",
    "capture",
    "get_low_latency_buffer_size_hint",
    "get_rdma_size_hint",
    "get_dispatch_config",
    "get_combine_config",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    from deepep_rt.compat.nixl_ep import Buffer

    assert isinstance(inspect.getattr_static(Buffer, name), staticmethod) == (name in STATIC)
    parameters = {p.name: p.default for p in inspect.signature(getattr(Buffer, name)).parameters.values()}
    parameters.pop("self", None)
    assert list(parameters.items()) == list(SIGNATURES[name].items())


def test_every_public_name_is_in_the_table_and_in_the_page() -> None:
    from deepep_rt.compat.nixl_ep import Buffer

    public = {name for name in dir(Buffer) if not name.startswith("_")}
    assert public - {"check", "runtime", "num_sms"} == set(SIGNATURES) - {"__init__"}
    page = (ROOT / "docs/coming-from-deepep.md").read_text()
    names = {*SIGNATURES, *SIGNATURES["__init__"], *SIGNATURES["update_memory_buffers"]} - {"__init__"}
    assert [name for name in sorted(names) if name not in page] == []


def test_programs_import_the_shim() -> None:
    code = """
import sys
from deepep_rt._shim import shim_path
sys.path.insert(0, shim_path())
import nixl_ep
from nixl_ep.buffer import DEFAULT_TIMEOUT_MS, Buffer
from nixl_ep.utils import EventOverlap
from deepep_rt.compat import nixl_ep as ours
assert nixl_ep.Buffer is Buffer is ours.Buffer and nixl_ep.EventOverlap is EventOverlap and DEFAULT_TIMEOUT_MS == 30_000
assert not hasattr(nixl_ep, "nixl_ep_cpp") and not hasattr(Buffer(), "clean_buffer")
print(nixl_ep.topk_idx_t)
"""
    assert _run("-c", code) == "torch.int64\n"


def test_refusals() -> None:
    import torch

    from deepep_rt import EPConfigError, EPDestroyedError, EPInputError, EPUnavailableError
    from deepep_rt.compat.nixl_ep import Buffer

    for arguments, error, text in (
        ({"rank": -1}, EPConfigError, "rank=-1"),
        ({"timeout_ms": 0}, EPConfigError, "timeout_ms=0"),
        ({"low_latency_mode": False}, EPUnavailableError, r"low_latency_mode=False.*deepep_rt\.compat\.Buffer"),
        ({"disable_ll_nvlink": True}, EPUnavailableError, "disable_ll_nvlink=True.*Leave it out"),
    ):
        with pytest.raises(error, match=text):
            Buffer(**arguments)
    buffer = Buffer(rank=1)
    assert buffer.runtime is None
    with pytest.raises(EPInputError, match="expected update_memory_buffers before"):
        buffer.connect_ranks([0])
    num_bytes = Buffer.get_rdma_size_hint(16, 128, 4, 8)
    for arguments, text in (
        ((1, 2, num_bytes), "num_ranks=1; expected 2 to 8"),
        ((32, 2, num_bytes), "num_ranks=32.*VLLM_NIXL_EP_MAX_NUM_RANKS"),
        ((4, 0, num_bytes), "num_experts_per_rank=0"),
        ((4, 2, num_bytes, 1), "num_nvl_bytes=1; expected 0"),
    ):
        with pytest.raises(EPConfigError, match=text):
            buffer.update_memory_buffers(*arguments)
    buffer.update_memory_buffers(4, 2, num_bytes)
    assert buffer.runtime is not None
    assert (buffer.runtime.is_available(), buffer.group_size) == (True, 4)
    with pytest.raises(EPConfigError, match="was called before"):
        buffer.update_memory_buffers(4, 2, num_bytes)
    for call, text in (
        (lambda: buffer.connect_ranks([]), r"remote_ranks=\[\].*at least one rank"),
        (lambda: buffer.connect_ranks([4]), "remote_ranks=4"),
        (lambda: buffer.disconnect_ranks([0]), r"remote_ranks=\[0\]; expected connected ranks"),
        (lambda: buffer.update_mask_buffer(0), "rank_to_mask=0; expected a rank that is connected"),
        (lambda: buffer.update_mask_buffer(1, True), "rank_to_mask=1; expected a rank other than this one"),
        (lambda: buffer.query_mask_buffer(torch.zeros(2)), r"mask_status\.shape=\[2\]; expected \[4\]"),
    ):
        with pytest.raises(EPInputError, match=text):
            call()
    buffer.connect_ranks([0, 1, 2])
    buffer.update_mask_buffer(2, True)
    status = torch.zeros(4, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    assert status.tolist() == [0, 0, 1, 1]
    buffer.clean_mask_buffer()
    buffer.query_mask_buffer(status)
    assert status.tolist() == [0, 0, 0, 1]
    x, idx = torch.zeros((2, 128), dtype=torch.bfloat16), torch.zeros((2, 1), dtype=torch.int64)
    for arguments, text in (
        ((x, idx, 16, 4), r"num_experts=4; expected a multiple of num_experts_per_rank=2 from 6 .* to 8"),
        ((x, idx, 16, 10), "num_experts=10"),
        ((x, idx, 17, 8), r"num_max_dispatch_tokens_per_rank=17; expected at most 16.*get_rdma_size_hint"),
        ((x, idx, 16, 6, None, torch.zeros(4)), r"dispatch_wait_recv_cost_stats\.shape=\[4\]; expected \[3\]"),
    ):
        with pytest.raises(EPInputError, match=text):
            buffer.dispatch(*arguments)
    with pytest.raises(EPUnavailableError, match=r"tcp_store_group=None.*set_tcp_store_group"):
        buffer.dispatch(x, idx, 16)
    for call in (lambda: buffer.ht_dispatch(x), lambda: buffer.ht_combine(x, ()), lambda: buffer.get_dispatch_layout(idx, 8)):
        with pytest.raises(EPUnavailableError, match=r"expected a low-latency call.*deepep_rt\.compat\.Buffer"):
            call()
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(EPDestroyedError):
        buffer.barrier()


@pytest.mark.parametrize("story", ["comes_and_goes", pytest.param("losses", marks=pytest.mark.full)])
def test_ranks_come_and_go(story: str) -> None:
    assert _run(str(PROGRAMS / "nixl_ep_ranks.py"), story).endswith("OK\n")


def _run(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": pythonpath()}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
