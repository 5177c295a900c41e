// Kernels that compute nothing: they return tensors of the right shapes at once, in the place of those of fmoe_ext on
// the CPU. What is left of a step's time is that of the host. Built by benchmarks/bench_host.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::new_empty;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

Tensor count_tokens(Tensor topk_idx, int64_t num_experts) {
  return new_empty(topk_idx, {num_experts}, ScalarType::Long);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_tokens(Tensor topk_idx, int64_t num_experts) {
  return {new_empty(topk_idx, {num_experts}, ScalarType::Long), new_empty(topk_idx, {num_experts}, ScalarType::Int),
          new_empty(topk_idx, {topk_idx.numel()}, ScalarType::Int),
          new_empty(topk_idx, {topk_idx.size(0), topk_idx.size(1)}, ScalarType::Int)};
}

std::tuple<Tensor, Tensor> topk_gate(Tensor logits, int64_t top_k, int64_t, bool, Optional, int64_t, int64_t, double) {
  return {new_empty(logits, {logits.size(0), top_k}, ScalarType::Long), new_empty(logits, {logits.size(0), top_k})};
}

Tensor topk_gate_backward(Tensor, Tensor logits, Tensor, Tensor, int64_t, bool, double) {
  return new_empty(logits, {logits.size(0), logits.size(1)});
}

std::tuple<Tensor, Tensor> expert_mlp(Tensor x, Tensor row_idx, Tensor, Tensor, Tensor w1, Optional, Tensor, Optional,
                                      Optional, int64_t, bool, bool) {
  return {new_empty(x, {x.size(0), x.size(1)}), new_empty(x, {row_idx.size(0), w1.size(1)})};
}

Tensor like(const Tensor& x, bool needed, std::initializer_list<int64_t> shape) {
  return needed ? new_empty(x, shape) : new_empty(x, {0});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> expert_mlp_backward(
    Tensor, Tensor x, Tensor, Tensor inverse, Tensor, Tensor w1, Tensor w2, Optional, Optional topk_weights, Tensor,
    int64_t, bool, std::vector<bool> needs, Optional, Optional) {
  const Tensor& weights = topk_weights ? *topk_weights : x;
  return {like(x, needs[0], {x.size(0), x.size(1)}),
          like(w1, needs[1], {w1.size(0), w1.size(1), w1.size(2)}),
          like(w1, needs[2], {w1.size(0), w1.size(1)}),
          like(w2, needs[3], {w2.size(0), w2.size(1), w2.size(2)}),
          like(w2, needs[4], {w2.size(0), w2.size(1)}),
          like(weights, needs[5], {inverse.size(0), inverse.size(1)})};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("count_tokens", TORCH_BOX(&count_tokens));
  m.impl("sort_tokens", TORCH_BOX(&sort_tokens));
  m.impl("topk_gate", TORCH_BOX(&topk_gate));
  m.impl("topk_gate_backward", TORCH_BOX(&topk_gate_backward));
  m.impl("expert_mlp", TORCH_BOX(&expert_mlp));
  m.impl("expert_mlp_backward", TORCH_BOX(&expert_mlp_backward));
}
