// neon_kernels(), for kernels_for.cpp: the kernels for 64-bit Arm, by NEON, which every such processor has.
// isa_kernels.h makes them by the macros below.
#if defined(__aarch64__)

#define FMOE_NEON
#define FMOE_BYTES 16
#define FMOE_MR 8
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
KernelSet neon_kernels() { return kAllTypes; }
}  // namespace fmoe_ext::gemm

#else
#include "isa.h"

namespace fmoe_ext::gemm {
KernelSet neon_kernels() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
