// Products of a packed row with few rows of bfloat16 by dot products of pairs, for each format;
// packed_pairs.h calls them. The values of codes are exact in bfloat16 (NF4's to 1e-5, as the sum of two);
// the scale multiplies the sum of its block, in float.
#pragma once

#include "packed_rows.h"

#include "isa_begin.h"

#if defined(FMOE_BF16_DOT) && FMOE_BYTES == 64

constexpr int64_t kPairsDepth = 4096;  // columns of A that are put in order at once
constexpr int kMostBlocks = kPairsDepth / kGroup;
constexpr int kPairs = 32;     // bfloat16 of a register
constexpr int kPairsRows = 8;  // the most rows of A for which a weight is decoded once

// Of the other formats decoding costs less than reading eight rows of A from further caches.
constexpr int rows_at_once(PackedFormat format) {
  const bool is_slow = format == PackedFormat::fp8_block || format == PackedFormat::q8_0 ||
                       format == PackedFormat::q6_k || format == PackedFormat::q5_k ||
                       format == PackedFormat::mxfp8;
  return is_slow ? kPairsRows : kPairsRows / 2;
}

struct Codes {
  uint16_t value[32];
  constexpr Codes(const float* table, bool rest = false) : value() {
    for (int i = 0; i < 32; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, table[i % 16]);
      const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
      const float left = table[i % 16] - __builtin_bit_cast(float, rounded);
      value[i] = (rest ? __builtin_bit_cast(uint32_t, left) : rounded) >> 16;
    }
  }
};
alignas(64) constexpr float kAroundZero[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
alignas(64) constexpr Codes kCountingPairs(kCounting), kE2M1Pairs(kE2M1), kAroundZeroPairs(kAroundZero),
    kIq4Pairs(kIq4);
alignas(64) constexpr Codes kQuantilePairs(kQuantiles), kQuantileRests(kQuantiles, true);

// 0x00 to 0x7f of E4M3, -32 to 31, and 0 to 31.
struct LongCodes {
  uint16_t e4m3[128], six[64], five[32];
  constexpr LongCodes() : e4m3(), six(), five() {
    for (int i = 0; i < 128; ++i) {
      const float value = i / 8 == 0 ? (i % 8) * 0x1p-9f : (8 + i % 8) * 0x1p-10f * float(1 << i / 8);
      e4m3[i] = i == 127 ? 0x7fc0 : __builtin_bit_cast(uint32_t, value) >> 16;
    }
    for (int i = 0; i < 64; ++i) six[i] = __builtin_bit_cast(uint32_t, float(i - 32)) >> 16;
    for (int i = 0; i < 32; ++i) five[i] = __builtin_bit_cast(uint32_t, float(i)) >> 16;
  }
};
alignas(64) constexpr LongCodes kLongCodes;

// Rows of A in the order of the codes, and the sum of each block of 32 columns where a format needs it.
struct PairsOfA {
  // kPairs more, so that rows begin in different lines of a cache
  alignas(64) BF16 columns[kPairsRows][kPairsDepth + kPairs];
  alignas(64) float sums[kPairsRows][kMostBlocks];
};

inline VF dot_pairs(__m512i x, __m512i values, VF sum) {
  return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)values);
}
inline __m512i load_pairs(const void* p) { return load_bytes<__m512i>(p); }
inline __m512i words_of(const void* bytes) { return _mm512_cvtepu8_epi16(load_bytes<__m256i>(bytes)); }

// Products that are added in turn to several sums, so that none waits for the one before.
template <int M>
struct SumsInTurn {
  static constexpr int kSumsOfRow = M == 1 ? 4 : M == 2 ? 2 : 1;
  VF sum[M][kSumsOfRow] = {};
  // Inlined early: gcc would fold this function's copies for several M into one, and warn of its bounds.
  __attribute__((always_inline)) void add(int m, int turn, VF product, VF scale) {
    VF& to = sum[m][turn % kSumsOfRow];
    to = fma(product, scale, to);
  }
  void add_to(VF (&total)[M]) const {
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < kSumsOfRow; ++i) total[m] += sum[m][i];
  }
};

// The block of the same place some rows on: the processor does not read ahead beyond a page of memory, and
// decoding four kilobytes takes less time than reading the next ones.
template <int bytes>
inline void prefetch_block(const uint8_t* block) {
  constexpr int kAhead = 8192;
#pragma GCC unroll 4
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(block + kAhead + i, 0, 0);
}

// The eight scales of a block of Q4_K or Q5_K, then its eight minima.
inline __m512 scales_of_k(const uint8_t* block) {
  const __m128i head = load_bytes<__m128i>(block);  // d, dmin, then 12 bytes q
  // q0-3, q8-11, q4-7, q8-11; and those whose upper two bits belong to the second and the fourth of these.
  const __m128i first =
      _mm_shuffle_epi8(head, _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m128i upper =
      _mm_shuffle_epi8(head, _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
  const __m128i low = _mm_and_si128(_mm_srlv_epi32(first, _mm_setr_epi32(0, 0, 0, 4)),
                                    _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
  const __m128i high = _mm_and_si128(_mm_srli_epi32(upper, 2), _mm_set1_epi32(0x30303030));
  const __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_or_si128(low, high)));
  const __m512i of_half = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_mul_ps(codes, _mm512_permutexvar_ps(of_half, _mm512_castps128_ps512(_mm_cvtph_ps(head))));
}

// Products of M rows of A with columns [begin, begin + columns) of a packed row are added to sums: one
// function for the formats whose codes alternate, and one for each of the others. Where codes have zero
// points, what belongs to those is added to `total`.
template <PackedFormat format, int M>
__attribute__((always_inline)) inline void add_alternating(const PackedRow& row, int64_t begin,
                                                           int64_t columns, const PairsOfA& a,
                                                           SumsInTurn<M>& sums, VF (&total)[M]) {
  constexpr bool is_int4 = format == PackedFormat::int4, is_nf4 = format == PackedFormat::nf4;
  constexpr int kScales = format == PackedFormat::nvfp4 ? 2 : 1;  // of a block
  const __m512i table = load_pairs(is_int4 ? &kAroundZeroPairs : is_nf4 ? &kQuantilePairs : &kE2M1Pairs);
  const __m512i rests = load_pairs(&kQuantileRests);
  const __m512i quarters = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  const __m512i eighths = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  alignas(64) float scales[kScales * kMostBlocks + 2 * W], zeros[is_int4 ? kMostBlocks + 2 * W : 1];
  const int64_t blocks = columns / kGroup;
  const bool has_zeros = is_int4 && row.zero;
  load_scales_of_blocks(row, begin / kGroup, blocks, scales, has_zeros ? zeros : nullptr);
  store(scales + kScales * blocks, VF{});
  const auto add = [&](int64_t b, __m512i words, auto turn) __attribute__((always_inline)) {
    VF scale;
    if constexpr (kScales == 2)
      scale = (VF)_mm512_permutexvar_ps(eighths, (__m512)load(scales + 2 * b));
    else
      scale = (VF)_mm512_permutevar_ps(_mm512_broadcast_f32x4(load_bytes<__m128>(scales + b)), quarters);
    const __m512i codes[4] = {words, _mm512_srli_epi16(words, 4), _mm512_srli_epi16(words, 8),
                              _mm512_srli_epi16(words, 12)};
    __m512i values[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) values[v] = _mm512_permutexvar_epi16(codes[v], table);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      VF sum = {};
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m512i x = load_pairs(a.columns[m] + b * kGroup + (is_nf4 ? v ^ 1 : v) * kPairs);
        sum = dot_pairs(x, values[v], sum);
        if constexpr (is_nf4) sum = dot_pairs(x, _mm512_permutexvar_epi16(codes[v], rests), sum);
      }
      sums.add(m, turn, sum, scale);
    }
  };
  const uint8_t* bytes = row.data + begin / 2;
  int64_t b = 0;
  for (; b + 8 <= blocks; b += 8) {
    prefetch_block<128>(bytes + b * 16);
    add(b, load_pairs(bytes + b * 16), std::integral_constant<int, 0>{});
    add(b + 4, load_pairs(bytes + b * 16 + 64), std::integral_constant<int, 1>{});
  }
  for (; b < blocks; b += 4) {
    const __mmask64 there = blocks - b < 4 ? (uint64_t{1} << 16 * (blocks - b)) - 1 : ~uint64_t{0};
    add(b, _mm512_maskz_loadu_epi8(there, bytes + b * 16), std::integral_constant<int, 0>{});
  }
  if (has_zeros)
    for (int64_t b = 0; b < blocks; b += W)
      for (int m = 0; m < M; ++m) {
        const VF offset = (broadcast(8.f) - load(zeros + b)) * load(scales + b);
        total[m] +=
            blocks - b < W ? offset * load_n(a.sums[m] + b, blocks - b) : offset * load(a.sums[m] + b);
      }
}

// scales: as scales_of_k has them, of the block of columns from `at` on.
template <int M>
__attribute__((always_inline)) inline void subtract_minima(int64_t at, __m512 scales, const PairsOfA& a,
                                                           SumsInTurn<M>& sums) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
    sums.sum[m][0] -= (VF)_mm512_mul_ps(scales, _mm512_maskz_loadu_ps(0xff00, a.sums[m] + at / kGroup - 8));
}

template <int M>
__attribute__((always_inline)) inline void add_q4_k(const PackedRow& row, int64_t begin, int64_t columns,
                                                    const PairsOfA& a, SumsInTurn<M>& sums) {
  const __m512i table = load_pairs(&kCountingPairs);
  const __m512i halves = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
  for (int64_t at = 0; at < columns; at += 8 * kGroup) {
    const uint8_t* block = row.data + 144 * ((begin + at) / (8 * kGroup));
    prefetch_block<144>(block);
    const __m512 scales = scales_of_k(block);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i words = load_pairs(block + 16 + 64 * half);
      const __m512i codes[4] = {words, _mm512_srli_epi16(words, 4), _mm512_srli_epi16(words, 8),
                                _mm512_srli_epi16(words, 12)};
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {  // groups 4 half + odd and + 2, of the low or the high codes
        const __m512i first = _mm512_permutexvar_epi16(codes[odd], table);
        const __m512i second = _mm512_permutexvar_epi16(codes[2 + odd], table);
        const VF scale =
            (VF)_mm512_permutexvar_ps(_mm512_add_epi32(halves, _mm512_set1_epi32(4 * half + odd)), scales);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const BF16* x = a.columns[m] + at + half * 4 * kGroup + odd * kPairs;
          const VF sum = dot_pairs(load_pairs(x), first, VF{});
          sums.add(m, 2 * half + odd, dot_pairs(load_pairs(x + 2 * kPairs), second, sum), scale);
        }
      }
    }
    subtract_minima(at, scales, a, sums);
  }
}

template <int M>
__attribute__((always_inline)) inline void add_q5_k(const PackedRow& row, int64_t begin, int64_t columns,
                                                    const PairsOfA& a, SumsInTurn<M>& sums) {
  const __m512i table = load_pairs(kLongCodes.five);
  for (int64_t at = 0; at < columns; at += 8 * kGroup) {
    const uint8_t* block = row.data + 176 * ((begin + at) / (8 * kGroup));
    prefetch_block<176>(block);
    const __m512 scales = scales_of_k(block);
    const __m512i high = words_of(block + 16);
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      const __m512i low = _mm512_and_si512(_mm512_srli_epi16(words_of(block + 48 + 32 * (s / 2)), s % 2 * 4),
                                           _mm512_set1_epi16(15));
      const __m512i fifth = _mm512_and_si512(
          s < 4 ? _mm512_slli_epi16(high, 4 - s) : _mm512_srli_epi16(high, s - 4), _mm512_set1_epi16(16));
      const __m512i values = _mm512_permutexvar_epi16(_mm512_or_si512(low, fifth), table);
      const VF scale = (VF)_mm512_permutexvar_ps(_mm512_set1_epi32(s), scales);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        sums.add(m, s, dot_pairs(load_pairs(a.columns[m] + at + s * kGroup), values, VF{}), scale);
    }
    subtract_minima(at, scales, a, sums);
  }
}

template <int M>
__attribute__((always_inline)) inline void add_q6_k(const PackedRow& row, int64_t begin, int64_t columns,
                                                    const PairsOfA& a, SumsInTurn<M>& sums) {
  const __m512i first = load_pairs(kLongCodes.six), second = load_pairs(kLongCodes.six + 32);
  for (int64_t at = 0; at < columns; at += 8 * kGroup) {
    const uint8_t* block = row.data + 210 * ((begin + at) / (8 * kGroup));
    prefetch_block<210>(block);
    float scales[2 * W] = {};
    store(scales, (VF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes<__m128i>(block + 192))) *
                      half_at(block + 208));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i high = words_of(block + 128 + 32 * half);
      const __m512i low[2] = {words_of(block + 64 * half), words_of(block + 64 * half + 32)};
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        const __m512i four =
            _mm512_and_si512(_mm512_srli_epi16(low[quarter % 2], quarter / 2 * 4), _mm512_set1_epi16(15));
        const __m512i two = _mm512_and_si512(
            quarter < 2 ? _mm512_slli_epi16(high, 4 - 2 * quarter) : _mm512_srli_epi16(high, 2 * quarter - 4),
            _mm512_set1_epi16(48));
        const __m512i values = _mm512_permutex2var_epi16(first, _mm512_or_si512(four, two), second);
        const int s = 4 * half + quarter;
        const VF scale = scales_of_two(scales + 2 * s);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const __m512i x = load_pairs(a.columns[m] + at + s * kGroup);
          sums.add(m, s, dot_pairs(x, values, VF{}), scale);
        }
      }
    }
  }
}

// Bytes of E4M3 in words -> bfloat16.
inline __m512i pairs_of_e4m3(__m512i codes) {
  const __m512i small =
      _mm512_permutex2var_epi16(load_pairs(kLongCodes.e4m3), codes, load_pairs(kLongCodes.e4m3 + 32));
  const __m512i large =
      _mm512_permutex2var_epi16(load_pairs(kLongCodes.e4m3 + 64), codes, load_pairs(kLongCodes.e4m3 + 96));
  const __mmask32 is_large = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
  const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(codes, 7), 15);
  return _mm512_or_si512(_mm512_mask_blend_epi16(is_large, small, large), sign);
}

template <int M>
__attribute__((always_inline)) inline void add_mxfp8(const PackedRow& row, int64_t begin, int64_t columns,
                                                     const PairsOfA& a, SumsInTurn<M>& sums) {
  const auto add = [&](int64_t at, auto turn) __attribute__((always_inline)) {
    const __m512i values = pairs_of_e4m3(words_of(row.data + begin + at));
    const VF scale = broadcast(e8m0(row.scale[(begin + at) / kGroup]));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
      sums.add(m, turn, dot_pairs(load_pairs(a.columns[m] + at), values, VF{}), scale);
  };
  int64_t at = 0;
  for (; at + 4 * kGroup <= columns; at += 4 * kGroup) {
    prefetch_block<128>(row.data + begin + at);
    add(at, std::integral_constant<int, 0>{});
    add(at + kGroup, std::integral_constant<int, 1>{});
    add(at + 2 * kGroup, std::integral_constant<int, 2>{});
    add(at + 3 * kGroup, std::integral_constant<int, 3>{});
  }
  for (; at < columns; at += kGroup) add(at, std::integral_constant<int, 0>{});
}

template <int M>
__attribute__((always_inline)) inline void add_fp8_block(const PackedRow& row, int64_t begin, int64_t columns,
                                                         const PairsOfA& a, SumsInTurn<M>& sums) {
  const auto add = [&](int64_t at, const __m512i(&codes)[4], auto turn) __attribute__((always_inline)) {
    const VF scale = broadcast(scale_at(row, (begin + at) / (4 * kGroup)));
    __m512i values[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) values[v] = pairs_of_e4m3(codes[v]);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      VF sum = {};
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sum = dot_pairs(load_pairs(a.columns[m] + at + v * kGroup), values[v], sum);
      sums.add(m, turn, sum, scale);
    }
  };
  const auto codes_at = [&](int64_t at, __m512i(&codes)[4]) __attribute__((always_inline)) {
    const int64_t left = row.columns - (begin + at);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const int64_t n = left - v * kGroup;
      const __mmask32 there = n >= kGroup ? ~0u : n <= 0 ? 0u : (1u << n) - 1;
      codes[v] = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, row.data + begin + at + v * kGroup));
    }
  };
  __m512i codes[4];
  for (int64_t at = 0; at < columns; at += 4 * kGroup) {
    const uint8_t* bytes = row.data + begin + at;
    prefetch_block<128>(bytes);
    if (row.columns - (begin + at) >= 4 * kGroup) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) codes[v] = words_of(bytes + v * kGroup);
    } else {
      codes_at(at, codes);
    }
    add(at, codes, std::integral_constant<int, 0>{});
  }
}

template <int M>
__attribute__((always_inline)) inline void add_q8_0(const PackedRow& row, int64_t begin, int64_t columns,
                                                    const PairsOfA& a, SumsInTurn<M>& sums) {
  Decoder<PackedFormat::q8_0> decoder{row};
  const auto add = [&](int64_t at, auto turn) __attribute__((always_inline)) {
    decoder.open((begin + at) / kGroup);
    const __m512i values =
        (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)decoder.bytes[1])),
                                     _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)decoder.bytes[0])));
    const VF scale = broadcast(decoder.scale);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
      sums.add(m, turn, dot_pairs(load_pairs(a.columns[m] + at), values, VF{}), scale);
  };
  int64_t at = 0;
  for (; at + 4 * kGroup <= columns; at += 4 * kGroup) {
    prefetch_block<34 * 4>(row.data + (begin + at) / kGroup * 34);
    add(at, std::integral_constant<int, 0>{});
    add(at + kGroup, std::integral_constant<int, 1>{});
    add(at + 2 * kGroup, std::integral_constant<int, 2>{});
    add(at + 3 * kGroup, std::integral_constant<int, 3>{});
  }
  for (; at < columns; at += kGroup) add(at, std::integral_constant<int, 0>{});
}

// Blocks of 32 columns whose 16 bytes have the codes of the first 16 in their low bits, of the others in the
// high ones.
template <PackedFormat format, int M>
__attribute__((always_inline)) inline void add_halves(const PackedRow& row, int64_t begin, int64_t columns,
                                                      const PairsOfA& a, SumsInTurn<M>& sums) {
  const __m512i table = load_pairs(format == PackedFormat::q4_0 ? &kAroundZeroPairs : &kIq4Pairs);
  Decoder<format> decoder{row};
  const auto add = [&](int64_t at, B16 bytes, float of_block, int turn) __attribute__((always_inline)) {
    const __m256i words = _mm256_cvtepu8_epi16((__m128i)bytes);
    const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm256_srli_epi16(words, 4), 1);
    const __m512i values = _mm512_permutexvar_epi16(codes, table);
    const VF scale = broadcast(of_block);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
      sums.add(m, turn, dot_pairs(load_pairs(a.columns[m] + at), values, VF{}), scale);
  };
  if constexpr (format == PackedFormat::iq4_xs) {
    for (int64_t at = 0; at < columns; at += 8 * kGroup) {
      decoder.open((begin + at) / (8 * kGroup));
      prefetch_block<136>(decoder.block);
#pragma GCC unroll 8
      for (int s = 0; s < 8; ++s) add(at + s * kGroup, decoder.bytes(s), decoder.scale(s), s);
    }
  } else {
    const auto add_block = [&](int64_t at, auto turn) __attribute__((always_inline)) {
      decoder.open((begin + at) / kGroup);
      add(at, decoder.bytes, decoder.scale, turn);
    };
    int64_t at = 0;
    for (; at + 4 * kGroup <= columns; at += 4 * kGroup) {
      prefetch_block<18 * 4>(row.data + (begin + at) / kGroup * 18);
      add_block(at, std::integral_constant<int, 0>{});
      add_block(at + kGroup, std::integral_constant<int, 1>{});
      add_block(at + 2 * kGroup, std::integral_constant<int, 2>{});
      add_block(at + 3 * kGroup, std::integral_constant<int, 3>{});
    }
    for (; at < columns; at += kGroup) add_block(at, std::integral_constant<int, 0>{});
  }
}

#endif

#include "isa_end.h"
