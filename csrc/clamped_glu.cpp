// clamped_glu and its backward on the CPU, h [R, 2 H] -> [R, H]:
//
//   gate = min(gate, limit), out = gate * sigmoid(alpha * gate) * (min(max(up, -limit), limit) + offset)
//
// interleaved: gate and up take turns in a row of h, else all gates come first. clamps_activated: the
// activated gate is clamped, not the gate. On GPUs PyTorch computes it (fmoe_ext/ops/clamped_glu.py).
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checks.h"
#include "gemm/kernels.h"
#include "parallel.h"

namespace fmoe_ext {
namespace {

using gemm::ClampedGlu;

ClampedGlu check_clamped_glu(const Tensor& h, double alpha, double limit, double offset, bool interleaved,
                             bool clamps_activated) {
  check_cpu(h, "h");
  check_float(h, "h");
  check_dim(h, 2, "h", "[R, 2 H]");
  STD_TORCH_CHECK(h.size(1) % 2 == 0, "h must have shape [R, 2 H], but got shape ", shape_text(h));
  STD_TORCH_CHECK(limit >= 0, "limit must be at least 0, but got ", limit);
  return {alpha, limit, offset, interleaved, clamps_activated, h.size(1) / 2};
}

// Calls body(row, first, n) for all columns of all rows, in jobs of about kJobNumbers: several short rows, or
// a part of a long one, since a single row must keep all threads busy.
template <class Body>
void for_each_part(int64_t rows, int64_t width, const Body& body) {
  constexpr int64_t kJobNumbers = 4096;
  const int64_t parts = (width + kJobNumbers - 1) / kJobNumbers;  // of a row
  const int64_t rows_of_job = std::max<int64_t>(1, kJobNumbers / std::max<int64_t>(1, width));
  const int64_t row_groups = (rows + rows_of_job - 1) / rows_of_job;
  for_each_job(row_groups * parts, [&](int64_t job) {
    const int64_t first = job % parts * kJobNumbers, n = std::min(kJobNumbers, width - first);
    const int64_t begin = job / parts * rows_of_job, end = std::min(rows, begin + rows_of_job);
    for (int64_t row = begin; row < end; ++row) body(row, first, n);
  });
}

Tensor clamped_glu_cpu(Tensor h_, double alpha, double limit, double offset, bool interleaved,
                       bool clamps_activated) {
  const ClampedGlu glu = check_clamped_glu(h_, alpha, limit, offset, interleaved, clamps_activated);
  const Tensor h = as_contiguous(h_);
  const int64_t rows = h.size(0), width = glu.width;
  Tensor out = torch::stable::new_empty(h, {rows, glu.width});
  const auto& kernels = gemm::kernels_for(h.scalar_type());
  const auto* from = static_cast<const gemm::Stored*>(h.const_data_ptr());
  auto* to = static_cast<gemm::Stored*>(out.mutable_data_ptr());
  for_each_part(rows, width, [&](int64_t row, int64_t first, int64_t n) {
    kernels.clamped_glu(glu, kernels.at(from, 2 * row * width), first, n, kernels.at(to, row * width));
  });
  return out;
}

Tensor clamped_glu_backward_cpu(Tensor grad_, Tensor h_, double alpha, double limit, double offset,
                                bool interleaved, bool clamps_activated) {
  const ClampedGlu glu = check_clamped_glu(h_, alpha, limit, offset, interleaved, clamps_activated);
  check_cpu(grad_, "grad");
  check_dim(grad_, 2, "grad", "[R, H]");
  check_size(grad_, 0, h_.size(0), "grad", "[R, H]");
  check_size(grad_, 1, glu.width, "grad", "[R, H]");
  check_same_dtype(grad_, h_, "grad", "h");
  const Tensor h = as_contiguous(h_), grad = as_contiguous(grad_);
  const int64_t rows = h.size(0), width = glu.width;
  Tensor grad_h = torch::stable::empty_like(h);
  const auto& kernels = gemm::kernels_for(h.scalar_type());
  const auto* from = static_cast<const gemm::Stored*>(h.const_data_ptr());
  const auto* grads = static_cast<const gemm::Stored*>(grad.const_data_ptr());
  auto* to = static_cast<gemm::Stored*>(grad_h.mutable_data_ptr());
  for_each_part(rows, width, [&](int64_t row, int64_t first, int64_t n) {
    kernels.clamped_glu_backward(glu, kernels.at(grads, row * width), kernels.at(from, 2 * row * width),
                                 first, n, kernels.at(to, 2 * row * width));
  });
  return grad_h;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("clamped_glu", TORCH_BOX(&clamped_glu_cpu));
  m.impl("clamped_glu_backward", TORCH_BOX(&clamped_glu_backward_cpu));
}

}  // namespace fmoe_ext
