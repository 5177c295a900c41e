// The clamped gated activations between two products, where they do not run in the tiles of expert_mlp:
// what csrc/clamped_glu.cpp calls for a part of a row, forward and backward. ClampedGlu (kernels.h) has the
// formula.
#pragma once

#include "epilogue.h"

#include "isa_begin.h"

// x sigmoid(alpha x).
inline Point<VF> scaled_silu(VF x, float alpha) {
  const VF s = sigmoid(alpha * x);
  return {x * s, s * (1.f + alpha * x * (1.f - s))};
}

inline Point<VD> scaled_silu(VD x, double alpha) {
  Point<VD> result;
  for (int i = 0; i < WD; ++i) {
    const double s = 1 / (1 + std::exp(-alpha * x[i]));
    result.value[i] = x[i] * s;
    result.slope[i] = s * (1 + alpha * x[i] * (1 - s));
  }
  return result;
}

// min(x, limit), with the slope of the point where x is not clamped. A NaN stays.
template <class V, class A>
inline Point<V> clamped_above(V x, V slope, A limit) {
  return {x > limit ? V{} + limit : x, x > limit ? V{} : slope};
}

constexpr int kGluBlock = 64;  // values that are taken apart at once, in buffers on the stack

// Gate and up of n activated values: as they lie, or apart in the buffers if they take turns.
template <class T>
struct GateAndUp {
  const T *gate, *up;

  GateAndUp(const ClampedGlu& glu, const T* h, int64_t first, int64_t n, T* gates, T* ups)
      : gate(h + first), up(h + glu.width + first) {
    if (!glu.interleaved) return;
    const T* turns = h + 2 * first;
    for (int64_t j = 0; j < n; ++j) {
      gates[j] = turns[2 * j];
      ups[j] = turns[2 * j + 1];
    }
    gate = gates;
    up = ups;
  }
};

template <class T>
Point<VecOf<T>> clamped_gate(const ClampedGlu& glu, VecOf<T> gate) {
  using V = VecOf<T>;
  using Acc = AccOf<T>;
  const Acc limit = glu.limit, alpha = glu.alpha;
  if (glu.clamps_activated) {
    const auto p = scaled_silu(gate, alpha);
    return clamped_above(p.value, p.slope, limit);
  }
  const Point<V> inside = clamped_above(gate, V{} + Acc(1), limit);
  const auto p = scaled_silu(inside.value, alpha);
  return {p.value, p.slope * inside.slope};
}

template <class T>
Point<VecOf<T>> clamped_up(const ClampedGlu& glu, VecOf<T> up) {
  using V = VecOf<T>;
  using Acc = AccOf<T>;
  const V limit = V{} + Acc(glu.limit);
  const V inside = up > limit ? limit : up < -limit ? -limit : up;
  const auto outside = (up > limit) | (up < -limit);  // not inside != up, which a NaN is too
  return {inside + Acc(glu.offset), outside ? V{} : V{} + Acc(1)};
}

// Values [first, first + n) of a row.
template <class T>
void clamped_glu(const ClampedGlu& glu, const T* h, int64_t first, int64_t n, T* out) {
  T gates[kGluBlock], ups[kGluBlock];
  for (const int64_t end = first + n; first < end; first += kGluBlock) {
    const int64_t m = end - first < kGluBlock ? end - first : kGluBlock;
    const GateAndUp<T> from(glu, h, first, m, gates, ups);
    for (int64_t j = 0; j < m; j += kLanes<T>) {
      const auto value = clamped_gate<T>(glu, load_n(from.gate + j, m - j)).value *
                         clamped_up<T>(glu, load_n(from.up + j, m - j)).value;
      store_n(out + first + j, value, m - j);
    }
  }
}

// The gradient of h, in its layout.
template <class T>
void clamped_glu_backward(const ClampedGlu& glu, const T* grad, const T* h, int64_t first, int64_t n,
                          T* grad_h) {
  T gates[kGluBlock], ups[kGluBlock], grad_gates[kGluBlock], grad_ups[kGluBlock];
  for (const int64_t end = first + n; first < end; first += kGluBlock) {
    const int64_t m = end - first < kGluBlock ? end - first : kGluBlock;
    const GateAndUp<T> from(glu, h, first, m, gates, ups);
    T* to_gate = glu.interleaved ? grad_gates : grad_h + first;
    T* to_up = glu.interleaved ? grad_ups : grad_h + glu.width + first;
    for (int64_t j = 0; j < m; j += kLanes<T>) {
      const auto g = load_n(grad + first + j, m - j);
      const auto gate = clamped_gate<T>(glu, load_n(from.gate + j, m - j));
      const auto up = clamped_up<T>(glu, load_n(from.up + j, m - j));
      store_n(to_gate + j, g * up.value * gate.slope, m - j);
      store_n(to_up + j, g * gate.value * up.slope, m - j);
    }
    if (!glu.interleaved) continue;
    T* turns = grad_h + 2 * first;
    for (int64_t j = 0; j < m; ++j) {
      turns[2 * j] = grad_gates[j];
      turns[2 * j + 1] = grad_ups[j];
    }
  }
}

#include "isa_end.h"
