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


def _checks():
    try:
        import bad_calls
        import buffer_failures
        import buffers
        import choices
        import combine
        import compressed
        import consensus
        import counted_calls
        import dispatch
        import expert_rows
        import lost_ranks
        import low_latency
        import low_latency_compressed
        import low_latency_errors
        import low_latency_hooks
        import low_latency_prepared
        import masks
        import nodes
        import prepared_throughput
        import rounds
    except ImportError:  # without MPI, pytest only collects these tests
        return []
    found = []
    for_low_latency = (
        low_latency,
        low_latency_compressed,
        low_latency_hooks,
        low_latency_prepared,
        low_latency_errors,
        choices,
        masks,
        lost_ranks,
    )
    on_nodes = transports.nodes()
    settings_of = {
        **dict.fromkeys((buffers, buffer_failures, consensus, bad_calls, compressed, counted_calls), on_nodes[:1]),
        **dict.fromkeys((dispatch, combine, rounds, prepared_throughput, expert_rows), on_nodes),
        nodes: on_nodes[1:],  # its checks declare nodes, and this declares the path
        **dict.fromkeys(for_low_latency, transports.transports()),
    }
    for module, all_settings in settings_of.items():
        checks = [
            f for name, f in inspect.getmembers(module, inspect.isfunction) if name.startswith("check_") and name not in HOST_ONLY
        ]
        for check in sorted(checks, key=lambda f: f.__code__.co_firstlineno):
            for name, settings in all_settings:
                found.append(pytest.param(check, settings, id=f"{module.__name__}-{check.__name__}-{name}"))
    return found


@pytest.mark.parametrize(("check", "settings"), _checks())
def test_check(check, settings, comm, monkeypatch):
    import spmd

    if check.__name__ == "check_subcommunicators" and comm.Get_size() % 2:
        return  # groups of different sizes over one NVSHMEM runtime are refused; see cuda.nvshmem.NvshmemMemory
    source = inspect.getsource(check)
    needs_fp8 = "use_fp8=True" in source or "FORMATS" in source or check.__module__ in ("compressed", "low_latency_compressed")
    if needs_fp8 and not has_fp8(compiler.target_arch()):
        return  # these GPUs have no FP8; test_low_latency and test_compressed also run without it
    monkeypatch.setattr(spmd, "backend", "cuda")
    monkeypatch.setattr(spmd, "more_settings", settings)
    monkeypatch.setenv("DEEPEP_RT_DEBUG", "1")
    assert spmd.run_check(check, comm)
