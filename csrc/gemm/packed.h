// Frozen weights in the formats that models are published in, as the kernels read them: no torch here.
// frozen_weight.h checks a caller's tensors against the layouts; decode.h and cuda/decode_packed.cu read the
// rows.
#pragma once

#include <cstdint>

namespace fmoe_ext::gemm {

// As Format.number in fmoe_ext/frozen/formats.
enum class PackedFormat : int64_t {
  none,
  mxfp4,
  fp8_block,
  int4,
  q8_0,
  q4_k,
  q6_k,
  nf4,
  q4_0,
  q5_k,
  iq4_nl,
  iq4_xs,
  mxfp8,
  nvfp4
};
constexpr int64_t kNumPackedFormats = 14;

enum class ScaleType { none, float32, bfloat16, float16, e8m0, e4m3 };

// What one scale is for.
enum class Scaled {
  inside,  // a format whose blocks hold their scales
  block,   // a block, or each of scales_of_block equal parts of one
  group,   // some multiple of 32 columns of a row
  square,  // kScaledSquare rows x columns; the matrix may consist of parts, each with squares of its own
};
constexpr int64_t kScaledSquare = 128;

// What the third tensor of a weight is.
enum class Third {
  none,
  zero_points,  // int32, four bits each of eight rows in a word; may be left out
  factors,      // float32, two for each row
};

// How the bytes and the scales of a format lie.
struct PackedLayout {
  int64_t block_bytes, block_columns;  // a row is whole blocks
  Scaled scaled;
  ScaleType scale_types[3];  // those allowed
  Third third = Third::none;
  int64_t scales_of_block = 1;
};

// In the order of PackedFormat.
constexpr PackedLayout kPackedLayouts[kNumPackedFormats] = {
    {},                                                                 // none
    {16, 32, Scaled::block, {ScaleType::e8m0}},                         // mxfp4
    {1, 1, Scaled::square, {ScaleType::float32, ScaleType::bfloat16}},  // fp8_block
    // int4
    {1, 2, Scaled::group, {ScaleType::float32, ScaleType::bfloat16, ScaleType::float16}, Third::zero_points},
    {34, 32, Scaled::inside, {}},                                   // q8_0
    {144, 256, Scaled::inside, {}},                                 // q4_k
    {210, 256, Scaled::inside, {}},                                 // q6_k
    {1, 2, Scaled::group, {ScaleType::float32}},                    // nf4
    {18, 32, Scaled::inside, {}},                                   // q4_0
    {176, 256, Scaled::inside, {}},                                 // q5_k
    {18, 32, Scaled::inside, {}},                                   // iq4_nl
    {136, 256, Scaled::inside, {}},                                 // iq4_xs
    {32, 32, Scaled::block, {ScaleType::e8m0}},                     // mxfp8
    {16, 32, Scaled::block, {ScaleType::e4m3}, Third::factors, 2},  // nvfp4
};
constexpr const PackedLayout& layout_of(PackedFormat format) {
  return kPackedLayouts[static_cast<int64_t>(format)];
}

// What codes of four bits stand for, in GGUF's IQ4 formats; in MXFP4 and NVFP4; and in NF4: quantiles of the
// normal distribution, as bitsandbytes has them.
alignas(64) constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};
alignas(64) constexpr float kE2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
alignas(64) constexpr float kQuantiles[16] = {-1.f,
                                              -0.6961928009986877f,
                                              -0.5250730514526367f,
                                              -0.39491748809814453f,
                                              -0.28444138169288635f,
                                              -0.18477343022823334f,
                                              -0.09105003625154495f,
                                              0.f,
                                              0.07958029955625534f,
                                              0.16093020141124725f,
                                              0.24611230194568634f,
                                              0.33791524171829224f,
                                              0.44070982933044434f,
                                              0.5626170039176941f,
                                              0.7229568362236023f,
                                              1.f};

// A packed weight [num_experts, rows, columns], for cuda/decode_packed.cu; its rows lie as gate, up, gate,
// up, .. when interleaved.
struct PackedMatrix {
  PackedFormat format;
  ScaleType scale_type;
  bool interleaved;
  const uint8_t* data;
  const char* scale;     // null: inside of data
  const int32_t* zero;   // int4: words with the zero points of eight rows, or null for 8
  const float* factors;  // nvfp4: two for each row
  int64_t num_experts, rows, columns;
  int64_t group;  // columns of one scale, 0 where blocks hold theirs
  int64_t row_bytes, scale_row_bytes;
  int64_t scale_rows, part_rows;  // squares: rows of scales an expert has, rows of the matrix in a part
};

// One row of a packed weight [out, in], for kernels of the CPU (FrozenWeight::row()).
struct PackedRow {
  PackedFormat format;
  ScaleType scale_type;
  const uint8_t* data;  // null is a row of zeros
  int64_t columns;
  const char* scale;     // the first of the row; null where blocks hold theirs
  int64_t group;         // columns of one scale: a multiple of 32, 16 for nvfp4, 0 where blocks hold scales
  const int32_t* zero;   // int4: the words with the zero point of each group of this row, or null for 8
  int zero_shift;        // of this row in a word
  const float* factors;  // nvfp4: what its scales are multiplied by, and what they are divided by after that
};

// Columns of A that share a scale when they are rounded to 8 bits; 0 for formats without products in
// integers.
constexpr int64_t block_of_integers(PackedFormat format) {
  return format == PackedFormat::q8_0 ? 32 : format == PackedFormat::q4_k ? 256 : 0;
}

// Blocks of a row of A after it was rounded to 8 bits: codes * scale.
struct RoundedForQ8 {  // two blocks of 32 columns; what is missing of the second is zero
  int8_t codes[64];
  float scales[16];  // of the two blocks, each eight times, for vectors
};
struct alignas(64) RoundedForQ4 {
  int8_t codes[256];
  float sums[8];  // of 32 codes each, times the scale
  float scale;
};

// Bytes of a row of A with k columns after rounding; for the formats of block_of_integers() only.
constexpr int64_t integer_row_bytes(PackedFormat format, int64_t k) {
  return format == PackedFormat::q8_0 ? (k + 63) / 64 * int64_t{sizeof(RoundedForQ8)}
                                      : k / 256 * int64_t{sizeof(RoundedForQ4)};
}

}  // namespace fmoe_ext::gemm
