// avx2_kernels(), for kernels_for.cpp: the kernels for AVX2 with FMA and F16C. isa_kernels.h makes them by
// the macros below.
#if defined(__x86_64__)

#define FMOE_TARGET "avx2,fma,f16c"
#define FMOE_BYTES 32
#define FMOE_MR 6
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
KernelSet avx2_kernels() { return kAllTypes; }
}  // namespace fmoe_ext::gemm

#else
#include "isa.h"

namespace fmoe_ext::gemm {
KernelSet avx2_kernels() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
