// Products over the rows of each expert: which rows (segments, chunks), who computes what (jobs), through
// which tiles.
#pragma once

#include <vector>

#include "batch_invariant.h"
#include "checks.h"
#include "gemm/chunks.h"
#include "gemm/kernels.h"

namespace fmoe_ext::gemm {

constexpr int64_t kTileBytes = 2048;    // the largest tile of any instruction set, few rows included
constexpr int64_t kMaxPanelLanes = 32;  // the widest panel

// A block of rows, row-major. The stride of operands is an odd number of cache lines, so that the rows of a
// tile do not compete for the same lines of the first-level cache.
struct RowMajor {
  char* data;
  int64_t stride;  // in elements
  int64_t bytes;   // of one element

  static int64_t stride_for(const Kernels& kernels, int64_t columns) {
    return odd_lines(columns, kernels.operand_bytes);
  }
  static int64_t odd_lines(int64_t columns, int64_t bytes) {
    const int64_t line = 64 / bytes;
    return (divide_up(columns, line) | 1) * line;
  }
  char* at(int64_t row, int64_t column = 0) const { return data + (row * stride + column) * bytes; }
  RowMajor from(int64_t row) const { return {at(row), stride, bytes}; }
};

// Panels of `lanes` lanes over `depth` values of k, one after another.
struct Panels {
  char* data;
  int64_t stride;  // in elements
  int64_t bytes;   // of one element

  static int64_t stride_for(const Kernels& kernels, int64_t depth, int64_t lanes) {
    const int64_t slack = lanes == kernels.nr ? 0 : kPackSlack / kernels.operand_bytes;
    return divide_up(divide_up(depth, kernels.k_step) * kernels.k_step * lanes + slack, 16) * 16;
  }
  char* panel(int64_t i) const { return data + i * stride * bytes; }
};

// A matrix [depth, columns] that is read as its transpose, mr columns at a time: packed, or rows as they lie.
struct Transposed {
  const char* data;
  int64_t next;    // bytes from mr columns to the next
  int64_t stride;  // elements from one row to the next

  static Transposed of(const Kernels& kernels, const Panels& panels) {
    return {panels.data, panels.stride * panels.bytes, kernels.mr * kernels.k_step};
  }
  static Transposed of(const Kernels& kernels, const RowMajor& rows, int64_t column) {
    return {rows.at(0, column), kernels.mr * rows.bytes, rows.stride};
  }
};

inline int64_t panel_bytes(const Kernels& kernels, int64_t depth, int64_t lanes) {
  return Panels::stride_for(kernels, depth, lanes) * kernels.operand_bytes;
}

// A range of panels (or of other equal parts) of one segment.
struct Job {
  const Segment* segment;
  int64_t begin, end, group;
};

// Splits `parts` parts of each segment, each part costing `rows * flops` and touching `bytes`, into jobs that
// are large enough to be worth a hand-over. Depends on the shapes only, never on the number of threads.
inline void add_jobs(std::vector<Job>& jobs, const Segment& segment, int64_t parts, int64_t flops,
                     int64_t bytes) {
  constexpr int64_t kJobFlops = 1 << 26, kJobBytes = 1 << 20;
  constexpr int64_t kTypicalRows = 256;  // groups are summed apart, so that their number is part of a result
  const int64_t rows = is_batch_invariant() ? kTypicalRows : segment.rows();
  const int64_t wanted = std::max(rows * flops * parts / kJobFlops, bytes * parts / kJobBytes);
  const int64_t groups = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(parts, 1));
  for (int64_t group = 0; group < groups; ++group)
    jobs.push_back({&segment, parts * group / groups, parts * (group + 1) / groups, group});
}

inline std::vector<Job> panel_jobs(const Kernels& kernels, const Chunk& chunk, int64_t num_panels,
                                   int64_t depth) {
  std::vector<Job> jobs;
  for (const Segment& segment : chunk.segments)
    add_jobs(jobs, segment, num_panels, 2 * depth * kernels.nr, depth * kernels.nr * kernels.storage_bytes);
  return jobs;
}

// Runs body(row_begin, row_end) over slices of the chunk's rows.
template <class Body>
void for_each_row_slice(int64_t begin, int64_t end, const Body& body) {
  constexpr int64_t kSlice = 64;
  for_each_job(divide_up(end - begin, kSlice),
               [&](int64_t job) { body(begin + job * kSlice, std::min(end, begin + (job + 1) * kSlice)); });
}

// Every tile of A^T B for A [depth, rows] and packed panels B [depth, columns]: epilogue(tile, row, column,
// m, n). With little depth the panels are small and the results large: these are then written row by row.
template <class Epilogue>
void multiply_transposed(const Kernels& kernels, const Transposed& a, int64_t rows, const Panels& b,
                         int64_t columns, int64_t depth, const Epilogue& epilogue) {
  alignas(64) char tile[kTileBytes];
  constexpr int64_t kLittle = 64;
  const int64_t block = depth <= kLittle ? kernels.mr : rows;
  for (int64_t begin = 0; begin < rows; begin += block)
    for (int64_t column = 0; column < columns; column += kernels.nr)
      for (int64_t row = begin; row < std::min(begin + block, rows); row += kernels.mr) {
        const int64_t m = std::min(kernels.mr, rows - row), n = std::min(kernels.nr, columns - column);
        kernels.multiply_transposed(m, depth, a.data + row / kernels.mr * a.next, a.stride,
                                    b.panel(column / kernels.nr), tile);
        epilogue(tile, row, column, m, n);
      }
  kernels.end_stream();
}

// The rows [column, column + nr) of weight [num_columns, depth], contiguous; null past the last.
inline void weight_columns(const Kernels& kernels, const char* weight, int64_t num_columns, int64_t depth,
                           int64_t column, const void** pointers) {
  for (int64_t j = 0; j < kernels.nr; ++j)
    pointers[j] = column + j < num_columns ? weight + (column + j) * depth * kernels.storage_bytes : nullptr;
}

// Fills panels [first, first + count) of weight [depth, num_columns], contiguous.
inline void pack_weight_rows(const Kernels& kernels, const char* weight, int64_t num_columns, int64_t depth,
                             int64_t first, int64_t count, const Panels& panels) {
  constexpr int64_t kStep = 64;  // a multiple of every k_step
  const void* rows[kStep];
  const int64_t column = first * kernels.nr, width = std::min(count * kernels.nr, num_columns - column);
  for (int64_t k = 0; k < depth; k += kStep) {
    const int64_t n = std::min(kStep, depth - k);
    for (int64_t i = 0; i < n; ++i) rows[i] = weight + (k + i) * num_columns * kernels.storage_bytes;
    kernels.pack_rows(rows, n, column, width, kernels.nr,
                      panels.data + k * kernels.nr * kernels.operand_bytes, panels.stride);
  }
}

// Whether a product of so many rows with weight^T, or with the weight itself, is better computed without
// packing the weight.
inline bool is_few(const Kernels& kernels, int64_t rows) {
  return rows <= kernels.few_rows && !is_batch_invariant();
}
inline bool is_few_transposed(const Kernels& kernels, int64_t rows) {
  return rows <= kernels.few_rows_transposed && !is_batch_invariant();
}

// How many of `rows` rows the next tile takes: equal parts, for a tile of one or two rows would wait for its
// sums.
inline int64_t rows_of_tile(const Kernels& kernels, int64_t rows) {
  return divide_up(rows, divide_up(rows, kernels.mr));
}

// Tiles of all rows of `a` with a packed panel: epilogue(tile, row, m) takes each.
template <class Epilogue>
void rows_by_packed_panel(const Kernels& kernels, int64_t rows, const RowMajor& a, int64_t depth,
                          const char* panel, const Epilogue& epilogue) {
  alignas(64) char tile[kTileBytes];
  for (int64_t row = 0, m; row < rows; row += m) {
    m = rows_of_tile(kernels, rows - row);
    kernels.multiply_row_major(m, depth, a.at(row), a.stride, panel, tile);
    epilogue(tile, row, m);
  }
}

// The same for the weight rows of one panel, which is packed first unless it is null: then the rows are few.
template <class Epilogue>
void rows_by_panel(const Kernels& kernels, int64_t rows, const RowMajor& a, int64_t depth,
                   const void* const* pointers, char* panel, const Epilogue& epilogue) {
  if (panel) {
    kernels.pack_columns(pointers, depth, panel);
    return rows_by_packed_panel(kernels, rows, a, depth, panel, epilogue);
  }
  alignas(64) char tile[kTileBytes];
  kernels.multiply_columns(rows, depth, a.data, a.stride, pointers, tile);
  epilogue(tile, 0, rows);
}

// Tiles of (the rows of one operand) times weight^T, column by column: columns(panel, pointers) names the nr
// weight rows of a panel (null is zero), epilogue(panel, tile, row, m) takes each tile. `a` starts at the
// segment's first row; row counts from there.
template <class Columns, class Epilogue>
void rows_by_weight(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                    const Columns& columns, const Epilogue& epilogue) {
  const void* pointers[kMaxPanelLanes];
  const int64_t rows = job.segment->rows();
  const bool few = is_few(kernels, rows);
  const ThreadBuffer buffer(few ? 0 : panel_bytes(kernels, depth, kernels.nr));
  for (int64_t p = job.begin; p < job.end; ++p) {
    columns(p, pointers);
    rows_by_panel(kernels, rows, a, depth, pointers, few ? nullptr : buffer.data(),
                  [&](const void* tile, int64_t row, int64_t m) { epilogue(p, tile, row, m); });
  }
}

constexpr int64_t kPackedPanels = 4;  // for which the rows of `a` are put in the order of a format once

// The same with packed rows and integers: the rows of `a` are rounded once a job.
template <class Columns, class Epilogue>
void rows_by_integers(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                      PackedFormat format, const Columns& columns, PackedRow* packed,
                      const Epilogue& epilogue) {
  constexpr int64_t kRows = 8;
  alignas(64) char tile[kPackedPanels * kRows * kMaxPanelLanes * 4];
  const int64_t rows = job.segment->rows(), row_bytes = integer_row_bytes(format, depth);
  const ThreadBuffer rounded(rows * row_bytes);
  kernels.integers.round_rows(format, rows, depth, a.data, a.stride, rounded.data());
  for (int64_t first = job.begin, count; first < job.end; first += count) {
    count = std::min(kPackedPanels, job.end - first);
    for (int64_t p = 0; p < count; ++p) columns(first + p, packed + p * kernels.nr);
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t m = std::min(kRows, rows - row);
      kernels.integers.multiply(m, depth, rounded.data() + row * row_bytes, packed, count, tile);
      for (int64_t p = 0; p < count; ++p) epilogue(first + p, tile + p * m * kernels.nr * 4, row, m);
    }
  }
}

// The same with packed rows: columns(panel, rows) names them, of up to kPackedPanels panels before the first
// of these tiles is taken. They are decoded into registers, or for more rows of `a` into a panel, once for
// all of them. integers: their format if the products are in integers, else none.
template <class Columns, class Epilogue>
void rows_by_packed(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                    PackedFormat integers, const Columns& columns, const Epilogue& epilogue) {
  alignas(64) char tile[2 * kTileBytes];
  PackedRow packed[kPackedPanels * kMaxPanelLanes];
  const void* pointers[kMaxPanelLanes];
  if (integers != PackedFormat::none && job.segment->rows() <= kernels.integers.most_rows &&
      !is_batch_invariant())
    return rows_by_integers(kernels, job, a, depth, integers, columns, packed, epilogue);
  const int64_t rows = job.segment->rows();
  const bool few = is_few(kernels, rows);
  if (few && rows <= kernels.packed_rows) {
    const int64_t tile_bytes = rows * kernels.nr * kernels.acc_bytes;
    const int64_t most = std::min<int64_t>(kPackedPanels, sizeof tile / tile_bytes);
    for (int64_t first = job.begin, count; first < job.end; first += count) {
      count = std::min(most, job.end - first);
      for (int64_t p = 0; p < count; ++p) columns(first + p, packed + p * kernels.nr);
      kernels.multiply_packed(rows, depth, a.data, a.stride, packed, count, tile);
      for (int64_t p = 0; p < count; ++p) epilogue(first + p, tile + p * tile_bytes, 0, rows);
    }
    return;
  }
  const int64_t row_bytes = RowMajor::odd_lines(depth, kernels.storage_bytes) * kernels.storage_bytes;
  const ThreadBuffer buffer(kernels.nr * row_bytes + (few ? 0 : panel_bytes(kernels, depth, kernels.nr)));
  char *decoded = buffer.data(), *panel = few ? nullptr : decoded + kernels.nr * row_bytes;
  for (int64_t p = job.begin; p < job.end; ++p) {
    columns(p, packed);
    for (int64_t j = 0; j < kernels.nr; ++j) {
      pointers[j] = packed[j].data ? decoded + j * row_bytes : nullptr;
      if (packed[j].data) kernels.decode(packed[j], 0, depth, decoded + j * row_bytes);
    }
    rows_by_panel(kernels, rows, a, depth, pointers, panel,
                  [&](const void* found, int64_t row, int64_t m) { epilogue(p, found, row, m); });
  }
}

// The same for the product with weight [depth, num_columns] itself, contiguous.
template <class Epilogue>
void rows_by_weight_transposed(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                               const char* weight, int64_t num_columns, const Epilogue& epilogue) {
  const int64_t rows = job.segment->rows(), nr = kernels.nr;
  if (is_few_transposed(kernels, rows)) {
    const int64_t column = job.begin * nr, tile_bytes = rows * nr * kernels.acc_bytes;
    const ThreadBuffer buffer((job.end - job.begin) * tile_bytes);
    char* tiles = buffer.data();
    kernels.multiply_rows_of(rows, 0, depth, depth, a.data, a.stride, weight + column * kernels.storage_bytes,
                             num_columns, std::min(job.end * nr, num_columns) - column, tiles);
    for (int64_t p = job.begin; p < job.end; ++p) epilogue(p, tiles + (p - job.begin) * tile_bytes, 0, rows);
    return;
  }
  // As many panels at once as make each weight row's piece worth a trip to memory.
  const int64_t group = std::min<int64_t>(4, job.end - job.begin);
  const ThreadBuffer buffer(group * panel_bytes(kernels, depth, nr));
  const Panels panels{buffer.data(), Panels::stride_for(kernels, depth, nr), kernels.operand_bytes};
  for (int64_t first = job.begin; first < job.end; first += group) {
    const int64_t count = std::min(group, job.end - first);
    pack_weight_rows(kernels, weight, num_columns, depth, first, count, panels);
    for (int64_t p = 0; p < count; ++p)
      rows_by_packed_panel(
          kernels, rows, a, depth, panels.panel(p),
          [&](const void* tile, int64_t row, int64_t m) { epilogue(first + p, tile, row, m); });
  }
}

// The same with packed rows, `row(k)` each: a few of them are decoded at a time, of them the columns of the
// job.
template <class Row, class Epilogue>
void rows_by_packed_transposed(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                               const Row& row, int64_t num_columns, const Epilogue& epilogue) {
  const int64_t rows = job.segment->rows(), nr = kernels.nr;
  const bool few = is_few_transposed(kernels, rows);
  constexpr int64_t kStep = 64;  // rows of the weight at a time
  const int64_t group = few ? job.end - job.begin : std::min<int64_t>(4, job.end - job.begin);
  if (group <= 0) return;
  const int64_t row_bytes = RowMajor::odd_lines(group * nr, kernels.storage_bytes) * kernels.storage_bytes;
  const int64_t tile_bytes = rows * nr * kernels.acc_bytes;
  const ThreadBuffer buffer(kStep * row_bytes + group * (few ? tile_bytes : panel_bytes(kernels, depth, nr)));
  char *decoded = buffer.data(), *rest = decoded + kStep * row_bytes;
  const Panels panels{rest, Panels::stride_for(kernels, depth, nr), kernels.operand_bytes};
  const void* pointers[kStep];
  for (int64_t i = 0; i < kStep; ++i) pointers[i] = decoded + i * row_bytes;
  for (int64_t first = job.begin; first < job.end; first += group) {
    const int64_t count = std::min(group, job.end - first), column = first * nr;
    const int64_t width = std::min(count * nr, num_columns - column);
    for (int64_t k = 0; k == 0 || k < depth; k += kStep) {
      const int64_t n = std::min(kStep, depth - k);
      for (int64_t i = 0; i < n; ++i) kernels.decode(row(k + i), column, width, decoded + i * row_bytes);
      if (few)
        kernels.multiply_rows_of(rows, k, k + n, depth, a.data, a.stride, decoded,
                                 row_bytes / kernels.storage_bytes, width, rest);
      else
        kernels.pack_rows(pointers, n, 0, width, nr, panels.data + k * nr * kernels.operand_bytes,
                          panels.stride);
    }
    for (int64_t p = 0; p < count; ++p) {
      if (few) {
        epilogue(first + p, rest + p * tile_bytes, 0, rows);
        continue;
      }
      rows_by_packed_panel(
          kernels, rows, a, depth, panels.panel(p),
          [&](const void* tile, int64_t row, int64_t m) { epilogue(first + p, tile, row, m); });
    }
  }
}

}  // namespace fmoe_ext::gemm
