// nvshmem_ring: NVSHMEM's device library, linked at run time, put to the test: every rank puts a value into the next one's slot and signals
// it; the receiver waits (bounded, as everywhere) and hands the value out. One warp. The signal is an epoch
// that grows from call to call, so nothing has to be reset.
#include "wait.cuh"

extern "C" __global__ void __launch_bounds__(kRingThreads, 1) nvshmem_ring(const __grid_constant__ Params p) {
  u64* slot = at<u64>(p.slot, 0);  // [0] the value, [1] the signal: what arrives; [2] what is sent
  if (threadIdx.x == 0) slot[2] = p.value;
  __syncwarp();
  nvshmemx_putmem_nbi_warp(slot, slot + 2, sizeof(u64), p.pes[(p.rank + 1) % kNumRanks]);
  nvshmem_fence();
  if (threadIdx.x != 0) return;
  nvshmemx_signal_op(at<unsigned long>(p.slot, sizeof(u64)), p.epoch, NVSHMEM_SIGNAL_SET, p.pes[(p.rank + 1) % kNumRanks]);
  const int source = (p.rank + kNumRanks - 1) % kNumRanks;
  if (wait_epoch(p, reinterpret_cast<u32*>(slot + 1), static_cast<u32>(p.epoch), kPhaseRing, source)) *at<u64>(p.out, 0) = slot[0];
}
