// The operators sort_tokens and apply_capacity, for ops_cuda.cpp; contracts in launchers.h. Stable counting
// sort of the choices by expert, and the capacity of experts: both need the rank of each choice among those
// of its expert, without an atomic whose order would show.
//
// The choices are cut into tiles, one per block, and a tile into one stretch per warp. count_tiles_kernel
// counts each tile's choices of each expert, scan_tiles_kernel turns the counts into the rank of each tile's
// first one, and rank_tile() walks the tile again: rank = first of the tile + earlier warps + earlier lanes.
#include "common.cuh"

namespace fmoe_ext {
namespace {

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
__global__ void __launch_bounds__(256) scan_tiles_kernel(int* __restrict__ counts, int num_tiles,
                                                         int num_experts, int64_t* __restrict__ totals) {
  const int e = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (e >= num_experts) return;
  int* mine = counts + static_cast<int64_t>(e) * num_tiles;
  int total = 0;
  for (int first = 0; first < num_tiles; first += 32) {
    const int tile = first + lane;
    const int count = tile < num_tiles ? mine[tile] : 0;
    const int sum = warp_prefix_sum(count);
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
void count_and_scan_tiles(const index_t* topk_idx, const Order& order, const RankPlan& plan, int* counts,
                          int64_t* totals, Stream stream) {
  if (plan.num_tiles > 0)
    launch(count_tiles_kernel<index_t, Order>, plan.num_tiles, plan.warps * 32,
           plan.num_experts * sizeof(int), stream, topk_idx, order, plan, counts);
  launch(scan_tiles_kernel, static_cast<unsigned>(ceil_div(plan.num_experts, 8)), 256, 0, stream, counts,
         plan.num_tiles, plan.num_experts, totals);
}

// ---- sort_tokens: a rank after all choices of the experts before is a row
constexpr int kScanThreads = 1024;

// offs [E] = inclusive sum of tokens_per_expert [E]; one block.
__global__ void __launch_bounds__(kScanThreads)
    scan_experts_kernel(const int64_t* __restrict__ tokens_per_expert, int num_experts,
                        int* __restrict__ offs) {
  FMOE_SHARED_ARRAY(int, warp_sums, 32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;  // of the experts of earlier rounds
  for (int first = 0; first < num_experts; first += kScanThreads) {
    const int e = first + threadIdx.x;
    int sum = warp_prefix_sum(e < num_experts ? static_cast<int>(tokens_per_expert[e]) : 0);
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int round_total = 0;
    for (int w = 0; w < 32; ++w) {
      if (w == warp) sum += round_total;
      round_total += warp_sums[w];
    }
    if (e < num_experts) offs[e] = before + sum;
    before += round_total;
    __syncthreads();
  }
}

template <typename index_t>
__global__ void __launch_bounds__(256)
    place_rows_kernel(const index_t* __restrict__ topk_idx, RankPlan plan, const int* __restrict__ counts,
                      const int* __restrict__ offs, int* __restrict__ row_idx, int* __restrict__ inverse) {
  FMOE_DYNAMIC_SHARED(shared);
  rank_tile(
      topk_idx, TokenOrder{}, plan, counts, reinterpret_cast<int*>(shared),
      [&](int e) { return e ? offs[e - 1] : 0; },
      [&](int64_t i, int e, int row) {
        inverse[i] = row;
        if (e >= 0) row_idx[row] = static_cast<int>(i);
      });
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t r = offs[plan.num_experts - 1] + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       r < plan.num_choices; r += step)
    row_idx[r] = -1;
}

// ---- apply_capacity: drops what ranks, in the order (k, token), at or past its expert's capacity
template <typename index_t>
__global__ void __launch_bounds__(256)
    apply_capacity_kernel(const index_t* __restrict__ topk_idx, ChoiceOrder order, RankPlan plan,
                          const int* __restrict__ counts, const int64_t* __restrict__ capacity,
                          index_t* __restrict__ out) {
  FMOE_DYNAMIC_SHARED(shared);
  rank_tile(
      topk_idx, order, plan, counts, reinterpret_cast<int*>(shared), [](int) { return 0; },
      [&](int64_t i, int e, int rank) {
        out[i] = static_cast<index_t>(e >= 0 && rank < capacity[e] ? e : -1);
      });
}

}  // namespace

int64_t rank_workspace_ints(int64_t num_choices, int num_experts) {
  return RankPlan(num_choices, num_experts).num_counts();
}

void launch_sort_tokens(Indices topk_idx, int64_t num_choices, int num_experts, int* workspace,
                        int64_t* tokens_per_expert, int* offs, int* row_idx, int* inverse,
                        LaunchStream stream) {
  const RankPlan plan(num_choices, num_experts);
  dispatch_indices(topk_idx, [&](auto* idx) {
    using index_t = std::remove_const_t<std::remove_pointer_t<decltype(idx)>>;
    count_and_scan_tiles(idx, TokenOrder{}, plan, workspace, tokens_per_expert, stream);
    launch(scan_experts_kernel, 1, kScanThreads, 0, stream, tokens_per_expert, num_experts, offs);
    if (plan.num_tiles > 0)
      launch(place_rows_kernel<index_t>, plan.num_tiles, plan.warps * 32, plan.shared_bytes(), stream, idx,
             plan, workspace, offs, row_idx, inverse);
  });
}

void launch_apply_capacity(Indices topk_idx, int64_t num_tokens, int64_t top_k, int num_experts,
                           const int64_t* capacity, int* workspace, void* out, LaunchStream stream) {
  if (num_tokens * top_k == 0) return;
  const RankPlan plan(num_tokens * top_k, num_experts);
  const ChoiceOrder order{num_tokens, top_k};
  dispatch_indices(topk_idx, [&](auto* idx) {
    using index_t = std::remove_const_t<std::remove_pointer_t<decltype(idx)>>;
    count_and_scan_tiles(idx, order, plan, workspace, nullptr, stream);
    launch(apply_capacity_kernel<index_t>, plan.num_tiles, plan.warps * 32, plan.shared_bytes(), stream, idx,
           order, plan, workspace, capacity, static_cast<index_t*>(out));
  });
}

}  // namespace fmoe_ext
