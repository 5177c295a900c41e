// Rows of tensors -> blocks and panels of operands, for one instruction set: copy_rows, pack_columns,
// pack_rows and pack_operand_rows of the table. kernels.h has their contracts and the layouts.
#pragma once

#include "multiply.h"

#include "isa_begin.h"

template <class T>
void copy_rows(const T* const* rows, int64_t num_rows, int64_t k, OperandOf<T>* dst, int64_t stride) {
  using U = typename UnitOf<T>::type;
  using Operand = typename U::Operand;
  const int64_t padded = (k + U::k_step - 1) / U::k_step * U::k_step;
  constexpr int64_t kAhead = 8, kBytesAhead = 512;  // rows may be far apart, in the order of their tokens
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t byte = 0; r + kAhead < num_rows && byte < k * int64_t(sizeof(T)) && byte < kBytesAhead;
         byte += 64)
      __builtin_prefetch((const char*)rows[r + kAhead] + byte);
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
  const int64_t row_bytes = k * sizeof(T);
  const int64_t ahead = row_bytes > 512 ? 512 : lanes * row_bytes;  // short rows: the next block of rows
  for (int half = 0; half < 2; ++half) {
    const T* const* columns = rows + half * lanes;
    for (int64_t unit = 0; unit < units; unit += lanes) {
      const int64_t element = unit * U::k_step, num_units = units - unit < lanes ? units - unit : lanes;
      Unit* out = panel + unit * NR<U> + half * lanes;
      if constexpr (FMOE_BYTES < 64 || U::k_step > 1)
        for (int i = 0; i < lanes; ++i)
          if (columns[i]) __builtin_prefetch((const char*)(columns[i] + element) + ahead);
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

#if defined(FMOE_BF16_DOT) && FMOE_BYTES == 64
inline __m512i load_values(const BF16* row, int64_t n) {
  if (n >= 2 * W) return _mm512_loadu_si512(row);
  return n > 0 ? _mm512_maskz_loadu_epi16((1u << n) - 1, row) : _mm512_setzero_si512();
}

// Pairs of rows i and i + 1, a row from k on being zero: of 16 columns from `column` on, and of 16 from
// column + step on. n: columns that are there; the others are zero.
struct PairsOfRows {
  __m512i first, second;
  PairsOfRows(const BF16* const* rows, int64_t i, int64_t k, int64_t column, int64_t n, int step = W) {
    alignas(64) static constexpr uint16_t kTurns[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                        37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i turns = _mm512_load_si512(kTurns);
    const __m512i low = i < k ? load_values(rows[i] + column, n) : _mm512_setzero_si512();
    const __m512i high = i + 1 < k ? load_values(rows[i + 1] + column, n) : _mm512_setzero_si512();
    first = _mm512_permutex2var_epi16(low, turns, high);
    second = _mm512_permutex2var_epi16(low, _mm512_add_epi16(turns, _mm512_set1_epi16(step)), high);
  }
};
#endif

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

// The unit at position i of k, of n columns: one line of each panel.
template <class U, class T>
inline void pack_lines(const T* const* rows, int64_t i, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                       typename U::Unit* line, int64_t panel_units) {
  constexpr int width = kUnitLanes<U>;
#if defined(FMOE_BF16_DOT) && FMOE_BYTES == 64
  if constexpr (U::k_step == 2) {
    const bool is_narrow = lanes < width;  // then two panels at a time
    const int64_t step = is_narrow ? lanes : width, next = is_narrow ? panel_units : width;
    for (int64_t c = 0; c < n; c += 2 * step, line += is_narrow ? 2 * panel_units : panel_units) {
      const PairsOfRows pairs(rows, i, k, col0 + c, n - c, step);
      store_bytes(line, pairs.first);
      if (!is_narrow || c + step < n) store_bytes(line + next, pairs.second);
    }
    return;
  }
#endif
  for (int64_t c = 0; c < n; c += lanes, line += panel_units)
    for (int64_t j = 0; j < lanes; j += width)
      store_bytes(line + j, gather_units<U>(rows + i, k - i, col0 + c + j, n - c - j));
}

template <class U, class T>
void pack_lanes(const T* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                typename U::Operand* dst, int64_t panel_stride) {
  constexpr int64_t kAhead = 16;  // rows may be far apart, where the processor does not prefetch by itself
  for (int64_t i = 0; i < k; i += U::k_step) {
    for (int64_t ahead = i + kAhead; ahead < i + kAhead + U::k_step && ahead < k; ++ahead)
      for (int64_t byte = 0; byte < n * int64_t(sizeof(T)); byte += 64)
        __builtin_prefetch((const char*)(rows[ahead] + col0) + byte);
    // In steps of whole vectors: what is written past the lanes is overwritten by the next line; after a
    // panel's last line it lies in the slack that blocks.h leaves (kPackSlack).
    typename U::Unit* line = (typename U::Unit*)dst + i / U::k_step * lanes;
    pack_lines<U>(rows, i, k, col0, n, lanes, line, panel_stride / U::k_step);
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
