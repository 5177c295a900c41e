// exp, sigmoid and softmax of a token's logits, for topk_gate.cpp and balance_loss.cpp: one code for every
// instruction set, inlined where it is compiled for one; with fused multiply-adds the last bits differ.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace fmoe_ext {

#define FMOE_INLINE [[gnu::always_inline]] inline

FMOE_INLINE double exp_nonpositive(double x) { return std::exp(x); }

// Within 2 ulp for -87.33 <= x <= 0; 0 below, where the result is denormal or nearly so; NaN for NaN. Free of
// calls and branches: vectorises.
FMOE_INLINE float exp_nonpositive(float x) {
  constexpr float kSmallest = -87.33f, kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < kSmallest ? kSmallest : x;
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r =
      (clamped - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts, the first with few bits
  const float p =
      1 +
      r * (1 + r * (0.5f + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720 + r / 5040))))));
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound) + 127;
  const float power = std::bit_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(exponent) << 23));
  return x < kSmallest ? 0.0f : p * power;
}

template <class A>
FMOE_INLINE A sigmoid(A x) {
  const A small = exp_nonpositive(x < 0 ? x : -x);
  return (x < 0 ? small : A{1}) / (1 + small);
}

// softmax(logits)[e] = exp(logits[e] - largest) / sum
template <class A>
struct SoftmaxTotals {
  A largest, sum;
};

template <class A>
FMOE_INLINE SoftmaxTotals<A> softmax_totals(const A* logits, int64_t num) {
  constexpr int kLanes = 16;  // independent partial results, as many on every instruction set
  A largest[kLanes], sum[kLanes] = {};
  std::fill(largest, largest + kLanes, -std::numeric_limits<A>::infinity());
  const int64_t whole = num / kLanes * kLanes;
  for (int64_t e = 0; e < whole; e += kLanes)
    for (int j = 0; j < kLanes; ++j) largest[j] = logits[e + j] > largest[j] ? logits[e + j] : largest[j];
  for (int64_t e = whole; e < num; ++e) largest[0] = logits[e] > largest[0] ? logits[e] : largest[0];
  for (int j = 1; j < kLanes; ++j) largest[0] = largest[j] > largest[0] ? largest[j] : largest[0];
  for (int64_t e = 0; e < whole; e += kLanes)
    for (int j = 0; j < kLanes; ++j) sum[j] += exp_nonpositive(logits[e + j] - largest[0]);
  for (int64_t e = whole; e < num; ++e) sum[0] += exp_nonpositive(logits[e] - largest[0]);
  for (int j = 1; j < kLanes; ++j) sum[0] += sum[j];
  return {largest[0], sum[0]};
}

}  // namespace fmoe_ext
