// What torch's grouped_mm leaves to do where products.h takes its product: offs that it may trust, biases,
// factors, padding, experts without rows, and main gradients; contracts in launchers.h.
#include "grouped_rows.cuh"

namespace fmoe_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// One warp, 32 experts at a time: an end is the largest of the ends up to its own, inside the rows.
__global__ void clamp_offs_kernel(const int* __restrict__ offs, int num_experts, int64_t num_rows,
                                  int* __restrict__ clamped) {
  const int lane = threadIdx.x, most = static_cast<int>(num_rows);
  int before = 0;
  for (int first = 0; first < num_experts; first += 32) {
    int end = first + lane < num_experts ? min(max(offs[first + lane], 0), most) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, step);
      if (lane >= step) end = max(end, other);
    }
    end = max(end, before);
    before = __shfl_sync(kFullMask, end, 31);
    if (first + lane < num_experts) clamped[first + lane] = end;
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    finish_rows_kernel(T* __restrict__ y, const int* __restrict__ offs, int num_experts, int64_t num_rows,
                       int64_t N, const T* __restrict__ bias, RowScale scale) {
  using V = Vec<T, kVec>;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < num_rows;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int expert = expert_of_row(offs, num_experts, r);
    const bool used = expert < num_experts;
    if (used && !bias && !scale.weights) continue;
    const acc_t<T> factor = factor_of<acc_t<T>>(scale, r);
    for (int64_t column = threadIdx.x % 32 * kVec; column < N; column += 32 * kVec) {
      V* const place = reinterpret_cast<V*>(y + r * N + column);
      V v{}, shift{};
      if (used) v = *place;
      if (used && bias) shift = *reinterpret_cast<const V*>(bias + expert * N + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) v.v[i] = round_to<T>(factor * (to_acc(v.v[i]) + to_acc(shift.v[i])));
      *place = used ? v : V{};
    }
  }
}

// blockIdx.y is an expert.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    finish_weight_grad_kernel(T* __restrict__ product, const int* __restrict__ offs, int num_experts,
                              int64_t num_rows, int64_t size, float* __restrict__ main_grad) {
  using V = Vec<T, kVec>;
  using Sums = Vec<float, kVec>;
  const RowRange rows = rows_of(offs, num_experts, num_rows, blockIdx.y);
  const bool has_rows = rows.end > rows.begin;
  if (has_rows == !main_grad) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * size;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec; i < size;
       i += static_cast<int64_t>(gridDim.x) * kThreads * kVec) {
    V* const source = reinterpret_cast<V*>(product + first + i);
    if (!main_grad) {
      *source = V{};
      continue;
    }
    Sums* const sums = reinterpret_cast<Sums*>(main_grad + first + i);
    Sums sum = *sums;
    const V added = *source;
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum.v[j] += static_cast<float>(to_acc(added.v[j]));
    *sums = sum;
  }
}

}  // namespace

void launch_clamp_offs(const int* offs, int num_experts, int64_t num_rows, int* clamped,
                       LaunchStream stream) {
  if (num_experts) launch(clamp_offs_kernel, 1, 32, 0, stream, offs, num_experts, num_rows, clamped);
}

void launch_finish_rows(Dtype dtype, void* y, const int* offs, int num_experts, int64_t num_rows, int64_t N,
                        const void* bias, const RowScale& scale, LaunchStream stream) {
  if (num_rows == 0 || N == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    launch(is_wide<T>(N, {y, bias}) ? finish_rows_kernel<T, kVec16<T>> : finish_rows_kernel<T, 1>,
           grid_for(ceil_div(num_rows, kWarps)), kThreads, 0, stream, static_cast<T*>(y), offs, num_experts,
           num_rows, N, static_cast<const T*>(bias), scale);
  });
}

void launch_finish_weight_grad(Dtype dtype, void* product, const int* offs, int num_experts, int64_t num_rows,
                               int64_t size, float* main_grad, LaunchStream stream) {
  if (num_experts == 0 || size == 0) return;
  constexpr int kVec = 4;  // 16 bytes of a main gradient
  const bool wide = size % kVec == 0 && reinterpret_cast<uintptr_t>(main_grad) % 16 == 0;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(grid_for(ceil_div(size, kThreads * kVec)), 128)),
                  static_cast<unsigned>(num_experts));
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    launch(wide ? finish_weight_grad_kernel<T, kVec> : finish_weight_grad_kernel<T, 1>, grid, kThreads, 0,
           stream, static_cast<T*>(product), offs, num_experts, num_rows, size, main_grad);
  });
}

}  // namespace fmoe_ext
