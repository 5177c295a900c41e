// Vectors of one instruction set, for the other headers of kernels: VF of W floats, VD of WD doubles, VI and
// VU of 32-bit integers, VH of W numbers of 16 bits. load() and store() convert from and to BF16 and F16,
// which are computed with in float.
#pragma once

#include "isa_begin.h"

constexpr int kBytes = FMOE_BYTES;
constexpr int W = kBytes / 4;
constexpr int WD = kBytes / 8;
#if FMOE_BYTES == 64 || defined(FMOE_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float VF __attribute__((vector_size(kBytes)));
typedef double VD __attribute__((vector_size(kBytes)));
typedef int32_t VI __attribute__((vector_size(kBytes)));
typedef uint32_t VU __attribute__((vector_size(kBytes)));
typedef uint16_t VH __attribute__((vector_size(kBytes / 2)));

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class V, class P>
inline V load_bytes(const P* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V, class P>
inline void store_bytes(P* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

inline VF broadcast(float x) { return x - VF{}; }
inline VD broadcast(double x) { return x - VD{}; }

#if FMOE_BYTES == 64
inline VF fma(VF a, VF b, VF c) { return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VD fma(VD a, VD b, VD c) { return (VD)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
inline VF widen_half(VH h) { return (VF)_mm512_cvtph_ps((__m256i)h); }
inline VH narrow_half(VF v) {
  return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif FMOE_BYTES == 32
inline VF fma(VF a, VF b, VF c) { return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VD fma(VD a, VD b, VD c) { return (VD)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
inline VF widen_half(VH h) { return (VF)_mm256_cvtph_ps((__m128i)h); }
inline VH narrow_half(VF v) {
  return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(FMOE_NEON)
inline VF fma(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline VD fma(VD a, VD b, VD c) { return (VD)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
inline VF widen_half(VH h) { return (VF)vcvt_f32_f16((float16x4_t)h); }
inline VH narrow_half(VF v) { return (VH)vcvt_f16_f32((float32x4_t)v); }
#else
inline VF fma(VF a, VF b, VF c) { return a * b + c; }
inline VD fma(VD a, VD b, VD c) { return a * b + c; }

inline VF widen_half(VH h) {
  // Shifted into place, a half is a float whose exponent is too small by 112; the product also makes
  // subnormals right.
  const VU u = __builtin_convertvector(h, VU);
  const VF magnitude = (VF)((u & 0x7fffu) << 13) * 0x1p112f;
  const VI special = magnitude >= 65536.f;
  return (VF)((VU)magnitude | ((u & 0x8000u) << 16) | ((VU)special & 0x7f800000u));
}

inline VH narrow_half(VF v) {
  const VU u = (VU)v, sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const VU normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const VU subnormal = (VU)((VF)magnitude + 0.5f) - 0x3f000000u;  // the sum rounds to multiples of 2^-24
  VU h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u - VU{} : h;  // 65520 and above round to infinity
  h = magnitude > 0x7f800000u ? 0x7e00u - VU{} : h;
  return __builtin_convertvector(h | sign, VH);
}
#endif

// 16 bits to 32 and back: of __builtin_convertvector gcc makes several instructions.
#if FMOE_BYTES == 64
inline VU widen_bits(VH h) { return (VU)_mm512_cvtepu16_epi32((__m256i)h); }
inline VH low_bits(VU u) { return (VH)_mm512_cvtepi32_epi16((__m512i)u); }
#elif FMOE_BYTES == 32
inline VU widen_bits(VH h) { return (VU)_mm256_cvtepu16_epi32((__m128i)h); }
inline VH low_bits(VU u) {  // below 2^16
  const __m256i packed = _mm256_packus_epi32((__m256i)u, (__m256i)u);
  return (VH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#else
inline VU widen_bits(VH h) { return __builtin_convertvector(h, VU); }
inline VH low_bits(VU u) { return __builtin_convertvector(u, VH); }
#endif

inline VF widen_bf16(VH h) { return (VF)(widen_bits(h) << 16); }

#if defined(FMOE_BF16_DOT) && defined(FMOE_NEON)
inline VH narrow_bf16(VF v) { return (VH)vcvt_bf16_f32((float32x4_t)v); }
#elif defined(FMOE_BF16_DOT)
// Subnormals become zero, as they do in vdpbf16ps.
inline VH narrow_bf16(VF v) { return (VH)_mm512_cvtneps_pbh((__m512)v); }
#else
inline VH narrow_bf16(VF v) {
  const VU u = (VU)v;
  const VU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return low_bits(v == v ? rounded : 0x7fc0u - VU{});
}
#endif

inline VF load(const float* p) { return load_bytes<VF>(p); }
inline VD load(const double* p) { return load_bytes<VD>(p); }
inline VF load(const BF16* p) { return widen_bf16(load_bytes<VH>(p)); }
inline VF load(const F16* p) { return widen_half(load_bytes<VH>(p)); }
inline void store(float* p, VF v) { store_bytes(p, v); }
inline void store(double* p, VD v) { store_bytes(p, v); }
inline void store(BF16* p, VF v) { store_bytes(p, narrow_bf16(v)); }
inline void store(F16* p, VF v) { store_bytes(p, narrow_half(v)); }

template <class T>
using VecOf = decltype(load((const T*)nullptr));
template <class T>
constexpr int kLanes = sizeof(T) == 8 ? WD : W;

// The first n < kLanes elements of a vector, none where n < 0.
#if FMOE_BYTES == 64
inline uint32_t mask_of(int64_t n) { return n > 0 ? (1u << n) - 1 : 0; }
inline VF load_part(const float* p, int64_t n) { return (VF)_mm512_maskz_loadu_ps(mask_of(n), p); }
inline VD load_part(const double* p, int64_t n) { return (VD)_mm512_maskz_loadu_pd(mask_of(n), p); }
inline VF load_part(const BF16* p, int64_t n) {
  return widen_bf16((VH)_mm256_maskz_loadu_epi16(mask_of(n), p));
}
inline VF load_part(const F16* p, int64_t n) {
  return widen_half((VH)_mm256_maskz_loadu_epi16(mask_of(n), p));
}
inline void store_part(float* p, VF v, int64_t n) { _mm512_mask_storeu_ps(p, mask_of(n), (__m512)v); }
inline void store_part(double* p, VD v, int64_t n) { _mm512_mask_storeu_pd(p, mask_of(n), (__m512d)v); }
inline void store_part(BF16* p, VF v, int64_t n) {
  _mm256_mask_storeu_epi16(p, mask_of(n), (__m256i)narrow_bf16(v));
}
inline void store_part(F16* p, VF v, int64_t n) {
  _mm256_mask_storeu_epi16(p, mask_of(n), (__m256i)narrow_half(v));
}
#else
template <class T>
inline VecOf<T> load_part(const T* p, int64_t n) {
  T buffer[kLanes<T>] = {};
  if (n > 0) __builtin_memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_part(T* p, VecOf<T> v, int64_t n) {
  T buffer[kLanes<T>];
  store(buffer, v);
  if (n > 0) __builtin_memcpy(p, buffer, n * sizeof(T));
}
#if FMOE_BYTES == 32
inline __m256i mask_of(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline VF load_part(const float* p, int64_t n) { return (VF)_mm256_maskload_ps(p, mask_of(n)); }
inline void store_part(float* p, VF v, int64_t n) { _mm256_maskstore_ps(p, mask_of(n), (__m256)v); }
#endif
#endif

// The first n elements of a vector; the others read as zero and are not written.
template <class T>
inline VecOf<T> load_n(const T* p, int64_t n) {
  return n >= kLanes<T> ? load(p) : load_part(p, n);
}

template <class T>
inline void store_n(T* p, VecOf<T> v, int64_t n) {
  n >= kLanes<T> ? store(p, v) : store_part(p, v, n);
}

// The value that storage keeps of v.
template <class T>
inline VecOf<T> rounded(VecOf<T> v) {
  T buffer[kLanes<T>];
  store(buffer, v);
  return load(buffer);
}
template <>
inline VF rounded<float>(VF v) {
  return v;
}
template <>
inline VD rounded<double>(VD v) {
  return v;
}
template <>
inline VF rounded<BF16>(VF v) {
  return widen_bf16(narrow_bf16(v));
}
template <>
inline VF rounded<F16>(VF v) {
  return widen_half(narrow_half(v));
}

template <class V>
inline auto sum_lanes(V v) {
#if FMOE_BYTES == 64
  if constexpr (std::is_same_v<V, VF>) return _mm512_reduce_add_ps((__m512)v);
  if constexpr (std::is_same_v<V, VD>) return _mm512_reduce_add_pd((__m512d)v);
#elif defined(FMOE_NEON)
  if constexpr (std::is_same_v<V, VF>) return vaddvq_f32((float32x4_t)v);
  if constexpr (std::is_same_v<V, VD>) return vaddvq_f64((float64x2_t)v);
#endif
  auto sum = v[0];
  for (size_t i = 1; i < sizeof(V) / sizeof(sum); ++i) sum += v[i];
  return sum;
}

#include "isa_end.h"
