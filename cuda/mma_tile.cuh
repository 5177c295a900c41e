// The product of one thread block on 16-bit operands, on any device from sm_80: acc [128, 128] += A [128, k]
// B [128, k]^T. cp.async fills a ring of stages of 32 k; ldmatrix and mma.sync read them.
#pragma once

#include "grouped_rows.cuh"

namespace fmoe_ext {

constexpr int kMmaThreads = 256;

// An operand of a stage. Its rows run along k, [128][32], or along the outer dimension, [32][128]. The
// 16-byte pieces of a row are permuted, so that the 8 rows of which ldmatrix reads a piece each lie in
// different banks.
template <bool kAlongOuter>
struct MmaOperand {
  static constexpr int kOuter = 128, kK = 32, kBytes = kOuter * kK * 2;
  static constexpr int kPieces = (kAlongOuter ? kOuter : kK) / 8;  // of a row

  __device__ __forceinline__ static uint32_t offset(int row, int piece) {
    return (row * kPieces + (piece ^ (kAlongOuter ? row & 7 : row >> 1 & 3))) * 16;
  }
  // Where a lane's row of ldmatrix begins for the block of 16 of the outer dimension at `outer` and 16 of k
  // at `k`. The four 8x8 matrices are the halves along the outer dimension, then along k; kOuterFirst: or the
  // other way round.
  template <bool kOuterFirst>
  __device__ __forceinline__ static uint32_t lane_offset(int outer, int k) {
    const int lane = threadIdx.x % 32, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    outer += kOuterFirst ? low : high;
    k += kOuterFirst ? high : low;
    return kAlongOuter ? offset(k + lane % 8, outer / 8) : offset(outer + lane % 8, k / 8);
  }
};

// What a thread copies of an operand: one piece of each of two rows.
template <typename T, bool kAlongOuter>
struct MmaLoader {
  using Operand = MmaOperand<kAlongOuter>;
  static constexpr int kCopies = Operand::kBytes / 16 / kMmaThreads,
                       kRowStep = kMmaThreads / Operand::kPieces;

  __device__ __forceinline__ MmaLoader(const Rows<T>& source, int64_t first_outer, int64_t first_k)
      : rows(source), outer(first_outer) {
    pick(kAlongOuter ? first_k : first_outer);
  }
  __device__ __forceinline__ static int row() { return threadIdx.x / Operand::kPieces; }
  __device__ __forceinline__ static int piece() { return threadIdx.x % Operand::kPieces; }
  __device__ __forceinline__ void pick(int64_t first) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) pointers[i] = rows.row(first + row() + i * kRowStep);
  }
  // Starts the copies of block k, and looks up the rows of the next one.
  __device__ __forceinline__ void copy(char* stage, int64_t k) {
    const int64_t column = (kAlongOuter ? outer : k) + piece() * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      char* const dst = stage + Operand::offset(row() + i * kRowStep, piece());
      const bool kept = pointers[i] && column < rows.width;
      if (rows.vectorised)
        ptx::cp_async16(ptx::shared_address(dst), kept ? pointers[i] + column : rows.base, kept ? 16 : 0);
      else
        copy_elements(dst, kept ? pointers[i] : nullptr, column);
    }
    if (kAlongOuter) pick(k + Operand::kK);
  }
  __device__ void copy_elements(char* dst, const T* source, int64_t column) {
    Vec<T, 8> v{};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (source && column + i < rows.width) v.v[i] = source[column + i];
    *reinterpret_cast<Vec<T, 8>*>(dst) = v;
  }

  const Rows<T>& rows;
  int64_t outer;
  const T* pointers[kCopies];
};

// 8 warps as 2 x 4, each a 64 x 32 piece of 4 x 4 mma tiles.
template <typename T>
struct MmaTileGemm {
  static constexpr int kM = 128, kN = 128, kStages = 3, kOperand = MmaOperand<true>::kBytes;
  float acc[4][4][4] = {};

  __device__ static char* ring() {
    FMOE_SHARED_ARRAY(uint4, stages, kStages * 2 * kOperand / 16);
    return reinterpret_cast<char*>(stages);
  }

  __device__ static int warp_row() { return threadIdx.x / 128 * 64; }
  __device__ static int warp_column() { return threadIdx.x / 32 % 4 * 32; }

  template <bool kAlongM, bool kAlongN>
  __device__ __forceinline__ void multiply_stage(uint32_t a, uint32_t b) {
    using A = MmaOperand<kAlongM>;
    using B = MmaOperand<kAlongN>;
#pragma unroll
    for (int k = 0; k < A::kK; k += 16) {
      uint32_t fa[4][4], fb[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::ldmatrix_x4<kAlongM>(fa[i], a + A::template lane_offset<true>(warp_row() + i * 16, k));
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t r[4];
        ptx::ldmatrix_x4<kAlongN>(r, b + B::template lane_offset<false>(warp_column() + j * 8, k));
#pragma unroll
        for (int q = 0; q < 4; ++q) fb[j + q / 2][q % 2] = r[q];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) ptx::mma_m16n8k16(acc[i][j], fa[i], fb[j], T{});
    }
  }

  // The product over k in [k_begin, k_end); the rows of A and B run along k, or along m and n.
  template <bool kAlongM, bool kAlongN>
  __device__ __forceinline__ void multiply(const Rows<T>& a, int64_t m, const Rows<T>& b, int64_t n,
                                           int64_t k_begin, int64_t k_end) {
    constexpr int kStep = MmaOperand<true>::kK;
    char* const stages = ring();
    MmaLoader<T, kAlongM> load_a(a, m, k_begin);
    MmaLoader<T, kAlongN> load_b(b, n, k_begin);
    const int num_steps = static_cast<int>(ceil_div(k_end - k_begin, kStep));
    const auto load = [&](int step) {
      if (step < num_steps) {
        char* const stage = stages + step % kStages * 2 * kOperand;
        load_a.copy(stage, k_begin + static_cast<int64_t>(step) * kStep);
        load_b.copy(stage + kOperand, k_begin + static_cast<int64_t>(step) * kStep);
      }
      ptx::cp_async_commit();
    };
    for (int step = 0; step < kStages - 1; ++step) load(step);
    for (int step = 0; step < num_steps; ++step) {
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();  // this stage is there, and nobody reads the one before any more
      load(step + kStages - 1);
      const uint32_t stage = ptx::shared_address(stages + step % kStages * 2 * kOperand);
      multiply_stage<kAlongM, kAlongN>(stage, stage + kOperand);
    }
    ptx::cp_async_wait_all();
    __syncthreads();
  }

  // out[i, j] = finish(i)(j, value) for i < rows and j < columns.
  template <class Finish>
  __device__ __forceinline__ void store(T* out, int64_t stride, int64_t rows, int64_t columns,
                                        const Finish& finish) {
    using Staged = MmaOperand<false>;  // each warp's 64 x 32
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
  // out[i, j] += value, in float32.
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
