// Drops the choices over each expert's capacity. Priority: all first choices in token order, then all second
// choices, and so on; a token's first choice is thus never dropped in favour of another token's second.

#include <torch/csrc/stable/library.h>

#include "topk_idx.h"

namespace fmoe_ext {
namespace {

void check_not_negative(const Tensor& capacity) {
  const Tensor values = as_contiguous(capacity);
  const auto* data = static_cast<const int64_t*>(values.const_data_ptr());
  for (int64_t e = 0; e < values.numel(); ++e)
    STD_TORCH_CHECK(data[e] >= 0, "capacity must not be negative, but expert ", e, " has ", data[e]);
}

template <class index_t>
void apply_capacity(const index_t* idx, const TokenChunks& chunks, int64_t num_experts,
                    const int64_t* capacity, index_t* kept) {
  const int64_t num_choices = chunks.num_choices, histogram_size = num_choices * num_experts;
  std::vector<int32_t> cursors =
      count_chunks(idx, chunks, num_experts, /*by_choice=*/true);  // [num_chunks, K, E]
  for (int64_t e = 0; e < num_experts; ++e) {
    int32_t rank = 0;
    for (int64_t k = 0; k < num_choices; ++k) {
      for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk) {
        int32_t& cursor = cursors[chunk * histogram_size + k * num_experts + e];
        const int32_t count = cursor;
        cursor = rank;
        rank += count;
      }
    }
  }
  for_each_job(chunks.num_chunks, [&](int64_t chunk) {
    int32_t* mine = cursors.data() + chunk * histogram_size;
    const int64_t end = chunks.end(chunk);
    for (int64_t i = chunks.begin(chunk); i < end;) {
      for (int64_t k = 0; k < num_choices; ++k, ++i) {
        const index_t e = idx[i];
        kept[i] = e >= 0 && mine[k * num_experts + e]++ < capacity[e] ? e : -1;
      }
    }
  });
}

Tensor apply_capacity_cpu(Tensor topk_idx, Tensor capacity) {
  check_cpu(capacity, "capacity");
  check_cpu(topk_idx, "topk_idx");
  check_apply_capacity(topk_idx, capacity);
  check_not_negative(capacity);
  const int64_t num_experts = capacity.numel();
  Tensor idx = as_contiguous(topk_idx), limits = as_contiguous(capacity);
  Tensor kept = torch::stable::new_empty(idx, {idx.size(0), idx.size(1)});
  dispatch_index(idx, [&](auto* data) {
    using index_t = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    apply_capacity(data, TokenChunks(idx, idx.size(1) * num_experts), num_experts,
                   static_cast<const int64_t*>(limits.const_data_ptr()),
                   static_cast<index_t*>(kept.mutable_data_ptr()));
  });
  return kept;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("apply_capacity", TORCH_BOX(&apply_capacity_cpu)); }

}  // namespace fmoe_ext
