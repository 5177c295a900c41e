// PyInit__C_cuda and the routing ops on CUDA tensors: checks, allocation, launch. The kernels are in <op>.cu.
//
// The values of index tensors are not checked here, for that would synchronise: kernels take an index out of
// range for a dropped choice.
#include <Python.h>

#include <string>
#include <tuple>

#include "device.h"

namespace fmoe_ext {
namespace {

void check_topk_idx_cuda(const Tensor& topk_idx, int64_t num_experts) {
  check_index_dtype(topk_idx, "topk_idx");
  check_dim(topk_idx, 2, "topk_idx", "[T, K]");
  STD_TORCH_CHECK(num_experts >= 1, "num_experts must be at least 1, but got ", num_experts);
  STD_TORCH_CHECK(num_experts <= INT32_MAX, "num_experts must be less than 2^31, but got ", num_experts);
  STD_TORCH_CHECK(topk_idx.numel() <= INT32_MAX,
                  "topk_idx must have fewer than 2^31 elements (offsets are int32), but got shape ",
                  shape_text(topk_idx));
}

void check_sortable(int64_t num_experts) {
  STD_TORCH_CHECK(num_experts <= kMaxSortExperts, "num_experts must be at most ", kMaxSortExperts,
                  " on CUDA, but got ", num_experts);
}

Tensor count_tokens_cuda(Tensor topk_idx, int64_t num_experts) {
  check_topk_idx_cuda(topk_idx, num_experts);
  const OnDeviceOf device(topk_idx);
  const Tensor idx = as_contiguous(topk_idx);
  const Tensor counts = torch::stable::new_zeros(idx, {num_experts}, ScalarType::Long);
  launch_count_tokens(as_indices(idx), idx.numel(), static_cast<int>(num_experts), data<int64_t>(counts),
                      device);
  return counts;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_tokens_cuda(Tensor topk_idx, int64_t num_experts) {
  check_topk_idx_cuda(topk_idx, num_experts);
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
  check_dim(capacity, 1, "capacity", "[E]");
  check_topk_idx_cuda(topk_idx, capacity.size(0));
  check_sortable(capacity.size(0));
  STD_TORCH_CHECK(capacity.scalar_type() == ScalarType::Long, "capacity must be int64, but got ",
                  dtype_text(capacity));
  check_same_device(capacity, topk_idx, "capacity", "topk_idx");
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

// row_idx [R] and inverse [T, K], as sort_tokens returns them, contiguous.
struct Routing {
  Routing(const Tensor& row_idx_, const Tensor& inverse_, const Tensor& like, const char* name) {
    check_int32(row_idx_, "row_idx");
    check_dim(row_idx_, 1, "row_idx", "[R]");
    check_same_device(row_idx_, like, "row_idx", name);
    check_int32(inverse_, "inverse");
    check_dim(inverse_, 2, "inverse", "[T, K]");
    check_same_device(inverse_, like, "inverse", name);
    row_idx = as_contiguous(row_idx_);
    inverse = as_contiguous(inverse_);
  }
  int64_t num_rows() const { return row_idx.numel(); }
  int64_t num_tokens() const { return inverse.size(0); }
  int top_k() const { return static_cast<int>(inverse.size(1)); }

  Tensor row_idx, inverse;
};

void check_tokens(const Tensor& x, const Routing& routing, const char* name) {
  check_dim(x, 2, name, "[T, D]");
  check_size(x, 0, routing.num_tokens(), name, "[T, D] (T as in inverse [T, K])");
}

void check_rows(const Tensor& y, const Routing& routing) {
  check_dim(y, 2, "y", "[R, D]");
  check_size(y, 0, routing.num_rows(), "y", "[R, D] (R as in row_idx [R])");
}

// The weights in the type that sums are computed in; nothing when there are none (every weight is 1).
std::optional<Tensor> checked_weights(const std::optional<Tensor>& topk_weights, const Tensor& like,
                                      const Routing& routing, const char* name) {
  if (!topk_weights) return std::nullopt;
  const Tensor& w = *topk_weights;
  check_dim(w, 2, "topk_weights", "[T, K]");
  check_size(w, 0, routing.num_tokens(), "topk_weights", "[T, K]");
  check_size(w, 1, routing.top_k(), "topk_weights", "[T, K]");
  check_same_device(w, like, "topk_weights", name);
  STD_TORCH_CHECK(w.scalar_type() == ScalarType::Float || w.scalar_type() == like.scalar_type(),
                  "topk_weights must be float32 or have the dtype of the rows (", dtype_text(like),
                  "), but got ", dtype_text(w));
  return as_contiguous(torch::stable::to(w, compute_type(like)));
}

Tensor permute_cuda(Tensor x, Tensor row_idx, Tensor inverse) {
  const Routing routing(row_idx, inverse, x, "x");
  check_tokens(x, routing, "x");
  const OnDeviceOf device(x);
  const Tensor input = as_contiguous(x);
  const Tensor out = torch::stable::new_empty(input, {routing.num_rows(), input.size(1)});
  launch_permute(data(input), data<int>(routing.row_idx), routing.num_rows(), routing.inverse.numel(),
                 routing.top_k(), input.size(1) * input.element_size(), data(out), device);
  return out;
}

Tensor unpermute_cuda(Tensor y, Tensor row_idx, Tensor inverse, std::optional<Tensor> topk_weights) {
  check_float(y, "y");
  const Routing routing(row_idx, inverse, y, "y");
  check_rows(y, routing);
  const OnDeviceOf device(y);
  const auto weights = checked_weights(topk_weights, y, routing, "y");
  const Tensor rows = as_contiguous(y);
  const Tensor out = torch::stable::new_empty(rows, {routing.num_tokens(), rows.size(1)});
  launch_unpermute(as_dtype(rows), data(rows), data<int>(routing.inverse), data(weights),
                   routing.num_tokens(), routing.top_k(), routing.num_rows(), rows.size(1), data(out),
                   device);
  return out;
}

std::tuple<Tensor, Tensor> unpermute_backward_cuda(Tensor grad_out, std::optional<Tensor> y, Tensor row_idx,
                                                   Tensor inverse, std::optional<Tensor> topk_weights) {
  check_float(grad_out, "grad_out");
  const Routing routing(row_idx, inverse, grad_out, "grad_out");
  check_tokens(grad_out, routing, "grad_out");
  const OnDeviceOf device(grad_out);
  const int64_t width = grad_out.size(1);
  const auto weights = checked_weights(topk_weights, grad_out, routing, "grad_out");
  if (y) {
    STD_TORCH_CHECK(topk_weights,
                    "y is only read for the gradient of topk_weights, but topk_weights is None");
    check_rows(*y, routing);
    check_size(*y, 1, width, "y", "[R, D] (D as in grad_out [T, D])");
    check_same_dtype(*y, grad_out, "y", "grad_out");
    check_same_device(*y, grad_out, "y", "grad_out");
  }
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
bool checked_sigmoid(const std::string& score) {
  STD_TORCH_CHECK(score == "softmax" || score == "sigmoid",
                  "score must be \"softmax\" or \"sigmoid\", but got \"", score, "\"");
  return score == "sigmoid";
}

void check_logits(const Tensor& logits) {
  check_dim(logits, 2, "logits", "[T, E]");
  check_float(logits, "logits");
  STD_TORCH_CHECK(logits.size(1) >= 1 && logits.size(1) <= INT32_MAX,
                  "logits must have shape [T, E] with at least one expert, but got shape ",
                  shape_text(logits));
}

void check_gate(const Tensor& logits, int64_t top_k, int64_t num_groups, int64_t topk_groups) {
  const int64_t E = logits.size(1), limit = max_gate_values(as_dtype(logits));
  STD_TORCH_CHECK(top_k >= 1 && top_k <= E, "top_k must be in [1, num_experts] = [1, ", E, "], but got ",
                  top_k);
  STD_TORCH_CHECK(num_groups >= 1 && E % num_groups == 0, "num_groups must divide the ", E,
                  " experts, but got ", num_groups);
  STD_TORCH_CHECK(topk_groups >= 1 && topk_groups <= num_groups,
                  "topk_groups must be in [1, num_groups] = [1, ", num_groups, "], but got ", topk_groups);
  const int64_t left = topk_groups * (E / num_groups);
  STD_TORCH_CHECK(top_k <= left, "top_k must be at most the ", left, " experts of ", topk_groups,
                  " groups, but got ", top_k);
  STD_TORCH_CHECK(E + 2 * num_groups <= limit, "num_experts + 2 * num_groups must be at most ", limit,
                  " on CUDA for ", dtype_text(logits), ", but got ", E + 2 * num_groups);
}

std::tuple<Tensor, Tensor> topk_gate_cuda(Tensor logits, int64_t top_k, std::string score, bool normalize,
                                          std::optional<Tensor> bias, int64_t num_groups, int64_t topk_groups,
                                          double scale) {
  check_logits(logits);
  const bool sigmoid = checked_sigmoid(score);
  check_gate(logits, top_k, num_groups, topk_groups);
  const int64_t T = logits.size(0), E = logits.size(1);
  const OnDeviceOf device(logits);
  std::optional<Tensor> shift;
  if (bias) {
    check_dim(*bias, 1, "bias", "[E]");
    check_size(*bias, 0, E, "bias", "[E]");
    check_float(*bias, "bias");
    check_same_device(*bias, logits, "bias", "logits");
    shift = as_contiguous(torch::stable::to(*bias, compute_type(logits)));
  }
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
                               std::string score, bool normalize, double scale) {
  check_logits(logits);
  const bool sigmoid = checked_sigmoid(score);
  const int64_t T = logits.size(0), E = logits.size(1);
  check_dim(topk_idx, 2, "topk_idx", "[T, K]");
  check_size(topk_idx, 0, T, "topk_idx", "[T, K]");
  check_same_device(topk_idx, logits, "topk_idx", "logits");
  STD_TORCH_CHECK(topk_idx.scalar_type() == ScalarType::Long, "topk_idx must be int64, but got ",
                  dtype_text(topk_idx));
  const int64_t top_k = topk_idx.size(1);
  for (const auto& [t, name] :
       {std::pair(&grad_weights, "grad_weights"), std::pair(&topk_weights, "topk_weights")}) {
    check_dim(*t, 2, name, "[T, K]");
    check_size(*t, 0, T, name, "[T, K]");
    check_size(*t, 1, top_k, name, "[T, K]");
    check_same_dtype(*t, logits, name, "logits");
    check_same_device(*t, logits, name, "logits");
  }
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

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
