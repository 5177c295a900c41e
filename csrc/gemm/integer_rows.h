// The IntegerKernels of the table (kernels.h): products of packed columns (Q8_0, Q4_K) with rows of A that
// are rounded to 8 bits, with a scale for each block of columns. round_rows(), then multiply_integers();
// packed.h has the blocks.
#pragma once

#include "epilogue.h"
#include "packed_rows.h"

#include "isa_begin.h"

// The low byte of each lane.
#if FMOE_BYTES == 64
inline void store_bytes_of(VI v, int8_t* to) { store_bytes(to, _mm512_cvtepi32_epi8((__m512i)v)); }
#elif FMOE_BYTES == 32
inline void store_bytes_of(VI v, int8_t* to) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
}
#else
inline void store_bytes_of(VI v, int8_t* to) {
  for (int i = 0; i < W; ++i) to[i] = (int8_t)v[i];
}
#endif

#if FMOE_BYTES == 64
inline int32_t largest_lane(VI v) { return _mm512_reduce_max_epi32((__m512i)v); }
inline int32_t sum_of_lanes(VI v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
inline int32_t largest_lane(VI v) {
  int32_t largest = v[0];
  for (int i = 1; i < W; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}
inline int32_t sum_of_lanes(VI v) {
  int32_t sum = 0;
  for (int i = 0; i < W; ++i) sum += v[i];
  return sum;
}
#endif

// Added to the codes for Q8_0: vpdpbusd multiplies bytes without a sign by bytes with one.
#ifdef FMOE_VNNI
constexpr int kCodeOfZero = 128;
#else
constexpr int kCodeOfZero = 0;
#endif

// max |a| / 127 of a block, NaN if it holds an infinity or a NaN; `factor` is what its values are multiplied
// by to become codes.
template <class Operand>
float scale_of_block(const Operand* a, int64_t block, VF& factor) {
  VI most = {};  // of the bits of |a|, whose order is that of the numbers
  for (int64_t i = 0; i < block; i += W) {
    const VI bits = (VI)load(a + i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  const int32_t bits = largest_lane(most);
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  // 127 divided by a tiny number would be infinite; all codes of such a block are zero
  factor = broadcast(largest > 1e-30f ? 127.f / largest : 0.f);
  return bits < 0x7f800000 ? largest / 127.f : __builtin_nanf("");
}

// Codes of W values, to nearest, even. Floats from 1.5 * 2^23 on are the integers: the sum is rounded to one,
// and its bits count on from those of 1.5 * 2^23.
template <class Operand>
VI codes_of(const Operand* a, VF factor) {
  return (VI)fma(load(a), factor, broadcast(12582912.f)) - 0x4b400000;
}

template <class Operand>
void round_row_for_q8(const Operand* a, int64_t k, RoundedForQ8* blocks) {
  for (int64_t i = 0; i < (k + 63) / 64 * 64; i += kGroup) {
    RoundedForQ8& block = blocks[i / 64];
    const int64_t half = i / kGroup % 2;
    VF factor = {};
    const float scale = i < k ? scale_of_block(a + i, kGroup, factor) : 0;
    for (int64_t j = 0; j < kGroup; j += W)
      store_bytes_of((i < k ? codes_of(a + i + j, factor) : VI{}) + kCodeOfZero,
                     block.codes + kGroup * half + j);
    for (int j = 0; j < 8; ++j) block.scales[8 * half + j] = scale;
  }
}

template <class Operand>
void round_row_for_q4(const Operand* a, int64_t k, RoundedForQ4* blocks) {
  for (int64_t i = 0; i < k; i += 256) {
    RoundedForQ4& block = blocks[i / 256];
    VF factor;
    block.scale = scale_of_block(a + i, 256, factor);
    for (int64_t j = 0; j < 256; j += kGroup) {
      VI sum = {};
      for (int64_t l = j; l < j + kGroup; l += W) {
        const VI codes = codes_of(a + i + l, factor);
        store_bytes_of(codes, block.codes + l);
        sum += codes;
      }
      block.sums[j / kGroup] = block.scale * (float)sum_of_lanes(sum);
    }
  }
}

template <class T>
void round_rows(PackedFormat format, int64_t m, int64_t k, const OperandOf<T>* a, int64_t stride,
                Rounded* rounded) {
  if constexpr (sizeof(AccOf<T>) == 4) {
    for (int64_t r = 0; r < m; ++r) {
      const OperandOf<T>* from = a + r * stride;
      char* to = (char*)rounded + r * integer_row_bytes(format, k);
      if (format == PackedFormat::q8_0)
        round_row_for_q8(from, k, (RoundedForQ8*)to);
      else
        round_row_for_q4(from, k, (RoundedForQ4*)to);
    }
  }
}

// The scales and minima of the eight groups of a block of Q4_K, 6 bits each, as bytes of one number.
inline void unpack_scales(const uint8_t* packed, uint64_t& scales, uint64_t& minima) {
  uint32_t low, middle, high;
  __builtin_memcpy(&low, packed, 4);
  __builtin_memcpy(&middle, packed + 4, 4);
  __builtin_memcpy(&high, packed + 8, 4);
  scales = (low & 0x3f3f3f3fu) | uint64_t((high & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u)) << 32;
  minima = (middle & 0x3f3f3f3fu) | uint64_t((high >> 4 & 0x0f0f0f0fu) | (middle >> 2 & 0x30303030u)) << 32;
}

// Bytes that are prefetched: the rows of a weight follow each other.
constexpr int64_t kAheadOfBlock = FMOE_BYTES == 64 ? 8192 : 2048;

#if FMOE_BYTES >= 32
inline __m256i load_32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

struct ScalesOfQ4K {
  explicit ScalesOfQ4K(const uint8_t* block) : d(half_at(block)) {
    uint64_t scale_bytes, minimum_bytes;
    unpack_scales(block + 4, scale_bytes, minimum_bytes);
    scales = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((int64_t)scale_bytes));
    const __m256i numbers = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)minimum_bytes));
    minima = _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), _mm256_set1_ps(half_at(block + 2)));
  }
  float d;
  __m128i scales;  // of eight groups, 16 bits each
  __m256 minima;
};

#if FMOE_BYTES == 64
// w * codes, as 16 sums of four products each. start: minus what kCodeOfZero adds to them.
struct ByQ8 {
#ifdef FMOE_VNNI
  explicit ByQ8(__m512i weight)
      : w(weight),
        start(_mm512_sub_epi32(
            _mm512_setzero_si512(),
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8((char)kCodeOfZero), weight))) {}
  __m512i times(__m512i codes) const { return _mm512_dpbusd_epi32(start, codes, w); }
  __m512i w, start;
#else
  explicit ByQ8(__m512i w) : size(_mm512_abs_epi8(w)), negative(_mm512_movepi8_mask(w)) {}
  __m512i times(__m512i codes) const {
    const __m512i turned = _mm512_mask_sub_epi8(codes, negative, _mm512_setzero_si512(), codes);
    return _mm512_madd_epi16(_mm512_maddubs_epi16(size, turned), _mm512_set1_epi16(1));
  }
  __m512i size;
  __mmask64 negative;
#endif
};

template <int M>
inline void multiply_integers_q8_0(const PackedRow& row, int64_t k, const RoundedForQ8* a, float (&out)[M]) {
  __m512 total[M] = {};
  const int64_t pairs = (k + 63) / 64;
  const auto add = [&](int64_t i, __m512i w, float first, float second) __attribute__((always_inline)) {
    const ByQ8 by(w);
    const __m512 of_weight = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(first), _mm512_set1_ps(second));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const RoundedForQ8& block = a[m * pairs + i];
      const __m512i sums = by.times(_mm512_loadu_si512(block.codes));
      const __m512 factor = _mm512_mul_ps(of_weight, _mm512_loadu_ps(block.scales));
      total[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), factor, total[m]);
    }
  };
  for (int64_t i = 0; i < k / 64; ++i) {
    const uint8_t* block = row.data + 68 * i;
    __builtin_prefetch(block + kAheadOfBlock);
    __builtin_prefetch(block + kAheadOfBlock + 64);
    const __m512i w = _mm512_inserti64x4(_mm512_castsi256_si512(load_32(block + 2)), load_32(block + 36), 1);
    add(i, w, half_at(block), half_at(block + 34));
  }
  if (k % 64) {
    const uint8_t* block = row.data + 68 * (pairs - 1);
    add(pairs - 1, _mm512_zextsi256_si512(load_32(block + 2)), half_at(block), 0);
  }
  for (int m = 0; m < M; ++m) out[m] = sum_lanes((VF)total[m]);
}

inline __m512i add_products(__m512i sums, __m512i a, __m512i b) {  // of pairs of 16 bits
#ifdef FMOE_VNNI
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}

template <int M>
inline void multiply_integers_q4_k(const PackedRow& row, int64_t k, const RoundedForQ4* a, float (&out)[M]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i both =
      _mm512_inserti64x4(_mm512_set1_epi16(0x0100), _mm256_set1_epi16(0x0302), 1);  // of two groups
  const int64_t blocks = k / 256;
  __m512 total[M] = {};
  __m256 below[M] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = row.data + 144 * b;
    for (int i = 0; i < 144; i += 64) __builtin_prefetch(block + kAheadOfBlock + i);
    const ScalesOfQ4K of(block);
    const __m512i scales = _mm512_broadcast_i32x4(of.scales);
    __m512i sums[M] = {};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i pairs = _mm512_broadcast_i64x4(load_32(block + 16 + 32 * j));
      const __m512i values = _mm512_and_si512(_mm512_srlv_epi16(pairs, shift), nibble);
      const __m512i factors =
          _mm512_shuffle_epi8(scales, _mm512_add_epi8(both, _mm512_set1_epi8((char)(4 * j))));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512i codes = _mm512_loadu_si512(a[m * blocks + b].codes + 64 * j);
        sums[m] = add_products(sums[m], _mm512_maddubs_epi16(values, codes), factors);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const RoundedForQ4& rounded = a[m * blocks + b];
      const __m512 scale = _mm512_set1_ps(of.d * rounded.scale);
      total[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m]), scale, total[m]);
      below[m] = _mm256_fmadd_ps(of.minima, _mm256_loadu_ps(rounded.sums), below[m]);
    }
  }
  for (int m = 0; m < M; ++m)
    out[m] = sum_lanes((VF)_mm512_sub_ps(total[m], _mm512_zextps256_ps512(below[m])));
}
#else
inline float sum_of(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

template <int M>
inline void multiply_integers_q8_0(const PackedRow& row, int64_t k, const RoundedForQ8* a, float (&out)[M]) {
  const __m256i ones = _mm256_set1_epi16(1);
  const int64_t pairs = (k + 63) / 64;
  __m256 total[M] = {};
  for (int64_t b = 0; b < k / kGroup; ++b) {
    const uint8_t* block = row.data + 34 * b;
    __builtin_prefetch(block + kAheadOfBlock);
    const __m256 of_weight = _mm256_set1_ps(half_at(block));
    const __m256i w = load_32(block + 2), size = _mm256_abs_epi8(w);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const RoundedForQ8& rounded = a[m * pairs + b / 2];
      const __m256i turned = _mm256_sign_epi8(load_32(rounded.codes + kGroup * (b % 2)), w);
      const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(size, turned), ones);
      const __m256 factor = _mm256_mul_ps(of_weight, _mm256_loadu_ps(rounded.scales + 8 * (b % 2)));
      total[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), factor, total[m]);
    }
  }
  for (int m = 0; m < M; ++m) out[m] = sum_of(total[m]);
}

template <int M>
inline void multiply_integers_q4_k(const PackedRow& row, int64_t k, const RoundedForQ4* a, float (&out)[M]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const int64_t blocks = k / 256;
  __m256 total[M] = {}, below[M] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = row.data + 144 * b;
    for (int i = 0; i < 144; i += 64) __builtin_prefetch(block + kAheadOfBlock + i);
    const ScalesOfQ4K of(block);
    const __m256i scales = _mm256_broadcastsi128_si256(of.scales);
    __m256i sums[M] = {};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i pairs = load_32(block + 16 + 32 * j);
      const __m256i low = _mm256_and_si256(pairs, nibble);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), nibble);
      const __m256i of_low = _mm256_shuffle_epi8(scales, _mm256_set1_epi16(0x0100 + 0x0404 * j));
      const __m256i of_high = _mm256_shuffle_epi8(scales, _mm256_set1_epi16(0x0302 + 0x0404 * j));
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const int8_t* codes = a[m * blocks + b].codes + 64 * j;
        const __m256i first = _mm256_madd_epi16(_mm256_maddubs_epi16(low, load_32(codes)), of_low);
        const __m256i second = _mm256_madd_epi16(_mm256_maddubs_epi16(high, load_32(codes + 32)), of_high);
        sums[m] = _mm256_add_epi32(sums[m], _mm256_add_epi32(first, second));
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const RoundedForQ4& rounded = a[m * blocks + b];
      const __m256 scale = _mm256_set1_ps(of.d * rounded.scale);
      total[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m]), scale, total[m]);
      below[m] = _mm256_fmadd_ps(of.minima, _mm256_loadu_ps(rounded.sums), below[m]);
    }
  }
  for (int m = 0; m < M; ++m) out[m] = sum_of(_mm256_sub_ps(total[m], below[m]));
}
#endif
#else
inline int32_t multiply_group(const int8_t* a, const int8_t* b) {
  int32_t sum = 0;
  for (int i = 0; i < kGroup; ++i) sum += a[i] * b[i];
  return sum;
}

template <int M>
inline void multiply_integers_q8_0(const PackedRow& row, int64_t k, const RoundedForQ8* a, float (&out)[M]) {
  for (float& sum : out) sum = 0;
  for (int64_t b = 0; b < k / kGroup; ++b) {
    const uint8_t* block = row.data + 34 * b;
    const float scale = half_at(block);
    for (int m = 0; m < M; ++m) {
      const RoundedForQ8& rounded = a[m * ((k + 63) / 64) + b / 2];
      const int32_t sum = multiply_group((const int8_t*)block + 2, rounded.codes + kGroup * (b % 2));
      out[m] += scale * rounded.scales[8 * (b % 2)] * (float)sum;
    }
  }
}

template <int M>
inline void multiply_integers_q4_k(const PackedRow& row, int64_t k, const RoundedForQ4* a, float (&out)[M]) {
  for (float& sum : out) sum = 0;
  for (int64_t b = 0; b < k / 256; ++b) {
    const uint8_t* block = row.data + 144 * b;
    const float d = half_at(block), dmin = half_at(block + 2);
    uint64_t scale_words, minimum_words;
    unpack_scales(block + 4, scale_words, minimum_words);
    uint8_t scales[8], minima[8];
    __builtin_memcpy(scales, &scale_words, 8);
    __builtin_memcpy(minima, &minimum_words, 8);
    int32_t sums[M] = {};
    float below[M] = {};
    for (int s = 0; s < 8; ++s) {
      int8_t codes[kGroup];
      for (int i = 0; i < kGroup; ++i) codes[i] = block[16 + s / 2 * kGroup + i] >> (s % 2 * 4) & 15;
      for (int m = 0; m < M; ++m) {
        const RoundedForQ4& rounded = a[m * (k / 256) + b];
        sums[m] += scales[s] * multiply_group(codes, rounded.codes + kGroup * s);
        below[m] += (float)minima[s] * rounded.sums[s];
      }
    }
    for (int m = 0; m < M; ++m) out[m] += d * a[m * (k / 256) + b].scale * (float)sums[m] - dmin * below[m];
  }
}
#endif

// Rows that share the unpacking of a weight.
constexpr int kIntegerRows = FMOE_BYTES == 64 ? 8 : 4;

template <PackedFormat format, int M>
void multiply_integer_rows(int64_t k, const Rounded* rounded, int64_t first, const PackedRow* columns, int nr,
                           float* tile) {
  const char* a = (const char*)rounded + first * integer_row_bytes(format, k);
  for (int j = 0; j < nr; ++j) {
    float sums[M] = {};
    if (columns[j].data) {
      if constexpr (format == PackedFormat::q8_0)
        multiply_integers_q8_0<M>(columns[j], k, (const RoundedForQ8*)a, sums);
      else
        multiply_integers_q4_k<M>(columns[j], k, (const RoundedForQ4*)a, sums);
    }
    for (int m = 0; m < M; ++m) tile[(first + m) * nr + j] = sums[m];
  }
}

template <PackedFormat format, int M = kIntegerRows>
void multiply_few_integers(int64_t m, int64_t k, const Rounded* rounded, int64_t first,
                           const PackedRow* columns, int nr, float* tile) {
  if constexpr (M > 1) {
    if (m - first < M) return multiply_few_integers<format, M - 1>(m, k, rounded, first, columns, nr, tile);
  }
  if (first >= m) return;
  multiply_integer_rows<format, M>(k, rounded, first, columns, nr, tile);
  multiply_few_integers<format>(m, k, rounded, first + M, columns, nr, tile);
}

// Tiles [m, nr] of rounded rows and the columns of each panel.
template <class T>
void multiply_integers(int64_t m, int64_t k, const Rounded* rounded, const PackedRow* columns,
                       int64_t num_panels, AccOf<T>* tiles) {
  if constexpr (sizeof(AccOf<T>) == 4) {
    constexpr int nr = NR<typename UnitOf<T>::type>;
    const auto multiply = columns[0].format == PackedFormat::q8_0 ? multiply_few_integers<PackedFormat::q8_0>
                                                                  : multiply_few_integers<PackedFormat::q4_k>;
    for (int64_t p = 0; p < num_panels; ++p)
      multiply(m, k, rounded, 0, columns + p * nr, nr, tiles + p * m * nr);
  }
}

#include "isa_end.h"
