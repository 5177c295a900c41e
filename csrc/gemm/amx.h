// Products of bfloat16 by AMX: 32 x 32 results in four tile registers, 32 positions of k at a time. Functions
// that end in _amx are kernels, whose contracts are in kernels.h; amx_bf16.cpp puts them into the table.
#pragma once

#include "amx_tiles.h"
#include "packing.h"

#include "isa_begin.h"

constexpr int kTileSide = 16;              // rows of a register, and floats in each
constexpr int kTileDepth = 2 * kTileSide;  // bfloat16 in a row
constexpr int64_t kAmxRows = 64;  // of a call: four blocks of 16, of which two share what they read of B
constexpr int64_t kAmxColumns = NR<Bf16PairUnit>;
static_assert(kAmxColumns == 2 * kTileSide && kAmxRows <= kMaxTileRows);

// As measured on Emerald Rapids, up to which AVX-512 is as fast:
constexpr int64_t kDotRows = 3;            // rows of A, with B's columns contiguous along k
constexpr int64_t kDotRowsTransposed = 6;  // rows of A, with B's rows contiguous along the lanes
constexpr int64_t kDotDepth = 6;           // positions of k, of a sum over rows (A transposed)
// Rows of A up to which it pays not to pack B (multiply_turned_amx).
constexpr int64_t kTurnedRows = 512;

// Steps of k after which sums in registers are added to the tile, as kDepth (multiply.h); what the steps read
// of B is read again from the first-level cache for the next block of rows.
constexpr int64_t kAmxSteps = 32;

// The registers of this thread while it multiplies: runs within a run use those of the outer one. 0 to 3 are
// sums, of the first 16 rows (0 and 1) and the second (2 and 3) by the left and the right 16 columns; 4 and 5
// are rows of A, 6 and 7 columns of B.
class TileRun {
 public:
  TileRun() { ++state().depth; }
  ~TileRun() {
    State& mine = state();
    if (--mine.depth > 0 || mine.rows == 0) return;
    release_tiles();
    mine.rows = 0;
  }
  TileRun(const TileRun&) = delete;
  TileRun& operator=(const TileRun&) = delete;

  // Sums and A get `rows` rows, at most 16.
  void configure(int rows) const {
    State& mine = state();
    if (mine.rows == rows) return;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = tile < 6 ? rows : kTileSide;
      config.row_bytes[tile] = 64;
    }
    configure_tiles(config);
    mine.rows = rows;
  }

  // True for other columns than at the last call, so that this one prefetches those that follow them.
  bool is_new(const void* columns) const {
    const bool found = state().fetched != columns;
    state().fetched = columns;
    return found;
  }

  // For the table of kernels: a run over many calls.
  static void begin() { ++state().depth; }
  static void end() { TileRun run(state()); }

 private:
  struct State {
    int depth = 0, rows = 0;
    const void* fetched = nullptr;  // the columns behind which the next ones were prefetched
  };
  static State& state() {
    static thread_local State state;
    return state;
  }
  explicit TileRun(State&) {}  // one that has begun
};

// Two blocks of 16 rows of A, and how far apart their rows and steps of k are, in bytes.
struct TileRows {
  const char *first, *second;
  int64_t row_bytes, step_bytes;
  int64_t to_next = 0;  // bytes from these rows to those that follow
};

// Stores A B of `steps` steps into first and second [rows][32]: second only if `both`, the right 16 columns
// only if `wide`. fetches: the rows of A that follow come into the second-level cache meanwhile.
template <bool both, bool wide = true, bool fetches = false>
inline void multiply_steps(int64_t steps, const TileRows& a, const char* panel, char* first, char* second) {
  static_assert(both || !fetches, "the rows that follow both come");
  constexpr int64_t kLine = kAmxColumns * sizeof(float);  // of a panel, and of a tile
  zero_tile<0>();
  if constexpr (wide) zero_tile<1>();
  if constexpr (both) zero_tile<2>();
  if constexpr (both && wide) zero_tile<3>();
#pragma GCC unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    const char* b = panel + step * kTileSide * kLine;
    const int64_t at = step * a.step_bytes;
    load_tile<6>(b, kLine);
    load_tile<4>(a.first + at, a.row_bytes);
    if constexpr (wide) load_tile<7>(b + 64, kLine);
    add_tile_product<0, 4, 6>();
    if constexpr (wide) add_tile_product<1, 4, 7>();
    if constexpr (both) load_tile<5>(a.second + at, a.row_bytes);
    if constexpr (both) add_tile_product<2, 5, 6>();
    if constexpr (both && wide) add_tile_product<3, 5, 7>();
    if constexpr (fetches) {
      for (int row = 0; row < kTileSide; ++row) {
        __builtin_prefetch(a.first + at + row * a.row_bytes + a.to_next, 0, 2);
        __builtin_prefetch(a.second + at + row * a.row_bytes + a.to_next, 0, 2);
      }
    }
  }
  store_tile_register<0>(first, kLine);
  if constexpr (wide) store_tile_register<1>(first + 64, kLine);
  if constexpr (both) store_tile_register<2>(second, kLine);
  if constexpr (both && wide) store_tile_register<3>(second + 64, kLine);
}

inline void add_rows_of_tile(const float* from, int64_t rows, float* to) {
  for (int64_t i = 0; i < rows * kAmxColumns; i += W) store(to + i, load(to + i) + load(from + i));
}

// Row blocks of 16 of a tile: the last one ends with the last row, and computes rows of the one before again.
inline int64_t tile_row(int64_t block, int64_t m) {
  const int64_t row = block * kTileSide;
  return row + kTileSide <= m || m < kTileSide ? row : m - kTileSide;
}

// tile [m, 32]; a row of A is row_bytes after the one before, a step of k step_bytes; the panel and A have
// whole steps. With fewer than 16 rows no others are read.
inline void multiply_tiles(int64_t m, int64_t k, const char* a, int64_t row_bytes, int64_t step_bytes,
                           const char* panel, float* tile) {
  constexpr int64_t kStepBytes = kTileDepth * kAmxColumns * sizeof(BF16);
  const TileRun run;
  run.configure(m < kTileSide ? int(m) : kTileSide);
  const int64_t steps = (k + kTileDepth - 1) / kTileDepth, blocks = (m + kTileSide - 1) / kTileSide;
  alignas(64) float part[2 * kTileSide * kAmxColumns];
  for (int64_t begin = 0; begin == 0 || begin < steps; begin += kAmxSteps) {
    const int64_t count = steps - begin < kAmxSteps ? steps - begin : kAmxSteps;
    // The sums that are not the first are added by row: a row that two blocks have gets them once.
    int64_t done = 0;
    for (int64_t block = 0; block < blocks; block += 2) {
      const bool both = block + 1 < blocks;
      const int64_t first = tile_row(block, m), second = both ? tile_row(block + 1, m) : first;
      const TileRows rows{a + first * row_bytes + begin * step_bytes,
                          a + second * row_bytes + begin * step_bytes, row_bytes, step_bytes};
      char* to[2] = {(char*)(tile + first * kAmxColumns), (char*)(tile + second * kAmxColumns)};
      if (begin > 0) {
        to[0] = (char*)part;
        to[1] = (char*)(part + kTileSide * kAmxColumns);
      }
      both ? multiply_steps<true>(count, rows, panel + begin * kStepBytes, to[0], to[1])
           : multiply_steps<false>(count, rows, panel + begin * kStepBytes, to[0], to[1]);
      if (begin == 0) continue;
      for (int64_t half = 0; half <= both; ++half) {
        const int64_t start = half ? second : first, end = start + kTileSide < m ? start + kTileSide : m;
        const float* sums = part + half * kTileSide * kAmxColumns;
        add_rows_of_tile(sums + (done - start) * kAmxColumns, end - done, tile + done * kAmxColumns);
        done = end;
      }
    }
  }
}

inline void multiply_row_major_amx(int64_t m, int64_t k, const BF16* a, int64_t stride, const BF16* panel,
                                   float* tile) {
  multiply_tiles(m, k, (const char*)a, stride * sizeof(BF16), kTileDepth * sizeof(BF16), (const char*)panel,
                 tile);
}

// A as pack_left() packs it: whole blocks of rows, which the tile has room for.
inline void multiply_transposed_amx(int64_t m, int64_t k, const BF16* a, int64_t, const BF16* panel,
                                    float* tile) {
  constexpr int64_t kRowBytes = kTileDepth * sizeof(BF16), kPart = 8;
  if (k <= kDotDepth) {  // one step, where A is row-major
    for (int64_t row = 0; row < m; row += kPart)
      multiply_row_major<BF16>(m - row < kPart ? m - row : kPart, k, a + row * kTileDepth, kTileDepth, panel,
                               tile + row * kAmxColumns);
    return;
  }
  multiply_tiles((m + kTileSide - 1) / kTileSide * kTileSide, k, (const char*)a, kRowBytes,
                 kAmxRows * kRowBytes, (const char*)panel, tile);
}

// tile [m, 32] of m <= 32 rows that pack_columns_amx() packed and 32 columns of B as they lie: computes the
// transpose, of which the columns are the left factor, and turns the sums. False, and nothing is done, unless
// all columns are there and equally far apart in each half, and k is a multiple of 32.
inline bool multiply_turned_amx(int64_t m, int64_t k, const BF16* rows, const BF16* const* columns,
                                float* tile) {
  constexpr int64_t kStepBytes = kTileDepth * kAmxColumns * sizeof(BF16);
  constexpr int64_t kHalf = kTileSide * kAmxColumns;
  bool fits = k > 0 && k % kTileDepth == 0 && columns[0] && columns[1];
  const int64_t apart = fits ? (const char*)columns[1] - (const char*)columns[0] : 0;
  for (int c = 0; c < kAmxColumns; ++c) {
    const int first = c / kTileSide * kTileSide;
    fits = fits && columns[c] && (const char*)columns[c] - (const char*)columns[first] == (c - first) * apart;
  }
  if (!fits) return false;
  const TileRun run;
  run.configure(kTileSide);
  alignas(64) float sums[2 * kHalf], part[2 * kHalf];
  const int64_t steps = k / kTileDepth;
  // Of a gated weight a panel has 16 columns in each of two places.
  const bool is_whole = (const char*)columns[kTileSide] - (const char*)columns[0] == kTileSide * apart;
  const int64_t to_next = apart * (is_whole ? kAmxColumns : kTileSide);
  const bool is_new = run.is_new(columns[0]), is_wide = m > kTileSide;
  constexpr auto multiply = [](bool wide, bool fetches) {
    if (wide) return fetches ? multiply_steps<true, true, true> : multiply_steps<true>;
    return fetches ? multiply_steps<true, false, true> : multiply_steps<true, false>;
  };
  for (int64_t begin = 0; begin < steps; begin += kAmxSteps) {
    const int64_t count = steps - begin < kAmxSteps ? steps - begin : kAmxSteps;
    // the columns of B, as rows of the left factor
    const TileRows lines{(const char*)(columns[0] + begin * kTileDepth),
                         (const char*)(columns[kTileSide] + begin * kTileDepth), apart,
                         kTileDepth * sizeof(BF16), to_next};
    float* to = begin == 0 ? sums : part;
    multiply(is_wide, is_new)(count, lines, (const char*)rows + begin * kStepBytes, (char*)to,
                              (char*)(to + kHalf));
    if (begin > 0) add_rows_of_tile(part, 2 * kTileSide, sums);
  }
  for (int64_t row = 0; row < m; row += kTileSide)
    for (int half = 0; half < 2; ++half) {
      __m512i block[kTileSide];
      for (int i = 0; i < kTileSide; ++i)
        block[i] = load_bytes<__m512i>(sums + half * kHalf + i * kAmxColumns + row);
      transpose(block);
      for (int64_t i = 0; i < kTileSide && row + i < m; ++i)
        store_bytes(tile + (row + i) * kAmxColumns + half * kTileSide, block[i]);
    }
  return true;
}

inline int64_t whole_steps(int64_t k) { return (k + kTileDepth - 1) / kTileDepth * kTileDepth; }

inline void copy_rows_amx(const BF16* const* rows, int64_t num_rows, int64_t k, BF16* dst, int64_t stride) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (k > 0) __builtin_memcpy(dst + r * stride, rows[r], k * sizeof(BF16));
    __builtin_memset(dst + r * stride + k, 0, (whole_steps(k) - k) * sizeof(BF16));
  }
}

inline void pack_columns_amx(const BF16* const* rows, int64_t k, BF16* dst) {
  pack_columns<BF16>(rows, k, dst);
  const int64_t packed = (k + 1) / 2 * 2;
  __builtin_memset(dst + packed * kAmxColumns, 0, (whole_steps(k) - packed) * kAmxColumns * sizeof(BF16));
}

// Panels of B: [k / 2][32][2].
inline void pack_right(const BF16* const* rows, int64_t k, int64_t col0, int64_t n, BF16* dst,
                       int64_t panel_stride) {
  // Rows may be far apart, where the processor does not prefetch by itself. Behind the last one more rows of
  // a weight follow, which the next call packs.
  constexpr int64_t kAhead = 16;
  const int64_t apart = k > 1 ? (const char*)rows[k - 1] - (const char*)rows[k - 2] : 0;
  for (int64_t i = 0; i < whole_steps(k); i += 2) {
    for (int64_t ahead = i + kAhead; ahead < i + kAhead + 2; ++ahead) {
      const int64_t behind = ahead < k ? 0 : ahead - k + 1;
      const auto line = (uintptr_t)(rows[behind ? k - 1 : ahead] + col0) + behind * apart;
      for (int64_t c = 0; c < n; c += kAmxColumns) __builtin_prefetch((const char*)(line + c * sizeof(BF16)));
    }
    for (int64_t c = 0; c < n; c += kAmxColumns) {
      const PairsOfRows pairs(rows, i, k, col0 + c, n - c);
      BF16* to = dst + c / kAmxColumns * panel_stride + i * kAmxColumns;
      store_bytes(to, pairs.first);
      store_bytes(to + kTileDepth, pairs.second);
    }
  }
}

// Panels of A: [k / 32][64][32].
inline void pack_left(const BF16* const* rows, int64_t k, int64_t col0, int64_t n, BF16* dst,
                      int64_t panel_stride) {
  for (int64_t i = 0; i < whole_steps(k); i += kTileDepth)
    for (int64_t c = 0; c < n; c += kAmxColumns) {
      __m512i first[kTileSide], second[kTileSide];
      for (int pair = 0; pair < kTileSide; ++pair) {
        const PairsOfRows pairs(rows, i + 2 * pair, k, col0 + c, n - c);
        first[pair] = pairs.first;
        second[pair] = pairs.second;
      }
      transpose(first);
      transpose(second);
      BF16* to = dst + c / kAmxRows * panel_stride + i * kAmxRows + c % kAmxRows * kTileDepth;
      for (int row = 0; row < kTileSide; ++row) {
        store_bytes(to + row * kTileDepth, first[row]);
        store_bytes(to + (kTileSide + row) * kTileDepth, second[row]);
      }
    }
}

inline void pack_rows_amx(const BF16* const* rows, int64_t k, int64_t col0, int64_t n, int64_t lanes,
                          BF16* dst, int64_t panel_stride) {
  (lanes == kAmxRows ? pack_left : pack_right)(rows, k, col0, n, dst, panel_stride);
}

#include "isa_end.h"
