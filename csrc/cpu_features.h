// The instruction sets that the CPU kernels are written for: what this processor has, found out at run time,
// and what may be used of it. Every kernel asks here, so that a test can take the vector code away from all
// of them.
#pragma once

#include <atomic>

namespace fmoe_ext {

// From the least to the most capable; a processor has those of one architecture.
enum class CpuIsa { portable, avx2, avx512, avx512_vnni, avx512_bf16, amx_bf16, neon, neon_bf16 };
constexpr int kNumCpuIsas = 8;

// avx2: with fma, f16c. avx512: avx2, avx512f, bw, vl, dq. ..._vnni: and dot products of bytes. neon: of
// 64-bit Arm. ..._bf16: and dot products of bfloat16. amx_bf16: avx512_bf16, and tiles of bfloat16 that Linux
// lets this process use.
bool processor_has(CpuIsa isa);

namespace detail {
extern std::atomic<CpuIsa> isa_in_use;
}

// The most capable set in use: the fastest of the processor, unless _set_cpu_isa named another one.
inline CpuIsa cpu_isa() { return detail::isa_in_use.load(std::memory_order_relaxed); }
inline bool use_avx2() { return cpu_isa() >= CpuIsa::avx2 && cpu_isa() <= CpuIsa::amx_bf16; }
inline bool use_avx512() { return cpu_isa() >= CpuIsa::avx512 && cpu_isa() <= CpuIsa::amx_bf16; }

}  // namespace fmoe_ext
