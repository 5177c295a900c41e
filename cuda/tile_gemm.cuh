// The portable matrix product of one thread block of grouped_gemm.cu, acc [kM, kN] += A [kM, k] B [kN, k]^T:
// mma_tile.cuh for 16-bit types, fma_tile.cuh for float32, and here plain fused multiply-adds for float64.
// Each has blocks of kGemmThreads threads (kBlocks of them on an SM), tiles of kM x kN, and the same calls:
// multiply() adds a product to acc, store() or accumulate() writes acc.
#pragma once

#include "fma_tile.cuh"
#include "mma_tile.cuh"

namespace fmoe_ext {

// float64, which is for tests of gradients: 16 x 16 threads, 4 x 4 elements each, which load one element at a
// time into shared memory. The sum of a tile's k is added as one number, so that rounding errors grow as in a
// blocked product.
struct DoubleTileGemm {
  using Element = double;
  static constexpr int kBlocks = 1, kM = 64, kN = 64, kK = 16, kStride = kK + 2;
  double acc[4][4] = {};

  __device__ static int row(int i) { return threadIdx.x / 16 + 16 * i; }
  __device__ static int column(int j) { return threadIdx.x % 16 + 16 * j; }

  // tile [64][kStride], k contiguous; the rows of the source run along k, or along the outer dimension.
  template <bool kAlongOuter>
  __device__ static void load(double* tile, const Rows<double>& source, int64_t outer, int64_t k) {
    constexpr int kInner = kAlongOuter ? kM : kK;
    for (int i = threadIdx.x; i < kM * kK; i += kGemmThreads) {
      const int r = i / kInner, c = i % kInner;
      const int64_t at = (kAlongOuter ? outer : k) + c;
      const double* from = source.row((kAlongOuter ? k : outer) + r);
      tile[kAlongOuter ? c * kStride + r : r * kStride + c] = from && at < source.width ? from[at] : 0;
    }
  }

  // The product over k from k_begin on; the rows of A and B run along k, or along m and n. k_end must be
  // where the operands end along k (Rows::end or Rows::width): the last step may read past it, where they
  // give zeros.
  template <bool kAlongM, bool kAlongN>
  __device__ void multiply(const Rows<double>& a, int64_t m, const Rows<double>& b, int64_t n,
                           int64_t k_begin, int64_t k_end) {
    FMOE_SHARED_ARRAY(double, a_tile, kM* kStride);
    FMOE_SHARED_ARRAY(double, b_tile, kN* kStride);
    for (int64_t k = k_begin; k < k_end; k += kK) {
      load<kAlongM>(a_tile, a, m, k);
      load<kAlongN>(b_tile, b, n, k);
      __syncthreads();
      double sum[4][4] = {};
#pragma unroll 4
      for (int q = 0; q < kK; ++q)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[i][j] += a_tile[row(i) * kStride + q] * b_tile[column(j) * kStride + q];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] += sum[i][j];
      __syncthreads();
    }
  }

  // out[i, j] = finish(i)(j, value) for i < rows and j < columns. finish is also called for i outside, up to
  // the tile's end, and must not read there.
  template <class Finish>
  __device__ void store(double* out, int64_t stride, int64_t rows, int64_t columns, const Finish& finish) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto value = finish(row(i));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (row(i) < rows && column(j) < columns)
          out[row(i) * stride + column(j)] = value(column(j), acc[i][j]);
    }
  }
  // out[i, j] += acc
  __device__ void accumulate(double* out, int64_t stride, int64_t rows, int64_t columns) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (row(i) < rows && column(j) < columns) out[row(i) * stride + column(j)] += acc[i][j];
  }
};

template <typename T>
using TileGemm =
    std::conditional_t<sizeof(T) == 2, MmaTileGemm<T>,
                       std::conditional_t<std::is_same_v<T, float>, FmaTileGemm, DoubleTileGemm>>;

// Calls body with a std::type_identity of the product for a dtype.
template <class Body>
void dispatch_tile_gemm(Dtype dtype, const Body& body) {
  dispatch_dtype(dtype, [&](auto tag) { body(std::type_identity<TileGemm<decltype(tag)>>{}); });
}

}  // namespace fmoe_ext
