// The operators permute, unpermute and unpermute_backward, for ops_cuda.cpp and the products of expert_mlp:
// row gather, weighted gather-and-sum and the gradient of the latter; contracts in launchers.h. Memory-bound:
// 16-byte accesses wherever the row length and the pointers allow them.
#include "common.cuh"

namespace fmoe_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// ---- permute: out[r] = x[row_idx[r] / top_k], one warp a row
template <typename V>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const V* __restrict__ x, const int* __restrict__ row_idx, int64_t num_rows,
                   int64_t num_choices, int top_k, int64_t width, V* __restrict__ out) {
  const int lane = threadIdx.x % 32;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < num_rows;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t choice = row_idx[r];
    const bool kept = choice >= 0 && choice < num_choices;
    const V* source = x + (kept ? choice / top_k : 0) * width;
    for (int64_t i = lane; i < width; i += 32) out[r * width + i] = kept ? source[i] : V{};
  }
}

// ---- unpermute: out[t] = sum over k of weights[t, k] y[inverse[t, k]], one thread for kVec columns of a
// token
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    unpermute_kernel(const T* __restrict__ y, const int* __restrict__ inverse,
                     const acc_t<T>* __restrict__ weights, int64_t num_tokens, int top_k, int64_t num_rows,
                     int64_t width, T* __restrict__ out) {
  using V = Vec<T, kVec>;
  const int64_t vecs = width / kVec, num_items = num_tokens * vecs;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < num_items;
       item += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t t = item / vecs, column = item % vecs * kVec;
    acc_t<T> sum[kVec] = {};
    for (int k = 0; k < top_k; ++k) {
      const int64_t row = inverse[t * top_k + k];
      if (row < 0 || row >= num_rows) continue;
      const acc_t<T> w = weights ? weights[t * top_k + k] : acc_t<T>(1);
      const V v = *reinterpret_cast<const V*>(y + row * width + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += w * to_acc(v.v[i]);
    }
    V result;
#pragma unroll
    for (int i = 0; i < kVec; ++i) result.v[i] = round_to<T>(sum[i]);
    *reinterpret_cast<V*>(out + t * width + column) = result;
  }
}

// ---- unpermute_backward: of choice c = row_idx[r], grad_y[r] = weights[c] grad_out[c / top_k] and
// grad_weights[c] = <grad_out[c / top_k], y[r]>, one warp a row; y null when the gradient of the weights is
// not needed
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, 4)
    unpermute_backward_kernel(const T* __restrict__ grad_out, const T* __restrict__ y,
                              const int* __restrict__ row_idx, const acc_t<T>* __restrict__ weights,
                              int64_t num_rows, int64_t num_choices, int top_k, int64_t width,
                              T* __restrict__ grad_y, acc_t<T>* __restrict__ grad_weights) {
  using V = Vec<T, kVec>;
  const int lane = threadIdx.x % 32;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < num_rows;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t choice = row_idx[r];
    const bool kept = choice >= 0 && choice < num_choices;
    const T* source = grad_out + (kept ? choice / top_k : 0) * width;
    const acc_t<T> w = !kept ? acc_t<T>(0) : weights ? weights[choice] : acc_t<T>(1);
    acc_t<T> dot = 0;
    for (int64_t column = lane * kVec; column < width; column += 32 * kVec) {
      V scaled;
      V g{}, row{};
      if (kept) g = *reinterpret_cast<const V*>(source + column);
      if (kept && y) row = *reinterpret_cast<const V*>(y + r * width + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        scaled.v[i] = round_to<T>(w * to_acc(g.v[i]));
        dot += to_acc(g.v[i]) * to_acc(row.v[i]);
      }
      if (!kept) scaled = V{};
      *reinterpret_cast<V*>(grad_y + r * width + column) = scaled;
    }
    dot = warp_sum(dot);
    if (lane == 0 && kept && y) grad_weights[choice] = dot;
  }
}

}  // namespace

void launch_permute(const void* x, const int* row_idx, int64_t num_rows, int64_t num_choices, int top_k,
                    int64_t row_bytes, void* out, LaunchStream stream) {
  if (num_rows == 0 || row_bytes == 0) return;
  const uintptr_t places = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out);
  const auto try_as = [&](auto tag) {  // the widest access that rows and pointers allow
    using V = decltype(tag);
    if ((row_bytes | static_cast<int64_t>(places)) % static_cast<int64_t>(sizeof(V))) return false;
    launch(permute_kernel<V>, grid_for(ceil_div(num_rows, kWarps)), kThreads, 0, stream,
           static_cast<const V*>(x), row_idx, num_rows, num_choices, top_k,
           row_bytes / static_cast<int64_t>(sizeof(V)), static_cast<V*>(out));
    return true;
  };
  try_as(uint4{}) || try_as(uint2{}) || try_as(uint32_t{}) || try_as(uint16_t{}) || try_as(uint8_t{});
}

void launch_unpermute(Dtype dtype, const void* y, const int* inverse, const void* weights, int64_t num_tokens,
                      int top_k, int64_t num_rows, int64_t width, void* out, LaunchStream stream) {
  if (num_tokens == 0 || width == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool wide = is_wide<T>(width, {y, out});
    launch(wide ? unpermute_kernel<T, kVec16<T>> : unpermute_kernel<T, 1>,
           grid_for(ceil_div(num_tokens * width / (wide ? kVec16<T> : 1), kThreads)), kThreads, 0, stream,
           static_cast<const T*>(y), inverse, static_cast<const acc_t<T>*>(weights), num_tokens, top_k,
           num_rows, width, static_cast<T*>(out));
  });
}

void launch_unpermute_backward(Dtype dtype, const void* grad_out, const void* y, const int* row_idx,
                               const void* weights, int64_t num_rows, int64_t num_choices, int top_k,
                               int64_t width, void* grad_y, void* grad_weights, LaunchStream stream) {
  if (num_rows == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    launch(is_wide<T>(width, {grad_out, y, grad_y}) ? unpermute_backward_kernel<T, kVec16<T>>
                                                    : unpermute_backward_kernel<T, 1>,
           grid_for(ceil_div(num_rows, kWarps)), kThreads, 0, stream, static_cast<const T*>(grad_out),
           static_cast<const T*>(y), row_idx, static_cast<const acc_t<T>*>(weights), num_rows, num_choices,
           top_k, width, static_cast<T*>(grad_y), static_cast<acc_t<T>*>(grad_weights));
  });
}

}  // namespace fmoe_ext
