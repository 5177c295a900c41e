// What a new token needs beside its products, row by row, and operators that other files call.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "float_types.h"

namespace fmoe_ext {

Tensor few_rows_linear_cpu(Tensor x, Tensor weight);
Tensor rms_norm_cpu(Tensor x, Tensor weight, double eps);
Tensor attend_cpu(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, double scale);
Tensor frozen_gemm_cpu(Tensor x, Tensor weight_, std::optional<Tensor> offs, std::optional<Tensor> bias,
                       std::optional<Tensor> weight_scale, std::optional<Tensor> weight_zero,
                       int64_t weight_format, bool weight_interleaved);
Tensor frozen_experts_cpu(Tensor x, Tensor topk_idx, Tensor topk_weights,
                          std::vector<std::optional<Tensor>> weights_,
                          std::vector<std::optional<Tensor>> packing, std::vector<int64_t> options);
std::tuple<Tensor, Tensor> topk_gate_cpu(Tensor logits, int64_t top_k, int64_t score, bool normalize,
                                         std::optional<Tensor> bias, int64_t num_groups, int64_t topk_groups,
                                         double scale);

// To nearest, even, as static_cast<BFloat16>, of which compilers make no vectors.
inline uint32_t bits_of_bfloat16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000 : 0x7fc00000;
}

// x rounded to T, and as it is stored.
template <class T>
inline compute_t<T> rounded_to(compute_t<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return std::bit_cast<float>(bits_of_bfloat16(x));
  else
    return static_cast<compute_t<T>>(static_cast<T>(x));
}
template <class T>
inline T stored_as(compute_t<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return BFloat16(static_cast<uint16_t>(bits_of_bfloat16(x) >> 16), BFloat16::from_bits());
  else
    return static_cast<T>(x);
}

// weight * (x / sqrt(mean(x^2) + eps)) for each row x [D], rounded before the weight multiplies. to may be
// from.
template <class T>
void norm_rows(const T* from, const T* weight, int64_t num_rows, int64_t D, double eps, T* to) {
  using C = compute_t<T>;
  constexpr int64_t kSums = 16;  // in an order of their own, the same on every processor
  for (int64_t r = 0; r < num_rows; ++r, from += D, to += D) {
    C sums[kSums] = {}, sum = 0;
    const int64_t whole = D / kSums * kSums;
    for (int64_t i = 0; i < whole; i += kSums)
      for (int64_t j = 0; j < kSums; ++j) {
        const C value = static_cast<C>(from[i + j]);
        sums[j] += value * value;
      }
    for (int64_t j = 0; j < D - whole; ++j) {
      const C value = static_cast<C>(from[whole + j]);
      sums[j] += value * value;
    }
    for (const C part : sums) sum += part;
    const C factor = C(1) / std::sqrt(sum / static_cast<C>(D) + static_cast<C>(eps));
    for (int64_t i = 0; i < D; ++i)
      to[i] = stored_as<T>(static_cast<C>(weight[i]) * rounded_to<T>(static_cast<C>(from[i]) * factor));
  }
}

// rows [.., D] times cos, plus the halves of each row turned times sin; every step rounded, as Transformers
// does it. cos, sin [B, D] of rows [B, H, D]. to may be from.
template <class T>
void rotate_rows(const T* from, const T* cos, const T* sin, int64_t B, int64_t H, int64_t D, T* to) {
  using C = compute_t<T>;
  const auto product = [](T a, T b) { return rounded_to<T>(static_cast<C>(a) * static_cast<C>(b)); };
  const int64_t half = D / 2;
  for (int64_t r = 0; r < B * H; ++r, from += D, to += D) {
    const T *c = cos + r / H * D, *s = sin + r / H * D;
    for (int64_t i = 0; i < half; ++i) {
      const T low = from[i], high = from[i + half];
      to[i] = stored_as<T>(product(low, c[i]) - product(high, s[i]));
      to[i + half] = stored_as<T>(product(high, c[i + half]) + product(low, s[i + half]));
    }
  }
}

// y += x, each sum rounded.
template <class T>
void add_to(const T* x, int64_t n, T* y) {
  using C = compute_t<T>;
  for (int64_t i = 0; i < n; ++i) y[i] = stored_as<T>(static_cast<C>(x[i]) + static_cast<C>(y[i]));
}

}  // namespace fmoe_ext
