// ll_dispatch: a low-latency dispatch. A token travels once to each rank that holds some of its experts. The receiver sorts the rows by
// expert. A launch runs the send half, the receive half, or both (p.phases).
//
// Send half: blocks claim items from a counter. The first item is the header. It tells each rank the number of this rank's tokens, which of
// them go to that rank, and the choices of each of its experts. Each other item is a token. All warps but one read its row, convert it to
// FP8 if asked, and write it to the inboxes of its receivers. The last warp computes the expert slots of the token's choices and sends
// them. An expert slot is the position among this rank's choices of one expert. A message for another scale-up domain is first written to
// staging memory of this rank. Once the block has finished it, the warps put it.
//
// Receive half: blocks with rows keep a copy of the headers of all sources. With it, each warp knows where the rows of a source start in
// each expert. The order (source, token, choice) therefore needs no count of arrived rows. Several warps may share a token of a source.
// Each warp reads where the row belongs, waits for its part of the row, and copies that part to the experts. The first of these warps
// writes the entry of the handle that combine needs.
//
// Protocol: low_latency.cuh describes tagged words, rows, ring slots and masked ranks. Counters only grow; the last block to read them sets
// the numbers of the next call.
//
// Progress: blocks wait only for block 0, which starts first, acknowledges, and decides the status of sources. Running blocks claim the
// tokens, so all rows leave even if only a few blocks get an SM.
//
// Masks on time-outs: all blocks must agree on which sources they exclude, or rows would get different positions. Block 0 waits for whole
// headers and tells the other blocks which sources have arrived (decide_source_status). If a row is lost after that, its position stays
// undefined.
//
// Bytes: a row crosses the link once for each receiving rank. With FP8 it has half of the bytes, and scales of 4 bytes for each 128
// channels. (ll_opaque_rows.cuh has other rows.) The receiver gets the row in its inbox, reads and clears it, and writes it once for each
// expert.
#include "low_latency/ll_converted_rows.cuh"
#include "low_latency/ll_dispatch_call.cuh"

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_dispatch(const __grid_constant__ Params p) {
  extern __shared__ Table table[];
  dispatch<ConvertedRows>(p, *table, [&](u64 start, Shared& shared) {
    return p.use_fp8 ? receive<ConvertedPart<kHidden / 16>>(p, start, table->arrival_bitmap, shared)
                     : receive<ConvertedPart<kHidden / 8>>(p, start, table->arrival_bitmap, shared);
  });
}
