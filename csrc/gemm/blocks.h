// What kernels take, in memory: blocks of rows (RowMajor), panels, tiles. kernels.h has their layouts;
// grouped.h and the operators place them in the memory of a chunk or a job.
#pragma once

#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "gemm/chunks.h"
#include "gemm/kernels.h"

namespace fmoe_ext::gemm {

constexpr int64_t kTileBytes = 8192;    // the largest tile of any instruction set, few rows included
constexpr int64_t kMaxPanelLanes = 32;  // the widest panel
static_assert(kMaxTileRows * kMaxPanelLanes * int64_t{sizeof(float)} <= kTileBytes);

inline const Stored* stored(const Tensor& t) { return static_cast<const Stored*>(t.const_data_ptr()); }
inline Stored* mutable_stored(const Tensor& t) { return static_cast<Stored*>(t.mutable_data_ptr()); }

// A block of rows, row-major. The stride of operands is an odd number of cache lines, so that the rows of a
// tile do not compete for the same lines of the first-level cache.
template <class Role>
struct RowMajorOf {
  Role* data;
  int64_t stride;  // in elements
  int64_t bytes;   // of one element

  static int64_t stride_for(const Kernels& kernels, int64_t columns) {
    return odd_lines(columns, kernels.operand_bytes);
  }
  static int64_t odd_lines(int64_t columns, int64_t bytes) {
    const int64_t line = 64 / bytes;
    return (divide_up(columns, line) | 1) * line;
  }
  Role* at(int64_t row, int64_t column = 0) const { return advance(data, row * stride + column, bytes); }
  RowMajorOf from(int64_t row) const { return {at(row), stride, bytes}; }
};
using RowMajor = RowMajorOf<Operand>;
using StoredRows = RowMajorOf<const Stored>;

// Tiles on the stack.
template <int64_t bytes = kTileBytes>
struct TileMemory {
  alignas(64) char data[bytes];
  Acc* tiles() { return reinterpret_cast<Acc*>(data); }
};

// While products with packed panels follow on each other: AMX keeps its registers for them.
class TileProducts {
 public:
  explicit TileProducts(const Kernels& kernels) : kernels_(kernels) {
    if (kernels.begin_tiles) kernels.begin_tiles();
  }
  ~TileProducts() {
    if (kernels_.end_tiles) kernels_.end_tiles();
  }
  TileProducts(const TileProducts&) = delete;
  TileProducts& operator=(const TileProducts&) = delete;

 private:
  const Kernels& kernels_;
};

// Panels of `lanes` lanes over `depth` values of k, one after another.
struct Panels {
  Operand* data;
  int64_t stride;  // in elements
  int64_t bytes;   // of one element

  static Panels in(char* memory, const Kernels& kernels, int64_t depth, int64_t lanes) {
    return {reinterpret_cast<Operand*>(memory), stride_for(kernels, depth, lanes), kernels.operand_bytes};
  }

  static int64_t stride_for(const Kernels& kernels, int64_t depth, int64_t lanes) {
    const int64_t slack = lanes == kernels.nr ? 0 : kPackSlack / kernels.operand_bytes;
    return divide_up(divide_up(depth, kernels.k_step) * kernels.k_step * lanes + slack, 16) * 16;
  }
  Operand* panel(int64_t i) const { return advance(data, i * stride, bytes); }
};

// A matrix [depth, columns] that is read as its transpose, mr columns at a time: packed, or rows as they lie.
struct Transposed {
  const Operand* data;
  int64_t next;    // elements from mr columns to the next
  int64_t stride;  // elements from one row to the next

  static Transposed of(const Kernels& kernels, const Panels& panels) {
    return {panels.data, panels.stride, kernels.mr * kernels.k_step};
  }
  static Transposed of(const Kernels& kernels, const RowMajor& rows, int64_t column) {
    return {rows.at(0, column), kernels.mr, rows.stride};
  }
};

// A depth that is not a multiple of k_step is padded with zeros.
inline void pad_depth(const Kernels& kernels, const RowMajor& rows, int64_t num_rows, int64_t depth) {
  const int64_t missing = divide_up(depth, kernels.k_step) * kernels.k_step - depth;
  for (int64_t r = 0; r < num_rows && missing > 0; ++r)
    std::fill_n(reinterpret_cast<char*>(rows.at(r, depth)), missing * rows.bytes, 0);
}

inline int64_t panel_bytes(const Kernels& kernels, int64_t depth, int64_t lanes) {
  return Panels::stride_for(kernels, depth, lanes) * kernels.operand_bytes;
}

}  // namespace fmoe_ext::gemm
