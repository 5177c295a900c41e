// What the processor has, by cpuid and what Linux allows, and the operators that say and change what is used:
// _cpu_isa, _cpu_isa_refused, and _set_cpu_isa of FMOE_CPU_ISA, of tests and of C++ programs.
#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <string>

namespace fmoe_ext {
namespace {

constexpr const char* kNames[kNumCpuIsas] = {"portable",    "avx2",     "avx512", "avx512_vnni",
                                             "avx512_bf16", "amx_bf16", "neon",   "neon_bf16"};

#if defined(__x86_64__)
bool has_f16c() {  // which __builtin_cpu_supports of clang before 16 does not know
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Whether the processor has tiles of bfloat16, and the system saves them when it switches threads.
bool processor_has_tiles() {
#if defined(FMOE_EMULATE_AMX)
  return true;
#elif defined(__x86_64__)
  constexpr unsigned kAmxBf16 = 1 << 22, kAmxTile = 1 << 24, kXsaveInUse = 1 << 27, kTileState = 3 << 17;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kXsaveInUse)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
#else
  return false;
#endif
}

// Asks Linux once for the memory in which it saves the tiles of this process' threads.
bool may_use_tiles() {
#if defined(FMOE_EMULATE_AMX)
  return true;
#elif defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

// Since Sapphire Rapids Intel means bfloat16 for AMX: vdpbf16ps takes twice as long as the two products of
// floats that it replaces (88 and 160 GFLOP/s on one core). AVX512_FP16 came with that generation.
bool has_slow_bf16_dot() {
#if defined(__x86_64__)
  constexpr unsigned kFp16 = 1 << 23;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_is("intel") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kFp16);
#else
  return false;
#endif
}

CpuIsa fastest_of_processor() {
  int best = 0;
  for (int i = 0; i < kNumCpuIsas; ++i) {
    const CpuIsa isa = static_cast<CpuIsa>(i);
    if (processor_has(isa) && !(isa == CpuIsa::avx512_bf16 && has_slow_bf16_dot())) best = i;
  }
  return static_cast<CpuIsa>(best);
}

// Limits every CPU kernel to the set of that name and those below it. Returns whether this processor has it;
// if not, nothing changes.
bool set_cpu_isa(std::string name) {
  for (int i = 0; i < kNumCpuIsas; ++i) {
    if (name != kNames[i]) continue;
    const CpuIsa isa = static_cast<CpuIsa>(i);
    if (processor_has(isa)) detail::isa_in_use = isa;
    return processor_has(isa);
  }
  STD_TORCH_CHECK(false, "unknown instruction set \"", name,
                  "\": known are portable, avx2, avx512, avx512_vnni, avx512_bf16, amx_bf16, neon, "
                  "neon_bf16");
}

// The set that the processor has and the system refuses this process, or nothing.
std::string cpu_isa_refused() {
  return processor_has_tiles() && !may_use_tiles() ? kNames[static_cast<int>(CpuIsa::amx_bf16)] : "";
}

std::string cpu_isa_name() { return kNames[static_cast<int>(cpu_isa())]; }

}  // namespace

bool processor_has(CpuIsa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == CpuIsa::avx2) return avx2;
  if (isa == CpuIsa::avx512) return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (isa == CpuIsa::avx512_vnni) return vnni;
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (isa == CpuIsa::avx512_bf16) return bf16;
  if (isa == CpuIsa::amx_bf16) return bf16 && processor_has_tiles() && may_use_tiles();
#elif defined(__aarch64__)
  if (isa == CpuIsa::neon) return true;
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1 << 14;  // HWCAP2_BF16, which older kernel headers lack
  if (isa == CpuIsa::neon_bf16) return getauxval(AT_HWCAP2) & kBf16;
#endif
#endif
  return isa == CpuIsa::portable;
}

namespace detail {
std::atomic<CpuIsa> isa_in_use{fastest_of_processor()};
}

STABLE_TORCH_LIBRARY_FRAGMENT(fmoe_ext, m) {
  m.def("_set_cpu_isa(str name) -> bool");
  m.def("_cpu_isa() -> str");
  m.def("_cpu_isa_refused() -> str");
}
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("_set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("_cpu_isa", TORCH_BOX(&cpu_isa_name));
  m.impl("_cpu_isa_refused", TORCH_BOX(&cpu_isa_refused));
}

}  // namespace fmoe_ext
