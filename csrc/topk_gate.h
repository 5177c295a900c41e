// Argument checks of topk_gate and its backward, for every device: topk_gate.cpp and cuda/ops_cuda.cpp call
// them, balance_loss.cpp some of them. And what topk_gate.cpp calls of balance_loss.cpp.
// Values of topk_idx are not checked here: the CPU raises for those out of range, CUDA gives them no
// gradient.
#pragma once

#include <optional>

#include "checks.h"

namespace fmoe_ext {

Tensor balance_loss_cpu(Tensor logits, Tensor counts, int64_t score);  // for _choose_experts

// -> whether score is the sigmoid.
inline bool checked_sigmoid(int64_t score) {
  STD_TORCH_CHECK(score == 0 || score == 1, "score must be 0 (softmax) or 1 (sigmoid), but got ", score);
  return score == 1;
}

inline void check_logits(const Tensor& logits) {
  check_dim(logits, 2, "logits", "[T, E]");
  check_float(logits, "logits");
  STD_TORCH_CHECK(logits.size(1) >= 1 && logits.size(1) <= INT32_MAX,
                  "logits must have shape [T, E] with at least one expert, but got shape ",
                  shape_text(logits));
}

inline void check_topk_gate(const Tensor& logits, int64_t top_k, const std::optional<Tensor>& bias,
                            int64_t num_groups, int64_t topk_groups) {
  check_logits(logits);
  const int64_t E = logits.size(1);
  STD_TORCH_CHECK(top_k >= 1 && top_k <= E, "top_k must be in [1, num_experts] = [1, ", E, "], but got ",
                  top_k);
  STD_TORCH_CHECK(num_groups >= 1 && E % num_groups == 0, "num_groups must divide the ", E,
                  " experts, but got ", num_groups);
  STD_TORCH_CHECK(topk_groups >= 1 && topk_groups <= num_groups,
                  "topk_groups must be in [1, num_groups] = [1, ", num_groups, "], but got ", topk_groups);
  const int64_t eligible = topk_groups * (E / num_groups);
  STD_TORCH_CHECK(top_k <= eligible, "top_k must be at most the ", eligible, " experts of ", topk_groups,
                  " groups, but got ", top_k);
  if (!bias) return;
  check_dim(*bias, 1, "bias", "[E]");
  check_size(*bias, 0, E, "bias", "[E]");
  check_float(*bias, "bias");
}

inline void check_topk_gate_backward(const Tensor& grad_weights, const Tensor& logits, const Tensor& topk_idx,
                                     const Tensor& topk_weights) {
  check_gradient_mode("topk_gate_backward", "ops.topk_gate");
  check_logits(logits);
  const int64_t T = logits.size(0);
  check_dim(topk_idx, 2, "topk_idx", "[T, K]");
  check_size(topk_idx, 0, T, "topk_idx", "[T, K]");
  STD_TORCH_CHECK(topk_idx.scalar_type() == ScalarType::Long, "topk_idx must be int64, but got ",
                  dtype_text(topk_idx));
  const auto check_weights = [&](const Tensor& t, const char* name) {
    check_dim(t, 2, name, "[T, K]");
    check_size(t, 0, T, name, "[T, K]");
    check_size(t, 1, topk_idx.size(1), name, "[T, K]");
    check_same_dtype(t, logits, name, "logits");
  };
  check_weights(grad_weights, "grad_weights");
  check_weights(topk_weights, "topk_weights");
}

}  // namespace fmoe_ext
