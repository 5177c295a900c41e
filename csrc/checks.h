// Argument checks for operators on every device. Their errors name the argument, what is needed and what was
// given.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace fmoe_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

inline const char* dtype_text(const Tensor& t) { return torch::headeronly::toString(t.scalar_type()); }

inline void check_cpu(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.defined(), name, " must be a tensor, but got None");
  STD_TORCH_CHECK(t.is_cpu(), name,
                  " must be on the CPU like the other arguments, but it is on another device");
}

template <class T>  // a Tensor, or a FrozenWeight
void check_dim(const T& t, int64_t dim, const char* name, const char* shape) {
  STD_TORCH_CHECK(t.dim() == dim, name, " must have shape ", shape, ", but got shape ", shape_text(t));
}

template <class T>
void check_size(const T& t, int64_t d, int64_t expected, const char* name, const char* shape) {
  STD_TORCH_CHECK(t.size(d) == expected, name, " must have shape ", shape, " with size ", expected,
                  " in dimension ", d, ", but got shape ", shape_text(t));
}

inline void check_float(const Tensor& t, const char* name) {
  const auto s = t.scalar_type();
  STD_TORCH_CHECK(
      s == ScalarType::Float || s == ScalarType::Double || s == ScalarType::BFloat16 || s == ScalarType::Half,
      name, " must be float64, float32, bfloat16 or float16, but got ", dtype_text(t));
}

inline void check_same_dtype(const Tensor& t, const Tensor& other, const char* name, const char* other_name) {
  STD_TORCH_CHECK(t.scalar_type() == other.scalar_type(), name, " must have the dtype of ", other_name, " (",
                  dtype_text(other), "), but got ", dtype_text(t));
}

inline void check_index_dtype(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long || t.scalar_type() == ScalarType::Int, name,
                  " must be int64 or int32, but got ", dtype_text(t));
}

inline void check_int32(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int, name, " must be int32, but got ", dtype_text(t));
}

// For operators that compute gradients. Autograd knows no gradient of theirs, and would take what they return
// for a constant; it calls them without gradient mode, and a registered refusal would take host time at each
// of those calls.
inline void check_gradient_mode(const char* operators, const char* function) {
  STD_TORCH_CHECK(!aoti_torch_grad_mode_is_enabled(), operators,
                  " cannot be differentiated: call it under torch.no_grad(), or differentiate fmoe_ext.",
                  function);
}

// For a tensor that the gradient of `weight` is added to.
inline void check_main_grad(const Tensor& main_grad, const Tensor& weight, const char* name,
                            const char* weight_name) {
  const bool is_double = weight.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(main_grad.scalar_type() == (is_double ? ScalarType::Double : ScalarType::Float), name,
                  " must be ", is_double ? "float64" : "float32", " for ", weight_name, " of ",
                  dtype_text(weight), ", but got ", dtype_text(main_grad));
  STD_TORCH_CHECK(shape_text(main_grad) == shape_text(weight), name, " must have the shape of ", weight_name,
                  " ", shape_text(weight), ", but got shape ", shape_text(main_grad));
  STD_TORCH_CHECK(main_grad.is_contiguous(), name, " must be contiguous, since it is added to in place");
}

// Sizes come from the caller: what is allocated with them is computed here, so that a product that does not
// fit into 64 bits is an error and never a small number.
inline int64_t checked_product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  bool overflow = false;
  for (const int64_t size : sizes) overflow |= __builtin_mul_overflow(product, size, &product);
  std::string text;
  if (overflow)
    for (const int64_t size : sizes) text += (text.empty() ? "" : " * ") + std::to_string(size);
  STD_TORCH_CHECK(!overflow, "the sizes are too large: ", text, " does not fit into 64 bits");
  return product;
}

inline int64_t checked_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  STD_TORCH_CHECK(!__builtin_add_overflow(a, b, &sum), "the sizes are too large: ", a, " + ", b,
                  " does not fit into 64 bits");
  return sum;
}

// For sizes that are not rows: what every device can count in. With it, no product of two of them overflows,
// nor the bytes of a row of all operands together.
template <class T>
void check_width(const T& t, int64_t d, const char* name, const char* shape) {
  STD_TORCH_CHECK(t.size(d) <= INT32_MAX, name, " must have shape ", shape,
                  " with fewer than 2^31 in dimension ", d, ", but got shape ", shape_text(t));
}

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

}  // namespace fmoe_ext
