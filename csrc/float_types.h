// The floating-point dtypes of the operators outside of gemm/: dispatch to a C++ type, the type that it is
// computed in, and 16 elements at a time as float for AVX-512.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

#include "checks.h"
#include "simd.h"

namespace fmoe_ext {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

// What sums and products of T are computed in.
template <class T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls body with a value of the C++ type of a dtype that passed check_float.
template <class Body>
void dispatch_float(ScalarType dtype, const Body& body) {
  switch (dtype) {
    case ScalarType::Double:
      return body(double{});
    case ScalarType::Float:
      return body(float{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    default:
      return body(Half{});
  }
}

#if FMOE_X86
FMOE_AVX512 inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }

FMOE_AVX512 inline __m512 load16(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

FMOE_AVX512 inline __m512 load16(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

FMOE_AVX512 inline void store16(float* p, __m512 v) { _mm512_storeu_ps(p, v); }

// Rounds to nearest even; NaN stays NaN.
FMOE_AVX512 inline void store16(BFloat16* p, __m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i result =
      _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
}

FMOE_AVX512 inline void store16(Half* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#endif

}  // namespace fmoe_ext
