// The curves of the activations in vectors, value and slope at once, for the tiles of epilogue.h: points_at()
// takes the short form where a curve has one for the type (AVX-512, bfloat16), else point_of(). factor_of()
// is what a gated activation is multiplied by.
#pragma once

#include "vec.h"

#include "isa_begin.h"

// For x <= 0. Relative error below 6 * 2^-23, without fused multiply-add (portable.cpp) below 40 * 2^-23.
// 0 for x < -86.4, where GELU becomes denormal: products with denormal numbers take many times as long, and
// weights that diverge would make half of all activations denormal.
inline VF exp_negative(VF x) {
  const VI underflows = x < -86.4f;
  x = underflows ? broadcast(-86.4f) : x;
  const VF shifted = fma(x, broadcast(1.44269504f), broadcast(12582912.f));  // the integer is in the low bits
  const VF n = shifted - 12582912.f;
  const VF r = fma(n, broadcast(1.42860677e-6f), fma(n, broadcast(-0.693148613f), x));
  VF p = broadcast(1.38888890e-3f);
  p = fma(p, r, broadcast(8.33333377e-3f));
  p = fma(p, r, broadcast(4.16666679e-2f));
  p = fma(p, r, broadcast(1.66666672e-1f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r * r, r);
  return (VF)(((VI)(p + 1.f) + ((VI)shifted << 23)) & ~underflows);
}

inline VF absolute(VF x) { return (VF)((VI)x & 0x7fffffff); }

inline VF sigmoid(VF x) {
  const VF t = exp_negative(-absolute(x));
  const VF s = 1.f / (1.f + t);
  return x < 0.f ? t * s : s;
}

template <class V>
struct Point {
  V value, slope;
};

inline Point<VF> silu(VF x) {
  const VF s = sigmoid(x);
  return {x * s, s * (1.f + x * (1.f - s))};
}

inline Point<VF> gelu(VF x) {
  // Phi(-|x|) = exp(-x^2 / 2) erfcx(|x| / sqrt(2)) / 2; erfcx is a polynomial in t, to 1e-8 relative.
  const VF z = absolute(x) * 0.707106781f;
  const VF t = 1.f / fma(z, broadcast(0.35f), broadcast(1.f));
  constexpr float coefficients[] = {-0.175027483f, 0.220033711f, -0.0801959313f, 0.131637331f, 0.121524807f,
                                    0.159877005f,  0.185989686f, 0.197375131f,   0.197471232f};
  VF p = broadcast(0.0413145205f);
#pragma GCC unroll 9
  for (float c : coefficients) p = fma(p, t, broadcast(c));
  const VF e = exp_negative(-0.5f * x * x);
  const VF tail = 0.5f * e * p * t;
  const VF cdf = x < 0.f ? tail : 1.f - tail;
  return {x * cdf, fma(x * 0.398942280f, e, cdf)};
}

inline Point<VF> gelu_tanh(VF x) {  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  const VF square = x * x;
  const VF s = sigmoid(1.59576912f * x * fma(square, broadcast(0.044715f), broadcast(1.f)));
  const VF slope = 1.59576912f * fma(square, broadcast(0.134145f), broadcast(1.f));
  return {x * s, s * (1.f + x * slope * (1.f - s))};
}

inline Point<VF> relu(VF x) { return {x <= 0.f ? VF{} : x, x <= 0.f ? VF{} : broadcast(1.f)}; }

inline Point<VF> relu2(VF x) {
  const VF r = relu(x).value;
  return {r * r, r + r};
}

// NaN stays NaN.
inline Point<VF> clamped_silu(VF x) {
  const VF v = x > kClampedLimit ? broadcast(kClampedLimit) : x;
  const VF s = sigmoid(kClampedAlpha * v);
  const VF slope = s * (1.f + kClampedAlpha * v * (1.f - s));
  return {v * s, x > kClampedLimit ? VF{} : slope};
}

inline Point<double> silu(double x) {
  const double s = 1 / (1 + std::exp(-x));
  return {x * s, s * (1 + x * (1 - s))};
}

inline Point<double> gelu(double x) {
  const double cdf = 0.5 * std::erfc(-x * 0.70710678118654752440);
  return {x * cdf, cdf + x * 0.39894228040143267794 * std::exp(-0.5 * x * x)};
}

inline Point<double> gelu_tanh(double x) {
  const double s = 1 / (1 + std::exp(-1.59576912160573071176 * x * (1 + 0.044715 * x * x)));
  return {x * s, s * (1 + x * (1 - s) * 1.59576912160573071176 * (1 + 0.134145 * x * x))};
}

inline Point<double> relu(double x) { return {x <= 0 ? 0 : x, x <= 0 ? 0.0 : 1.0}; }

inline Point<double> relu2(double x) {
  const double r = relu(x).value;
  return {r * r, r + r};
}

inline Point<double> clamped_silu(double x) {
  const double alpha = 1.702, v = x > kClampedLimit ? kClampedLimit : x;
  const double s = 1 / (1 + std::exp(-alpha * v));
  return {v * s, x > kClampedLimit ? 0 : s * (1 + alpha * v * (1 - s))};
}

template <CurveKind curve, class V>
inline Point<V> point_of(V x) {
  if constexpr (curve == CurveKind::gelu) return gelu(x);
  if constexpr (curve == CurveKind::gelu_tanh) return gelu_tanh(x);
  if constexpr (curve == CurveKind::relu) return relu(x);
  if constexpr (curve == CurveKind::silu) return silu(x);
  if constexpr (curve == CurveKind::relu2) return relu2(x);
  if constexpr (curve == CurveKind::clamped_silu) return clamped_silu(x);
}

template <CurveKind curve>
inline Point<VD> point_of(VD x) {
  Point<VD> result;
  for (int i = 0; i < WD; ++i) {
    const Point<double> p = point_of<curve>(double(x[i]));
    result.value[i] = p.value;
    result.slope[i] = p.slope;
  }
  return result;
}

#if FMOE_BYTES == 64
// The curves of bfloat16, which keeps 8 bits: values have a relative error below 3e-4, slopes, which have a
// zero, an absolute one below 2.4e-4. No number is denormal. Each step handles several vectors, because the
// steps of one wait for each other.

template <int N>
struct Several {
  VF v[N];
};

template <class Step, int N, class... More>
__attribute__((always_inline)) inline Several<N> each(const Step& step, const Several<N>& first,
                                                      const More&... more) {
  Several<N> out;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) out.v[i] = step(first.v[i], more.v[i]...);
  return out;
}

// The polynomial with these coefficients, the highest power first.
template <int N, int count>
__attribute__((always_inline)) inline Several<N> polynomial(const float (&c)[count], const Several<N>& x) {
  auto p = each([&](VF v) { return fma(v, broadcast(c[0]), broadcast(c[1])); }, x);
#pragma GCC unroll 8
  for (int i = 2; i < count; ++i) p = each([&](VF sum, VF v) { return fma(sum, v, broadcast(c[i])); }, p, x);
  return p;
}

// 2^x; 0 for x < -124.
template <int N>
__attribute__((always_inline)) inline Several<N> short_exp2(const Several<N>& x) {
  constexpr float c[] = {0.0780243959f, 0.226067447f, 0.695833377f, 0.999925238f};
  constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const auto part = each([](VF v) { return v - (VF)_mm512_roundscale_ps((__m512)v, kDown); }, x);
  return each(
      [](VF p, VF v) {
        const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(-124.f), _CMP_NLT_UQ);
        return (VF)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)v);
      },
      polynomial(c, part), x);
}

// NaN stays NaN
inline VF at_most(float limit, VF x) { return (VF)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x); }

// Value and slope of several points.
template <int N>
struct Points {
  Several<N> value, slope;
};

template <int N>
struct Sigmoids {
  Several<N> value, rest;  // rest: 1 - value, with the same relative error where it is small
};

// Of x, given as scaled = x / -ln(2). Both are 0 for x < -87.3, where the value would be denormal: the rest,
// too, because it is used in products with the value alone.
template <int N>
__attribute__((always_inline)) inline Sigmoids<N> short_sigmoid(const Several<N>& scaled) {
  const auto t = short_exp2(each([](VF v) { return at_most(126.f, v); }, scaled));
  const auto s = each(
      [](VF t, VF v) {
        const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(126.f), _CMP_NGE_UQ);
        return (VF)_mm512_maskz_rcp14_ps(is_normal, (__m512)(1.f + t));
      },
      t, scaled);
  return {s, each([](VF s, VF t) { return s * t; }, s, t)};
}

// x sigmoid(alpha x)
template <int N>
__attribute__((always_inline)) inline Points<N> short_silu(const Several<N>& x, float alpha = 1.f) {
  const auto s = short_sigmoid(each([&](VF v) { return -1.44269504f * alpha * v; }, x));
  const auto value = each([](VF v, VF s) { return v * s; }, x, s.value);
  return {value, each([&](VF v, VF s, VF rest) { return fma(alpha * v, rest, s); }, value, s.value, s.rest)};
}

template <int N>
__attribute__((always_inline)) inline Points<N> short_gelu(const Several<N>& x) {
  // Phi(-z) = 2^q(z), and the slope at -z is Phi(-z) u(z), for z = |x|.
  constexpr float q[] = {2.71617608e-08f, -1.7311914e-06f, 4.75486211e-05f, -0.000743475307f, 0.0074162274f,
                         -0.0507947177f,  -0.462790446f,   -1.14903562f,    -1.00018376f};
  constexpr float u[] = {-2.10821515e-06f, 9.62948712e-05f, -0.00178057712f, 0.0173927771f,
                         -0.0994215391f,   -0.64728876f,    -0.793967557f,   0.999730438f};
  const auto z = each([](VF v) { return at_most(13.2f, absolute(v)); }, x);
  const auto tail = short_exp2(polynomial(q, z));
  const auto slope = each([](VF t, VF u) { return t * u; }, tail, polynomial(u, z));
  return {each([](VF v, VF t) { return v * (v < 0.f ? t : 1.f - t); }, x, tail),
          each([](VF v, VF s) { return v < 0.f ? s : 1.f - s; }, x, slope)};
}

template <int N>
__attribute__((always_inline)) inline Points<N> short_gelu_tanh(const Several<N>& x) {
  const auto square = each([](VF v) { return v * v; }, x);
  const auto s = short_sigmoid(each(
      [](VF v, VF w) { return v * fma(w, broadcast(-0.102943239f), broadcast(-2.30220819f)); }, x, square));
  const auto value = each([](VF v, VF s) { return v * s; }, x, s.value);
  const auto slope =
      each([](VF w) { return fma(w, broadcast(0.214064449f), broadcast(1.59576912f)); }, square);
  return {value,
          each([](VF v, VF u, VF s, VF rest) { return fma(v * u, rest, s); }, value, slope, s.value, s.rest)};
}

template <int N>
__attribute__((always_inline)) inline Points<N> short_clamped_silu(const Several<N>& x) {
  const auto inside = each([](VF v) { return v > kClampedLimit ? broadcast(kClampedLimit) : v; }, x);
  const auto p = short_silu(inside, kClampedAlpha);
  return {p.value, each([](VF v, VF s) { return v > kClampedLimit ? VF{} : s; }, x, p.slope)};
}

template <CurveKind curve, int N>
__attribute__((always_inline)) inline Points<N> short_points(const Several<N>& x) {
  if constexpr (curve == CurveKind::gelu) return short_gelu(x);
  if constexpr (curve == CurveKind::gelu_tanh) return short_gelu_tanh(x);
  if constexpr (curve == CurveKind::silu) return short_silu(x);
  if constexpr (curve == CurveKind::clamped_silu) return short_clamped_silu(x);
}
#endif

// Whether a curve has a short form for T.
template <class T, CurveKind curve>
constexpr bool kIsShort =
    FMOE_BYTES == 64 && std::is_same_v<T, BF16> && curve != CurveKind::relu && curve != CurveKind::relu2;

// The curve at N vectors of points of T.
template <class T, CurveKind curve, class V, int N>
__attribute__((always_inline)) inline void points_at(const V (&x)[N], Point<V> (&points)[N]) {
#if FMOE_BYTES == 64
  if constexpr (kIsShort<T, curve>) {
    Several<N> several;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) several.v[i] = x[i];
    const auto found = short_points<curve>(several);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) points[i] = {found.value.v[i], found.slope.v[i]};
    return;
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) points[i] = point_of<curve>(x[i]);
}

// The factor of the activated gate as a function of up, and its slope. The slope is 0 where up is clamped and
// at NaN, as torch.clamp's.
template <CurveKind curve, class V>
inline Point<V> factor_of(V up) {
  if constexpr (curve == CurveKind::clamped_silu) {
    const V limit = V{} + kClampedLimit, one = V{} + 1;
    const V inside = up > limit ? limit : up < -limit ? -limit : up;
    return {inside + 1, inside == up ? one : V{}};
  } else {
    return {up, V{} + 1};
  }
}

#include "isa_end.h"
