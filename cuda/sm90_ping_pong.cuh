// Tiles of 128 rows that two consumer warpgroups take in turn (ping-pong): one computes with and stores what
// it has while the other multiplies. A third warpgroup loads. For sm90_grad_hidden.cu and the narrow tiles of
// sm90_rows_by_weight.cuh.
#pragma once

#include "sm90.cuh"

namespace fmoe_ext::ping_pong {

template <class T, int kColumns>
struct Shared {
  static constexpr int kM = 128, kN = kColumns;
  Ring<T, kM, kN> ring;
  uint64_t turn[2];  // a barrier of each warpgroup, which the other completes

  __device__ void init(int loads) {
    ring.init(loads, 1);
    for (uint64_t& bar : turn) ptx::mbar_init(ptx::shared_address(&bar), 4);
  }
  // Lets the other warpgroup multiply. Every whole warp says so: with few steps a turn could come round again
  // before a slow thread has taken its own.
  __device__ void pass_turn(int group) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbar_arrive(ptx::shared_address(&turn[group ^ 1]));
  }
};

// The products of rows 0 .. 63 of a tile into top, and, with kBoth, those of rows 64 .. 127 into bottom.
template <class T, bool kAlongN, bool kGathered, bool kBoth, class S>
__device__ __forceinline__ void multiply(S& s, float (&top)[S::kN / 2], float (&bottom)[S::kN / 2], int group,
                                         int steps, uint32_t& count) {
  const bool releases = s.ring.releases();
#pragma unroll 1
  for (int k = 0; k < steps; ++k, ++count) {
    s.ring.wait_full(count);
    if (kGathered) ptx::fence_proxy_async();  // cp.async writes through the generic proxy
    // Taken from one lane, so that the compiler knows the descriptors for uniform: else it moves four
    // registers a product.
    const int stage = __shfl_sync(kFullMask, s.ring.stage_of(count), 0);
    const uint64_t da = descriptor<false>(ptx::shared_address(s.ring.a[stage])),
                   db = descriptor<kAlongN>(ptx::shared_address(s.ring.b[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockColumns / 16; ++kk) {
      const uint64_t a = da + kk * kDescriptorK16<false>, b = db + kk * kDescriptorK16<kAlongN>;
      ptx::wgmma<T, false, kAlongN>(top, a, b, (k | kk) != 0);
      if constexpr (kBoth) ptx::wgmma<T, false, kAlongN>(bottom, a + kDescriptor64, b, (k | kk) != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (k && releases) s.ring.release(count - 1);
  }
  s.pass_turn(group);
  ptx::wgmma_wait<0>();
  ptx::fence_accumulators(top);
  if constexpr (kBoth) ptx::fence_accumulators(bottom);
  if (releases) s.ring.release(count - 1);
}

// Takes every other tile of this block. Of an epilogue it calls before(tile) ahead of a product,
// store<0>(top, tile) and store<1>(bottom, tile) after it, and store_zeros(tile) for padding. kAlongN: the
// rows of B run along n; kGathered: A comes by cp.async.
template <class T, bool kAlongN, bool kGathered, class S, class Epilogue>
__device__ __forceinline__ void consume(S& s, const RowTiles<S::kM>& tiles, int group, int steps,
                                        Epilogue& epilogue) {
  uint32_t count = group * steps;
  uint32_t turns = 0;
  const int step = gridDim.x;
  for (int index = blockIdx.x + group * step;; index += 2 * step, ++turns) {
    const Tile tile = tiles.at(index);
    if (tile.expert < 0) break;
    if (tile.expert == tiles.num_experts) {  // padding comes last, so there are no more turns to take
      epilogue.store_zeros(tile);
      continue;
    }
    epilogue.before(tile);
    ptx::mbar_wait(ptx::shared_address(&s.turn[group]), (turns & 1) ^ (group == 0));
    float top[S::kN / 2], bottom[S::kN / 2];
    if (tile.num_rows > 64)
      multiply<T, kAlongN, kGathered, true>(s, top, bottom, group, steps, count);
    else
      multiply<T, kAlongN, kGathered, false>(s, top, bottom, group, steps, count);
    epilogue.template store<0>(top, tile);
    epilogue.template store<1>(bottom, tile);
    count += steps;  // the other warpgroup's tile
  }
}

}  // namespace fmoe_ext::ping_pong
