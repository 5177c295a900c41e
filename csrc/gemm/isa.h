// One table per instruction set; a null pointer where the set adds nothing for that type, or is not compiled
// in.
#pragma once

#include "kernels.h"

namespace fmoe_ext::gemm {

struct KernelSet {
  const Kernels* float32 = nullptr;
  const Kernels* float64 = nullptr;
  const Kernels* bfloat16 = nullptr;
  const Kernels* float16 = nullptr;
};

KernelSet portable_kernels();
KernelSet avx2_kernels();         // needs avx2, fma, f16c
KernelSet avx512_kernels();       // needs avx512f, bw, vl, dq
KernelSet avx512_bf16_kernels();  // bfloat16 only; needs avx512_bf16 in addition

}  // namespace fmoe_ext::gemm
