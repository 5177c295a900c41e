// grouped_gemm, expert_mlp and _decode_packed on CUDA tensors: checks, allocation, and the order of the
// products of products.h, which names the kernels (ours, or torch's grouped_mm) that compute them.
#include <tuple>
#include <vector>

#include "device.h"
#include "expert_mlp.h"
#include "frozen_weight.h"
#include "grouped_gemm.h"
#include "products.h"

namespace fmoe_ext {
namespace {

Tensor grouped_gemm_cuda(Tensor x, Tensor weight, Tensor offs, std::optional<Tensor> bias) {
  check_same_device({{x, "x"}, {weight, "weight"}, {offs, "offs"}, {bias, "bias"}});
  check_grouped_gemm(x, weight, offs, bias);
  const OnDeviceOf device(x);
  const Tensor rows = as_contiguous(x), w = as_contiguous(weight), ends = as_contiguous(offs);
  const std::optional<Tensor> shift = bias ? std::optional(as_contiguous(*bias)) : std::nullopt;
  return Products(ends, rows.size(0), {rows, w, shift}, device).rows_by_weight(rows, w, shift, RowScale{});
}

std::tuple<Tensor, Tensor, Tensor> grouped_gemm_backward_cuda(Tensor grad_y, Tensor x, Tensor weight,
                                                              Tensor offs, std::vector<bool> needs_,
                                                              std::optional<Tensor> main_dweight) {
  const GroupedGemmNeeds needs(needs_);
  check_same_device(
      {{x, "x"}, {weight, "weight"}, {offs, "offs"}, {grad_y, "grad_y"}, {main_dweight, "main_dweight"}});
  check_grouped_gemm_backward(grad_y, x, weight, offs, main_dweight);
  const OnDeviceOf device(x);
  const Tensor dy = as_contiguous(grad_y), rows = as_contiguous(x), w = as_contiguous(weight),
               ends = as_contiguous(offs);
  Products products(ends, rows.size(0), {rows, w, dy}, device);
  // one each: outputs of an operator may not share memory
  Tensor dx = torch::stable::new_empty(rows, {0}), dweight = torch::stable::new_empty(rows, {0}),
         dbias = torch::stable::new_empty(rows, {0});
  if (needs.dx) dx = products.grad_input(dy, w);
  if (needs.dweight) dweight = products.grad_weight(plain_rows(dy), plain_rows(rows), main_dweight);
  if (needs.dbias) {
    dbias = torch::stable::new_empty(rows, {w.size(0), w.size(1)});
    products.grad_bias(plain_rows(dy), RowScale{}, dbias);
  }
  return {dx, dweight, dbias};
}

Tensor decode_packed_cuda(Tensor weight, std::optional<Tensor> scale, std::optional<Tensor> zero,
                          int64_t format, bool interleaved, ScalarType dtype) {
  check_same_device({{weight, "weight"}, {scale, "weight_scale"}, {zero, "weight_zero"}});
  const FrozenWeight packed(weight, {scale, zero, format, interleaved}, "weight", false);
  STD_TORCH_CHECK(packed.is_packed(), "weight_format must be that of a packed weight, but got 0");
  const OnDeviceOf device(weight);
  const bool is_double = dtype == ScalarType::Double;
  const gemm::PackedMatrix matrix = packed.matrix();
  STD_TORCH_CHECK(matrix.rows <= INT32_MAX && matrix.columns <= INT32_MAX,
                  "weight must have fewer than 2^31 rows and columns, but got ", matrix.rows, " and ",
                  matrix.columns);
  const Tensor out = torch::stable::new_empty(weight, {matrix.num_experts, matrix.rows, matrix.columns},
                                              is_double ? ScalarType::Float : dtype);
  check_float(out, "dtype");
  launch_decode_packed(as_dtype(out), matrix, data(out), device);
  return is_double ? torch::stable::to(out, ScalarType::Double) : out;
}

// The arguments that forward and backward of expert_mlp share, contiguous.
struct ExpertMlp {
  ExpertMlp(const Tensor& x_, const Tensor& row_idx_, const Tensor& inverse_, const Tensor& offs_,
            const Tensor& w1_, const std::optional<Tensor>& b1_, const Tensor& w2_,
            const std::optional<Tensor>& b2_, const std::optional<Tensor>& topk_weights,
            int64_t activation_number)
      : activation(checked_activation(activation_number)) {
    check_same_device({{x_, "x"},
                       {row_idx_, "row_idx"},
                       {inverse_, "inverse"},
                       {offs_, "offs"},
                       {w1_, "w1"},
                       {b1_, "b1"},
                       {w2_, "w2"},
                       {b2_, "b2"},
                       {topk_weights, "topk_weights"}});
    check_expert_mlp(x_, row_idx_, inverse_, offs_, w1_, b1_, w2_, b2_, topk_weights, activation);
    x = as_contiguous(x_);
    row_idx = as_contiguous(row_idx_);
    inverse = as_contiguous(inverse_);
    offs = as_contiguous(offs_);
    w1 = as_contiguous(w1_);
    w2 = as_contiguous(w2_);
    if (b1_) b1 = as_contiguous(*b1_);
    if (b2_) b2 = as_contiguous(*b2_);
    if (topk_weights) weights = as_contiguous(torch::stable::to(*topk_weights, compute_type(x)));
  }

  Dtype dtype() const { return as_dtype(x); }
  int64_t num_rows() const { return row_idx.numel(); }
  int64_t hidden() const { return w2.size(2); }
  int num_experts() const { return static_cast<int>(offs.numel()); }
  int top_k() const { return static_cast<int>(inverse.size(1)); }
  const int* ends() const { return data<int>(offs); }
  RowScale row_scale() const { return {data(weights), data<int>(row_idx), inverse.numel()}; }
  // The rows of a [T, ..] tensor in expert-major order, read through the index.
  TensorRows by_token(const Tensor& t) const {
    return {{data(t), t.size(1), data<int>(row_idx), top_k(), inverse.numel()}, t};
  }
  Tensor new_rows(int64_t width) const { return torch::stable::new_empty(x, {num_rows(), width}); }
  // out [T, D]: sums the rows of each token's choices, times their weights if there are any.
  Tensor combine(const Tensor& rows, const std::optional<Tensor>& factors, LaunchStream stream) const {
    const Tensor out = torch::stable::new_empty(x, {inverse.size(0), rows.size(1)});
    launch_unpermute(dtype(), data(rows), data<int>(inverse), data(factors), inverse.size(0), top_k(),
                     num_rows(), rows.size(1), data(out), stream);
    return out;
  }

  Activation activation;
  Tensor x, row_idx, inverse, offs, w1, w2;
  std::optional<Tensor> b1, b2, weights;
};

std::tuple<Tensor, Tensor> expert_mlp_cuda(Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1,
                                           std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
                                           std::optional<Tensor> topk_weights, int64_t activation,
                                           bool combine, bool save_h) {
  const ExpertMlp mlp(x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation);
  const OnDeviceOf device(x);
  Products products(mlp.offs, mlp.num_rows(), {mlp.x, mlp.w1, mlp.b1, mlp.w2, mlp.b2}, device);
  const auto [h, a] =
      products.up(mlp.activation.curve, mlp.activation.gated, mlp.by_token(mlp.x), mlp.w1, mlp.b1, save_h);
  const Tensor y = products.rows_by_weight(a, mlp.w2, mlp.b2, combine ? RowScale{} : mlp.row_scale());
  return {combine ? mlp.combine(y, mlp.weights, device) : y, save_h ? *h : torch::stable::new_empty(a, {0})};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The products of expert_mlp's backward, in two halves: inputs() and weights(). The second half reads only dh
// and scaled_a of the first.
class Backward {
 public:
  // rows: h, or dh where only weights() is called.
  Backward(const ExpertMlp& mlp, const Tensor& grad_y, const Tensor& rows, bool combine,
           const ExpertMlpNeeds& needs, const OnDeviceOf& device)
      : mlp_(mlp),
        needs_(needs),
        combine_(combine),
        device_(device),
        dy_(as_contiguous(grad_y)),
        rows_(as_contiguous(rows)),
        products_(mlp.offs, mlp.num_rows(), {mlp.x, mlp.w1, mlp.w2, dy_, rows_}, device) {
    dx = dtopk_weights = dh = scaled_a = dw1 = db1 = dw2 = db2 = output(false, {});
  }

  // dh and scaled_a, dtopk_weights, dx.
  void inputs(const std::optional<Tensor>& topk_weights) {
    if (needs_.dtopk_weights)
      dtopk_weights =
          torch::stable::new_zeros(mlp_.x, {mlp_.inverse.size(0), mlp_.top_k()}, compute_type(mlp_.x));
    if (needs_.hidden()) hidden();
    if (needs_.dx) dx = mlp_.combine(products_.grad_input(dh, mlp_.w1), std::nullopt, device_);
    if (needs_.dtopk_weights) dtopk_weights = torch::stable::to(dtopk_weights, topk_weights->scalar_type());
  }

  void weights(const std::optional<Tensor>& main_dw1, const std::optional<Tensor>& main_dw2) {
    db1 = output(needs_.db1, {mlp_.num_experts(), mlp_.w1.size(1)});
    db2 = output(needs_.db2, {mlp_.num_experts(), mlp_.x.size(1)});
    if (needs_.db2) products_.grad_bias(dy_rows(), mlp_.row_scale(), db2);
    if (needs_.dw2) dw2 = products_.grad_weight(dy_rows(), plain_rows(scaled_a), main_dw2);
    if (needs_.dw1) dw1 = products_.grad_weight(plain_rows(dh), mlp_.by_token(mlp_.x), main_dw1);
    if (needs_.db1) products_.grad_bias(plain_rows(dh), RowScale{}, db1);
  }

  Tensor dx, dtopk_weights, dh, scaled_a, dw1, db1, dw2, db2;

 private:
  Tensor output(bool needed, std::initializer_list<int64_t> shape) const {
    return needed ? torch::stable::new_empty(mlp_.x, shape) : torch::stable::new_empty(mlp_.x, {0});
  }
  TensorRows dy_rows() const { return combine_ ? mlp_.by_token(dy_) : plain_rows(dy_); }

  void hidden() {
    dh = mlp_.new_rows(mlp_.w1.size(1));
    scaled_a = mlp_.new_rows(mlp_.hidden());
    const ActivationRows rows{data(rows_),        mlp_.ends(),          data<int>(mlp_.row_idx),
                              data(mlp_.weights), mlp_.num_experts(),   mlp_.top_k(),
                              mlp_.num_rows(),    mlp_.inverse.numel(), combine_};
    products_.grad_hidden(mlp_.activation.curve, mlp_.activation.gated, dy_rows(), rows, mlp_.w2, mlp_.b2, dh,
                          scaled_a, needs_.dtopk_weights ? std::optional(dtopk_weights) : std::nullopt);
  }

  const ExpertMlp& mlp_;
  const ExpertMlpNeeds needs_;
  const bool combine_;
  const OnDeviceOf& device_;
  const Tensor dy_, rows_;
  Products products_;
};

Gradients expert_mlp_backward_cuda(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs,
                                   Tensor w1, Tensor w2, std::optional<Tensor> b2,
                                   std::optional<Tensor> topk_weights, Tensor h, int64_t activation,
                                   bool combine, std::vector<bool> needs, std::optional<Tensor> main_dw1,
                                   std::optional<Tensor> main_dw2) {
  const ExpertMlp mlp(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights, activation);
  check_same_device({{x, "x"}, {grad_y, "grad_y"}, {h, "h"}, {main_dw1, "main_dw1"}, {main_dw2, "main_dw2"}});
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_hidden_rows(h, x, inverse, w1.size(1), "h", "[R, F]");
  check_expert_main_grads(w1, w2, main_dw1, main_dw2);
  const OnDeviceOf device(x);
  Backward backward(mlp, grad_y, h, combine, ExpertMlpNeeds(needs, topk_weights), device);
  backward.inputs(topk_weights);
  backward.weights(main_dw1, main_dw2);
  return {backward.dx, backward.dw1, backward.db1, backward.dw2, backward.db2, backward.dtopk_weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_mlp_backward_inputs_cuda(
    Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2,
    std::optional<Tensor> b2, std::optional<Tensor> topk_weights, Tensor h, int64_t activation, bool combine,
    std::vector<bool> needs_) {
  const ExpertMlp mlp(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights, activation);
  check_same_device({{x, "x"}, {grad_y, "grad_y"}, {h, "h"}});
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_hidden_rows(h, x, inverse, w1.size(1), "h", "[R, F]");
  const ExpertMlpNeeds needs(needs_, topk_weights);
  const OnDeviceOf device(x);
  Backward backward(mlp, grad_y, h, combine, needs, device);
  backward.inputs(topk_weights);
  const auto none = [&] { return torch::stable::new_empty(x, {0}); };
  return {backward.dx, backward.dtopk_weights, needs.dw1 || needs.db1 ? backward.dh : none(),
          needs.dw2 ? backward.scaled_a : none()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_mlp_backward_weights_cuda(
    Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2,
    std::optional<Tensor> topk_weights, Tensor dh, Tensor scaled_a, int64_t activation, bool combine,
    std::vector<bool> needs_, std::optional<Tensor> main_dw1, std::optional<Tensor> main_dw2) {
  const ExpertMlp mlp(x, row_idx, inverse, offs, w1, std::nullopt, w2, std::nullopt, topk_weights,
                      activation);
  check_same_device({{x, "x"},
                     {grad_y, "grad_y"},
                     {dh, "dh"},
                     {scaled_a, "scaled_a"},
                     {main_dw1, "main_dw1"},
                     {main_dw2, "main_dw2"}});
  const ExpertMlpNeeds needs(needs_, topk_weights);
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_rows_of_inputs_half(dh, scaled_a, x, inverse, w1, w2, needs);
  check_expert_main_grads(w1, w2, main_dw1, main_dw2);
  const OnDeviceOf device(x);
  Backward backward(mlp, grad_y, dh, combine, needs, device);
  backward.dh = as_contiguous(dh);
  backward.scaled_a = as_contiguous(scaled_a);
  backward.weights(main_dw1, main_dw2);
  return {backward.dw1, backward.db1, backward.dw2, backward.db2};
}

}  // namespace

FMOE_CUDA_LIBRARY(m) {
  m.impl("grouped_gemm", TORCH_BOX(&grouped_gemm_cuda));
  m.impl("grouped_gemm_backward", TORCH_BOX(&grouped_gemm_backward_cuda));
  m.impl("_decode_packed", TORCH_BOX(&decode_packed_cuda));
  m.impl("expert_mlp", TORCH_BOX(&expert_mlp_cuda));
  m.impl("expert_mlp_backward", TORCH_BOX(&expert_mlp_backward_cuda));
  m.impl("expert_mlp_backward_inputs", TORCH_BOX(&expert_mlp_backward_inputs_cuda));
  m.impl("expert_mlp_backward_weights", TORCH_BOX(&expert_mlp_backward_weights_cuda));
}

}  // namespace fmoe_ext
