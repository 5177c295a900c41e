// F1 of docs/kernels.md, for products.h; contract in launchers.h: h = x_rows w1^T + b1 and a = act(h), or
// act(gate) up, on Hopper. One producer warpgroup gathers the rows of x by cp.async and loads w1 by TMA.
//
// In tiles of 128 x 256 of h two consumer warpgroups multiply 64 rows each. When gated, 128 of the columns
// are gate and 128 the matching up: the tensor map interleaves 8 rows of either half of w1, so that of the
// accumulators' pieces of 8 columns the even ones are gate and the odd ones up.
#include "activation.cuh"
#include "sm90_host.cuh"

namespace fmoe_ext {
namespace {

constexpr int kM = 128, kN = 256;

template <class T>
struct alignas(1024) Shared {
  Ring<T, kM, kN> ring;
  alignas(1024) T c[2][64 * kN / 2];  // of each consumer warpgroup, results on their way to memory
};
template <class T>
constexpr size_t kSharedBytes = sizeof(Shared<T>) + kSharedAlignment;
static_assert(kSharedBytes<__half> <= kMaxSharedBytes);

template <class T>
struct Up {
  RowTiles<kM> tiles;
  Rows<T> x;
  const T* b1;
  T *h, *a;  // h may be null: no backward will read it
  int D, H;
};

template <class T, CurveKind kCurve, bool kGated>
struct Consumer {
  static constexpr int kColumns = kGated ? kN / 2 : kN;  // of a in a tile
  static constexpr int kStaged = kColumns / 2;           // that are stored at a time

  Shared<T>& s;
  const Up<T>& p;
  int group;

  __device__ int64_t width() const { return kGated ? 2 * static_cast<int64_t>(p.H) : p.H; }

  __device__ __forceinline__ void run() {
    const int steps = static_cast<int>(ceil_div(p.D, kBlockColumns));
    uint32_t count = 0;
    for (int index = blockIdx.x;; index += gridDim.x) {
      const Tile tile = p.tiles.at(index);
      if (tile.expert < 0) break;
      if (tile.expert == p.tiles.num_experts) {
        store_padding(tile);
        continue;
      }
      const bool has_rows = tile.num_rows > group * 64;
      TileBias<T, kN> bias;
      bias.load([&](int piece) { return bias_of(tile, piece); });
      float acc[1][kN / 2];
      multiply<T, false, false, true>(s.ring, acc, group, has_rows, steps, count);
      if (has_rows) store(acc[0], bias, tile);
    }
  }

  __device__ __forceinline__ const T* bias_of(const Tile& tile, int piece) const {
    const int column = tile.n * kColumns + (kGated ? piece / 2 : piece) * 8;
    if (!p.b1 || column >= p.H) return nullptr;
    return p.b1 + tile.expert * width() + (kGated && piece % 2 ? p.H : 0) + column;
  }

  __device__ __forceinline__ void store(const float (&acc)[kN / 2], const TileBias<T, kN>& bias,
                                        const Tile& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t h[kN / 16][2];  // by piece, upper and lower row; rounded, as backward will read it
#pragma unroll
      for (int i = 0; i < kN / 16; ++i) {
        const int piece = half * (kN / 16) + i;
        const float2 b = bias.of(piece);
        h[i][0] = pack<T>(acc[piece * 4] + b.x, acc[piece * 4 + 1] + b.y);
        h[i][1] = pack<T>(acc[piece * 4 + 2] + b.x, acc[piece * 4 + 3] + b.y);
      }
      const auto gate = [&](int i, bool lower) { return h[kGated ? 2 * i : i][lower]; };
      const auto up = [&](int i, bool lower) { return h[2 * i + 1][lower]; };
      if (p.h) {
        store_columns(p.h, width(), half, tile, gate);
        if (kGated) store_columns(p.h + p.H, width(), half, tile, up);
      }
      store_columns(p.a, p.H, half, tile, [&](int i, bool lower) {
        const float2 g = unpack<T>(gate(i, lower));
        float2 u = kGated ? unpack<T>(up(i, lower)) : float2{1, 1};
        if (kGated) u = {factor_of<kCurve>(u.x).value, factor_of<kCurve>(u.y).value};
        return pack<T>(activate_fast<kCurve>(g.x).value * u.x, activate_fast<kCurve>(g.y).value * u.y);
      });
    }
  }
  // To the tile's rows of this warpgroup in out [R, stride], one half of its columns.
  template <class Value>
  __device__ __forceinline__ void store_columns(T* out, int64_t stride, int half, const Tile& tile,
                                                const Value& value) {
    T* staged = s.c[group];
    const int64_t row = tile.row + group * 64;
    const int column = tile.n * kColumns + half * kStaged;
    stage_rows<kStaged>(staged, value);
    __syncwarp();
    store_rows<T, kStaged>(staged, out + row * stride + column, stride, tile.num_rows - group * 64,
                           p.H - column);
    __syncwarp();
  }

  __device__ __forceinline__ void store_padding(const Tile& tile) {
    const int rows = min(tile.num_rows - group * 64, 64), column = tile.n * kColumns,
              columns = min(p.H - column, kColumns);
    const int64_t row = tile.row + group * 64;
    if (p.h) {
      T* h = p.h + row * width() + column;
      store_zeros(h, width(), rows, columns);
      if (kGated) store_zeros(h + p.H, width(), rows, columns);
    }
    store_zeros(p.a + row * p.H + column, p.H, rows, columns);
  }
};

template <class T, CurveKind kCurve, bool kGated>
__global__ void __launch_bounds__(kSm90Threads, 1)
    up_kernel(const __grid_constant__ CUtensorMap w1, const __grid_constant__ Up<T> p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    s.ring.init(kGatherArrivals, 2);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<56>();
    gather_rows<T>(s.ring, p.tiles, p.x, p.D, [&](uint32_t b, uint32_t full, int k, const Tile& tile) {
      if constexpr (kGated)
        ptx::tma_load(b, &w1, full, k, 0, 0, tile.n * (kN / 16), tile.expert);
      else
        ptx::tma_load(b, &w1, full, k, tile.n * kN, tile.expert);
    });
  } else {
    ptx::setmaxnreg_inc<224>();
    Consumer<T, kCurve, kGated>{s, p, group}.run();
  }
  __syncthreads();  // no thread ends while its cp.async are under way
#endif
}

template <class T, bool kGated>
void encode_w1(CUtensorMap* map, const void* w1, uint64_t d, uint64_t n, uint64_t experts) {
  if constexpr (kGated)
    encode_tensor_map<T>(
        map, w1,
        {5, {d, 8, 2, n / 8, experts}, {d, n * d, 8 * d, 2 * n * d}, {kBlockColumns, 8, 2, kN / 16, 1}});
  else
    encode_tensor_map<T>(map, w1, {3, {d, n, experts}, {d, n * d}, {kBlockColumns, kN, 1}});
}

}  // namespace

void launch_up_sm90(Dtype dtype, CurveKind activation, bool gated, const GroupedRows& x, const int* offs,
                    const void* w1, const void* b1, int64_t num_rows, int num_experts, int H, void* h,
                    void* a, const Grid& grid, LaunchStream stream) {
  if (num_rows == 0) return;
  dispatch_16bit(dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto start = [&](auto kind, auto is_gated) {
      constexpr bool kGated = decltype(is_gated)::value;
      constexpr CurveKind kCurve = decltype(kind)::value;
      const int D = static_cast<int>(x.width);
      const int tiles_n = static_cast<int>(ceil_div(H, Consumer<T, kCurve, kGated>::kColumns));
      CUtensorMap map;
      encode_w1<T, kGated>(&map, w1, D, H, num_experts);
      const Up<T> params{{offs, num_rows, num_experts, tiles_n},
                         rows_from<T>(x, num_rows),
                         static_cast<const T*>(b1),
                         static_cast<T*>(h),
                         static_cast<T*>(a),
                         D,
                         H};
      launch_sm90(up_kernel<T, kCurve, kGated>, grid, kSharedBytes<T>, stream, map, params);
    };
    dispatch_activation(activation, [&](auto kind) {
      if (gated)
        start(kind, std::true_type{});
      else
        start(kind, std::false_type{});
    });
  });
}

}  // namespace fmoe_ext
