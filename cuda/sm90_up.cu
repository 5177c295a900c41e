// F1: h = x_rows w1^T and a = silu(gate) up on Hopper. 128 rows x 128 gate and 128 up columns a tile.
//
// One producer warpgroup gathers the rows of x by cp.async and loads w1 by TMA; two consumer warpgroups
// multiply 64 rows each. The tensor map interleaves 8 gate rows of w1 with the matching 8 up rows, so that a
// thread's accumulators 8 i .. 8 i + 3 are gate and 8 i + 4 .. 8 i + 7 the matching up.
#include "sm90.cuh"

namespace fmoe_ext {
namespace {

constexpr int kM = 128, kN = 256;
constexpr int kColumns = kN / 2;  // of a, and of each half of h

template <class T>
struct alignas(1024) Shared {
  Ring<T, kM, kN> ring;
  alignas(1024) T c[2][64 * kColumns];
};
template <class T>
constexpr size_t kSharedBytes = sizeof(Shared<T>) + kSharedAlignment;
static_assert(kSharedBytes<__half> <= kMaxSharedBytes);

template <class T>
struct UpParams {
  RowTiles<kM> tiles;
  Rows<T> x;
  T *h, *a;
  int D, H;
};

template <class T>
__device__ __forceinline__ float rounded(float v) {
  return to_acc(round_to<T>(v));
}
template <class T>
__device__ __forceinline__ float swiglu(float gate, float up) {  // of the values that backward will read
  const float g = rounded<T>(gate);
  return g * rounded<T>(up) * __fdividef(1.f, 1.f + __expf(-g));
}

template <class T>
__device__ __forceinline__ void store(T* staged, const float (&acc)[kN / 2], const UpParams<T>& p,
                                      const Tile& tile, int group) {
  const int rows = tile.num_rows - group * 64, columns = min(p.H - tile.n * kColumns, kColumns);
  const int64_t row = tile.row + group * 64, width = 2 * static_cast<int64_t>(p.H);
  T* h = p.h + row * width + tile.n * kColumns;
  stage_rows<kColumns>(
      staged, [&](int i, bool lower) { return pack<T>(acc[i * 8 + lower * 2], acc[i * 8 + lower * 2 + 1]); });
  __syncwarp();
  store_rows<T, kColumns>(staged, h, width, rows, columns);
  __syncwarp();
  stage_rows<kColumns>(staged, [&](int i, bool lower) {
    return pack<T>(acc[i * 8 + 4 + lower * 2], acc[i * 8 + 5 + lower * 2]);
  });
  __syncwarp();
  store_rows<T, kColumns>(staged, h + p.H, width, rows, columns);
  __syncwarp();
  stage_rows<kColumns>(staged, [&](int i, bool lower) {
    const int gate = i * 8 + lower * 2, up = gate + 4;
    return pack<T>(swiglu<T>(acc[gate], acc[up]), swiglu<T>(acc[gate + 1], acc[up + 1]));
  });
  __syncwarp();
  store_rows<T, kColumns>(staged, p.a + row * p.H + tile.n * kColumns, p.H, rows, columns);
  __syncwarp();
}

template <class T>
__device__ __forceinline__ void store_padding(const UpParams<T>& p, const Tile& tile, int group) {
  const int rows = min(tile.num_rows - group * 64, 64), columns = min(p.H - tile.n * kColumns, kColumns);
  const int64_t row = tile.row + group * 64, width = 2 * static_cast<int64_t>(p.H);
  T* h = p.h + row * width + tile.n * kColumns;
  store_zeros(h, width, rows, columns);
  store_zeros(h + p.H, width, rows, columns);
  store_zeros(p.a + row * p.H + tile.n * kColumns, p.H, rows, columns);
}

template <class T>
__device__ __forceinline__ void consume(Shared<T>& s, const UpParams<T>& p, int group) {
  const Cluster cluster = p.tiles.cluster;
  const int steps = static_cast<int>(ceil_div(p.D, kBlockColumns));
  uint32_t count = 0;
  for (int index = cluster.first_index();; index += cluster.index_step()) {
    const Tile tile = p.tiles.at(index);
    if (tile.expert < 0) break;
    if (tile.expert == p.tiles.num_experts) {
      store_padding(p, tile, group);
      continue;
    }
    float acc[kN / 2];
    const bool has_rows = tile.num_rows > group * 64;
    multiply<T, false, false>(s.ring, acc, group, has_rows, steps, cluster, count);
    if (has_rows) store(s.c[group], acc, p, tile, group);
  }
}

template <class T>
__global__ void __launch_bounds__(kSm90Threads, 1)
    up_swiglu_kernel(const __grid_constant__ CUtensorMap w1, const __grid_constant__ UpParams<T> p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  const Cluster cluster = p.tiles.cluster;
  if (threadIdx.x == 0) {
    s.ring.init(kGatherArrivals, 2, cluster);
    ptx::fence_mbar_init();
  }
  cluster.sync();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<56>();
    gather_rows<T>(s.ring, p.tiles, p.x, p.D, [&](uint32_t b, uint32_t full, int k, const Tile& tile) {
      ptx::tma_load(b, &w1, full, k, 0, 0, tile.n * (kColumns / 8), tile.expert);
    });
  } else {
    ptx::setmaxnreg_inc<224>();
    consume(s, p, group);
  }
  cluster.sync();
#endif
}

}  // namespace

void launch_up_swiglu_sm90(Dtype dtype, const void* x, const int* row_idx, const int* offs, const void* w1,
                           int64_t num_rows, int64_t num_choices, int top_k, int num_experts, int D, int H,
                           void* h, void* a, int num_blocks, LaunchStream stream) {
  if (num_rows == 0) return;
  dispatch_16bit(dtype, [&](auto tag) {
    using T = decltype(tag);
    const uint64_t d = D, n = H, experts = num_experts;
    CUtensorMap map;
    encode_tensor_map<T>(
        &map, w1,
        {5, {d, 8, 2, n / 8, experts}, {d, n * d, 8 * d, 2 * n * d}, {kBlockColumns, 8, 2, kColumns / 8, 1}});
    const UpParams<T> params{{offs, num_rows, num_experts, static_cast<int>(ceil_div(H, kColumns)), {0}},
                             rows_from<T>({x, D, row_idx, top_k, num_choices}, num_rows),
                             static_cast<T*>(h),
                             static_cast<T*>(a),
                             D,
                             H};
    launch(up_swiglu_kernel<T>, num_blocks, kSm90Threads, kSharedBytes<T>, stream, map, params);
  });
}

}  // namespace fmoe_ext
