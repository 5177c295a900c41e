// sort_tokens on the CPU, topk_idx [T, K] -> the fields of Sorted: a stable counting sort of the choices by
// expert, dropped ones (-1) left out; numbers outside [-1, E) raise. Histograms by chunk, one scan over
// (expert, chunk), then each chunk places its choices from its own cursors. No order depends on the number of
// threads.

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "topk_idx.h"

namespace fmoe_ext {
namespace {

struct Sorted {
  int64_t* tokens_per_expert;  // [E]
  int32_t* offs;               // [E]: where the rows of an expert end
  int32_t* row_idx;            // [T * K]: flat choice t * K + k of a row, -1 behind the last
  int32_t* inverse;            // [T, K]: row of a choice, -1 if dropped
};

template <class index_t>
void sort_tokens(const index_t* idx, const TokenChunks& chunks, int64_t num_experts, const Sorted& out) {
  std::vector<int32_t> cursors = count_chunks(idx, chunks, num_experts);  // [num_chunks, E]
  int32_t end = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int32_t begin = end;
    for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk) {
      int32_t& cursor = cursors[chunk * num_experts + e];
      const int32_t count = cursor;
      cursor = end;
      end += count;
    }
    out.offs[e] = end;
    out.tokens_per_expert[e] = end - begin;
  }
  for_each_job(chunks.num_chunks, [&](int64_t chunk) {
    int32_t* mine = cursors.data() + chunk * num_experts;
    const int64_t chunk_end = chunks.end(chunk);
    for (int64_t i = chunks.begin(chunk); i < chunk_end; ++i) {
      const int64_t e = idx[i];
      const int32_t row = e < 0 ? -1 : mine[e]++;
      if (row >= 0) out.row_idx[row] = static_cast<int32_t>(i);
      out.inverse[i] = row;
    }
  });
  std::fill(out.row_idx + end, out.row_idx + chunks.num_tokens * chunks.num_choices, -1);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_tokens_cpu(Tensor topk_idx, int64_t num_experts) {
  check_cpu(topk_idx, "topk_idx");
  check_topk_idx(topk_idx, num_experts);
  Tensor idx = as_contiguous(topk_idx);
  Tensor tokens_per_expert = torch::stable::new_empty(idx, {num_experts}, ScalarType::Long);
  Tensor offs = torch::stable::new_empty(idx, {num_experts}, ScalarType::Int);
  Tensor row_idx = torch::stable::new_empty(idx, {idx.numel()}, ScalarType::Int);
  Tensor inverse = torch::stable::new_empty(idx, {idx.size(0), idx.size(1)}, ScalarType::Int);
  const Sorted out{static_cast<int64_t*>(tokens_per_expert.mutable_data_ptr()),
                   static_cast<int32_t*>(offs.mutable_data_ptr()),
                   static_cast<int32_t*>(row_idx.mutable_data_ptr()),
                   static_cast<int32_t*>(inverse.mutable_data_ptr())};
  dispatch_index(idx,
                 [&](auto* data) { sort_tokens(data, TokenChunks(idx, num_experts), num_experts, out); });
  return {tokens_per_expert, offs, row_idx, inverse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("sort_tokens", TORCH_BOX(&sort_tokens_cpu)); }

}  // namespace fmoe_ext
