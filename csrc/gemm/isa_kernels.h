// The tables of one instruction set (kernels.h), filled with its kernels, for <isa>.cpp, which first defines
// the macros that isa_begin.h lists. What only AMX has is added by amx_bf16.cpp.
#pragma once

#include "clamped_glu.h"
#include "decode.h"
#include "epilogue.h"
#include "few_rows.h"
#include "in_order.h"
#include "integer_rows.h"
#include "multiply.h"
#include "packed_pairs.h"
#include "packed_rows.h"
#include "packing.h"

#include "isa_begin.h"

// Rows of an expert up to which integers are faster: with AVX-512 as measured on Zen 5, else always.
#if defined(FMOE_BF16_DOT) && defined(FMOE_VNNI)
constexpr int64_t kMostIntegerRows = 16;
#elif defined(FMOE_VNNI)
constexpr int64_t kMostIntegerRows = 64;
#else
constexpr int64_t kMostIntegerRows = FMOE_BYTES == 64 ? 32 : INT64_MAX;
#endif

// Entry (multiply.h) makes a kernel that takes pointers to elements one that takes pointers to roles, as the
// tables have them.
template <class T>
constexpr IntegerKernels make_integer_kernels() {
  return {sizeof(AccOf<T>) == 8 ? 0 : kMostIntegerRows, Entry<T, round_rows<T>>(),
          Entry<T, multiply_integers<T>>()};
}

static_assert(MR <= kMaxTileRows);

#ifndef FMOE_INTEGERS
template <class T>
constexpr Kernels make_kernels() {
  using U = typename UnitOf<T>::type;
  Kernels kernels{};
  kernels.mr = MR;
  kernels.nr = NR<U>;
  kernels.k_step = U::k_step;
  kernels.row_step = 1;
  // with AVX-512 packing pays earlier, except for pairs of bfloat16
  kernels.few_rows = FMOE_BYTES == 64 && U::k_step == 1 ? 12 : kFewRows;
  kernels.few_rows_transposed = 2 * kFewRows;
  kernels.storage_bytes = sizeof(T);
  kernels.operand_bytes = sizeof(typename U::Operand);
  kernels.acc_bytes = sizeof(typename U::Acc);
  kernels.copy_rows = Entry<T, copy_rows<T>>();
  kernels.pack_columns = Entry<T, pack_columns<T>>();
  kernels.pack_rows = Entry<T, pack_rows<T>>();
  kernels.pack_operand_rows = Entry<T, pack_operand_rows<T>>();
  kernels.multiply_row_major = Entry<T, multiply_row_major<T>>();
  kernels.multiply_transposed = Entry<T, multiply_transposed<T>>();
  if constexpr (U::k_step == 1) {
    kernels.multiply_in_order = Entry<T, multiply_in_order<T>>();
    kernels.exponentials = Entry<T, exponentials<T>>();
  }
  kernels.multiply_columns = Entry<T, multiply_columns<T>>();
  kernels.multiply_rows_of = Entry<T, multiply_rows_of<T>>();
  kernels.decode = Entry<T, decode<T>>();
  kernels.packed_rows = sizeof(typename U::Acc) == 4 ? kPackedRows : 0;
#if defined(FMOE_BF16_DOT) && FMOE_BYTES == 64
  kernels.packed_rows = MR;  // decoding a weight twice takes less time than a copy of it
  kernels.multiply_packed = Entry<T, multiply_packed_pairs>();
#else
  kernels.multiply_packed = Entry<T, multiply_packed<T>>();
#endif
  kernels.integers = make_integer_kernels<T>();
  kernels.store = Entry<T, store_tile<T>>();
  kernels.add = Entry<T, add_tile<T>>();
  kernels.stream = Entry<T, stream_tile<T>>();
  kernels.end_stream = end_stream;
  kernels.accumulate = Entry<T, accumulate_tile<T>>();
  kernels.act_forward = Entry<T, act_forward<T>>();
  kernels.act_backward = Entry<T, act_backward<T>>();
  kernels.clamped_glu = Entry<T, clamped_glu<T>>();
  kernels.clamped_glu_backward = Entry<T, clamped_glu_backward<T>>();
  kernels.round = Entry<T, round_sums<T>>();
  kernels.sum_over_rows = Entry<T, sum_over_rows<T>>();
  kernels.sum_rows = Entry<T, sum_rows<T>>();
  kernels.dot = Entry<T, dot<T>>();
  return kernels;
}
#endif  // FMOE_INTEGERS

#ifdef FMOE_INTEGERS
constexpr IntegerKernels kFloat32 = make_integer_kernels<float>(), kFloat16 = make_integer_kernels<F16>();
constexpr IntegerKernels kBfloat16 = make_integer_kernels<BF16>();
#else
#ifndef FMOE_BF16_DOT
constexpr Kernels kFloat32 = make_kernels<float>(), kFloat64 = make_kernels<double>();
constexpr Kernels kFloat16 = make_kernels<F16>();
#endif
constexpr Kernels kBfloat16 = make_kernels<BF16>();
#endif  // FMOE_INTEGERS

#include "isa_end.h"

namespace fmoe_ext::gemm {
namespace {
#if defined(FMOE_INTEGERS)
constexpr IntegerKernelSet kIntegers = {kFloat32, kBfloat16, kFloat16};
#elif defined(FMOE_BF16_DOT)
constexpr KernelSet kBfloat16Only = {nullptr, nullptr, &kBfloat16, nullptr};
#else
constexpr KernelSet kAllTypes = {&kFloat32, &kFloat64, &kBfloat16, &kFloat16};
#endif
}  // namespace
}  // namespace fmoe_ext::gemm
