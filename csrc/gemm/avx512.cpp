// The kernels for AVX-512.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define FMOE_BYTES 64
#define FMOE_MR 14

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
// gcc's own AVX-512 headers (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

namespace fmoe_ext::gemm {
namespace {

#include "epilogue.inc"

constexpr Kernels kFloat32 = make_kernels<float>(), kFloat64 = make_kernels<double>();
constexpr Kernels kBfloat16 = make_kernels<BF16>(), kFloat16 = make_kernels<F16>();

}  // namespace
}  // namespace fmoe_ext::gemm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace fmoe_ext::gemm {
KernelSet avx512_kernels() { return {&kFloat32, &kFloat64, &kBfloat16, &kFloat16}; }
}  // namespace fmoe_ext::gemm

#else
namespace fmoe_ext::gemm {
KernelSet avx512_kernels() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
