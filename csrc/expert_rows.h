// What expert_mlp, frozen_mlp and their backwards share on the CPU: ExpertRows, the arguments, checked and
// contiguous, and the rows they mean; and for the backwards GradRows and ScaleGrads.
#pragma once

#include <optional>
#include <vector>

#include "expert_mlp.h"
#include "float_types.h"
#include "frozen_weight.h"
#include "gemm/grouped.h"

namespace fmoe_ext::gemm {

// One number for each row, in the type of sums (Acc).
class RowScales {
 public:
  RowScales(const Kernels& kernels, int64_t num_rows)
      : is_double_(kernels.acc_bytes == 8), data_(checked_product({num_rows, kernels.acc_bytes}), 0) {}

  void set(int64_t row, double value) {
    if (is_double_)
      reinterpret_cast<double*>(data_.data())[row] = value;
    else
      reinterpret_cast<float*>(data_.data())[row] = static_cast<float>(value);
  }
  double get(int64_t row) const {
    return is_double_ ? reinterpret_cast<const double*>(data_.data())[row]
                      : reinterpret_cast<const float*>(data_.data())[row];
  }
  Acc* at(int64_t row) { return advance(reinterpret_cast<Acc*>(data_.data()), row, is_double_ ? 8 : 4); }
  const Acc* at(int64_t row) const {
    return advance(reinterpret_cast<const Acc*>(data_.data()), row, is_double_ ? 8 : 4);
  }

 private:
  bool is_double_;
  std::vector<char> data_;
};

struct ExpertRows {
  Tensor x;
  Tensor w1, w2;  // undefined for a FrozenWeight
  std::optional<Tensor> b1, b2, topk_weights;
  Activation activation;
  const Kernels& kernels;
  int64_t T, K, R, D, E, H, F;      // F: columns of h, H or 2 H
  std::vector<int64_t> bounds;      // [E + 1]
  const int32_t* row_idx;           // [R]
  const int32_t* inverse;           // [T, K]
  std::optional<RowScales> scales;  // topk_weights of each row

  template <class Weight>  // a Tensor, or a FrozenWeight
  ExpertRows(const Tensor& x_, const Tensor& row_idx_, const Tensor& inverse_, const Tensor& offs,
             const Weight& w1_, const std::optional<Tensor>& b1_, const Weight& w2_,
             const std::optional<Tensor>& b2_, const std::optional<Tensor>& topk_weights_,
             int64_t activation_number)
      : x(x_), activation(checked_activation(activation_number)), kernels(kernels_of(x_)) {
    check_cpu(row_idx_, "row_idx");
    check_cpu(inverse_, "inverse");
    check_cpu(offs, "offs");
    check_cpu(w1_, "w1");
    check_cpu(w2_, "w2");
    check_expert_mlp(x_, row_idx_, inverse_, offs, w1_, b1_, w2_, b2_, topk_weights_, activation);
    x = as_contiguous(x_);
    if constexpr (std::is_same_v<Weight, Tensor>) {
      w1 = as_contiguous(w1_);
      w2 = as_contiguous(w2_);
    }
    if (b1_) b1 = as_contiguous(*b1_);
    if (b2_) b2 = as_contiguous(*b2_);
    if (topk_weights_) topk_weights = as_contiguous(*topk_weights_);
    T = inverse_.size(0);
    K = inverse_.size(1);
    R = T * K;
    D = x.size(1);
    E = w1_.size(0);
    F = w1_.size(1);
    H = w2_.size(2);
    bounds = read_offs(as_contiguous(offs), R);
    row_idx_owner_ = as_contiguous(row_idx_);
    inverse_owner_ = as_contiguous(inverse_);
    row_idx = static_cast<const int32_t*>(row_idx_owner_.const_data_ptr());
    inverse = static_cast<const int32_t*>(inverse_owner_.const_data_ptr());
    check_indices();
    if (topk_weights) read_scales();
  }

  int64_t num_rows() const { return bounds.back(); }  // those that reach an expert
  int64_t token(int64_t row) const { return row_idx[row] / K; }
  const Stored* row_of(const Tensor& t, int64_t row, int64_t columns) const {
    return kernels.at(stored(t), row * columns);
  }
  // Once for many rows: asking a tensor for its address costs as much as copying a short row.
  StoredRows rows_of(const Tensor& t) const { return {stored(t), t.size(1), kernels.storage_bytes}; }
  ChunkLimits limits_within(int64_t workspace, int64_t row_bytes) const {
    return gemm::limits_within(workspace, row_bytes, (F + H) * D * kernels.storage_bytes, num_rows());
  }
  const Acc* scale(int64_t row) const { return scales ? scales->at(row) : nullptr; }

  // out [T, D]: each token's rows of y [R, D] summed in the order of its choices.
  Tensor sum_choices(const Tensor& y) const {
    Tensor out = new_large(x, {T, D}, x.scalar_type());
    const StoredRows choices = rows_of(y);
    constexpr int64_t kAhead = 4;  // tokens, whose rows are far apart
    const int64_t bytes = std::min<int64_t>(D * kernels.storage_bytes, 512);
    const auto prefetch = [&](const Stored* row) {
      for (int64_t byte = 0; byte < bytes; byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
    };
    Stored* sums = mutable_stored(out);
    for_each_row_slice(0, T, [&](int64_t begin, int64_t end) {
      std::vector<const Stored*> rows;
      for (int64_t t = begin; t < end; ++t) {
        if (t + kAhead < T)
          for (int64_t k = 0; k < K; ++k) prefetch(choices.at(std::max(inverse[(t + kAhead) * K + k], 0)));
        rows.clear();
        for (int64_t k = 0; k < K; ++k)
          if (inverse[t * K + k] >= 0) rows.push_back(choices.at(inverse[t * K + k]));
        kernels.sum_rows(rows.data(), rows.size(), D, kernels.at(sums, t * D));
      }
    });
    return out;
  }

 private:
  static const Kernels& kernels_of(const Tensor& x) {
    check_cpu(x, "x");
    check_float(x, "x");
    return kernels_for(x.scalar_type());
  }

  void check_indices() const {
    for (int64_t r = 0; r < num_rows(); ++r)
      STD_TORCH_CHECK(row_idx[r] >= 0 && row_idx[r] < R, "row_idx must be in [0, ", R,
                      ") before offs[-1] = ", num_rows(), ", but row_idx[", r, "] is ", row_idx[r]);
    for (int64_t i = 0; i < R; ++i)
      STD_TORCH_CHECK(inverse[i] >= -1 && inverse[i] < num_rows(), "inverse must be in [-1, ", num_rows(),
                      ") (-1 means dropped), but element ", i, " is ", inverse[i]);
  }

  void read_scales() {
    scales.emplace(kernels, R);
    dispatch_float(topk_weights->scalar_type(), [&](auto tag) {
      const auto* weights = static_cast<const decltype(tag)*>(topk_weights->const_data_ptr());
      for (int64_t r = 0; r < num_rows(); ++r) scales->set(r, static_cast<double>(weights[row_idx[r]]));
    });
  }

  Tensor row_idx_owner_, inverse_owner_;
};

// The rows of grad_y, which has one for each token where the choices are combined, else one for each row.
class GradRows {
 public:
  GradRows(const ExpertRows& args, const Tensor& grad_y, bool combine)
      : args_(args), rows_(args.rows_of(grad_y)), combine_(combine) {}
  const Stored* at(int64_t row) const { return rows_.at(combine_ ? args_.token(row) : row); }

 private:
  const ExpertRows& args_;
  const StoredRows rows_;
  const bool combine_;
};

// The gradient of topk_weights: <dO, y> of each row, y not weighted.
class ScaleGrads {
 public:
  ScaleGrads(const ExpertRows& args, const GradRows& grad_rows, bool needed)
      : args_(args), grad_rows_(grad_rows), needed_(needed), sums_(args.kernels, needed ? args.R : 0) {}

  // partial: for each group of columns of the activated rows, one number for each row of the chunk.
  void sum(const Chunk& chunk, const RowScales& partial, int64_t groups) {
    for (const Segment& segment : chunk.segments)
      for (int64_t r = segment.begin; r < segment.end; ++r) {
        double sum = 0;
        for (int64_t group = 0; group < groups; ++group)
          sum += partial.get(group * chunk.rows() + r - chunk.begin);
        if (args_.b2) {
          RowScales product(args_.kernels, 1);
          args_.kernels.dot(grad_rows_.at(r), args_.row_of(*args_.b2, segment.expert, args_.D), args_.D,
                            product.at(0));
          sum += product.get(0);
        }
        sums_.set(r, sum);
      }
  }

  // [T, K] of the dtype of topk_weights; dropped choices get zero. Empty where it is not needed.
  Tensor output() const {
    if (!needed_) return torch::stable::new_empty(args_.x, {0});
    Tensor grad = torch::stable::new_zeros(*args_.topk_weights, {args_.T, args_.K});
    dispatch_float(grad.scalar_type(), [&](auto tag) {
      auto* out = static_cast<decltype(tag)*>(grad.mutable_data_ptr());
      for (int64_t r = 0; r < args_.num_rows(); ++r) out[args_.row_idx[r]] = sums_.get(r);
    });
    return grad;
  }

 private:
  const ExpertRows& args_;
  const GradRows& grad_rows_;
  const bool needed_;
  RowScales sums_;
};

}  // namespace fmoe_ext::gemm
