// F2: y = scale (a w2^T + b2) on Hopper.
#include "sm90_rows_by_weight.cuh"

namespace fmoe_ext {

void launch_down_sm90(Dtype dtype, const void* a, const int* offs, const void* w2, int64_t num_rows,
                      int num_experts, int D, int H, const void* b2, const RowScale& scale, void* y,
                      const Grid& grid, LaunchStream stream) {
  launch_rows_by_weight_sm90<false>(dtype, a, offs, w2, num_rows, num_experts, D, H, b2, scale, y, grid,
                                    stream);
}

}  // namespace fmoe_ext
