// Products with few rows of A, straight from the weights: packing B would take longer than multiplying with
// it. multiply_columns() is A W^T, multiply_rows_of() A W (kernels.h).
#pragma once

#include "packing.h"

#include "isa_begin.h"

constexpr int kRowsAtOnce = kRegisters / 4;
constexpr int kFewRows = 16;            // of A, for which a column is read once
constexpr int kSums = 2 * kRowsAtOnce;  // in registers

constexpr bool kHasFewRegisters = kRegisters == 16 && kBytes == 32;

// How many columns M rows are multiplied with at once: with 16 registers 4 x 3 sums, three columns and a row
// fill them.
constexpr int columns_at_once(int M, int most) {
  if (kHasFewRegisters && M == 4) return 3;
  const int columns = kSums / (M == 1 ? 1 : M == 2 ? 2 : M <= 4 ? 4 : 8);
  return columns < most ? columns : most;
}

// out[c] of each row = the sum of the lanes of sums[row][c]: for float, of W sums at once, where a transpose
// exists.
template <class Sum, class Acc, int M, int C>
inline void store_sums(const Sum (&sums)[M][C], Acc* out, int64_t out_stride) {
#if FMOE_BYTES >= 32
  if constexpr (sizeof(Acc) == 4) {
#pragma GCC unroll 2
    for (int first = 0; first < M * C; first += W) {
      const int count = M * C - first < W ? M * C - first : W;
      Words block[W] = {};
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) block[i] = (Words)sums[(first + i) / C][(first + i) % C];
      transpose(block);
      VF total = (VF)block[0];
#pragma GCC unroll 16
      for (int i = 1; i < W; ++i) total += (VF)block[i];
      Acc line[W];
      store(line, total);
      for (int i = 0; i < count; ++i) out[(first + i) / C * out_stride + (first + i) % C] = line[i];
    }
    return;
  }
#endif
  for (int i = 0; i < M * C; ++i) out[i / C * out_stride + i % C] = sum_lanes(sums[i / C][i % C]);
}

// Bytes of the part of k that all rows are multiplied over at once: they stay in the first-level cache,
// beside 2 x 3 columns where those are read at once.
constexpr int64_t kRowBytes = kHasFewRegisters ? 16 << 10 : 32 << 10;

// Positions [begin, end) of k for M rows times C columns; `kept` has the sums' lanes between two parts of k.
// With each line of a column one is prefetched: of the next columns, or, if those are so many that they would
// drive each other out of the cache, eight lines further on, where the next columns follow on these.
template <class T, int M, int C>
void multiply_few_columns(int64_t begin, int64_t end, int64_t k, const OperandOf<T>* a, int64_t stride,
                          const T* const (&b)[C], const T* const (&next)[C],
                          typename UnitOf<T>::type::Sum* kept, AccOf<T>* out) {
  using U = typename UnitOf<T>::type;
  constexpr int64_t step = U::k_step * kUnitLanes<U>, line = 64 / sizeof(T);
  typename U::Sum sums[M][C] = {};
  if (begin > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < M * C; ++i) sums[i / C][i % C] = kept[i];
  }
  const auto add = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    if constexpr (M == 1) {  // a column at a time: the registers are full of sums
      const auto am = load_units(a + i, n);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sums[0][c] = U::multiply_add(am, load_units(b[c] + i, n), sums[0][c]);
      return;
    }
    decltype(load_units(b[0], n)) units[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) units[c] = load_units(b[c] + i, n);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto am = load_units(a + m * stride + i, n);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sums[m][c] = U::multiply_add(am, units[c], sums[m][c]);
    }
  };
  int64_t i = begin;
  const auto add_lines = [&](int64_t last, const T* const(&ahead)[C], int64_t offset)
                             __attribute__((always_inline)) {
                               for (; i + line <= last; i += line) {
#pragma GCC unroll 16
                                 for (int c = 0; c < C; ++c) __builtin_prefetch(ahead[c] + i + offset);
#pragma GCC unroll 8
                                 for (int64_t j = 0; j < line; j += step) add(i + j, step);
                               }
                             };
  constexpr int64_t kAhead = 8 * line;
  if (C >= 8) {
    add_lines(end - kAhead, b, kAhead);
    add_lines(end, next, kAhead - (end - begin));
  }
  add_lines(end, next, 0);
  for (; i < end; i += step) add(i, end - i);
  if (end == k) return store_sums(sums, out, NR<U>);
#pragma GCC unroll 16
  for (int i = 0; i < M * C; ++i) kept[i] = sums[i / C][i % C];
}

// Columns [column, column + C) for all rows, M at once: a column is read from memory for the first of them,
// and from the cache for the others. Behind the last column the first ones of the next part follow.
template <class T, int M, int C>
void multiply_columns_rows(int64_t rows, int64_t begin, int64_t end, int64_t k, const OperandOf<T>* a,
                           int64_t stride, const T* const* columns, int column, int64_t part,
                           typename UnitOf<T>::type::Sum* kept, AccOf<T>* tile) {
  constexpr int nr = NR<typename UnitOf<T>::type>;
  bool is_empty = true;  // as most of a panel of an adapter's few columns is
  for (int c = 0; c < C; ++c) is_empty &= !columns[column + c];
  if (is_empty) return;
  const T *b[C], *next[C];
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    const int after = column + C + c < nr ? column + C + c : c;
    b[c] = columns[column + c] ? columns[column + c] : columns[0];
    next[c] = (columns[after] ? columns[after] : columns[0]) + (column + C + c < nr ? 0 : part);
  }
  for (int64_t row = 0; row < rows; row += M) {
    const int64_t first = row + M <= rows ? row : rows - M;
    multiply_few_columns<T, M, C>(begin, end, k, a + first * stride, stride, b, next,
                                  kept + row * nr + column * M, tile + first * nr + column);
  }
}

// At most kFewRows rows.
template <class T, int M>
void multiply_columns_parts(int64_t rows, int64_t k, const OperandOf<T>* a, int64_t stride,
                            const T* const* columns, AccOf<T>* tile) {
  using U = typename UnitOf<T>::type;
  constexpr int nr = NR<U>, C = columns_at_once(M, nr), rest = nr % C;
  constexpr int64_t line = 64 / sizeof(T);
  const int64_t part = (kRowBytes / int64_t(sizeof(OperandOf<T>)) / rows + line - 1) / line * line;
  typename U::Sum kept[kFewRows * nr];
  for (int64_t begin = 0; begin == 0 || begin < k; begin += part) {
    const int64_t end = begin + part < k ? begin + part : k;
    int column = 0;
    for (; column + C <= nr; column += C)
      multiply_columns_rows<T, M, C>(rows, begin, end, k, a, stride, columns, column, part, kept, tile);
    if constexpr (rest > 0)
      multiply_columns_rows<T, M, rest>(rows, begin, end, k, a, stride, columns, column, part, kept, tile);
  }
  for (int column = 0; column < nr; ++column)
    for (int64_t m = 0; m < rows && !columns[column]; ++m) tile[m * nr + column] = 0;
}

template <class T, int M = kRowsAtOnce>
void multiply_columns(int64_t m, int64_t k, const OperandOf<T>* a, int64_t stride, const T* const* columns,
                      AccOf<T>* tile) {
  const int64_t rows = m < kFewRows ? m : kFewRows, parts = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  if constexpr (M > 1) {
    if ((rows + parts - 1) / parts < M) return multiply_columns<T, M - 1>(m, k, a, stride, columns, tile);
  }
  multiply_columns_parts<T, M>(rows, k, a, stride, columns, tile);
  if constexpr (M == kRowsAtOnce)
    if (m > rows)
      multiply_columns<T>(m - rows, k, a + rows * stride, stride, columns,
                          tile + rows * NR<typename UnitOf<T>::type>);
}

// Two vectors of units from rows that lie `ld` elements apart. Pairs in vectors of more than 128 bits have
// the columns of the two interleaved by four: natural_order puts sums right.
template <class T>
inline auto load_two(const T* rows, int64_t ld, int64_t rows_left) {
  using U = typename UnitOf<T>::type;
  struct {
    decltype(load_units(rows, 0)) first, second;
  } two;
  if constexpr (U::k_step == 1) {
    two.first = load(rows);
    two.second = load(rows + kLanes<T>);
  } else {
#if defined(FMOE_BF16_DOT) && defined(FMOE_NEON)
    const auto low = load_bytes<uint16x8_t>(rows);
    const auto high = rows_left > 1 ? load_bytes<uint16x8_t>(rows + ld) : uint16x8_t{};
    two.first = (VU)vzip1q_u16(low, high);
    two.second = (VU)vzip2q_u16(low, high);
#elif defined(FMOE_BF16_DOT)
    const __m512i low = (__m512i)load_bytes<VU>(rows);
    const __m512i high = rows_left > 1 ? (__m512i)load_bytes<VU>(rows + ld) : _mm512_setzero_si512();
    two.first = (VU)_mm512_unpacklo_epi16(low, high);
    two.second = (VU)_mm512_unpackhi_epi16(low, high);
#endif
  }
  return two;
}

template <class U, class Sum>
inline void natural_order(Sum& first, Sum& second) {
#if defined(FMOE_BF16_DOT) && FMOE_BYTES == 64
  if constexpr (U::k_step == 2) {
    const __m512 low = _mm512_shuffle_f32x4((__m512)first, (__m512)second, 0x44);
    const __m512 high = _mm512_shuffle_f32x4((__m512)first, (__m512)second, 0xee);
    first = (VF)_mm512_shuffle_f32x4(low, low, 0xd8);
    second = (VF)_mm512_shuffle_f32x4(high, high, 0xd8);
  }
#endif
}

template <class T>
constexpr int64_t kStreams = sizeof(T) == 2 ? 16 : 8;  // rows of B that are read at once
constexpr int64_t kBytesAhead = 512;                   // that are prefetched of each

// Positions [begin, end) of k for one tile of M rows, b from `begin` on; the sums of whole tiles stay out of
// order until the last positions. Each row of b is prefetched `ahead` elements further on.
template <class T, int M, bool whole>
void add_rows(int64_t begin, int64_t end, int64_t k, const OperandOf<T>* a, int64_t stride, const T* b,
              int64_t ld, int64_t ahead, int64_t n, AccOf<T>* tile) {
  using U = typename UnitOf<T>::type;
  using Unit = typename U::Unit;
  constexpr int lanes = kUnitLanes<U>;
  typename U::Sum sum[M][2] = {};
  if (begin > 0) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      sum[m][0] = load(tile + m * NR<U>);
      sum[m][1] = load(tile + m * NR<U> + lanes);
    }
  }
  const auto add = [&](int64_t i, auto count) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(count)::value;
    const T* row = b + (i - begin) * ld;
    decltype(load_two(row, ld, 0)) units;
    if constexpr (whole) {
      for (int c = 0; c < NR<U>; c += 64 / sizeof(T))
        for (int r = 0; r < U::k_step; ++r) __builtin_prefetch(row + r * ld + ahead + c);
      units = load_two(row, ld, k - i);
    } else {
      const T* rows[2] = {row, row + (k - i > 1 ? ld : 0)};
      units.first = gather_units<U>(rows, k - i, 0, n);
      if constexpr (kVectors == 2) units.second = gather_units<U>(rows, k - i, lanes, n - lanes);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto am = U::broadcast_unit((const Unit*)(a + m * stride + i));
      sum[m][0] = U::multiply_add(am, units.first, sum[m][0]);
      if constexpr (kVectors == 2) sum[m][1] = U::multiply_add(am, units.second, sum[m][1]);
    }
  };
  if (whole || n > lanes) {
    for (int64_t i = begin; i < end; i += U::k_step) add(i, std::integral_constant<int, 2>{});
  } else {
    for (int64_t i = begin; i < end; i += U::k_step) add(i, std::integral_constant<int, 1>{});
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if (whole && end == k) natural_order<U>(sum[m][0], sum[m][1]);
    store(tile + m * NR<U>, sum[m][0]);
    store(tile + m * NR<U> + lanes, sum[m][1]);
  }
}

template <class T, bool whole, int M = kRowsAtOnce>
void add_few_rows(int64_t m, int64_t begin, int64_t end, int64_t k, const OperandOf<T>* a, int64_t stride,
                  const T* b, int64_t ld, int64_t ahead, int64_t n, AccOf<T>* tile) {
  if constexpr (M > 1) {
    if (m < M) return add_few_rows<T, whole, M - 1>(m, begin, end, k, a, stride, b, ld, ahead, n, tile);
  }
  add_rows<T, M, whole>(begin, end, k, a, stride, b, ld, ahead, n, tile);
  if constexpr (M == kRowsAtOnce)
    if (m > M)
      add_few_rows<T, whole>(m - M, begin, end, k, a + M * stride, stride, b, ld, ahead, n,
                             tile + M * NR<typename UnitOf<T>::type>);
}

template <class T>
void multiply_rows_of(int64_t m, int64_t first, int64_t last, int64_t k, const OperandOf<T>* a,
                      int64_t stride, const T* b, int64_t ld, int64_t n, AccOf<T>* tiles) {
  using U = typename UnitOf<T>::type;
  for (int64_t begin = first; begin == 0 || begin < last; begin += kStreams<T>) {
    const int64_t end = begin + kStreams<T> < last ? begin + kStreams<T> : last;
    const T* rows = b + (begin - first) * ld;
    AccOf<T>* tile = tiles;
    for (int64_t column = 0; column < n; column += NR<U>, tile += m * NR<U>) {
      const auto add = n - column >= NR<U> ? add_few_rows<T, true> : add_few_rows<T, false>;
      // At the end of these rows those of the next turn begin.
      const int64_t in_row = kBytesAhead / int64_t(sizeof(T));
      const int64_t ahead = column + in_row < n ? in_row : in_row - n + kStreams<T> * ld;
      add(m, begin, end, k, a, stride, rows + column, ld, ahead, n - column, tile);
    }
  }
}

#include "isa_end.h"
