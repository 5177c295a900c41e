// B1 of docs/kernels.md, for products.h; contract in launchers.h: the gradient of h, what the activation is
// applied to, on Hopper. dA = dy_rows w2: a producer warpgroup gathers the rows of dy and loads w2 by TMA. dA
// stays in registers: the epilogue reads h, computes the activation again, and writes dh, the scaled
// activation (for the gradient of w2) and <dA, act(h)> by row and tile of columns.
//
// Each consumer warp works through its part of a tile alone, in units of 16 rows x 64 columns. Two units of h
// are on their way (TMA) while the tile is multiplied; the gradients take their place in shared memory. Tiles
// are 128 x 128, taken in turn (ping-pong: an epilogue runs beside the other warpgroup's product).
#include "activation.cuh"
#include "sm90_host.cuh"
#include "sm90_ping_pong.cuh"

namespace fmoe_ext {
namespace {

constexpr int kM = 128, kN = 128, kUnits = kN / kBlockColumns;
constexpr int kUnitRows = 16;
template <class T>
using Unit = T[64 * kBlockColumns];  // of the four warps of a group

template <class T>
struct alignas(1024) Shared : ping_pong::Shared<T, 128> {
  alignas(1024) Unit<T> unit[2][2][3];  // by group and unit: gate, up, scaled activation
  uint64_t loaded[2][2][4];             // by group, unit, warp
};
template <class T>
constexpr size_t kSharedBytes = sizeof(Shared<T>) + kSharedAlignment;
static_assert(kSharedBytes<__half> <= kMaxSharedBytes);

template <class T>
struct GradHidden {
  RowTiles<kM> tiles;
  Rows<T> dy;
  const int* row_idx;
  const float* weights;
  int64_t num_choices;
  T *dh, *scaled_a;
  float* dots;  // [R, tiles of columns], or null: <dA, act(h)>, which sum_dots_kernel adds up
  int D, H;
};

template <class T, CurveKind kCurve, bool kGated>
struct Epilogue {
  Shared<T>& s;
  const CUtensorMap& h;
  const GradHidden<T>& p;
  int group;
  uint32_t phases = 0;  // bit i: parity of loaded(i)

  __device__ static int warp() { return threadIdx.x % 128 / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ uint32_t loaded(int slot) const { return ptx::shared_address(&s.loaded[group][slot][warp()]); }
  __device__ int64_t width() const { return kGated ? 2 * static_cast<int64_t>(p.H) : p.H; }
  // How many rows of the tile this warp and those after it have in half 0 or 1.
  __device__ static int rows_left(const Tile& tile, int half) {
    return tile.num_rows - half * 64 - warp() * kUnitRows;
  }

  // One lane starts the load of h of a unit.
  __device__ void load(const Tile& tile, int half, int unit) {
    const int row = tile.row + half * 64 + warp() * kUnitRows, column = tile.n * kN + unit * kBlockColumns;
    const uint32_t bar = loaded(unit);
    const auto part = [&](int i) {
      return ptx::shared_address(s.unit[group][unit][i] + warp() * kUnitRows * kBlockColumns);
    };
    ptx::mbar_arrive_expect_tx(bar, (kGated ? 2 : 1) * kUnitRows * kBlockColumns * sizeof(T));
    ptx::tma_load(part(0), &h, bar, column, 0, row);
    if (kGated) ptx::tma_load(part(1), &h, bar, column, 1, row);
  }
  __device__ __forceinline__ void before(const Tile& tile) {
    if (lane() != 0 || rows_left(tile, 0) <= 0) return;
    for (int unit = 0; unit < kUnits; ++unit) load(tile, 0, unit);
  }

  // The epilogue of half a tile, called by ping_pong::consume. A thread holds two rows of its warp's 16: lane
  // / 4, and the one 8 below.
  template <int kHalf>
  __device__ __forceinline__ void store(const float (&acc)[kN / 2], const Tile& tile) {
    if (rows_left(tile, kHalf) <= 0) return;
    const int64_t first = tile.row + kHalf * 64 + warp() * kUnitRows;
    float scale[2], dot[2] = {0, 0};
    bool kept[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int r = lane() / 4 + 8 * lower;
      const int choice = r < rows_left(tile, kHalf) ? p.row_idx[first + r] : -1;
      kept[lower] = choice >= 0 && choice < p.num_choices;
      scale[lower] = !kept[lower] ? 0 : p.weights ? p.weights[choice] : 1;
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      ptx::mbar_wait(loaded(unit), phases >> unit & 1);
      phases ^= 1 << unit;
      differentiate(acc, unit, scale, kept, dot);
      __syncwarp();
      store_unit(tile, kHalf, unit);
      ptx::fence_proxy_async();  // before TMA writes here again
      __syncwarp();
      if (kHalf == 0 && lane() == 0 && rows_left(tile, 1) > 0) load(tile, 1, unit);
    }
    if (!p.dots) return;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int r = lane() / 4 + 8 * lower;
      float sum = dot[lower];
      sum += __shfl_xor_sync(kFullMask, sum, 1);
      sum += __shfl_xor_sync(kFullMask, sum, 2);
      if (lane() % 4 == 0 && r < rows_left(tile, kHalf)) p.dots[(first + r) * p.tiles.tiles_n + tile.n] = sum;
    }
  }

  // Turns h of a unit into its gradient, in place, and adds to the dot products of the two rows.
  __device__ __forceinline__ void differentiate(const float (&acc)[kN / 2], int unit, const float (&scale)[2],
                                                const bool (&kept)[2], float (&dot)[2]) {
    const int row = warp() * kUnitRows + lane() % 16;
    const uint32_t part[3] = {ptx::shared_address(s.unit[group][unit][0]),
                              ptx::shared_address(s.unit[group][unit][1]),
                              ptx::shared_address(s.unit[group][unit][2])};
#pragma unroll
    for (int piece = 0; piece < kBlockColumns / 8; piece += 2) {
      const uint32_t offset = tile_offset<64>(row, piece + lane() / 16);
      uint32_t gate[4], up[4] = {}, scaled[4];
      ptx::ldmatrix_x4<false>(gate, part[0] + offset);
      if (kGated) ptx::ldmatrix_x4<false>(up, part[1] + offset);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int lower = q % 2, at = (unit * 8 + piece + q / 2) * 4 + lower * 2;
        const float one = kept[lower] ? 1.f : 0.f;
        const float2 g = unpack<T>(kept[lower] ? gate[q] : 0);
        const float2 linear = kGated ? unpack<T>(kept[lower] ? up[q] : 0) : float2{one, one};
        using Up = ValueAndSlope<float>;
        const Up ux = kGated ? factor_of<kCurve>(linear.x) : Up{linear.x, 1};
        const Up uy = kGated ? factor_of<kCurve>(linear.y) : Up{linear.y, 1};
        const ValueAndSlope<float> x = activate_fast<kCurve>(g.x), y = activate_fast<kCurve>(g.y);
        const float dx = scale[lower] * acc[at], dy = scale[lower] * acc[at + 1];
        dot[lower] += acc[at] * x.value * ux.value + acc[at + 1] * y.value * uy.value;
        gate[q] = pack<T>(dx * x.slope * ux.value, dy * y.slope * uy.value);
        up[q] = pack<T>(dx * x.value * ux.slope, dy * y.value * uy.slope);
        scaled[q] =
            kept[lower] ? pack<T>(scale[lower] * x.value * ux.value, scale[lower] * y.value * uy.value) : 0;
      }
      ptx::stmatrix_x4(part[0] + offset, gate[0], gate[1], gate[2], gate[3]);
      if (kGated) ptx::stmatrix_x4(part[1] + offset, up[0], up[1], up[2], up[3]);
      ptx::stmatrix_x4(part[2] + offset, scaled[0], scaled[1], scaled[2], scaled[3]);
    }
  }

  __device__ __forceinline__ void store_unit(const Tile& tile, int half, int unit) {
    const int64_t row = tile.row + half * 64;
    const int column = tile.n * kN + unit * kBlockColumns, rows = tile.num_rows - half * 64,
              columns = p.H - column;
    const auto& parts = s.unit[group][unit];
    T* dh = p.dh + row * width() + column;
    store_rows<T, kBlockColumns>(parts[0], dh, width(), rows, columns);
    if (kGated) store_rows<T, kBlockColumns>(parts[1], dh + p.H, width(), rows, columns);
    store_rows<T, kBlockColumns>(parts[2], p.scaled_a + row * p.H + column, p.H, rows, columns);
  }

  __device__ __forceinline__ void store_zeros(const Tile& tile) {
    const int64_t row = tile.row;
    const int column = tile.n * kN, columns = min(p.H - column, kN);
    T* dh = p.dh + row * width() + column;
    fmoe_ext::store_zeros(dh, width(), tile.num_rows, columns);
    if (kGated) fmoe_ext::store_zeros(dh + p.H, width(), tile.num_rows, columns);
    fmoe_ext::store_zeros(p.scaled_a + row * p.H + column, p.H, tile.num_rows, columns);
  }
};

template <class T, CurveKind kCurve, bool kGated>
__global__ void __launch_bounds__(kSm90Threads, 1)
    grad_hidden_kernel(const __grid_constant__ CUtensorMap w2, const __grid_constant__ CUtensorMap h,
                       const __grid_constant__ GradHidden<T> p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  auto& s = *reinterpret_cast<Shared<T>*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    s.init(kGatherArrivals);
    for (int i = 0; i < 16; ++i) ptx::mbar_init(ptx::shared_address(&s.loaded[0][0][0] + i), 1);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<56>();
    gather_rows<T>(s.ring, p.tiles, p.dy, p.D, [&](uint32_t b, uint32_t full, int k, const Tile& tile) {
      for (int n = 0; n < kN; n += kBlockColumns)
        ptx::tma_load(b + n * 128, &w2, full, tile.n * kN + n, k, tile.expert);
    });
  } else {
    ptx::setmaxnreg_inc<224>();
    const int steps = static_cast<int>(ceil_div(p.D, kBlockColumns));
    Epilogue<T, kCurve, kGated> epilogue{s, h, p, group};
    ping_pong::consume<T, true, true>(s, p.tiles, group, steps, epilogue);
  }
  __syncthreads();  // no thread ends while its cp.async are under way
#endif
}

// dscale[choice of r] = the sum of row r of dots and of <dy, b2>, in one fixed order; one warp a row.
constexpr int kSumThreads = 256, kSumWarps = kSumThreads / 32;
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_dots_kernel(ActivationRows rows, const float* __restrict__ dots, int64_t num_dots,
                    const T* __restrict__ dy, const T* __restrict__ b2, int64_t D,
                    float* __restrict__ dscale) {
  const int lane = threadIdx.x % 32;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kSumWarps + threadIdx.x / 32; r < rows.num_rows;
       r += static_cast<int64_t>(gridDim.x) * kSumWarps) {
    const int64_t choice = rows.row_idx[r];
    const int expert = expert_of_row(rows.offs, rows.num_experts, r);
    if (choice < 0 || choice >= rows.num_choices || expert >= rows.num_experts) continue;
    float sum = 0;
    for (int64_t i = lane; i < num_dots; i += 32) sum += dots[r * num_dots + i];
    const int64_t dy_row = rows.dy_by_token ? choice / rows.top_k : r;
    for (int64_t d = lane; b2 && d < D; d += 32)
      sum += to_acc(dy[dy_row * D + d]) * to_acc(b2[expert * D + d]);
    sum = warp_sum(sum);
    if (lane == 0) dscale[choice] = sum;
  }
}

}  // namespace

int64_t num_hidden_dots_sm90(int H) { return ceil_div(H, kN); }

void launch_grad_hidden_sm90(Dtype dtype, CurveKind activation, bool gated, const void* dy,
                             const ActivationRows& rows, const void* w2, int D, int H, void* dh,
                             void* scaled_a, float* dots, const Grid& grid, LaunchStream stream) {
  if (rows.num_rows == 0) return;
  dispatch_16bit(dtype, [&](auto tag) {
    using T = decltype(tag);
    const uint64_t d = D, n = H, r = rows.num_rows, experts = rows.num_experts, parts = gated ? 2 : 1;
    CUtensorMap w2_map, h_map;
    encode_tensor_map<T>(&w2_map, w2, {3, {n, d, experts}, {n, d * n}, {kBlockColumns, kBlockColumns, 1}});
    // Gate and up apart: beyond H either reads zeros, not the other's columns.
    encode_tensor_map<T>(&h_map, rows.h, {3, {n, parts, r}, {n, parts * n}, {kBlockColumns, 1, kUnitRows}});
    const int* index = rows.dy_by_token ? rows.row_idx : nullptr;
    const GradHidden<T> params{
        {rows.offs, rows.num_rows, rows.num_experts, static_cast<int>(num_hidden_dots_sm90(H))},
        rows_from<T>({dy, D, index, rows.top_k, rows.num_choices}, rows.num_rows),
        rows.row_idx,
        static_cast<const float*>(rows.weights),
        rows.num_choices,
        static_cast<T*>(dh),
        static_cast<T*>(scaled_a),
        dots,
        D,
        H};
    dispatch_activation(activation, [&](auto kind) {
      const auto kernel =
          gated ? grad_hidden_kernel<T, kind.value, true> : grad_hidden_kernel<T, kind.value, false>;
      launch_sm90(kernel, grid, kSharedBytes<T>, stream, w2_map, h_map, params);
    });
  });
}

void launch_sum_dots(Dtype dtype, const ActivationRows& rows, const float* dots, int64_t num_dots,
                     const void* dy, const void* b2, int64_t D, float* dscale, LaunchStream stream) {
  if (rows.num_rows == 0) return;
  dispatch_16bit(dtype, [&](auto tag) {
    using T = decltype(tag);
    launch(sum_dots_kernel<T>, grid_for(ceil_div(rows.num_rows, kSumWarps)), kSumThreads, 0, stream, rows,
           dots, num_dots, static_cast<const T*>(dy), static_cast<const T*>(b2), D, dscale);
  });
}

}  // namespace fmoe_ext
