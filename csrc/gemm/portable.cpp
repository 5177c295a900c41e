// portable_kernels(), for kernels_for.cpp: the kernels for any processor, in 128-bit vectors of the compiler
// (SSE2, AltiVec, ...). isa_kernels.h makes them by the macros below.
#define FMOE_BYTES 16
#define FMOE_MR 4
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
KernelSet portable_kernels() { return kAllTypes; }
}  // namespace fmoe_ext::gemm
