// Packing and the tile products of one instruction set; see kernels.h for the layouts.
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

// A pointer to elements of the type that its role has where tensors are of T; the only casts between the two.
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

// tile = products over units of k. Sums are in registers; rows of A after these are prefetched a line at a
// time, because the processor cannot know that they are next.
template <class U, int M, bool transposed>
void multiply_rows(int64_t units, const typename U::Unit* a, int64_t stride, const typename U::Unit* b,
                   typename U::Acc* tile) {
  using Sum = typename U::Sum;
  constexpr int lanes = kUnitLanes<U>, kSteps = 4, kBases = transposed ? 1 : (M + 2) / 3;
  constexpr int64_t line = 64 / sizeof(typename U::Unit);
  constexpr int kAhead = (M * kSteps + line - 1) / line;
  for (int64_t begin = 0; begin == 0 || begin < units; begin += kDepth) {
    const int64_t end = begin + kDepth < units ? begin + kDepth : units;
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

template <class U, bool transposed, int M = MR>
void multiply(int64_t m, int64_t units, const typename U::Unit* a, int64_t stride, const typename U::Unit* b,
              typename U::Acc* tile) {
  if constexpr (M > 1) {
    if (m < M) return multiply<U, transposed, M - 1>(m, units, a, stride, b, tile);
  }
  multiply_rows<U, M, transposed>(units, a, stride, b, tile);
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

template <class T>
void copy_rows(const T* const* rows, int64_t num_rows, int64_t k, OperandOf<T>* dst, int64_t stride) {
  using U = typename UnitOf<T>::type;
  using Operand = typename U::Operand;
  const int64_t padded = (k + U::k_step - 1) / U::k_step * U::k_step;
  for (int64_t r = 0; r < num_rows; ++r) {
    Operand* to = dst + r * stride;
    const T* from = rows[r];
    if constexpr (sizeof(Operand) == sizeof(T)) {
      if (k > 0) __builtin_memcpy(to, from, k * sizeof(T));
    } else {
      for (int64_t i = 0; i < k; i += W) store_n(to + i, load_n(from + i, k - i), k - i);
    }
    for (int64_t i = k; i < padded; ++i) to[i] = Operand{};
  }
}

// A vector of units along k, from a row of n more elements of storage; units past them are zero.
template <class T>
inline auto load_units(const T* p, int64_t n) {
  using U = typename UnitOf<T>::type;
  if constexpr (U::k_step == 1) {
    return load_n(p, n);
  } else {
    constexpr int64_t all = U::k_step * kUnitLanes<U>;
    if (n >= all) return load_bytes<VU>(p);
#if FMOE_BYTES == 64
    return (VU)_mm512_maskz_loadu_epi16(mask_of(n), p);
#endif
    T buffer[all] = {};
    if (n > 0) __builtin_memcpy(buffer, p, n * sizeof(T));
    return load_bytes<VU>(buffer);
  }
}

#if FMOE_BYTES == 64
// Rows to columns of 16 x 16 words: pairs, quadruples, then 128-bit lanes.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88),
                  high = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}
using Words = __m512i;
#elif FMOE_BYTES == 32
// Rows to columns of 8 x 8 words: halves of rows, pairs, then quadruples.
inline void transpose(__m256i (&r)[8]) {
  __m256 t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i low = r[i], high = r[i + 4];
    t[i] = _mm256_castsi256_ps(_mm256_permute2x128_si256(low, high, 0x20));
    t[i + 4] = _mm256_castsi256_ps(_mm256_permute2x128_si256(low, high, 0x31));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    u[i] = _mm256_unpacklo_ps(t[i], t[i + 1]);
    u[i + 1] = _mm256_unpackhi_ps(t[i], t[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m256d first = _mm256_castps_pd(u[i + j]), second = _mm256_castps_pd(u[i + j + 2]);
      r[i + 2 * j] = _mm256_castpd_si256(_mm256_unpacklo_pd(first, second));
      r[i + 2 * j + 1] = _mm256_castpd_si256(_mm256_unpackhi_pd(first, second));
    }
}
using Words = __m256i;
#elif defined(FMOE_NEON)
using Words = uint32x4_t;
inline void transpose(Words (&r)[4]) {
  const auto odd = [](Words a, Words b) { return vreinterpretq_u64_u32(vtrn2q_u32(a, b)); };
  const auto even = [](Words a, Words b) { return vreinterpretq_u64_u32(vtrn1q_u32(a, b)); };
  const uint64x2_t t0 = even(r[0], r[1]), t1 = odd(r[0], r[1]), t2 = even(r[2], r[3]), t3 = odd(r[2], r[3]);
  r[0] = vreinterpretq_u32_u64(vtrn1q_u64(t0, t2));
  r[1] = vreinterpretq_u32_u64(vtrn1q_u64(t1, t3));
  r[2] = vreinterpretq_u32_u64(vtrn2q_u64(t0, t2));
  r[3] = vreinterpretq_u32_u64(vtrn2q_u64(t1, t3));
}
#endif

template <class T>
void pack_columns(const T* const* rows, int64_t k, OperandOf<T>* dst) {
  using U = typename UnitOf<T>::type;
  using Unit = typename U::Unit;
  constexpr int lanes = kUnitLanes<U>;
  const int64_t units = (k + U::k_step - 1) / U::k_step;
  Unit* panel = (Unit*)dst;
  for (int half = 0; half < 2; ++half) {
    const T* const* columns = rows + half * lanes;
    for (int64_t unit = 0; unit < units; unit += lanes) {
      const int64_t element = unit * U::k_step, num_units = units - unit < lanes ? units - unit : lanes;
      Unit* out = panel + unit * NR<U> + half * lanes;
      if constexpr (FMOE_BYTES < 64 || U::k_step > 1)
        for (int i = 0; i < lanes; ++i)
          if (columns[i]) __builtin_prefetch((const char*)(columns[i] + element) + 512);
#if FMOE_BYTES >= 32 || defined(FMOE_NEON)
      if constexpr (sizeof(Unit) == 4) {
        Words block[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i)
          block[i] = columns[i] ? (Words)load_units(columns[i] + element, k - element) : Words{};
        transpose(block);
        if (num_units == lanes) {
#pragma GCC unroll 16
          for (int i = 0; i < lanes; ++i) store_bytes(out + i * NR<U>, block[i]);
        } else {
          for (int64_t i = 0; i < num_units; ++i) store_bytes(out + i * NR<U>, block[i]);
        }
        continue;
      }
#endif
      for (int i = 0; i < lanes; ++i) {
        Unit line[lanes] = {};
        if (columns[i]) store_bytes(line, load_units(columns[i] + element, k - element));
        for (int64_t u = 0; u < num_units; ++u) out[u * NR<U> + i] = line[u];
      }
    }
  }
}

// One vector of units along the lanes, from the k_step rows that make one unit (the last may be missing).
template <class U, class T>
inline auto gather_units(const T* const* rows, int64_t rows_left, int64_t column, int64_t n) {
  if constexpr (U::k_step == 1) {
    return load_n(rows[0] + column, n);
  } else {
    const VF low = load_n(rows[0] + column, n);
    const VF high = rows_left > 1 ? load_n(rows[1] + column, n) : VF{};
    return (VU)low >> 16 | (VU)high;  // a widened bfloat16 has its bits in the upper half
  }
}

template <class U, class T>
void pack_lanes(const T* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                typename U::Operand* dst, int64_t panel_stride) {
  constexpr int width = kUnitLanes<U>;
  const int64_t panel_units = panel_stride / U::k_step;
  constexpr int64_t kAhead = 16;  // rows may be far apart, where the processor does not prefetch by itself
  for (int64_t i = 0; i < k; i += U::k_step) {
    for (int64_t ahead = i + kAhead; ahead < i + kAhead + U::k_step && ahead < k; ++ahead)
      for (int64_t byte = 0; byte < n * int64_t(sizeof(T)); byte += 64)
        __builtin_prefetch((const char*)(rows[ahead] + col0) + byte);
    typename U::Unit* line = (typename U::Unit*)dst + i / U::k_step * lanes;
    for (int64_t c = 0; c < n; c += lanes, line += panel_units) {
      // In steps of whole vectors: what is written past the lanes is overwritten by the next line.
      for (int64_t j = 0; j < lanes; j += width)
        store_bytes(line + j, gather_units<U>(rows + i, k - i, col0 + c + j, n - c - j));
    }
  }
}

template <class T>
void pack_rows(const T* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes, OperandOf<T>* dst,
               int64_t panel_stride) {
  pack_lanes<typename UnitOf<T>::type>(rows, k, col0, n, lanes, dst, panel_stride);
}

template <class T>
void pack_operand_rows(const OperandOf<T>* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                       OperandOf<T>* dst, int64_t panel_stride) {
  pack_lanes<typename UnitOf<T>::type>(rows, k, col0, n, lanes, dst, panel_stride);
}

#include "isa_end.h"
