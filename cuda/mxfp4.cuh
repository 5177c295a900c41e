// MXFP4 weights as the kernels read them: 32 values of E2M1 (a sign and three bits, two values a byte, the
// lower half first) share a scale 2^(s - 127). Decoded to bfloat16 every value is exact, 2^-128 included;
// beyond its range it is infinite, and a scale of 255 makes 32 NaNs, as on the CPU.
#pragma once

#include "gemm/packed.h"
#include "tile_operand.cuh"

namespace fmoe_ext {

constexpr int kMxBlock = 32;

// The weight [rows, 32 blocks] of an expert. Rows are counted with gates before ups; interleaved, they lie as
// gate, up, gate, up, ..
struct MxRows {
  const uint4* data;               // [rows, blocks]
  const uint8_t* scale;            // [rows, blocks]
  int num_rows, num_blocks, half;  // half: number of gates, 0 if the rows are not interleaved

  __device__ __forceinline__ int stored(int row) const {
    return !half ? row : row < half ? 2 * row : 2 * (row - half) + 1;
  }
  __device__ __forceinline__ bool has(int row, int block) const {
    return row < num_rows && block < num_blocks;
  }
  // Counted through all rows: the place of a block in data and of its scale.
  __device__ __forceinline__ uint32_t at(int row, int block) const {
    return static_cast<uint32_t>(stored(row)) * num_blocks + block;
  }
};
// Of all experts, as a kernel gets it.
struct MxWeight {
  MxRows first;

  __device__ __forceinline__ MxRows of(int expert) const {
    MxRows rows = first;
    const int64_t skipped = static_cast<int64_t>(expert) * rows.num_rows * rows.num_blocks;
    rows.data += skipped, rows.scale += skipped;
    return rows;
  }
};
inline MxWeight mx_weight(const gemm::PackedMatrix& weight) {
  const int rows = static_cast<int>(weight.rows), blocks = static_cast<int>(weight.columns / kMxBlock);
  return {{reinterpret_cast<const uint4*>(weight.data), reinterpret_cast<const uint8_t*>(weight.scale), rows,
           blocks, weight.interleaved ? rows / 2 : 0}};
}

// 2^(s - 127) twice, as bfloat16. 2^-127 is subnormal, and 255 is NaN.
__device__ __forceinline__ uint32_t mx_scale(uint32_t s) {
  const uint32_t bits = s == 0 ? 0x0040u : s == 255 ? 0x7fc0u : s << 7;
  return bits | bits << 16;
}
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  const __nv_bfloat162 product = __hmul2(x, y);
  uint32_t bits;
  memcpy(&bits, &product, sizeof bits);
  return bits;
}
// 8 values that follow one another, times their scale. The three bits of a value are the end of the exponent
// and the beginning of the fraction of a bfloat16 that is too small by 2^126; its subnormals are right as
// well.
__device__ __forceinline__ uint4 decode_mx(uint32_t codes, uint32_t scale) {
  constexpr uint32_t kTwoTo126 = 0x7e807e80;
  uint32_t pairs[4];  // values i and i + 4
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t shifted = codes << (12 - 4 * i);
    const uint32_t small = (shifted & 0x80008000) | (shifted >> 6 & 0x01c001c0);
    pairs[i] = multiply_bf16x2(multiply_bf16x2(small, kTwoTo126), scale);
  }
  return {(pairs[0] & 0xffff) | pairs[1] << 16, (pairs[2] & 0xffff) | pairs[3] << 16,
          pairs[0] >> 16 | (pairs[1] & 0xffff0000), pairs[2] >> 16 | (pairs[3] & 0xffff0000)};
}

// What a thread decodes of an operand of the portable product: half a block. What belongs to the next stage
// is loaded while this one is multiplied.
template <bool kAlongOuter>
struct MxLoader {
  using Operand = TileOperand<__nv_bfloat16, kAlongOuter>;

  __device__ __forceinline__ MxLoader(const MxRows& source, int64_t first_outer, int64_t first_k)
      : rows(source), outer(static_cast<int>(first_outer)) {
    fetch(static_cast<int>(first_k));
  }
  // Of the operand: rows that follow one another, or along the outer dimension two rows of four blocks. The
  // eight threads that write at once meet different banks.
  __device__ __forceinline__ static int row() {
    return kAlongOuter ? threadIdx.x / 16 * 2 + threadIdx.x / 4 % 2 : threadIdx.x / 2;
  }
  __device__ __forceinline__ static int block() {
    return kAlongOuter ? threadIdx.x / 8 % 2 * 2 + threadIdx.x / 2 % 2 : 0;
  }
  __device__ __forceinline__ static int half() { return threadIdx.x % 2; }

  __device__ __forceinline__ void fetch(int k) {
    const int r = (kAlongOuter ? k : outer) + row(), b = (kAlongOuter ? outer : k) / kMxBlock + block();
    const bool there = rows.has(r, b);
    const uint32_t place = there ? rows.at(r, b) : 0;
    codes = there ? reinterpret_cast<const uint2*>(rows.data + place)[half()] : uint2{0, 0};
    scale = there ? rows.scale[place] : 0;
  }
  // Decodes block k, and loads the next one.
  __device__ __forceinline__ void copy(char* stage, int64_t k) {
    const uint32_t factor = mx_scale(scale);
    const int piece = block() * 4 + half() * 2;
    *reinterpret_cast<uint4*>(stage + Operand::offset(row(), piece)) = decode_mx(codes.x, factor);
    *reinterpret_cast<uint4*>(stage + Operand::offset(row(), piece + 1)) = decode_mx(codes.y, factor);
    fetch(static_cast<int>(k) + Operand::kK);
  }

  const MxRows& rows;
  int outer;
  uint2 codes;
  uint32_t scale;
};
template <bool kAlongOuter>
struct LoaderOf<MxRows, kAlongOuter> {
  using type = MxLoader<kAlongOuter>;
};

}  // namespace fmoe_ext
