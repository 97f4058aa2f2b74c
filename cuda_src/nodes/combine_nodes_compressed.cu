// combine_nodes_fp8 and combine_nodes_log10: a combine over several nodes, whose sums travel between nodes as FP8 or as 10-bit logarithms.
// A lane has 16 neighbouring channels.
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
  static constexpr bool kIsPlain = false;

  // All lanes of a warp call this. Conversion needs whole warps, so lanes past the end of a row convert zeros.
  __device__ static __forceinline__ void write_node_sum(const u64 (&rows)[kFan], u64 to) {
    constexpr int kVecs = kFan > 4 ? 2 : kFan > 1 ? 4 : kMostHeld, kAtOnce = kVecs > kVecsPerLane ? kVecs / kVecsPerLane : 1;
    for (int first = lane_idx() * kLaneChannels; first - lane_idx() * kLaneChannels < kHidden; first += kAtOnce * kPassChannels) {
      float sum[kAtOnce][kLaneChannels] = {};
#pragma unroll
      for (int d = 0; d < kFan; ++d) {
        if (!rows[d]) continue;
        Vec16 held[kAtOnce][kVecsPerLane] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i * kPassChannels < kHidden) load_plain(held[i], rows[d], first + i * kPassChannels);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) add_plain(sum[i], held[i]);
      }
      Vec16 whole[kAtOnce][kVecsPerLane];
      Compressed c[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int v = 0; v < kVecsPerLane; ++v) whole[i][v] = rounded_part(sum[i], v);
      }
      compress<kElement>(whole, c);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kPassChannels < kHidden) store_compressed(at<char>(to, 0), first + i * kPassChannels, c[i]);
      }
    }
  }

  // Parts lie in rank order, so those of a node follow each other.
  __device__ static __forceinline__ void reduce_token(const Params& p, const Parts& parts, int num_parts, int token) {
    constexpr int kAtOnce = kMostHeld / 2 > kVecsPerLane ? kMostHeld / 2 / kVecsPerLane : 1;
    const u64 offset = static_cast<u64>(token) * kRowBytes;
    const int own_node = node_of(p.rank);
    for (int first = lane_idx() * kLaneChannels; first < kHidden; first += kAtOnce * kPassChannels) {
      float all[kAtOnce][kLaneChannels] = {}, of_node[kAtOnce][kLaneChannels] = {};
      for (int k = 0; k < num_parts; ++k) {
        if (k > 0 && parts.node[k] != parts.node[k - 1]) add_node(all, of_node);
        add_part(of_node, parts.row[k], parts.node[k] == own_node, first);
      }
      add_node(all, of_node);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int v = 0; v < kVecsPerLane; ++v) {
          const int channel = first + i * kPassChannels, vec = channel / kPerVec<kElement> + v;
          if (channel >= kHidden) continue;
          add_bias(all[i], p.bias_0, offset, v, vec);
          add_bias(all[i], p.bias_1, offset, v, vec);
          st_vec(at<Vec16>(p.out, offset) + vec, rounded_part(all[i], v));
        }
      }
    }
  }

  template <int kAtOnce>
  __device__ static __forceinline__ void add_part(float (&sum)[kAtOnce][kLaneChannels], u64 row, bool is_plain, int first) {
    if (is_plain) {
      Vec16 held[kAtOnce][kVecsPerLane] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kPassChannels < kHidden) load_plain(held[i], row, first + i * kPassChannels);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add_plain(sum[i], held[i]);
    } else {
      Compressed held[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kPassChannels < kHidden) held[i] = load_compressed(at<const char>(row, 0), first + i * kPassChannels);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kPassChannels < kHidden) add_to(sum[i], held[i]);
      }
    }
  }

  template <int kAtOnce>
  __device__ static __forceinline__ void add_node(float (&all)[kAtOnce][kLaneChannels], float (&of_node)[kAtOnce][kLaneChannels]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kLaneChannels; ++j) {
        all[i][j] += of_node[i][j];
        of_node[i][j] = 0;
      }
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

extern "C" __global__ void __launch_bounds__(kCombineNodesThreads, 1) KERNEL(const __grid_constant__ Params p) {
  constexpr int kCopyWarps = kWarps / 8;
  __shared__ Routes routes;
  __shared__ Parts parts[kWarps];
  combine_over_nodes<CompressedSums, kCopyWarps>(p, routes, parts, [&](u32 epoch) {
    if (warp_idx() < kCopyWarps) copy_rows<CompressedSums>(p, routes, epoch, WarpCopies<1, RaiseOne>{{p, epoch}, kRowBytes});
  });
}
