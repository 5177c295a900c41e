// The portable matrix product of one thread block: acc [kM, kN] += A [kM, k] B [kN, k]^T, both staged in
// shared memory. bfloat16 and float16 go through mma.sync (sm_80), float32 and float64 through plain fused
// multiply-adds.
#pragma once

#include "grouped_rows.cuh"

namespace fmoe_ext {

constexpr int kGemmThreads = 256;

// tile [kOuter][kStride], k contiguous. The rows of the source run along k, or (kOuterContiguous) along the
// outer dimension of the tile.
template <typename T, int kOuter, int kK, int kStride, bool kOuterContiguous>
__device__ void load_tile(T* tile, const Rows<T>& source, int64_t outer, int64_t k) {
  constexpr int kInner = kOuterContiguous ? kOuter : kK, kVec = kVec16<T>;
  const int64_t first_row = kOuterContiguous ? k : outer, first_column = kOuterContiguous ? outer : k;
  if (source.vectorised) {
    using V = Vec<T, kVec>;
    for (int i = threadIdx.x; i < kOuter * kK / kVec; i += kGemmThreads) {
      const int r = i / (kInner / kVec), c = i % (kInner / kVec) * kVec;
      const T* row = source.row(first_row + r);
      V v{};
      if (row && first_column + c < source.width) v = *reinterpret_cast<const V*>(row + first_column + c);
      if constexpr (kOuterContiguous) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) tile[(c + j) * kStride + r] = v.v[j];
      } else {
        *reinterpret_cast<V*>(tile + r * kStride + c) = v;
      }
    }
  } else {
    for (int i = threadIdx.x; i < kOuter * kK; i += kGemmThreads) {
      const int r = i / kInner, c = i % kInner;
      const T* row = source.row(first_row + r);
      const T v = row && first_column + c < source.width ? row[first_column + c] : T{};
      tile[kOuterContiguous ? c * kStride + r : r * kStride + c] = v;
    }
  }
}

// 16-bit elements: 8 warps as 2 x 4, each a 64 x 32 piece of 4 x 4 mma tiles.
template <typename T>
struct TileGemm {
  static constexpr int kM = 128, kN = 128, kK = 32,
                       kStride = kK + 8;  // the padding spreads a fragment over all banks
  float acc[4][4][4] = {};

  __device__ static int warp_row() { return threadIdx.x / 128 * 64; }
  __device__ static int warp_column() { return threadIdx.x / 32 % 4 * 32; }

  __device__ static uint32_t pair(const T* p) { return *reinterpret_cast<const uint32_t*>(p); }

  __device__ void multiply(const T* a, const T* b) {
    const int group = threadIdx.x % 32 / 4, pos = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < kK; k += 16) {
      uint32_t fa[4][4], fb[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T* p = a + (warp_row() + i * 16 + group) * kStride + k + pos;
        fa[i][0] = pair(p);
        fa[i][1] = pair(p + 8 * kStride);
        fa[i][2] = pair(p + 8);
        fa[i][3] = pair(p + 8 * kStride + 8);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const T* p = b + (warp_column() + j * 8 + group) * kStride + k + pos;
        fb[j][0] = pair(p);
        fb[j][1] = pair(p + 8);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) ptx::mma_m16n8k16(acc[i][j], fa[i], fb[j], T{});
    }
  }

  // Calls fn(row, column, value) for every element this thread holds.
  template <class Fn>
  __device__ void for_each(const Fn& fn) const {
    const int group = threadIdx.x % 32 / 4, pos = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q)
          fn(warp_row() + i * 16 + group + q / 2 * 8, warp_column() + j * 8 + pos + q % 2, acc[i][j][q]);
  }
};

// float32 and float64: 16 x 16 threads, 4 x 4 elements each. The sum of a tile's k is added as one number, so
// that rounding errors grow as in a blocked product.
template <typename T>
struct FmaTileGemm {
  static constexpr int kM = 64, kN = 64, kK = 16, kStride = kK + 16 / sizeof(T);
  T acc[4][4] = {};

  __device__ void multiply(const T* a, const T* b) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    T sum[4][4] = {};
#pragma unroll 4
    for (int k = 0; k < kK; ++k) {
      T x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = a[(row + 16 * i) * kStride + k];
        y[i] = b[(column + 16 * i) * kStride + k];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += x[i] * y[j];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] += sum[i][j];
  }

  template <class Fn>
  __device__ void for_each(const Fn& fn) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) fn(threadIdx.x / 16 + 16 * i, threadIdx.x % 16 + 16 * j, acc[i][j]);
  }
};
template <>
struct TileGemm<float> : FmaTileGemm<float> {};
template <>
struct TileGemm<double> : FmaTileGemm<double> {};

// The whole product over k in [k_begin, k_end); the rows of A and B run along k unless said otherwise.
template <typename T, bool kARowsAlongM, bool kBRowsAlongN>
__device__ void multiply_tiles(TileGemm<T>& gemm, const Rows<T>& a, int64_t m, const Rows<T>& b, int64_t n,
                               int64_t k_begin, int64_t k_end) {
  using G = TileGemm<T>;
  FMOE_SHARED_ARRAY(uint4, a_raw, G::kM * G::kStride * sizeof(T) / 16);
  FMOE_SHARED_ARRAY(uint4, b_raw, G::kN * G::kStride * sizeof(T) / 16);
  T *a_tile = reinterpret_cast<T*>(a_raw), *b_tile = reinterpret_cast<T*>(b_raw);
  for (int64_t k = k_begin; k < k_end; k += G::kK) {
    load_tile<T, G::kM, G::kK, G::kStride, kARowsAlongM>(a_tile, a, m, k);
    load_tile<T, G::kN, G::kK, G::kStride, kBRowsAlongN>(b_tile, b, n, k);
    __syncthreads();
    gemm.multiply(a_tile, b_tile);
    __syncthreads();
  }
}

}  // namespace fmoe_ext
