// Chooses the instruction set, once, when the first product is computed.
#include "isa.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <atomic>
#include <string>

namespace fmoe_ext::gemm {
namespace {

using torch::headeronly::ScalarType;

struct Isa {
  const char* name;
  bool (*supported)();
  KernelSet (*kernels)();
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
#endif

// From the least to the most capable; each set overrides the types it has kernels for.
constexpr std::array<Isa, 4> kIsas = {{
    {"portable", [] { return true; }, portable_kernels},
    {"avx2", has_avx2, avx2_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"avx512_bf16", has_avx512_bf16, avx512_bf16_kernels},
}};

KernelSet kernels_up_to(size_t last) {
  KernelSet chosen;
  for (size_t i = 0; i <= last; ++i) {
    if (!kIsas[i].supported()) continue;
    const KernelSet set = kIsas[i].kernels();
    if (set.float32) chosen.float32 = set.float32;
    if (set.float64) chosen.float64 = set.float64;
    if (set.bfloat16) chosen.bfloat16 = set.bfloat16;
    if (set.float16) chosen.float16 = set.float16;
  }
  return chosen;
}

// One choice for each prefix of kIsas, made at load time; products read the index of the prefix in use.
const std::array<KernelSet, kIsas.size()>& choices() {
  static const std::array<KernelSet, kIsas.size()> all = {kernels_up_to(0), kernels_up_to(1),
                                                          kernels_up_to(2), kernels_up_to(3)};
  return all;
}

std::atomic<size_t> limit{kIsas.size() - 1};

// Test hook: limits the instruction set by name. Returns whether this processor has it; if not, nothing
// changes.
bool set_cpu_isa(std::string name) {
  for (size_t i = 0; i < kIsas.size(); ++i) {
    if (name != kIsas[i].name) continue;
    if (kIsas[i].supported()) limit = i;
    return kIsas[i].supported();
  }
  STD_TORCH_CHECK(false, "unknown instruction set \"", name,
                  "\": known are portable, avx2, avx512, avx512_bf16");
}

}  // namespace

const Kernels& kernels_for(ScalarType dtype) {
  const KernelSet& set = choices()[limit];
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

STABLE_TORCH_LIBRARY_FRAGMENT(fmoe_ext, m) { m.def("_set_cpu_isa(str name) -> bool"); }
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("_set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}

}  // namespace fmoe_ext::gemm
