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

// Columns of A that share a scale when they are rounded to 8 bits; 0 for formats without such products.
constexpr int64_t block_of_integers(PackedFormat format) {
  return format == PackedFormat::q8_0 ? 32 : format == PackedFormat::q4_k ? 256 : 0;
}

// A row of A, rounded: scales[block] * codes, with the sums of codes for 32 columns each.
struct IntegerRow {
  int8_t* codes;
  float* scales;
  int16_t* sums;
};

constexpr int64_t integer_row_bytes(PackedFormat format, int64_t k) {
  return (k + k / block_of_integers(format) * 4 + k / 32 * 2 + 63) / 64 * 64;
}

inline IntegerRow integer_row(PackedFormat format, int64_t k, void* rows, int64_t row) {
  auto* codes = static_cast<int8_t*>(rows) + row * integer_row_bytes(format, k);
  auto* scales = reinterpret_cast<float*>(codes + k);
  return {codes, scales, reinterpret_cast<int16_t*>(scales + k / block_of_integers(format))};
}

}  // namespace fmoe_ext::gemm
