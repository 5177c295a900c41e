// The kernel of sm90_rows_by_weight.cu: out [R, N] = scale (rows [R, K] times each expert's weight + bias) on
// Hopper, both operands through TMA: tiles of 128 x 192 that two warpgroups take in turn (ping-pong); or, for
// a long k, tiles of 128 x 256 of which each multiplies 64 rows. Padding rows are zero.
#pragma once

#include "sm90_host.cuh"
#include "sm90_ping_pong.cuh"

namespace fmoe_ext {

template <class T, int kColumns>
struct RowsByWeight {
  static constexpr int kM = 128, kN = kColumns;
  static constexpr bool kPingPong = kN == 192;
  static constexpr int kStaged = kPingPong ? kN : kN / 2;  // columns that are stored at a time
  struct alignas(1024) Shared : ping_pong::Shared<T, kN> {
    alignas(1024) T c[2][64 * kStaged];  // of each consumer warpgroup, results on their way to memory
  };
  static constexpr size_t kSharedBytes = sizeof(Shared) + kSharedAlignment;
  static_assert(kSharedBytes <= kMaxSharedBytes);

  RowTiles<kM> tiles;
  const T* bias;   // [E, N], or null
  RowScale scale;  // of float
  T* out;
  int N, K;
};

// The producer: one thread starts the TMA loads of both operands, stage by stage.
template <class T, bool kAlongN, class P>
__device__ __forceinline__ void load_rows_and_weight(typename P::Shared& s, const CUtensorMap& rows,
                                                     const CUtensorMap& weight, const P& p) {
  constexpr int kN = P::kN;
  const int steps = static_cast<int>(ceil_div(p.K, kBlockColumns));
  TileWalk walk(p.tiles);
  uint32_t count = 0;
  for (int index = blockIdx.x;; index += gridDim.x) {
    const Tile tile = walk.at(index);
    if (tile.expert < 0 || tile.expert == p.tiles.num_experts) break;
    if (threadIdx.x % 32 != 0) continue;
#pragma unroll 1
    for (int k = 0; k < steps; ++k, ++count) {
      const int stage = s.ring.stage_of(count);
      const uint32_t full = ptx::shared_address(&s.ring.full[stage]);
      const uint32_t b = ptx::shared_address(s.ring.b[stage]);
      s.ring.wait_empty(count);
      ptx::mbar_arrive_expect_tx(full, sizeof s.ring.b[0] + sizeof s.ring.a[0]);
      ptx::tma_load(ptx::shared_address(s.ring.a[stage]), &rows, full, k * kBlockColumns, tile.row);
      if constexpr (kAlongN)
        for (int n = 0; n < kN; n += kBlockColumns)
          ptx::tma_load(b + n * 128, &weight, full, tile.n * kN + n, k * kBlockColumns, tile.expert);
      else
        ptx::tma_load(b, &weight, full, k * kBlockColumns, tile.n * kN, tile.expert);
    }
  }
}

// The epilogue that ping_pong::consume and multiply_together call: scale (accumulators + bias) of a
// warpgroup.
template <class T, class P>
struct StoreRows {
  static constexpr int kN = P::kN, kStaged = P::kStaged;
  T* staged;
  const P& p;
  TileBias<T, kN> bias;

  __device__ T* out(const Tile& tile, int first) const {
    return p.out + static_cast<int64_t>(tile.row + first) * p.N + tile.n * kN;
  }
  __device__ int columns(const Tile& tile) const { return min(p.N - tile.n * kN, kN); }

  __device__ __forceinline__ void before(const Tile& tile) {
    if (!P::kPingPong) load_bias(tile);
  }
  template <int kHalf>
  __device__ __forceinline__ void store(const float (&acc)[kN / 2], const Tile& tile) {
    if (P::kPingPong && kHalf == 0) load_bias(tile);
    if (tile.num_rows > 64 * kHalf) store_from(64 * kHalf, acc, tile);
  }
  __device__ __forceinline__ void store_zeros(const Tile& tile) {
    fmoe_ext::store_zeros(out(tile, 0), p.N, tile.num_rows, columns(tile));
  }

  __device__ __forceinline__ void load_bias(const Tile& tile) {
    bias.load([&](int piece) -> const T* {
      if (!p.bias || piece * 8 >= columns(tile)) return nullptr;
      return p.bias + static_cast<int64_t>(tile.expert) * p.N + tile.n * kN + piece * 8;
    });
  }
  // The 64 rows of a tile from row `first`.
  __device__ __forceinline__ void store_from(int first, const float (&acc)[kN / 2], const Tile& tile) {
    float factor[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int r = first + threadIdx.x % 128 / 32 * 16 + lower * 8 + threadIdx.x % 32 / 4;
      factor[lower] = r < tile.num_rows ? factor_of<float>(p.scale, tile.row + r) : 0;
    }
#pragma unroll
    for (int column = 0; column < kN; column += kStaged) {
      stage_rows<kStaged>(staged, [&](int i, bool lower) {
        const int piece = column / 8 + i, at = piece * 4 + lower * 2;
        const float2 b = p.bias ? bias.of(piece) : float2{0, 0};
        return pack<T>(factor[lower] * (acc[at] + b.x), factor[lower] * (acc[at + 1] + b.y));
      });
      __syncwarp();
      store_rows<T, kStaged>(staged, out(tile, first) + column, p.N, tile.num_rows - first,
                             columns(tile) - column);
      __syncwarp();
    }
  }
};

// kAlongN: weight [E, K, N], else [E, N, K].
template <class T, bool kAlongN, int kColumns>
__global__ void __launch_bounds__(kSm90Threads, 1)
    rows_by_weight_sm90_kernel(const __grid_constant__ CUtensorMap rows,
                               const __grid_constant__ CUtensorMap weight,
                               const __grid_constant__ RowsByWeight<T, kColumns> p) {
#ifdef FMOE_SM90A
  using P = RowsByWeight<T, kColumns>;
  FMOE_DYNAMIC_SHARED(raw);
  auto& s = *reinterpret_cast<typename P::Shared*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    if constexpr (P::kPingPong)
      s.init(1);
    else
      s.ring.init(1, 2);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x / 32 == kProducer * 4) load_rows_and_weight<T, kAlongN>(s, rows, weight, p);
  } else {
    ptx::setmaxnreg_inc<232>();
    const int steps = static_cast<int>(ceil_div(p.K, kBlockColumns));
    StoreRows<T, P> epilogue{s.c[group], p, {}};
    if constexpr (P::kPingPong)
      ping_pong::consume<T, kAlongN, false>(s, p.tiles, group, steps, epilogue);
    else
      multiply_together<T, kAlongN, false>(s.ring, p.tiles, group, steps, epilogue);
  }
#endif
}

}  // namespace fmoe_ext
