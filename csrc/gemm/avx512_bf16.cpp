// bfloat16 for AVX-512 with dot products of bfloat16 pairs.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define FMOE_BYTES 64
#define FMOE_MR 14
#define FMOE_BF16_DOT
#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
// gcc's own AVX-512 headers (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

namespace fmoe_ext::gemm {
namespace {

#include "epilogue.inc"

constexpr Kernels kBfloat16 = make_kernels<BF16>();

}  // namespace
}  // namespace fmoe_ext::gemm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace fmoe_ext::gemm {
KernelSet avx512_bf16_kernels() { return {nullptr, nullptr, &kBfloat16, nullptr}; }
}  // namespace fmoe_ext::gemm

#else
namespace fmoe_ext::gemm {
KernelSet avx512_bf16_kernels() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
