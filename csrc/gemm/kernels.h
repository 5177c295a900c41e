// The leaves of every matrix product on the CPU: one table of functions per element type and instruction set.
//
// A product C [M, N] = A [M, k] B [k, N] is computed in tiles of mr x nr that stay in registers over the
// whole of k. B is packed in panels of nr columns, [k][nr]. A is either row-major, or packed in panels of mr
// rows, [k][mr]. Operands are held in units of k_step consecutive k: a float, a double, or (vdpbf16ps, bfdot)
// a pair of bfloat16. Types that the instruction set cannot multiply are operands in float, rounded only when
// a result is stored.
//
// "Storage" is the element type of the tensors, "operand" the type that is multiplied, "acc" (float, or
// double for double) the type of sums, tiles and scales.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "activation.h"
#include "packed.h"

namespace fmoe_ext::gemm {

// Pre-activation h = tile + bias, rounded to storage, then a = curve(gate) [* up].
// A gated tile holds nr / 2 gate columns, then nr / 2 up columns; n counts columns of a.
struct ActForward {
  CurveKind curve;
  bool gated;
  const void* tile;  // acc [m, nr]
  int64_t m, n;
  const void* bias;  // storage, at the first gate column, or null
  void* h;           // storage, at the tile's corner, or null
  int64_t h_stride;
  int64_t up_offset;  // distance of an up column from its gate column in h and bias
  void* a;            // operand [m, n]
  int64_t a_stride;
};

// tile = dO W2, not yet weighted. dh = curve'(h) * scale * tile, a = scale * curve(h), dscale += <tile,
// curve(h)>.
struct ActBackward {
  CurveKind curve;
  bool gated;
  const void* tile;  // acc [m, nr]
  int64_t m, n;
  const void* h;  // storage, at the tile's corner
  int64_t h_stride;
  int64_t up_offset;
  const void* scale;  // acc [m], or null for 1
  void* dh;           // operand, at the tile's corner
  int64_t dh_stride;
  void* a;  // operand, or null
  int64_t a_stride;
  void* dscale;  // acc [m], or null
};

// min(gate, limit) activated by x sigmoid(alpha x), times up clamped to +-limit and increased by offset.
// A row has `width` gates and as many ups: gates first, or the two in turns.
struct ClampedGlu {
  double alpha, limit, offset;
  bool interleaved;
  bool clamps_activated;  // the activated gate is clamped, in place of the gate
  int64_t width;
};

// Products of packed columns with rows of A that are rounded to 8 bits; not in double.
struct IntegerKernels {
  int64_t most_rows;  // up to so many they are faster than others
  void (*round_rows)(PackedFormat format, int64_t m, int64_t k, const void* a, int64_t stride, void* rounded);
  // Tiles as of multiply_packed.
  void (*multiply)(int64_t m, int64_t k, const void* rounded, const PackedRow* columns, int64_t num_panels,
                   void* tiles);
};

struct Kernels {
  int64_t mr, nr, k_step;
  int64_t few_rows;             // up to so many rows of A, B with columns along k is better not packed
  int64_t few_rows_transposed;  // the same of B with rows along the lanes
  int64_t packed_rows;  // up to so many, a packed weight is better decoded in registers; none in double
  int64_t storage_bytes, operand_bytes, acc_bytes;

  // Operand rows in row-major order; k is padded with zeros to a multiple of k_step.
  void (*copy_rows)(const void* const* rows, int64_t num_rows, int64_t k, void* dst, int64_t stride);
  // One panel of B, [k][nr], from rows that are contiguous along k: rows[j] is column j, null is zero.
  void (*pack_columns)(const void* const* rows, int64_t k, void* dst);
  // Panels [k][lanes] from rows that are contiguous along the lanes: rows[i] is position i of k.
  // lanes is mr or nr; n columns from col0 on are packed, missing lanes of the last panel are zero.
  void (*pack_rows)(const void* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes, void* dst,
                    int64_t panel_stride);
  // The same, from operands instead of storage.
  void (*pack_operand_rows)(const void* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                            void* dst, int64_t panel_stride);

  // tile [m, nr] = A B over k; A is row-major with a stride in elements, or transposed: a packed panel, or
  // (k_step 1) m columns of rows that are a stride apart.
  void (*multiply_row_major)(int64_t m, int64_t k, const void* a, int64_t stride, const void* panel,
                             void* tile);
  void (*multiply_transposed)(int64_t m, int64_t k, const void* a, int64_t stride, const void* panel,
                              void* tile);
  // The same for few rows of A, row-major, and B in storage. Columns that are contiguous along k: columns[j]
  // is column j, null is zero.
  void (*multiply_columns)(int64_t m, int64_t k, const void* a, int64_t stride, const void* const* columns,
                           void* tile);
  // Positions [begin, end) of k; rows of B, from `begin` on and ld elements apart, that are contiguous along
  // n: tiles [n / nr, rounded up][m, nr], added to unless begin is 0. A part that is not the last has a
  // multiple of 16 positions.
  void (*multiply_rows_of)(int64_t m, int64_t begin, int64_t end, int64_t k, const void* a, int64_t stride,
                           const void* b, int64_t ld, int64_t n, void* tiles);

  // Columns [begin, begin + n) of a packed row, in storage.
  void (*decode)(const PackedRow& row, int64_t begin, int64_t n, void* dst);
  // multiply_columns with packed columns, decoded in registers: nr columns of each panel, a tile for each.
  void (*multiply_packed)(int64_t m, int64_t k, const void* a, int64_t stride, const PackedRow* columns,
                          int64_t num_panels, void* tiles);

  IntegerKernels integers;

  // dst [m, n] = (tile + bias) * scale[row]; bias storage [n] or null, scale acc [m] or null.
  void (*store)(const void* tile, int64_t m, int64_t n, const void* bias, const void* scale, void* dst,
                int64_t stride);
  // dst [m, n] = alpha * tile + beta * src; src has the stride of dst, and may be dst.
  void (*add)(const void* tile, int64_t m, int64_t n, double alpha, const void* src, double beta, void* dst,
              int64_t stride);
  // dst [m, n] = tile, past the caches: for results too large to be read from them. After the last tile of a
  // job, end_stream.
  void (*stream)(const void* tile, int64_t m, int64_t n, void* dst, int64_t stride);
  void (*end_stream)();
  // sum [m, n] += tile, in acc.
  void (*accumulate)(const void* tile, int64_t m, int64_t n, void* sum, int64_t stride);
  void (*act_forward)(const ActForward& args);
  void (*act_backward)(const ActBackward& args);
  // Activated values [first, first + n) of a row h [2 width] -> out [width], and grad_h [2 width] of grad
  // [width].
  void (*clamped_glu)(const ClampedGlu& glu, const void* h, int64_t first, int64_t n, void* out);
  void (*clamped_glu_backward)(const ClampedGlu& glu, const void* grad, const void* h, int64_t first,
                               int64_t n, void* grad_h);

  void (*round)(const void* acc, int64_t n, void* dst);
  // sum [n] += sum over rows of scale[row] * operand[row]; scale null is 1. In double, or a sum of a million
  // rows would keep three digits.
  void (*sum_over_rows)(const void* operand, int64_t stride, int64_t num_rows, int64_t n, const void* scale,
                        double* sum);
  // out [n] = sum of the given rows, in their order.
  void (*sum_rows)(const void* const* rows, int64_t num_rows, int64_t n, void* out);
  // *out = <x, y>, all of storage but the result (acc).
  void (*dot)(const void* x, const void* y, int64_t n, void* out);
};

// Kernels of the chosen instruction set for float, double, bfloat16 or half.
const Kernels& kernels_for(torch::headeronly::ScalarType dtype);

// Panels of mr lanes are packed with whole-vector stores; this many bytes after each may be overwritten.
constexpr int64_t kPackSlack = 64;

}  // namespace fmoe_ext::gemm
