// The operator count_tokens, for ops_cuda.cpp: counts the choices of each expert in tokens_per_expert, zero
// on entry; numbers outside [0, E) are skipped. A block counts in shared memory, if all experts fit, and adds
// that to the counts at its end. Integer atomics: the order of the additions does not show in the result.
#include "common.cuh"

namespace fmoe_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;  // choices per thread, about: few blocks, so few histograms to add up
constexpr int kMaxSharedExperts = kStaticSharedBytes / sizeof(int);

template <typename index_t>
__global__ void __launch_bounds__(kThreads)
    count_tokens_kernel(const index_t* __restrict__ topk_idx, int64_t num_choices, int num_experts,
                        unsigned long long* __restrict__ counts, bool shared_histogram) {
  FMOE_DYNAMIC_SHARED(shared);
  int* histogram = reinterpret_cast<int*>(shared);  // [E]
  if (shared_histogram) {
    for (int e = threadIdx.x; e < num_experts; e += kThreads) histogram[e] = 0;
    __syncthreads();
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_choices; i += step) {
    const int64_t e = topk_idx[i];
    if (e < 0 || e >= num_experts) continue;
    if (shared_histogram)
      atomicAdd(&histogram[e], 1);
    else
      atomicAdd(&counts[e], 1ull);
  }
  if (!shared_histogram) return;
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads)
    if (histogram[e]) atomicAdd(&counts[e], static_cast<unsigned long long>(histogram[e]));
}

}  // namespace

void launch_count_tokens(Indices topk_idx, int64_t num_choices, int num_experts, int64_t* tokens_per_expert,
                         LaunchStream stream) {
  if (num_choices == 0) return;
  const bool shared_histogram = num_experts <= kMaxSharedExperts;
  const size_t shared_bytes = shared_histogram ? num_experts * sizeof(int) : 0;
  const unsigned blocks = grid_for(ceil_div(num_choices, kThreads * kPerThread));
  auto* counts = reinterpret_cast<unsigned long long*>(tokens_per_expert);
  dispatch_indices(topk_idx, [&](auto* idx) {
    using index_t = std::remove_const_t<std::remove_pointer_t<decltype(idx)>>;
    launch(count_tokens_kernel<index_t>, blocks, kThreads, shared_bytes, stream, idx, num_choices,
           num_experts, counts, shared_histogram);
  });
}

}  // namespace fmoe_ext
