#include <vector>

#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "parallel.h"
#include "topk_idx.h"

namespace fmoe_ext {
namespace {

constexpr int64_t kChunk = 1 << 15;

template <typename index_t>
void count_chunks(const index_t* idx, int64_t numel, int64_t num_experts,
                  int64_t* counts) {  // counts [E], zeroed
  const int64_t num_chunks = (numel + kChunk - 1) / kChunk;
  std::vector<int64_t> partial(num_chunks * num_experts, 0);
  for_each_job(num_chunks, [&](int64_t chunk) {
    const int64_t end = std::min(numel, (chunk + 1) * kChunk);
    int64_t* mine = partial.data() + chunk * num_experts;
    for (int64_t i = chunk * kChunk; i < end; ++i) {
      const int64_t e = checked_expert(idx[i], i, num_experts);
      if (e >= 0) ++mine[e];
    }
  });
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
    for (int64_t e = 0; e < num_experts; ++e) counts[e] += partial[chunk * num_experts + e];
}

Tensor count_tokens_cpu(Tensor topk_idx, int64_t num_experts) {
  check_topk_idx(topk_idx, num_experts);
  Tensor idx = as_contiguous(topk_idx);
  Tensor counts = torch::stable::new_zeros(idx, {num_experts}, ScalarType::Long);
  dispatch_index(idx, [&](auto* data) {
    count_chunks(data, idx.numel(), num_experts, static_cast<int64_t*>(counts.mutable_data_ptr()));
  });
  return counts;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("count_tokens", TORCH_BOX(&count_tokens_cpu)); }

}  // namespace fmoe_ext
