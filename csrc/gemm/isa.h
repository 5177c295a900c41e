// The tables of kernels (kernels.h) of each instruction set, from its <isa>.cpp to kernels_for.cpp: a null
// pointer where the set adds nothing for that type, or is not compiled in.
#pragma once

#include "kernels.h"

// clang before 16 has no bfloat16 in arm_neon.h unless the whole file is compiled for it.
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16)
#define FMOE_HAS_NEON_BF16
#endif

namespace fmoe_ext::gemm {

struct KernelSet {
  const Kernels* float32 = nullptr;
  const Kernels* float64 = nullptr;
  const Kernels* bfloat16 = nullptr;
  const Kernels* float16 = nullptr;
};

// Replace those of AVX-512; need avx512_vnni.
struct IntegerKernelSet {
  IntegerKernels float32, bfloat16, float16;
};
IntegerKernelSet avx512_vnni_integers();

// Replaces the products of avx512_bf16 by those of AMX, for bfloat16; needs amx_bf16.
void use_amx(Kernels& bfloat16);

KernelSet portable_kernels();
KernelSet avx2_kernels();         // needs avx2, fma, f16c
KernelSet avx512_kernels();       // needs avx512f, bw, vl, dq
KernelSet avx512_bf16_kernels();  // bfloat16 only; needs avx512_bf16 and avx512_vnni in addition
KernelSet neon_kernels();
KernelSet neon_bf16_kernels();  // bfloat16 only; needs bf16

}  // namespace fmoe_ext::gemm
