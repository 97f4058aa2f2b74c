"""Run the programs of the host backend on GPUs, with NumPy arrays that the CUDA backend stages."""

from __future__ import annotations

import inspect

import pytest
import transports

from deepep_rt.jit import compiler
from deepep_rt.kernels.tuning import has_fp8

pytestmark = pytest.mark.gpu


# Promises of the host backend alone: it finds a wrong call of one rank on all ranks, and has no streams.
HOST_ONLY = {
    "check_backend_choice",
    "check_host_events_and_streams",
    "check_bad_expert_number",  # on GPUs: test_throughput_failures.test_bad_input_leaves_the_buffer_usable
    "check_ranks_that_make_different_calls",  # on GPUs, these calls time out
    "check_huge_messages_are_refused",
    "check_out_of_host_memory",  # host backend only
    "check_low_latency_bad_expert_number",
    "check_wrong_low_latency_arguments",  # GPUs do not read these numbers
    "check_ranks_that_disagree_on_low_latency_calls",
    "check_ranks_that_disagree_on_low_latency_compression",
    "check_other_choices_are_refused",  # on GPUs: test_low_latency.test_other_choices_are_reported
    "check_late_messages_of_every_kind",  # needs the messages of the host backend's combine
}

ON_NODES = {"check_ranks_with_different_layouts", "check_rows_past_worst"}  # the others of bad_calls run on one node
DECLARES_NODES = {"check_compressed"}


def _checks():
    try:
        import bad_calls
        import buffer_failures
        import buffers
        import consensus
        import counted_calls
        import lost_ranks
        import low_latency
        import low_latency_errors
        import low_latency_hooks
        import low_latency_prepared
        import masks
        import nodes
        import prepared_throughput
        import scenario_table
        import table
    except ImportError:  # without MPI, pytest only collects these tests
        return []
    found = []
    for_low_latency = (low_latency, low_latency_hooks, low_latency_prepared, low_latency_errors, masks, lost_ranks)
    groups_of_low_latency = {f"check_{group.__name__}" for group in scenario_table.LOW_LATENCY}
    on_nodes = transports.nodes()
    settings_of = {
        **dict.fromkeys((buffers, buffer_failures, consensus, bad_calls, counted_calls), on_nodes[:1]),
        **dict.fromkeys((table, prepared_throughput), on_nodes),
        nodes: on_nodes[1:],  # its checks declare nodes, and this declares the path
        **dict.fromkeys(for_low_latency, transports.transports()),
    }
    for module, all_settings in settings_of.items():
        checks = [
            f for name, f in inspect.getmembers(module, inspect.isfunction) if name.startswith("check_") and name not in HOST_ONLY
        ]
        for check in sorted(checks, key=lambda f: f.__code__.co_firstlineno):
            its_settings = transports.transports() if check.__name__ in groups_of_low_latency else all_settings
            its_settings = (
                on_nodes if check.__name__ in ON_NODES else on_nodes[:1] if check.__name__ in DECLARES_NODES else its_settings
            )
            for name, settings in its_settings:
                found.append(pytest.param(check, settings, id=f"{module.__name__}-{check.__name__}-{name}"))
    return found


@pytest.mark.parametrize(("check", "settings"), _checks())
def test_check(check, settings, comm, monkeypatch):
    import spmd

    if check.__name__ == "check_subcommunicators" and comm.Get_size() % 2:
        return  # groups of different sizes over one NVSHMEM runtime are refused; see cuda.nvshmem.NvshmemMemory
    source = inspect.getsource(check)
    fp8 = has_fp8(compiler.target_arch())
    if not fp8 and ("use_fp8=True" in source or "FORMATS" in source or "compress=" in source):
        return  # these GPUs have no FP8; test_low_latency and test_compressed also run without it
    monkeypatch.setattr(spmd, "has_fp8", fp8)
    monkeypatch.setattr(spmd, "backend", "cuda")
    monkeypatch.setattr(spmd, "more_settings", settings)
    monkeypatch.setenv("DEEPEP_RT_DEBUG", "1")
    assert spmd.run_check(check, comm)
