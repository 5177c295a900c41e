// The activation of the expert MLP between its two products, and its gradient. products.h calls them where
// the product beside them is not computed by a Hopper kernel, which activates in its epilogue; contracts in
// launchers.h. One warp a row, 16 bytes of h, a and their gradients at a time where widths and pointers allow
// it.
#include "activation.cuh"
#include "grouped_rows.cuh"

namespace fmoe_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// a[r, j] = act(h[r, j]), times factor_of(h[r, H + j]) when gated; padding rows are zero.
template <typename T, CurveKind kActivation, int kVec>
__global__ void __launch_bounds__(kThreads, 4)
    activation_kernel(const T* __restrict__ h, const int* __restrict__ offs, int num_experts,
                      int64_t num_rows, int64_t H, bool gated, T* __restrict__ a) {
  using V = Vec<T, kVec>;
  const int64_t used = rows_of(offs, num_experts, num_rows, num_experts).begin;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; r < num_rows;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    const T* row = h + r * (gated ? 2 * H : H);
    for (int64_t j = threadIdx.x % 32 * kVec; j < H; j += 32 * kVec) {
      V gate{}, up{}, out{};
      if (r < used) gate = *reinterpret_cast<const V*>(row + j);
      if (r < used && gated) up = *reinterpret_cast<const V*>(row + H + j);
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        out.v[i] = round_to<T>(activate<kActivation>(to_acc(gate.v[i])).value *
                               (gated ? factor_of<kActivation>(to_acc(up.v[i])).value : acc_t<T>(1)));
      *reinterpret_cast<V*>(a + r * H + j) = r < used ? out : V{};
    }
  }
}

// From grad [R, H], the gradient of the unscaled result a: dh = scale grad da/dh, scaled_a = scale a, and,
// unless dscale is null, dscale[choice of the row] = <grad, a> + <dy, b2>. scale is the weight of the row's
// choice.
template <typename T, CurveKind kActivation, int kVec>
__global__ void __launch_bounds__(kThreads, 2)
    activation_backward_kernel(const T* __restrict__ grad, ActivationRows rows, const T* __restrict__ dy,
                               const T* __restrict__ b2, int64_t H, int64_t D, bool gated, T* __restrict__ dh,
                               T* __restrict__ scaled_a, acc_t<T>* __restrict__ dscale) {
  using A = acc_t<T>;
  using V = Vec<T, kVec>;
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
    for (int64_t j = lane * kVec; j < H; j += 32 * kVec) {
      V gates{}, ups{}, grads{}, d_gate{}, d_up{}, a{};
      if (kept) {
        gates = *reinterpret_cast<const V*>(row + j);
        if (gated) ups = *reinterpret_cast<const V*>(row + H + j);
        grads = *reinterpret_cast<const V*>(grad + r * H + j);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const ValueAndSlope<A> act = activate<kActivation>(to_acc(gates.v[i]));
          const ValueAndSlope<A> up =
              gated ? factor_of<kActivation>(to_acc(ups.v[i])) : ValueAndSlope<A>{1, 1};
          const A g = to_acc(grads.v[i]);
          dot += g * act.value * up.value;
          d_gate.v[i] = round_to<T>(scale * g * act.slope * up.value);
          d_up.v[i] = round_to<T>(scale * g * act.value * up.slope);
          a.v[i] = round_to<T>(scale * act.value * up.value);
        }
      }
      *reinterpret_cast<V*>(out + j) = d_gate;
      if (gated) *reinterpret_cast<V*>(out + H + j) = d_up;
      *reinterpret_cast<V*>(scaled_a + r * H + j) = a;
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
      const auto kernel = is_wide<T>(H, {h, a}) ? activation_kernel<T, kind.value, kVec16<T>>
                                                : activation_kernel<T, kind.value, 1>;
      launch(kernel, grid_for(ceil_div(num_rows, kWarps)), kThreads, 0, stream, static_cast<const T*>(h),
             offs, num_experts, num_rows, H, gated, static_cast<T*>(a));
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
      const bool wide = is_wide<T>(H, {grad, rows.h, dh, scaled_a});
      const auto kernel = wide ? activation_backward_kernel<T, kind.value, kVec16<T>>
                               : activation_backward_kernel<T, kind.value, 1>;
      launch(kernel, grid_for(ceil_div(rows.num_rows, kWarps)), kThreads, 0, stream,
             static_cast<const T*>(grad), rows, static_cast<const T*>(dy), static_cast<const T*>(b2), H, D,
             gated, static_cast<T*>(dh), static_cast<T*>(scaled_a), static_cast<acc_t<T>*>(dscale));
    });
  });
}

}  // namespace fmoe_ext
