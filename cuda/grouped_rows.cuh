// Which rows belong to which expert, found on the device: no host ever reads offs.
#pragma once

#include "common.cuh"

namespace fmoe_ext {

// Rows [begin, end) of expert e; e == E names the padding after the last expert. Whatever offs holds, the
// bounds stay inside [0, num_rows].
struct RowRange {
  int64_t begin, end;
};
__device__ __forceinline__ RowRange rows_of(const int* __restrict__ offs, int num_experts, int64_t num_rows,
                                            int e) {
  const int64_t begin = e == 0 ? 0 : offs[e - 1], end = e == num_experts ? num_rows : offs[e];
  const int64_t from = begin < 0 ? 0 : begin < num_rows ? begin : num_rows;
  return {from, end < from ? from : end < num_rows ? end : num_rows};
}

struct RowTile {
  int expert;  // num_experts: padding; -1: there is no such tile
  int64_t begin, end;
};

// Tile `index` when the rows of each expert, and then the padding, are cut into tiles of `height` rows. Every
// lane of the warp must call it; all get the same answer.
static __device__ RowTile find_row_tile(const int* __restrict__ offs, int num_experts, int64_t num_rows,
                                        int64_t index, int height) {
  const int lane = threadIdx.x % 32;
  int64_t before = 0;
  for (int first = 0; first <= num_experts; first += 32) {
    const int e = first + lane;
    const RowRange range = e <= num_experts ? rows_of(offs, num_experts, num_rows, e) : RowRange{0, 0};
    const int64_t tiles = ceil_div(range.end - range.begin, height);
    int64_t sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(kFullMask, sum, step);
      if (lane >= step) sum += other;
    }
    const bool mine = index >= before + sum - tiles && index < before + sum;
    const unsigned owner = __ballot_sync(kFullMask, mine);
    if (owner) {
      const int64_t row = range.begin + (index - (before + sum - tiles)) * height;
      const int source = __ffs(owner) - 1;
      const int64_t begin = __shfl_sync(kFullMask, row, source),
                    end = __shfl_sync(kFullMask, range.end, source);
      return {first + source, begin, begin + height < end ? begin + height : end};
    }
    before += __shfl_sync(kFullMask, sum, 31);
  }
  return {-1, 0, 0};
}
inline int64_t max_row_tiles(int64_t num_rows, int num_experts, int height) {
  return num_rows / height + num_experts + 1;
}

// The factor of row r.
template <typename A>
__device__ __forceinline__ A factor_of(const RowScale& scale, int64_t r) {
  if (!scale.weights) return 1;
  const int64_t choice = scale.row_idx[r];
  const bool exists = choice >= 0 && choice < scale.num_choices;
  return exists ? static_cast<const A*>(scale.weights)[choice] : A(0);
}

// The expert that owns a row; num_experts in the padding.
__device__ __forceinline__ int expert_of_row(const int* __restrict__ offs, int num_experts, int64_t row) {
  int low = 0, high = num_experts;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (offs[middle] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

}  // namespace fmoe_ext
