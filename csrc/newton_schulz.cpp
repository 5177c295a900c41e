// newton_schulz on the CPU, x [E, M, N] -> the same shape: Newton-Schulz iterations for each matrix, by which
// Muon makes an update nearly orthogonal (Iteration has the formula). Two of the three products are
// symmetric: their lower half is computed and mirrored.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <utility>

#include "gemm/grouped.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

// Muon takes 5 steps; a huge number, given by mistake, would keep the process busy for years.
constexpr int64_t kMaxSteps = 1000;

struct Coefficients {
  double a, b, c;
};

// Elements from `first` on of two vectors in turn.
template <class T, int first, class Row, int... i>
Row interleave(Row a, Row b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (i % 2 * int(sizeof...(i)) + first + i / 2)...);
#else  // gcc 11 has no __builtin_shufflevector
  return __builtin_shuffle(a, b, Row{T(i % 2 * sizeof...(i) + first + i / 2)...});
#endif
}

// A block of 16 bytes a row, as many rows as elements in a row: row i of `from` becomes column i of `to`.
template <class T>
void transpose_block(const T* from, T* to, int64_t stride) {
  constexpr int n = 16 / sizeof(T);
  typedef T Row __attribute__((vector_size(16)));
  Row rows[n];
  for (int i = 0; i < n; ++i) std::memcpy(&rows[i], from + i * stride, 16);
  // Rows that are half of all apart are interleaved, once for each bit of an index.
  for (int step = 1; step < n; step *= 2) {
    Row next[n];
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = interleave<T, 0>(rows[i], rows[i + n / 2], std::make_integer_sequence<int, n>{});
      next[2 * i + 1] = interleave<T, n / 2>(rows[i], rows[i + n / 2], std::make_integer_sequence<int, n>{});
    }
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < n; ++i) std::memcpy(to + i * stride, &rows[i], 16);
}

// One matrix X [M, N], which becomes a X + (b G + c G G) X with G = X X^T at every step. Each product is
// rounded to storage.
class Iteration {
  using Matrix = RowMajorOf<Stored>;

 public:
  static int64_t bytes(const Kernels& kernels, int64_t M, int64_t N) {
    const int64_t operand = M * RowMajor::stride_for(kernels, std::max(M, N)) * kernels.operand_bytes;
    return operand + 2 * square_bytes(kernels, M);
  }

  // is_shared: the threads share the panels of this matrix; else they have a matrix each.
  Iteration(const Kernels& kernels, Stored* x, int64_t M, int64_t N, char* memory, bool is_shared)
      : kernels_(kernels),
        M(M),
        N(N),
        is_shared_(is_shared),
        x_{x, N, kernels.storage_bytes},
        gram_{reinterpret_cast<Stored*>(memory), square_stride(kernels, M), kernels.storage_bytes},
        polynomial_{reinterpret_cast<Stored*>(memory + square_bytes(kernels, M)), gram_.stride,
                    kernels.storage_bytes},
        operand_(reinterpret_cast<Operand*>(memory + 2 * square_bytes(kernels, M))) {}

  void step(const Coefficients& by) {
    const auto gram = [&](const Acc* tile, int64_t row, int64_t column, int64_t m, int64_t n) {
      kernels_.store(tile, m, n, nullptr, nullptr, gram_.at(row, column), gram_.stride);
    };
    symmetric(x_, N, gram);
    mirror(gram_);
    const auto polynomial = [&](const Acc* tile, int64_t row, int64_t column, int64_t m, int64_t n) {
      kernels_.add(tile, m, n, by.c, gram_.at(row, column), by.b, polynomial_.at(row, column), gram_.stride);
    };
    symmetric(gram_, M, polynomial);
    mirror(polynomial_);
    multiply_by_polynomial(by.a);
  }

 private:
  static int64_t square_stride(const Kernels& kernels, int64_t M) {
    return Matrix::odd_lines(M, kernels.storage_bytes);
  }
  static int64_t square_bytes(const Kernels& kernels, int64_t M) {
    return M * square_stride(kernels, M) * kernels.storage_bytes;
  }

  template <class Body>
  void for_each_panel(int64_t columns, const Body& body) const {
    const int64_t panels = divide_up(columns, kernels_.nr);
    if (is_shared_) return for_each_job(panels, body);
    for (int64_t panel = 0; panel < panels; ++panel) body(panel);
  }

  // Rows [M, depth] as operands: a square as it lies, where it has their type and no row needs padding.
  RowMajor operands(const Matrix& rows, int64_t depth) const {
    if (rows.data != x_.data && kernels_.operand_bytes == kernels_.storage_bytes && M % kernels_.k_step == 0)
      return {reinterpret_cast<Operand*>(rows.data), rows.stride, rows.bytes};
    const RowMajor to{operand_, RowMajor::stride_for(kernels_, depth), kernels_.operand_bytes};
    std::vector<const Stored*> pointers(M);
    for (int64_t r = 0; r < M; ++r) pointers[r] = rows.at(r);
    kernels_.copy_rows(pointers.data(), M, depth, to.data, to.stride);
    return to;
  }

  // Tiles of rows rows^T, those that hold a place of the lower half: epilogue(tile, row, column, m, n).
  template <class Epilogue>
  void symmetric(const Matrix& rows, int64_t depth, const Epilogue& epilogue) const {
    const RowMajor left = operands(rows, depth);
    for_each_panel(M, [&](int64_t panel) {
      const int64_t column = panel * kernels_.nr, n = std::min(kernels_.nr, M - column);
      const Stored* pointers[kMaxPanelLanes];
      for (int64_t j = 0; j < kernels_.nr; ++j) pointers[j] = j < n ? rows.at(column + j) : nullptr;
      const ThreadBuffer buffer(panel_bytes(kernels_, depth, kernels_.nr));
      auto* const packed = reinterpret_cast<Operand*>(buffer.data());
      kernels_.pack_columns(pointers, depth, packed);
      multiply(left, column, depth, packed, column, n, epilogue);
    });
  }

  void multiply_by_polynomial(double a) {
    const RowMajor left = operands(polynomial_, M);
    for_each_panel(N, [&](int64_t panel) {
      const int64_t column = panel * kernels_.nr, n = std::min(kernels_.nr, N - column);
      const ThreadBuffer buffer(panel_bytes(kernels_, M, kernels_.nr));
      const Panels panels = Panels::in(buffer.data(), kernels_, M, kernels_.nr);
      pack_weight_rows(kernels_, x_.data, N, M, panel, 1, panels);
      // In place: nobody else reads these columns.
      multiply(left, 0, M, panels.data, column, n,
               [&](const Acc* tile, int64_t row, int64_t at, int64_t m, int64_t width) {
                 Stored* corner = x_.at(row, at);
                 kernels_.add(tile, m, width, 1, corner, a, corner, N);
               });
    });
  }

  template <class Epilogue>
  void multiply(const RowMajor& left, int64_t first, int64_t depth, const Operand* panel, int64_t column,
                int64_t n, const Epilogue& epilogue) const {
    TileMemory tile;
    const TileProducts products(kernels_);
    for (int64_t row = first, m; row < M; row += m) {
      m = rows_of_tile(kernels_, M - row);
      kernels_.multiply_row_major(m, depth, left.at(row), left.stride, panel, tile.tiles());
      epilogue(tile.tiles(), row, column, m, n);
    }
  }

  // The upper half from the lower one.
  void mirror(const Matrix& square) const {
    const auto copy = [&](auto tag) {
      using T = decltype(tag);
      constexpr int64_t n = 16 / sizeof(T);
      T* const p = reinterpret_cast<T*>(square.data);
      const int64_t stride = square.stride, whole = M / n * n;
      for (int64_t i = 0; i < whole; i += n)
        for (int64_t j = 0; j < i; j += n) transpose_block(p + i * stride + j, p + j * stride + i, stride);
      for (int64_t i = 0; i < M; ++i)
        for (int64_t j = i < whole ? i / n * n : 0; j < i; ++j) p[j * stride + i] = p[i * stride + j];
    };
    if (square.bytes == 2) return copy(uint16_t{});
    if (square.bytes == 4) return copy(uint32_t{});
    copy(uint64_t{});
  }

  const Kernels& kernels_;
  const int64_t M, N;
  const bool is_shared_;
  const Matrix x_, gram_, polynomial_;
  Operand* const operand_;
};

Tensor newton_schulz_cpu(Tensor x, double a, double b, double c, int64_t steps) {
  check_cpu(x, "x");
  check_float(x, "x");
  check_dim(x, 3, "x", "[E, M, N]");
  STD_TORCH_CHECK(steps >= 0 && steps <= kMaxSteps, "steps must be in [0, ", kMaxSteps, "], but got ", steps);
  const Tensor found = x.is_contiguous() ? torch::stable::clone(x) : as_contiguous(x);
  const int64_t E = x.size(0), M = x.size(1), N = x.size(2);
  if (found.numel() == 0) return found;
  const Kernels& kernels = kernels_for(x.scalar_type());
  const bool is_shared = E < num_threads();
  const int64_t bytes = divide_up(Iteration::bytes(kernels, M, N), 64) * 64;
  const Workspace workspace(x, bytes * (is_shared ? 1 : std::min(E, num_threads())));
  const auto iterate = [&](int64_t e, int64_t worker) {
    Stored* const matrix = kernels.at(mutable_stored(found), e * M * N);
    Iteration iteration(kernels, matrix, M, N, workspace.data() + worker * bytes, is_shared);
    for (int64_t step = 0; step < steps; ++step) iteration.step({a, b, c});
  };
  if (is_shared)
    for (int64_t e = 0; e < E; ++e) iterate(e, 0);
  else
    for_each_job(E, iterate);
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("newton_schulz", TORCH_BOX(&newton_schulz_cpu)); }

}  // namespace fmoe_ext
