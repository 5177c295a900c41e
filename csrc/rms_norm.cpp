// The norm of few rows in one pass; see ops/decode.py.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "float_types.h"

namespace fmoe_ext {
namespace {

Tensor rms_norm_cpu(Tensor x, Tensor weight, double eps) {
  check_cpu(x, "x");
  check_cpu(weight, "weight");
  check_float(x, "x");
  check_same_dtype(weight, x, "weight", "x");
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1),
                  "weight must have as many elements as the last dimension of x ", shape_text(x),
                  ", but got shape ", shape_text(weight));
  const Tensor rows = as_contiguous(x), factors = as_contiguous(weight);
  Tensor out = torch::stable::empty_like(rows);
  const int64_t D = weight.size(0);
  dispatch_float(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using C = compute_t<T>;
    const auto* from = static_cast<const T*>(rows.const_data_ptr());
    const auto* w = static_cast<const T*>(factors.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    for (int64_t begin = 0; begin < rows.numel(); begin += D) {
      constexpr int kSums = 16;  // in an order of their own, the same on every processor
      C sums[kSums] = {}, sum = 0;
      for (int64_t i = 0; i < D; i += kSums)
        for (int64_t j = 0; j < std::min<int64_t>(kSums, D - i); ++j) {
          const C value = static_cast<C>(from[begin + i + j]);
          sums[j] += value * value;
        }
      for (const C part : sums) sum += part;
      const C factor = C(1) / std::sqrt(sum / static_cast<C>(D) + static_cast<C>(eps));
      for (int64_t i = 0; i < D; ++i) {
        const T rounded = static_cast<T>(static_cast<C>(from[begin + i]) * factor);
        to[begin + i] = static_cast<T>(static_cast<C>(w[i]) * static_cast<C>(rounded));
      }
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("_rms_norm", TORCH_BOX(&rms_norm_cpu)); }

}  // namespace fmoe_ext
