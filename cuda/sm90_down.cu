// F2: y = a w2^T on Hopper. Tiles of 128 rows x 192 columns; two consumer warpgroups take turns (ping-pong),
// one stores its tile while the other multiplies. Both operands come through TMA.
#include "sm90.cuh"

namespace fmoe_ext {
namespace {

constexpr int kM = 128, kN = 192, kK = kSwizzledK, kStages = 4;
constexpr int kThreads = 384;
constexpr int kProducer = 2;     // warpgroup
constexpr int kPieces = kN / 8;  // 16-byte pieces of a row of the tile

struct alignas(1024) Shared {
  bf16 a[kStages][kM * kK];
  bf16 b[kStages][kN * kK];
  bf16 c[2][64 * kN];
  uint64_t full[kStages], empty[kStages], turn[2];
};
constexpr size_t kSharedBytes = sizeof(Shared) + kSharedAlignment;
static_assert(kSharedBytes <= 232448);

struct DownParams {
  const int* offs;
  bf16* y;
  int64_t num_rows;
  int num_experts, D, H;
  __device__ int tiles_n() const { return static_cast<int>(ceil_div(D, kN)); }
  __device__ RowTile rows(int tile) const {
    return find_row_tile(offs, num_experts, num_rows, tile / tiles_n(), kM);
  }
};

// Blocks of k count through all tiles of this block; stage and parity follow from the count.
__device__ __forceinline__ int stage_of(uint32_t count) { return count % kStages; }
__device__ __forceinline__ uint32_t parity_of(uint32_t count) { return count / kStages & 1; }

__device__ __forceinline__ void produce(Shared& s, const CUtensorMap& a, const CUtensorMap& w2,
                                        const DownParams& p) {
  const int steps = static_cast<int>(ceil_div(p.H, kK));
  uint32_t count = 0;
  for (int tile = blockIdx.x;; tile += gridDim.x) {
    const RowTile rows = p.rows(tile);
    if (rows.expert < 0 || rows.expert == p.num_experts) break;
    if (threadIdx.x % 32 != 0) continue;
    const int n = static_cast<int>(tile % p.tiles_n());
    for (int k = 0; k < steps; ++k, ++count) {
      const int stage = stage_of(count);
      const uint32_t full = ptx::shared_address(&s.full[stage]);
      ptx::mbar_wait(ptx::shared_address(&s.empty[stage]), parity_of(count) ^ 1);
      ptx::mbar_arrive_expect_tx(full, (kM + kN) * kK * sizeof(bf16));
      ptx::tma_load(ptx::shared_address(s.a[stage]), &a, full, k * kK, static_cast<int>(rows.begin));
      ptx::tma_load(ptx::shared_address(s.b[stage]), &w2, full, k * kK, n * kN, rows.expert);
    }
  }
}

// The rows and columns of y that a tile covers; 32 bits each, for registers are what this kernel is short of.
struct Place {
  int row, num_rows, column;
};

template <int kGroup, int kHalf>
__device__ __forceinline__ void store(Shared& s, const float (&acc)[kN / 2], const DownParams& p,
                                      Place place) {
  const int t = threadIdx.x % 128, lane = t % 32, row = t / 32 * 16 + lane % 16;
  const uint32_t staged = ptx::shared_address(s.c[kGroup]) + row * (kN * sizeof(bf16));
  ptx::bar_sync<1 + kGroup, 128>();
#pragma unroll
  for (int i = 0; i < kPieces; i += 2)
    ptx::stmatrix_x4(staged + (((i + lane / 16) ^ (lane & 7)) << 4), pack_bf16(acc[i * 4], acc[i * 4 + 1]),
                     pack_bf16(acc[i * 4 + 2], acc[i * 4 + 3]), pack_bf16(acc[i * 4 + 4], acc[i * 4 + 5]),
                     pack_bf16(acc[i * 4 + 6], acc[i * 4 + 7]));
  ptx::bar_sync<1 + kGroup, 128>();
  const char* tile = reinterpret_cast<const char*>(s.c[kGroup]);
#pragma unroll 4
  for (int i = 0; i < kPieces / 2; ++i) {
    const int item = t + i * 128, r = item / kPieces, piece = item % kPieces;
    const int column = place.column + piece * 8;
    if (kHalf * 64 + r < place.num_rows && column < p.D)
      *reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(place.row + kHalf * 64 + r) * p.D + column) =
          *reinterpret_cast<const uint4*>(tile + r * (kN * sizeof(bf16)) + ((piece ^ (r & 7)) << 4));
  }
}

__device__ __forceinline__ void store_zeros(const DownParams& p, Place place) {
  for (int item = threadIdx.x % 128; item < kM * kPieces; item += 128) {
    const int row = item / kPieces, column = place.column + item % kPieces * 8;
    if (row < place.num_rows && column < p.D)
      *reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(place.row + row) * p.D + column) = uint4{};
  }
}

template <int kGroup>
__device__ __forceinline__ void consume(Shared& s, const DownParams& p) {
  const int steps = static_cast<int>(ceil_div(p.H, kK));
  const bool leader = threadIdx.x % 128 == 0;
  uint32_t count = kGroup * steps;
  uint32_t turns = 0;
  for (int tile = blockIdx.x + kGroup * gridDim.x;; tile += 2 * gridDim.x, ++turns) {
    const RowTile rows = p.rows(tile);
    if (rows.expert < 0) break;
    const Place place{static_cast<int>(rows.begin), static_cast<int>(rows.end - rows.begin),
                      static_cast<int>(tile % p.tiles_n()) * kN};
    if (rows.expert == p.num_experts) {  // padding comes last, so there are no more turns to take
      store_zeros(p, place);
      continue;
    }
    float top[kN / 2], bottom[kN / 2];
    ptx::mbar_wait(ptx::shared_address(&s.turn[kGroup]), (turns & 1) ^ (kGroup == 0));
#pragma unroll 1
    for (int k = 0; k < steps; ++k, ++count) {
      const int stage = stage_of(count);
      ptx::mbar_wait(ptx::shared_address(&s.full[stage]), parity_of(count));
      const uint64_t da = descriptor(ptx::shared_address(s.a[stage])),
                     db = descriptor(ptx::shared_address(s.b[stage]));
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < kK / 16; ++kk) {
        ptx::wgmma_bf16<kN>(top, da + kk * kDescriptorK16, db + kk * kDescriptorK16, (k | kk) != 0);
        ptx::wgmma_bf16<kN>(bottom, da + kDescriptor64Rows + kk * kDescriptorK16, db + kk * kDescriptorK16,
                            (k | kk) != 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (k && leader) ptx::mbar_arrive(ptx::shared_address(&s.empty[stage_of(count - 1)]));
    }
    if (leader) ptx::mbar_arrive(ptx::shared_address(&s.turn[kGroup ^ 1]));
    ptx::wgmma_wait<0>();
    if (leader) ptx::mbar_arrive(ptx::shared_address(&s.empty[stage_of(count - 1)]));
    count += steps;  // the other warpgroup's tile
    store<kGroup, 0>(s, top, p, place);
    store<kGroup, 1>(s, bottom, p, place);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    down_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap w2,
                const __grid_constant__ DownParams p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  Shared& s = *reinterpret_cast<Shared*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(ptx::shared_address(&s.full[i]), 1);
      ptx::mbar_init(ptx::shared_address(&s.empty[i]), 1);
    }
    ptx::mbar_init(ptx::shared_address(&s.turn[0]), 1);
    ptx::mbar_init(ptx::shared_address(&s.turn[1]), 1);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x / 32 == kProducer * 4) produce(s, a, w2, p);
  } else {
    ptx::setmaxnreg_inc<232>();
    group == 0 ? consume<0>(s, p) : consume<1>(s, p);
  }
#endif
}

}  // namespace

void launch_down_sm90(const void* a, const int* offs, const void* w2, int64_t num_rows, int num_experts,
                      int D, int H, void* y, int num_blocks, LaunchStream stream) {
  if (num_rows == 0 || D == 0) return;
  const uint64_t d = D, n = H, rows = num_rows, experts = num_experts;
  CUtensorMap map_a, map_w2;
  encode_tensor_map(&map_a, a, {2, {n, rows}, {n}, {kK, kM}});
  encode_tensor_map(&map_w2, w2, {3, {n, d, experts}, {n, d * n}, {kK, kN, 1}});
  launch(down_kernel, num_blocks, kThreads, kSharedBytes, stream, map_a, map_w2,
         DownParams{offs, static_cast<bf16*>(y), num_rows, num_experts, D, H});
}

}  // namespace fmoe_ext
