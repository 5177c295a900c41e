// B2 and B5 of docs/kernels.md, for products.h; contract in launchers.h: the gradient of a weight on Hopper,
// out[e] = sum over the rows of expert e of a^T b. Rows are k, so both operands run along m and n. One of
// them may be picked through an index: the producer warpgroup gathers it by cp.async; the other comes by TMA,
// but for the last rows of an expert, which cp.async fills up with zeros: nothing of the next expert's rows,
// a NaN say, reaches this one. The tile that comes by TMA is the wide one: tiles are 128 x 256 where a is
// gathered and 256 x 128 where b is. TMA stores the results, or adds them to float32 main gradients: one
// addition an element, so that the bits depend on no order.
#include "sm90_host.cuh"

namespace fmoe_ext {
namespace {

constexpr int kGathered = 128, kPlain = 2 * kGathered;  // columns of a tile

template <class T, bool kGatherA>
struct alignas(1024) Shared {
  Ring<T, kGatherA ? kGathered : kPlain, kGatherA ? kPlain : kGathered> ring;
  alignas(1024) T c[2][2][64 * kBlockColumns];  // of a warpgroup two buffers, of a warp 16 rows of each
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

  __device__ int num_tiles() const { return num_experts * tiles_m * tiles_n; }
  // The experts as `order` has them: those with most rows, whose tiles take longest, first. Their tiles as
  // RowTiles: tiles of m in groups that go through all tiles of n together.
  template <bool kGatherA>
  __device__ __forceinline__ WeightTile at(int index) const {
    constexpr int height_m = kGatherA ? kGathered : kPlain, width_n = kGatherA ? kPlain : kGathered;
    const int per_expert = tiles_m * tiles_n, expert = order[index / per_expert];
    const auto place = tile_place(index % per_expert, tiles_m, tiles_n, kGroupRows / height_m);
    return {expert, place.row * height_m, place.column * width_n,
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

// The producer: 64 rows of both operands a stage, one gathered, the other by TMA, or gathered where the
// expert ends inside of them.
template <class T, bool kGatherA>
__device__ __forceinline__ void produce(Shared<T, kGatherA>& s, const CUtensorMap& plain_map,
                                        const GradWeight<T>& p) {
  const Rows<T>&gathered = kGatherA ? p.a : p.b, &plain = kGatherA ? p.b : p.a;
  static_assert(kPlain == 4 * kBlockColumns);
  const int warp_block = __shfl_sync(kFullMask, threadIdx.x % 128 / 32, 0) * kBlockColumns;
  ColumnGather<T, kGathered> gather;
  uint32_t count = 0;
  for (int index = blockIdx.x; index < p.num_tiles(); index += gridDim.x) {
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
          else
            ptx::mbar_arrive(full);
        }
        if (whole)  // a block of columns a warp, so that no warp gathers late
          ptx::tma_load(ptx::shared_address(plain_operand) + warp_block * 128, &plain_map, full,
                        plain_column + warp_block, row);
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

// The rows of a warp on their way to out, 16 rows of 128 bytes at a time: TMA reads one buffer while the warp
// fills the other. What lies outside out is not written.
template <class T, class Out>
struct Results {
  static constexpr bool kAdds = std::is_same_v<Out, float>;  // a main gradient
  static constexpr int kColumns = 128 / sizeof(Out);
  T* const staged;  // both buffers of the warpgroup
  int buffer = 0;

  // The accumulators of columns first .. first + kColumns - 1.
  template <int kCount>
  __device__ __forceinline__ void stage(const float (&acc)[kCount], int first) const {
    T* const tile = staged + buffer * (64 * kBlockColumns);
    if constexpr (kAdds) {
      const int lane = threadIdx.x % 32, row = lane / 4;
      const bool odd = row & 1;  // columns in another order than in even rows, or both would meet in a bank
      const uint32_t dst =
          ptx::shared_address(tile) + (threadIdx.x % 128 / 32 * 16 + row) * 128 + lane % 2 * 8;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        const int piece = (2 * i + lane % 4 / 2) ^ row ^ (odd ? 4 : 0), even = first / 2 + 4 * i,
                  other = first / 2 + 4 * (i ^ 2);
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int j = 2 * lower;
          ptx::st_shared8(dst + lower * 1024 + piece * 16, {odd ? acc[other + j] : acc[even + j],
                                                            odd ? acc[other + j + 1] : acc[even + j + 1]});
        }
      }
    } else {
      stage_rows<kColumns>(
          tile, [&](int i, bool lower) { return packed_accumulators<T>(acc, first / 8 + i, lower); });
    }
  }
  // 64 rows of a warpgroup, of which the first has the coordinates {column, row, expert}.
  template <int kCount>
  __device__ __forceinline__ void store(const CUtensorMap& out, const float (&acc)[kCount], int column,
                                        int row, int expert, const GradWeight<T>& p) {
    const int warp = __shfl_sync(kFullMask, threadIdx.x % 128 / 32, 0);
    const bool issues = threadIdx.x % 32 == 0;
    row += warp * 16;
    if (row >= p.M) return;
#pragma unroll
    for (int first = 0; first < 2 * kCount; first += kColumns) {
      if (column + first >= p.N) return;
      if (issues) ptx::bulk_wait_read<1>();  // TMA has read this buffer, perhaps not yet the other
      __syncwarp();
      stage(acc, first);
      ptx::fence_proxy_async();
      __syncwarp();
      if (issues) {
        const uint32_t src = ptx::shared_address(staged) + buffer * kBlockBytes + warp * 2048;
        if constexpr (kAdds)
          ptx::tma_add(&out, src, column + first, row, expert);
        else
          ptx::tma_store(&out, src, column + first, row, expert);
        ptx::bulk_commit();
      }
      buffer ^= 1;
    }
  }
  __device__ __forceinline__ static void finish() {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
  }
};

// The consumers: half of the rows of a tile each.
template <class T, class Out, bool kGatherA>
__device__ __forceinline__ void consume(Shared<T, kGatherA>& s, const CUtensorMap& out_map, Out* out,
                                        const GradWeight<T>& p, int group) {
  constexpr int kHalves = decltype(s.ring)::kM / 128, kN = decltype(s.ring)::kN;
  Results<T, Out> results{s.c[group][0]};
  uint32_t count = 0;
  for (int index = blockIdx.x; index < p.num_tiles(); index += gridDim.x) {
    const WeightTile tile = p.template at<kGatherA>(index);
    const int m = tile.m + group * (kHalves * 64), rows = p.M - m, columns = min(p.N - tile.n, kN);
    const int steps = static_cast<int>(ceil_div(tile.rows.end - tile.rows.begin, kBlockColumns));
    const bool inside = rows > 0;
    if (steps == 0) {
      if (inside && !results.kAdds)
        store_zeros(out + (static_cast<int64_t>(tile.expert) * p.M + m) * p.N + tile.n, p.N,
                    min(rows, kHalves * 64), columns);
      continue;
    }
    float acc[kHalves][kN / 2];
    multiply<T, true, true, true>(s.ring, acc, group, inside, steps, count);
    if (!inside) continue;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      results.store(out_map, acc[half], tile.n, m + half * 64, tile.expert, p);
  }
  results.finish();
}

template <class T, class Out, bool kGatherA>
__global__ void __launch_bounds__(kSm90Threads, 1)
    grad_weight_kernel(const __grid_constant__ CUtensorMap plain_map,
                       const __grid_constant__ CUtensorMap out_map, Out* out,
                       const __grid_constant__ GradWeight<T> p) {
#ifdef FMOE_SM90A
  FMOE_DYNAMIC_SHARED(raw);
  auto& s = *reinterpret_cast<Shared<T, kGatherA>*>(align_shared(raw));
  const int group = __shfl_sync(kFullMask, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    s.ring.init(kGatherArrivals, 2);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (group == kProducer) {
    ptx::setmaxnreg_dec<56>();
    produce<T, kGatherA>(s, plain_map, p);
  } else {
    ptx::setmaxnreg_inc<224>();
    consume<T, Out, kGatherA>(s, out_map, out, p, group);
  }
  __syncthreads();  // no thread ends while its cp.async are under way
#endif
}

}  // namespace

void launch_grad_weight_sm90(Dtype dtype, const GroupedRows& a, const GroupedRows& b, const int* offs,
                             const int* order, int num_experts, int64_t num_rows, const WeightGrad& out,
                             const Grid& grid, LaunchStream stream) {
  if (num_experts == 0) return;
  if (a.index && b.index)
    throw std::runtime_error("fmoe_ext: launch_grad_weight_sm90 gathers one of its operands, not both");
  dispatch_16bit(dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool gather_a = !b.index;
    const GroupedRows& plain = gather_a ? b : a;
    const uint64_t width = plain.width, rows = num_rows > 0 ? num_rows : 1;
    CUtensorMap map;  // without rows it is never read through, but must have an address
    encode_tensor_map<T>(&map, num_rows > 0 ? plain.data : out.data,
                         {2, {width, rows}, {width}, {kBlockColumns, kBlockColumns}});
    const GradWeight<T> params{rows_from<T>(a, num_rows),
                               rows_from<T>(b, num_rows),
                               offs,
                               order,
                               num_experts,
                               num_rows,
                               static_cast<int>(a.width),
                               static_cast<int>(b.width),
                               static_cast<int>(ceil_div(a.width, gather_a ? kGathered : kPlain)),
                               static_cast<int>(ceil_div(b.width, gather_a ? kPlain : kGathered))};
    const auto start = [&](auto* data) {
      using Out = std::remove_pointer_t<decltype(data)>;
      const uint64_t m = a.width, n = b.width, experts = num_experts;
      CUtensorMap out_map;
      encode_tensor_map<Out>(&out_map, data,
                             {3, {n, m, experts}, {n, m * n}, {Results<T, Out>::kColumns, 16, 1}});
      launch_sm90(gather_a ? grad_weight_kernel<T, Out, true> : grad_weight_kernel<T, Out, false>, grid,
                  kSharedBytes<T>, stream, map, out_map, data, params);
    };
    out.accumulate ? start(static_cast<float*>(out.data)) : start(static_cast<T*>(out.data));
  });
}

}  // namespace fmoe_ext
