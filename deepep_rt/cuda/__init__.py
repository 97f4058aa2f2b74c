"""The CUDA runtime without Buffers: driver, streams, memory, and NVSHMEM."""
