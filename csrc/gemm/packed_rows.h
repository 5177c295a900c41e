// multiply_packed of the table (kernels.h): few rows of A times packed columns, which are decoded in
// registers; for one instruction set. AVX512_BF16 has another, packed_pairs.h.
#pragma once

#include "decode.h"
#include "few_rows.h"

#include "isa_begin.h"

constexpr int kPackedRows = 4;          // rows of A for which a weight is decoded once
constexpr int64_t kPackedDepth = 2048;  // columns of A that are turned into float at once

// total[m] += <a[m], row> in lanes, over `columns` columns from `begin` on, a multiple of the format's block.
// `columns` is a multiple of 32, or ends the row: then `a` has zeros up to the next multiple of 32.
template <PackedFormat format, int M>
inline void multiply_row(const PackedRow& row, int64_t begin, int64_t columns, const float* a, int64_t stride,
                         VF (&total)[M]) {
  using D = Decoder<format>;
  constexpr int kSumsOfRow = M == 1 ? kParts : M == 2 && kParts > 1 ? 2 : 1;
  constexpr int64_t kBlock = D::kGroups * kGroup;
  VF sum[M][kSumsOfRow] = {};
  D decoder{row};
  for (int64_t b = begin / kBlock; b * kBlock < begin + columns; ++b) {
    decoder.open(b);
#pragma GCC unroll 8
    for (int s = 0; s < D::kGroups; ++s) {
      const Decoded d = decoder.group(s);
      const float* x = a + b * kBlock + s * kGroup - begin;
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int i = 0; i < kParts; ++i)
          sum[m][i % kSumsOfRow] = fma(d.part[i], load(x + m * stride + i * W), sum[m][i % kSumsOfRow]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < kSumsOfRow; ++i) total[m] += sum[m][i];
}

#if FMOE_BYTES == 64
// Formats of four bits, of which multiply_alternating() looks up the low halves of 16 bytes, then the high
// ones: the even and the odd columns of a group. The columns of A are put in that order, too.
constexpr bool alternates(PackedFormat format) {
  return format == PackedFormat::mxfp4 || format == PackedFormat::nvfp4 || format == PackedFormat::int4 ||
         format == PackedFormat::nf4;
}

// Scales [first, first + n) of a row, n rounded up to a multiple of 16.
inline void load_scales(const PackedRow& row, int64_t first, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t left = n - i;
    if (row.scale_type == ScaleType::e8m0) {
      const __mmask16 there = left < W ? (1u << left) - 1 : 0xffff;
      const VI e = (VI)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, row.scale + first + i));
      const VI bits = e == 0 ? VI{} + 0x400000 : e == 255 ? VI{} + 0x7fc00000 : e << 23;
      store(out + i, (VF)bits);
    } else if (row.scale_type == ScaleType::e4m3) {
      const __mmask16 there = left < W ? (1u << left) - 1 : 0xffff;
      const B16 bytes = (B16)_mm_maskz_loadu_epi8(there, row.scale + first + i);
      H16 bits;
      halves_of_e4m3(bytes, bits);
      store(out + i, 256.f * widen_half(bits));
    } else if (row.scale_type == ScaleType::float32) {
      store(out + i, load_n((const float*)row.scale + first + i, left));
    } else if (row.scale_type == ScaleType::float16) {
      store(out + i, load_n((const F16*)row.scale + first + i, left));
    } else {
      store(out + i, load_n((const BF16*)row.scale + first + i, left));
    }
  }
}

// The scale of each block of 32 columns, and in `zeros`, unless null, its zero point. With factors (nvfp4)
// two scales of each block. Up to 16 numbers behind them are overwritten.
inline void load_scales_of_blocks(const PackedRow& row, int64_t first, int64_t blocks, float* scales,
                                  float* zeros) {
  if (row.factors) {
    load_scales(row, 2 * first, 2 * blocks, scales);
    for (int64_t i = 0; i < 2 * blocks; i += W)
      store(scales + i, load(scales + i) * row.factors[0] / row.factors[1]);
    return;
  }
  const int64_t per = row.group / kGroup;
  if (per == 1) load_scales(row, first, blocks, scales);
  if (per == 1 && !zeros) return;
  int64_t group = first / per, left = per - first % per;  // blocks of this group
  for (int64_t b = 0; b < blocks; b += left, left = per, ++group) {
    const int64_t end = b + left < blocks ? b + left : blocks;
    const VF scale = broadcast(scale_at(row, group));
    const VF zero = broadcast(row.zero ? float(uint32_t(row.zero[group]) >> row.zero_shift & 15) : 8.f);
    for (int64_t i = b; i < end && per > 1; i += W) store(scales + i, scale);
    for (int64_t i = b; i < end && zeros; i += W) store(zeros + i, zero);
  }
}

// scales[0] in the lower half of a vector, scales[1] in the upper: of the columns 0 to 15 and 16 to 31
// of a block.
inline VF scales_of_two(const float* scales) {
  const VI halves = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  return (VF)_mm512_permutexvar_ps((__m512i)halves, (__m512)load(scales));
}

// multiply_row() for formats of which alternates() is true.
template <PackedFormat format, int M>
inline void multiply_alternating(const PackedRow& row, int64_t begin, int64_t columns, const float* a,
                                 int64_t stride, VF (&total)[M]) {
  constexpr int kScales = format == PackedFormat::nvfp4 ? 2 : 1;  // of a block
  constexpr bool is_int4 = format == PackedFormat::int4, high_first = format == PackedFormat::nf4;
  constexpr int kAhead = M == 1 ? 2 : 1;  // blocks at once, with sums of their own
  const VF table = is_int4 ? load(kCounting) : load(high_first ? kQuantiles : kE2M1);
  constexpr int kBlocks = kPackedDepth / kGroup;
  alignas(64) float scales[kScales * kBlocks + W], zeros[is_int4 ? kBlocks + W : 1];
  const int64_t blocks = columns / kGroup;
  load_scales_of_blocks(row, begin / kGroup, blocks, scales, is_int4 ? zeros : nullptr);
  VF sum[M][2 * kAhead] = {};
  const auto add = [&](int64_t b, auto place) __attribute__((always_inline)) {
    constexpr int u = decltype(place)::value;
    const VI bytes = (VI)_mm512_cvtepu8_epi32((__m128i)load_bytes<B16>(row.data + begin / 2 + b * 16));
    const VF low = (VF)_mm512_permutexvar_ps((__m512i)bytes, (__m512)table);
    const VF high = (VF)_mm512_permutexvar_ps((__m512i)(bytes >> 4), (__m512)table);
    VF even = high_first ? high : low, odd = high_first ? low : high;
    if constexpr (is_int4) {
      const VF zero = broadcast(zeros[b]);
      even -= zero;
      odd -= zero;
    }
    const VF scale = kScales == 2 ? scales_of_two(scales + 2 * b) : broadcast(scales[b]);
    even *= scale;
    odd *= scale;
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const float* x = a + m * stride + b * kGroup;
      sum[m][2 * u] = fma(even, load(x), sum[m][2 * u]);
      sum[m][2 * u + 1] = fma(odd, load(x + W), sum[m][2 * u + 1]);
    }
  };
  int64_t b = 0;
  if constexpr (kAhead == 2)
    for (; b + 2 <= blocks; b += 2) {
      add(b, std::integral_constant<int, 0>{});
      add(b + 1, std::integral_constant<int, kAhead - 1>{});
    }
  for (; b < blocks; ++b) add(b, std::integral_constant<int, 0>{});
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < 2 * kAhead; ++i) total[m] += sum[m][i];
}

// Each group of 32 columns: the even ones, then the odd ones.
inline void alternate_columns(float* x, int64_t n) {
  const VI even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  for (int64_t i = 0; i < n; i += kGroup) {
    const VF low = load(x + i), high = load(x + i + W);
    store(x + i, (VF)_mm512_permutex2var_ps((__m512)low, (__m512i)even, (__m512)high));
    store(x + i + W, (VF)_mm512_permutex2var_ps((__m512)low, (__m512i)(even + 1), (__m512)high));
  }
}
#else
constexpr bool alternates(PackedFormat) { return false; }
inline void alternate_columns(float*, int64_t) {}
template <PackedFormat format, int M>
inline void multiply_alternating(const PackedRow&, int64_t, int64_t, const float*, int64_t, VF (&)[M]) {}
#endif

template <PackedFormat format, int M>
void multiply_packed_rows(int64_t begin, int64_t columns, const float* a, int64_t stride,
                          const PackedRow* rows, int nr, float* tile) {
  for (int j = 0; j < nr; ++j) {
    VF total[M] = {};
    if (rows[j].data && alternates(format))
      multiply_alternating<format, M>(rows[j], begin, columns, a, stride, total);
    else if (rows[j].data)
      multiply_row<format, M>(rows[j], begin, columns, a, stride, total);
    for (int m = 0; m < M; ++m) {
      const float sum = sum_lanes(total[m]);
      tile[m * nr + j] = begin == 0 ? sum : tile[m * nr + j] + sum;
    }
  }
}

// Tiles of few rows of A and packed columns: tile [m, nr], in float, for each panel. A weight is used as it
// is decoded, without rounding to T. Does nothing in double, where packed_rows of the table is 0.
template <class T>
void multiply_packed(int64_t m, int64_t k, const OperandOf<T>* a, int64_t stride, const PackedRow* rows,
                     int64_t num_panels, AccOf<T>* tiles) {
  if constexpr (sizeof(AccOf<T>) == 4) {
    constexpr int nr = NR<typename UnitOf<T>::type>;
    alignas(64) float buffer[kPackedRows * kPackedDepth];
    for (int64_t first = 0; first < m; first += kPackedRows) {
      const int64_t M = m - first < kPackedRows ? m - first : kPackedRows;
      for (int64_t begin = 0; begin == 0 || begin < k; begin += kPackedDepth) {  // k = 0: tiles of zeros
        const int64_t n = k - begin < kPackedDepth ? k - begin : kPackedDepth;
        const int64_t padded = (n + kGroup - 1) / kGroup * kGroup;
        for (int64_t r = 0; r < M; ++r) {
          const OperandOf<T>* from = a + (first + r) * stride + begin;
          for (int64_t i = 0; i < padded; i += W)
            store(buffer + r * kPackedDepth + i, load_n(from + i, n - i));
          if (alternates(rows[0].format)) alternate_columns(buffer + r * kPackedDepth, padded);
        }
        with_format(rows[0].format, [&](auto format) {
          constexpr PackedFormat f = decltype(format)::value;
          for (int64_t p = 0; p < num_panels; ++p) {
            const PackedRow* panel = rows + p * nr;
            float* out = tiles + (p * m + first) * nr;
            switch (M) {
              case 1:
                multiply_packed_rows<f, 1>(begin, n, buffer, kPackedDepth, panel, nr, out);
                break;
              case 2:
                multiply_packed_rows<f, 2>(begin, n, buffer, kPackedDepth, panel, nr, out);
                break;
              case 3:
                multiply_packed_rows<f, 3>(begin, n, buffer, kPackedDepth, panel, nr, out);
                break;
              default:
                multiply_packed_rows<f, 4>(begin, n, buffer, kPackedDepth, panel, nr, out);
            }
          }
        });
      }
    }
  }
}

#include "isa_end.h"
