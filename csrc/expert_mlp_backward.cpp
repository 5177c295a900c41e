// Three operators by expert_backward.h: the whole backward of expert_mlp, and its halves for the inputs and
// for the weights, which have the bits of the whole.
#include <torch/csrc/stable/library.h>

#include "expert_backward.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Kept kept(const ExpertRows& args, const ExpertMlpNeeds& needs, const Tensor& dh, const Tensor& scaled_a) {
  Kept found;
  if (needs.dw1 || needs.db1) found.dh.emplace(args.kernels, dh);
  if (needs.dw2) found.scaled_a.emplace(args.kernels, scaled_a);
  return found;
}

void check_main_grads_cpu(const Tensor& w1, const Tensor& w2, const std::optional<Tensor>& main_dw1,
                          const std::optional<Tensor>& main_dw2) {
  if (main_dw1) check_cpu(*main_dw1, "main_dw1");
  if (main_dw2) check_cpu(*main_dw2, "main_dw2");
  check_expert_main_grads(w1, w2, main_dw1, main_dw2);
}

Gradients expert_mlp_backward_cpu(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs,
                                  Tensor w1, Tensor w2, std::optional<Tensor> b2,
                                  std::optional<Tensor> topk_weights, Tensor h, int64_t activation,
                                  bool combine, std::vector<bool> needs, std::optional<Tensor> main_dw1,
                                  std::optional<Tensor> main_dw2) {
  const ExpertRows args(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights, activation);
  check_cpu(grad_y, "grad_y");
  check_cpu(h, "h");
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_hidden_rows(h, x, inverse, args.F, "h", "[R, F]");
  check_main_grads_cpu(w1, w2, main_dw1, main_dw2);
  const Tensor grad = as_contiguous(grad_y), rows = as_contiguous(h);
  ExpertBackward backward(args, grad, rows, combine, ExpertMlpNeeds(needs, topk_weights), BackwardHalf::both,
                          {}, main_dw1, main_dw2);
  backward.run();
  return {backward.dx(), backward.dw1, backward.db1, backward.dw2, backward.db2, backward.dtopk_weights()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_mlp_backward_inputs_cpu(
    Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2,
    std::optional<Tensor> b2, std::optional<Tensor> topk_weights, Tensor h, int64_t activation, bool combine,
    std::vector<bool> needs_) {
  const ExpertRows args(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights, activation);
  check_cpu(grad_y, "grad_y");
  check_cpu(h, "h");
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_hidden_rows(h, x, inverse, args.F, "h", "[R, F]");
  const ExpertMlpNeeds needs(needs_, topk_weights);
  const auto new_kept = [&](bool needed, int64_t width) {
    return needed ? KeptRows::make(x, args.R, args.num_rows(), width) : torch::stable::new_empty(x, {0});
  };
  const Tensor dh = new_kept(needs.dw1 || needs.db1, args.F), scaled_a = new_kept(needs.dw2, args.H);
  const Tensor grad = as_contiguous(grad_y), rows = as_contiguous(h);
  ExpertBackward backward(args, grad, rows, combine, needs, BackwardHalf::inputs,
                          kept(args, needs, dh, scaled_a), std::nullopt, std::nullopt);
  backward.run();
  return {backward.dx(), backward.dtopk_weights(), dh, scaled_a};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_mlp_backward_weights_cpu(
    Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2,
    std::optional<Tensor> topk_weights, Tensor dh, Tensor scaled_a, int64_t activation, bool combine,
    std::vector<bool> needs_, std::optional<Tensor> main_dw1, std::optional<Tensor> main_dw2) {
  const ExpertRows args(x, row_idx, inverse, offs, w1, std::nullopt, w2, std::nullopt, topk_weights,
                        activation);
  check_cpu(grad_y, "grad_y");
  check_cpu(dh, "dh");
  check_cpu(scaled_a, "scaled_a");
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  const ExpertMlpNeeds needs(needs_, topk_weights);
  check_rows_of_inputs_half(dh, scaled_a, x, inverse, w1, w2, needs);
  check_main_grads_cpu(w1, w2, main_dw1, main_dw2);
  const Tensor grad = as_contiguous(grad_y), none = torch::stable::new_empty(x, {0});
  ExpertBackward backward(args, grad, none, combine, needs, BackwardHalf::weights,
                          kept(args, needs, dh, scaled_a), main_dw1, main_dw2);
  backward.run();
  return {backward.dw1, backward.db1, backward.dw2, backward.db2};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("expert_mlp_backward", TORCH_BOX(&expert_mlp_backward_cpu));
  m.impl("expert_mlp_backward_inputs", TORCH_BOX(&expert_mlp_backward_inputs_cpu));
  m.impl("expert_mlp_backward_weights", TORCH_BOX(&expert_mlp_backward_weights_cpu));
}

}  // namespace fmoe_ext
