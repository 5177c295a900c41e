// Frozen weights in the formats that models are published in, as the kernels read them: no torch here.
#pragma once

#include <cstdint>

namespace fmoe_ext::gemm {

// Numbered as in frozen.FORMATS in Python.
enum class PackedFormat : int64_t { none, mxfp4, fp8_block, int4, q8_0, q4_k, q6_k, nf4 };
constexpr int64_t kNumPackedFormats = 8;

enum class ScaleType { none, float32, bfloat16, float16, e8m0 };

// One row of a packed weight [out, in].
struct PackedRow {
  PackedFormat format;
  ScaleType scale_type;
  const uint8_t* data;  // null is a row of zeros
  int64_t columns;
  const char* scale;    // the first of the row
  int64_t group;        // columns of one scale, a multiple of 32
  const int32_t* zero;  // int4: the words with the zero point of each group of this row, or null for 8
  int zero_shift;       // of this row in a word
};

}  // namespace fmoe_ext::gemm
