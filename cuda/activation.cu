// The activation of the expert MLP between its two products, and its gradient; one warp a row.
#include "activation.cuh"
#include "grouped_rows.cuh"

namespace fmoe_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// a[r, j] = act(h[r, j]), times h[r, H + j] when gated; padding rows are zero.
template <typename T, CurveKind kActivation>
__global__ void __launch_bounds__(kThreads, 4)
    activation_kernel(const T* __restrict__ h, const int* __restrict__ offs, int num_experts,
                      int64_t num_rows, int64_t H, bool gated, T* __restrict__ a) {
  const int64_t used = rows_of(offs, num_experts, num_rows, num_experts).begin;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < num_rows;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    const T* row = h + r * (gated ? 2 * H : H);
    for (int64_t j = threadIdx.x % 32; j < H; j += 32) {
      acc_t<T> value = 0;
      if (r < used)
        value = activate<kActivation>(to_acc(row[j])).value *
                (gated ? factor_of<kActivation>(to_acc(row[H + j])).value : acc_t<T>(1));
      a[r * H + j] = round_to<T>(value);
    }
  }
}

// From grad [R, H], the gradient of the unscaled result: dh = scale act'(h) grad, scaled_a = scale act(h),
// and dscale = <grad, act(h)> + <dy, b2>, by choice.
template <typename T, CurveKind kActivation>
__global__ void __launch_bounds__(kThreads, 4)
    activation_backward_kernel(const T* __restrict__ grad, ActivationRows rows, const T* __restrict__ dy,
                               const T* __restrict__ b2, int64_t H, int64_t D, bool gated, T* __restrict__ dh,
                               T* __restrict__ scaled_a, acc_t<T>* __restrict__ dscale) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % 32;
  const T* h = static_cast<const T*>(rows.h);
  const A* scales = static_cast<const A*>(rows.weights);
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < rows.num_rows;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t choice = rows.row_idx[r];
    const int expert = expert_of_row(rows.offs, rows.num_experts, r);
    const bool kept = choice >= 0 && choice < rows.num_choices && expert < rows.num_experts;
    const A scale = kept && scales ? scales[choice] : A(kept);
    const T* row = h + r * (gated ? 2 * H : H);
    T* out = dh + r * (gated ? 2 * H : H);
    A dot = 0;
    for (int64_t j = lane; j < H; j += 32) {
      ValueAndSlope<A> act{0, 0}, up{1, 1};
      A g = 0;
      if (kept) {
        act = activate<kActivation>(to_acc(row[j]));
        if (gated) up = factor_of<kActivation>(to_acc(row[H + j]));
        g = to_acc(grad[r * H + j]);
      }
      dot += g * act.value * up.value;
      out[j] = round_to<T>(scale * g * act.slope * up.value);
      if (gated) out[H + j] = round_to<T>(scale * g * act.value * up.slope);
      scaled_a[r * H + j] = round_to<T>(scale * act.value * up.value);
    }
    if (!dscale) continue;
    const int64_t dy_row = rows.dy_by_token ? choice / rows.top_k : r;
    for (int64_t d = lane; kept && b2 && d < D; d += 32)
      dot += to_acc(dy[dy_row * D + d]) * to_acc(b2[expert * D + d]);
    dot = warp_sum(dot);
    if (lane == 0 && kept) dscale[choice] = dot;
  }
}

}  // namespace

void launch_activation(Dtype dtype, CurveKind activation, bool gated, const void* h, const int* offs,
                       int num_experts, int64_t num_rows, int64_t H, void* a, LaunchStream stream) {
  if (num_rows == 0 || H == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    dispatch_activation(activation, [&](auto kind) {
      launch(activation_kernel<T, kind.value>, grid_for(ceil_div(num_rows, kWarps)), kThreads, 0, stream,
             static_cast<const T*>(h), offs, num_experts, num_rows, H, gated, static_cast<T*>(a));
    });
  });
}

void launch_activation_backward(Dtype dtype, CurveKind activation, bool gated, const void* grad,
                                const ActivationRows& rows, const void* dy, const void* b2, int64_t H,
                                int64_t D, void* dh, void* scaled_a, void* dscale, LaunchStream stream) {
  if (rows.num_rows == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    dispatch_activation(activation, [&](auto kind) {
      launch(activation_backward_kernel<T, kind.value>, grid_for(ceil_div(rows.num_rows, kWarps)), kThreads,
             0, stream, static_cast<const T*>(grad), rows, static_cast<const T*>(dy),
             static_cast<const T*>(b2), H, D, gated, static_cast<T*>(dh), static_cast<T*>(scaled_a),
             static_cast<acc_t<T>*>(dscale));
    });
  });
}

}  // namespace fmoe_ext
