// out [R, N] = rows [R, K] times each expert's weight in MXFP4 (+ bias) on Hopper: F2's tiles of 128 x 256,
// of which each warpgroup multiplies 64 rows. TMA loads the rows; four warps decode the tile of the weight
// into the ring.
#include "mxfp4.cuh"
#include "sm90_rows_by_weight.cuh"

namespace fmoe_ext {
namespace {

using T = __nv_bfloat16;

struct ByMxWeight : RowsByWeight<T, 256> {
  static constexpr int kArrivals = 4 + 1;  // on a full barrier: of the warps that decode, and of TMA's bytes
  MxWeight weight;
};

// What a thread of 128 decodes of a tile of the weight, four blocks a step of 64 k. Its codes are loaded two
// steps ahead.
template <bool kAlongN>
class MxStage {
 public:
  static constexpr int kBlocks = 4, kAhead = 2;
  struct Held {
    uint4 codes[kBlocks];
    uint32_t scale[kBlocks];
  };

  __device__ __forceinline__ MxStage(const MxRows& rows, int first_column)
      : rows_(rows), first_column_(first_column) {}

  __device__ __forceinline__ void fetch(Held& held, int step) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int k = step * kBlockColumns;
      const int row = (kAlongN ? k : first_column_) + line() + i * kLines;
      const int block = (kAlongN ? first_column_ : k) / kMxBlock + place();
      const bool there = rows_.has(row, block);
      const uint32_t at = there ? rows_.at(row, block) : 0;
      held.codes[i] = there ? rows_.data[at] : uint4{0, 0, 0, 0};
      held.scale[i] = there ? rows_.scale[at] : 0;
    }
  }
  // Writes an operand of wgmma; the eight threads that write at once meet different banks.
  __device__ __forceinline__ static void decode(const Held& held, uint32_t operand) {
    const int half = place() % 2;
    const uint32_t first = operand + (kAlongN ? place() / 2 * kBlockBytes : 0) + line() * 128;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint32_t words[4] = {held.codes[i].x, held.codes[i].y, held.codes[i].z, held.codes[i].w};
      const uint32_t scale = mx_scale(held.scale[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        ptx::st_shared16(first + i * kLines * 128 + (((half * 4 + j) ^ line()) & 7) * 16,
                         decode_mx(words[j], scale));
    }
  }

 private:
  // The lines of 128 bytes that the 128 threads fill at a time, two blocks to a line: 64 rows that run along
  // k, or 16 along n in four parts of the tile.
  static constexpr int kLines = kAlongN ? 16 : 64;
  __device__ static int line() {
    return kAlongN ? threadIdx.x % 128 / 32 * 4 + threadIdx.x / 2 % 4 : threadIdx.x % 128 / 2;
  }
  // Of a thread's block in its row of the weight.
  __device__ static int place() {
    return (kAlongN ? threadIdx.x % 32 / 8 * 2 : 0) + static_cast<int>(threadIdx.x % 2);
  }

  const MxRows rows_;
  const int first_column_;  // of the result
};

template <bool kAlongN>
__device__ __forceinline__ void load_rows_and_decode(ByMxWeight::Shared& s, const CUtensorMap& rows,
                                                     const ByMxWeight& p) {
  using Stage = MxStage<kAlongN>;
  const int steps = static_cast<int>(ceil_div(p.K, kBlockColumns));
  TileWalk walk(p.tiles);
  uint32_t count = 0;
  for (int index = blockIdx.x;; index += gridDim.x) {
    const Tile tile = walk.at(index);
    if (tile.expert < 0 || tile.expert == p.tiles.num_experts) break;
    const Stage weight(p.weight.of(tile.expert), tile.n * ByMxWeight::kN);
    typename Stage::Held held[Stage::kAhead];
#pragma unroll
    for (int i = 0; i < Stage::kAhead; ++i) weight.fetch(held[i], i);
#pragma unroll 1
    for (int first = 0; first < steps; first += Stage::kAhead) {
#pragma unroll
      for (int i = 0; i < Stage::kAhead; ++i) {
        const int k = first + i;
        if (k >= steps) break;
        const int stage = s.ring.stage_of(count);
        const uint32_t full = ptx::shared_address(&s.ring.full[stage]);
        s.ring.wait_empty(count);
        if (threadIdx.x % 128 == 0) {
          ptx::mbar_arrive_expect_tx(full, sizeof s.ring.a[0]);
          ptx::tma_load(ptx::shared_address(s.ring.a[stage]), &rows, full, k * kBlockColumns, tile.row);
        }
        Stage::decode(held[i], ptx::shared_address(s.ring.b[stage]));
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbar_arrive(full);
        weight.fetch(held[i], k + Stage::kAhead);
        ++count;
      }
    }
  }
}

template <bool kAlongN>
__global__ void __launch_bounds__(kSm90Threads, 1)
    rows_by_mxfp4_sm90_kernel(const __grid_constant__ CUtensorMap rows,
                              const __grid_constant__ ByMxWeight p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  auto& s = *reinterpret_cast<ByMxWeight::Shared*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    s.ring.init(ByMxWeight::kArrivals, 2);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<104>();
    load_rows_and_decode<kAlongN>(s, rows, p);
  } else {
    ptx::setmaxnreg_inc<200>();
    const int steps = static_cast<int>(ceil_div(p.K, kBlockColumns));
    StoreRows<T, ByMxWeight> epilogue{s.c[group], p, {}};
    multiply_together<T, kAlongN, false>(s.ring, p.tiles, group, steps, epilogue);
  }
#endif
}

}  // namespace

void launch_rows_by_mxfp4_sm90(const void* rows, const gemm::PackedMatrix& weight, bool along_n,
                               const int* offs, int64_t num_rows, const void* bias, void* out,
                               const Grid& grid, LaunchStream stream) {
  const int N = static_cast<int>(along_n ? weight.columns : weight.rows),
            K = static_cast<int>(along_n ? weight.rows : weight.columns);
  if (num_rows == 0 || N == 0) return;
  const uint64_t k = K, r = num_rows;
  const uint32_t box = kBlockColumns, height = ByMxWeight::kM;
  CUtensorMap row_map;
  encode_tensor_map<T>(&row_map, rows, {2, {k, r}, {k}, {box, height}});
  const ByMxWeight params{
      {{offs, num_rows, static_cast<int>(weight.num_experts), static_cast<int>(ceil_div(N, ByMxWeight::kN))},
       static_cast<const T*>(bias),
       RowScale{},
       static_cast<T*>(out),
       N,
       K},
      mx_weight(weight)};
  launch_sm90(along_n ? rows_by_mxfp4_sm90_kernel<true> : rows_by_mxfp4_sm90_kernel<false>, grid,
              ByMxWeight::kSharedBytes, stream, row_map, params);
}

}  // namespace fmoe_ext
