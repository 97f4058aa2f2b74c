// How the rows for all ranks are shared out. Item j is chunk j / kNumRanks for some rank; worker w does the items w, w + num_workers, ...
#pragma once
#include "memory.cuh"

struct Item {
  int rank;
  int chunk;
};

// Neighbours work for different ranks, and a worker's next item is for the next rank (a short cycle would leave some workers with nothing
// but their own rank's rows, and each link to a few): every link is busy all the time, whatever the number of workers.
__device__ __forceinline__ Item item_at(int j, int num_workers, int my_rank) {
  const int chunk = j / kNumRanks, round = chunk * kNumRanks / num_workers;
  const int to_next_rank = (num_workers * (kNumRanks - 1) + 1) % kNumRanks;  // 1 - num_workers, modulo the number of ranks
  return {(j + round % kNumRanks * to_next_rank + my_rank) % kNumRanks, chunk};
}

// Items of worker `worker` of `num_workers`, when the rank with the most rows has `max_chunks` chunks.
__device__ __forceinline__ int num_items_of(int worker, int num_workers, int max_chunks) {
  const int total = max_chunks * kNumRanks;
  return total > worker ? (total - worker + num_workers - 1) / num_workers : 0;
}

// Rows of a chunk that starts at row chunk * chunk_rows of num_rows.
__device__ __forceinline__ int rows_in_chunk(int num_rows, int chunk, int chunk_rows) {
  const int left = num_rows - chunk * chunk_rows;
  return left < 0 ? 0 : left < chunk_rows ? left : chunk_rows;
}

__device__ __forceinline__ int clamp_rows(i64 room, int num_rows) {
  return room < 0 ? 0 : room < num_rows ? static_cast<int>(room) : num_rows;
}
