// What the portable products of one thread block share, acc [128, 128] += A [128, k] B [128, k]^T: a ring of
// stages of 64 bytes of k in shared memory, and cp.async that fills it.
//
// All 256 threads load and multiply. While a stage is multiplied, copies fill the two others: cp.async goes
// from global to shared memory without a register in between, so nothing is held while it is under way. One
// barrier a step does two things: the stage that has landed is there for everybody, and the one before, which
// nobody reads any more, may be filled. Accumulators stay in registers for the whole of k. A row that an
// index picks, or that is not there (zeros), costs the loader one pointer; the product does not know of it.
#pragma once

#include "grouped_rows.cuh"

namespace fmoe_ext {

constexpr int kGemmThreads = 256;

// An operand of a stage. Its rows run along k, [128][64 bytes], or along the outer dimension, [kK][128]. The
// 16-byte pieces of a row are permuted, so that pieces that a warp reads at once lie in different banks: one
// piece of 8 rows that follow one another (ldmatrix), for 4-byte types along k of every fourth row as well;
// of 4-byte types along the outer dimension two pieces of 4 rows.
template <typename T, bool kAlongOuter>
struct TileOperand {
  static constexpr int kOuter = 128, kK = 64 / sizeof(T), kBytes = kOuter * 64;
  static constexpr int kPieces = (kAlongOuter ? kOuter : kK) / kVec16<T>;  // of a row

  __device__ __forceinline__ static uint32_t offset(int row, int piece) {
    if constexpr (kAlongOuter)
      return (row * kPieces + (piece ^ (sizeof(T) == 2 ? row & 7 : (row & 3) * 2))) * 16;
    else if constexpr (sizeof(T) == 2)
      return (row * kPieces + (piece ^ (row >> 1 & 3))) * 16;
    else  // two rows are a line of 8 pieces
      return (row / 2 * 8 + ((row % 2 * 4 + piece) ^ (row >> 1 & 3) ^ (row >> 2 & 7))) * 16;
  }
};

// What a thread copies of an operand: one piece of each of two rows.
template <typename T, bool kAlongOuter>
struct TileLoader {
  using Operand = TileOperand<T, kAlongOuter>;
  static constexpr int kCopies = Operand::kBytes / 16 / kGemmThreads,
                       kRowStep = kGemmThreads / Operand::kPieces;

  __device__ __forceinline__ TileLoader(const Rows<T>& source, int64_t first_outer, int64_t first_k)
      : rows(source), outer(first_outer) {
    pick(kAlongOuter ? first_k : first_outer);
  }
  __device__ __forceinline__ static int row() { return threadIdx.x / Operand::kPieces; }
  __device__ __forceinline__ static int piece() { return threadIdx.x % Operand::kPieces; }
  __device__ __forceinline__ void pick(int64_t first) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) pointers[i] = rows.row(first + row() + i * kRowStep);
  }
  // Starts the copies of block k, and looks up the rows of the next one.
  __device__ __forceinline__ void copy(char* stage, int64_t k) {
    const int64_t column = (kAlongOuter ? outer : k) + piece() * kVec16<T>;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      char* const dst = stage + Operand::offset(row() + i * kRowStep, piece());
      const bool kept = pointers[i] && column < rows.width;
      if (rows.vectorised)
        ptx::cp_async16(ptx::shared_address(dst), kept ? pointers[i] + column : rows.base, kept ? 16 : 0);
      else
        copy_elements(dst, kept ? pointers[i] : nullptr, column);
    }
    if (kAlongOuter) pick(k + Operand::kK);
  }
  __device__ void copy_elements(char* dst, const T* source, int64_t column) {
    Vec<T, kVec16<T>> v{};
#pragma unroll
    for (int i = 0; i < kVec16<T>; ++i)
      if (source && column + i < rows.width) v.v[i] = source[column + i];
    *reinterpret_cast<Vec<T, kVec16<T>>*>(dst) = v;
  }

  const Rows<T>& rows;
  int64_t outer;
  const T* pointers[kCopies];
};

// The products of a block: Product multiplies the operands of a stage (multiply_stage) and stores the result.
template <typename T, class Product>
struct TileRing {
  using Element = T;
  static constexpr int kM = 128, kN = 128, kStages = 3, kOperand = TileOperand<T, true>::kBytes;

  __device__ static char* ring() {
    FMOE_SHARED_ARRAY(uint4, stages, kStages * 2 * kOperand / 16);
    return reinterpret_cast<char*>(stages);
  }

  // The product over k from k_begin on; the rows of A and B run along k, or along m and n. k_end must be
  // where the operands end along k (Rows::end or Rows::width): the last step may read past it, where they
  // give zeros.
  template <bool kAlongM, bool kAlongN>
  __device__ __forceinline__ void multiply(const Rows<T>& a, int64_t m, const Rows<T>& b, int64_t n,
                                           int64_t k_begin, int64_t k_end) {
    constexpr int kStep = TileOperand<T, true>::kK;
    char* const stages = ring();
    TileLoader<T, kAlongM> load_a(a, m, k_begin);
    TileLoader<T, kAlongN> load_b(b, n, k_begin);
    const int num_steps = static_cast<int>(ceil_div(k_end - k_begin, kStep));
    const auto load = [&](int step) {
      if (step < num_steps) {
        char* const stage = stages + step % kStages * 2 * kOperand;
        load_a.copy(stage, k_begin + static_cast<int64_t>(step) * kStep);
        load_b.copy(stage + kOperand, k_begin + static_cast<int64_t>(step) * kStep);
      }
      ptx::cp_async_commit();
    };
    for (int step = 0; step < kStages - 1; ++step) load(step);
    for (int step = 0; step < num_steps; ++step) {
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();  // this stage is there, and nobody reads the one before any more
      load(step + kStages - 1);
      const uint32_t stage = ptx::shared_address(stages + step % kStages * 2 * kOperand);
      static_cast<Product*>(this)->template multiply_stage<kAlongM, kAlongN>(stage, stage + kOperand);
    }
    ptx::cp_async_wait_all();
    __syncthreads();
  }
};

}  // namespace fmoe_ext
