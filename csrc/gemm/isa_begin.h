// Opens the namespace for code of one instruction set, which isa_end.h closes. An <isa>.cpp defines
//   FMOE_BYTES     the width of a register,
//   FMOE_MR        the rows of a tile,
//   FMOE_TARGET    the instruction sets beyond the compiler's default, if any,
//   FMOE_NEON      where the registers are those of 64-bit Arm,
//   FMOE_BF16_DOT  where the set multiplies pairs of bfloat16,
//   FMOE_VNNI      where it multiplies bytes,
//   FMOE_INTEGERS  where only the products of bytes are wanted.
// Without them, as in an editor, it is the portable set. The namespace has no name: no function in it may be
// visible to code for another set.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "isa.h"

#ifndef FMOE_BYTES
#define FMOE_BYTES 16
#define FMOE_MR 4
#endif

#if defined(FMOE_NEON)
#include <arm_neon.h>
#elif defined(FMOE_TARGET)
#include <immintrin.h>
#endif

#ifdef FMOE_TARGET
#ifndef FMOE_PRAGMA
#define FMOE_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define FMOE_PRAGMA_OF(...) FMOE_PRAGMA(__VA_ARGS__)
#endif
#if defined(__clang__)
FMOE_PRAGMA_OF(clang attribute push(__attribute__((target(FMOE_TARGET))), apply_to = function))
#else
#pragma GCC push_options
FMOE_PRAGMA_OF(GCC target(FMOE_TARGET))
// gcc's own AVX-512 headers (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#endif

namespace fmoe_ext::gemm {
namespace {
