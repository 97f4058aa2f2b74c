// await_tiles: waits for all tiles of rows by expert that a product still writes (y_ready). The kernels of a combine that cannot wait for
// single tiles follow in the stream. After a time-out they send nothing, as after any other.
//
// One block polls, so the product has the rest of the SM too.
//
// Bytes: the words of the tiles.
#include "experts/tile_words.cuh"

extern "C" __global__ void __launch_bounds__(kLocalThreads, 1) await_tiles(const __grid_constant__ Params p) {
  const State* state = at<const State>(p.state, 0);
  const u32 epoch = (kRanksPerNode < kNumRanks ? state->nodes_epoch : state->combine_epoch) + 1;
  for (int tile = threadIdx.x; tile < p.num_tiles; tile += kLocalThreads) {
    if (!await_product(p, epoch, at<const u32>(p.tile_ready, 0) + tile)) return;
  }
}
