// What happens to a tile before it leaves the cache, and the row sums around the products; for one
// instruction set.
#pragma once

#include "multiply.h"

#include "isa_begin.h"

// For x <= 0, relative error below 2^-23. 0 for x < -86.4, from where on GELU would be denormal: products
// with denormal numbers take many times as long, and weights that diverge make half of all activations such.
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

// A NaN stays.
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

// What the gate is multiplied by, of up, and its slope.
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

// v as an operand, rounded to storage: by the store itself where both are the same type.
template <class T>
inline VecOf<OperandOf<T>> as_operand(VecOf<T> v) {
  if constexpr (sizeof(OperandOf<T>) == sizeof(T)) return v;
  return rounded<T>(v);
}

template <class T, CurveKind curve, bool gated>
void act_forward_curve(const ActForward& args) {
  constexpr int lanes = kLanes<T>, nr = NR<typename UnitOf<T>::type>, up = nr / 2;
  const T* bias = elements_of<T>(args.bias);
  for (int64_t r = 0; r < args.m; ++r) {
    const AccOf<T>* tile = elements_of<T>(args.tile) + r * nr;
    T* h = args.h ? elements_of<T>(args.h) + r * args.h_stride : nullptr;
    OperandOf<T>* a = elements_of<T>(args.a) + r * args.a_stride;
    for (int64_t j = 0; j < args.n; j += lanes) {
      const int64_t n = args.n - j;
      auto gate = load(tile + j);
      if (bias) gate += load_n(bias + j, n);
      gate = rounded<T>(gate);
      if (h) store_n(h + j, gate, n);
      auto value = point_of<curve>(gate).value;
      if constexpr (gated) {
        auto linear = load(tile + up + j);
        if (bias) linear += load_n(bias + args.up_offset + j, n);
        linear = rounded<T>(linear);
        if (h) store_n(h + args.up_offset + j, linear, n);
        value *= factor_of<curve>(linear).value;
      }
      store_n(a + j, as_operand<T>(value), n);
    }
  }
}

template <class T, CurveKind curve, bool gated>
void act_backward_curve(const ActBackward& args) {
  constexpr int lanes = kLanes<T>, nr = NR<typename UnitOf<T>::type>;
  for (int64_t r = 0; r < args.m; ++r) {
    const AccOf<T>* tile = elements_of<T>(args.tile) + r * nr;
    const T* h = elements_of<T>(args.h) + r * args.h_stride;
    OperandOf<T>* dh = elements_of<T>(args.dh) + r * args.dh_stride;
    OperandOf<T>* a = args.a ? elements_of<T>(args.a) + r * args.a_stride : nullptr;
    const AccOf<T> scale = args.scale ? elements_of<T>(args.scale)[r] : AccOf<T>(1);
    VecOf<AccOf<T>> product = {};
    for (int64_t j = 0; j < args.n; j += lanes) {
      const int64_t n = args.n - j;
      const auto grad = load_n(tile + j, n);
      const auto p = point_of<curve>(load_n(h + j, n));
      auto value = p.value, slope = p.slope;
      if constexpr (gated) {
        const auto up = factor_of<curve>(load_n(h + args.up_offset + j, n));
        auto grad_up = grad * scale * value;
        if constexpr (curve == CurveKind::clamped_silu) grad_up *= up.slope;
        store_n(dh + args.up_offset + j, as_operand<T>(grad_up), n);
        value *= up.value;
        slope *= up.value;
      }
      store_n(dh + j, as_operand<T>(grad * scale * slope), n);
      value = rounded<T>(value);
      product += grad * value;
      if (a) store_n(a + j, as_operand<T>(value * scale), n);
    }
    if (args.dscale) elements_of<T>(args.dscale)[r] += sum_lanes(product);
  }
}

// Calls body with the curve and the gate as compile-time constants.
template <class Body>
inline void with_curve(CurveKind curve, bool gated, const Body& body) {
  const auto with_gate = [&](auto constant) {
    if (gated)
      body(constant, std::true_type{});
    else
      body(constant, std::false_type{});
  };
  switch (curve) {
    case CurveKind::gelu:
      return with_gate(std::integral_constant<CurveKind, CurveKind::gelu>{});
    case CurveKind::gelu_tanh:
      return with_gate(std::integral_constant<CurveKind, CurveKind::gelu_tanh>{});
    case CurveKind::relu:
      return with_gate(std::integral_constant<CurveKind, CurveKind::relu>{});
    case CurveKind::silu:
      return with_gate(std::integral_constant<CurveKind, CurveKind::silu>{});
    case CurveKind::relu2:
      return with_gate(std::integral_constant<CurveKind, CurveKind::relu2>{});
    case CurveKind::clamped_silu:
      return with_gate(std::integral_constant<CurveKind, CurveKind::clamped_silu>{});
  }
}

template <class T>
void act_forward(const ActForward& args) {
  with_curve(args.curve, args.gated, [&](auto curve, auto gated) {
    act_forward_curve<T, decltype(curve)::value, decltype(gated)::value>(args);
  });
}

template <class T>
void act_backward(const ActBackward& args) {
  with_curve(args.curve, args.gated, [&](auto curve, auto gated) {
    act_backward_curve<T, decltype(curve)::value, decltype(gated)::value>(args);
  });
}

template <class T>
void store_tile(const AccOf<T>* tile, int64_t m, int64_t n, const T* bias, const AccOf<T>* scale, T* dst,
                int64_t stride) {
  constexpr int lanes = kLanes<T>, nr = NR<typename UnitOf<T>::type>;
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t j = 0; j < n; j += lanes) {
      auto value = load(tile + r * nr + j);
      if (bias) value += load_n(bias + j, n - j);
      if (scale) value *= scale[r];
      store_n(dst + r * stride + j, value, n - j);
    }
  }
}

template <class T>
void add_tile(const AccOf<T>* tile, int64_t m, int64_t n, double alpha, const T* src, double beta, T* dst,
              int64_t stride) {
  constexpr int lanes = kLanes<T>, nr = NR<typename UnitOf<T>::type>;
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t j = 0; j < n; j += lanes) {
      const auto value = load(tile + r * nr + j) * (AccOf<T>)alpha;
      const int64_t at = r * stride + j;
      store_n(dst + at, value + load_n(src + at, n - j) * (AccOf<T>)beta, n - j);
    }
  }
}

#if FMOE_BYTES == 64
template <class T>
inline void stream_two(T* p, VecOf<T> first, VecOf<T> second) {
  if constexpr (sizeof(T) == 2) {
    VH halves[2];
    if constexpr (std::is_same_v<T, BF16>) {
      halves[0] = narrow_bf16(first);
      halves[1] = narrow_bf16(second);
    } else {
      halves[0] = narrow_half(first);
      halves[1] = narrow_half(second);
    }
    const __m512i low = _mm512_castsi256_si512((__m256i)halves[0]);
    _mm512_stream_si512((__m512i*)p, _mm512_inserti64x4(low, (__m256i)halves[1], 1));
  } else {
    _mm512_stream_si512((__m512i*)p, (__m512i)first);
    _mm512_stream_si512((__m512i*)(p + kLanes<T>), (__m512i)second);
  }
}
#endif

template <class T>
void stream_tile(const AccOf<T>* tile, int64_t m, int64_t n, T* dst, int64_t stride) {
#if FMOE_BYTES == 64
  constexpr int nr = NR<typename UnitOf<T>::type>;
  if (n == nr && (uintptr_t)dst % 64 == 0 && stride * sizeof(T) % 64 == 0) {
    for (int64_t r = 0; r < m; ++r) {
      const AccOf<T>* from = tile + r * nr;
      stream_two(dst + r * stride, load(from), load(from + nr / 2));
    }
    return;
  }
#endif
  store_tile<T>(tile, m, n, nullptr, nullptr, dst, stride);
}

inline void end_stream() {
#if FMOE_BYTES == 64
  _mm_sfence();
#endif
}

template <class T>
void accumulate_tile(const AccOf<T>* tile, int64_t m, int64_t n, AccOf<T>* sum, int64_t stride) {
  constexpr int lanes = kLanes<AccOf<T>>, nr = NR<typename UnitOf<T>::type>;
  for (int64_t r = 0; r < m; ++r) {
    AccOf<T>* to = sum + r * stride;
    for (int64_t j = 0; j < n; j += lanes)
      store_n(to + j, load_n(to + j, n - j) + load(tile + r * nr + j), n - j);
  }
}

template <class T>
void round_sums(const AccOf<T>* acc, int64_t n, T* dst) {
  for (int64_t j = 0; j < n; j += kLanes<T>) store_n(dst + j, load_n(acc + j, n - j), n - j);
}

template <class T>
void sum_over_rows(const OperandOf<T>* operand, int64_t stride, int64_t num_rows, int64_t n,
                   const AccOf<T>* scale, double* sum) {
  constexpr int64_t kBlock = 32;  // rows whose sum is still as exact as acc
  for (int64_t begin = 0; begin < num_rows; begin += kBlock) {
    const int64_t end = begin + kBlock < num_rows ? begin + kBlock : num_rows;
    for (int64_t j = 0; j < n; j += kLanes<T>) {
      VecOf<AccOf<T>> total = {};
      for (int64_t r = begin; r < end; ++r) {
        const auto row = load_n(operand + r * stride + j, n - j);
        total += scale ? row * scale[r] : row;
      }
      AccOf<T> lanes[kLanes<T>];
      store(lanes, total);
      for (int64_t i = 0; i < kLanes<T> && i < n - j; ++i) sum[j + i] += lanes[i];
    }
  }
}

template <class T>
void sum_rows(const T* const* rows, int64_t num_rows, int64_t n, T* out) {
  for (int64_t j = 0; j < n; j += kLanes<T>) {
    VecOf<T> total = {};
    for (int64_t r = 0; r < num_rows; ++r) total += load_n(rows[r] + j, n - j);
    store_n(out + j, total, n - j);
  }
}

template <class T>
void dot(const T* x, const T* y, int64_t n, AccOf<T>* out) {
  VecOf<T> total = {};
  for (int64_t j = 0; j < n; j += kLanes<T>) total += load_n(x + j, n - j) * load_n(y + j, n - j);
  *out = sum_lanes(total);
}

#include "isa_end.h"
