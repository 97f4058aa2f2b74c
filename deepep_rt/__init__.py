"""Expert-parallel (MoE) dispatch and combine for GPUs, compiled at run time. Start with `Buffer`.

Importing this package uses no GPU, no MPI and no environment variable. Its messages go to the logger "deepep_rt", which prints nothing
until the program configures logging.
"""

import logging

from ._version import __version__ as __version__
from .buffer import Buffer
from .description import BufferDescription, LinkRates
from .errors import (
    EPAsleepError,
    EPCacheError,
    EPCompileError,
    EPConfigError,
    EPDestroyedError,
    EPError,
    EPEvictedError,
    EPInputError,
    EPOutOfMemoryError,
    EPPeerError,
    EPPeerLostError,
    EPTimeoutError,
    EPUnavailableError,
)
from .network import NetworkOptions
from .prepared import PreparedLowLatency, PreparedThroughput
from .results import (
    CombineResult,
    DispatchHandle,
    DispatchResult,
    Event,
    LowLatencyCombineResult,
    LowLatencyDispatchResult,
    LowLatencyHandle,
)
from .statistics import CallStatistics, PoolUse, Statistics
from .tuned import CopyShape, Tuning, TuningResult, TuningRow

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "Buffer",
    "BufferDescription",
    "CallStatistics",
    "CombineResult",
    "CopyShape",
    "DispatchHandle",
    "DispatchResult",
    "EPAsleepError",
    "EPCacheError",
    "EPCompileError",
    "EPConfigError",
    "EPDestroyedError",
    "EPError",
    "EPEvictedError",
    "EPInputError",
    "EPOutOfMemoryError",
    "EPPeerError",
    "EPPeerLostError",
    "EPTimeoutError",
    "EPUnavailableError",
    "Event",
    "LowLatencyCombineResult",
    "LowLatencyDispatchResult",
    "LowLatencyHandle",
    "LinkRates",
    "NetworkOptions",
    "PoolUse",
    "PreparedLowLatency",
    "PreparedThroughput",
    "Statistics",
    "Tuning",
    "TuningResult",
    "TuningRow",
]
