// Stable counting sort of the choices by expert.
#include "expert_rank.cuh"

namespace fmoe_ext {
namespace {

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
    int sum = e < num_experts ? static_cast<int>(tokens_per_expert[e]) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, sum, step);
      if (lane >= step) sum += other;
    }
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

template <typename index_t>
void sort_tokens(const index_t* topk_idx, const RankPlan& plan, int* counts, int64_t* tokens_per_expert,
                 int* offs, int* row_idx, int* inverse, Stream stream) {
  launch_tile_counts(topk_idx, TokenOrder{}, plan, counts, tokens_per_expert, stream);
  launch(scan_experts_kernel, 1, kScanThreads, 0, stream, tokens_per_expert, plan.num_experts, offs);
  if (plan.num_tiles > 0)
    launch(place_rows_kernel<index_t>, plan.num_tiles, plan.warps * 32, plan.shared_bytes(), stream, topk_idx,
           plan, counts, offs, row_idx, inverse);
}

}  // namespace

int64_t rank_workspace_ints(int64_t num_choices, int num_experts) {
  return RankPlan(num_choices, num_experts).num_counts();
}

void launch_sort_tokens(Indices topk_idx, int64_t num_choices, int num_experts, int* workspace,
                        int64_t* tokens_per_expert, int* offs, int* row_idx, int* inverse,
                        LaunchStream stream) {
  const RankPlan plan(num_choices, num_experts);
  if (topk_idx.is_int64)
    sort_tokens(static_cast<const int64_t*>(topk_idx.data), plan, workspace, tokens_per_expert, offs, row_idx,
                inverse, stream);
  else
    sort_tokens(static_cast<const int32_t*>(topk_idx.data), plan, workspace, tokens_per_expert, offs, row_idx,
                inverse, stream);
}

}  // namespace fmoe_ext
