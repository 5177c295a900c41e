// Vector code outside of gemm/, for x86-64: functions marked FMOE_AVX512 may only be called when use_avx512()
// says so, those marked FMOE_AVX2 when use_avx2() does (cpu_features.h). Every use has a portable
// counterpart, which is all there is outside x86-64.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define FMOE_X86 1
#pragma GCC diagnostic push  // gcc 12 warns about the undefined registers inside its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#define FMOE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define FMOE_AVX2 __attribute__((target("avx2,fma")))
#else
#define FMOE_X86 0
#endif
