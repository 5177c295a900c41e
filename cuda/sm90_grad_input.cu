// B3: dx_rows = dh w1 on Hopper; the rows of w1 run along n.
#include "sm90_rows_by_weight.cuh"

namespace fmoe_ext {

void launch_grad_input_sm90(Dtype dtype, const void* dh, const int* offs, const void* w1, int64_t num_rows,
                            int num_experts, int D, int F, void* dx_rows, const Grid& grid,
                            LaunchStream stream) {
  start_rows_by_weight<true>(dtype, dh, offs, w1, num_rows, num_experts, D, F, nullptr, RowScale{}, dx_rows,
                             grid, stream);
}

}  // namespace fmoe_ext
