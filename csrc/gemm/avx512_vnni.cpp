// avx512_vnni_integers(), for kernels_for.cpp: the integer products of AVX-512 with VNNI (dot products of
// bytes), for all types but double. isa_kernels.h makes them by the macros below.
#if defined(__x86_64__)

#define FMOE_TARGET "avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#define FMOE_BYTES 64
#define FMOE_MR 14
#define FMOE_VNNI
#define FMOE_INTEGERS
#include "isa_kernels.h"

namespace fmoe_ext::gemm {
IntegerKernelSet avx512_vnni_integers() { return kIntegers; }
}  // namespace fmoe_ext::gemm

#else
#include "isa.h"

namespace fmoe_ext::gemm {
IntegerKernelSet avx512_vnni_integers() { return {}; }
}  // namespace fmoe_ext::gemm
#endif
