// Drops the choices whose rank in the order (k, token) is not below their expert's capacity.
#include "expert_rank.cuh"

namespace fmoe_ext {
namespace {

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

template <typename index_t>
void apply_capacity(const void* topk_idx, int64_t num_tokens, int64_t top_k, int num_experts,
                    const int64_t* capacity, int* workspace, void* out, Stream stream) {
  const RankPlan plan(num_tokens * top_k, num_experts);
  const ChoiceOrder order{num_tokens, top_k};
  const auto* idx = static_cast<const index_t*>(topk_idx);
  launch_tile_counts(idx, order, plan, workspace, nullptr, stream);
  launch(apply_capacity_kernel<index_t>, plan.num_tiles, plan.warps * 32, plan.shared_bytes(), stream, idx,
         order, plan, workspace, capacity, static_cast<index_t*>(out));
}

}  // namespace

void launch_apply_capacity(Indices topk_idx, int64_t num_tokens, int64_t top_k, int num_experts,
                           const int64_t* capacity, int* workspace, void* out, LaunchStream stream) {
  if (num_tokens * top_k == 0) return;
  if (topk_idx.is_int64)
    apply_capacity<int64_t>(topk_idx.data, num_tokens, top_k, num_experts, capacity, workspace, out, stream);
  else
    apply_capacity<int32_t>(topk_idx.data, num_tokens, top_k, num_experts, capacity, workspace, out, stream);
}

}  // namespace fmoe_ext
