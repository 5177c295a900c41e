// Activation functions with their slopes: activate() for activation.cu, activate_fast() for the epilogues of
// the Hopper kernels.
#pragma once

#include <cmath>

#include "common.cuh"

namespace fmoe_ext {

template <typename A>
struct ValueAndSlope {
  A value, slope;
};

// Of GELU: sqrt(2 / pi) and what the cube is multiplied by in its tanh form, and 1 / sqrt(2 pi).
constexpr double kGeluRoot = 0.79788456080286535588, kGeluCubic = 0.044715,
                 kGaussian = 0.39894228040143267794;
template <typename A>
__device__ __forceinline__ ValueAndSlope<A> gelu(A x) {
  const A cdf = A(0.5) * (1 + std::erf(x * A(0.70710678118654752440)));
  return {x * cdf, cdf + x * A(kGaussian) * std::exp(A(-0.5) * x * x)};
}
template <typename A>
__device__ __forceinline__ ValueAndSlope<A> gelu_tanh(A x) {
  constexpr A kRoot = A(kGeluRoot), kCubic = A(kGeluCubic);
  const A t = std::tanh(kRoot * (x + kCubic * x * x * x));
  const A inner_slope = kRoot * (1 + 3 * kCubic * x * x);
  return {A(0.5) * x * (1 + t), A(0.5) * (1 + t) + A(0.5) * x * (1 - t * t) * inner_slope};
}
template <typename A>
__device__ __forceinline__ ValueAndSlope<A> silu(A x) {
  const A s = 1 / (1 + std::exp(-x));
  return {x * s, s * (1 + x * (1 - s))};
}
template <typename A>
__device__ __forceinline__ ValueAndSlope<A> relu2(A x) {
  const A r = x > 0 ? x : x != x ? x : A(0);
  return {r * r, r + r};
}
template <typename A>
__device__ __forceinline__ ValueAndSlope<A> clamped_silu(A x) {
  const A alpha = sizeof(A) == 8 ? A(1.702) : A(kClampedAlpha), limit = kClampedLimit;
  const A v = x > limit ? limit : x, s = 1 / (1 + std::exp(-alpha * v));
  return {v * s, x > limit ? A(0) : s * (1 + alpha * v * (1 - s))};
}
template <CurveKind kActivation, typename A>
__device__ __forceinline__ ValueAndSlope<A> activate(A x) {
  if constexpr (kActivation == CurveKind::gelu) return gelu(x);
  if constexpr (kActivation == CurveKind::gelu_tanh) return gelu_tanh(x);
  if constexpr (kActivation == CurveKind::silu) return silu(x);
  if constexpr (kActivation == CurveKind::relu2) return relu2(x);
  if constexpr (kActivation == CurveKind::clamped_silu) return clamped_silu(x);
  return x > 0 ? ValueAndSlope<A>{x, 1} : ValueAndSlope<A>{x != x ? x : A(0), 0};  // relu
}

// What the activated gate is multiplied by, computed from up, and its slope: up, clamped and increased by 1
// beside clamped_silu. (The factor of a row is another: grouped_rows.cuh.)
template <CurveKind kActivation, typename A>
__device__ __forceinline__ ValueAndSlope<A> factor_of(A up) {
  if constexpr (kActivation != CurveKind::clamped_silu) return {up, 1};
  const A limit = kClampedLimit;
  const A inside = up > limit ? limit : up < -limit ? -limit : up;
  return {inside + 1, inside == up ? A(1) : A(0)};
}

// activate() in float32, for results of 16 bits: an exponential and a reciprocal of one instruction each,
// which flush what is below 2^-126 to zero. Factors that do not depend on x are multiplied into one another.
template <CurveKind kCurve>
__device__ __forceinline__ ValueAndSlope<float> activate_fast(float x) {
  constexpr float kLog2e = 1.4426950408889634f;
  const auto sigmoid_exp2 = [](float v) { return ptx::rcp_ftz(1.f + ptx::ex2_ftz(v)); };  // of -v ln 2
  if constexpr (kCurve == CurveKind::silu) {
    const float s = sigmoid_exp2(-kLog2e * x), v = x * s;
    return {v, s + v * (1 - s)};
  } else if constexpr (kCurve == CurveKind::clamped_silu) {
    constexpr float kAlpha = kClampedAlpha, kLimit = kClampedLimit;
    const float inside = x > kLimit ? kLimit : x, s = sigmoid_exp2(-kLog2e * kAlpha * inside), v = inside * s;
    return {v, x > kLimit ? 0.f : s + kAlpha * v * (1 - s)};
  } else if constexpr (kCurve == CurveKind::gelu_tanh) {  // (1 + tanh(v)) / 2 = sigmoid(2 v)
    constexpr float kRoot = 2 * kGeluRoot, kCubic = kGeluCubic;
    const float x2 = x * x, s = sigmoid_exp2(x * (-kLog2e * kRoot - kLog2e * kRoot * kCubic * x2)), v = x * s;
    return {v, s + v * (1 - s) * (kRoot + 3 * kRoot * kCubic * x2)};
  } else if constexpr (kCurve == CurveKind::gelu) {  // erf: Abramowitz and Stegun, 7.1.26, to 1.5e-7
    const float gaussian = ptx::ex2_ftz(-0.5f * kLog2e * x * x), t = ptx::rcp_ftz(1 + 0.23164189f * fabsf(x));
    const float tail =
        gaussian * t *
        (0.12741480f + t * (-0.14224837f + t * (0.71070687f + t * (-0.72657601f + t * 0.53070271f))));
    return {fmaxf(x, 0) - fabsf(x) * tail,
            (x < 0 ? tail : 1 - tail) + x * static_cast<float>(kGaussian) * gaussian};
  } else {
    return activate<kCurve>(x);
  }
}

// Calls body with a std::integral_constant of the curve.
template <class Body>
void dispatch_activation(CurveKind activation, const Body& body) {
  switch (activation) {
    case CurveKind::gelu:
      return body(std::integral_constant<CurveKind, CurveKind::gelu>{});
    case CurveKind::gelu_tanh:
      return body(std::integral_constant<CurveKind, CurveKind::gelu_tanh>{});
    case CurveKind::relu:
      return body(std::integral_constant<CurveKind, CurveKind::relu>{});
    case CurveKind::silu:
      return body(std::integral_constant<CurveKind, CurveKind::silu>{});
    case CurveKind::relu2:
      return body(std::integral_constant<CurveKind, CurveKind::relu2>{});
    case CurveKind::clamped_silu:
      return body(std::integral_constant<CurveKind, CurveKind::clamped_silu>{});
  }
}

}  // namespace fmoe_ext
