#pragma once

#include <optional>

#include "activation.h"
#include "checks.h"

namespace fmoe_ext {

// What every device checks; the values of offs and of the indices are checked where they can be read.
inline void check_expert_mlp(const Tensor& x, const Tensor& row_idx, const Tensor& inverse,
                             const Tensor& offs, const Tensor& w1, const std::optional<Tensor>& b1,
                             const Tensor& w2, const std::optional<Tensor>& b2,
                             const std::optional<Tensor>& topk_weights, const Activation& activation) {
  check_float(x, "x");
  check_dim(x, 2, "x", "[T, D]");
  check_int32(inverse, "inverse");
  check_dim(inverse, 2, "inverse", "[T, K]");
  check_size(inverse, 0, x.size(0), "inverse", "[T, K]");
  check_int32(row_idx, "row_idx");
  check_dim(row_idx, 1, "row_idx", "[T * K]");
  check_size(row_idx, 0, inverse.numel(), "row_idx", "[T * K]");
  STD_TORCH_CHECK(inverse.numel() <= INT32_MAX, "inverse must have fewer than 2^31 elements, but got shape ",
                  shape_text(inverse));

  check_same_dtype(w1, x, "w1", "x");
  check_same_dtype(w2, x, "w2", "x");
  check_dim(w2, 3, "w2", "[E, D, H]");
  check_size(w2, 1, x.size(1), "w2", "[E, D, H]");
  const char* w1_shape = activation.gated ? "[E, 2 * H, D]" : "[E, H, D]";
  check_dim(w1, 3, "w1", w1_shape);
  check_size(w1, 0, w2.size(0), "w1", w1_shape);
  check_size(w1, 1, w2.size(2) * (activation.gated ? 2 : 1), "w1", w1_shape);
  check_size(w1, 2, x.size(1), "w1", w1_shape);
  check_int32(offs, "offs");
  check_dim(offs, 1, "offs", "[E]");
  check_size(offs, 0, w1.size(0), "offs", "[E]");

  const auto check_bias = [&](const std::optional<Tensor>& bias, int64_t size, const char* name,
                              const char* shape) {
    if (!bias) return;
    check_same_dtype(*bias, x, name, "x");
    check_dim(*bias, 2, name, shape);
    check_size(*bias, 0, w1.size(0), name, shape);
    check_size(*bias, 1, size, name, shape);
  };
  check_bias(b1, w1.size(1), "b1", activation.gated ? "[E, 2 * H]" : "[E, H]");
  check_bias(b2, w2.size(1), "b2", "[E, D]");

  if (!topk_weights) return;
  const auto dtype = topk_weights->scalar_type();
  STD_TORCH_CHECK(
      dtype == x.scalar_type() || (dtype == ScalarType::Float && x.scalar_type() != ScalarType::Double),
      "topk_weights must have the dtype of x (", dtype_text(x), ") or float32, but got ",
      dtype_text(*topk_weights));
  check_dim(*topk_weights, 2, "topk_weights", "[T, K]");
  check_size(*topk_weights, 0, inverse.size(0), "topk_weights", "[T, K]");
  check_size(*topk_weights, 1, inverse.size(1), "topk_weights", "[T, K]");
}

}  // namespace fmoe_ext
