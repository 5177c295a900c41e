// Products over the rows of each expert, for the operators of MLPs and grouped_gemm. They cut the rows into
// chunks of segments (chunks.h); add_jobs() cuts the columns of each segment's result into jobs, and a thread
// computes one job by one of these:
//   rows_by_weight             A W^T, W the expert's weight in the dtype of the tensors
//   rows_by_packed             A W^T, W packed in few bits (packed.h)
//   rows_by_integers           the same for few rows of A, rounded to 8 bits; rows_by_packed() calls it
//   rows_by_weight_transposed  A W
//   rows_by_packed_transposed  A W, W packed
//   multiply_transposed        A^T B, for gradients of weights
// Each hands its tiles to the caller's epilogue, which adds the bias, activates and stores.
#pragma once

#include <vector>

#include "batch_invariant.h"
#include "checks.h"
#include "gemm/blocks.h"
#include "gemm/chunks.h"
#include "gemm/kernels.h"

namespace fmoe_ext::gemm {

// A range of panels (or of other equal parts) of the result of one segment.
struct Job {
  const Segment* segment;
  int64_t begin, end;  // parts
  int64_t group;       // number of the job in its segment
};

// Appends jobs for the `parts` equal parts of a segment's result. A part costs `flops` a row and touches
// `bytes`; a job has as many parts as make it worth a hand-over to a thread. How many follows from the shapes
// alone, never from the number of threads, for it decides in which groups sums are made.
inline void add_jobs(std::vector<Job>& jobs, const Segment& segment, int64_t parts, int64_t flops,
                     int64_t bytes) {
  constexpr int64_t kJobFlops = 1 << 26, kJobBytes = 1 << 20;
  // Batch invariant: the number of groups changes the last bits of sums, so it must not follow the rows.
  constexpr int64_t kTypicalRows = 256;
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

// Calls body(row_begin, row_end) for slices of the rows [begin, end), on all threads.
template <class Body>
void for_each_row_slice(int64_t begin, int64_t end, const Body& body) {
  constexpr int64_t kSlice = 64;
  for_each_job(divide_up(end - begin, kSlice),
               [&](int64_t job) { body(begin + job * kSlice, std::min(end, begin + (job + 1) * kSlice)); });
}

// Every tile of A^T B for A [depth, rows] and packed panels B [depth, columns]: epilogue(tile, row, column,
// m, n). With little depth the result is larger than the panels: tiles then go along its rows, to write
// memory in order.
template <class Epilogue>
void multiply_transposed(const Kernels& kernels, const Transposed& a, int64_t rows, const Panels& b,
                         int64_t columns, int64_t depth, const Epilogue& epilogue) {
  TileMemory tile;
  const TileProducts products(kernels);
  constexpr int64_t kLittle = 64;
  // With AMX (row_step > 1), a block is one tile high: its rows of A stay in the second-level cache for all
  // columns. With little depth the tiles are half as high, or each would write to more pages than the TLB
  // holds.
  const bool little = depth <= kLittle, has_steps = kernels.row_step > 1;
  const int64_t height = little && has_steps ? kernels.row_step / 2 : kernels.mr;
  const int64_t block = little || has_steps ? height : rows;
  for (int64_t begin = 0; begin < rows; begin += block)
    for (int64_t column = 0; column < columns; column += kernels.nr)
      for (int64_t row = begin; row < std::min(begin + block, rows); row += height) {
        const int64_t m = std::min(height, rows - row), n = std::min(kernels.nr, columns - column);
        const int64_t at = row / kernels.mr * a.next + row % kernels.mr * kernels.k_step;
        kernels.multiply_transposed(m, depth, kernels.at(a.data, at), a.stride, b.panel(column / kernels.nr),
                                    tile.tiles());
        epilogue(tile.tiles(), row, column, m, n);
      }
  kernels.end_stream();
}

// The rows [column, column + nr) of weight [num_columns, depth], contiguous; null past the last.
inline void weight_columns(const Kernels& kernels, const Stored* weight, int64_t num_columns, int64_t depth,
                           int64_t column, const Stored** pointers) {
  for (int64_t j = 0; j < kernels.nr; ++j)
    pointers[j] = column + j < num_columns ? kernels.at(weight, (column + j) * depth) : nullptr;
}

// weight_columns() for a gated weight [2 num_gates, depth]: nr / 2 gate rows from `column` on, then their up
// rows.
inline void gated_columns(const Kernels& kernels, const Stored* weight, int64_t num_gates, int64_t depth,
                          int64_t column, const Stored** pointers) {
  const int64_t half = kernels.nr / 2;
  for (int64_t j = 0; j < half; ++j) {
    const bool inside = column + j < num_gates;
    pointers[j] = inside ? kernels.at(weight, (column + j) * depth) : nullptr;
    pointers[half + j] = inside ? kernels.at(weight, (num_gates + column + j) * depth) : nullptr;
  }
}

// Fills panels [first, first + count) of weight [depth, num_columns], contiguous.
inline void pack_weight_rows(const Kernels& kernels, const Stored* weight, int64_t num_columns, int64_t depth,
                             int64_t first, int64_t count, const Panels& panels) {
  constexpr int64_t kStep = 64;  // a multiple of every k_step
  const Stored* rows[kStep];
  const int64_t column = first * kernels.nr, width = std::min(count * kernels.nr, num_columns - column);
  for (int64_t k = 0; k < depth; k += kStep) {
    const int64_t n = std::min(kStep, depth - k);
    for (int64_t i = 0; i < n; ++i) rows[i] = kernels.at(weight, (k + i) * num_columns);
    kernels.pack_rows(rows, n, column, width, kernels.nr, kernels.at(panels.data, k * kernels.nr),
                      panels.stride);
  }
}

// Whether a product of so many rows with weight^T (is_few) or weight (is_few_transposed) is faster if the
// weight is not packed. Never if batch invariant: both ways differ in the last bits.
inline bool is_few(const Kernels& kernels, int64_t rows) {
  return rows <= kernels.few_rows && !is_batch_invariant();
}
inline bool is_few_transposed(const Kernels& kernels, int64_t rows) {
  return rows <= kernels.few_rows_transposed && !is_batch_invariant();
}

// How many of `rows` rows the next tile takes: equal parts, because a last tile of one or two rows has too
// few sums to hide their latency. With AMX a part of row_step rows costs as much as a row, so parts are
// multiples of it.
inline int64_t rows_of_tile(const Kernels& kernels, int64_t rows) {
  const int64_t part = divide_up(rows, divide_up(rows, kernels.mr));
  return std::min(rows, divide_up(part, kernels.row_step) * kernels.row_step);
}

// Tiles of all rows of `a` with a packed panel: epilogue(tile, row, m) takes each.
template <class Epilogue>
void rows_by_packed_panel(const Kernels& kernels, int64_t rows, const RowMajor& a, int64_t depth,
                          const Operand* panel, const Epilogue& epilogue) {
  TileMemory tile;
  const TileProducts products(kernels);
  for (int64_t row = 0, m; row < rows; row += m) {
    m = rows_of_tile(kernels, rows - row);
    kernels.multiply_row_major(m, depth, a.at(row), a.stride, panel, tile.tiles());
    epilogue(tile.tiles(), row, m);
  }
}

// How many panels are packed before the rows pass by. With AMX at least 8 if the rows of `a` do not stay in
// the core's cache: they are then read from memory once for 8 panels, not once for each.
inline int64_t panels_at_once(const Kernels& kernels, int64_t rows, const RowMajor& a, int64_t wanted) {
  const bool stay = rows * a.stride * a.bytes <= 2 * kCoreBytes;
  return kernels.row_step == 1 || stay ? wanted : std::max<int64_t>(wanted, 8);
}

// Tiles of all rows of `a` with packed panels: epilogue(p, tile, row, m) takes each.
template <class Epilogue>
void rows_by_packed_panels(const Kernels& kernels, int64_t rows, const RowMajor& a, int64_t depth,
                           const Panels& panels, int64_t count, const Epilogue& epilogue) {
  const TileProducts products(kernels);
  const int64_t block = kernels.row_step > 1 ? kernels.mr : rows;
  for (int64_t first = 0; first < rows; first += block)
    for (int64_t p = 0; p < count; ++p)
      rows_by_packed_panel(
          kernels, std::min(block, rows - first), a.from(first), depth, panels.panel(p),
          [&](const Acc* tile, int64_t row, int64_t m) { epilogue(p, tile, first + row, m); });
}

// The two operands with their parts exchanged: the rows of `a` are packed, and multiply_turned() then reads
// the weight's rows as they lie. Unused, and multiply() is false, where there is no such kernel, where the
// rows are so many that packing the weight pays, so few that it is not packed anyway, or k is no multiple of
// k_step.
class TurnedRows {
 public:
  TurnedRows(const Kernels& kernels, int64_t rows, int64_t depth)
      : kernels_(kernels),
        rows_(rows),
        depth_(depth),
        is_used_(kernels.multiply_turned && rows <= kernels.most_turned_rows && !is_few(kernels, rows) &&
                 depth % kernels.k_step == 0) {}

  int64_t bytes() const {
    return is_used_ ? divide_up(rows_, kernels_.nr) * panel_bytes(kernels_, depth_, kernels_.nr) : 0;
  }

  void pack(const RowMajor& a, char* memory) {
    if (!is_used_) return;
    panels_ = Panels::in(memory, kernels_, depth_, kernels_.nr);
    const Stored* pointers[kMaxPanelLanes];
    for (int64_t row = 0; row < rows_; row += kernels_.nr) {
      for (int64_t i = 0; i < kernels_.nr; ++i)  // operands are what is stored
        pointers[i] = row + i < rows_ ? reinterpret_cast<const Stored*>(a.at(row + i)) : nullptr;
      kernels_.pack_columns(pointers, depth_, panels_.panel(row / kernels_.nr));
    }
  }

  // Tiles of all rows with these columns: epilogue(tile, row, m) takes each. False, before the first
  // epilogue, if the columns have to be packed.
  template <class Epilogue>
  bool multiply(const Stored* const* columns, const Epilogue& epilogue) const {
    if (!is_used_) return false;
    TileMemory tile;
    const TileProducts products(kernels_);
    for (int64_t row = 0; row < rows_; row += kernels_.nr) {
      const int64_t m = std::min(kernels_.nr, rows_ - row);
      if (!kernels_.multiply_turned(m, depth_, panels_.panel(row / kernels_.nr), columns, tile.tiles()))
        return false;
      epilogue(tile.tiles(), row, m);
    }
    return true;
  }

 private:
  const Kernels& kernels_;
  const int64_t rows_, depth_;
  const bool is_used_;
  Panels panels_{};
};

// Tiles of all rows of `a` with the weight rows `pointers`: epilogue(tile, row, m) takes each. They are
// packed into `panel` first, unless `turned` can take them as they lie, or the rows are few: then panel is
// null.
template <class Epilogue>
void rows_by_panel(const Kernels& kernels, int64_t rows, const RowMajor& a, const TurnedRows& turned,
                   int64_t depth, const Stored* const* pointers, Operand* panel, const Epilogue& epilogue) {
  if (turned.multiply(pointers, epilogue)) return;
  if (panel) {
    kernels.pack_columns(pointers, depth, panel);
    return rows_by_packed_panel(kernels, rows, a, depth, panel, epilogue);
  }
  TileMemory tile;
  kernels.multiply_columns(rows, depth, a.data, a.stride, pointers, tile.tiles());
  epilogue(tile.tiles(), 0, rows);
}

// Tiles of (the rows of one operand) times weight^T, column by column: columns(panel, pointers) names the nr
// weight rows of a panel (null is zero), epilogue(panel, tile, row, m) takes each tile. `a` starts at the
// segment's first row; row counts from there.
template <class Columns, class Epilogue>
void rows_by_weight(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                    const Columns& columns, const Epilogue& epilogue) {
  const Stored* pointers[kMaxPanelLanes];
  const int64_t rows = job.segment->rows();
  const bool few = is_few(kernels, rows);
  TurnedRows turned(kernels, rows, depth);
  const int64_t group = std::min(panels_at_once(kernels, rows, a, 1), job.end - job.begin);
  const int64_t bytes_of_panel = panel_bytes(kernels, depth, kernels.nr);
  const ThreadBuffer buffer(turned.bytes() + (few ? 0 : group * bytes_of_panel));
  const Panels panels = Panels::in(buffer.data() + turned.bytes(), kernels, depth, kernels.nr);
  turned.pack(a, buffer.data());
  if (group > 1 && !few && turned.bytes() == 0) {
    for (int64_t first = job.begin, count; first < job.end; first += count) {
      count = std::min(group, job.end - first);
      for (int64_t p = 0; p < count; ++p) {
        columns(first + p, pointers);
        kernels.pack_columns(pointers, depth, panels.panel(p));
      }
      rows_by_packed_panels(
          kernels, rows, a, depth, panels, count,
          [&](int64_t p, const Acc* tile, int64_t row, int64_t m) { epilogue(first + p, tile, row, m); });
    }
    return;
  }
  for (int64_t p = job.begin; p < job.end; ++p) {
    columns(p, pointers);
    rows_by_panel(kernels, rows, a, turned, depth, pointers, few ? nullptr : panels.data,
                  [&](const Acc* tile, int64_t row, int64_t m) { epilogue(p, tile, row, m); });
  }
}

constexpr int64_t kPackedTileBytes = 4096;  // of all tiles that one multiply_packed() computes
constexpr int64_t kPackedPanels = 4;        // most of one multiply_packed(), which arranges `a` once for all

// rows_by_packed() for few rows in a format that is multiplied in integers: the rows of `a` are rounded to 8
// bits, once for all columns of the job. packed: memory for the rows of kPackedPanels panels.
template <class Columns, class Epilogue>
void rows_by_integers(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                      PackedFormat format, const Columns& columns, PackedRow* packed,
                      const Epilogue& epilogue) {
  constexpr int64_t kRows = 8;
  TileMemory<kPackedPanels * kRows * kMaxPanelLanes * 4> tile;
  const int64_t rows = job.segment->rows(), row_bytes = integer_row_bytes(format, depth);
  const ThreadBuffer buffer(rows * row_bytes);
  auto* const rounded = reinterpret_cast<Rounded*>(buffer.data());
  kernels.integers.round_rows(format, rows, depth, a.data, a.stride, rounded);
  for (int64_t first = job.begin, count; first < job.end; first += count) {
    count = std::min(kPackedPanels, job.end - first);
    for (int64_t p = 0; p < count; ++p) columns(first + p, packed + p * kernels.nr);
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t m = std::min(kRows, rows - row);
      kernels.integers.multiply(m, depth, advance(rounded, row, row_bytes), packed, count, tile.tiles());
      for (int64_t p = 0; p < count; ++p)
        epilogue(first + p, kernels.at(tile.tiles(), p * m * kernels.nr), row, m);
    }
  }
}

// rows_by_weight() for a packed weight: columns(panel, packed) names the nr packed rows of a panel. It is
// called for up to kPackedPanels panels before the epilogue takes the first of their tiles. Few rows of `a`
// decode the weight in registers; for more it is decoded once, into memory. integers: the weight's format if
// it may be multiplied in integers, else none.
template <class Columns, class Epilogue>
void rows_by_packed(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                    PackedFormat integers, const Columns& columns, const Epilogue& epilogue) {
  TileMemory<kPackedTileBytes> tile;
  PackedRow packed[kPackedPanels * kMaxPanelLanes];
  const Stored* pointers[kMaxPanelLanes];
  if (integers != PackedFormat::none && job.segment->rows() <= kernels.integers.most_rows &&
      !is_batch_invariant())
    return rows_by_integers(kernels, job, a, depth, integers, columns, packed, epilogue);
  const int64_t rows = job.segment->rows();
  const bool few = is_few(kernels, rows);
  if (few && rows <= kernels.packed_rows) {
    const int64_t tile_size = rows * kernels.nr;
    const int64_t most = std::min<int64_t>(kPackedPanels, sizeof tile / (tile_size * kernels.acc_bytes));
    for (int64_t first = job.begin, count; first < job.end; first += count) {
      count = std::min(most, job.end - first);
      for (int64_t p = 0; p < count; ++p) columns(first + p, packed + p * kernels.nr);
      kernels.multiply_packed(rows, depth, a.data, a.stride, packed, count, tile.tiles());
      for (int64_t p = 0; p < count; ++p)
        epilogue(first + p, kernels.at(tile.tiles(), p * tile_size), 0, rows);
    }
    return;
  }
  const int64_t stride = RowMajor::odd_lines(depth, kernels.storage_bytes);
  const int64_t row_bytes = stride * kernels.storage_bytes;
  TurnedRows turned(kernels, rows, depth);
  const int64_t bytes = turned.bytes() + kernels.nr * row_bytes;
  const ThreadBuffer buffer(bytes + (few ? 0 : panel_bytes(kernels, depth, kernels.nr)));
  const RowMajorOf<Stored> decoded{reinterpret_cast<Stored*>(buffer.data() + turned.bytes()), stride,
                                   kernels.storage_bytes};
  auto* const panel = few ? nullptr : reinterpret_cast<Operand*>(buffer.data() + bytes);
  turned.pack(a, buffer.data());
  for (int64_t p = job.begin; p < job.end; ++p) {
    columns(p, packed);
    for (int64_t j = 0; j < kernels.nr; ++j) {
      pointers[j] = packed[j].data ? decoded.at(j) : nullptr;
      if (packed[j].data) kernels.decode(packed[j], 0, depth, decoded.at(j));
    }
    rows_by_panel(kernels, rows, a, turned, depth, pointers, panel,
                  [&](const Acc* found, int64_t row, int64_t m) { epilogue(p, found, row, m); });
  }
}

// Tiles of (the rows of one operand) times weight [depth, num_columns], contiguous; epilogue as above.
template <class Epilogue>
void rows_by_weight_transposed(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                               const Stored* weight, int64_t num_columns, const Epilogue& epilogue) {
  const int64_t rows = job.segment->rows(), nr = kernels.nr;
  if (is_few_transposed(kernels, rows)) {
    const int64_t column = job.begin * nr, tile_size = rows * nr;
    const ThreadBuffer buffer((job.end - job.begin) * tile_size * kernels.acc_bytes);
    auto* const tiles = reinterpret_cast<Acc*>(buffer.data());
    kernels.multiply_rows_of(rows, 0, depth, depth, a.data, a.stride, kernels.at(weight, column), num_columns,
                             std::min(job.end * nr, num_columns) - column, tiles);
    for (int64_t p = job.begin; p < job.end; ++p)
      epilogue(p, kernels.at(tiles, (p - job.begin) * tile_size), 0, rows);
    return;
  }
  // As many panels at once as make each weight row's piece worth a trip to memory.
  const int64_t group = std::min(panels_at_once(kernels, rows, a, 4), job.end - job.begin);
  const ThreadBuffer buffer(group * panel_bytes(kernels, depth, nr));
  const Panels panels = Panels::in(buffer.data(), kernels, depth, nr);
  for (int64_t first = job.begin; first < job.end; first += group) {
    const int64_t count = std::min(group, job.end - first);
    pack_weight_rows(kernels, weight, num_columns, depth, first, count, panels);
    rows_by_packed_panels(
        kernels, rows, a, depth, panels, count,
        [&](int64_t p, const Acc* tile, int64_t row, int64_t m) { epilogue(first + p, tile, row, m); });
  }
}

// rows_by_weight_transposed() for a packed weight, whose row k is row(k). kStep rows at a time are decoded,
// only the columns of the job. Few rows of `a` add their products at once, in `tiles`; for more the decoded
// rows are packed, and the product comes when the panels are complete.
template <class Row, class Epilogue>
void rows_by_packed_transposed(const Kernels& kernels, const Job& job, const RowMajor& a, int64_t depth,
                               const Row& row, int64_t num_columns, const Epilogue& epilogue) {
  const int64_t rows = job.segment->rows(), nr = kernels.nr;
  const bool few = is_few_transposed(kernels, rows);
  constexpr int64_t kStep = 64;  // weight rows decoded at a time
  const int64_t group = few ? job.end - job.begin : std::min<int64_t>(4, job.end - job.begin);
  if (group <= 0) return;
  const int64_t stride = RowMajor::odd_lines(group * nr, kernels.storage_bytes);
  const int64_t decoded_bytes = kStep * stride * kernels.storage_bytes, tile_size = rows * nr;
  const int64_t bytes_of_part = few ? tile_size * kernels.acc_bytes : panel_bytes(kernels, depth, nr);
  const ThreadBuffer buffer(decoded_bytes + group * bytes_of_part);
  const RowMajorOf<Stored> decoded{reinterpret_cast<Stored*>(buffer.data()), stride, kernels.storage_bytes};
  // Behind the decoded rows: the tiles if the rows are few, else the panels.
  auto* const tiles = reinterpret_cast<Acc*>(buffer.data() + decoded_bytes);
  const Panels panels = Panels::in(buffer.data() + decoded_bytes, kernels, depth, nr);
  const Stored* pointers[kStep];
  for (int64_t i = 0; i < kStep; ++i) pointers[i] = decoded.at(i);
  for (int64_t first = job.begin; first < job.end; first += group) {
    const int64_t count = std::min(group, job.end - first), column = first * nr;
    const int64_t width = std::min(count * nr, num_columns - column);
    // at depth 0 too: the tiles have to be set to zero
    for (int64_t k = 0; k == 0 || k < depth; k += kStep) {
      const int64_t n = std::min(kStep, depth - k);
      for (int64_t i = 0; i < n; ++i) kernels.decode(row(k + i), column, width, decoded.at(i));
      if (few)
        kernels.multiply_rows_of(rows, k, k + n, depth, a.data, a.stride, decoded.data, stride, width, tiles);
      else
        kernels.pack_rows(pointers, n, 0, width, nr, kernels.at(panels.data, k * nr), panels.stride);
    }
    for (int64_t p = 0; p < count; ++p) {
      if (few) {
        epilogue(first + p, kernels.at(tiles, p * tile_size), 0, rows);
        continue;
      }
      rows_by_packed_panel(
          kernels, rows, a, depth, panels.panel(p),
          [&](const Acc* tile, int64_t row, int64_t m) { epilogue(first + p, tile, row, m); });
    }
  }
}

}  // namespace fmoe_ext::gemm
