// What the operators on topk_idx share (count_tokens, sort_tokens, apply_capacity, drop_choices, _token_ways,
// _experts_of_rows): its checks; and on the CPU, for them and _choose_experts, one histogram for each chunk
// of tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "checks.h"
#include "parallel.h"

namespace fmoe_ext {

// For every device. Values are not checked here: the CPU raises for those out of range, CUDA treats them as
// -1 (dropped).
inline void check_topk_idx(const Tensor& topk_idx, int64_t num_experts) {
  check_index_dtype(topk_idx, "topk_idx");
  check_dim(topk_idx, 2, "topk_idx", "[T, K]");
  STD_TORCH_CHECK(num_experts >= 1, "num_experts must be at least 1, but got ", num_experts);
  STD_TORCH_CHECK(num_experts <= INT32_MAX, "num_experts must be less than 2^31, but got ", num_experts);
  STD_TORCH_CHECK(topk_idx.numel() <= INT32_MAX,
                  "topk_idx must have fewer than 2^31 elements (offsets are int32), but got shape ",
                  shape_text(topk_idx));
}

inline void check_apply_capacity(const Tensor& topk_idx, const Tensor& capacity) {
  check_dim(capacity, 1, "capacity", "[E]");
  STD_TORCH_CHECK(capacity.scalar_type() == ScalarType::Long, "capacity must be int64, but got ",
                  dtype_text(capacity));
  check_topk_idx(topk_idx, capacity.size(0));
}

[[gnu::cold, gnu::noinline]] inline void throw_bad_expert(int64_t e, int64_t i, int64_t num_experts) {
  STD_TORCH_CHECK(false, "topk_idx must be in [-1, ", num_experts, ") (-1 means dropped), but element ", i,
                  " is ", e);
}

// Calls body with the address of a contiguous idx, as int64 or int32.
template <class Body>
void dispatch_index(const Tensor& idx, const Body& body) {
  if (idx.scalar_type() == ScalarType::Long)
    body(static_cast<const int64_t*>(idx.const_data_ptr()));
  else
    body(static_cast<const int32_t*>(idx.const_data_ptr()));
}

// The tokens of topk_idx [T, K] cut into chunks whose bounds depend on sizes only, never on the number of
// threads. A chunk, but for the last, is at least as long as its histogram, so that all histograms but one
// are together no larger than topk_idx. histogram_size: of a chunk, as count_chunks() makes it.
struct TokenChunks {
  static constexpr int64_t kMinChoices = 1 << 15;

  TokenChunks(const Tensor& topk_idx, int64_t histogram_size)
      : num_tokens(topk_idx.size(0)),
        num_choices(topk_idx.size(1)),
        tokens_per_chunk(std::max(kMinChoices, histogram_size) / std::max<int64_t>(num_choices, 1) + 1),
        num_chunks((num_tokens + tokens_per_chunk - 1) / tokens_per_chunk) {}

  int64_t begin(int64_t chunk) const { return chunk * tokens_per_chunk * num_choices; }
  int64_t end(int64_t chunk) const {
    return std::min(num_tokens, (chunk + 1) * tokens_per_chunk) * num_choices;
  }

  int64_t num_tokens, num_choices, tokens_per_chunk, num_chunks;
};

// How often each chunk chose each expert, -1 left out; by_choice counts first, second, ... choices
// separately. Throws for an index outside [-1, num_experts).
template <class index_t>
std::vector<int32_t> count_chunks(const index_t* idx, const TokenChunks& chunks, int64_t num_experts,
                                  bool by_choice = false) {
  const int64_t histogram_size = by_choice ? chunks.num_choices * num_experts : num_experts;
  const int64_t choice_stride = by_choice ? num_experts : 0;
  std::vector<int32_t> counts(chunks.num_chunks * histogram_size, 0);  // [num_chunks, K if by_choice, E]
  for_each_job(chunks.num_chunks, [&](int64_t chunk) {
    int32_t* mine = counts.data() + chunk * histogram_size;
    const int64_t end = chunks.end(chunk);
    for (int64_t i = chunks.begin(chunk); i < end;) {
      for (int64_t k = 0; k < chunks.num_choices; ++k, ++i) {
        const int64_t e = idx[i];
        if (e < -1 || e >= num_experts) throw_bad_expert(e, i, num_experts);
        if (e >= 0) ++mine[k * choice_stride + e];
      }
    }
  });
  return counts;
}

}  // namespace fmoe_ext
