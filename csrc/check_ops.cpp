// The checks that every device shares, as operators, for kernels that are not written in C++
// (fmoe_ext/gpu/torch_path.py).
#include <torch/csrc/stable/library.h>

#include "entries.h"
#include "expert_mlp.h"
#include "grouped_gemm.h"
#include "same_device.h"

namespace fmoe_ext {
namespace {

void check_expert_mlp_op(Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1,
                         std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
                         std::optional<Tensor> topk_weights, int64_t activation) {
  check_same_device({{x, "x"},
                     {row_idx, "row_idx"},
                     {inverse, "inverse"},
                     {offs, "offs"},
                     {w1, "w1"},
                     {b1, "b1"},
                     {w2, "w2"},
                     {b2, "b2"},
                     {topk_weights, "topk_weights"}});
  check_expert_mlp(x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, checked_activation(activation));
}

void check_expert_mlp_backward_op(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs,
                                  Tensor w1, Tensor w2, std::optional<Tensor> b2,
                                  std::optional<Tensor> topk_weights, std::vector<std::optional<Tensor>> rows,
                                  int64_t activation, bool combine, std::vector<bool> needs_,
                                  std::vector<std::optional<Tensor>> main_dweights) {
  check_entries(rows, 3, "rows", "h, dh, scaled_a");
  check_entries(main_dweights, 2, "main_dweights", "of w1 and w2");
  const auto &h = rows[0], &dh = rows[1], &scaled_a = rows[2];
  const auto &main_dw1 = main_dweights[0], &main_dw2 = main_dweights[1];
  check_same_device({{x, "x"},
                     {grad_y, "grad_y"},
                     {row_idx, "row_idx"},
                     {inverse, "inverse"},
                     {offs, "offs"},
                     {w1, "w1"},
                     {w2, "w2"},
                     {b2, "b2"},
                     {topk_weights, "topk_weights"},
                     {h, "h"},
                     {dh, "dh"},
                     {scaled_a, "scaled_a"},
                     {main_dw1, "main_dw1"},
                     {main_dw2, "main_dw2"}});
  check_expert_mlp(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights,
                   checked_activation(activation));
  const ExpertMlpNeeds needs(needs_, topk_weights);
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  if (h) check_hidden_rows(*h, x, inverse, w1.size(1), "h", "[R, F]");
  if (dh && (needs.dw1 || needs.db1)) check_hidden_rows(*dh, x, inverse, w1.size(1), "dh", "[R, F]");
  if (scaled_a && needs.dw2) check_hidden_rows(*scaled_a, x, inverse, w2.size(2), "scaled_a", "[R, H]");
  check_expert_main_grads(w1, w2, main_dw1, main_dw2);
}

void check_grouped_gemm_op(Tensor x, Tensor weight, Tensor offs, std::optional<Tensor> bias) {
  check_same_device({{x, "x"}, {weight, "weight"}, {offs, "offs"}, {bias, "bias"}});
  check_grouped_gemm(x, weight, offs, bias);
}

void check_grouped_gemm_backward_op(Tensor grad_y, Tensor x, Tensor weight, Tensor offs,
                                    std::vector<bool> needs, std::optional<Tensor> main_dweight) {
  check_same_device(
      {{x, "x"}, {weight, "weight"}, {offs, "offs"}, {grad_y, "grad_y"}, {main_dweight, "main_dweight"}});
  check_grouped_gemm_backward(grad_y, x, weight, offs, main_dweight);
  static_cast<void>(GroupedGemmNeeds(needs));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("_check_grouped_gemm", TORCH_BOX(&check_grouped_gemm_op));
  m.impl("_check_grouped_gemm_backward", TORCH_BOX(&check_grouped_gemm_backward_op));
  m.impl("_check_expert_mlp", TORCH_BOX(&check_expert_mlp_op));
  m.impl("_check_expert_mlp_backward", TORCH_BOX(&check_expert_mlp_backward_op));
}

}  // namespace fmoe_ext
