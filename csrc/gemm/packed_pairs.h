// multiply_packed (kernels.h) of bfloat16 by dot products of pairs: multiply_packed_pairs() at the end puts
// the columns of A in the order of a format's codes, packed_pairs_formats.h has the sums of each format.
#pragma once

#include "packed_pairs_formats.h"

#include "isa_begin.h"

#if defined(FMOE_BF16_DOT) && FMOE_BYTES == 64

template <PackedFormat format, int M>
inline void multiply_pairs(const PackedRow& row, int64_t begin, int64_t columns, const PairsOfA& a,
                           VF (&total)[M]) {
  SumsInTurn<M> sums;
  if constexpr (alternates(format))
    add_alternating<format>(row, begin, columns, a, sums, total);
  else if constexpr (format == PackedFormat::q4_k)
    add_q4_k(row, begin, columns, a, sums);
  else if constexpr (format == PackedFormat::q5_k)
    add_q5_k(row, begin, columns, a, sums);
  else if constexpr (format == PackedFormat::q4_0 || format == PackedFormat::iq4_nl ||
                     format == PackedFormat::iq4_xs)
    add_halves<format>(row, begin, columns, a, sums);
  else if constexpr (format == PackedFormat::q6_k)
    add_q6_k(row, begin, columns, a, sums);
  else if constexpr (format == PackedFormat::fp8_block)
    add_fp8_block(row, begin, columns, a, sums);
  else if constexpr (format == PackedFormat::mxfp8)
    add_mxfp8(row, begin, columns, a, sums);
  else {
    static_assert(format == PackedFormat::q8_0, "a new format needs its own sums here");
    add_q8_0(row, begin, columns, a, sums);
  }
  sums.add_to(total);
}

// The even ones of 64 values, then the odd ones.
inline void deinterleave(__m512i& first, __m512i& second) {
  alignas(64) static constexpr uint16_t kEven[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                     22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                     44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const __m512i even = load_pairs(kEven), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  const __m512i low = first, high = second;
  first = _mm512_permutex2var_epi16(low, even, high);
  second = _mm512_permutex2var_epi16(low, odd, high);
}

// Each 128 columns in the order of the codes in 32 words: those of the lowest four bits first. Formats that
// alternate have four neighbours in a word; q4_k has two of one group, and two of the next.
inline void order_of_words(PackedFormat format, BF16* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 4 * kPairs) {
    __m512i parts[4];
    for (int p = 0; p < 4; ++p) parts[p] = load_pairs(x + i + p * kPairs);
    if (format != PackedFormat::q4_k) {
      deinterleave(parts[0], parts[1]);
      deinterleave(parts[2], parts[3]);
      deinterleave(parts[0], parts[2]);
      deinterleave(parts[1], parts[3]);
    } else {
      deinterleave(parts[0], parts[2]);
      deinterleave(parts[1], parts[3]);
    }
    for (int p = 0; p < 4; ++p) store_bytes(x + i + p * kPairs, parts[p]);
  }
}

// `n` columns of a row of A, and zeros to a multiple of 128, in the order of the format.
inline void order_pairs(PackedFormat format, bool has_zeros, const BF16* from, int64_t n, BF16* to,
                        float* sums) {
  constexpr int64_t kStep = 4 * kPairs;
  __builtin_memcpy(to, from, n * sizeof(BF16));
  __builtin_memset(to + n, 0, ((n + kStep - 1) / kStep * kStep - n) * sizeof(BF16));
  if (format == PackedFormat::q4_k || format == PackedFormat::q5_k || has_zeros) {
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    for (int64_t i = 0; i < n; i += W * kGroup) {
      VF parts[1][W];
      for (int g = 0; g < W; ++g)
        parts[0][g] = i + g * kGroup < n ? dot_pairs(load_pairs(to + i + g * kGroup), ones, VF{}) : VF{};
      store_sums(parts, sums + i / kGroup, W);
    }
  }
  if (alternates(format) || format == PackedFormat::q4_k) order_of_words(format, to, n);
}

template <PackedFormat format, int M>
void multiply_pairs_of_rows(int64_t begin, int64_t columns, const PairsOfA& a, const PackedRow* rows, int nr,
                            float* tile) {
  constexpr int C = M == 1 ? 16 : M == 2 ? 8 : M <= 4 ? 4 : 2;
  for (int j = 0; j < nr; j += C) {
    VF sums[M][C];
    for (int c = 0; c < C; ++c) {
      VF total[M] = {};
      if (rows[j + c].data) multiply_pairs<format, M>(rows[j + c], begin, columns, a, total);
      for (int m = 0; m < M; ++m) sums[m][c] = total[m];
    }
    float part[M * C];
    store_sums(sums, part, C);
    for (int m = 0; m < M; ++m)
      for (int c = 0; c < C; ++c) {
        float& out = tile[m * nr + j + c];
        out = begin == 0 ? part[m * C + c] : out + part[m * C + c];
      }
  }
}

template <PackedFormat format, int M>
void multiply_pairs_of_up_to(int64_t m, int64_t begin, int64_t columns, const PairsOfA& a,
                             const PackedRow* rows, int nr, float* tile) {
  if constexpr (M > 1)
    if (m < M) return multiply_pairs_of_up_to<format, M - 1>(m, begin, columns, a, rows, nr, tile);
  multiply_pairs_of_rows<format, M>(begin, columns, a, rows, nr, tile);
}

// Tiles [m, nr] of few rows and the columns of each panel.
inline void multiply_packed_pairs(int64_t m, int64_t k, const BF16* a, int64_t stride, const PackedRow* rows,
                                  int64_t num_panels, float* tiles) {
  constexpr int nr = NR<Bf16PairUnit>;
  static_assert(nr % 16 == 0);
  PairsOfA buffer;
  const PackedFormat format = rows[0].format;
  with_format(format, [&](auto constant) {
    constexpr PackedFormat f = decltype(constant)::value;
    constexpr int kRows = rows_at_once(f);
    for (int64_t first = 0; first < m; first += kRows) {
      const int64_t M = m - first < kRows ? m - first : kRows;
      for (int64_t begin = 0; begin == 0 || begin < k; begin += kPairsDepth) {  // k = 0: tiles of zeros
        const int64_t n = k - begin < kPairsDepth ? k - begin : kPairsDepth;
        for (int64_t r = 0; r < M; ++r)
          order_pairs(f, rows[0].zero != nullptr, a + (first + r) * stride + begin, n, buffer.columns[r],
                      buffer.sums[r]);
        for (int64_t p = 0; p < num_panels; ++p)
          multiply_pairs_of_up_to<f, kRows>(M, begin, n, buffer, rows + p * nr, nr,
                                            tiles + (p * m + first) * nr);
      }
    }
  });
}

#endif

#include "isa_end.h"
