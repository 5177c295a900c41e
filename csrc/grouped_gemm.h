#pragma once

#include <optional>

#include "checks.h"

namespace fmoe_ext {

// What every device checks; the values of offs are checked where they can be read.
inline void check_grouped_gemm(const Tensor& x, const Tensor& weight, const Tensor& offs,
                               const std::optional<Tensor>& bias) {
  check_float(x, "x");
  check_dim(x, 2, "x", "[R, D]");
  check_same_dtype(weight, x, "weight", "x");
  check_dim(weight, 3, "weight", "[E, N, D]");
  check_size(weight, 2, x.size(1), "weight", "[E, N, D]");
  check_int32(offs, "offs");
  check_dim(offs, 1, "offs", "[E]");
  check_size(offs, 0, weight.size(0), "offs", "[E]");
  STD_TORCH_CHECK(x.size(0) <= INT32_MAX,
                  "x must have fewer than 2^31 rows (offsets are int32), but got shape ", shape_text(x));
  if (!bias) return;
  check_same_dtype(*bias, x, "bias", "x");
  check_dim(*bias, 2, "bias", "[E, N]");
  check_size(*bias, 0, weight.size(0), "bias", "[E, N]");
  check_size(*bias, 1, weight.size(1), "bias", "[E, N]");
}

}  // namespace fmoe_ext
