"""`Buffer.autotune`: measure the settings of dispatch and combine on this machine, and keep the choice."""

from __future__ import annotations

from typing import Any

from ._buffer_base import BufferBase
from ._checks import argument_error, flag, seconds, whole_number
from .arrays.dtypes import DTYPES
from .config import MAX_TIMEOUT_S, ROW_ALIGNMENT, dtype_name
from .errors import EPInputError
from .tuned import TuningResult


class TuningCalls(BufferBase):
    """Tuning. Use `Buffer`."""

    def autotune(
        self, *, num_tokens: int | None = None, dtype: Any = None, max_seconds: float = 25.0, save: bool = True
    ) -> TuningResult:
        """Measure dispatch and combine with several numbers of SMs and shapes of their copies, use the best choice, and store it.

        Collective, on GPUs. All ranks pass the same arguments. It compiles kernels and measures them on a random routing, and waits for
        all earlier work. The calls of this Buffer have the chosen shapes from now on, and the chosen number of SMs, unless the program
        has passed `num_sms=` or set the property. Prepared calls and captured CUDA graphs that exist keep their shapes.

        The choice has the fewest SMs with which dispatch and combine together take at most 2 % longer than the fastest candidate. It is
        stored beside the kernel cache of rank 0. Later Buffers of the same sizes, on as many GPUs of the same names, use it. Results have
        the same bits with every choice. `DEEPEP_RT_TUNING=0` leaves stored choices out.

        Over several nodes, and on GPUs without TMA (before sm_90), only the number of SMs is measured.

        Args:
            num_tokens: Tokens of each rank in the measurement; default: the most that this Buffer takes. Choose what the program sends.
            dtype: Element type of the dispatched rows; default: that of the Buffer. FP8 rows come with their scales. Combine is measured
                with the Buffer's own type.
            max_seconds: After so many seconds no more candidates are measured. Kernels that are not compiled after 60 % of them are left
                out. A round that has begun is finished.
            save: Store the choice for later Buffers.

        Returns:
            The choice and all times. It prints as a table.

        Raises:
            EPInputError: If an argument is wrong. On every rank, if the ranks pass different ones.
            EPUnavailableError: On the host backend, which has nothing to tune; if ranks share a GPU; or if the Buffer cannot make
                throughput calls.
            EPOutOfMemoryError: On every rank, if one has no memory for the arrays, or holds too many results.
            EPTimeoutError: If a peer did not answer.

        Example:
            >>> with Buffer(comm, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256) as buffer:
            ...     print(buffer.autotune())
        """
        config = self.config
        most = config.num_max_tokens_per_rank
        num_tokens = most if num_tokens is None else whole_number(num_tokens, "num_tokens", 1, most)
        name = config.dtype if dtype is None else dtype_name(dtype)
        if not isinstance(name, str) or name not in DTYPES or (config.hidden * DTYPES[name].itemsize) % ROW_ALIGNMENT:
            expected = f"an element type whose rows have a multiple of {ROW_ALIGNMENT} bytes, one of {', '.join(DTYPES)}"
            raise argument_error(dtype, "dtype", expected, "Pass one of them.")
        if config.hidden * DTYPES[name].itemsize > config.row_bytes:
            raise EPInputError(
                f"dtype={name!r}; expected rows no wider than those of {config.dtype}, the Buffer's. Pass such a type."
            )
        limit_s, saves = seconds(max_seconds, "max_seconds", MAX_TIMEOUT_S), flag(save, "save")
        backend = self._live()
        with self._call_lock:
            return backend.autotune(num_tokens, name, limit_s, saves)
