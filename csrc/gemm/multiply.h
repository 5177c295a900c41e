// The units and the tile products of one instruction set, for the table of kernels (multiply_row_major,
// multiply_transposed); kernels.h has the layouts. Entry makes a kernel of typed pointers an entry of the
// table.
#pragma once

#include "vec.h"

#include "isa_begin.h"

// What is multiplied: a unit of k_step elements as it lies in packed memory, and its product into sums.
struct FloatUnit {
  using Operand = float;
  using Unit = float;
  using Acc = float;
  using Sum = VF;
  static constexpr int k_step = 1;
  static VF load_unit(const float* p) { return load(p); }
  static VF broadcast_unit(const float* p) { return broadcast(*p); }
  static VF multiply_add(VF a, VF b, VF sum) { return fma(a, b, sum); }
};

struct DoubleUnit {
  using Operand = double;
  using Unit = double;
  using Acc = double;
  using Sum = VD;
  static constexpr int k_step = 1;
  static VD load_unit(const double* p) { return load(p); }
  static VD broadcast_unit(const double* p) { return broadcast(*p); }
  static VD multiply_add(VD a, VD b, VD sum) { return fma(a, b, sum); }
};

#ifdef FMOE_BF16_DOT
struct Bf16PairUnit {
  using Operand = BF16;
  using Unit = uint32_t;
  using Acc = float;
  using Sum = VF;
  static constexpr int k_step = 2;
  static VU load_unit(const uint32_t* p) { return load_bytes<VU>(p); }
#ifdef FMOE_NEON
  static VF multiply_add(VU a, VU b, VF sum) {
    return (VF)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
  // One pair in a register, which the product itself broadcasts.
  static uint32x2_t broadcast_unit(const uint32_t* p) { return uint32x2_t{*p, 0}; }
  static VF multiply_add(uint32x2_t a, VU b, VF sum) {
    return (VF)vbfdotq_lane_f32((float32x4_t)sum, (bfloat16x8_t)b, (bfloat16x4_t)a, 0);
  }
#else
  static VU broadcast_unit(const uint32_t* p) { return *p - VU{}; }
  static VF multiply_add(VU a, VU b, VF sum) {
    return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
#endif
};
#endif

template <class T>
struct UnitOf {
  using type = FloatUnit;
};
template <>
struct UnitOf<double> {
  using type = DoubleUnit;
};
#ifdef FMOE_BF16_DOT
template <>
struct UnitOf<BF16> {
  using type = Bf16PairUnit;
};
#endif

template <class T>
using AccOf = typename UnitOf<T>::type::Acc;
template <class T>
using OperandOf = typename UnitOf<T>::type::Operand;

// A pointer to elements of the type that its role has where tensors are of T. Kernels cast by these alone.
template <class T>
inline const T* elements_of(const Stored* p) {
  return (const T*)p;
}
template <class T>
inline T* elements_of(Stored* p) {
  return (T*)p;
}
template <class T>
inline const OperandOf<T>* elements_of(const Operand* p) {
  return (const OperandOf<T>*)p;
}
template <class T>
inline OperandOf<T>* elements_of(Operand* p) {
  return (OperandOf<T>*)p;
}
template <class T>
inline const AccOf<T>* elements_of(const Acc* p) {
  return (const AccOf<T>*)p;
}
template <class T>
inline AccOf<T>* elements_of(Acc* p) {
  return (AccOf<T>*)p;
}
template <class T>
inline const T* const* elements_of(const Stored* const* rows) {
  return (const T* const*)rows;
}
template <class T>
inline const OperandOf<T>* const* elements_of(const Operand* const* rows) {
  return (const OperandOf<T>* const*)rows;
}

// An entry of the table that calls `kernel`: pointers to roles become pointers to elements, which are those
// of the kernel or it does not compile.
template <class T, auto kernel>
struct Entry {
  template <class... Args>
  static void call(Args... args) {
    kernel(typed(args)...);
  }
  template <class... Args>
  using Function = void (*)(Args...);
  template <class... Args>
  constexpr operator Function<Args...>() const {
    return call<Args...>;
  }

 private:
  template <class Arg>
  static decltype(auto) typed(Arg& arg) {
    if constexpr (requires { elements_of<T>(arg); })
      return elements_of<T>(arg);
    else
      return (arg);
  }
};

template <class U>
constexpr int kUnitLanes = kBytes / sizeof(typename U::Unit);
template <class U>
constexpr int NR = 2 * kUnitLanes<U>;
constexpr int MR = FMOE_MR;

// Sums in registers are added to the tile every kDepth units: rounding errors then grow as in a blocked
// product.
constexpr int64_t kDepth = 512;

// sum += a * b, in the register of the sum: gcc renames sums of an unrolled loop until it spills some.
#if defined(FMOE_TARGET) && !defined(FMOE_NEON)
inline void add_product(VF a, VF b, VF& sum) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
inline void add_product(VD a, VD b, VD& sum) { asm("vfmadd231pd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
#else
inline void add_product(VF a, VF b, VF& sum) { sum = fma(a, b, sum); }
inline void add_product(VD a, VD b, VD& sum) { sum = fma(a, b, sum); }
#endif

// tile [M, nr] = products over units of k. Sums are in registers; the rows of A behind these M are prefetched
// a line at a time, because the processor cannot know that they are next.
template <class U, int M, bool transposed, int64_t depth>
void multiply_rows(int64_t units, const typename U::Unit* a, int64_t stride, const typename U::Unit* b,
                   typename U::Acc* tile) {
  using Sum = typename U::Sum;
  constexpr int lanes = kUnitLanes<U>, kSteps = 4, kBases = transposed ? 1 : (M + 2) / 3;
  constexpr int64_t line = 64 / sizeof(typename U::Unit);
  constexpr int kAhead = (M * kSteps + line - 1) / line;
  for (int64_t begin = 0; begin == 0 || begin < units; begin += depth) {
    const int64_t end = begin + depth < units ? begin + depth : units;
    Sum sum[M][2] = {};
    // One base pointer for three rows: the other two are reached by the scaled stride.
    const typename U::Unit* base[kBases];
#pragma GCC unroll 8
    for (int i = 0; i < kBases; ++i) base[i] = transposed ? a + begin * stride : a + i * 3 * stride + begin;
    const typename U::Unit* panel = b + begin * NR<U>;
    const auto add = [](const auto& am, const auto& bm, Sum& to) __attribute__((always_inline)) {
      if constexpr (U::k_step == 1)
        add_product(am, bm, to);
      else
        to = U::multiply_add(am, bm, to);
    };
    const auto add_unit = [&](int k) __attribute__((always_inline)) {
      const auto b0 = U::load_unit(panel + k * NR<U>), b1 = U::load_unit(panel + k * NR<U> + lanes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const auto am = U::broadcast_unit(transposed ? base[0] + m : base[m / 3] + m % 3 * stride + k);
        add(am, b0, sum[m][0]);
        add(am, b1, sum[m][1]);
      }
      if constexpr (transposed) base[0] += stride;
    };
    const auto advance = [&](int k) __attribute__((always_inline)) {
      panel += k * NR<U>;
#pragma GCC unroll 8
      for (int i = 0; i < kBases && !transposed; ++i) base[i] += k;
    };
    int64_t k = begin;
    for (; k + line <= end; k += line) {
      const typename U::Unit* ahead = a + M * stride + k;
      for (int i = 0; i < line; i += kSteps) {
#pragma GCC unroll 4
        for (int row = 0; row < kAhead && !transposed; ++row, ahead += stride) __builtin_prefetch(ahead);
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; ++step) add_unit(step);
        advance(kSteps);
      }
    }
    for (; k < end; ++k) {
      add_unit(0);
      advance(1);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < 2; ++j) {
        auto* out = tile + m * NR<U> + j * lanes;
        store(out, begin == 0 ? sum[m][j] : load(out) + sum[m][j]);
      }
  }
}

template <class U, bool transposed, int64_t depth = kDepth, int M = MR>
void multiply(int64_t m, int64_t units, const typename U::Unit* a, int64_t stride, const typename U::Unit* b,
              typename U::Acc* tile) {
  if constexpr (M > 1) {
    if (m < M) return multiply<U, transposed, depth, M - 1>(m, units, a, stride, b, tile);
  }
  multiply_rows<U, M, transposed, depth>(units, a, stride, b, tile);
}

template <class T>
void multiply_row_major(int64_t m, int64_t k, const OperandOf<T>* a, int64_t stride,
                        const OperandOf<T>* panel, AccOf<T>* tile) {
  using U = typename UnitOf<T>::type;
  multiply<U, false>(m, (k + U::k_step - 1) / U::k_step, (const typename U::Unit*)a, stride / U::k_step,
                     (const typename U::Unit*)panel, tile);
}

template <class T>
void multiply_transposed(int64_t m, int64_t k, const OperandOf<T>* a, int64_t stride,
                         const OperandOf<T>* panel, AccOf<T>* tile) {
  using U = typename UnitOf<T>::type;
  multiply<U, true>(m, (k + U::k_step - 1) / U::k_step, (const typename U::Unit*)a, stride / U::k_step,
                    (const typename U::Unit*)panel, tile);
}

#include "isa_end.h"
