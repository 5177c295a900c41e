// Argument checks of expert_mlp, frozen_mlp and their backwards, for every device. Devices and contiguity are
// the caller's. Values of offs and of the indices are not checked here: the CPU raises for those out of
// range, CUDA clamps offs to the rows and drops choices whose index is out of range.
#pragma once

#include <optional>
#include <vector>

#include "activation.h"
#include "checks.h"

namespace fmoe_ext {

inline Activation checked_activation(int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number < kNumActivations, "activation must be in [0, ", kNumActivations,
                  "), a place in ops.ACTIVATIONS, but got ", number);
  return kActivations[number];
}

template <class Weight>  // a Tensor, or a FrozenWeight
void check_expert_mlp(const Tensor& x, const Tensor& row_idx, const Tensor& inverse, const Tensor& offs,
                      const Weight& w1, const std::optional<Tensor>& b1, const Weight& w2,
                      const std::optional<Tensor>& b2, const std::optional<Tensor>& topk_weights,
                      const Activation& activation) {
  check_float(x, "x");
  check_dim(x, 2, "x", "[T, D]");
  check_int32(inverse, "inverse");
  check_dim(inverse, 2, "inverse", "[T, K]");
  check_size(inverse, 0, x.size(0), "inverse", "[T, K]");
  check_int32(row_idx, "row_idx");
  check_dim(row_idx, 1, "row_idx", "[T * K]");
  check_size(row_idx, 0, inverse.numel(), "row_idx", "[T * K]");
  STD_TORCH_CHECK(inverse.numel() <= INT32_MAX, "inverse must have fewer than 2^31 elements, but got shape ",
                  shape_text(inverse));

  check_same_dtype(w1, x, "w1", "x");
  check_same_dtype(w2, x, "w2", "x");
  check_dim(w2, 3, "w2", "[E, D, H]");
  check_size(w2, 1, x.size(1), "w2", "[E, D, H]");
  const char* w1_shape = activation.gated ? "[E, 2 * H, D]" : "[E, H, D]";
  check_dim(w1, 3, "w1", w1_shape);
  check_size(w1, 0, w2.size(0), "w1", w1_shape);
  check_size(w1, 1, w2.size(2) * (activation.gated ? 2 : 1), "w1", w1_shape);
  check_size(w1, 2, x.size(1), "w1", w1_shape);
  check_width(w1, 0, "w1", w1_shape);
  check_width(w1, 1, "w1", w1_shape);
  check_width(x, 1, "x", "[T, D]");
  check_int32(offs, "offs");
  check_dim(offs, 1, "offs", "[E]");
  check_size(offs, 0, w1.size(0), "offs", "[E]");

  const auto check_bias = [&](const std::optional<Tensor>& bias, int64_t size, const char* name,
                              const char* shape) {
    if (!bias) return;
    check_same_dtype(*bias, x, name, "x");
    check_dim(*bias, 2, name, shape);
    check_size(*bias, 0, w1.size(0), name, shape);
    check_size(*bias, 1, size, name, shape);
  };
  check_bias(b1, w1.size(1), "b1", activation.gated ? "[E, 2 * H]" : "[E, H]");
  check_bias(b2, w2.size(1), "b2", "[E, D]");

  if (!topk_weights) return;
  const auto dtype = topk_weights->scalar_type();
  STD_TORCH_CHECK(
      dtype == x.scalar_type() || (dtype == ScalarType::Float && x.scalar_type() != ScalarType::Double),
      "topk_weights must have the dtype of x (", dtype_text(x), ") or float32, but got ",
      dtype_text(*topk_weights));
  check_dim(*topk_weights, 2, "topk_weights", "[T, K]");
  check_size(*topk_weights, 0, inverse.size(0), "topk_weights", "[T, K]");
  check_size(*topk_weights, 1, inverse.size(1), "topk_weights", "[T, K]");
}

// Which gradients of expert_mlp are asked for, in the order of the results.
struct ExpertMlpNeeds {
  bool dx, dw1, db1, dw2, db2, dtopk_weights;

  explicit ExpertMlpNeeds(const std::vector<bool>& needs, const std::optional<Tensor>& topk_weights) {
    STD_TORCH_CHECK(needs.size() == 6,
                    "needs must have 6 entries (dx, dw1, db1, dw2, db2, dtopk_weights), but got ",
                    needs.size());
    dx = needs[0];
    dw1 = needs[1];
    db1 = needs[2];
    dw2 = needs[3];
    db2 = needs[4];
    dtopk_weights = needs[5];
    STD_TORCH_CHECK(!dtopk_weights || topk_weights,
                    "needs asks for the gradient of topk_weights, which is None");
  }
  bool dh() const { return dx || dw1 || db1; }
  bool hidden() const { return dh() || dw2 || dtopk_weights; }  // any that goes through the activation
};

// What a backward of expert_mlp or frozen_mlp checks of grad_y after check_expert_mlp.
inline void check_expert_mlp_grad(const Tensor& grad_y, const Tensor& x, const Tensor& inverse,
                                  bool combine) {
  check_gradient_mode("a backward of expert_mlp or frozen_mlp",
                      "ops.expert_mlp or fmoe_ext.frozen.frozen_mlp");
  const char* grad_shape = combine ? "[T, D]" : "[R, D]";
  check_same_dtype(grad_y, x, "grad_y", "x");
  check_dim(grad_y, 2, "grad_y", grad_shape);
  check_size(grad_y, 0, combine ? inverse.size(0) : inverse.numel(), "grad_y", grad_shape);
  check_size(grad_y, 1, x.size(1), "grad_y", grad_shape);
}

// For a tensor with one row for each choice: h, its gradient, the activated rows, and u of frozen_mlp.
inline void check_hidden_rows(const Tensor& rows, const Tensor& x, const Tensor& inverse, int64_t width,
                              const char* name, const char* shape) {
  check_same_dtype(rows, x, name, "x");
  check_dim(rows, 2, name, shape);
  check_size(rows, 0, inverse.numel(), name, shape);
  check_size(rows, 1, width, name, shape);
}

// dh and scaled_a, which the backward of the weights takes from the backward of the inputs; each is checked
// only where it is needed.
inline void check_rows_of_inputs_half(const Tensor& dh, const Tensor& scaled_a, const Tensor& x,
                                      const Tensor& inverse, const Tensor& w1, const Tensor& w2,
                                      const ExpertMlpNeeds& needs) {
  if (needs.dw1 || needs.db1) check_hidden_rows(dh, x, inverse, w1.size(1), "dh", "[R, F]");
  if (needs.dw2) check_hidden_rows(scaled_a, x, inverse, w2.size(2), "scaled_a", "[R, H]");
}

inline void check_expert_main_grads(const Tensor& w1, const Tensor& w2, const std::optional<Tensor>& main_dw1,
                                    const std::optional<Tensor>& main_dw2) {
  if (main_dw1) check_main_grad(*main_dw1, w1, "main_dw1", "w1");
  if (main_dw2) check_main_grad(*main_dw2, w2, "main_dw2", "w2");
}

}  // namespace fmoe_ext
