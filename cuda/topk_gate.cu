// The operator topk_gate and its gradient, for ops_cuda.cpp; contracts in launchers.h. From logits [T, E] the
// K chosen experts of each token (lower index first among equals) and their weights: scores, group-limited
// selection, weights. One warp a token; the values that order the experts lie in shared memory.
//
// Without a bias the experts are ordered by logit: both scores grow with it, and no two logits merge by
// rounding.
#include <cmath>

#include "common.cuh"

namespace fmoe_ext {
namespace {

constexpr int kMaxWarps = 4;
// Below this every sigmoid is all but exp, and the ratios of sigmoids are those of a softmax, which does not
// underflow.
constexpr int kSigmoidIsExp = -40;

template <typename A>
struct KeyOf {
  using type = int32_t;
};
template <>
struct KeyOf<double> {
  using type = long long;
};
template <typename A>
using key_t_of = typename KeyOf<A>::type;

// Integers in the order of the numbers, NaN above everything, -0 equal to +0.
template <typename A>
__device__ __forceinline__ key_t_of<A> order_key(A x) {
  using Key = key_t_of<A>;
  const A positive_zero = x + A(0);
  Key bits;
  memcpy(&bits, &positive_zero, sizeof bits);
  constexpr Key kMax = static_cast<Key>(~(1ull << (8 * sizeof(Key) - 1)));
  return x == x ? bits ^ ((bits >> (8 * sizeof(Key) - 1)) & kMax) : kMax;
}

template <typename A>
__device__ __forceinline__ A sigmoid(A x) {
  const A small = std::exp(x < 0 ? x : -x);
  return (x < 0 ? small : A(1)) / (1 + small);
}

template <typename A>
__device__ __forceinline__ A warp_max(A v) {  // NaN never wins
  for (int step = 16; step > 0; step /= 2) {
    const A other = __shfl_xor_sync(kFullMask, v, step);
    v = other > v ? other : v;
  }
  return v;
}

template <typename A>
__device__ __forceinline__ A minus_infinity() {
  return -static_cast<A>(INFINITY);
}

// What a softmax needs of all logits: softmax(logits)[e] = std::exp(logits[e] - largest) / sum.
template <typename A>
struct SoftmaxTotals {
  A largest, sum;
};
template <typename A, class Get>
__device__ SoftmaxTotals<A> softmax_totals(int count, const Get& get) {
  const int lane = threadIdx.x % 32;
  A largest = minus_infinity<A>(), sum = 0;
  for (int i = lane; i < count; i += 32) largest = get(i) > largest ? get(i) : largest;
  largest = warp_max(largest);
  for (int i = lane; i < count; i += 32) sum += std::exp(get(i) - largest);
  return {largest, warp_sum(sum)};
}

// Walks a list in descending order, lower index first among equals. No list of what was taken: the next one
// is the largest that comes after the last one.
template <typename A>
class Descending {
  using Key = key_t_of<A>;
  Key last_key_ = static_cast<Key>(~(1ull << (8 * sizeof(Key) - 1)));
  int last_ = -1;

 public:
  template <class Get, class Allowed>
  __device__ int next(int count, const Get& get, const Allowed& allowed) {
    constexpr Key kMin = static_cast<Key>(1ull << (8 * sizeof(Key) - 1));
    Key best_key = kMin;
    int best = INT32_MAX;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const Key key = order_key(get(i));
      const bool after_last = key < last_key_ || (key == last_key_ && i > last_);
      if (after_last && (key > best_key || best == INT32_MAX) && allowed(i)) {
        best_key = key;
        best = i;
      }
    }
    for (int step = 16; step > 0; step /= 2) {
      const Key other_key = __shfl_xor_sync(kFullMask, best_key, step);
      const int other = __shfl_xor_sync(kFullMask, best, step);
      if (other_key > best_key || (other_key == best_key && other < best)) {
        best_key = other_key;
        best = other;
      }
    }
    last_key_ = best_key;
    last_ = best;
    return best;
  }
};

// The rank of a group: the sum of its two best values, or its best one.
template <typename A, class Get>
__device__ A group_rank(int begin, int end, bool two_best, const Get& get) {
  A first = minus_infinity<A>(), second = first, nan = 0;
  for (int e = begin; e < end; ++e) {
    const A v = get(e), low = v < first ? v : first;
    first = v > first ? v : first;
    second = low > second ? low : second;
    if (!(v == v)) nan = v;
  }
  return nan + (two_best && end - begin > 1 ? first + second : first);
}

// Weights of the chosen experts, before `scale`; chosen(k) is the logit of choice k.
template <typename A, class Chosen, class Store>
__device__ void weigh(const GateParams& p, const SoftmaxTotals<A>& totals, const Chosen& chosen,
                      const Store& store) {
  const int lane = threadIdx.x % 32, K = p.top_k;
  const SoftmaxTotals<A> of_chosen = softmax_totals<A>(K, chosen);
  if (p.sigmoid && !(p.normalize && of_chosen.largest < kSigmoidIsExp)) {
    A sum = 0;
    for (int k = lane; k < K; k += 32) sum += sigmoid(chosen(k));
    sum = p.normalize ? warp_sum(sum) : A(1);
    for (int k = lane; k < K; k += 32) store(k, sigmoid(chosen(k)) / sum);
    return;
  }
  const SoftmaxTotals<A> used = p.normalize ? of_chosen : totals;
  // With a bias, the logit that makes a softmax undefined need not be among the chosen.
  const A undefined = totals.sum == totals.sum ? A(0) : totals.sum;
  for (int k = lane; k < K; k += 32) store(k, std::exp(chosen(k) - used.largest) / used.sum + undefined);
}

template <typename T>
__global__ void __launch_bounds__(kMaxWarps * 32)
    topk_gate_kernel(const T* __restrict__ logits, const acc_t<T>* __restrict__ bias, GateParams p,
                     int64_t num_tokens, int64_t* __restrict__ topk_idx, T* __restrict__ topk_weights) {
  using A = acc_t<T>;
  FMOE_DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, E = p.num_experts;
  const int group_size = E / p.num_groups;
  const bool limited = p.topk_groups < p.num_groups;
  A* order = reinterpret_cast<A*>(shared) + static_cast<int64_t>(warp) * (E + 2 * p.num_groups);  // [E]
  A* ranks = order + E;                                                                           // [groups]
  A* kept = ranks + p.num_groups;  // [groups], 0 or 1
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < num_tokens;
       t += static_cast<int64_t>(gridDim.x) * warps) {
    const T* row = logits + t * E;
    const auto logit = [&](int e) { return to_acc(row[e]); };
    SoftmaxTotals<A> totals{0, 1};
    if (!p.sigmoid && (bias || !p.normalize)) totals = softmax_totals<A>(E, logit);
    for (int e = lane; e < E; e += 32) {
      const A x = logit(e);
      order[e] = !bias ? x : (p.sigmoid ? sigmoid(x) : std::exp(x - totals.largest) / totals.sum) + bias[e];
    }
    __syncwarp();
    const auto value = [&](int e) { return order[e]; };
    if (limited) {
      const bool as_scores = p.sigmoid && !bias;
      const auto group_value = [&](int e) { return as_scores ? sigmoid(order[e]) : order[e]; };
      for (int g = lane; g < p.num_groups; g += 32) {
        ranks[g] = group_rank<A>(g * group_size, (g + 1) * group_size, p.sigmoid || bias, group_value);
        kept[g] = 0;
      }
      __syncwarp();
      Descending<A> groups;
      for (int i = 0; i < p.topk_groups; ++i) {
        const int g = groups.next(p.num_groups, [&](int j) { return ranks[j]; }, [](int) { return true; });
        if (lane == 0) kept[g] = 1;
      }
      __syncwarp();
    }
    Descending<A> experts;
    int64_t* idx = topk_idx + t * p.top_k;
    for (int k = 0; k < p.top_k; ++k) {
      const int e = experts.next(E, value, [&](int i) { return !limited || kept[i / group_size] != A(0); });
      if (lane == 0) idx[k] = e;
    }
    __syncwarp();
    weigh<A>(
        p, totals, [&](int k) { return logit(static_cast<int>(idx[k])); },
        [&](int k, A w) { topk_weights[t * p.top_k + k] = round_to<T>(w * static_cast<A>(p.scale)); });
    __syncwarp();
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxWarps * 32)
    topk_gate_backward_kernel(const T* __restrict__ grad_weights, const T* __restrict__ logits,
                              const int64_t* __restrict__ topk_idx, const T* __restrict__ topk_weights,
                              GateParams p, int64_t num_tokens, T* __restrict__ grad_logits) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, E = p.num_experts, K = p.top_k;
  const A scale = static_cast<A>(p.scale);
  const bool dense = !p.sigmoid && !p.normalize;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; t < num_tokens;
       t += static_cast<int64_t>(gridDim.x) * warps) {
    const int64_t* idx = topk_idx + t * K;
    const T *grad = grad_weights + t * K, *weights = topk_weights + t * K;
    T* out = grad_logits + t * E;
    const auto logit = [&](int64_t e) { return to_acc(logits[t * E + e]); };
    const auto in_range = [&](int64_t e) { return e >= 0 && e < E; };
    SoftmaxTotals<A> totals{0, 1};
    if (dense) totals = softmax_totals<A>(E, logit);
    const auto probability = [&](int64_t e) { return std::exp(logit(e) - totals.largest) / totals.sum; };

    double dot = 0, sum = 0;
    for (int k = lane; k < K; k += 32) {
      if (!in_range(idx[k]) || !(dense || p.normalize)) continue;
      const A w = dense ? probability(idx[k]) : to_acc(weights[k]);
      dot += static_cast<double>(to_acc(grad[k])) * static_cast<double>(w);
      sum += static_cast<double>(w);
    }
    dot = warp_sum(dot);
    sum = warp_sum(sum);
    if (p.normalize) dot = sum == 0 ? 0 : dot / sum;  // the sum is scale, up to rounding that cancels here
    const A shared = static_cast<A>(dot);

    for (int e = lane; e < E; e += 32) out[e] = round_to<T>(dense ? -shared * scale * probability(e) : A(0));
    __syncwarp();
    for (int k = lane; k < K; k += 32) {
      if (!in_range(idx[k])) continue;
      const A g = to_acc(grad[k]), x = logit(idx[k]);
      const A slope = p.sigmoid ? sigmoid(-x) : A(1);
      const A w = dense ? probability(idx[k]) * scale : p.normalize ? to_acc(weights[k]) : sigmoid(x) * scale;
      out[idx[k]] = round_to<T>(w * (g - shared) * slope);
    }
  }
}

}  // namespace

int64_t max_gate_values(Dtype dtype) {
  return kStaticSharedBytes / (dtype == Dtype::f64 ? sizeof(double) : sizeof(float));
}

void launch_topk_gate(Dtype dtype, const void* logits, const void* bias, const GateParams& params,
                      int64_t num_tokens, int64_t* topk_idx, void* topk_weights, LaunchStream stream) {
  if (num_tokens == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const size_t per_warp = sizeof(acc_t<T>) * (params.num_experts + 2 * params.num_groups);
    const int warps = static_cast<int>(
        kStaticSharedBytes / per_warp < kMaxWarps ? kStaticSharedBytes / per_warp : kMaxWarps);
    launch(topk_gate_kernel<T>, grid_for(ceil_div(num_tokens, warps)), warps * 32, per_warp * warps, stream,
           static_cast<const T*>(logits), static_cast<const acc_t<T>*>(bias), params, num_tokens, topk_idx,
           static_cast<T*>(topk_weights));
  });
}

void launch_topk_gate_backward(Dtype dtype, const void* grad_weights, const void* logits,
                               const int64_t* topk_idx, const void* topk_weights, const GateParams& params,
                               int64_t num_tokens, void* grad_logits, LaunchStream stream) {
  if (num_tokens == 0) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    launch(topk_gate_backward_kernel<T>, grid_for(ceil_div(num_tokens, kMaxWarps)), kMaxWarps * 32, 0, stream,
           static_cast<const T*>(grad_weights), static_cast<const T*>(logits), topk_idx,
           static_cast<const T*>(topk_weights), params, num_tokens, static_cast<T*>(grad_logits));
  });
}

}  // namespace fmoe_ext
