// What happens to a tile before it leaves the cache (act_forward, act_backward, store_tile, ...), and the row
// sums around the products, as kernels.h states them; for one instruction set.
#pragma once

#include "curves.h"
#include "multiply.h"

#include "isa_begin.h"

// v as an operand, rounded to storage: by the store itself where both are the same type.
template <class T>
inline VecOf<OperandOf<T>> as_operand(VecOf<T> v) {
  if constexpr (sizeof(OperandOf<T>) == sizeof(T)) return v;
  return rounded<T>(v);
}

// The tile's rows [r, r + R) -> h, if it is kept, and a = act(h), or act(gate) up; C vectors of each at once.
template <class T, CurveKind curve, bool gated, int R, int C>
inline void act_forward_rows(const ActForward& args, int64_t r) {
  constexpr int lanes = kLanes<T>, nr = NR<typename UnitOf<T>::type>, up = nr / 2;
  using V = VecOf<T>;
  const T* bias = elements_of<T>(args.bias);
  const AccOf<T>* tile = elements_of<T>(args.tile) + r * nr;
  T* h = args.h ? elements_of<T>(args.h) + r * args.h_stride : nullptr;
  OperandOf<T>* a = elements_of<T>(args.a) + r * args.a_stride;
  for (int64_t j = 0; j < args.n; j += C * lanes) {
    // A pre-activation: what it adds to is in the tile, its bias at `offset`, and it is stored there.
    const auto hidden = [&](int i, int from, int64_t offset) __attribute__((always_inline)) {
      const int64_t column = j + i % C * lanes, n = args.n - column;
      V value = load(tile + i / C * nr + from + column);
      if (bias) value += load_n(bias + offset + column, n);
      value = rounded<T>(value);
      if (h) store_n(h + i / C * args.h_stride + offset + column, value, n);
      return value;
    };
    V gates[R * C];
    Point<V> points[R * C];
#pragma GCC unroll 8
    for (int i = 0; i < R * C; ++i) gates[i] = hidden(i, 0, 0);
    points_at<T, curve>(gates, points);
#pragma GCC unroll 8
    for (int i = 0; i < R * C; ++i) {
      const int64_t column = j + i % C * lanes;
      V value = points[i].value;
      if constexpr (gated) value *= factor_of<curve>(hidden(i, up, args.up_offset)).value;
      store_n(a + i / C * args.a_stride + column, as_operand<T>(value), args.n - column);
    }
  }
}

// Row r of the gradient of a -> the gradient of h, a scaled for the gradient of w2, and to dscale the product
// of gradient and a; C vectors at once.
template <class T, CurveKind curve, bool gated, int C>
inline void act_backward_row(const ActBackward& args, int64_t r) {
  constexpr int lanes = kLanes<T>, nr = NR<typename UnitOf<T>::type>;
  using V = VecOf<T>;
  const AccOf<T>* tile = elements_of<T>(args.tile) + r * nr;
  const T* h = elements_of<T>(args.h) + r * args.h_stride;
  OperandOf<T>* dh = elements_of<T>(args.dh) + r * args.dh_stride;
  OperandOf<T>* a = args.a ? elements_of<T>(args.a) + r * args.a_stride : nullptr;
  const AccOf<T> scale = args.scale ? elements_of<T>(args.scale)[r] : AccOf<T>(1);
  V product = {};
  for (int64_t j = 0; j < args.n; j += 64 / sizeof(T)) {  // for the tile below, while its product is computed
    __builtin_prefetch(h + args.m * args.h_stride + j);
    if (gated) __builtin_prefetch(h + args.m * args.h_stride + args.up_offset + j);
  }
  for (int64_t j = 0; j < args.n; j += C * lanes) {
    V gates[C];
    Point<V> points[C];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) gates[i] = load_n(h + j + i * lanes, args.n - j - i * lanes);
    points_at<T, curve>(gates, points);
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      const int64_t column = j + i * lanes, n = args.n - column;
      const auto grad = load_n(tile + column, n);
      auto value = points[i].value, slope = points[i].slope;
      if constexpr (gated) {
        const auto up = factor_of<curve>(load_n(h + args.up_offset + column, n));
        auto grad_up = grad * scale * value;
        if constexpr (curve == CurveKind::clamped_silu) grad_up *= up.slope;
        store_n(dh + args.up_offset + column, as_operand<T>(grad_up), n);
        value *= up.value;
        slope *= up.value;
      }
      store_n(dh + column, as_operand<T>(grad * scale * slope), n);
      value = rounded<T>(value);
      product += grad * value;
      if (a) store_n(a + column, as_operand<T>(value * scale), n);
    }
  }
  if (args.dscale) elements_of<T>(args.dscale)[r] += sum_lanes(product);
}

// Vectors of a row that are activated at once. A gated tile of the forward has one gate vector a row, and
// takes several rows (R) instead.
template <class T, CurveKind curve>
constexpr int kActVectors = kIsShort<T, curve> ? 2 : 1;

template <class T, CurveKind curve, bool gated, int R = kIsShort<T, curve> ? (gated ? 4 : 2) : 1>
void act_forward_curve(const ActForward& args, int64_t r = 0) {
  for (; r + R <= args.m; r += R)
    act_forward_rows<T, curve, gated, R, gated ? 1 : kActVectors<T, curve>>(args, r);
  if constexpr (R > 1) act_forward_curve<T, curve, gated, R / 2>(args, r);
}

template <class T, CurveKind curve, bool gated>
void act_backward_curve(const ActBackward& args) {
  for (int64_t r = 0; r < args.m; ++r) act_backward_row<T, curve, gated, kActVectors<T, curve>>(args, r);
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
