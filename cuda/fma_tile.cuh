// The portable product of one thread block on float32 operands by fused multiply-adds, without TF32: 16 x 16
// threads with 8 x 8 elements each: [128, 128]. tile_gemm.cuh chooses it for float32, TileRing
// (tile_operand.cuh) fills the stages. What is read of shared memory, 16 bytes at a time, is used eight
// times.
#pragma once

#include "tile_operand.cuh"

namespace fmoe_ext {

struct FmaTileGemm : TileRing<float, FmaTileGemm> {
  static constexpr int kBlocks = 1;  // thread blocks that a multiprocessor must hold, for __launch_bounds__
  float acc[8][8] = {};

  // Place of a thread among 16 along m and 16 along n; a warp covers 4 x 8 places. A place has eight rows
  // (columns): 4 * place to 4 * place + 3, and the same 64 further on.
  __device__ static int place_m() { return threadIdx.x / 64 * 4 + threadIdx.x % 32 / 8; }
  __device__ static int place_n() { return threadIdx.x / 32 % 2 * 8 + threadIdx.x % 8; }
  __device__ static int element(int place, int i) { return i / 4 * 64 + place * 4 + i % 4; }

  // Reads v[i][j], the element of row (column) element(place, i) at k + j; kAlongOuter: the rows of the stage
  // run along the outer dimension, so a piece is four i of one k.
  template <bool kAlongOuter>
  __device__ __forceinline__ static void read(float (&v)[8][4], uint32_t operand, int place, int k) {
    using Operand = TileOperand<float, kAlongOuter>;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[4];
      if constexpr (kAlongOuter)
        read_piece(x, operand + Operand::offset(k + i % 4, i / 4 * 16 + place));
      else
        read_piece(x, operand + Operand::offset(element(place, i), k / 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) (kAlongOuter ? v[i / 4 * 4 + j][i % 4] : v[i][j]) = x[j];
    }
  }
  __device__ __forceinline__ static void read_piece(float (&x)[4], uint32_t address) {
    const uint4 bits = ptx::ld_shared16(address);
    memcpy(x, &bits, sizeof bits);
  }

  // The sum of a stage is added as one number, so that rounding errors grow as in a blocked product.
  template <bool kAlongM, bool kAlongN>
  __device__ __forceinline__ void multiply_stage(uint32_t a, uint32_t b) {
    float sum[8][8] = {};
    // not unrolled: as it is, the kernel takes all 255 registers of a thread
#pragma unroll 1
    for (int k = 0; k < TileOperand<float, kAlongM>::kK; k += 4) {
      float x[8][4], y[8][4];
      read<kAlongM>(x, a, place_m(), k);
      read<kAlongN>(y, b, place_n(), k);
#pragma unroll
      for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[i][j] += x[i][q] * y[j][q];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) acc[i][j] += sum[i][j];
  }

  // out[i, j] = finish(i)(j, value) for i < rows and j < columns. finish is also called for i outside, and
  // its result for j outside, up to the tile's end, and must not read there.
  template <class Finish>
  __device__ __forceinline__ void store(float* out, int64_t stride, int64_t rows, int64_t columns,
                                        const Finish& finish) {
    const bool whole_pieces = stride % 4 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = element(place_m(), i);
      const auto value = finish(row);
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const int column = element(place_n(), j);
        Vec<float, 4> v;
#pragma unroll
        for (int q = 0; q < 4; ++q) v.v[q] = value(column + q, acc[i][j + q]);
        float* const place = out + row * stride + column;
        if (whole_pieces && column + 4 <= columns)
          *reinterpret_cast<Vec<float, 4>*>(place) = v;
        else
#pragma unroll
          for (int q = 0; q < 4; ++q)
            if (column + q < columns) place[q] = v.v[q];
      }
    }
  }
  // out[i, j] += acc
  __device__ __forceinline__ void accumulate(float* out, int64_t stride, int64_t rows,
                                             int64_t columns) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int row = element(place_m(), i), column = element(place_n(), j);
        if (row < rows && column < columns) out[row * stride + column] += acc[i][j];
      }
  }
};

}  // namespace fmoe_ext
