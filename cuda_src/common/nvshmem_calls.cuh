// The calls of NVSHMEM that kernels make. nvshmem_calls.cu has them, and the linker adds it to each kernel that calls one. NVSHMEM's
// headers take seconds to compile, so they are compiled once, and not with every kernel.
#pragma once

// Called by a whole warp: write `num_bytes` to the rank `pe`, then `value` to its word. Does not wait.
extern "C" __device__ void nvshmem_put(void* to, const void* from, unsigned long long num_bytes, unsigned long long* word,
                                       unsigned long long value, int pe);

// The same, but after it returns the caller may write to `from` again.
extern "C" __device__ void nvshmem_put_and_wait(void* to, const void* from, unsigned long long num_bytes, unsigned long long* word,
                                                unsigned long long value, int pe);

// Called by one thread: write `value` to a word of the rank `pe`.
extern "C" __device__ void nvshmem_signal(unsigned long long* word, unsigned long long value, int pe);
