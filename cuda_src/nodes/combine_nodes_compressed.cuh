// Sums that travel between nodes as FP8 or as 10-bit logarithms. A lane has 16 neighbouring channels.
#pragma once
#include "common/compressed.cuh"
#include "nodes/combine_nodes.cuh"

constexpr int kVecsPerLane = kLaneChannels / kPerVec<kElement>;

__device__ __forceinline__ void add_plain(float (&sum)[kLaneChannels], const Vec16 (&held)[kVecsPerLane]) {
  constexpr int kEach = kPerVec<kElement>;
#pragma unroll
  for (int v = 0; v < kVecsPerLane; ++v) {
    float values[kEach];
    to_floats<kElement>(held[v], values);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum[v * kEach + i] += values[i];
  }
}

__device__ __forceinline__ Vec16 rounded_part(const float (&sum)[kLaneChannels], int v) {
  constexpr int kEach = kPerVec<kElement>;
  float part[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) part[i] = sum[v * kEach + i];
  return rounded<kElement>(part);
}

__device__ __forceinline__ void load_plain(Vec16 (&held)[kVecsPerLane], u64 row, int channel) {
#pragma unroll
  for (int v = 0; v < kVecsPerLane; ++v) held[v] = ld_streaming(at<const Vec16>(row, 0) + channel / kPerVec<kElement> + v);
}

struct CompressedSums {
  // All lanes of a warp call this. Conversion needs whole warps, so lanes past the end of a row convert zeros.
  __device__ static __forceinline__ void write_node_sum(const u64 (&rows)[kFan], u64 to) {
    for (int channel = lane_idx() * kLaneChannels; channel - lane_idx() * kLaneChannels < kHidden; channel += kPassChannels) {
      const bool exists = channel < kHidden;
      float sum[kLaneChannels] = {};
#pragma unroll
      for (int d = 0; d < kFan; ++d) {
        if (!rows[d] || !exists) continue;
        Vec16 held[kVecsPerLane];
        load_plain(held, rows[d], channel);
        add_plain(sum, held);
      }
      Vec16 whole[kVecsPerLane];
#pragma unroll
      for (int v = 0; v < kVecsPerLane; ++v) whole[v] = rounded_part(sum, v);
      const Compressed c = compressed<kElement>(whole);
      if (exists) store_compressed(at<char>(to, 0), channel, c);
    }
  }

  // Parts lie in rank order, so those of a node follow each other.
  __device__ static __forceinline__ void reduce_token(const Params& p, const Parts& parts, int num_parts, int token) {
    const u64 offset = static_cast<u64>(token) * kRowBytes;
    const int own_node = node_of(p.rank);
    for (int channel = lane_idx() * kLaneChannels; channel < kHidden; channel += kPassChannels) {
      float all[kLaneChannels] = {}, of_node[kLaneChannels] = {};
      for (int k = 0; k < num_parts; ++k) {
        if (k > 0 && parts.node[k] != parts.node[k - 1]) add_node(all, of_node);
        if (parts.node[k] == own_node) {
          Vec16 held[kVecsPerLane];
          load_plain(held, parts.row[k], channel);
          add_plain(of_node, held);
        } else {
          add_to(of_node, load_compressed(at<const char>(parts.row[k], 0), channel));
        }
      }
      add_node(all, of_node);
#pragma unroll
      for (int v = 0; v < kVecsPerLane; ++v) {
        const int vec = channel / kPerVec<kElement> + v;
        add_bias(all, p.bias_0, offset, v, vec);
        add_bias(all, p.bias_1, offset, v, vec);
        st_vec(at<Vec16>(p.out, offset) + vec, rounded_part(all, v));
      }
    }
  }

  __device__ static __forceinline__ void add_node(float (&all)[kLaneChannels], float (&of_node)[kLaneChannels]) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      all[i] += of_node[i];
      of_node[i] = 0;
    }
  }

  __device__ static __forceinline__ void add_bias(float (&all)[kLaneChannels], u64 bias, u64 offset, int v, int vec) {
    constexpr int kEach = kPerVec<kElement>;
    if (!bias) return;
    float values[kEach];
    to_floats<kElement>(ld_streaming(at<const Vec16>(bias, offset) + vec), values);
#pragma unroll
    for (int i = 0; i < kEach; ++i) all[v * kEach + i] += values[i];
  }
};
