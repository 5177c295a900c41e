// F1: h = x_rows w1^T and a = silu(gate) up on Hopper. 128 rows x 128 gate and 128 up columns a tile.
//
// One producer warpgroup gathers the rows of x by cp.async and loads w1 by TMA; two consumer warpgroups
// multiply 64 rows each. The tensor map interleaves 8 gate rows of w1 with the matching 8 up rows, so that a
// thread's accumulators 8 i .. 8 i + 3 are gate and 8 i + 4 .. 8 i + 7 the matching up.
#include "sm90.cuh"

namespace fmoe_ext {
namespace {

constexpr int kM = 128, kN = 256, kK = kSwizzledK, kStages = 4;
constexpr int kColumns = kN / 2;  // of a, and of each half of h
constexpr int kThreads = 384;
constexpr int kProducer = 2;  // warpgroup

struct alignas(1024) Shared {
  bf16 a[kStages][kM * kK];
  bf16 b[kStages][kN * kK];
  bf16 c[2][64 * kColumns];
  uint64_t full[kStages], empty[kStages];
};
constexpr size_t kSharedBytes = sizeof(Shared) + kSharedAlignment;
static_assert(kSharedBytes <= 232448);

struct Stage {
  int index = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++index < kStages) return;
    index = 0;
    phase ^= 1;
  }
};

struct UpParams {
  const bf16* x;
  const int *row_idx, *offs;
  bf16 *h, *a;
  int64_t num_rows, num_choices;
  int num_experts, top_k, D, H;
  __device__ int tiles_n() const { return static_cast<int>(ceil_div(H, kColumns)); }
  __device__ RowTile rows(int64_t tile) const {
    return find_row_tile(offs, num_experts, num_rows, tile / tiles_n(), kM);
  }
};

__device__ __forceinline__ void produce(Shared& s, const CUtensorMap& w1, const UpParams& p) {
  const int t = threadIdx.x - kProducer * 128, chunk = t % 8, first = t / 8;  // 16 bytes of rows first + 16 i
  const uint32_t offset = first * 128 + ((chunk ^ (first & 7)) << 4);
  const int steps = static_cast<int>(ceil_div(p.D, kK));
  Stage stage;
  for (int64_t tile = blockIdx.x;; tile += gridDim.x) {
    const RowTile rows = p.rows(tile);
    if (rows.expert < 0 || rows.expert == p.num_experts) break;
    const int n = static_cast<int>(tile % p.tiles_n());
    const bf16* source[8];
    bool kept[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t r = rows.begin + first + 16 * i;
      const int64_t choice = r < rows.end ? p.row_idx[r] : -1;
      kept[i] = choice >= 0 && choice < p.num_choices;
      source[i] = p.x + (kept[i] ? choice / p.top_k * p.D : 0);
    }
    for (int k = 0; k < steps; ++k, stage.advance()) {
      const uint32_t full = ptx::shared_address(&s.full[stage.index]);
      ptx::mbar_wait(ptx::shared_address(&s.empty[stage.index]), stage.phase ^ 1);
      if (t == 0) {
        ptx::mbar_arrive_expect_tx(full, kN * kK * sizeof(bf16));
        ptx::tma_load(ptx::shared_address(s.b[stage.index]), &w1, full, k * kK, 0, 0, n * (kColumns / 8),
                      rows.expert);
      }
      const int column = k * kK + chunk * 8;
      const int bytes = column < p.D ? 16 : 0;  // D is a multiple of 8
      const uint32_t dst = ptx::shared_address(s.a[stage.index]) + offset;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        ptx::cp_async16(dst + i * 2048, source[i] + (bytes ? column : 0), kept[i] ? bytes : 0);
      ptx::cp_async_mbar_arrive_noinc(full);
    }
  }
  ptx::cp_async_wait_all();
}

__device__ __forceinline__ float rounded(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }
__device__ __forceinline__ float swiglu(float gate, float up) {  // of the values that backward will read
  const float g = rounded(gate);
  return g * rounded(up) * __fdividef(1.f, 1.f + __expf(-g));
}

enum Output { kGate, kUp, kActivated };

// Stages one output [64, 128] of this warpgroup in shared memory, swizzled in 16-byte pieces, and stores its
// valid part.
template <int kGroup, Output kOutput>
__device__ __forceinline__ void store(Shared& s, const float (&acc)[kN / 2], const UpParams& p,
                                      const RowTile& rows, int n) {
  const int t = threadIdx.x % 128, lane = t % 32;
  const int row = t / 32 * 16 + lane % 16, half = lane / 16;
  const uint32_t staged = ptx::shared_address(s.c[kGroup]) + row * 256;
  ptx::bar_sync<1 + kGroup, 128>();
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    uint32_t v[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int at = (i + q / 2) * 8 + q % 2 * 2;
      if constexpr (kOutput == kGate) v[q] = pack_bf16(acc[at], acc[at + 1]);
      if constexpr (kOutput == kUp) v[q] = pack_bf16(acc[at + 4], acc[at + 5]);
      if constexpr (kOutput == kActivated)
        v[q] = pack_bf16(swiglu(acc[at], acc[at + 4]), swiglu(acc[at + 1], acc[at + 5]));
    }
    ptx::stmatrix_x4(staged + ((((i + half) ^ (row & 7)) & 15) << 4), v[0], v[1], v[2], v[3]);
  }
  ptx::bar_sync<1 + kGroup, 128>();
  const int64_t stride = kOutput == kActivated ? p.H : 2 * p.H;
  bf16* out = (kOutput == kActivated ? p.a : p.h) + (kOutput == kUp ? p.H : 0) + n * kColumns;
  const int piece = t % 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = t / 16 + 8 * i;
    const int64_t global = rows.begin + kGroup * 64 + r;
    if (global < rows.end && n * kColumns + piece * 8 < p.H)
      *reinterpret_cast<uint4*>(out + global * stride + piece * 8) = *reinterpret_cast<const uint4*>(
          reinterpret_cast<const char*>(s.c[kGroup]) + r * 256 + ((piece ^ (r & 7)) << 4));
  }
}

template <int kGroup>
__device__ __forceinline__ void store_zeros(const UpParams& p, const RowTile& rows, int n) {
  const int t = threadIdx.x % 128, piece = t % 16;
  for (int r = t / 16; r < 64; r += 8) {
    const int64_t global = rows.begin + kGroup * 64 + r;
    if (global >= rows.end || n * kColumns + piece * 8 >= p.H) continue;
    const int64_t column = n * kColumns + piece * 8;
    *reinterpret_cast<uint4*>(p.a + global * p.H + column) = uint4{};
    *reinterpret_cast<uint4*>(p.h + global * 2 * p.H + column) = uint4{};
    *reinterpret_cast<uint4*>(p.h + global * 2 * p.H + p.H + column) = uint4{};
  }
}

template <int kGroup>
__device__ __forceinline__ void consume(Shared& s, const UpParams& p) {
  const int steps = static_cast<int>(ceil_div(p.D, kK));
  const bool leader = threadIdx.x % 128 == 0;
  float acc[kN / 2];
  Stage stage;
  for (int64_t tile = blockIdx.x;; tile += gridDim.x) {
    const RowTile rows = p.rows(tile);
    if (rows.expert < 0) break;
    const int n = static_cast<int>(tile % p.tiles_n());
    if (rows.expert == p.num_experts) {
      store_zeros<kGroup>(p, rows, n);
      continue;
    }
    int previous = -1;
    for (int k = 0; k < steps; ++k, stage.advance()) {
      ptx::mbar_wait(ptx::shared_address(&s.full[stage.index]), stage.phase);
      ptx::fence_proxy_async();  // cp.async wrote through the generic proxy
      const uint64_t da = descriptor(ptx::shared_address(s.a[stage.index])) + kGroup * kDescriptor64Rows;
      const uint64_t db = descriptor(ptx::shared_address(s.b[stage.index]));
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < kK / 16; ++kk)
        ptx::wgmma_bf16<kN>(acc, da + kk * kDescriptorK16, db + kk * kDescriptorK16, (k | kk) != 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (previous >= 0 && leader) ptx::mbar_arrive(ptx::shared_address(&s.empty[previous]));
      previous = stage.index;
    }
    ptx::wgmma_wait<0>();
    if (leader) ptx::mbar_arrive(ptx::shared_address(&s.empty[previous]));
    store<kGroup, kGate>(s, acc, p, rows, n);
    store<kGroup, kUp>(s, acc, p, rows, n);
    store<kGroup, kActivated>(s, acc, p, rows, n);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    up_swiglu_kernel(const __grid_constant__ CUtensorMap w1, const __grid_constant__ UpParams p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  Shared& s = *reinterpret_cast<Shared*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(ptx::shared_address(&s.full[i]), 128 + 1);
      ptx::mbar_init(ptx::shared_address(&s.empty[i]), 2);
    }
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<56>();
    produce(s, w1, p);
  } else {
    ptx::setmaxnreg_inc<224>();
    group == 0 ? consume<0>(s, p) : consume<1>(s, p);
  }
#endif
}

}  // namespace

void launch_up_swiglu_sm90(const void* x, const int* row_idx, const int* offs, const void* w1,
                           int64_t num_rows, int64_t num_choices, int top_k, int num_experts, int D, int H,
                           void* h, void* a, int num_blocks, LaunchStream stream) {
  if (num_rows == 0 || H == 0) return;
  const uint64_t d = D, n = H, experts = num_experts;
  CUtensorMap map;
  encode_tensor_map(
      &map, w1, {5, {d, 8, 2, n / 8, experts}, {d, n * d, 8 * d, 2 * n * d}, {kK, 8, 2, kColumns / 8, 1}});
  const UpParams params{static_cast<const bf16*>(x),
                        row_idx,
                        offs,
                        static_cast<bf16*>(h),
                        static_cast<bf16*>(a),
                        num_rows,
                        num_choices,
                        num_experts,
                        top_k,
                        D,
                        H};
  launch(up_swiglu_kernel, num_blocks, kThreads, kSharedBytes, stream, map, params);
}

}  // namespace fmoe_ext
