// The kernels for any processor: 128-bit vectors of the compiler (SSE2, NEON, ...).
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "isa.h"

#define FMOE_BYTES 16
#define FMOE_MR 4

namespace fmoe_ext::gemm {
namespace {

#include "epilogue.inc"

constexpr Kernels kFloat32 = make_kernels<float>(), kFloat64 = make_kernels<double>();
constexpr Kernels kBfloat16 = make_kernels<BF16>(), kFloat16 = make_kernels<F16>();

}  // namespace

KernelSet portable_kernels() { return {&kFloat32, &kFloat64, &kBfloat16, &kFloat16}; }

}  // namespace fmoe_ext::gemm
