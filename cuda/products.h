// The products of grouped_gemm and expert_mlp over one set of expert-major rows, each by the kernel that
// select.h names.
#pragma once

#include "device.h"
#include "select.h"

namespace fmoe_ext {

inline GroupedRows plain_rows(const Tensor& t) { return {data(t), t.size(1), nullptr, 1, 0}; }

inline GroupedWeight grouped_weight(const Tensor& weight,
                                    bool along_n) {  // weight [E, N, K], or [E, K, N] when along_n
  return {data(weight), static_cast<int>(weight.size(0)), weight.size(1), weight.size(2), along_n};
}

class Products {
 public:
  // matrices: all that the products read, biases too, contiguous, the rows' type first.
  Products(const Tensor& offs, int64_t num_rows, const std::vector<std::optional<Tensor>>& matrices,
           LaunchStream stream)
      : like_(*matrices.front()),
        offs_(data<int>(offs)),
        num_experts_(static_cast<int>(offs.numel())),
        num_rows_(num_rows),
        stream_(stream),
        num_sms_(current_device_info().num_sms),
        task_{.product = Product::up,  // task_of() sets it
              .dtype = as_dtype(like_),
              .capability = current_device_info().capability,
              .sizes = {},
              .matrices = {},
              .num_rows = num_rows,
              .num_experts = num_experts_} {
    for (const std::optional<Tensor>& matrix : matrices) {
      if (!matrix) continue;
      task_.matrices.push_back(data(matrix));
      for (int64_t d = 1; d < matrix->dim(); ++d) task_.sizes.push_back(matrix->size(d));
    }
  }

  // h = x_rows w1^T + b1 and its activation a; without an h only a is kept.
  void up(CurveKind curve, bool gated, const GroupedRows& x, const Tensor& w1,
          const std::optional<Tensor>& b1, const std::optional<Tensor>& h, const Tensor& a) const {
    const int64_t H = a.size(1);
    Task task = task_of(Product::up);
    task.gated = gated;
    task.costly = !gated && curve != CurveKind::relu && curve != CurveKind::relu2;
    const Entry* entry = fmoe_ext::select(task);
    if (is_hopper(entry)) {
      launch_up_sm90(dtype(), curve, gated, x, offs_, data(w1), data(b1), num_rows_, num_experts_, narrow(H),
                     data(h), data(a), grid(entry), stream_);
      return;
    }
    const Tensor pre = h ? *h : torch::stable::new_empty(like_, {num_rows_, w1.size(1)});
    launch_rows_by_weight(dtype(), x, grouped_weight(w1, false), offs_, num_rows_, data(b1), RowScale{},
                          data(pre), stream_);
    launch_activation(dtype(), curve, gated, data(pre), offs_, num_experts_, num_rows_, H, data(a), stream_);
  }

  // out = scale (rows weight^T + bias), weight [E, N, K]
  void rows_by_weight(const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& bias,
                      const RowScale& scale, const Tensor& out) const {
    const Entry* entry = select(Product::rows_by_weight, weight.size(1), weight.size(2));
    if (is_hopper(entry))
      launch_rows_by_weight_sm90(dtype(), data(rows), offs_, data(weight), num_rows_, num_experts_,
                                 narrow(weight.size(1)), narrow(weight.size(2)), data(bias), scale, data(out),
                                 grid(entry), stream_);
    else
      launch_rows_by_weight(dtype(), plain_rows(rows), grouped_weight(weight, false), offs_, num_rows_,
                            data(bias), scale, data(out), stream_);
  }

  // Of dA = dy_rows w2: dh and scaled_a, and, if wanted, dweights, which is zero on entry.
  void grad_hidden(CurveKind curve, bool gated, const GroupedRows& dy, const ActivationRows& rows,
                   const Tensor& w2, const std::optional<Tensor>& b2, const Tensor& dh,
                   const Tensor& scaled_a, const std::optional<Tensor>& dweights) const {
    const int64_t D = w2.size(1), H = w2.size(2);
    const Entry* entry = select(Product::grad_hidden, H, D);
    if (!is_hopper(entry)) {
      const Tensor da = torch::stable::new_empty(like_, {num_rows_, H});
      launch_rows_by_weight(dtype(), dy, grouped_weight(w2, true), offs_, num_rows_, nullptr, RowScale{},
                            data(da), stream_);
      launch_activation_backward(dtype(), curve, gated, data(da), rows, dy.data, data(b2), H, D, data(dh),
                                 data(scaled_a), data(dweights), stream_);
      return;
    }
    const int64_t num_dots = num_hidden_dots_sm90(narrow(H), grid(entry));
    std::optional<Tensor> dots;
    if (dweights) dots = torch::stable::new_empty(like_, {num_rows_, num_dots}, ScalarType::Float);
    launch_grad_hidden_sm90(dtype(), curve, gated, dy.data, rows, data(w2), narrow(D), narrow(H), data(dh),
                            data(scaled_a), data<float>(dots), grid(entry), stream_);
    if (dweights)
      launch_sum_dots(dtype(), rows, data<float>(dots), num_dots, dy.data, data(b2), D, data<float>(dweights),
                      stream_);
  }

  // out[e] = a^T b over the rows of expert e; or main_grad, if given, is increased by it.
  void grad_weight(const GroupedRows& a, const GroupedRows& b, const Tensor& out,
                   const std::optional<Tensor>& main_grad) {
    const WeightGrad grad{data(main_grad ? *main_grad : out), main_grad.has_value()};
    Task task = task_of(Product::grad_weight);
    task.matrices.push_back(grad.data);
    task.shared_tiles = ((b.index ? b : a).width - 1) / kWeightTileGathered + 1;
    const Entry* entry = fmoe_ext::select(task);
    if (is_hopper(entry))
      launch_grad_weight_sm90(dtype(), a, b, offs_, heaviest_first(), num_experts_, num_rows_, grad,
                              grid(entry), stream_);
    else
      launch_rows_by_rows(dtype(), a, b, offs_, num_experts_, num_rows_, grad, stream_);
  }

  // out = rows weight, weight [E, N, K]
  void grad_input(const GroupedRows& rows, const Tensor& weight, const Tensor& out) const {
    const Entry* entry = select(Product::grad_input, weight.size(2), weight.size(1));
    if (is_hopper(entry))
      launch_grad_input_sm90(dtype(), rows.data, offs_, data(weight), num_rows_, num_experts_,
                             narrow(weight.size(2)), narrow(weight.size(1)), data(out), grid(entry), stream_);
    else
      launch_rows_by_weight(dtype(), rows, grouped_weight(weight, true), offs_, num_rows_, nullptr,
                            RowScale{}, data(out), stream_);
  }

  // out = rows weight^T + bias, or rows weight when along_n, of a weight in MXFP4; false where no kernel is
  // on and fits.
  bool by_mxfp4(const Tensor& rows, const PackedWeight& weight, const std::optional<Tensor>& bias,
                const Tensor& out) const {
    Task task = task_of(weight.along_n ? Product::grad_by_mxfp4 : Product::rows_by_mxfp4);
    task.sizes = {weight.rows, weight.columns};
    task.matrices.push_back(weight.data);
    const Entry* entry = fmoe_ext::select(task);
    if (!entry) return false;
    if (is_hopper(entry))
      launch_rows_by_mxfp4_sm90(data(rows), weight, offs_, num_rows_, data(bias), data(out), grid(entry),
                                stream_);
    else
      launch_rows_by_mxfp4(plain_rows(rows), weight, offs_, num_rows_, data(bias), data(out), stream_);
    return true;
  }

  // out[e] = the sum of the rows of expert e, times their factors
  void grad_bias(const GroupedRows& rows, const RowScale& scale, const Tensor& out) const {
    launch_sum_rows(dtype(), rows, offs_, num_experts_, num_rows_, scale, data(out), stream_);
  }

 private:
  Task task_of(Product product) const {
    Task task = task_;
    task.product = product;
    return task;
  }
  const Entry* select(Product product, int64_t N = 0, int64_t K = 0) const {
    Task task = task_of(product);
    task.N = N;
    task.K = K;
    return fmoe_ext::select(task);
  }
  Grid grid(const Entry* entry) const { return grid_of(*entry, num_sms_); }
  Dtype dtype() const { return task_.dtype; }
  const int* heaviest_first() {
    if (!heaviest_first_) {
      heaviest_first_ = torch::stable::new_empty(like_, {num_experts_}, ScalarType::Int);
      launch_heaviest_first(offs_, num_experts_, num_rows_, data<int>(heaviest_first_), stream_);
    }
    return data<int>(heaviest_first_);
  }
  static int narrow(int64_t width) { return static_cast<int>(width); }  // select.h lets no larger one pass

  Tensor like_;
  const int* offs_;
  int num_experts_;
  int64_t num_rows_;
  LaunchStream stream_;
  int num_sms_;
  Task task_;                             // but for its product
  std::optional<Tensor> heaviest_first_;  // of launch_heaviest_first, for both weight gradients of a backward
};

}  // namespace fmoe_ext
