// Decoding packed weights, 32 columns at a time, for one instruction set; see packed.h. Every set decodes to
// the same bits: in float, each rounding of it named by the format.
#pragma once

#include "multiply.h"

#include "isa_begin.h"

typedef uint8_t B16 __attribute__((vector_size(16)));
typedef float F8 __attribute__((vector_size(32)));
typedef uint16_t H16 __attribute__((vector_size(32)));

constexpr int kGroup = 32;          // columns that are decoded at once
constexpr int kParts = kGroup / W;  // vectors of them
struct Decoded {
  VF part[kParts];
};

#if FMOE_BYTES >= 32
inline B16 look_up(B16 table, B16 index) { return (B16)_mm_shuffle_epi8((__m128i)table, (__m128i)index); }
inline B16 interleave_low(B16 a, B16 b) { return (B16)_mm_unpacklo_epi8((__m128i)a, (__m128i)b); }
inline B16 interleave_high(B16 a, B16 b) { return (B16)_mm_unpackhi_epi8((__m128i)a, (__m128i)b); }
#elif defined(FMOE_NEON)
inline B16 look_up(B16 table, B16 index) { return (B16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index); }
inline B16 interleave_low(B16 a, B16 b) { return (B16)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b); }
inline B16 interleave_high(B16 a, B16 b) { return (B16)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b); }
#else
inline B16 look_up(B16 table, B16 index) {
  B16 result;
  for (int i = 0; i < 16; ++i) result[i] = table[index[i]];
  return result;
}
inline B16 interleave_low(B16 a, B16 b) {
  B16 result;
  for (int i = 0; i < 8; ++i) {
    result[2 * i] = a[i];
    result[2 * i + 1] = b[i];
  }
  return result;
}
inline B16 interleave_high(B16 a, B16 b) {
  B16 result;
  for (int i = 0; i < 8; ++i) {
    result[2 * i] = a[8 + i];
    result[2 * i + 1] = b[8 + i];
  }
  return result;
}
#endif

// 16 bytes as numbers without a sign.
inline void widen_bytes(B16 bytes, VI* out) {
#if FMOE_BYTES == 64
  out[0] = (VI)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif FMOE_BYTES == 32
  out[0] = (VI)_mm256_cvtepu8_epi32((__m128i)bytes);
  out[1] = (VI)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)bytes, 8));
#elif defined(FMOE_NEON)
  const uint16x8_t low = vmovl_u8(vget_low_u8((uint8x16_t)bytes)), high = vmovl_high_u8((uint8x16_t)bytes);
  out[0] = (VI)vmovl_u16(vget_low_u16(low));
  out[1] = (VI)vmovl_high_u16(low);
  out[2] = (VI)vmovl_u16(vget_low_u16(high));
  out[3] = (VI)vmovl_high_u16(high);
#else
  for (int i = 0; i < 16; ++i) out[i / W][i % W] = bytes[i];
#endif
}

// 16 bytes as numbers with a sign.
inline void widen_signed(B16 bytes, VF* out) {
#if FMOE_BYTES == 64
  out[0] = (VF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif FMOE_BYTES == 32
  out[0] = (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)bytes));
  out[1] = (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)bytes, 8)));
#else
  VI wide[16 / W];
  widen_bytes(bytes, wide);
  for (int i = 0; i < 16 / W; ++i) out[i] = __builtin_convertvector(wide[i] << 24 >> 24, VF);
#endif
}

inline Decoded scaled(B16 first, B16 second, float scale) {
  Decoded d;
  widen_signed(first, d.part);
  widen_signed(second, d.part + kParts / 2);
#pragma GCC unroll 8
  for (VF& v : d.part) v *= scale;
  return d;
}

inline float float_of(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
#if FMOE_BYTES >= 32
  return _cvtsh_ss(bits);
#else
  VH all = {};
  all[0] = bits;
  return widen_half(all)[0];
#endif
}

inline float scale_at(const PackedRow& row, int64_t i) {
  if (row.scale_type == ScaleType::float32) {
    float f;
    __builtin_memcpy(&f, row.scale + 4 * i, 4);
    return f;
  }
  const uint8_t* p = (const uint8_t*)row.scale + 2 * i;
  if (row.scale_type == ScaleType::float16) return half_at(p);
  return float_of(uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24);
}

// 2^(e - 127): 2^-127 is subnormal, and 255 is NaN.
inline float e8m0(uint8_t e) {
  return float_of(e == 0 ? 0x400000u : e == 255 ? 0x7fc00000u : uint32_t(e) << 23);
}

// The low four bits of 16 bytes, then the high ones, as they alternate.
inline void alternate(B16 bytes, B16& first, B16& second) {
  const B16 low = bytes & 15, high = bytes >> 4;
  first = interleave_low(low, high);
  second = interleave_high(low, high);
}

alignas(64) constexpr float kCounting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) constexpr float kE2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
// Quantiles of the normal distribution, as bitsandbytes has them.
alignas(64) constexpr float kQuantiles[16] = {-1.f,
                                              -0.6961928009986877f,
                                              -0.5250730514526367f,
                                              -0.39491748809814453f,
                                              -0.28444138169288635f,
                                              -0.18477343022823334f,
                                              -0.09105003625154495f,
                                              0.f,
                                              0.07958029955625534f,
                                              0.16093020141124725f,
                                              0.24611230194568634f,
                                              0.33791524171829224f,
                                              0.44070982933044434f,
                                              0.5626170039176941f,
                                              0.7229568362236023f,
                                              1.f};

// table[index % 16] of 16 floats.
inline VF look_up_floats(const float* table, VI index) {
#if FMOE_BYTES == 64
  return (VF)_mm512_permutexvar_ps((__m512i)index, (__m512)load(table));
#elif FMOE_BYTES == 32
  const __m256 low = _mm256_permutevar8x32_ps((__m256)load(table), (__m256i)index);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)load(table + 8), (__m256i)index);
  return (VF)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
  VF v;
  for (int i = 0; i < W; ++i) v[i] = table[index[i] & 15];
  return v;
#endif
}

// open(b), then group(s): the columns [32 s, 32 s + 32) of block b, which has 32 kGroups.
template <PackedFormat format>
struct Decoder;

template <>
struct Decoder<PackedFormat::mxfp4> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float half_scale = 0;
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    half_scale = 0.5f * e8m0(row.scale[b]);
    bytes = load_bytes<B16>(row.data + 16 * b);
  }
  Decoded group(int) const {
    const B16 twice = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
    B16 first, second;
    alternate(bytes, first, second);
    return scaled(look_up(twice, first), look_up(twice, second), half_scale);
  }
};

template <>
struct Decoder<PackedFormat::fp8_block> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes[2] = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = 256.f * scale_at(row, b / (128 / kGroup));
    const int64_t left = row.columns - b * kGroup;
    if (left >= kGroup) {
      __builtin_memcpy(bytes, row.data + b * kGroup, kGroup);
    } else {
      __builtin_memset(bytes, 0, kGroup);
      __builtin_memcpy(bytes, row.data + b * kGroup, left);
    }
  }
  Decoded group(int) const {
    Decoded d;
    for (int half = 0; half < 2; ++half) {
      // As float16 the exponent is too small by 8; its conversion also makes subnormal numbers right.
      const H16 wide = __builtin_convertvector(bytes[half], H16);
      const H16 magnitude = (wide & 0x7f) << 7, nan = (H16)(magnitude == 0x3f80) & 0x7c00;
      const H16 bits = magnitude | (wide & 0x80) << 8 | nan;
      for (int i = 0; i < kParts / 2; ++i)
        d.part[half * (kParts / 2) + i] = widen_half(load_bytes<VH>((const char*)&bits + i * sizeof(VH)));
    }
#pragma GCC unroll 8
    for (VF& v : d.part) v *= scale;
    return d;
  }
};

template <>
struct Decoder<PackedFormat::int4> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  uint8_t zero = 0;
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    const int64_t group = b * kGroup / row.group;
    scale = scale_at(row, group);
    bytes = load_bytes<B16>(row.data + 16 * b);
    zero = row.zero ? uint32_t(row.zero[group]) >> row.zero_shift & 15 : 8;
  }
  Decoded group(int) const {
    B16 first, second;
    alternate(bytes, first, second);
    return scaled(first - zero, second - zero, scale);
  }
};

template <>
struct Decoder<PackedFormat::q8_0> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes[2] = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = half_at(row.data + 34 * b);
    __builtin_memcpy(bytes, row.data + 34 * b + 2, kGroup);
  }
  Decoded group(int) const { return scaled(bytes[0], bytes[1], scale); }
};

// Eight bytes as numbers without a sign.
inline void widen_eight(const void* bytes, F8& out) {
#if FMOE_BYTES >= 32
  out = (F8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes)));
#else
  for (int i = 0; i < 8; ++i) out[i] = ((const uint8_t*)bytes)[i];
#endif
}

template <>
struct Decoder<PackedFormat::q4_k> {
  static constexpr int kGroups = 8;
  const PackedRow& row;
  F8 scale = {}, minimum = {};
  const uint8_t* codes = nullptr;

  __attribute__((always_inline)) void open(int64_t b) {
    const uint8_t* block = row.data + 144 * b;
    const float d = half_at(block), dmin = half_at(block + 2);
    uint32_t low, middle, high;  // four bytes each of the packed scales and minima
    __builtin_memcpy(&low, block + 4, 4);
    __builtin_memcpy(&middle, block + 8, 4);
    __builtin_memcpy(&high, block + 12, 4);
    const uint32_t scales[2] = {low & 0x3f3f3f3fu, (high & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u)};
    const uint32_t minima[2] = {middle & 0x3f3f3f3fu,
                                (high >> 4 & 0x0f0f0f0fu) | (middle >> 2 & 0x30303030u)};
    widen_eight(scales, scale);
    widen_eight(minima, minimum);
    scale *= d;
    minimum *= -dmin;
    codes = block + 16;
  }
  Decoded group(int s) const {
    Decoded d;
    for (int half = 0; half < 2; ++half) {
      const B16 pairs = load_bytes<B16>(codes + 32 * (s / 2) + 16 * half);
#if FMOE_BYTES == 64
      const VI wide = (VI)_mm512_cvtepu8_epi32((__m128i)pairs);
      d.part[half] = look_up_floats(kCounting, s % 2 ? wide >> 4 : wide);
#else
      widen_signed(s % 2 ? pairs >> 4 : pairs & 15, d.part + half * (kParts / 2));
#endif
    }
#pragma GCC unroll 8
    for (VF& v : d.part) v = fma(v, broadcast(scale[s]), broadcast(minimum[s]));  // the product is exact
    return d;
  }
};

template <>
struct Decoder<PackedFormat::q6_k> {
  static constexpr int kGroups = 8;
  const PackedRow& row;
  float d = 0;
  const uint8_t* block = nullptr;

  __attribute__((always_inline)) void open(int64_t b) {
    block = row.data + 210 * b;
    d = half_at(block + 208);
  }
  Decoded group(int s) const {
    const int half = s / 4, quarter = s % 4;
    Decoded out;
    for (int i = 0; i < 2; ++i) {
      const B16 pairs = load_bytes<B16>(block + 64 * half + 32 * (quarter % 2) + 16 * i);
      const B16 high = load_bytes<B16>(block + 128 + 32 * half + 16 * i) >> (2 * quarter) & 3;
      const B16 low = quarter / 2 ? pairs >> 4 : pairs & 15;
      VF* part = out.part + i * (kParts / 2);
      widen_signed((low | high << 4) - 32, part);
      const float scale = d * float(int8_t(block[192 + 2 * s + i]));
      for (int j = 0; j < kParts / 2; ++j) part[j] *= scale;
    }
    return out;
  }
};

template <>
struct Decoder<PackedFormat::nf4> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = scale_at(row, b * kGroup / row.group);
    bytes = load_bytes<B16>(row.data + 16 * b);
  }
  Decoded group(int) const {
    const B16 low = bytes & 15, high = bytes >> 4;  // the high one is first
    VI index[kParts];
    widen_bytes(interleave_low(high, low), index);
    widen_bytes(interleave_high(high, low), index + kParts / 2);
    Decoded d;
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) d.part[i] = look_up_floats(kQuantiles, index[i]) * scale;
    return d;
  }
};

template <class Body>
inline void with_format(PackedFormat format, const Body& body) {
  switch (format) {
    case PackedFormat::mxfp4:
      return body(std::integral_constant<PackedFormat, PackedFormat::mxfp4>{});
    case PackedFormat::fp8_block:
      return body(std::integral_constant<PackedFormat, PackedFormat::fp8_block>{});
    case PackedFormat::int4:
      return body(std::integral_constant<PackedFormat, PackedFormat::int4>{});
    case PackedFormat::q8_0:
      return body(std::integral_constant<PackedFormat, PackedFormat::q8_0>{});
    case PackedFormat::q4_k:
      return body(std::integral_constant<PackedFormat, PackedFormat::q4_k>{});
    case PackedFormat::q6_k:
      return body(std::integral_constant<PackedFormat, PackedFormat::q6_k>{});
    case PackedFormat::nf4:
      return body(std::integral_constant<PackedFormat, PackedFormat::nf4>{});
    case PackedFormat::none:
      return;
  }
}

template <class T>
inline void store_decoded(T* to, const Decoded& d) {
  if constexpr (sizeof(T) == 8) {
    float buffer[kGroup];
    __builtin_memcpy(buffer, &d, sizeof buffer);
    for (int i = 0; i < kGroup; ++i) to[i] = buffer[i];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) store(to + i * W, d.part[i]);
  }
}

// Columns [begin, begin + n) of a row.
template <class T>
void decode(const PackedRow& row, int64_t begin, int64_t n, T* to) {
  with_format(row.format, [&](auto format) {
    using D = Decoder<decltype(format)::value>;
    constexpr int64_t kBlock = D::kGroups * kGroup;
    D decoder{row};
    const int64_t end = begin + n;
    for (int64_t b = begin / kBlock; b * kBlock < end; ++b) {
      decoder.open(b);
#pragma GCC unroll 8
      for (int s = 0; s < D::kGroups; ++s) {
        const int64_t first = b * kBlock + s * kGroup;
        if (first >= begin && first + kGroup <= end) {
          store_decoded(to + first - begin, decoder.group(s));
        } else if (first + kGroup > begin && first < end) {
          T buffer[kGroup];
          store_decoded(buffer, decoder.group(s));
          const int64_t from = first < begin ? begin - first : 0;
          const int64_t until = first + kGroup > end ? end - first : kGroup;
          __builtin_memcpy(to + first + from - begin, buffer + from, (until - from) * sizeof(T));
        }
      }
    }
  });
}

#include "isa_end.h"
