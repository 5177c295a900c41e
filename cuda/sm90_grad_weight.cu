// B2 and B5: the gradient of a weight on Hopper, out[e] = sum over the rows of expert e of a^T b. Rows are k,
// so both operands run along m and n. One of them may be picked through an index: the producer warpgroup
// gathers it by cp.async; the other comes by TMA, but for the last rows of an expert, which cp.async fills up
// with zeros: nothing of the next expert's rows, a NaN say, reaches this one. The blocks of a cluster share
// the tile that comes by TMA, which is the wide one: tiles are 128 x 256 where a is gathered and 256 x 128
// where b is, and those of a cluster follow one another along the gathered operand.
#include "sm90_host.cuh"

namespace fmoe_ext {
namespace {

constexpr int kGathered = kWeightTileGathered, kPlain = 2 * kGathered;  // columns of a tile
constexpr int kStagedColumns = 128;

template <class T, bool kGatherA>
struct alignas(1024) Shared {
  Ring<T, kGatherA ? kGathered : kPlain, kGatherA ? kPlain : kGathered> ring;
  alignas(1024) T c[2][64 * kStagedColumns];
};
template <class T>
constexpr size_t kSharedBytes = sizeof(Shared<T, true>) + kSharedAlignment;
static_assert(kSharedBytes<__half> <= kMaxSharedBytes);

struct WeightTile {
  int expert, m, n;  // first row and column
  RowRange rows;
};

template <class T>
struct GradWeight {
  Rows<T> a, b;
  const int *offs, *order;
  int num_experts;
  int64_t num_rows;
  int M, N, tiles_m, tiles_n;
  Cluster cluster;
  bool accumulate;

  __device__ int num_tiles() const { return num_experts * tiles_m * tiles_n; }  // of a cluster
  // The experts as `order` has them: those with most rows, whose tiles take longest, first. Their tiles as
  // RowTiles: tiles of m in groups that go through all tiles of n together.
  template <bool kGatherA>
  __device__ __forceinline__ WeightTile at(int index) const {
    const int pair = kGathered << cluster.pairs, height_m = kGatherA ? pair : kPlain,
              width_n = kGatherA ? kPlain : pair, second = cluster.rank() * kGathered;
    const int per_expert = tiles_m * tiles_n, expert = order[index / per_expert];
    const auto place = tile_place(index % per_expert, tiles_m, tiles_n, kGroupRows / height_m);
    const int m = place.row * height_m, n = place.column * width_n;
    return {expert, kGatherA ? m + second : m, kGatherA ? n : n + second,
            rows_of(offs, num_experts, num_rows, expert)};
  }
};

// As an operand [64 k, kColumns] of the columns from `first` on.
template <class T, int kColumns>
struct ColumnGather : PickedRows<T, 4> {
  __device__ __forceinline__ static int column(int first) { return first + threadIdx.x % 8 * 8; }
  __device__ __forceinline__ void pick(const Rows<T>& rows, int group, int first) {
    PickedRows<T, 4>::pick(rows, group, column(first));
  }
  __device__ __forceinline__ void copy(T* operand, int first, int width) const {
    const uint32_t dst = ptx::shared_address(operand) + tile_offset<64>(this->first_row(), threadIdx.x % 8);
#pragma unroll
    for (int block = 0; block < kColumns / kBlockColumns; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        PickedRows<T, 4>::copy(i, dst + block * kBlockBytes + i * 2048, block * kBlockColumns,
                               column(first) + block * kBlockColumns < width);
  }
};

template <class T, bool kGatherA>
__device__ __forceinline__ void produce(Shared<T, kGatherA>& s, const CUtensorMap& plain_map,
                                        const GradWeight<T>& p) {
  const Cluster cluster = p.cluster;
  const Rows<T>&gathered = kGatherA ? p.a : p.b, &plain = kGatherA ? p.b : p.a;
  static_assert(kPlain == 4 * kBlockColumns);
  const int part = cluster.part(kBlockColumns);
  const int warp_block = __shfl_sync(kFullMask, threadIdx.x % 128 / 32, 0) * kBlockColumns;
  ColumnGather<T, kGathered> gather;
  uint32_t count = 0;
  for (int index = cluster.first_index(); index < p.num_tiles(); index += cluster.index_step()) {
    const WeightTile tile = p.template at<kGatherA>(index);
    const int gathered_column = kGatherA ? tile.m : tile.n, plain_column = kGatherA ? tile.n : tile.m;
    const int begin = static_cast<int>(tile.rows.begin), end = static_cast<int>(tile.rows.end);
    gather.ask(gathered, begin, end);
    for (int row = begin; row < end; row += kBlockColumns, ++count) {
      const int stage = s.ring.stage_of(count);
      const uint32_t full = ptx::shared_address(&s.ring.full[stage]);
      T* const gathered_operand = kGatherA ? s.ring.a[stage] : s.ring.b[stage];
      T* const plain_operand = kGatherA ? s.ring.b[stage] : s.ring.a[stage];
      const bool whole = row + kBlockColumns <= end;
      const int half = (row - begin) / kBlockColumns % 2;  // of the rows that were asked for at a time
      if (half == 0) {
        gather.take(gathered);
        gather.ask(gathered, row + 2 * kBlockColumns, end);
      }
      gather.pick(gathered, half * 4, gathered_column);
      s.ring.wait_empty(count);
      if (threadIdx.x % 32 == 0) {
        if (warp_block == 0) {
          if (whole)
            ptx::mbar_arrive_expect_tx(full, kPlain * kBlockColumns * sizeof(T));
          else  // for one another: neither block goes on before both have found the stage empty
            ptx::mbar_arrive_at(full, cluster.peer());
        }
        if (whole)  // a block of columns a warp, so that no warp gathers late
          cluster.load(ptx::shared_address(plain_operand) + (warp_block + part) * 128, plain_map, full,
                       plain_column + warp_block, row + part);
      }
      gather.copy(gathered_operand, gathered_column, static_cast<int>(gathered.width));
      if (!whole) {
        ColumnGather<T, kPlain> rest;
        rest.ask(plain, row, end);
        rest.take(plain);
        rest.pick(plain, 0, plain_column);
        rest.copy(plain_operand, plain_column, static_cast<int>(plain.width));
      }
      ptx::cp_async_mbar_arrive_noinc(full);
    }
  }
}

// 64 rows of a warpgroup's accumulators to out, of the operands' type, by way of shared memory.
template <class T, int kCount>
__device__ __forceinline__ void store(T* staged, const float (&acc)[kCount], T* out, int64_t stride, int rows,
                                      int columns, bool) {
#pragma unroll
  for (int first = 0; first < 2 * kCount; first += kStagedColumns) {
    stage_rows<kStagedColumns>(
        staged, [&](int i, bool lower) { return packed_accumulators<T>(acc, first / 8 + i, lower); });
    __syncwarp();
    store_rows<T, kStagedColumns>(staged, out + first, stride, rows, columns - first);
    __syncwarp();
  }
}
// Or to float32, straight: the pairs of four threads are a 32-byte sector.
template <class T, int kCount>
__device__ __forceinline__ void store(T*, const float (&acc)[kCount], float* out, int64_t stride, int rows,
                                      int columns, bool accumulate) {
  const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int row = first + 8 * lower;
    float* p = out + row * stride + lane % 4 * 2;
    if (row >= rows) continue;
#pragma unroll
    for (int piece = 0; piece < kCount / 4; ++piece) {
      if (piece * 8 >= columns) continue;
      float2 v{acc[piece * 4 + lower * 2], acc[piece * 4 + lower * 2 + 1]};
      float2& there = *reinterpret_cast<float2*>(p + piece * 8);
      if (accumulate) {
        const float2 old = there;
        v = {v.x + old.x, v.y + old.y};
      }
      there = v;
    }
  }
}

template <class T, class Out, bool kGatherA>
__device__ __forceinline__ void consume(Shared<T, kGatherA>& s, Out* out, const GradWeight<T>& p, int group) {
  constexpr int kHalves = decltype(s.ring)::kM / 128, kN = decltype(s.ring)::kN;
  const Cluster cluster = p.cluster;
  uint32_t count = 0;
  for (int index = cluster.first_index(); index < p.num_tiles(); index += cluster.index_step()) {
    const WeightTile tile = p.template at<kGatherA>(index);
    const int m = tile.m + group * (kHalves * 64), rows = p.M - m, columns = min(p.N - tile.n, kN);
    Out* place = out + (static_cast<int64_t>(tile.expert) * p.M + m) * p.N + tile.n;
    const int steps = static_cast<int>(ceil_div(tile.rows.end - tile.rows.begin, kBlockColumns));
    const bool inside = rows > 0 && columns > 0;
    if (steps == 0) {
      if (inside && !p.accumulate) store_zeros(place, p.N, min(rows, kHalves * 64), columns);
      continue;
    }
    float acc[kHalves][kN / 2];
    multiply<T, true, true, true>(s.ring, acc, group, inside, steps, cluster, count);
    if (!inside) continue;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      store(s.c[group], acc[half], place + half * 64 * static_cast<int64_t>(p.N), p.N, rows - half * 64,
            columns, p.accumulate);
  }
}

template <class T, class Out, bool kGatherA>
__global__ void __launch_bounds__(kSm90Threads, 1)
    grad_weight_kernel(const __grid_constant__ CUtensorMap plain_map, Out* out,
                       const __grid_constant__ GradWeight<T> p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  auto& s = *reinterpret_cast<Shared<T, kGatherA>*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  const Cluster cluster = p.cluster;
  if (threadIdx.x == 0) {
    s.ring.init(kGatherArrivals, 2, cluster);
    ptx::fence_mbar_init();
  }
  cluster.sync();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<56>();
    produce<T, kGatherA>(s, plain_map, p);
  } else {
    ptx::setmaxnreg_inc<224>();
    consume<T, Out, kGatherA>(s, out, p, group);
  }
  cluster.sync();
#endif
}

}  // namespace

void launch_grad_weight_sm90(Dtype dtype, const GroupedRows& a, const GroupedRows& b, const int* offs,
                             const int* order, int num_experts, int64_t num_rows, const WeightGrad& out,
                             const Grid& grid, LaunchStream stream) {
  if (num_experts == 0) return;
  if (a.index && b.index)
    throw std::runtime_error("fmoe_ext: launch_grad_weight_sm90 gathers one of its operands, not both");
  if (out.accumulate && !out.is_float)
    throw std::runtime_error("fmoe_ext: launch_grad_weight_sm90 accumulates into float32 only");
  dispatch_16bit(dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool gather_a = !b.index;
    const GroupedRows& plain = gather_a ? b : a;
    const uint64_t width = plain.width, rows = num_rows > 0 ? num_rows : 1;
    const uint32_t blocks = grid.cluster;
    const int64_t pair = kGathered * grid.cluster;
    CUtensorMap map;  // without rows it is never read through, but must have an address
    encode_tensor_map<T>(&map, num_rows > 0 ? plain.data : out.data,
                         {2, {width, rows}, {width}, {kBlockColumns, kBlockColumns / blocks}});
    const GradWeight<T> params{rows_from<T>(a, num_rows),
                               rows_from<T>(b, num_rows),
                               offs,
                               order,
                               num_experts,
                               num_rows,
                               static_cast<int>(a.width),
                               static_cast<int>(b.width),
                               static_cast<int>(ceil_div(a.width, gather_a ? pair : kPlain)),
                               static_cast<int>(ceil_div(b.width, gather_a ? kPlain : pair)),
                               {grid.cluster - 1},
                               out.accumulate};
    const auto start = [&](auto kernel, auto* data) {
      launch_sm90(kernel, grid, kSharedBytes<T>, stream, map, data, params);
    };
    if (out.is_float) {
      float* const data = static_cast<float*>(out.data);
      gather_a ? start(grad_weight_kernel<T, float, true>, data)
               : start(grad_weight_kernel<T, float, false>, data);
    } else {
      T* const data = static_cast<T*>(out.data);
      gather_a ? start(grad_weight_kernel<T, T, true>, data) : start(grad_weight_kernel<T, T, false>, data);
    }
  });
}

}  // namespace fmoe_ext
