// The portable matrix products over the rows of each expert, for every dtype, on any device from sm_80:
// products.h calls them where select.h names no Hopper kernel and torch's product is not taken; contracts in
// launchers.h. Deterministic: each element of a result is summed in one fixed order, without atomics.
#include "tile_gemm.cuh"

namespace fmoe_ext {
namespace {

struct Groups {
  const int* offs;
  int num_experts;
  int64_t num_rows;
};

// [num_experts, rows, columns] of T.
template <typename T>
struct Weight {
  Rows<T> first;
  int64_t size;  // of an expert

  __device__ __forceinline__ Rows<T> of(int expert) const {
    Rows<T> rows = first;
    rows.base += expert * size;
    return rows;
  }
};

// out[r, n] = scale[r] * (sum_k x[r, k] w[e][n, k] + bias[e, n]), or w[e][k, n] when kAlongN. Padding rows
// are zero.
template <class G, bool kAlongN, typename T = typename G::Element>
__global__ void __launch_bounds__(kGemmThreads, G::kBlocks)
    rows_by_weight_kernel(Rows<T> x, Weight<T> weight, Groups groups, int64_t N, int64_t K,
                          const T* __restrict__ bias, RowScale scale, int64_t num_tiles,
                          T* __restrict__ out) {
  const int64_t tiles_n = ceil_div(N, G::kN);
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const auto rows =
        find_tile_owner(groups.offs, groups.num_experts, groups.num_rows, tile / tiles_n, G::kM);
    if (rows.expert < 0) return;
    const auto place =
        tile_place<int64_t>(tile - rows.first_tile * tiles_n, ceil_div(rows.end - rows.begin, G::kM), tiles_n,
                            kGroupRows / G::kM);
    const int64_t m0 = rows.begin + place.row * G::kM, n0 = place.column * G::kN;
    const bool padding = rows.expert == groups.num_experts;
    G gemm;
    if (!padding) {
      Rows<T> a = x;
      a.end = rows.end;
      const auto b = weight.of(rows.expert);
      gemm.template multiply<false, kAlongN>(a, m0, b, n0, 0, K);
    }
    const T* shift = bias && !padding ? bias + rows.expert * N + n0 : nullptr;
    const int64_t num_rows = rows.end - m0, num_columns = N - n0;
    gemm.store(out + m0 * N + n0, N, num_rows, num_columns, [&](int i) {
      const acc_t<T> factor = padding || i >= num_rows ? 0 : factor_of<acc_t<T>>(scale, m0 + i);
      return [=](int j, acc_t<T> value) {
        return (value + (shift && j < num_columns ? to_acc(shift[j]) : 0)) * factor;
      };
    });
  }
}

// out[e][m, n] = sum over the rows r of expert e of a[r, m] b[r, n], zero for an expert without rows; or,
// when kAccumulate, is increased by it.
template <class G, bool kAccumulate, typename T = typename G::Element>
__global__ void __launch_bounds__(kGemmThreads, G::kBlocks)
    rows_by_rows_kernel(Rows<T> a, Rows<T> b, Groups groups, int64_t M, int64_t N, int64_t num_tiles,
                        std::conditional_t<kAccumulate, acc_t<T>, T>* __restrict__ out) {
  const int64_t tiles_n = ceil_div(N, G::kN), tiles_m = ceil_div(M, G::kM);
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int e = static_cast<int>(tile / tiles_n / tiles_m);
    const auto place = tile_place<int64_t>(tile % (tiles_n * tiles_m), tiles_m, tiles_n, kGroupRows / G::kM);
    const int64_t m0 = place.row * G::kM, n0 = place.column * G::kN;
    const RowRange rows = rows_of(groups.offs, groups.num_experts, groups.num_rows, e);
    if (kAccumulate && rows.begin == rows.end) continue;
    G gemm;
    a.end = b.end = rows.end;
    gemm.template multiply<true, true>(a, m0, b, n0, rows.begin, rows.end);
    auto* const corner = out + (e * M + m0) * N + n0;
    if constexpr (kAccumulate)
      gemm.accumulate(corner, N, M - m0, N - n0);
    else
      gemm.store(corner, N, M - m0, N - n0, [](int) { return [](int, acc_t<T> value) { return value; }; });
  }
}

// out[e][n] = sum over the rows r of expert e of scale[r] a[r, n]: 32 columns a block, 8 threads a column.
constexpr int kSumLanes = kGemmThreads / 32;
template <typename T>
__global__ void __launch_bounds__(kGemmThreads)
    sum_rows_kernel(Rows<T> a, Groups groups, RowScale scale, int64_t num_tiles, T* __restrict__ out) {
  FMOE_SHARED_ARRAY(acc_t<T>, partial, kGemmThreads);
  const int column = threadIdx.x % 32, lane = threadIdx.x / 32;
  const int64_t tiles_n = ceil_div(a.width, 32);
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int e = static_cast<int>(tile / tiles_n);
    const int64_t n = tile % tiles_n * 32 + column;
    const RowRange rows = rows_of(groups.offs, groups.num_experts, groups.num_rows, e);
    // Rows are summed in blocks and blocks in groups: less rounding, and an infinity stays one, unlike in
    // Kahan's.
    constexpr int kBlock = 16, kGroup = 64;
    acc_t<T> sum = 0, group = 0;
    int blocks = 0;
    for (int64_t first = rows.begin + lane; first < rows.end && n < a.width; first += kSumLanes * kBlock) {
      acc_t<T> block = 0;
      for (int64_t r = first; r < rows.end && r < first + kSumLanes * kBlock; r += kSumLanes) {
        const T* row = a.row(r);
        if (row) block += factor_of<acc_t<T>>(scale, r) * to_acc(row[n]);
      }
      group += block;
      if (++blocks % kGroup) continue;
      sum += group;
      group = 0;
    }
    sum += group;
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && n < a.width) {
      for (int i = 1; i < kSumLanes; ++i) sum += partial[i * 32 + column];
      out[e * a.width + n] = round_to<T>(sum);
    }
    __syncthreads();
  }
}

}  // namespace

void launch_rows_by_weight(Dtype dtype, const GroupedRows& x, const GroupedWeight& weight, const int* offs,
                           int64_t num_rows, const void* bias, const RowScale& scale, void* out,
                           LaunchStream stream) {
  const int64_t N = weight.along_n ? weight.columns : weight.rows,
                K = weight.along_n ? weight.rows : weight.columns;
  if (num_rows == 0 || N == 0) return;
  dispatch_tile_gemm(dtype, [&](auto tag) {
    using G = typename decltype(tag)::type;
    using T = typename G::Element;
    const int64_t tiles = max_row_tiles(num_rows, weight.num_experts, G::kM) * ceil_div(N, G::kN);
    const GroupedRows plain{weight.data, weight.columns, nullptr, 1, 0};
    launch(weight.along_n ? rows_by_weight_kernel<G, true> : rows_by_weight_kernel<G, false>, grid_for(tiles),
           kGemmThreads, 0, stream, rows_from<T>(x, num_rows),
           Weight<T>{rows_from<T>(plain, weight.rows), weight.rows * weight.columns},
           Groups{offs, weight.num_experts, num_rows}, N, K, static_cast<const T*>(bias), scale, tiles,
           static_cast<T*>(out));
  });
}

void launch_rows_by_rows(Dtype dtype, const GroupedRows& a, const GroupedRows& b, const int* offs,
                         int num_experts, int64_t num_rows, const WeightGrad& out, LaunchStream stream) {
  if (num_experts == 0 || a.width == 0 || b.width == 0) return;
  dispatch_tile_gemm(dtype, [&](auto tag) {
    using G = typename decltype(tag)::type;
    using T = typename G::Element;
    const int64_t tiles = num_experts * ceil_div(a.width, G::kM) * ceil_div(b.width, G::kN);
    const auto start = [&](auto kernel, auto* data) {
      launch(kernel, grid_for(tiles), kGemmThreads, 0, stream, rows_from<T>(a, num_rows),
             rows_from<T>(b, num_rows), Groups{offs, num_experts, num_rows}, a.width, b.width, tiles, data);
    };
    if (out.accumulate)
      start(rows_by_rows_kernel<G, true>, static_cast<acc_t<T>*>(out.data));
    else
      start(rows_by_rows_kernel<G, false>, static_cast<T*>(out.data));
  });
}

void launch_sum_rows(Dtype dtype, const GroupedRows& a, const int* offs, int num_experts, int64_t num_rows,
                     const RowScale& scale, void* out, LaunchStream stream) {
  if (num_experts == 0 || a.width == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const int64_t tiles = num_experts * ceil_div(a.width, 32);
    launch(sum_rows_kernel<T>, grid_for(tiles), kGemmThreads, 0, stream, rows_from<T>(a, num_rows),
           Groups{offs, num_experts, num_rows}, scale, tiles, static_cast<T*>(out));
  });
}

}  // namespace fmoe_ext
