// kernels_for(dtype): the table of kernels for the instruction set in use, cpu_isa(). The kernels of a set
// replace those of the sets below it, type by type.
#include <torch/headeronly/util/Exception.h>

#include <array>

#include "cpu_features.h"
#include "gemm/isa.h"

namespace fmoe_ext::gemm {
namespace {

using torch::headeronly::ScalarType;

// A copy that may be changed, for as long as the process lives.
Kernels& own(const Kernels*& kernels) {
  auto* mine = new Kernels(*kernels);
  kernels = mine;
  return *mine;
}

// Each set overrides the types that it has kernels for.
KernelSet kernels_up_to(CpuIsa last) {
  constexpr KernelSet (*kSets[kNumCpuIsas])() = {portable_kernels, avx2_kernels,        avx512_kernels,
                                                 nullptr,          avx512_bf16_kernels, nullptr,
                                                 neon_kernels,     neon_bf16_kernels};
  KernelSet chosen;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    const CpuIsa isa = static_cast<CpuIsa>(i);
    if (!processor_has(isa)) continue;
    if (isa == CpuIsa::avx512_vnni) {
      const IntegerKernelSet integers = avx512_vnni_integers();
      own(chosen.float32).integers = integers.float32;
      own(chosen.bfloat16).integers = integers.bfloat16;
      own(chosen.float16).integers = integers.float16;
      continue;
    }
    if (isa == CpuIsa::amx_bf16) {
      use_amx(own(chosen.bfloat16));
      continue;
    }
    const KernelSet set = kSets[i]();
    if (set.float32) chosen.float32 = set.float32;
    if (set.float64) chosen.float64 = set.float64;
    if (set.bfloat16) chosen.bfloat16 = set.bfloat16;
    if (set.float16) chosen.float16 = set.float16;
  }
  return chosen;
}

const KernelSet& kernels_in_use() {
  static const std::array<KernelSet, kNumCpuIsas> all = [] {
    std::array<KernelSet, kNumCpuIsas> sets;
    for (int i = 0; i < kNumCpuIsas; ++i) sets[i] = kernels_up_to(static_cast<CpuIsa>(i));
    return sets;
  }();
  return all[static_cast<int>(cpu_isa())];
}

}  // namespace

const Kernels& kernels_for(ScalarType dtype) {
  const KernelSet& set = kernels_in_use();
  switch (dtype) {
    case ScalarType::Float:
      return *set.float32;
    case ScalarType::Double:
      return *set.float64;
    case ScalarType::BFloat16:
      return *set.bfloat16;
    case ScalarType::Half:
      return *set.float16;
    default:
      STD_TORCH_CHECK(false, "no CPU kernels for dtype ", torch::headeronly::toString(dtype));
  }
}

}  // namespace fmoe_ext::gemm
