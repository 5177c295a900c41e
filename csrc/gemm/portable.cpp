// The kernels for any processor: 128-bit vectors of the compiler (SSE2, AltiVec, ...).
#define FMOE_BYTES 16
#define FMOE_MR 4
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
KernelSet portable_kernels() { return kAllTypes; }
}  // namespace fmoe_ext::gemm
