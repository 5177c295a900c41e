// The products of grouped_gemm and expert_mlp over one set of expert-major rows: ops_gemm_cuda.cpp makes one
// Products for each call of an operator. Each product is computed by the kernel that select.h names, or,
// where it was the faster one on this device (gpu/races.py), by torch's grouped_mm between our kernels: rows
// are gathered before it, and biases, factors, activations and main gradients are applied after it.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>

#include "device.h"
#include "select.h"

namespace fmoe_ext {

// Rows as a kernel reads them, and the tensor that holds them.
struct TensorRows : GroupedRows {
  Tensor tensor;
};
inline TensorRows plain_rows(const Tensor& t) { return {{data(t), t.size(1), nullptr, 1, 0}, t}; }

inline GroupedWeight grouped_weight(const Tensor& weight,
                                    bool along_n) {  // weight [E, N, K], or [E, K, N] when along_n
  return {data(weight), static_cast<int>(weight.size(0)), weight.size(1), weight.size(2), along_n};
}

inline Tensor torch_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs, bool a_transposed,
                               bool b_transposed) {
  const auto from = [](const auto& value) { return torch::stable::detail::from(value); };
  std::array<StableIValue, 5> stack{from(a), from(b), from(offs), from(a_transposed), from(b_transposed)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fmoe_ext::_torch_grouped_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}
inline bool tf32_allowed() {
  std::array<StableIValue, 1> stack{};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fmoe_ext::_tf32_allowed", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<bool>(stack[0]);
}

class Products {
 public:
  // offs: must outlive the object. matrices: all that the products read, biases too, contiguous; the first
  // has the rows' dtype.
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

  // h = x_rows w1^T + b1 and its activation a, [R, H]; without save_h, h is there only if a kernel needed it.
  struct Up {
    std::optional<Tensor> h;
    Tensor a;
  };
  Up up(CurveKind curve, bool gated, const TensorRows& x, const Tensor& w1, const std::optional<Tensor>& b1,
        bool save_h) {
    const int64_t F = w1.size(1), H = gated ? F / 2 : F;
    const Task task = task_of(Product::up);
    Up out{std::nullopt, new_rows(H)};
    if (by_torch(task, TorchProduct::up)) {
      out.h = torch_rows(x, w1, false, b1, RowScale{});
    } else {
      const Entry* entry = fmoe_ext::select(task);
      if (save_h || !entry) out.h = new_rows(F);
      if (entry) {
        launch_up_sm90(dtype(), curve, gated, x, offs_, data(w1), data(b1), num_rows_, num_experts_,
                       narrow(H), data(out.h), data(out.a), grid(entry), stream_);
        return out;
      }
      launch_rows_by_weight(dtype(), x, grouped_weight(w1, false), offs_, num_rows_, data(b1), RowScale{},
                            data(out.h), stream_);
    }
    launch_activation(dtype(), curve, gated, data(out.h), offs_, num_experts_, num_rows_, H, data(out.a),
                      stream_);
    return out;
  }

  // scale (rows weight^T + bias) [R, N], weight [E, N, K]
  Tensor rows_by_weight(const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& bias,
                        const RowScale& scale) {
    return rows_by(rows, grouped_weight(weight, false), weight, bias, scale);
  }
  // rows weight [R, K], weight [E, N, K]
  Tensor grad_input(const Tensor& rows, const Tensor& weight) {
    return rows_by(rows, grouped_weight(weight, true), weight, std::nullopt, RowScale{});
  }

  // Of dA = dy_rows w2: dh and scaled_a, and, if wanted, dweights, which is zero on entry.
  void grad_hidden(CurveKind curve, bool gated, const TensorRows& dy, const ActivationRows& rows,
                   const Tensor& w2, const std::optional<Tensor>& b2, const Tensor& dh,
                   const Tensor& scaled_a, const std::optional<Tensor>& dweights) {
    const int64_t D = w2.size(1), H = w2.size(2);
    const Task task = task_of(Product::grad_hidden);
    const bool torchs = by_torch(task, TorchProduct::grad_hidden);
    const Entry* entry = torchs ? nullptr : fmoe_ext::select(task);
    if (!entry) {
      const Tensor da = torchs ? torch_rows(dy, w2, true, std::nullopt, RowScale{}) : new_rows(H);
      if (!torchs)
        launch_rows_by_weight(dtype(), dy, grouped_weight(w2, true), offs_, num_rows_, nullptr, RowScale{},
                              data(da), stream_);
      launch_activation_backward(dtype(), curve, gated, data(da), rows, dy.data, data(b2), H, D, data(dh),
                                 data(scaled_a), data(dweights), stream_);
      return;
    }
    const int64_t num_dots = num_hidden_dots_sm90(narrow(H));
    std::optional<Tensor> dots;
    if (dweights) dots = torch::stable::new_empty(like_, {num_rows_, num_dots}, ScalarType::Float);
    launch_grad_hidden_sm90(dtype(), curve, gated, dy.data, rows, data(w2), narrow(D), narrow(H), data(dh),
                            data(scaled_a), data<float>(dots), grid(entry), stream_);
    if (dweights)
      launch_sum_dots(dtype(), rows, data<float>(dots), num_dots, dy.data, data(b2), D, data<float>(dweights),
                      stream_);
  }

  // a^T b over the rows of each expert, [E, M, N]; or main_grad, if given, is increased by it, and the result
  // is empty. Torch's product is rounded to the rows' type before it is added.
  Tensor grad_weight(const TensorRows& a, const TensorRows& b, const std::optional<Tensor>& main_grad) {
    Task task = task_of(Product::grad_weight);
    const Tensor none = torch::stable::new_empty(like_, {0});
    if (by_torch(task, main_grad ? TorchProduct::main_grad : TorchProduct::grad_weight)) {
      const Tensor product = torch_grouped_mm(gathered(a), gathered(b), clamped_offs(), true, false);
      launch_finish_weight_grad(dtype(), data(product), offs_, num_experts_, num_rows_, a.width * b.width,
                                main_grad ? data_to_write<float>(*main_grad) : nullptr, stream_);
      return main_grad ? none : product;
    }
    const Tensor out = main_grad ? none : torch::stable::new_empty(like_, {num_experts_, a.width, b.width});
    const WeightGrad grad{main_grad ? data_to_write(*main_grad) : data(out), main_grad.has_value()};
    task.matrices.push_back(grad.data);
    const Entry* entry = fmoe_ext::select(task);
    if (entry)
      launch_grad_weight_sm90(dtype(), a, b, offs_, heaviest_first(), num_experts_, num_rows_, grad,
                              grid(entry), stream_);
    else
      launch_rows_by_rows(dtype(), a, b, offs_, num_experts_, num_rows_, grad, stream_);
    return out;
  }

  // out[e] = the sum of the rows of expert e, times their factors
  void grad_bias(const GroupedRows& rows, const RowScale& scale, const Tensor& out) const {
    launch_sum_rows(dtype(), rows, offs_, num_experts_, num_rows_, scale, data(out), stream_);
  }

 private:
  Task task_of(Product product, int64_t N = 0, int64_t K = 0) const {
    Task task = task_;
    task.product = product;
    task.N = N;
    task.K = K;
    return task;
  }
  Tensor new_rows(int64_t width) const { return torch::stable::new_empty(like_, {num_rows_, width}); }
  // The product by a weight; of: the same weight, for torch.
  Tensor rows_by(const Tensor& rows, const GroupedWeight& weight, const Tensor& of,
                 const std::optional<Tensor>& bias, const RowScale& scale) {
    const bool along_n = weight.along_n;
    const int64_t N = along_n ? weight.columns : weight.rows, K = along_n ? weight.rows : weight.columns;
    const Task task = task_of(along_n ? Product::grad_input : Product::rows_by_weight, N, K);
    if (by_torch(task, along_n ? TorchProduct::grad_input : TorchProduct::rows_by_weight))
      return torch_rows(plain_rows(rows), of, along_n, bias, scale);
    const Entry* entry = fmoe_ext::select(task);
    const Tensor out = new_rows(N);
    if (entry)
      launch_rows_by_weight_sm90(dtype(), data(rows), weight, offs_, num_rows_, data(bias), scale, data(out),
                                 grid(entry), stream_);
    else
      launch_rows_by_weight(dtype(), plain_rows(rows), weight, offs_, num_rows_, data(bias), scale, data(out),
                            stream_);
    return out;
  }
  bool by_torch(const Task& task, TorchProduct product) const {
    return torch_takes(task, product, [&] { return is_capturing(stream_); }, tf32_allowed);
  }
  // The rows themselves, in memory.
  Tensor gathered(const TensorRows& rows) const {
    if (!rows.index) return rows.tensor;
    const Tensor out = new_rows(rows.width);
    launch_permute(rows.data, rows.index, num_rows_, rows.num_indexed, rows.divisor,
                   rows.width * static_cast<int64_t>(like_.element_size()), data(out), stream_);
    return out;
  }
  // scale (rows weight^T + bias), or rows weight when along_n, by torch; the product is rounded before the
  // bias is added.
  Tensor torch_rows(const TensorRows& rows, const Tensor& weight, bool along_n,
                    const std::optional<Tensor>& bias, const RowScale& scale) {
    const Tensor y = torch_grouped_mm(gathered(rows), weight, clamped_offs(), false, !along_n);
    launch_finish_rows(dtype(), data(y), data<int>(clamped_offs()), num_experts_, num_rows_, y.size(1),
                       data(bias), scale, stream_);
    return y;
  }
  const Tensor& clamped_offs() {
    if (!clamped_offs_) {
      clamped_offs_ = torch::stable::new_empty(like_, {num_experts_}, ScalarType::Int);
      launch_clamp_offs(offs_, num_experts_, num_rows_, data<int>(*clamped_offs_), stream_);
    }
    return *clamped_offs_;
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
  std::optional<Tensor> clamped_offs_;    // of launch_clamp_offs, for all of torch's products
  std::optional<Tensor> heaviest_first_;  // of launch_heaviest_first, for both weight gradients of a backward
};

}  // namespace fmoe_ext
