// Which rows belong to which expert, found on the device, so that the host need not read offs; the factors of
// rows (RowScale), and rows that are read through an index (Rows).
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

// The rows of each expert, and then the padding, are cut into tiles of `height` rows. This is who owns tile
// `index`; every lane of the warp must call it, and all get the same answer.
template <class Int>  // holds the number of rows
struct TileOwner {
  int expert;                  // num_experts: padding; -1: there is no such tile
  Int first_tile, begin, end;  // number of the owner's first tile; its rows
};
template <class Int>
static __device__ TileOwner<Int> find_tile_owner(const int* __restrict__ offs, int num_experts,
                                                 int64_t num_rows, Int index, int height) {
  const int lane = threadIdx.x % 32;
  Int before = 0;
  for (int first = 0; first <= num_experts; first += 32) {
    const int e = first + lane;
    const RowRange range = e <= num_experts ? rows_of(offs, num_experts, num_rows, e) : RowRange{0, 0};
    const Int begin = static_cast<Int>(range.begin), end = static_cast<Int>(range.end);
    const Int tiles = (end - begin + height - 1) / height;
    const Int sum = warp_prefix_sum(tiles);
    const bool mine = index >= before + sum - tiles && index < before + sum;
    const unsigned owner = __ballot_sync(kFullMask, mine);
    if (owner) {
      const int source = __ffs(owner) - 1;
      return {first + source, __shfl_sync(kFullMask, before + sum - tiles, source),
              __shfl_sync(kFullMask, begin, source), __shfl_sync(kFullMask, end, source)};
    }
    before += __shfl_sync(kFullMask, sum, 31);
  }
  return {-1, 0, 0, 0};
}

// Where tile `index` of rows x columns tiles lies: `group` rows of them go through all columns together, rows
// first. What the blocks that run at the same time read then fits the L2 cache, of either operand.
template <typename Int>
struct TilePlace {
  Int row, column;
};
template <typename Int>
__device__ __forceinline__ TilePlace<Int> tile_place(Int index, Int rows, Int columns, Int group) {
  const Int first = index / (group * columns) * group, in_group = index % (group * columns);
  const Int height = min(rows - first, group);
  return {first + in_group % height, in_group / height};
}
constexpr int kGroupRows = 2048;  // elements of a group of tiles

// No more tiles of `height` rows than these: every expert, and the padding, may end in a tile that is not
// full.
inline int64_t max_row_tiles(int64_t num_rows, int num_experts, int height) {
  return num_rows / height + num_experts + 1;
}

// The factor of row r: 1 without weights, 0 where its index is out of range.
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

// n / d for 0 <= n < 2^31 by a multiplication (Granlund and Montgomery, PLDI 1994).
class Divisor {
 public:
  explicit Divisor(int d) : shift_(31) {
    const uint64_t divisor = d > 0 ? d : 1;
    while (uint64_t{1} << (shift_ - 31) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier_ >> shift_);
  }

 private:
  uint32_t multiplier_;
  int shift_;
};

// A matrix whose rows may be picked through an index: row i is base[(index ? index[i] / divisor : i) *
// stride]. Rows outside [.., end), rows whose index is out of range and columns at or past `width` read as
// zero.
template <typename T>
struct Rows {
  const T* base;
  int64_t stride, width, end;
  const int* index;
  Divisor divisor;
  uint32_t num_choices;  // an index, or without one a row, is in [0, num_choices)
  bool vectorised;       // every 16-byte piece of a row is aligned and never crosses `width`

  __device__ __forceinline__ const T* row(int64_t i) const {
    if (i >= end) return nullptr;
    if (!index) return base + i * stride;
    const int choice = index[i];
    return exists(choice) ? base + divisor.divide(choice) * stride : nullptr;
  }
  // By what the index says of a row; without one, by its number.
  __device__ __forceinline__ bool exists(int choice) const {
    return static_cast<uint32_t>(choice) < num_choices;
  }
};

template <typename T>
Rows<T> rows_from(const GroupedRows& rows, int64_t num_rows) {
  const bool aligned = reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.width % kVec16<T> == 0;
  return {static_cast<const T*>(rows.data),
          rows.width,
          rows.width,
          num_rows,
          rows.index,
          Divisor(rows.index ? rows.divisor : 1),
          static_cast<uint32_t>(std::min<int64_t>(rows.index ? rows.num_indexed : num_rows, INT32_MAX)),
          aligned};
}

}  // namespace fmoe_ext
