// The portable matrix product of one thread block, acc [kM, kN] += A [kM, k] B [kN, k]^T: mma_tile.cuh for
// 16-bit types, fma_tile.cuh for float32, and here plain fused multiply-adds for float64.
#pragma once

#include "fma_tile.cuh"
#include "mma_tile.cuh"

namespace fmoe_ext {

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

// 16 x 16 threads, 4 x 4 elements each. The sum of a tile's k is added as one number, so that rounding errors
// grow as in a blocked product.
template <typename T>
struct SmallTileGemm {
  using Element = T;
  static constexpr int kBlocks = 1, kM = 64, kN = 64, kK = 16, kStride = kK + 16 / sizeof(T);
  T acc[4][4] = {};

  // The product over k in [k_begin, k_end); the rows of A and B run along k, or along m and n.
  template <bool kAlongM, bool kAlongN>
  __device__ void multiply(const Rows<T>& a, int64_t m, const Rows<T>& b, int64_t n, int64_t k_begin,
                           int64_t k_end) {
    FMOE_SHARED_ARRAY(uint4, a_raw, kM * kStride * sizeof(T) / 16);
    FMOE_SHARED_ARRAY(uint4, b_raw, kN * kStride * sizeof(T) / 16);
    T *a_tile = reinterpret_cast<T*>(a_raw), *b_tile = reinterpret_cast<T*>(b_raw);
    for (int64_t k = k_begin; k < k_end; k += kK) {
      load_tile<T, kM, kK, kStride, kAlongM>(a_tile, a, m, k);
      load_tile<T, kN, kK, kStride, kAlongN>(b_tile, b, n, k);
      __syncthreads();
      multiply_tile(a_tile, b_tile);
      __syncthreads();
    }
  }

  __device__ void multiply_tile(const T* a, const T* b) {
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

  // out[i, j] = finish(i)(j, value) for i < rows and j < columns.
  template <class Finish>
  __device__ void store(T* out, int64_t stride, int64_t rows, int64_t columns, const Finish& finish) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = threadIdx.x / 16 + 16 * i;
      const auto value = finish(row);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = threadIdx.x % 16 + 16 * j;
        if (row < rows && column < columns) out[row * stride + column] = value(column, acc[i][j]);
      }
    }
  }
  // out[i, j] += value
  __device__ void accumulate(T* out, int64_t stride, int64_t rows, int64_t columns) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = threadIdx.x / 16 + 16 * i, column = threadIdx.x % 16 + 16 * j;
        if (row < rows && column < columns) out[row * stride + column] += acc[i][j];
      }
  }
};

template <typename T>
using TileGemm =
    std::conditional_t<sizeof(T) == 2, MmaTileGemm<T>,
                       std::conditional_t<std::is_same_v<T, float>, FmaTileGemm, SmallTileGemm<T>>>;

// Calls body with a std::type_identity of the product for a dtype.
template <class Body>
void dispatch_tile_gemm(Dtype dtype, const Body& body) {
  dispatch_dtype(dtype, [&](auto tag) { body(std::type_identity<TileGemm<decltype(tag)>>{}); });
}

}  // namespace fmoe_ext
