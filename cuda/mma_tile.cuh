// The portable product [128, 128] of one thread block on 16-bit operands, on any device from sm_80: ldmatrix
// and mma.sync. tile_gemm.cuh chooses it, TileRing (tile_operand.cuh) fills the stages.
#pragma once

#include "tile_operand.cuh"

namespace fmoe_ext {

// Where a lane's row of ldmatrix begins for the block of 16 of the outer dimension at `outer` and 16 of k at
// `k`. The four 8x8 matrices are the halves along the outer dimension, then along k; kOuterFirst: or the
// other way round.
template <typename T, bool kAlongOuter, bool kOuterFirst>
__device__ __forceinline__ uint32_t lane_offset(int outer, int k) {
  const int lane = threadIdx.x % 32, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
  outer += kOuterFirst ? low : high;
  k += kOuterFirst ? high : low;
  using Operand = TileOperand<T, kAlongOuter>;
  return kAlongOuter ? Operand::offset(k + lane % 8, outer / 8) : Operand::offset(outer + lane % 8, k / 8);
}

// 8 warps as 2 x 4, each a 64 x 32 piece of 4 x 4 mma tiles.
template <typename T>
struct MmaTileGemm : TileRing<T, MmaTileGemm<T>> {
  using TileRing<T, MmaTileGemm>::ring;
  static constexpr int kBlocks = 2;  // thread blocks that a multiprocessor must hold, for __launch_bounds__
  float acc[4][4][4] = {};

  __device__ static int warp_row() { return threadIdx.x / 128 * 64; }
  __device__ static int warp_column() { return threadIdx.x / 32 % 4 * 32; }

  template <bool kAlongM, bool kAlongN>
  __device__ __forceinline__ void multiply_stage(uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < TileOperand<T, kAlongM>::kK; k += 16) {
      uint32_t fa[4][4], fb[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::ldmatrix_x4<kAlongM>(fa[i], a + lane_offset<T, kAlongM, true>(warp_row() + i * 16, k));
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t r[4];
        ptx::ldmatrix_x4<kAlongN>(r, b + lane_offset<T, kAlongN, false>(warp_column() + j * 8, k));
#pragma unroll
        for (int q = 0; q < 4; ++q) fb[j + q / 2][q % 2] = r[q];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) ptx::mma_m16n8k16<T>(acc[i][j], fa[i], fb[j]);
    }
  }

  // out[i, j] = finish(i)(j, value) for i < rows and j < columns. finish and its result are also called for i
  // and j outside, up to the tile's end, and must not read there.
  template <class Finish>
  __device__ __forceinline__ void store(T* out, int64_t stride, int64_t rows, int64_t columns,
                                        const Finish& finish) {
    using Staged = TileOperand<T, false>;  // each warp's 64 x 32
    char* const staged = ring() + threadIdx.x / 32 * (64 * 32 * sizeof(T));
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // every eighth row
      const int row = i * 8 + lane / 4;
      __syncwarp();  // keeps the compiler from looking up all rows at once, for which there are no registers
      const auto value = finish(warp_row() + row);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = warp_column() + j * 8 + lane % 4 * 2, q = i % 2 * 2;
        *reinterpret_cast<uint32_t*>(staged + Staged::offset(row, j) + lane % 4 * 4) =
            pack<T>(value(column, acc[i / 2][j][q]), value(column + 1, acc[i / 2][j][q + 1]));
      }
    }
    __syncwarp();
    const bool whole_pieces = stride % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll 2
    for (int item = lane; item < 64 * 4; item += 32) {
      const int row = warp_row() + item / 4, column = warp_column() + item % 4 * 8;
      const char* piece = staged + Staged::offset(item / 4, item % 4);
      if (row >= rows) continue;
      if (whole_pieces && column + 8 <= columns)
        *reinterpret_cast<uint4*>(out + row * stride + column) = *reinterpret_cast<const uint4*>(piece);
      else
        for (int c = 0; c < 8 && column + c < columns; ++c)
          out[row * stride + column + c] = reinterpret_cast<const T*>(piece)[c];
    }
    __syncthreads();  // before the ring is filled again
  }
  // out[i, j] += acc, in float32
  __device__ __forceinline__ void accumulate(float* out, int64_t stride, int64_t rows,
                                             int64_t columns) const {
    const int lane = threadIdx.x % 32, first = warp_column() + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // every eighth row
      const int row = warp_row() + i * 8 + lane / 4;
      __syncwarp();  // as in store()
      if (row >= rows) continue;
      float* const place = out + row * stride + first;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = j / 2 * 8 + j % 2;
        if (first + column < columns) place[column] += acc[i / 2][j / 2][i % 2 * 2 + j % 2];
      }
    }
  }
};

}  // namespace fmoe_ext
