"""Compare the signatures of deepep_rt.compat with those of DeepEP V1 and V2, and with the page for their users."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
from paths import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

EMPTY = inspect.Parameter.empty
# DeepEP 1.2.1: names in order, with their defaults.
SIGNATURES = {
    "Buffer.__init__": {
        "group": EMPTY,
        "num_nvl_bytes": 0,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 24,
        "allow_nvlink_for_low_latency_mode": True,
        "allow_mnnvl": False,
        "use_fabric": False,
        "explicitly_destroy": False,
        "enable_shrink": False,
        "comm": None,
    },
    "Buffer.destroy": {},
    "Buffer.is_sm90_compiled": {},
    "Buffer.set_num_sms": {"new_num_sms": EMPTY},
    "Buffer.capture": {},
    "Buffer.get_low_latency_rdma_size_hint": {
        "num_max_dispatch_tokens_per_rank": EMPTY,
        "hidden": EMPTY,
        "num_ranks": EMPTY,
        "num_experts": EMPTY,
    },
    "Buffer.get_comm_stream": {},
    "Buffer.get_local_buffer_tensor": {"dtype": EMPTY, "size": None, "offset": 0, "use_rdma_buffer": False},
    "Buffer.get_dispatch_config": {"num_ranks": EMPTY},
    "Buffer.get_combine_config": {"num_ranks": EMPTY},
    "Buffer.get_dispatch_layout": {
        "topk_idx": EMPTY,
        "num_experts": EMPTY,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "Buffer.dispatch": {
        "x": EMPTY,
        "handle": None,
        "num_tokens_per_rank": None,
        "num_tokens_per_rdma_rank": None,
        "is_token_in_rank": None,
        "num_tokens_per_expert": None,
        "topk_idx": None,
        "topk_weights": None,
        "expert_alignment": 1,
        "num_worst_tokens": 0,
        "config": None,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "Buffer.combine": {
        "x": EMPTY,
        "handle": EMPTY,
        "topk_weights": None,
        "bias": None,
        "config": None,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "Buffer.internode_dispatch": {
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
    "Buffer.internode_combine": {
        "x": EMPTY,
        "handle": EMPTY,
        "topk_weights": None,
        "bias": None,
        "config": None,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "Buffer.clean_low_latency_buffer": {"num_max_dispatch_tokens_per_rank": EMPTY, "hidden": EMPTY, "num_experts": EMPTY},
    "Buffer.low_latency_dispatch": {
        "x": EMPTY,
        "topk_idx": EMPTY,
        "num_max_dispatch_tokens_per_rank": EMPTY,
        "num_experts": EMPTY,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "Buffer.low_latency_dispatch_fp4": {
        "x": EMPTY,
        "scales": EMPTY,
        "topk_idx": EMPTY,
        "num_max_dispatch_tokens_per_rank": EMPTY,
        "num_experts": EMPTY,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "Buffer.low_latency_combine": {
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
    "Buffer.low_latency_update_mask_buffer": {"rank_to_mask": EMPTY, "mask": False},
    "Buffer.low_latency_query_mask_buffer": {"mask_status": EMPTY},
    "Buffer.low_latency_clean_mask_buffer": {},
    "Buffer.get_next_low_latency_combine_buffer": {"handle": EMPTY},
    "Config.__init__": {
        "num_sms": 20,
        "num_max_nvl_chunked_send_tokens": 6,
        "num_max_nvl_chunked_recv_tokens": 256,
        "num_max_rdma_chunked_send_tokens": 6,
        "num_max_rdma_chunked_recv_tokens": 256,
    },
    "Config.get_nvl_buffer_size_hint": {"hidden_bytes": EMPTY, "num_ranks": EMPTY},
    "Config.get_rdma_buffer_size_hint": {"hidden_bytes": EMPTY, "num_ranks": EMPTY},
    # DeepEP 2.1.0
    "ElasticBuffer.__init__": {
        "group": EMPTY,
        "num_bytes": None,
        "num_cpu_bytes": 0,
        "num_max_tokens_per_rank": 0,
        "hidden": 0,
        "num_topk": 0,
        "use_fp8_dispatch": False,
        "deterministic": False,
        "allow_hybrid_mode": True,
        "allow_multiple_reduction": True,
        "prefer_overlap_with_compute": True,
        "sl_idx": 3,
        "num_allocated_qps": 0,
        "num_cpu_timeout_secs": 300,
        "num_gpu_timeout_secs": 100,
        "explicitly_destroy": False,
        "comm": None,
    },
    "ElasticBuffer.destroy": {},
    "ElasticBuffer.get_buffer_size_hint": {
        "group": EMPTY,
        "num_max_tokens_per_rank": EMPTY,
        "hidden": EMPTY,
        "num_topk": 0,
        "use_fp8_dispatch": False,
        "allow_hybrid_mode": True,
        "allow_multiple_reduction": True,
    },
    "ElasticBuffer.barrier": {"use_comm_stream": True, "with_cpu_sync": False, "sequential": True},
    "ElasticBuffer.capture": {},
    "ElasticBuffer.get_comm_stream": {},
    "ElasticBuffer.get_physical_domain_size": {},
    "ElasticBuffer.get_logical_domain_size": {},
    "ElasticBuffer.get_theoretical_num_sms": {
        "num_experts": EMPTY,
        "num_topk": EMPTY,
        "num_scaleout_topk": 0,
        "rdma_gbs": 0,
        "nvlink_gbs": 0,
        "sm_read_gbs": 200,
        "sm_write_gbs": 50,
    },
    "ElasticBuffer.get_theoretical_num_qps": {"num_sms": EMPTY},
    "ElasticBuffer.dispatch": {
        "x": EMPTY,
        "topk_idx": None,
        "topk_weights": None,
        "cumulative_local_expert_recv_stats": None,
        "num_experts": None,
        "num_max_tokens_per_rank": None,
        "expert_alignment": None,
        "num_sms": 0,
        "num_qps": 0,
        "previous_event": None,
        "previous_event_before_epilogue": None,
        "async_with_compute_stream": False,
        "allocate_on_comm_stream": False,
        "handle": None,
        "do_handle_copy": True,
        "do_cpu_sync": None,
        "do_expand": False,
        "do_zero_padding": False,
        "use_tma_aligned_col_major_sf": False,
    },
    "ElasticBuffer.combine": {
        "x": EMPTY,
        "handle": EMPTY,
        "topk_weights": None,
        "bias": None,
        "num_sms": 0,
        "num_qps": 0,
        "previous_event": None,
        "previous_event_before_epilogue": None,
        "async_with_compute_stream": False,
        "allocate_on_comm_stream": False,
    },
    "EventHandle.__init__": {},
    "EventHandle.current_stream_wait": {},
    "EventOverlap.__init__": {"event": None, "extra_tensors": None},
    "EventOverlap.current_stream_wait": {},
}
STATIC = {
    "is_sm90_compiled",
    "set_num_sms",
    "capture",
    "get_low_latency_rdma_size_hint",
    "get_dispatch_config",
    "get_combine_config",
    "get_buffer_size_hint",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    from deepep_rt import compat

    owner, method = name.split(".")
    found = inspect.getattr_static(getattr(compat, owner), method)
    assert isinstance(found, staticmethod) == (method in STATIC)
    parameters = {p.name: p.default for p in inspect.signature(getattr(getattr(compat, owner), method)).parameters.values()}
    parameters.pop("self", None)
    assert list(parameters.items()) == list(SIGNATURES[name].items())


def test_every_public_name_is_in_the_table() -> None:
    from deepep_rt import compat

    names = {"Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"}
    assert set(compat.__all__) == names | {"check_nvlink_connections", "install", "shim_path", "topk_idx_t"}
    for kind in ("Buffer", "ElasticBuffer"):
        public = {
            name
            for name in dir(getattr(compat, kind))
            if not name.startswith("_") and name not in ("num_sms", "num_slots", "copies_results", "network")
        }
        assert public - {"check", "runtime", "sleep", "wake"} == {
            name.split(".")[1] for name in SIGNATURES if name.startswith(f"{kind}.") and "__" not in name
        }


def test_every_name_is_in_the_page_for_users_of_deepep() -> None:
    page = (ROOT / "docs/coming-from-deepep.md").read_text()
    names = {name.split(".")[1] for name in SIGNATURES if "__" not in name and "current_stream_wait" not in name}
    names |= set(SIGNATURES["Buffer.__init__"]) | set(SIGNATURES["ElasticBuffer.__init__"])
    names |= set(SIGNATURES["ElasticBuffer.dispatch"]) | {"runtime", "EventOverlap", "EventHandle", "EPHandle"}
    assert [name for name in sorted(names) if name not in page] == []
