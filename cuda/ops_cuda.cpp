// The routing ops and their gradients on CUDA tensors (count_tokens, sort_tokens, apply_capacity, permute,
// unpermute, topk_gate): checks, allocation, launch. The kernels are in the .cu files, under launchers.h's
// contracts.
//
// The values of index tensors are not checked here, for that would synchronise: kernels take an index out of
// range for a dropped choice.
#include <tuple>

#include "device.h"
#include "permute.h"
#include "topk_gate.h"
#include "topk_idx.h"

namespace fmoe_ext {
namespace {

void check_sortable(int64_t num_experts) {
  STD_TORCH_CHECK(num_experts <= kMaxSortExperts, "num_experts must be at most ", kMaxSortExperts,
                  " on CUDA, but got ", num_experts);
}

Tensor count_tokens_cuda(Tensor topk_idx, int64_t num_experts) {
  check_topk_idx(topk_idx, num_experts);
  const OnDeviceOf device(topk_idx);
  const Tensor idx = as_contiguous(topk_idx);
  const Tensor counts = torch::stable::new_zeros(idx, {num_experts}, ScalarType::Long);
  launch_count_tokens(as_indices(idx), idx.numel(), static_cast<int>(num_experts), data<int64_t>(counts),
                      device);
  return counts;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_tokens_cuda(Tensor topk_idx, int64_t num_experts) {
  check_topk_idx(topk_idx, num_experts);
  check_sortable(num_experts);
  const OnDeviceOf device(topk_idx);
  const Tensor idx = as_contiguous(topk_idx);
  const int num = static_cast<int>(num_experts);
  const Tensor tokens_per_expert = torch::stable::new_empty(idx, {num_experts}, ScalarType::Long);
  const Tensor offs = torch::stable::new_empty(idx, {num_experts}, ScalarType::Int);
  const Tensor row_idx = torch::stable::new_empty(idx, {idx.numel()}, ScalarType::Int);
  const Tensor inverse = torch::stable::new_empty(idx, {idx.size(0), idx.size(1)}, ScalarType::Int);
  const Tensor workspace =
      torch::stable::new_empty(idx, {rank_workspace_ints(idx.numel(), num)}, ScalarType::Int);
  launch_sort_tokens(as_indices(idx), idx.numel(), num, data<int>(workspace),
                     data<int64_t>(tokens_per_expert), data<int>(offs), data<int>(row_idx),
                     data<int>(inverse), device);
  return {tokens_per_expert, offs, row_idx, inverse};
}

Tensor apply_capacity_cuda(Tensor topk_idx, Tensor capacity) {
  check_same_device({{topk_idx, "topk_idx"}, {capacity, "capacity"}});
  check_apply_capacity(topk_idx, capacity);
  check_sortable(capacity.size(0));
  const OnDeviceOf device(topk_idx);
  const Tensor idx = as_contiguous(topk_idx), limits = as_contiguous(capacity);
  const int num_experts = static_cast<int>(limits.numel());
  const Tensor out = torch::stable::empty_like(idx);
  const Tensor workspace =
      torch::stable::new_empty(idx, {rank_workspace_ints(idx.numel(), num_experts)}, ScalarType::Int);
  launch_apply_capacity(as_indices(idx), idx.size(0), idx.size(1), num_experts, data<int64_t>(limits),
                        data<int>(workspace), data(out), device);
  return out;
}

// row_idx [R] and inverse [T, K] that passed check_routing, contiguous.
struct Routing {
  Routing(const Tensor& row_idx_, const Tensor& inverse_)
      : row_idx(as_contiguous(row_idx_)), inverse(as_contiguous(inverse_)) {}
  int64_t num_rows() const { return row_idx.numel(); }
  int64_t num_tokens() const { return inverse.size(0); }
  int top_k() const { return static_cast<int>(inverse.size(1)); }

  Tensor row_idx, inverse;
};

// The weights in the type that sums are computed in; nothing when there are none (every weight is 1).
std::optional<Tensor> wide_weights(const std::optional<Tensor>& topk_weights, const Tensor& like) {
  if (!topk_weights) return std::nullopt;
  return as_contiguous(torch::stable::to(*topk_weights, compute_type(like)));
}

Tensor permute_cuda(Tensor x, Tensor row_idx, Tensor inverse) {
  check_same_device({{x, "x"}, {row_idx, "row_idx"}, {inverse, "inverse"}});
  check_permute(x, row_idx, inverse);
  const Routing routing(row_idx, inverse);
  const OnDeviceOf device(x);
  const Tensor input = as_contiguous(x);
  const Tensor out = torch::stable::new_empty(input, {routing.num_rows(), input.size(1)});
  launch_permute(data(input), data<int>(routing.row_idx), routing.num_rows(), routing.inverse.numel(),
                 routing.top_k(), input.size(1) * input.element_size(), data(out), device);
  return out;
}

Tensor unpermute_cuda(Tensor y, Tensor row_idx, Tensor inverse, std::optional<Tensor> topk_weights) {
  check_same_device({{y, "y"}, {row_idx, "row_idx"}, {inverse, "inverse"}, {topk_weights, "topk_weights"}});
  check_unpermute(y, row_idx, inverse, topk_weights);
  const Routing routing(row_idx, inverse);
  const OnDeviceOf device(y);
  const auto weights = wide_weights(topk_weights, y);
  const Tensor rows = as_contiguous(y);
  const Tensor out = torch::stable::new_empty(rows, {routing.num_tokens(), rows.size(1)});
  launch_unpermute(as_dtype(rows), data(rows), data<int>(routing.inverse), data(weights),
                   routing.num_tokens(), routing.top_k(), routing.num_rows(), rows.size(1), data(out),
                   device);
  return out;
}

std::tuple<Tensor, Tensor> unpermute_backward_cuda(Tensor grad_out, std::optional<Tensor> y, Tensor row_idx,
                                                   Tensor inverse, std::optional<Tensor> topk_weights) {
  check_same_device({{grad_out, "grad_out"},
                     {y, "y"},
                     {row_idx, "row_idx"},
                     {inverse, "inverse"},
                     {topk_weights, "topk_weights"}});
  check_unpermute_backward(grad_out, y, row_idx, inverse, topk_weights);
  const Routing routing(row_idx, inverse);
  const OnDeviceOf device(grad_out);
  const int64_t width = grad_out.size(1);
  const auto weights = wide_weights(topk_weights, grad_out);
  const Tensor grad = as_contiguous(grad_out);
  const std::optional<Tensor> rows = y ? std::optional(as_contiguous(*y)) : std::nullopt;
  const Tensor grad_y = torch::stable::new_empty(grad, {routing.num_rows(), width});
  Tensor grad_weights =
      y ? torch::stable::new_zeros(grad, {routing.num_tokens(), routing.top_k()}, compute_type(grad))
        : torch::stable::new_empty(grad, {0},
                                   topk_weights ? topk_weights->scalar_type() : grad.scalar_type());
  launch_unpermute_backward(as_dtype(grad), data(grad), data(rows), data<int>(routing.row_idx), data(weights),
                            routing.num_rows(), routing.inverse.numel(), routing.top_k(), width, data(grad_y),
                            data(grad_weights), device);
  if (y) grad_weights = torch::stable::to(grad_weights, topk_weights->scalar_type());
  return {grad_y, grad_weights};
}

// ---- gate
std::tuple<Tensor, Tensor> topk_gate_cuda(Tensor logits, int64_t top_k, int64_t score, bool normalize,
                                          std::optional<Tensor> bias, int64_t num_groups, int64_t topk_groups,
                                          double scale) {
  check_same_device({{logits, "logits"}, {bias, "bias"}});
  check_topk_gate(logits, top_k, bias, num_groups, topk_groups);
  const bool sigmoid = checked_sigmoid(score);
  const int64_t T = logits.size(0), E = logits.size(1), limit = max_gate_values(as_dtype(logits));
  STD_TORCH_CHECK(E + 2 * num_groups <= limit, "num_experts + 2 * num_groups must be at most ", limit,
                  " on CUDA for ", dtype_text(logits), ", but got ", E + 2 * num_groups);
  const OnDeviceOf device(logits);
  std::optional<Tensor> shift;
  if (bias) shift = as_contiguous(torch::stable::to(*bias, compute_type(logits)));
  const Tensor input = as_contiguous(logits);
  const Tensor idx = torch::stable::new_empty(input, {T, top_k}, ScalarType::Long);
  const Tensor weights = torch::stable::new_empty(input, {T, top_k});
  const GateParams params{static_cast<int>(E),
                          static_cast<int>(top_k),
                          static_cast<int>(num_groups),
                          static_cast<int>(topk_groups),
                          sigmoid,
                          normalize,
                          scale};
  launch_topk_gate(as_dtype(input), data(input), data(shift), params, T, data<int64_t>(idx), data(weights),
                   device);
  return {idx, weights};
}

Tensor topk_gate_backward_cuda(Tensor grad_weights, Tensor logits, Tensor topk_idx, Tensor topk_weights,
                               int64_t score, bool normalize, double scale) {
  check_same_device({{logits, "logits"},
                     {grad_weights, "grad_weights"},
                     {topk_idx, "topk_idx"},
                     {topk_weights, "topk_weights"}});
  check_topk_gate_backward(grad_weights, logits, topk_idx, topk_weights);
  const bool sigmoid = checked_sigmoid(score);
  const int64_t T = logits.size(0), E = logits.size(1), top_k = topk_idx.size(1);
  const OnDeviceOf device(logits);
  const Tensor grad = as_contiguous(grad_weights), input = as_contiguous(logits),
               idx = as_contiguous(topk_idx), weights = as_contiguous(topk_weights);
  const Tensor grad_logits = torch::stable::new_empty(input, {T, E});
  const GateParams params{static_cast<int>(E), static_cast<int>(top_k), 1, 1, sigmoid, normalize, scale};
  launch_topk_gate_backward(as_dtype(input), data(grad), data(input), data<int64_t>(idx), data(weights),
                            params, T, data(grad_logits), device);
  return grad_logits;
}

}  // namespace

FMOE_CUDA_LIBRARY(m) {
  m.impl("count_tokens", TORCH_BOX(&count_tokens_cuda));
  m.impl("sort_tokens", TORCH_BOX(&sort_tokens_cuda));
  m.impl("apply_capacity", TORCH_BOX(&apply_capacity_cuda));
  m.impl("permute", TORCH_BOX(&permute_cuda));
  m.impl("unpermute", TORCH_BOX(&unpermute_cuda));
  m.impl("unpermute_backward", TORCH_BOX(&unpermute_backward_cuda));
  m.impl("topk_gate", TORCH_BOX(&topk_gate_cuda));
  m.impl("topk_gate_backward", TORCH_BOX(&topk_gate_backward_cuda));
}

}  // namespace fmoe_ext
