// rows = (rows + bias) * scale in place, after a product whose kernel has neither; one warp a row.
#include "grouped_rows.cuh"

namespace fmoe_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    bias_scale_kernel(T* __restrict__ rows, const int* __restrict__ offs, int num_experts, int64_t num_rows,
                      int64_t width, const T* __restrict__ bias, RowScale scale) {
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < num_rows;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int expert = expert_of_row(offs, num_experts, r);
    if (expert == num_experts) continue;  // padding stays zero
    const acc_t<T> factor = factor_of<acc_t<T>>(scale, r);
    T* row = rows + r * width;
    for (int64_t j = threadIdx.x % 32; j < width; j += 32) {
      const acc_t<T> shift = bias ? to_acc(bias[expert * width + j]) : acc_t<T>(0);
      row[j] = round_to<T>((to_acc(row[j]) + shift) * factor);
    }
  }
}

}  // namespace

void launch_bias_scale(Dtype dtype, void* rows, const int* offs, int num_experts, int64_t num_rows,
                       int64_t width, const void* bias, const RowScale& scale, LaunchStream stream) {
  if (num_rows == 0 || width == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    launch(bias_scale_kernel<T>, grid_for(ceil_div(num_rows, kWarps)), kThreads, 0, stream,
           static_cast<T*>(rows), offs, num_experts, num_rows, width, static_cast<const T*>(bias), scale);
  });
}

}  // namespace fmoe_ext
