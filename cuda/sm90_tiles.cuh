// The order in which thread blocks of the Hopper kernels take the tiles of a result [R, N]: RowTiles finds
// tile `index` by a search, TileWalk from the one before. sm90_grad_weight.cu has an order of its own.
#pragma once

#include "grouped_rows.cuh"

namespace fmoe_ext {

// Tiles are numbered in the order in which thread blocks take them.
struct Tile {
  // num_experts: rows behind the last expert's, which consumers fill with zeros and producers stop at; -1:
  // there are no more tiles
  int expert;
  int row, num_rows, n;  // its rows, and which tile of columns it is
};

// All tiles: expert by expert, then the padding, in each in groups of kGroupRows rows that go through all
// columns together (tile_place).
template <int kRows>
struct RowTiles {
  static constexpr int kHeight = kRows;
  const int* offs;
  int64_t num_rows;
  int num_experts, tiles_n;

  __device__ RowRange rows(int expert) const { return rows_of(offs, num_experts, num_rows, expert); }
  // Row tiles of an expert or the padding.
  __device__ int count(const RowRange& range) const {
    return (static_cast<int>(range.end - range.begin) + kHeight - 1) / kHeight;
  }
  // Tile `index`, counted over all experts, which lies in rows begin .. end - 1 of this one. first_tile: row
  // tiles, not times tiles_n, of the experts before it.
  __device__ __forceinline__ Tile place(int index, int expert, int first_tile, int begin, int end) const {
    const auto at = tile_place(index - first_tile * tiles_n, (end - begin + kHeight - 1) / kHeight, tiles_n,
                               kGroupRows / kHeight);
    const int row = begin + at.row * kHeight;
    return {expert, row, min(end - row, kHeight), at.column};
  }
  __device__ __forceinline__ Tile at(int index) const {  // by the whole warp
    const auto owner = find_tile_owner(offs, num_experts, num_rows, index / tiles_n, kHeight);
    if (owner.expert < 0) return {-1, 0, 0, 0};
    return place(index, owner.expert, owner.first_tile, owner.begin, owner.end);
  }
};

// The walk of a warp through row tiles, by ascending index. Each lane counts the tiles up to and with one of
// 32 experts; the counts are kept from tile to tile, so that most steps cost a ballot and not a search. For
// warps with two registers to spare: producers, and the consumers of multiply_together(). Those of sm90_up.cu
// and sm90_ping_pong.cuh call RowTiles::at().
template <int kRows>
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const RowTiles<kRows>& tiles) : tiles_(tiles) { count(0); }

  // By the whole warp; index is not less than the one before.
  __device__ __forceinline__ Tile at(int index) {
    const int row_tile = index / tiles_.tiles_n;
    unsigned beyond = __ballot_sync(kFullMask, row_tile < end_);
    while (!beyond) {
      if (first_expert_ + 32 > tiles_.num_experts) return {-1, 0, 0, 0};
      first_expert_ += 32;
      count(__shfl_sync(kFullMask, end_, 31));
      beyond = __ballot_sync(kFullMask, row_tile < end_);
    }
    const int lane = __ffs(beyond) - 1, expert = first_expert_ + lane;
    const RowRange rows = tiles_.rows(expert);
    const int first_tile = __shfl_sync(kFullMask, end_, lane) - tiles_.count(rows);
    return tiles_.place(index, expert, first_tile, static_cast<int>(rows.begin), static_cast<int>(rows.end));
  }

 private:
  __device__ __forceinline__ void count(int before) {
    const int expert = first_expert_ + static_cast<int>(threadIdx.x % 32);
    end_ = before + warp_prefix_sum(expert <= tiles_.num_experts ? tiles_.count(tiles_.rows(expert)) : 0);
  }

  const RowTiles<kRows>& tiles_;
  int first_expert_ = 0, end_;
};

}  // namespace fmoe_ext
