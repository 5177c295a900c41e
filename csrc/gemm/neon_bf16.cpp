// neon_bf16_kernels(), for kernels_for.cpp: bfloat16 by 64-bit Arm's dot products of bfloat16 pairs (bfdot).
// isa_kernels.h makes the table by the macros below.
#include "isa.h"

#if defined(FMOE_HAS_NEON_BF16)

#define FMOE_NEON
#define FMOE_TARGET "arch=armv8.2-a+bf16"
#define FMOE_BYTES 16
#define FMOE_MR 8
#define FMOE_BF16_DOT
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
KernelSet neon_bf16_kernels() { return kBfloat16Only; }
}  // namespace fmoe_ext::gemm

#else

namespace fmoe_ext::gemm {
KernelSet neon_bf16_kernels() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
