// What the Hopper kernels share. Their bodies are compiled for sm_90a only (and for the emulator).
//
// A tile in shared memory is cut into blocks of 64 columns that follow one another. In a block a row takes
// 128 bytes, and its 16-byte pieces are permuted by the 128-byte swizzle: TMA, cp.async, wgmma and stmatrix
// all meet in this layout. Blocks begin at multiples of 1024 bytes.
#pragma once

#include "grouped_rows.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FMOE_SM90A 1
#endif

namespace fmoe_ext {

constexpr int kBlockColumns = 64;
constexpr int kSm90Threads = 384;  // two warpgroups multiply, the third loads
constexpr int kProducer = 2;
constexpr size_t kSharedAlignment = 1024, kMaxSharedBytes = 232448;

__device__ __forceinline__ char* align_shared(char* p) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kSharedAlignment - 1) &
                                 ~(kSharedAlignment - 1));
}

// Where 16-byte piece `piece` of a row lies in a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int piece) {
  return piece / 8 * (kRows * 128) + row * 128 + (((piece ^ row) & 7) << 4);
}

// wgmma operands: a tile [rows, 64 k], or, along m or n, a tile [64 k, columns].
template <bool kAlongMN>
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  constexpr uint64_t kNextBlock = kAlongMN ? 8192 >> 4 : 1, kNext8Rows = 1024 >> 4, kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | kNextBlock << 16 | kNext8Rows << 32 |
         kSwizzle128 << 62;
}
template <bool kAlongMN>
constexpr int kDescriptorK16 = (kAlongMN ? 16 * 128 : 32) >> 4;  // 16 further along k
constexpr int kDescriptor64 = 8192 >> 4;                         // 64 further along m or n

// ---- the thread blocks of a cluster, one or two, take neighbouring tiles that share an operand. Each loads
// its part of it, for both of them by multicast; a stage is empty when the consumers of both have released
// it. One whose tile lies outside the result loads and releases all the same.
struct Cluster {
  int pairs;  // 1 where there are two blocks, 0 where there is one

  __device__ int rank() const { return static_cast<int>(blockIdx.x) & pairs; }
  __device__ int peer() const { return rank() ^ pairs; }
  __device__ int first_index() const { return static_cast<int>(blockIdx.x) >> pairs; }  // of tiles, in at()
  __device__ int index_step() const { return static_cast<int>(gridDim.x) >> pairs; }
  __device__ int part(int whole) const { return whole / 2 * rank(); }  // where this block's part begins
  template <class... C>
  __device__ __forceinline__ void load(uint32_t dst, const CUtensorMap& map, uint32_t bar,
                                       C... coordinates) const {
    if (pairs)
      ptx::tma_load_multicast(dst, &map, bar, 3, coordinates...);
    else
      ptx::tma_load(dst, &map, bar, coordinates...);
  }
  // Of a consumer warpgroup one thread releases a stage to each block: they are in its first warp.
  __device__ bool releases() const { return threadIdx.x % 128 <= pairs; }
  // By all threads, at the beginning and at the end: no block may end while the other can still write to it
  // or arrive at its barriers.
  __device__ static void sync() {
    __syncwarp();
    ptx::cluster_sync();
  }
};

// ---- the ring of stages between the warpgroup that loads and those that multiply. Blocks of k are counted
// through all tiles of a thread block; stage and parity follow from the count.
template <class T, int kRowsM, int kRowsN, int kDepth = 4>
struct Ring {
  static constexpr int kM = kRowsM, kN = kRowsN, kStages = kDepth;
  T a[kStages][kM * kBlockColumns];
  T b[kStages][kN * kBlockColumns];
  uint64_t full[kStages], empty[kStages];

  __device__ static int stage_of(uint32_t count) { return count % kStages; }
  __device__ void init(int loads, int consumers, const Cluster& cluster) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(ptx::shared_address(&full[i]), loads);
      ptx::mbar_init(ptx::shared_address(&empty[i]), consumers << cluster.pairs);
    }
  }
  __device__ void wait_full(uint32_t count) {
    ptx::mbar_wait(ptx::shared_address(&full[stage_of(count)]), count / kStages & 1);
  }
  __device__ void wait_empty(uint32_t count) {
    ptx::mbar_wait(ptx::shared_address(&empty[stage_of(count)]), (count / kStages & 1) ^ 1);
  }
  __device__ void release(uint32_t count) {  // by those of whom Cluster::releases() is true
    ptx::mbar_arrive_at(ptx::shared_address(&empty[stage_of(count)]), threadIdx.x % 128);
  }
  // In place of a product: takes part, but reads nothing.
  __device__ void pass_by(int steps, uint32_t& count, const Cluster& cluster) {
    for (int k = 0; cluster.releases() && k < steps; ++k) {
      wait_full(count + k);
      release(count + k);
    }
    __syncwarp();
    count += steps;
  }
};

// ---- tiles, in the order in which clusters take them
struct Tile {
  int expert;            // num_experts: padding; -1: there is no such tile
  int row, num_rows, n;  // its rows (none or fewer: outside the expert), and which tile of columns it is
};

// Row tiles of an expert in groups of kGroupRows rows. The blocks of a cluster take tiles that follow one
// another in rows.
template <int kRows>
struct RowTiles {
  static constexpr int kHeight = kRows;
  const int* offs;
  int64_t num_rows;
  int num_experts, tiles_n;
  Cluster cluster;

  __device__ __forceinline__ Tile at(int index) const {  // the whole warp
    const int pairs = cluster.pairs, span = kHeight << pairs, group = kGroupRows / kHeight >> pairs;
    const auto owner = find_tile_owner(offs, num_experts, num_rows, index / tiles_n, kHeight, pairs);
    if (owner.expert < 0) return {-1, 0, 0, 0};
    const auto place = tile_place(index - owner.first_tile * tiles_n,
                                  (owner.end - owner.begin + span - 1) / kHeight >> pairs, tiles_n, group);
    const int row = owner.begin + place.row * span + cluster.rank() * kHeight;
    return {owner.expert, row, min(owner.end - row, kHeight), place.column};
  }
};

// ---- loads by the 128 threads of a producer
// Rows, picked through an index, as an operand [128, 64 k].
template <class T>
struct RowGather {
  const T* base;
  const T* source[8];

  __device__ __forceinline__ static int first_row() { return threadIdx.x % 128 / 8; }  // and every 16th
  __device__ __forceinline__ void pick(const Rows<T>& rows, const Tile& tile) {
    base = rows.base;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = first_row() + 16 * i;
      source[i] = r < tile.num_rows ? rows.row(tile.row + r) : nullptr;
    }
  }
  __device__ __forceinline__ void copy(T* operand, int first_column, int width) const {
    const int piece = threadIdx.x % 8, column = first_column + piece * 8;
    const uint32_t dst = ptx::shared_address(operand) + tile_offset<128>(first_row(), piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool kept = source[i] && column < width;
      ptx::cp_async16(dst + i * 2048, kept ? source[i] + column : base, kept ? 16 : 0);
    }
  }
};

// The producer of a ring whose A operand is gathered; load_b(b, full, k, tile) starts the TMA loads of B.
template <class T, class R, class Tiles, class LoadB>
__device__ __forceinline__ void gather_rows(R& ring, const Tiles& tiles, const Rows<T>& rows, int width,
                                            const LoadB& load_b) {
  const int steps = static_cast<int>(ceil_div(width, kBlockColumns));
  RowGather<T> gather;
  uint32_t count = 0;
  for (int index = tiles.cluster.first_index();; index += tiles.cluster.index_step()) {
    const Tile tile = tiles.at(index);
    if (tile.expert < 0 || tile.expert == tiles.num_experts) break;
    gather.pick(rows, tile);
    for (int k = 0; k < steps; ++k, ++count) {
      const int stage = ring.stage_of(count);
      const uint32_t full = ptx::shared_address(&ring.full[stage]);
      ring.wait_empty(count);
      if (threadIdx.x % 128 == 0) {
        ptx::mbar_arrive_expect_tx(full, sizeof ring.b[0]);
        load_b(ptx::shared_address(ring.b[stage]), full, k * kBlockColumns, tile);
      }
      gather.copy(ring.a[stage], k * kBlockColumns, width);
      ptx::cp_async_mbar_arrive_noinc(full);
    }
  }
}
constexpr int kGatherArrivals = 128 + 1;  // on a full barrier

// ---- products by two warpgroups on one tile, 64 rows each; one without rows leaves the tensor cores to the
// other
template <class T, bool kAlongM, bool kAlongN, class R>
__device__ __forceinline__ void multiply(R& ring, float (&acc)[R::kN / 2], int group, bool has_rows,
                                         int steps, const Cluster& cluster, uint32_t& count) {
  if (!has_rows) {
    ring.pass_by(steps, count, cluster);
    // Nobody waits for a later phase of a barrier before those who release are there.
    if (group == 0)
      ptx::bar_sync<1, 128>();
    else
      ptx::bar_sync<2, 128>();
    return;
  }
  const bool releases = cluster.releases();
  for (int k = 0; k < steps; ++k, ++count) {
    ring.wait_full(count);
    ptx::fence_proxy_async();  // cp.async writes through the generic proxy
    const int stage = ring.stage_of(count);
    const uint64_t da = descriptor<kAlongM>(ptx::shared_address(ring.a[stage])) + group * kDescriptor64,
                   db = descriptor<kAlongN>(ptx::shared_address(ring.b[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockColumns / 16; ++kk)
      ptx::wgmma<T, kAlongM, kAlongN>(acc, da + kk * kDescriptorK16<kAlongM>,
                                      db + kk * kDescriptorK16<kAlongN>, (k | kk) != 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (k && releases) ring.release(count - 1);
  }
  ptx::wgmma_wait<0>();
  ptx::fence_accumulators(acc);
  if (releases) ring.release(count - 1);
}

// ---- results: each warp stages its 16 rows of a tile [64, kColumns] in shared memory, and after a
// __syncwarp stores them in whole lines value(piece, lower) packs what this thread holds of columns 8 piece
// .. 8 piece + 7: two elements of row lane / 4, or, when lower, of the row 8 below.
template <int kColumns, class Value>
__device__ __forceinline__ void stage_rows(void* tile, const Value& value) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  const uint32_t base = ptx::shared_address(tile);
#pragma unroll
  for (int i = 0; i < kColumns / 8; i += 2)
    ptx::stmatrix_x4(base + tile_offset<64>(row, i + lane / 16), value(i, false), value(i, true),
                     value(i + 1, false), value(i + 1, true));
}
template <class T, int kCount>
__device__ __forceinline__ uint32_t packed_accumulators(const float (&acc)[kCount], int piece, bool lower) {
  return pack<T>(acc[piece * 4 + lower * 2], acc[piece * 4 + lower * 2 + 1]);
}
// What is added to the columns of a tile, by piece of 8. Every lane reads two elements of each 8 pieces, in
// whole lines and ahead of the product; a shuffle brings each lane those of the columns that it holds.
template <class T, int kN>
struct TileBias {
  uint32_t pairs[kN / 64];

  // elements_of(piece) is where the 8 elements of a piece lie, or null: zeros.
  template <class ElementsOf>
  __device__ __forceinline__ void load(const ElementsOf& elements_of) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kN / 64; ++i) {
      const T* elements = elements_of(i * 8 + lane / 4);
      pairs[i] = elements ? *reinterpret_cast<const uint32_t*>(elements + lane % 4 * 2) : 0;
    }
  }
  __device__ __forceinline__ float2 of(int piece) const {
    return unpack<T>(__shfl_sync(kFullMask, pairs[piece / 8], piece % 8 * 4 + threadIdx.x % 4));
  }
};
// Copies what lies in the first `rows` rows and `columns` columns (a multiple of 8) of the tile to out.
template <class T, int kColumns>
__device__ __forceinline__ void store_rows(const void* tile, T* out, int64_t stride, int rows, int columns) {
  constexpr int kPieces = kColumns / 8;
  const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
  const uint32_t staged = ptx::shared_address(tile);
#pragma unroll 2
  for (int i = 0; i < kPieces / 2; ++i) {
    const int item = lane + i * 32, row = first + item / kPieces, piece = item % kPieces;
    const uint4 elements = ptx::ld_shared16(staged + tile_offset<64>(row, piece));
    if (row < rows && piece * 8 < columns)
      *reinterpret_cast<uint4*>(out + row * stride + piece * 8) = elements;
  }
}
// By 128 threads.
template <class T>
__device__ __forceinline__ void store_zeros(T* out, int64_t stride, int rows, int columns) {
  const int pieces = columns / static_cast<int>(kVec16<T>);
  for (int item = threadIdx.x % 128; item < rows * pieces; item += 128)
    *reinterpret_cast<uint4*>(out + item / pieces * stride + item % pieces * kVec16<T>) = uint4{};
}

// ---- host
// Calls body with a value of the C++ type of a 16-bit dtype.
template <class Body>
void dispatch_16bit(Dtype dtype, const Body& body) {
  if (dtype == Dtype::bf16) return body(__nv_bfloat16{});
  if (dtype == Dtype::f16) return body(__half{});
  throw std::runtime_error("fmoe_ext: the Hopper kernels take bfloat16 or float16 only");
}

template <class... Params, class... Args>
void launch_sm90(void (*kernel)(Params...), const Grid& grid, size_t shared_bytes, LaunchStream stream,
                 Args&&... args) {
  const int clusters = grid.num_blocks > grid.cluster ? grid.num_blocks / grid.cluster : 1;
  launch_clusters(grid.cluster, kernel, clusters * grid.cluster, kSm90Threads, shared_bytes, stream,
                  std::forward<Args>(args)...);
}

// Encodes the map of a 16-bit tensor with the 128-byte swizzle; throws when the driver refuses. Strides in
// elements.
struct TensorMapShape {
  int rank;
  uint64_t dims[5], strides[4];
  uint32_t box[5];
};
template <class T>
void encode_tensor_map(CUtensorMap* map, const void* base, const TensorMapShape& shape) {
#ifdef __CUDACC__
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (!encode)
    throw std::runtime_error(
        "fmoe_ext: the CUDA driver has no cuTensorMapEncodeTiled: version 12.0 is needed");
#else
  constexpr auto encode = emu::encode_tiled;
#endif
  constexpr auto kType =
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint64_t dims[5], strides[4];
  cuuint32_t box[5];
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < shape.rank; ++i) {
    dims[i] = shape.dims[i];
    box[i] = shape.box[i];
    if (i) strides[i - 1] = shape.strides[i - 1] * sizeof(T);
  }
  const CUresult result = encode(map, kType, shape.rank, const_cast<void*>(base), dims, strides, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("fmoe_ext: encoding a tensor map failed with CUresult " +
                             std::to_string(result));
}

}  // namespace fmoe_ext
