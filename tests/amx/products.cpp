// The products of AMX with emulated tile registers, without torch: against double, on ragged sizes, in memory
// that ends where their operands end. tests/amx/test_amx.py builds and runs it, and seeds bugs in the kernel.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "gemm/amx_bf16.cpp"

namespace {

using namespace fmoe_ext::gemm;
using fmoe_ext::gemm::Operand;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr uint16_t kPoison = 0x7fc1;  // what memory holds before it is written: a NaN
constexpr float kUntouched = 123.f;

Kernels make_table() {
  Kernels kernels{};
  kernels.nr = kAmxColumns;
  kernels.storage_bytes = kernels.operand_bytes = 2;
  kernels.acc_bytes = 4;
  use_amx(kernels);
  return kernels;
}
const Kernels kernels = make_table();

float widen(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t draw() {  // in [-1, 1), always the same
  static uint64_t state = 1;
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  const float value = float(double(state >> 33) / double(1u << 30) - 1);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits >> 16;
}

struct Matrix {
  int64_t rows, columns;
  std::vector<uint16_t> values;
  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), values(rows * columns) {
    for (uint16_t& value : values) value = draw();
  }
  uint16_t& at(int64_t row, int64_t column) { return values[row * columns + column]; }
  double get(int64_t row, int64_t column) const { return widen(values[row * columns + column]); }
  std::vector<const Stored*> pointers() const {
    std::vector<const Stored*> found;
    for (int64_t r = 0; r < rows; ++r) found.push_back((const Stored*)(values.data() + r * columns));
    return found;
  }
};

// Poisoned memory, behind which nothing may be read or written.
class Guarded {
 public:
  explicit Guarded(int64_t values) : page_(sysconf(_SC_PAGESIZE)) {
    bytes_ = (values * 2 + page_ - 1) / page_ * page_;
    start_ = (char*)mmap(nullptr, bytes_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start_ == MAP_FAILED || mprotect(start_ + bytes_, page_, PROT_NONE) != 0) std::abort();
    data = (uint16_t*)(start_ + bytes_ - values * 2);
    std::fill_n(data, values, kPoison);
  }
  ~Guarded() { munmap(start_, bytes_ + page_); }
  Operand* operands() const { return (Operand*)data; }
  uint16_t* data;

 private:
  const int64_t page_;
  int64_t bytes_;
  char* start_;
};

int64_t num_checks = 0;

void require(bool holds, const char* what, int64_t m, int64_t k, int64_t row, int64_t column) {
  ++num_checks;
  if (holds) return;
  std::printf("%s is wrong with %d rows and a depth of %d, at %d, %d\n", what, int(m), int(k), int(row),
              int(column));
  std::exit(1);
}

struct Tile {
  alignas(64) float values[kAmxRows * kAmxColumns];
  Tile() { std::fill_n(values, kAmxRows * kAmxColumns, kUntouched); }
  Acc* sums() { return (Acc*)values; }
};

int64_t whole(int64_t k) { return (k + 31) / 32 * 32; }

// Rows of a [m, k] by b [n, k]: a product of rows and columns that both lie along k.
void check_columns(int64_t m, int64_t k, int64_t n) {
  const Matrix a(m, k), b(n, k);
  auto columns = b.pointers();
  columns.resize(kAmxColumns, nullptr);
  const int64_t stride = whole(k) + 32;
  const Guarded rows((m - 1) * stride + whole(k)), panel(whole(k) * kAmxColumns);
  kernels.copy_rows(a.pointers().data(), m, k, rows.operands(), stride);
  kernels.pack_columns(columns.data(), k, panel.operands());
  Tile tile;
  kernels.multiply_row_major(m, k, rows.operands(), stride, panel.operands(), tile.sums());
  for (int64_t r = 0; r < kAmxRows; ++r)
    for (int64_t c = 0; c < kAmxColumns; ++c) {
      const float found = tile.values[r * kAmxColumns + c];
      double wanted = 0;
      for (int64_t i = 0; i < k && r < m && c < n; ++i) wanted += a.get(r, i) * b.get(c, i);
      require(r < m ? std::abs(found - wanted) <= 1e-6 * (8 + k) : found == kUntouched,
              "a product of columns", m, k, r, c);
    }
  // A row has the same bits in whatever tile it is.
  for (int64_t r = 0; r < m; r += 7) {
    Tile alone;
    kernels.multiply_row_major(1, k, (const Operand*)(rows.data + r * stride), stride, panel.operands(),
                               alone.sums());
    require(std::equal(alone.values, alone.values + kAmxColumns, tile.values + r * kAmxColumns),
            "a row alone", m, k, r, 0);
  }
}

// Columns of a [k, m] by columns of b [k, n], from the second one on: a sum over rows. By panels of both.
void check_rows(int64_t m, int64_t k, int64_t n) {
  const Matrix a(k, m + 1), b(k, n + 1);
  const int64_t left_panels = (m + kernels.mr - 1) / kernels.mr, right_panels = (n + 31) / 32;
  const int64_t left_stride = whole(k) * kernels.mr, right_stride = whole(k) * kAmxColumns;
  const Guarded left(left_panels * left_stride), right(right_panels * right_stride);
  kernels.pack_operand_rows((const Operand* const*)a.pointers().data(), k, 1, m, kernels.mr, left.operands(),
                            left_stride);
  kernels.pack_rows(b.pointers().data(), k, 1, n, kAmxColumns, right.operands(), right_stride);
  for (int64_t row = 0; row < m; row += 16)  // a part of a panel is one too
    for (int64_t column = 0; column < n; column += kAmxColumns) {
      Tile tile;
      const int64_t size = std::min(m - row, row % 32 ? kernels.mr - row % kernels.mr : 16);
      kernels.multiply_transposed(
          size, k, (const Operand*)(left.data + row / kernels.mr * left_stride + row % kernels.mr * 32), 0,
          (const Operand*)(right.data + column / kAmxColumns * right_stride), tile.sums());
      for (int64_t r = 0; r < size; ++r)
        for (int64_t c = 0; c < std::min(n - column, kAmxColumns); ++c) {
          double wanted = 0;
          for (int64_t i = 0; i < k; ++i) wanted += a.get(i, row + r + 1) * b.get(i, column + c + 1);
          require(std::abs(tile.values[r * kAmxColumns + c] - wanted) <= 1e-6 * (8 + k), "a sum over rows", m,
                  k, row + r, column + c);
        }
    }
}

// Rows that are packed, by columns as they lie: the same bits as the other way round. `gap` columns lie
// between the halves of a panel, as between gates and ups.
void check_turned(int64_t m, int64_t k, int64_t gap) {
  const Matrix a(m, k), b(kAmxColumns + gap, k);
  auto columns = b.pointers();
  columns.erase(columns.begin() + kAmxColumns / 2, columns.begin() + kAmxColumns / 2 + gap);
  auto rows = a.pointers();
  rows.resize(kAmxColumns, nullptr);
  const Guarded turned(whole(k) * kAmxColumns), panel(whole(k) * kAmxColumns), left(m * (whole(k) + 32));
  kernels.pack_columns(rows.data(), k, turned.operands());
  kernels.pack_columns(columns.data(), k, panel.operands());
  kernels.copy_rows(rows.data(), m, k, left.operands(), whole(k) + 32);
  Tile wanted, found;
  kernels.multiply_row_major(m, k, left.operands(), whole(k) + 32, panel.operands(), wanted.sums());
  const auto multiply = [&] {
    return kernels.multiply_turned(m, k, turned.operands(), columns.data(), found.sums());
  };
  require(multiply() == (k % 32 == 0), "the choice of a turned product", m, k, 0, 0);
  for (int64_t r = 0; r < kAmxRows; ++r)
    for (int64_t c = 0; c < kAmxColumns; ++c)
      require(found.values[r * kAmxColumns + c] ==
                  (k % 32 || r >= m ? kUntouched : wanted.values[r * kAmxColumns + c]),
              "a turned product", m, k, r, c);
  std::swap(columns[3], columns[4]);
  require(!multiply(), "columns at other distances", m, k, 0, 0);
  std::swap(columns[3], columns[4]);
  columns.back() = nullptr;
  require(!multiply(), "a column that is missing", m, k, 0, 0);
}

// What is not a number stays in its row and its column; a denormal is zero.
void check_special_values(int64_t m, int64_t k) {
  Matrix a(m, k), b(kAmxColumns, k);
  a.at(m - 1, k - 1) = 0x7fc0;
  b.at(3, 0) = 0x7f80;  // infinity
  a.at(0, 0) = 1;
  for (int64_t c = 4; c < kAmxColumns; ++c) b.at(c, 0) = 0x7f00;  // 2^127: times the denormal 2^-133, 1 / 64
  const int64_t stride = whole(k);
  const Guarded rows(m * stride), panel(whole(k) * kAmxColumns);
  kernels.copy_rows(a.pointers().data(), m, k, rows.operands(), stride);
  kernels.pack_columns(b.pointers().data(), k, panel.operands());
  Tile tile;
  kernels.multiply_row_major(m, k, rows.operands(), stride, panel.operands(), tile.sums());
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < kAmxColumns; ++c)
      require(std::isfinite(tile.values[r * kAmxColumns + c]) == (r < m - 1 && c != 3), "a special value", m,
              k, r, c);
  if (m == 1) return;  // its row is not a number
  double wanted = 0;
  for (int64_t i = 1; i < k; ++i) wanted += a.get(0, i) * b.get(5, i);
  require(std::abs(tile.values[5] - wanted) < 1e-4, "a denormal", m, k, 0, 5);
}

// Products within a run: registers are released with the outermost one, and configured as each needs them.
void check_runs() {
  const Matrix a(64, 64), b(kAmxColumns, 64);
  const Guarded panel(64 * kAmxColumns);
  kernels.pack_columns(b.pointers().data(), 64, panel.operands());
  const auto multiply = [&](int64_t m, Tile& tile) {
    kernels.multiply_row_major(m, 64, (const Operand*)a.values.data(), 64, panel.operands(), tile.sums());
  };
  Tile apart, few, many, few_again;
  multiply(64, apart);
  require(!tile_registers().are_configured, "the state of the registers after a product", 64, 64, 0, 0);
  kernels.begin_tiles();
  kernels.begin_tiles();
  multiply(5, few);
  kernels.end_tiles();
  require(tile_registers().are_configured, "the state of the registers within a run", 64, 64, 0, 0);
  multiply(64, many);
  multiply(5, few_again);
  kernels.end_tiles();
  require(!tile_registers().are_configured, "the state of the registers after a run", 64, 64, 0, 0);
  require(std::equal(apart.values, apart.values + 64 * kAmxColumns, many.values), "a run", 64, 64, 0, 0);
  require(std::equal(few.values, few.values + 5 * kAmxColumns, many.values), "a run", 5, 64, 0, 0);
  require(std::equal(few.values, std::end(few.values), few_again.values), "few rows after many", 5, 64, 0, 0);
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) load_tile<0>(&kernels, 64);  // not configured: the emulation ends the program
  for (int64_t m : {1, 3, 15, 16, 17, 31, 32, 33, 47, 50, 64})
    for (int64_t k : {1, 2, 31, 32, 65, 511, 513, 1056}) check_columns(m, k, k % 3 ? kAmxColumns : 19);
  for (int64_t m : {1, 16, 33, 64, 101})
    for (int64_t k : {1, 2, 31, 32, 65, 513, 1056}) check_rows(m, k, k % 2 ? 40 : 7);
  for (int64_t m : {1, 5, 17, 40, 64})
    for (int64_t k : {2, 33, 600}) check_special_values(m, k);
  for (int64_t m : {1, 9, 16, 17, 32})
    for (int64_t k : {31, 32, 64, 512, 544, 1088})
      for (int64_t gap : {0, 5}) check_turned(m, k, gap);
  check_runs();
  std::printf("%d checks passed\n", int(num_checks));
}
