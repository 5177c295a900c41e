// The checks that every device shares, as operators, for kernels that are not written in C++
// (fmoe_ext/ops/torch_path.py).
#include <torch/csrc/stable/library.h>

#include "expert_mlp.h"
#include "grouped_gemm.h"

namespace fmoe_ext {
namespace {

void check_expert_mlp_op(Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1,
                         std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
                         std::optional<Tensor> topk_weights, std::string activation) {
  check_expert_mlp(x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, parse_activation(activation));
}

void check_expert_mlp_backward_op(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs,
                                  Tensor w1, Tensor w2, std::optional<Tensor> b2,
                                  std::optional<Tensor> topk_weights, Tensor h, std::string activation,
                                  bool combine, std::vector<bool> needs, std::optional<Tensor> main_dw1,
                                  std::optional<Tensor> main_dw2) {
  check_expert_mlp(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights,
                   parse_activation(activation));
  check_expert_mlp_backward(grad_y, x, inverse, w1, w2, topk_weights, h, combine, needs, main_dw1, main_dw2);
}

void check_grouped_gemm_op(Tensor x, Tensor weight, Tensor offs, std::optional<Tensor> bias) {
  check_grouped_gemm(x, weight, offs, bias);
}

void check_grouped_gemm_backward_op(Tensor grad_y, Tensor x, Tensor weight, Tensor offs,
                                    std::vector<bool> needs, std::optional<Tensor> main_dweight) {
  check_grouped_gemm_backward(grad_y, x, weight, offs, needs, main_dweight);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("_check_grouped_gemm", TORCH_BOX(&check_grouped_gemm_op));
  m.impl("_check_grouped_gemm_backward", TORCH_BOX(&check_grouped_gemm_backward_op));
  m.impl("_check_expert_mlp", TORCH_BOX(&check_expert_mlp_op));
  m.impl("_check_expert_mlp_backward", TORCH_BOX(&check_expert_mlp_backward_op));
}

}  // namespace fmoe_ext
