// Argument checks of grouped_gemm, frozen_gemm and the backward, for every device. Values of offs are not
// checked here: the CPU raises for those that fall or leave the rows, CUDA forces them into the rows.
#pragma once

#include <optional>
#include <vector>

#include "checks.h"

namespace fmoe_ext {

// offs may be left out where all of the rows belong to one expert.
template <class Weight>
void check_offs(const std::optional<Tensor>& offs, const Tensor& rows, const Weight& weight,
                const char* name) {
  STD_TORCH_CHECK(rows.size(0) <= INT32_MAX, name,
                  " must have fewer than 2^31 rows (offsets are int32), but got shape ", shape_text(rows));
  STD_TORCH_CHECK(offs || weight.size(0) == 1, "offs must be given: weight is of ", weight.size(0),
                  " experts");
  if (!offs) return;
  check_int32(*offs, "offs");
  check_dim(*offs, 1, "offs", "[E]");
  check_size(*offs, 0, weight.size(0), "offs", "[E]");
}

template <class Weight>  // a Tensor, or a FrozenWeight
void check_grouped_gemm(const Tensor& x, const Weight& weight, const std::optional<Tensor>& offs,
                        const std::optional<Tensor>& bias) {
  check_float(x, "x");
  check_dim(x, 2, "x", "[R, D]");
  check_same_dtype(weight, x, "weight", "x");
  check_dim(weight, 3, "weight", "[E, N, D]");
  check_size(weight, 2, x.size(1), "weight", "[E, N, D]");
  check_width(x, 1, "x", "[R, D]");
  check_width(weight, 0, "weight", "[E, N, D]");
  check_width(weight, 1, "weight", "[E, N, D]");
  check_offs(offs, x, weight, "x");
  if (!bias) return;
  check_same_dtype(*bias, x, "bias", "x");
  check_dim(*bias, 2, "bias", "[E, N]");
  check_size(*bias, 0, weight.size(0), "bias", "[E, N]");
  check_size(*bias, 1, weight.size(1), "bias", "[E, N]");
}

// Which gradients of grouped_gemm are asked for, in the order of the results.
struct GroupedGemmNeeds {
  bool dx, dweight, dbias;

  explicit GroupedGemmNeeds(const std::vector<bool>& needs) {
    STD_TORCH_CHECK(needs.size() == 3, "needs must have 3 entries (dx, dweight, dbias), but got ",
                    needs.size());
    dx = needs[0];
    dweight = needs[1];
    dbias = needs[2];
  }
};

inline void check_grouped_gemm_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                        const Tensor& offs, const std::optional<Tensor>& main_dweight) {
  check_gradient_mode("grouped_gemm_backward", "ops.grouped_gemm");
  check_grouped_gemm(x, weight, offs, std::nullopt);
  check_same_dtype(grad_y, x, "grad_y", "x");
  check_dim(grad_y, 2, "grad_y", "[R, N]");
  check_size(grad_y, 0, x.size(0), "grad_y", "[R, N]");
  check_size(grad_y, 1, weight.size(1), "grad_y", "[R, N]");
  if (main_dweight) check_main_grad(*main_dweight, weight, "main_dweight", "weight");
}

}  // namespace fmoe_ext
