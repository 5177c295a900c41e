// avx512_bf16_kernels(), for kernels_for.cpp: bfloat16 by AVX-512's dot products of bfloat16 pairs, and of
// bytes for integers. isa_kernels.h makes the table by the macros below.
#if defined(__x86_64__)

#define FMOE_TARGET "avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#define FMOE_BYTES 64
#define FMOE_MR 14
#define FMOE_BF16_DOT
#define FMOE_VNNI
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
KernelSet avx512_bf16_kernels() { return kBfloat16Only; }
}  // namespace fmoe_ext::gemm

#else
#include "isa.h"

namespace fmoe_ext::gemm {
KernelSet avx512_bf16_kernels() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
