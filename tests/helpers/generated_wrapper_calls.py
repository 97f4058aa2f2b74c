"""Valid calls of deepep_rt.torch, deepep_rt.jax and deepep_rt.compat, with wrong values for their arguments. See `generated_calls`."""

from __future__ import annotations

import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from generated_calls import Call, wrong_array
from mpi4py import MPI

from deepep_rt import Buffer, EPConfigError, EPInputError, compat
from deepep_rt import jax as ep_jax
from deepep_rt import torch as ep_torch


def wrong_tensor(r: random.Random, good: Any) -> Any:
    shape = list(good.shape)
    choice = r.randrange(5)
    if choice == 0:
        shape[-1] = r.choice([shape[-1] + 1, 0])
        return torch.zeros(shape, dtype=good.dtype)
    if choice == 1:
        return r.choice([good[..., None], good.to_sparse(), good.to(torch.complex64), good.to("meta")])
    if choice == 2:
        return torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=good.dtype)[..., ::2]
    return wrong_array(r, np.zeros(shape, np.float32))


def _wrong_fp8_rows(r: random.Random, good: Any) -> Any:
    """Rows that are not contiguous become contiguous when they are converted."""
    while (
        isinstance(wrong := wrong_tensor(r, good), torch.Tensor) and wrong.shape == good.shape and wrong.layout is torch.strided
    ):
        pass
    return wrong


def _wrong_v1_rows(r: random.Random, good: Any) -> Any:
    """Rows of another width are a call of another Buffer."""
    while isinstance(wrong := wrong_tensor(r, good), torch.Tensor) and wrong.dim() == 2 and wrong.shape != good.shape:
        pass
    return wrong


def _wrong_jax_array(r: random.Random, good: Any) -> Any:
    wrong = wrong_array(r, np.zeros(good.shape, np.float32))
    if isinstance(wrong, (list, tuple, np.ndarray, float, np.generic)) and not isinstance(wrong, np.ma.MaskedArray):
        return jnp.zeros((*good.shape, 1), good.dtype)  # JAX makes arrays of these, which may be valid
    return wrong


def torch_calls(buffer: Buffer, tensors: dict[str, Any]) -> list[Call]:
    """List valid calls of deepep_rt.torch."""
    x, idx, _ = tensors.values()
    sent, rows = ep_torch.dispatch(buffer, x, idx), ep_torch.dispatch(buffer, **tensors, layout="expert")
    low = ep_torch.low_latency_dispatch(buffer, **tensors, use_fp8=False)
    y = torch.ones(low.recv_x.shape, dtype=torch.bfloat16)
    wrong = {**dict.fromkeys(tensors, wrong_tensor), "buffer": "any"}
    given = {"buffer": buffer, **tensors}
    options = {"num_worst_tokens": "number", "expert_alignment": "number", "fp8": "flag", "layout": "word", "reduce": "word"}
    forms = {"fp8_grad": "flag", "reduce": "word", "compress": "word"}
    back = {"buffer": buffer, "x": sent.recv_x, "handle": sent.handle, "bias": x}
    weighted = {"buffer": buffer, "x": rows.recv_x, "handle": rows.handle, "topk_weights": rows.recv_topk_weights}
    handles = {"handle": lambda r, _: r.choice([low.handle, sent, 7, None, "h"])}
    flags = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0"), "flag")
    low_handles = {"handle": lambda r, _: r.choice([low, sent.handle, 7, None, "h"])}
    return [
        Call("torch.dispatch", ep_torch.dispatch, given, {**wrong, **options, "handle": "handle"}),
        Call("torch.dispatch, expert", ep_torch.dispatch, {**given, "layout": "expert"}, {**wrong, **options, "handle": "handle"}),
        Call("torch.dispatch, FP8", ep_torch.dispatch, {**given, "fp8": True},
             {**wrong, "x": _wrong_fp8_rows, **options, "handle": "handle"}),
        Call("torch.combine", ep_torch.combine, back, {"buffer": "any", "x": wrong_tensor, "bias": wrong_tensor, **forms, **handles}),
        Call("torch.combine, expert", ep_torch.combine, weighted,
             {"buffer": "any", "x": wrong_tensor, "topk_weights": wrong_tensor, **forms, **handles}),
        Call("torch.low_latency_dispatch", ep_torch.low_latency_dispatch, given, {**wrong, **flags}),
        Call("torch.low_latency_combine", ep_torch.low_latency_combine, {**given, "x": y, "handle": low.handle},
             {**wrong, "allow_multiple_reduction": "flag", "compress": "word", **low_handles}),
    ]  # fmt: skip


def jax_calls(buffer: Buffer, arrays: dict[str, Any]) -> list[Call]:
    """List valid calls of deepep_rt.jax."""
    sent, rows = ep_jax.dispatch(buffer, **arrays), ep_jax.dispatch(buffer, **arrays, layout="expert")
    low = ep_jax.low_latency_dispatch(buffer, **arrays, use_fp8=False)
    wrong: dict[str, Any] = {**dict.fromkeys(arrays, _wrong_jax_array), "buffer": "any", "after": "any"}
    given = {"buffer": buffer, **arrays}
    options = {"num_worst_tokens": "number", "expert_alignment": "number", "layout": "word", "reduce": "word"}
    forms = {"reduce": "word", "compress": "word"}
    back = {"buffer": buffer, "x": sent.recv_x, "handle": sent.handle}
    weighted = {"buffer": buffer, "x": rows.recv_x, "handle": rows.handle, "topk_weights": rows.recv_topk_weights}
    handles = {"handle": lambda r, _: r.choice([low.handle, sent, 7, None, "h"])}
    flags = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0"), "flag")
    low_handles = {"handle": lambda r, _: r.choice([low, sent.handle, 7, None, "h"])}
    y = {"x": jnp.ones(low.recv_x.shape, jnp.bfloat16), "handle": low.handle}
    return [
        Call("jax.dispatch", ep_jax.dispatch, given, {**wrong, **options}),
        Call("jax.dispatch, expert", ep_jax.dispatch, {**given, "layout": "expert"}, {**wrong, **options}),
        Call("jax.combine", ep_jax.combine, back, {"buffer": "any", "x": _wrong_jax_array, "after": "any", **forms, **handles}),
        Call("jax.combine, expert", ep_jax.combine, weighted,
             {"buffer": "any", "x": _wrong_jax_array, "topk_weights": _wrong_jax_array, "after": "any", **forms, **handles}),
        Call("jax.low_latency_dispatch", ep_jax.low_latency_dispatch, given, {**wrong, **flags}),
        Call("jax.low_latency_combine", ep_jax.low_latency_combine, {**given, **y},
             {**wrong, "allow_multiple_reduction": "flag", "compress": "word", **low_handles}),
    ]  # fmt: skip


def _wrong_counts(r: random.Random, good: Any) -> Any:
    return r.choice([good.float(), good[:, None], good.bool(), good.to("meta"), good.to_sparse(), good.tolist(), 8, None])


def _wrong_size(r: random.Random, _: Any) -> Any:
    return r.choice(["x", 3, [-1], [2.5], object(), [[1]], 1.5])


def v1_calls(v1: Any, x: Any, layout: dict[str, Any], weights: Any) -> list[Call]:
    """List valid calls of DeepEP's interface."""
    num_experts = len(layout["num_tokens_per_expert"])
    recv, *_, handle, _ = v1.dispatch(x, **layout)
    options = {"previous_event": "any", "async_finish": "flag", "config": "any"}
    low: dict[str, Any] = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook"), "flag")
    low |= dict.fromkeys(
        ("num_max_dispatch_tokens_per_rank", "num_experts"), "any"
    )  # a large number may be a size of a new Buffer
    low_sent = v1.low_latency_dispatch(x, layout["topk_idx"], 8, num_experts, use_fp8=False)
    low_back = {"x": torch.ones(low_sent[0].shape, dtype=x.dtype), "topk_idx": layout["topk_idx"], "topk_weights": weights}
    sizes_error = EPInputError, EPConfigError  # compat makes a Buffer for the sizes of a call
    return [
        Call("compat.dispatch", v1.dispatch, {"x": x, **layout},
             {"x": _wrong_v1_rows, "num_tokens_per_expert": _wrong_counts, "is_token_in_rank": "any", "expert_alignment": "number",
              "num_worst_tokens": "any", **options}, sizes_error),
        Call("compat.get_dispatch_layout", v1.get_dispatch_layout, {"topk_idx": layout["topk_idx"], "num_experts": num_experts},
             {"topk_idx": "any", "num_experts": "number", "previous_event": "any", "async_finish": "flag"}),
        Call("compat.combine", v1.combine, {"x": recv, "handle": handle}, {"x": wrong_tensor, "handle": "handle", **options}),
        Call("compat.low_latency_dispatch", v1.low_latency_dispatch,
             {"x": x, "topk_idx": layout["topk_idx"], "num_max_dispatch_tokens_per_rank": 8, "num_experts": num_experts},
             {"x": "any", "topk_idx": "any", **low}, sizes_error),
        Call("compat.low_latency_combine", v1.low_latency_combine, {**low_back, "handle": low_sent[2]},
             {**dict.fromkeys(low_back, wrong_tensor), "handle": "handle", "out": "any", "use_logfmt": "flag", "zero_copy": "flag",
              "async_finish": "flag", "return_recv_hook": "flag"}),
        Call("compat.get_local_buffer_tensor", v1.get_local_buffer_tensor, {"dtype": torch.int8, "use_rdma_buffer": True},
             {"dtype": "any", "size": _wrong_size, "use_rdma_buffer": "flag"}),
        Call("compat.Buffer", lambda **settings: compat.Buffer(MPI.COMM_SELF, **settings).destroy(), {"num_nvl_bytes": 0},
             {"num_nvl_bytes": "bytes", "num_rdma_bytes": "bytes", "low_latency_mode": "flag"}, (EPConfigError,)),
        Call("compat.Config", compat.Config, {}, {"num_sms": "number", "num_max_nvl_chunked_recv_tokens": "bytes"}, (EPConfigError,)),
    ]  # fmt: skip
