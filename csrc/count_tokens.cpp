// count_tokens on the CPU, topk_idx [T, K] -> [E]: the number of choices of each expert, -1 left out, summed
// over chunks of tokens.
#include <torch/csrc/stable/library.h>

#include "topk_idx.h"

namespace fmoe_ext {
namespace {

Tensor count_tokens_cpu(Tensor topk_idx, int64_t num_experts) {
  check_cpu(topk_idx, "topk_idx");
  check_topk_idx(topk_idx, num_experts);
  Tensor idx = as_contiguous(topk_idx);
  Tensor tokens_per_expert = torch::stable::new_zeros(idx, {num_experts}, ScalarType::Long);
  auto* total = static_cast<int64_t*>(tokens_per_expert.mutable_data_ptr());
  dispatch_index(idx, [&](auto* data) {
    const TokenChunks chunks(idx, num_experts);
    const std::vector<int32_t> counts = count_chunks(data, chunks, num_experts);
    for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk)
      for (int64_t e = 0; e < num_experts; ++e) total[e] += counts[chunk * num_experts + e];
  });
  return tokens_per_expert;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("count_tokens", TORCH_BOX(&count_tokens_cpu)); }

}  // namespace fmoe_ext
