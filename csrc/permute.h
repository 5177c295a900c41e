// Argument checks of permute, unpermute and unpermute_backward, for every device. R rows in the order of the
// experts, T tokens with K choices each: row_idx [R] has the flat choice t * K + k of a row, inverse [T, K]
// the row of a choice; -1: padding, dropped. Values of indices are not checked here: the CPU raises for those
// out of range, CUDA takes them for -1 (reading them would wait for the device).
#pragma once

#include <optional>

#include "checks.h"

namespace fmoe_ext {

inline void check_routing(const Tensor& row_idx, const Tensor& inverse) {
  check_int32(row_idx, "row_idx");
  check_dim(row_idx, 1, "row_idx", "[R]");
  check_int32(inverse, "inverse");
  check_dim(inverse, 2, "inverse", "[T, K]");
}

// x of any dtype: rows are copied as bytes. name: of x, for errors; unpermute_backward gives "grad_out",
// which has the same shape.
inline void check_permute(const Tensor& x, const Tensor& row_idx, const Tensor& inverse,
                          const char* name = "x") {
  check_routing(row_idx, inverse);
  check_dim(x, 2, name, "[T, D]");
  check_size(x, 0, inverse.size(0), name, "[T, D] (T as in inverse [T, K])");
}

inline void check_topk_weights(const std::optional<Tensor>& topk_weights, const Tensor& rows,
                               const Tensor& inverse) {
  if (!topk_weights) return;
  check_dim(*topk_weights, 2, "topk_weights", "[T, K]");
  check_size(*topk_weights, 0, inverse.size(0), "topk_weights", "[T, K]");
  check_size(*topk_weights, 1, inverse.size(1), "topk_weights", "[T, K]");
  const auto dtype = topk_weights->scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == rows.scalar_type(),
                  "topk_weights must be float32 or have the dtype of the rows (", dtype_text(rows),
                  "), but got ", dtype_text(*topk_weights));
}

inline void check_unpermute(const Tensor& y, const Tensor& row_idx, const Tensor& inverse,
                            const std::optional<Tensor>& topk_weights) {
  check_float(y, "y");
  check_routing(row_idx, inverse);
  check_dim(y, 2, "y", "[R, D]");
  check_size(y, 0, row_idx.numel(), "y", "[R, D] (R as in row_idx [R])");
  check_topk_weights(topk_weights, y, inverse);
}

inline void check_unpermute_backward(const Tensor& grad_out, const std::optional<Tensor>& y,
                                     const Tensor& row_idx, const Tensor& inverse,
                                     const std::optional<Tensor>& topk_weights) {
  check_gradient_mode("unpermute_backward", "ops.unpermute");
  check_float(grad_out, "grad_out");
  check_permute(grad_out, row_idx, inverse, "grad_out");
  check_topk_weights(topk_weights, grad_out, inverse);
  if (!y) return;
  STD_TORCH_CHECK(topk_weights, "y is only read for the gradient of topk_weights, but topk_weights is None");
  check_dim(*y, 2, "y", "[R, D]");
  check_size(*y, 0, row_idx.numel(), "y", "[R, D] (R as in row_idx [R])");
  check_size(*y, 1, grad_out.size(1), "y", "[R, D] (D as in grad_out [T, D])");
  check_same_dtype(*y, grad_out, "y", "grad_out");
}

}  // namespace fmoe_ext
