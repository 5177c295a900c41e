// permute, unpermute and unpermute_backward on the CPU (permute.h has the shapes).
// permute: out[r] = x[row_idx[r] / K]. unpermute: out[t] = sum over k of topk_weights[t, k] y[inverse[t, k]].
// All three operators are bound by memory: permute and unpermute_backward stream large outputs
// (stream_row.h).

#include "permute.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cpu_features.h"
#include "float_types.h"
#include "huge_pages.h"
#include "parallel.h"
#include "stream_row.h"

namespace fmoe_ext {
namespace {

constexpr int64_t kJobBytes = 256 << 10;

int64_t rows_per_job(int64_t row_bytes) {
  return std::max<int64_t>(1, kJobBytes / std::max<int64_t>(row_bytes, 1));
}

template <class Body>
void for_each_row_range(int64_t num_rows, int64_t row_bytes, const Body& body) {
  const int64_t step = rows_per_job(row_bytes);
  for_each_job((num_rows + step - 1) / step,
               [&](int64_t job) { body(job * step, std::min(num_rows, (job + 1) * step)); });
}

void check_all_cpu(const Tensor& data, const char* name, const Tensor& row_idx, const Tensor& inverse) {
  check_cpu(data, name);
  check_cpu(row_idx, "row_idx");
  check_cpu(inverse, "inverse");
}

// row_idx [R] and inverse [T, K] that passed check_routing.
struct Routing {
  Routing(const Tensor& row_idx, const Tensor& inverse) {
    row_idx_ = as_contiguous(row_idx);
    inverse_ = as_contiguous(inverse);
    num_rows = row_idx_.numel();
    num_tokens = inverse_.size(0);
    num_choices = inverse_.size(1);
    row_idx_data = static_cast<const int32_t*>(row_idx_.const_data_ptr());
    inverse_data = static_cast<const int32_t*>(inverse_.const_data_ptr());
  }

  // The flat choice t * K + k of row r, or -1.
  int64_t choice(int64_t r) const {
    const int64_t c = row_idx_data[r];
    if (c < -1 || c >= num_tokens * num_choices)
      throw_bad("row_idx", c, r, num_tokens * num_choices, "T * K");
    return c;
  }

  // The row of flat choice c, or -1.
  int64_t row(int64_t c) const {
    const int64_t r = inverse_data[c];
    if (r < -1 || r >= num_rows) throw_bad("inverse", r, c, num_rows, "R");
    return r;
  }

  int64_t num_rows, num_tokens, num_choices;

 private:
  [[gnu::cold, gnu::noinline]] static void throw_bad(const char* name, int64_t value, int64_t i, int64_t end,
                                                     const char* end_name) {
    STD_TORCH_CHECK(false, name, " must be in [-1, ", end_name, ") = [-1, ", end, "), but element ", i,
                    " is ", value);
  }

  Tensor row_idx_, inverse_;
  const int32_t* row_idx_data;
  const int32_t* inverse_data;
};

// The weights in the type that sums are computed in; nothing when there are none (every weight is 1).
std::optional<Tensor> wide_weights(const std::optional<Tensor>& topk_weights, const Tensor& rows) {
  if (!topk_weights) return std::nullopt;
  check_cpu(*topk_weights, "topk_weights");
  const auto dtype = rows.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor given = as_contiguous(*topk_weights);
  if (given.scalar_type() == dtype) return given;
  // A serial loop: waking all threads for so little, as torch's conversion does, takes longer.
  Tensor wide = torch::stable::new_empty(given, {given.size(0), given.size(1)}, dtype);
  dispatch_float(given.scalar_type(), [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(given.const_data_ptr());
    if (dtype == ScalarType::Double)
      std::copy_n(from, given.numel(), static_cast<double*>(wide.mutable_data_ptr()));
    else
      std::copy_n(from, given.numel(), static_cast<float*>(wide.mutable_data_ptr()));
  });
  return wide;
}

template <class T>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

Tensor permute_cpu(Tensor x, Tensor row_idx, Tensor inverse) {
  check_all_cpu(x, "x", row_idx, inverse);
  check_permute(x, row_idx, inverse);
  const Routing routing(row_idx, inverse);
  const Tensor input = as_contiguous(x);
  Tensor out = torch::stable::new_empty(input, {routing.num_rows, input.size(1)});
  const int64_t row_bytes = input.size(1) * input.element_size();
  advise_huge_pages(out.mutable_data_ptr(), routing.num_rows * row_bytes);
  const RowWriter writer(out.mutable_data_ptr(), routing.num_rows, row_bytes);
  const auto* source = static_cast<const char*>(input.const_data_ptr());
  for_each_row_range(routing.num_rows, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t c = routing.choice(r);
      if (c < 0)
        writer.zero(r);
      else
        writer.copy(r, source + c / routing.num_choices * row_bytes);
    }
    writer.finish();
  });
  return out;
}

// One row of the sum: out [D] = sum over i of weights[i] * rows[i] [D], in the order of i.
template <class T, class W = compute_t<T>>
void sum_rows(const T* const* rows, const W* weights, int64_t num, int64_t begin, int64_t width, T* out) {
  constexpr int64_t kBlock = 128;
  for (int64_t d = begin; d < width; d += kBlock) {
    const int64_t size = std::min(kBlock, width - d);
    W sum[kBlock] = {};
    for (int64_t i = 0; i < num; ++i)
      for (int64_t j = 0; j < size; ++j) sum[j] += weights[i] * static_cast<W>(rows[i][d + j]);
    for (int64_t j = 0; j < size; ++j) out[d + j] = static_cast<T>(sum[j]);
  }
}

// scaled [D] = weight * grad [D]; returns the dot product of grad and y [D], 0 without y.
template <class T, class W = compute_t<T>>
W scale_and_dot_few(const T* grad, W weight, const T* y, int64_t begin, int64_t width, T* scaled) {
  for (int64_t d = begin; d < width; ++d) scaled[d] = static_cast<T>(weight * static_cast<W>(grad[d]));
  W dot = 0;
  if (y != nullptr)
    for (int64_t d = begin; d < width; ++d) dot += static_cast<W>(grad[d]) * static_cast<W>(y[d]);
  return dot;
}

// The same, summed in kSums parts: the error grows with D / kSums only, and no addition waits for the last.
template <class T, class W = compute_t<T>>
W scale_and_dot(const T* grad, W weight, const T* y, int64_t width, T* scaled) {
  constexpr int64_t kSums = 32;
  W sums[kSums] = {};
  int64_t d = 0;
  for (; d + kSums <= width; d += kSums) {
    for (int64_t j = 0; j < kSums; ++j) scaled[d + j] = static_cast<T>(weight * static_cast<W>(grad[d + j]));
    if (y != nullptr)
      for (int64_t j = 0; j < kSums; ++j) sums[j] += static_cast<W>(grad[d + j]) * static_cast<W>(y[d + j]);
  }
  for (int64_t half = kSums / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0] + scale_and_dot_few(grad, weight, y, d, width, scaled);
}

#if FMOE_X86
template <class T>
FMOE_AVX512 void sum_rows_avx512(const T* const* rows, const float* weights, int64_t num, int64_t width,
                                 T* out) {
  int64_t d = 0;
  for (; d + 64 <= width; d += 64) {
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < num; ++i) {
      const __m512 w = _mm512_set1_ps(weights[i]);
      for (int j = 0; j < 4; ++j) sum[j] = _mm512_fmadd_ps(w, load16(rows[i] + d + 16 * j), sum[j]);
    }
    for (int j = 0; j < 4; ++j) store16(out + d + 16 * j, sum[j]);
  }
  sum_rows(rows, weights, num, d, width, out);
}

template <class T>
FMOE_AVX512 float scale_and_dot_avx512(const T* grad, float weight, const T* y, int64_t width, T* scaled) {
  const __m512 w = _mm512_set1_ps(weight);
  __m512 dot[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t d = 0;
  for (; d + 32 <= width; d += 32) {
    for (int j = 0; j < 2; ++j) {
      const __m512 g = load16(grad + d + 16 * j);
      store16(scaled + d + 16 * j, _mm512_mul_ps(w, g));
      if (y != nullptr) dot[j] = _mm512_fmadd_ps(g, load16(y + d + 16 * j), dot[j]);
    }
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(dot[0], dot[1])) +
         scale_and_dot_few(grad, weight, y, d, width, scaled);
}
#endif

template <class T>
void best_sum_rows(const T* const* rows, const compute_t<T>* weights, int64_t num, int64_t width, T* out) {
#if FMOE_X86
  if constexpr (!std::is_same_v<T, double>)
    if (use_avx512()) return sum_rows_avx512(rows, weights, num, width, out);
#endif
  sum_rows(rows, weights, num, 0, width, out);
}

template <class T>
compute_t<T> best_scale_and_dot(const T* grad, compute_t<T> weight, const T* y, int64_t width, T* scaled) {
#if FMOE_X86
  if constexpr (!std::is_same_v<T, double>)
    if (use_avx512()) return scale_and_dot_avx512(grad, weight, y, width, scaled);
#endif
  return scale_and_dot(grad, weight, y, width, scaled);
}

template <class T>
void unpermute(const T* y, const Routing& routing, const compute_t<T>* weights, int64_t width, T* out) {
  const int64_t num_choices = routing.num_choices;
  const int64_t bytes_per_token = (num_choices + 1) * width * sizeof(T);
  for_each_row_range(routing.num_tokens, bytes_per_token, [&](int64_t begin, int64_t end) {
    std::vector<const T*> rows(num_choices);
    std::vector<compute_t<T>> row_weights(num_choices);
    for (int64_t t = begin; t < end; ++t) {
      int64_t num = 0;
      for (int64_t k = 0; k < num_choices; ++k) {
        const int64_t c = t * num_choices + k, r = routing.row(c);
        if (r < 0) continue;
        rows[num] = y + r * width;
        row_weights[num++] = weights ? weights[c] : compute_t<T>{1};
      }
      best_sum_rows(rows.data(), row_weights.data(), num, width, out + t * width);
    }
  });
}

Tensor unpermute_cpu(Tensor y, Tensor row_idx, Tensor inverse, std::optional<Tensor> topk_weights) {
  check_all_cpu(y, "y", row_idx, inverse);
  check_unpermute(y, row_idx, inverse, topk_weights);
  const Routing routing(row_idx, inverse);
  const auto weights = wide_weights(topk_weights, y);
  const Tensor rows = as_contiguous(y);
  const int64_t width = rows.size(1);
  Tensor out = torch::stable::new_empty(rows, {routing.num_tokens, width});
  advise_huge_pages(out.mutable_data_ptr(), out.numel() * out.element_size());
  dispatch_float(rows.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    unpermute(static_cast<const T*>(rows.const_data_ptr()), routing, data_or_null<compute_t<T>>(weights),
              width, static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

// In the order of the rows, so that y and grad_y are read and written front to back.
template <class T>
void unpermute_backward(const T* grad_out, const T* y, const Routing& routing, const compute_t<T>* weights,
                        int64_t width, T* grad_y, compute_t<T>* grad_weights) {
  const RowWriter writer(grad_y, routing.num_rows, width * sizeof(T));
  for_each_row_range(routing.num_rows, width * sizeof(T), [&](int64_t begin, int64_t end) {
    std::vector<T> scaled(width);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t c = routing.choice(r);
      if (c < 0) {
        writer.zero(r);
        continue;
      }
      const compute_t<T> dot = best_scale_and_dot(grad_out + c / routing.num_choices * width,
                                                  weights ? weights[c] : compute_t<T>{1},
                                                  y ? y + r * width : nullptr, width, scaled.data());
      writer.copy(r, scaled.data());
      if (y) grad_weights[c] = dot;
    }
    writer.finish();
  });
}

std::tuple<Tensor, Tensor> unpermute_backward_cpu(Tensor grad_out, std::optional<Tensor> y, Tensor row_idx,
                                                  Tensor inverse, std::optional<Tensor> topk_weights) {
  check_all_cpu(grad_out, "grad_out", row_idx, inverse);
  if (y) check_cpu(*y, "y");
  check_unpermute_backward(grad_out, y, row_idx, inverse, topk_weights);
  const Routing routing(row_idx, inverse);
  const auto weights = wide_weights(topk_weights, grad_out);
  const int64_t width = grad_out.size(1);
  std::optional<Tensor> rows;
  if (y) rows = as_contiguous(*y);
  const Tensor grad = as_contiguous(grad_out);
  Tensor grad_y = torch::stable::new_empty(grad, {routing.num_rows, width});
  advise_huge_pages(grad_y.mutable_data_ptr(), grad_y.numel() * grad_y.element_size());
  Tensor grad_weights = y ? torch::stable::new_zeros(*weights, {routing.num_tokens, routing.num_choices})
                          : torch::stable::new_empty(grad, {0});
  dispatch_float(grad.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    unpermute_backward(static_cast<const T*>(grad.const_data_ptr()), data_or_null<T>(rows), routing,
                       data_or_null<compute_t<T>>(weights), width, static_cast<T*>(grad_y.mutable_data_ptr()),
                       static_cast<compute_t<T>*>(grad_weights.mutable_data_ptr()));
  });
  if (y) grad_weights = torch::stable::to(grad_weights, topk_weights->scalar_type());
  return {grad_y, grad_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("permute", TORCH_BOX(&permute_cpu));
  m.impl("unpermute", TORCH_BOX(&unpermute_cpu));
  m.impl("unpermute_backward", TORCH_BOX(&unpermute_backward_cpu));
}

}  // namespace fmoe_ext
