// avx512_kernels(), for kernels_for.cpp: the kernels for AVX-512. isa_kernels.h makes them by the macros
// below.
#if defined(__x86_64__)

#define FMOE_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#define FMOE_BYTES 64
#define FMOE_MR 14
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
KernelSet avx512_kernels() { return kAllTypes; }
}  // namespace fmoe_ext::gemm

#else
#include "isa.h"

namespace fmoe_ext::gemm {
KernelSet avx512_kernels() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
