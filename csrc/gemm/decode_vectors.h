// Bytes of packed weights, their scales and tables of their codes as vectors, for one instruction set: what
// the decoders of decode.h and the products with packed rows are made of.
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
  static_assert(W == 4);
  for (int v = 0; v < 4; ++v) out[v] = VI{bytes[4 * v], bytes[4 * v + 1], bytes[4 * v + 2], bytes[4 * v + 3]};
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

// 16 bytes of E4M3 as float16, divided by 256: the exponent is too small by 8. A conversion of float16 makes
// subnormal numbers right too.
inline void halves_of_e4m3(B16 bytes, H16& out) {
  const H16 wide = __builtin_convertvector(bytes, H16);
  const H16 magnitude = (wide & 0x7f) << 7, nan = (H16)(magnitude == 0x3f80) & 0x7c00;
  out = magnitude | (wide & 0x80) << 8 | nan;
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

inline float e4m3(uint8_t e) {
  const uint16_t magnitude = (e & 0x7f) << 7;
  const uint16_t half = magnitude | (e & 0x80) << 8 | (magnitude == 0x3f80 ? 0x7c00 : 0);
  return 256.f * half_at((const uint8_t*)&half);
}

// The 32 numbers of four bits in 16 bytes, the low one of each byte before its high one.
inline void alternate(B16 bytes, B16& first, B16& second) {
  const B16 low = bytes & 15, high = bytes >> 4;
  first = interleave_low(low, high);
  second = interleave_high(low, high);
}

alignas(64) constexpr float kCounting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

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

// Eight bytes as numbers without a sign.
inline void widen_eight(const void* bytes, F8& out) {
#if FMOE_BYTES >= 32
  out = (F8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes)));
#else
  for (int i = 0; i < 8; ++i) out[i] = ((const uint8_t*)bytes)[i];
#endif
}

#include "isa_end.h"
