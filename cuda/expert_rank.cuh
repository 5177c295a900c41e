// Ranks of choices among those of the same expert, stable and without an atomic whose order would show.
//
// The choices are cut into tiles, one per block, and a tile into one stretch per warp. count_tiles_kernel
// counts each tile's choices of each expert, scan_tiles_kernel turns the counts into the rank of each tile's
// first one, and rank_tile() walks the tile again: rank = first of the tile + earlier warps + earlier lanes.
#pragma once

#include "common.cuh"

namespace fmoe_ext {

constexpr int kMaxTiles = 1024;
constexpr int kMinPerWarp = 256;

struct RankPlan {
  int64_t num_choices;
  int num_experts;
  int warps, num_tiles;
  int64_t per_warp;

  RankPlan(int64_t choices, int experts) : num_choices(choices), num_experts(experts) {
    const int fit = kMaxSortExperts / experts;  // histograms, one per warp
    warps = fit < 1 ? 1 : fit > 8 ? 8 : fit;
    const int64_t needed = ceil_div(ceil_div(choices, static_cast<int64_t>(kMaxTiles) * warps), 32) * 32;
    per_warp = needed < kMinPerWarp ? kMinPerWarp : needed;
    num_tiles = static_cast<int>(ceil_div(choices, per_warp * warps));
  }
  size_t shared_bytes() const { return sizeof(int) * warps * num_experts; }
  int64_t num_counts() const { return static_cast<int64_t>(num_tiles) * num_experts; }
};

// Position p in the order of priority -> flat choice t * K + k: tokens first, or all first choices first.
struct TokenOrder {
  __device__ int64_t operator()(int64_t p) const { return p; }
};
struct ChoiceOrder {
  int64_t num_tokens, num_choices_per_token;
  __device__ int64_t operator()(int64_t p) const {
    return p % num_tokens * num_choices_per_token + p / num_tokens;
  }
};

// The expert of choice i, -1 when dropped or out of range.
template <typename index_t>
__device__ __forceinline__ int valid_expert(const index_t* __restrict__ topk_idx, int64_t i,
                                            int num_experts) {
  const int64_t e = topk_idx[i];
  return e >= 0 && e < num_experts ? static_cast<int>(e) : -1;
}

template <typename index_t, class Order>
__global__ void __launch_bounds__(256)
    count_tiles_kernel(const index_t* __restrict__ topk_idx, Order order, RankPlan plan,
                       int* __restrict__ counts /* [E, tiles] */) {
  FMOE_DYNAMIC_SHARED(shared);
  int* histogram = reinterpret_cast<int*>(shared);  // [E]
  for (int e = threadIdx.x; e < plan.num_experts; e += blockDim.x) histogram[e] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * plan.per_warp * plan.warps;
  const int64_t tile_end = begin + plan.per_warp * plan.warps;
  const int64_t end = tile_end < plan.num_choices ? tile_end : plan.num_choices;
  for (int64_t p = begin + threadIdx.x; p < end; p += blockDim.x) {
    const int e = valid_expert(topk_idx, order(p), plan.num_experts);
    if (e >= 0) atomicAdd(&histogram[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < plan.num_experts; e += blockDim.x)
    counts[static_cast<int64_t>(e) * plan.num_tiles + blockIdx.x] = histogram[e];
}

// counts [E, tiles] becomes its exclusive sum along the tiles; totals [E] when not null. One warp an expert.
static __global__ void __launch_bounds__(256)
    scan_tiles_kernel(int* __restrict__ counts, int num_tiles, int num_experts,
                      int64_t* __restrict__ totals) {
  const int e = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (e >= num_experts) return;
  int* mine = counts + static_cast<int64_t>(e) * num_tiles;
  int total = 0;
  for (int first = 0; first < num_tiles; first += 32) {
    const int tile = first + lane;
    const int count = tile < num_tiles ? mine[tile] : 0;
    int sum = count;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullMask, sum, step);
      if (lane >= step) sum += before;
    }
    if (tile < num_tiles) mine[tile] = total + sum - count;
    total += __shfl_sync(kFullMask, sum, 31);
  }
  if (lane == 0 && totals) totals[e] = total;
}

// Calls emit(choice, expert, rank) for every choice of this block's tile; expert -1 for a dropped one.
// first_rank(e) is where the ranks of expert e begin; shared holds plan.shared_bytes().
template <typename index_t, class Order, class FirstRank, class Emit>
__device__ void rank_tile(const index_t* __restrict__ topk_idx, const Order& order, const RankPlan& plan,
                          const int* __restrict__ counts, int* shared, const FirstRank& first_rank,
                          const Emit& emit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, E = plan.num_experts;
  int* mine = shared + warp * E;
  for (int i = threadIdx.x; i < plan.warps * E; i += blockDim.x) shared[i] = 0;
  __syncthreads();

  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * plan.warps + warp) * plan.per_warp;
  const int64_t end = begin + plan.per_warp < plan.num_choices ? begin + plan.per_warp : plan.num_choices;
  for (int64_t p = begin; p < end; p += 32) {
    const int e = p + lane < end ? valid_expert(topk_idx, order(p + lane), E) : -1;
    const unsigned same = __match_any_sync(kFullMask, e);
    if (e >= 0 && lane == __ffs(same) - 1) mine[e] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += blockDim.x) {
    int next = first_rank(e) + counts[static_cast<int64_t>(e) * plan.num_tiles + blockIdx.x];
    for (int w = 0; w < plan.warps; ++w) {
      const int count = shared[w * E + e];
      shared[w * E + e] = next;
      next += count;
    }
  }
  __syncthreads();
  for (int64_t p = begin; p < end; p += 32) {
    const bool inside = p + lane < end;
    const int64_t i = inside ? order(p + lane) : 0;
    const int e = inside ? valid_expert(topk_idx, i, E) : -1;
    const unsigned same = __match_any_sync(kFullMask, e);
    const int rank = e >= 0 ? mine[e] + __popc(same & ((1u << lane) - 1)) : -1;
    __syncwarp();
    if (e >= 0 && lane == __ffs(same) - 1) mine[e] += __popc(same);
    __syncwarp();
    if (inside) emit(i, e, rank);
  }
}

// Counts and scans: what comes before rank_tile().
template <typename index_t, class Order>
void launch_tile_counts(const index_t* topk_idx, const Order& order, const RankPlan& plan, int* counts,
                        int64_t* totals, Stream stream) {
  if (plan.num_tiles > 0)
    launch(count_tiles_kernel<index_t, Order>, plan.num_tiles, plan.warps * 32,
           plan.num_experts * sizeof(int), stream, topk_idx, order, plan, counts);
  launch(scan_tiles_kernel, static_cast<unsigned>(ceil_div(plan.num_experts, 8)), 256, 0, stream, counts,
         plan.num_tiles, plan.num_experts, totals);
}

}  // namespace fmoe_ext
