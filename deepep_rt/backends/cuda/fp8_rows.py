"""Convert the rows of a dispatch to FP8 before they travel, in one pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...arrays.dtypes import FP8_GROUP
from ...arrays.view import View
from ...errors import EPUnavailableError
from ...jit.launch import launch_local
from ...kernels.regions import arrange
from ...kernels.tuning import has_fp8
from ..base import Call, DispatchInputs
from .result_memory import CallMemory
from .runtime import CudaRuntime

_THREADS, _THREADS_PER_GROUP = 256, 8  # of fp8_encode


class Fp8Rows:
    """Converts rows to FP8."""

    def __init__(self, runtime: CudaRuntime, memory: CallMemory, archs: Sequence[str]) -> None:
        self._runtime, self._memory = runtime, memory
        self._without_fp8 = next(((rank, arch) for rank, arch in enumerate(archs) if not has_fp8(arch)), None)

    def check_support(self, argument: str) -> None:
        """Raise EPUnavailableError, on all ranks, if the GPU of a rank cannot convert to FP8, which `argument` of a call needs."""
        if self._without_fp8 is not None:
            rank, arch = self._without_fp8
            raise EPUnavailableError(
                f"{argument}; expected GPUs with FP8 on all ranks, but rank {rank} has {arch}. Leave it out on all ranks"
            )

    def converted(self, inputs: DispatchInputs, call: Call) -> DispatchInputs:
        """Queue the conversion. Return the arguments with the converted rows, whose owner holds their memory. Raise as `check_support`."""
        self.check_support("use_fp8=True")
        order, stream = self._runtime.order, call.stream
        order.enqueue_waits(call)
        (x,) = self._runtime.on_device(stream, inputs.x)
        num_tokens, hidden = x.shape
        num_scales, scale_dtype = hidden // FP8_GROUP, "uint8" if inputs.use_ue8m0 else "float32"
        scale_bytes = num_scales * (1 if inputs.use_ue8m0 else 4)
        parts = arrange([("scales", num_tokens * scale_bytes), ("x", num_tokens * hidden)])
        memory = self._memory.allocate(parts.num_bytes, call)
        rows, scales = memory.ptr + parts.offsets["x"], memory.ptr + parts.offsets["scales"]
        num_groups = num_tokens * num_scales
        values = {
            "x": x.ptr,
            "out": rows,
            "scales": scales,
            "num_groups": num_groups,
            "round_scale": inputs.round_scale,
            "use_ue8m0": inputs.use_ue8m0,
        }
        launch_local("fp8_encode", stream, values, -(-num_groups * _THREADS_PER_GROUP // _THREADS), x.dtype)
        owner, device = (memory, x, inputs.x), self._runtime.device
        return replace(
            inputs,
            x=View(rows, x.shape, "float8_e4m3fn", device, owner, x.framework),
            scales=View(scales, (num_tokens, num_scales), scale_dtype, device, owner, x.framework),
        )
