// The leaves of every matrix product on the CPU: one table of functions per element type and instruction set,
// with the contract of each. isa_kernels.h fills a table, kernels_for() picks one; the loops of grouped.h and
// the operators call its functions.
//
// A product C [M, N] = A [M, k] B [k, N] is computed in tiles of mr x nr whose sums are in registers, for
// kDepth units of k at a time (multiply.h). B is packed in panels of nr columns, [k][nr]. A is either
// row-major, or packed in panels of mr rows, [k][mr]. Operands are held in units of k_step consecutive k: a
// float, a double, or (vdpbf16ps, bfdot) a pair of bfloat16. AMX takes 16 such pairs of each of 16 rows at
// once: its k_step is 32, and its panels of mr rows are [k / 32][mr][32]. Types that the instruction set
// cannot multiply are operands in float, of values that the type can hold.
//
// Pointers are typed by the role of an element, not by its type, which depends on the dtype and the
// instruction set: Stored, the type of the tensors; Operand, the type that is multiplied; Acc (float, or
// double for double), the type of sums, tiles and scales. The roles have no members: elements_of()
// (multiply.h) gives the types.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <type_traits>

#include "activation.h"
#include "packed.h"

namespace fmoe_ext::gemm {

constexpr int64_t kMaxTileRows = 64;  // mr of any instruction set: their files assert it

struct Stored;
struct Operand;
struct Acc;
struct Rounded;  // rows of A in blocks of 8-bit codes: RoundedForQ8 or RoundedForQ4 of packed.h

// p, `elements` elements of `bytes` bytes further on.
template <class Role>
Role* advance(Role* p, int64_t elements, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Role>, const char, char>;
  return reinterpret_cast<Role*>(reinterpret_cast<Byte*>(p) + elements * bytes);
}

// Pre-activation h = tile + bias, rounded to storage, then a = curve(gate) [* up].
// A gated tile holds nr / 2 gate columns, then nr / 2 up columns; n counts columns of a.
struct ActForward {
  CurveKind curve;
  bool gated;
  const Acc* tile;  // [m, nr]
  int64_t m, n;
  const Stored* bias;  // at the first gate column, or null
  Stored* h;           // at the tile's corner, or null
  int64_t h_stride;
  int64_t up_offset;  // distance of an up column from its gate column in h and bias
  Operand* a;         // [m, n]
  int64_t a_stride;
};

// tile = dO W2, not yet weighted. With act(h) = curve(h), or curve(gate) times up's factor: dh = act'(h) *
// scale * tile, a = scale * act(h), dscale += <tile, act(h)>.
struct ActBackward {
  CurveKind curve;
  bool gated;
  const Acc* tile;  // [m, nr]
  int64_t m, n;
  const Stored* h;  // at the tile's corner
  int64_t h_stride;
  int64_t up_offset;
  const Acc* scale;  // [m], or null for 1
  Operand* dh;       // at the tile's corner
  int64_t dh_stride;
  Operand* a;  // or null
  int64_t a_stride;
  Acc* dscale;  // [m], or null
};

// min(gate, limit) activated by x sigmoid(alpha x), times up clamped to +-limit and increased by offset.
// A row has `width` gates and as many ups: gates first, or the two in turns if interleaved.
struct ClampedGlu {
  double alpha, limit, offset;
  bool interleaved;
  bool clamps_activated;  // the activated gate is clamped, instead of the gate
  int64_t width;
};

// Products of packed columns with rows of A that are rounded to 8 bits; not in double.
struct IntegerKernels {
  int64_t most_rows;  // of a segment, up to which these are faster than others
  void (*round_rows)(PackedFormat format, int64_t m, int64_t k, const Operand* a, int64_t stride,
                     Rounded* rounded);
  // Tiles as of multiply_packed.
  void (*multiply)(int64_t m, int64_t k, const Rounded* rounded, const PackedRow* columns, int64_t num_panels,
                   Acc* tiles);
};

struct Kernels {
  int64_t mr, nr, k_step;
  int64_t row_step;             // of a tile of many rows: parts of them are multiples
  int64_t few_rows;             // rows of A up to which B with columns along k is better not packed
  int64_t few_rows_transposed;  // the same of B with rows along the lanes
  int64_t packed_rows;          // up to which a packed weight is better decoded in registers; 0 in double
  int64_t storage_bytes, operand_bytes, acc_bytes;

  // Operand rows in row-major order; k is padded with zeros to a multiple of k_step.
  void (*copy_rows)(const Stored* const* rows, int64_t num_rows, int64_t k, Operand* dst, int64_t stride);
  // One panel of B, [k][nr], from rows that are contiguous along k: rows[j] is column j, null is zero.
  void (*pack_columns)(const Stored* const* rows, int64_t k, Operand* dst);
  // Panels [k][lanes] from rows that are contiguous along the lanes: rows[i] is position i of k.
  // lanes is mr or nr; n columns from col0 on are packed, missing lanes of the last panel are zero.
  void (*pack_rows)(const Stored* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                    Operand* dst, int64_t panel_stride);
  void (*pack_operand_rows)(const Operand* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                            Operand* dst, int64_t panel_stride);

  // tile [m, nr] = A B over k; A is row-major with a stride in elements, or transposed: a packed panel, or
  // (k_step 1) m columns of rows that are a stride apart.
  void (*multiply_row_major)(int64_t m, int64_t k, const Operand* a, int64_t stride, const Operand* panel,
                             Acc* tile);
  void (*multiply_transposed)(int64_t m, int64_t k, const Operand* a, int64_t stride, const Operand* panel,
                              Acc* tile);
  // The same for few rows of A, row-major. Columns that are contiguous along k: columns[j] is column j, null
  // is zero.
  void (*multiply_columns)(int64_t m, int64_t k, const Operand* a, int64_t stride,
                           const Stored* const* columns, Acc* tile);
  // The same for up to nr rows of A, packed by pack_columns() as if they were columns of B; the columns are
  // read as they lie. False, and nothing is done, unless none of the nr columns is null, those of each half
  // of a panel are equally far apart, and k is a multiple of k_step. Null where there is no such kernel.
  bool (*multiply_turned)(int64_t m, int64_t k, const Operand* rows, const Stored* const* columns, Acc* tile);
  int64_t most_turned_rows;  // of a segment, up to which this is faster
  // Positions [begin, end) of k; rows of B, from `begin` on and ld elements apart, that are contiguous along
  // n: tiles [n / nr, rounded up][m, nr], added to unless begin is 0. A part that is not the last has a
  // multiple of 16 positions.
  void (*multiply_rows_of)(int64_t m, int64_t begin, int64_t end, int64_t k, const Operand* a, int64_t stride,
                           const Stored* b, int64_t ld, int64_t n, Acc* tiles);

  // multiply_row_major with a chain of sums over the whole of k, where other products sum in parts; null for
  // pairs of bfloat16. And out [n] = exp(x - *largest), for x up to *largest.
  void (*multiply_in_order)(int64_t m, int64_t k, const Operand* a, int64_t stride, const Operand* panel,
                            Acc* tile);
  void (*exponentials)(const Acc* x, int64_t n, const Acc* largest, Acc* out);

  // Columns [begin, begin + n) of a packed row.
  void (*decode)(const PackedRow& row, int64_t begin, int64_t n, Stored* dst);
  // multiply_columns with packed columns, decoded in registers: nr columns of each panel, a tile for each.
  void (*multiply_packed)(int64_t m, int64_t k, const Operand* a, int64_t stride, const PackedRow* columns,
                          int64_t num_panels, Acc* tiles);

  IntegerKernels integers;

  // Around products with packed panels, on the thread that computes them; null where there is nothing to do.
  // Without them each product does it.
  void (*begin_tiles)();
  void (*end_tiles)();

  // dst [m, n] = (tile + bias) * scale[row]; bias [n] or null, scale [m] or null.
  void (*store)(const Acc* tile, int64_t m, int64_t n, const Stored* bias, const Acc* scale, Stored* dst,
                int64_t stride);
  // dst [m, n] = alpha * tile + beta * src; src has the stride of dst, and may be dst.
  void (*add)(const Acc* tile, int64_t m, int64_t n, double alpha, const Stored* src, double beta,
              Stored* dst, int64_t stride);
  // dst [m, n] = tile, past the caches: for results too large to be read from them. After the last tile of a
  // job, end_stream.
  void (*stream)(const Acc* tile, int64_t m, int64_t n, Stored* dst, int64_t stride);
  void (*end_stream)();
  // sum [m, n] += tile.
  void (*accumulate)(const Acc* tile, int64_t m, int64_t n, Acc* sum, int64_t stride);
  void (*act_forward)(const ActForward& args);
  void (*act_backward)(const ActBackward& args);
  // Activated values [first, first + n) of a row h [2 width] -> out [width], and grad_h [2 width] of grad
  // [width].
  void (*clamped_glu)(const ClampedGlu& glu, const Stored* h, int64_t first, int64_t n, Stored* out);
  void (*clamped_glu_backward)(const ClampedGlu& glu, const Stored* grad, const Stored* h, int64_t first,
                               int64_t n, Stored* grad_h);

  void (*round)(const Acc* acc, int64_t n, Stored* dst);
  // sum [n] += sum over rows of scale[row] * operand[row]; scale null is 1. In double, or a sum of a million
  // rows would keep three digits.
  void (*sum_over_rows)(const Operand* operand, int64_t stride, int64_t num_rows, int64_t n, const Acc* scale,
                        double* sum);
  // out [n] = sum of the given rows, in their order.
  void (*sum_rows)(const Stored* const* rows, int64_t num_rows, int64_t n, Stored* out);
  // *out = <x, y>
  void (*dot)(const Stored* x, const Stored* y, int64_t n, Acc* out);

  // Bytes of an element.
  template <class Role>
  constexpr int64_t element_bytes() const {
    if constexpr (std::is_same_v<Role, Stored>) return storage_bytes;
    if constexpr (std::is_same_v<Role, Operand>) return operand_bytes;
    if constexpr (std::is_same_v<Role, Acc>) return acc_bytes;
  }
  // p, `elements` elements further on.
  template <class Role>
  Role* at(Role* p, int64_t elements) const {
    return advance(p, elements, element_bytes<std::remove_const_t<Role>>());
  }
};

// Kernels of the chosen instruction set for float, double, bfloat16 or half.
const Kernels& kernels_for(torch::headeronly::ScalarType dtype);

// Panels of mr lanes are packed with whole-vector stores; this many bytes after each may be overwritten.
constexpr int64_t kPackSlack = 64;

}  // namespace fmoe_ext::gemm
