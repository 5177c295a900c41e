// Orders the experts by their number of rows, most first: what the persistent grid of sm90_grad_weight.cu
// takes in turn is then shared out evenly. products.h launches it before that kernel, once a backward;
// contract in launchers.h. One warp an expert, which counts those that come before it.
#include "grouped_rows.cuh"

namespace fmoe_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads)
    heaviest_first_kernel(const int* __restrict__ offs, int num_experts, int64_t num_rows,
                          int* __restrict__ order) {
  const int expert = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (expert >= num_experts) return;
  const auto rows = [&](int e) {
    const RowRange range = rows_of(offs, num_experts, num_rows, e);
    return range.end - range.begin;
  };
  const int64_t mine = rows(expert);
  int before = 0;
  for (int e = lane; e < num_experts; e += 32) {
    const int64_t other = rows(e);
    before += other > mine || (other == mine && e < expert);
  }
  before = warp_sum(before);
  if (lane == 0) order[before] = expert;
}

}  // namespace

void launch_heaviest_first(const int* offs, int num_experts, int64_t num_rows, int* order,
                           LaunchStream stream) {
  if (num_experts == 0) return;
  launch(heaviest_first_kernel, static_cast<unsigned>(ceil_div(num_experts, kWarps)), kThreads, 0, stream,
         offs, num_experts, num_rows, order);
}

}  // namespace fmoe_ext
