// ll_dispatch: a low-latency dispatch. A token travels once to each rank that holds some of its experts, and is laid out there expert by
// expert. Launched for sending, for receiving, or for both (p.phases).
//
// Sending. Blocks take items as they go. The first item is the header: it tells every rank how many tokens this rank has, which of them
// come there, and how often they choose each of its experts. The others are tokens: all warps but one read the row, convert it to FP8 if
// asked to, and write it to each receiver's inbox. The last warp works out the token's places among this rank's choices of each expert, and
// tells its receivers. What goes over the network is written to memory of this rank first, and put from there once the block is done.
//
// ReceiveContext. With the headers of all sources, of which blocks that have rows keep a copy, every warp knows where a source's rows begin
// in each expert: the order (source, token, choice) needs no counting of what has arrived. Several warps may share a token of a source:
// each learns where its row belongs, waits for its part of the row, and copies that to the experts; the first one writes what combine
// has to know to the handle.
//
// Words, rows, sides, masked ranks: low_latency.cuh. Counters only grow; the last block to have read them moves them on.
// No block waits for a certain other one of its grid, but for block 0, which starts first, acknowledges, and decides: tokens are taken by
// whoever runs, so all rows are sent even if only a few blocks get an SM.
//
// Where time-outs mask, all blocks have to be of one mind about a source, or places would differ: block 0 waits for whole headers, and
// tells the others whether they have come (decide). A row that is lost after that leaves its place undefined.
//
// Bytes: a row, (FP8: half of it and 4 / 128,) once over the link for each rank; at the receiver written, read, cleared, and written once
// for each expert.
#include "low_latency/ll_dispatch_receive.cuh"
#include "low_latency/ll_dispatch_send.cuh"

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_dispatch(const __grid_constant__ Params p) {
  extern __shared__ Table table[];
  __shared__ Shared shared;
  overlap_kernels();
  for (int e = threadIdx.x; e < kNumExperts; e += kLlThreads) shared.choices[e] = 0;
  __syncthreads();
  if (p.phases & kLlSend) {
    send(p, table->experts, shared);
  } else {
    if (warp_idx() == 0) acquire_credits(p, progress_of(p), kLlDispatchAcks, kPhaseLlDispatchRoom, nullptr, shared.call);
    __syncthreads();
  }
  if (threadIdx.x == 32 * kLastWarp) advance(p, progress_of(p), shared.call, p.num_tokens + 1 + gridDim.x);
  if (!(p.phases & kLlReceive)) return;
  if (shared.call.failed) return poison_rows(p, blockIdx.x * kLlThreads + threadIdx.x, gridDim.x * kLlThreads);
  const u64 start = p.wait_stats ? nanoseconds() : 0;
  start_receiving(p, start, shared.call);
  const bool ok = p.use_fp8 ? receive<kHidden / 16>(p, start, table->arrival_bitmap, shared)
                            : receive<kHidden / 8>(p, start, table->arrival_bitmap, shared);
  if (!ok) poison_rows(p, lane_idx(), 32);  // all of them: where those lie that did not come is not known
}
