// The functions of NVSHMEM that the kernels call (network.cpp).
#pragma once
#include "cuda.h"

#define NVSHMEM_MAJOR_VERSION 3

enum { NVSHMEM_SIGNAL_SET = 9 };

inline void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t num_bytes, unsigned long* word, unsigned long value,
                                            int operation, int pe) {
  cpu_gpu::put_by_warp(to, from, num_bytes, word, value, pe, false);
}

inline void nvshmemx_putmem_signal_warp(void* to, const void* from, size_t num_bytes, unsigned long* word, unsigned long value,
                                        int operation, int pe) {
  cpu_gpu::put_by_warp(to, from, num_bytes, word, value, pe, true);
}

inline void nvshmemx_signal_op(unsigned long* word, unsigned long value, int operation, int pe) { cpu_gpu::signal_pe(word, value, pe); }
