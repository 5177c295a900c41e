// F2: out = scale (rows weight^T + bias) on Hopper.
#include "sm90_rows_by_weight.cuh"

namespace fmoe_ext {

void launch_rows_by_weight_sm90(Dtype dtype, const void* rows, const int* offs, const void* weight,
                                int64_t num_rows, int num_experts, int N, int K, const void* bias,
                                const RowScale& scale, void* out, const Grid& grid, LaunchStream stream) {
  start_rows_by_weight<false>(dtype, rows, offs, weight, num_rows, num_experts, N, K, bias, scale, out, grid,
                              stream);
}

}  // namespace fmoe_ext
