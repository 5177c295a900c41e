// The product of one thread block on float32 operands rounded to TF32, on any device from sm_80: mma.sync.
#pragma once

#include "tile_operand.cuh"

namespace fmoe_ext {

// 8 warps as 2 x 4, each a 64 x 32 piece of 4 x 4 mma tiles of 16 x 8. Which row of the piece is which of its
// tiles' is free: row r of half h of tile i is row i / 2 * 32 + r * 4 + i % 2 * 2 + h, column c of tile j is
// c * 4 + j. So four of a lane's follow one another in memory, of the operands and of the result.
struct Tf32TileGemm : TileRing<float, Tf32TileGemm> {
  static constexpr int kBlocks = 1;  // on a multiprocessor: two spill up to 100 bytes
  float acc[4][4][4] = {};

  __device__ static int warp_row() { return threadIdx.x / 128 * 64; }
  __device__ static int warp_column() { return threadIdx.x / 32 % 4 * 32; }
  // Of the lane's eight rows, `i` being 2 x tile + half, and eight columns.
  __device__ static int row(int i) { return warp_row() + i / 4 * 32 + threadIdx.x % 32 / 4 * 4 + i % 4; }
  __device__ static int first_column() { return warp_column() + threadIdx.x % 4 * 8; }

  // v[x][h]: a lane's share of 32 of the outer dimension and 8 of k, element lane / 4 * 4 + x at lane % 4 + 4
  // h.
  template <bool kAlongOuter>
  __device__ __forceinline__ static void read(uint32_t (&v)[4][2], uint32_t operand, int outer, int k) {
    using Operand = TileOperand<float, kAlongOuter>;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t bits[4];
      if constexpr (kAlongOuter) {
        const uint4 piece =
            ptx::ld_shared16(operand + Operand::offset(k + h * 4 + lane % 4, outer / 4 + lane / 4));
        memcpy(bits, &piece, sizeof bits);
      } else {
        const int matrix = lane / 8, first = lane % 8 * 4;
        ptx::ldmatrix_x4<false>(bits, operand + Operand::offset(outer + first + matrix, k / 4 + h));
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) v[x][h] = ptx::round_to_tf32(bits[x]);
    }
  }

  template <bool kAlongM, bool kAlongN>
  __device__ __forceinline__ void multiply_stage(uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < TileOperand<float, kAlongM>::kK; k += 8) {
      uint32_t y[4][2];
      read<kAlongN>(y, b, warp_column(), k);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {  // by two tiles, for which there are registers
        uint32_t x[4][2];
        read<kAlongM>(x, a, warp_row() + i * 16, k);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint32_t tile[4] = {x[s * 2][0], x[s * 2 + 1][0], x[s * 2][1], x[s * 2 + 1][1]};
#pragma unroll
          for (int j = 0; j < 4; ++j) ptx::mma_m16n8k8_tf32(acc[i + s][j], tile, y[j]);
        }
      }
    }
  }

  // Element j of the lane's q-th piece of row i.
  __device__ __forceinline__ float value_at(int i, int q, int j) const {
    return acc[i / 2][j][i % 2 * 2 + q];
  }
  // out[i, j] = finish(i)(j, value) for i < rows and j < columns.
  template <class Finish>
  __device__ __forceinline__ void store(float* out, int64_t stride, int64_t rows, int64_t columns,
                                        const Finish& finish) const {
    const bool whole_pieces = stride % 4 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      __syncwarp();  // keeps the compiler from looking up all rows at once, for which there are no registers
      const auto value = finish(row(i));
      if (row(i) >= rows) continue;
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int column = first_column() + q * 4;
        Vec<float, 4> v;
#pragma unroll
        for (int j = 0; j < 4; ++j) v.v[j] = value(column + j, value_at(i, q, j));
        float* const place = out + row(i) * stride + column;
        if (whole_pieces && column + 4 <= columns)
          *reinterpret_cast<Vec<float, 4>*>(place) = v;
        else
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (column + j < columns) place[j] = v.v[j];
      }
    }
  }
  // out[i, j] += value
  __device__ __forceinline__ void accumulate(float* out, int64_t stride, int64_t rows,
                                             int64_t columns) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      __syncwarp();  // as in store()
      if (row(i) >= rows) continue;
      float* const place = out + row(i) * stride + first_column();
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (first_column() + j < columns) place[j] += value_at(i, j / 4, j % 4);
    }
  }
};

}  // namespace fmoe_ext
