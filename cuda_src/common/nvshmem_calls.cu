// The calls of NVSHMEM that kernels make (nvshmem_calls.cuh). No kernel includes this file; the linker adds it.
//
// NVSHMEM 3.4.5 expects parts of the host's standard library; later versions do not mind.
#include <cuda/std/type_traits>
#include <cuda/std/limits>
namespace std {
using namespace cuda::std;
}
// The library was built where uint64_t is unsigned long; here it is unsigned long long, another name to the linker. So NVSHMEM's headers
// are shown the former, and what they include, and what defines it by itself, comes before.
#include <cuda/std/cstdint>
#include <cooperative_groups.h>
#if __has_include(<cuda_awbarrier.h>)
#include <cuda_awbarrier.h>
#endif
#define uint64_t unsigned long
#include <nvshmem.h>
#include <nvshmemx.h>
#undef uint64_t
#include "common/nvshmem_calls.cuh"

extern "C" __device__ void nvshmem_put(void* to, const void* from, unsigned long long num_bytes, unsigned long long* word,
                                       unsigned long long value, int pe) {
  nvshmemx_putmem_signal_nbi_warp(to, from, num_bytes, reinterpret_cast<unsigned long*>(word), value, NVSHMEM_SIGNAL_SET, pe);
}

extern "C" __device__ void nvshmem_put_and_wait(void* to, const void* from, unsigned long long num_bytes, unsigned long long* word,
                                                unsigned long long value, int pe) {
  nvshmemx_putmem_signal_warp(to, from, num_bytes, reinterpret_cast<unsigned long*>(word), value, NVSHMEM_SIGNAL_SET, pe);
}

extern "C" __device__ void nvshmem_signal(unsigned long long* word, unsigned long long value, int pe) {
  nvshmemx_signal_op(reinterpret_cast<unsigned long*>(word), value, NVSHMEM_SIGNAL_SET, pe);
}
