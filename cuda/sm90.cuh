// What the Hopper kernels (sm90_*.cu) share on the device; sm90_host.cuh has what their launchers share.
// Their bodies are compiled for sm_90a only (and for the emulator). TMA is Hopper's copy engine: one thread
// starts the copy of a box of a tensor. wgmma is its matrix product by a warpgroup, with operands in shared
// memory.
//
// A thread block is three warpgroups of 128 threads that stay on their SM and take tile after tile. One
// loads: blocks of 64 k of both operands go into a ring of stages in shared memory, by TMA where the rows lie
// together and by cp.async where an index picks them. Two multiply: wgmma reads a stage by descriptor and
// adds to accumulators in registers. Two mbarriers a stage connect them: `full` completes when the loads of a
// stage have landed, `empty` when everybody has read it, so that loads run up to a ring ahead of the
// products, into the next tile too. A thread that loads needs few registers and one that multiplies many:
// setmaxnreg moves them (56 each for 128 threads and 224 for 256 fit into the 65,536 of an SM). The wgmma of
// a step is waited for one step later, so that the tensor cores always have the next one.
//
// A tile in shared memory is cut into blocks of 64 columns that follow one another. In a block a row takes
// 128 bytes, and its 16-byte pieces are permuted by the 128-byte swizzle: TMA, cp.async, wgmma and stmatrix
// all meet in this layout. Blocks begin at multiples of 1024 bytes.
#pragma once

#include "sm90_tiles.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FMOE_SM90A 1
#endif

namespace fmoe_ext {

constexpr int kBlockColumns = 64, kBlockBytes = 64 * 128;  // of 64 rows
constexpr int kSm90Threads = 384;                          // two warpgroups multiply, the third loads
constexpr int kProducer = 2;                               // the number of the warpgroup that loads
constexpr size_t kSharedAlignment = 1024, kMaxSharedBytes = 232448;  // 227 KiB: what a block may have

__device__ __forceinline__ char* align_shared(char* p) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kSharedAlignment - 1) &
                                 ~(kSharedAlignment - 1));
}

// Where 16-byte piece `piece` of a row lies in a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int piece) {
  return piece / 8 * (kRows * 128) + row * 128 + (((piece ^ row) & 7) << 4);
}

// What wgmma takes for an operand in shared memory, a tile [rows, 64 k] or, along m or n, [64 k, columns]:
// its address, two distances and the swizzle, in units of 16 bytes ("matrix descriptor" of the PTX manual).
template <bool kAlongMN>
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  constexpr uint64_t kNextBlock = kAlongMN ? kBlockBytes >> 4 : 1, kNext8Rows = 1024 >> 4, kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | kNextBlock << 16 | kNext8Rows << 32 |
         kSwizzle128 << 62;
}
template <bool kAlongMN>
constexpr int kDescriptorK16 = (kAlongMN ? 16 * 128 : 32) >> 4;  // 16 further along k
constexpr int kDescriptor64 = kBlockBytes >> 4;                  // 64 further along m or n

// ---- the ring of stages between the warpgroup that loads and those that multiply. Blocks of k are counted
// through all tiles of a thread block; stage and parity follow from the count.
template <class T, int kRowsM, int kRowsN, int kDepth = 4>
struct Ring {
  static constexpr int kM = kRowsM, kN = kRowsN, kStages = kDepth;
  T a[kStages][kM * kBlockColumns];
  T b[kStages][kN * kBlockColumns];
  uint64_t full[kStages], empty[kStages];

  __device__ static int stage_of(uint32_t count) { return count % kStages; }
  __device__ void init(int loads, int consumers) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(ptx::shared_address(&full[i]), loads);
      ptx::mbar_init(ptx::shared_address(&empty[i]), consumers);
    }
  }
  __device__ void wait_full(uint32_t count) {
    ptx::mbar_wait(ptx::shared_address(&full[stage_of(count)]), count / kStages & 1);
  }
  __device__ void wait_empty(uint32_t count) {
    ptx::mbar_wait(ptx::shared_address(&empty[stage_of(count)]), (count / kStages & 1) ^ 1);
  }
  __device__ static bool releases() { return threadIdx.x % 128 == 0; }  // a thread of each warpgroup
  __device__ void release(uint32_t count) { ptx::mbar_arrive(ptx::shared_address(&empty[stage_of(count)])); }
  // Instead of a product: releases the stages of `steps` steps unread.
  __device__ void pass_by(int steps, uint32_t& count) {
    for (int k = 0; releases() && k < steps; ++k) {
      wait_full(count + k);
      release(count + k);
    }
    __syncwarp();
    count += steps;
  }
};

// ---- loads by the 128 threads of a producer
// The rows of a gathered operand, up to 128 at a time. They are asked for ahead of time, each by one lane of
// the warp that copies it: the index comes from memory while other rows are copied, and shuffles hand it
// around.
template <class T, int kCount>
struct PickedRows {
  const T* source[kCount];  // every 16th row from first_row() on
  uint32_t exist;           // bit i: row i
  int next, held;           // of a lane: what the index says of its row; the row itself, -1 if there is none

  __device__ __forceinline__ static int first_row() { return threadIdx.x % 128 / 8; }
  __device__ __forceinline__ void ask(const Rows<T>& rows, int first, int end) {
    const int lane = threadIdx.x % 32;
    const int row = first + threadIdx.x % 128 / 32 * 4 + lane / 4 * 16 + lane % 4;
    next = row;
    if (row >= end)
      next = -1;
    else if (rows.index)
      next = rows.index[row];
  }
  // What was asked for is here.
  __device__ __forceinline__ void take(const Rows<T>& rows) {
    held = rows.exists(next) ? rows.divisor.divide(next) : -1;
  }
  // Of what is here the rows from 16 * group on, each from a column on.
  __device__ __forceinline__ void pick(const Rows<T>& rows, int group, int column) {
    const char* const base = reinterpret_cast<const char*>(rows.base + column);
    const uint32_t stride = static_cast<uint32_t>(rows.stride * sizeof(T));  // an address is one multiply-add
    exist = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = __shfl_sync(kFullMask, held, (group + i) * 4 + threadIdx.x % 32 / 8);
      const uint32_t there = max(row, 0);
      source[i] = reinterpret_cast<const T*>(base + static_cast<uint64_t>(there) * stride);
      exist |= static_cast<uint32_t>(row >= 0) << i;
    }
  }
  // 16 bytes of row i, `further` columns on; zeros where there is no row, or no such column.
  __device__ __forceinline__ void copy(int i, uint32_t dst, int further, bool inside) const {
    ptx::cp_async16(dst, source[i] + further, exist >> i & 1 && inside ? 16 : 0);
  }
};

// As an operand [128, 64 k].
template <class T>
struct RowGather : PickedRows<T, 8> {
  __device__ __forceinline__ void copy(T* operand, int first_column, int width) const {
    const int piece = threadIdx.x % 8, column = first_column + piece * 8;
    const uint32_t dst = ptx::shared_address(operand) + tile_offset<128>(this->first_row(), piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) PickedRows<T, 8>::copy(i, dst + i * 2048, column, column < width);
  }
};

// The producer of a ring whose A operand is gathered; load_b(b, full, k, tile) starts the TMA loads of B.
template <class T, class R, class LoadB>
__device__ __forceinline__ void gather_rows(R& ring, const RowTiles<R::kM>& tiles, const Rows<T>& rows,
                                            int width, const LoadB& load_b) {
  const int steps = static_cast<int>(ceil_div(width, kBlockColumns));
  RowGather<T> gather;
  TileWalk walk(tiles);
  uint32_t count = 0;
  int index = blockIdx.x;
  const auto find = [&] {
    const Tile tile = walk.at(index);
    gather.ask(rows, tile.row, tile.row + tile.num_rows);
    index += gridDim.x;
    return tile;
  };
  for (Tile tile = find(), next; tile.expert >= 0 && tile.expert < tiles.num_experts; tile = next) {
    gather.take(rows);
    gather.pick(rows, 0, 0);
#pragma unroll 1
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
      if (k == 0) next = find();
    }
  }
}
constexpr int kGatherArrivals = 128 + 1;  // on a full barrier

// ---- products by two warpgroups on one tile, half of its rows each, in kHalves times 64; one without rows
// leaves the tensor cores to the other. kGathered: a part of the operands comes by cp.async.
template <class T, bool kAlongM, bool kAlongN, bool kGathered, class R, int kHalves>
__device__ __forceinline__ void multiply(R& ring, float (&acc)[kHalves][R::kN / 2], int group, bool has_rows,
                                         int steps, uint32_t& count) {
  static_assert(R::kM == kHalves * 128);
  if (!has_rows) {
    ring.pass_by(steps, count);
    // One thread has released the stages. The others wait for it here: a barrier has one bit for its phase,
    // and a thread that runs a phase ahead would take an old one for the new.
    if (group == 0)
      ptx::bar_sync<1, 128>();
    else
      ptx::bar_sync<2, 128>();
    return;
  }
  const bool releases = ring.releases();
  for (int k = 0; k < steps; ++k, ++count) {
    ring.wait_full(count);
    if (kGathered) ptx::fence_proxy_async();  // cp.async writes through the generic proxy
    // Of a ring whose stages are no power of two the compiler does not know that the descriptors are uniform.
    const int stage =
        R::kStages == 4 ? ring.stage_of(count) : __shfl_sync(kFullMask, ring.stage_of(count), 0);
    const uint64_t da = descriptor<kAlongM>(ptx::shared_address(ring.a[stage])) +
                        group * (kHalves * kDescriptor64),
                   db = descriptor<kAlongN>(ptx::shared_address(ring.b[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockColumns / 16; ++kk)
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        ptx::wgmma<T, kAlongM, kAlongN>(acc[half], da + kk * kDescriptorK16<kAlongM> + half * kDescriptor64,
                                        db + kk * kDescriptorK16<kAlongN>, (k | kk) != 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (k && releases) ring.release(count - 1);
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) ptx::fence_accumulators(acc[half]);
  if (releases) ring.release(count - 1);
}

// Both warpgroups on each tile of this block, 64 rows each. Of an epilogue it calls before(tile) ahead of a
// product, store<0>(acc, tile) after it, and store_zeros(tile) for padding; the tile is the half of a
// warpgroup, with no rows or fewer than none where it has none.
template <class T, bool kAlongN, bool kGathered, class R, class Epilogue>
__device__ __forceinline__ void multiply_together(R& ring, const RowTiles<R::kM>& tiles, int group, int steps,
                                                  Epilogue& epilogue) {
  TileWalk walk(tiles);
  uint32_t count = 0;
  for (int index = blockIdx.x;; index += gridDim.x) {
    Tile tile = walk.at(index);
    if (tile.expert < 0) break;
    tile.row += 64 * group;
    tile.num_rows = min(tile.num_rows - 64 * group, 64);
    if (tile.expert == tiles.num_experts) {
      epilogue.store_zeros(tile);
      continue;
    }
    epilogue.before(tile);
    float acc[1][R::kN / 2];
    multiply<T, false, kAlongN, kGathered>(ring, acc, group, tile.num_rows > 0, steps, count);
    epilogue.template store<0>(acc[0], tile);
  }
}

// ---- results: each warp stages its 16 rows of a tile [64, kColumns] in shared memory, and after a
// __syncwarp stores them in whole lines. value(piece, lower) packs what this thread holds of columns 8 piece
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
  static constexpr int kWords = (kN + 63) / 64;  // of a lane
  uint32_t pairs[kWords];

  // elements_of(piece) is where the 8 elements of a piece lie, or null: zeros.
  template <class ElementsOf>
  __device__ __forceinline__ void load(const ElementsOf& elements_of) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
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
    if (row < rows && piece * 8 < columns) ptx::st_global16(out + row * stride + piece * 8, elements);
  }
}
// By 128 threads.
template <class T>
__device__ __forceinline__ void store_zeros(T* out, int64_t stride, int rows, int columns) {
  const int pieces = columns / static_cast<int>(kVec16<T>);
  for (int item = threadIdx.x % 128; item < rows * pieces; item += 128)
    *reinterpret_cast<uint4*>(out + item / pieces * stride + item % pieces * kVec16<T>) = uint4{};
}

}  // namespace fmoe_ext
