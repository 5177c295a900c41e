// What count_tokens, sort_tokens and apply_capacity share: checks of topk_idx and of each expert index in it.
#pragma once

#include "checks.h"

namespace fmoe_ext {

inline void check_topk_idx(const Tensor& topk_idx, int64_t num_experts) {
  check_cpu(topk_idx, "topk_idx");
  check_index_dtype(topk_idx, "topk_idx");
  check_dim(topk_idx, 2, "topk_idx", "[T, K]");
  STD_TORCH_CHECK(num_experts >= 1, "num_experts must be at least 1, but got ", num_experts);
  STD_TORCH_CHECK(topk_idx.numel() <= INT32_MAX,
                  "topk_idx must have fewer than 2^31 elements (offsets are int32), but got shape ",
                  shape_text(topk_idx));
}

// The expert index at flat position i, or -1 when that choice was dropped.
inline int64_t checked_expert(int64_t e, int64_t i, int64_t num_experts) {
  STD_TORCH_CHECK(e >= -1 && e < num_experts, "topk_idx must be in [-1, ", num_experts,
                  ") (-1 means dropped), but element ", i, " is ", e);
  return e;
}

template <class Body>
void dispatch_index(const Tensor& idx, const Body& body) {
  if (idx.scalar_type() == ScalarType::Long)
    body(static_cast<const int64_t*>(idx.const_data_ptr()));
  else
    body(static_cast<const int32_t*>(idx.const_data_ptr()));
}

}  // namespace fmoe_ext
