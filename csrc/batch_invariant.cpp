// The switches of batch_invariant.h as operators, and two that batch_invariant() in Python takes for torch's:
// _matmul_in_order and _softmax_in_order, whose sums run from the first to the last.
#include "batch_invariant.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "checks.h"
#include "float_types.h"
#include "gemm/blocks.h"
#include "parallel.h"

namespace fmoe_ext {
namespace {

using gemm::Acc;
using gemm::Kernels;
using gemm::Operand;

void set_batch_invariant(bool on) { detail::batch_invariant = on; }

void set_thread_batch_invariant(bool on) { detail::thread_batch_invariant = on; }

// The first n columns of b [K, N], whose elements are sk and sn apart, as a panel [K][nr]; missing ones are
// zero.
template <class T, class A>
void pack_panel(const T* b, int64_t sk, int64_t sn, int64_t K, int64_t n, int64_t nr, A* panel) {
  if (n < nr) std::fill_n(panel, K * nr, A{});
  if (sn == 1) {
    for (int64_t k = 0; k < K; ++k)
      for (int64_t j = 0; j < n; ++j) panel[k * nr + j] = static_cast<A>(b[k * sk + j]);
    return;
  }
  for (int64_t j = 0; j < n; ++j)
    for (int64_t k = 0; k < K; ++k) panel[k * nr + j] = static_cast<A>(b[k * sk + j * sn]);
}

void check_wide(const Tensor& t, const char* name) {
  check_cpu(t, name);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::Double, name,
                  " must be float32 or float64, but got ", dtype_text(t));
}

Tensor matmul_in_order_cpu(Tensor a_, Tensor b) {
  check_wide(a_, "a");
  check_cpu(b, "b");
  check_float(b, "b");
  check_dim(a_, 3, "a", "[B, M, K]");
  check_dim(b, 3, "b", "[B, K, N]");
  check_size(b, 0, a_.size(0), "b", "[B, K, N]");
  check_size(b, 1, a_.size(2), "b", "[B, K, N]");
  const bool is_double = a_.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(is_double == (b.scalar_type() == ScalarType::Double), "b must have the dtype of a (",
                  dtype_text(a_), ") or fewer bits, but not float64 beside others, but got ", dtype_text(b));
  const Tensor a = as_contiguous(a_);
  const int64_t B = a.size(0), M = a.size(1), K = a.size(2), N = b.size(2);
  Tensor out = torch::stable::new_empty(a, {B, M, N});
  if (B == 0 || M == 0 || N == 0) return out;
  const Kernels& kernels = gemm::kernels_for(a.scalar_type());
  const int64_t nr = kernels.nr, panels = gemm::divide_up(N, nr), bytes = kernels.acc_bytes;
  const auto* rows = static_cast<const Operand*>(a.const_data_ptr());
  auto* to = static_cast<Acc*>(out.mutable_data_ptr());
  for_each_job(B * panels, [&](int64_t job) {
    const int64_t batch = job / panels, column = job % panels * nr, n = std::min(nr, N - column);
    const gemm::ThreadBuffer memory(K * nr * bytes);
    dispatch_float(b.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      const T* from = static_cast<const T*>(b.const_data_ptr()) + batch * b.stride(0) + column * b.stride(2);
      pack_panel(from, b.stride(1), b.stride(2), K, n, nr, reinterpret_cast<compute_t<T>*>(memory.data()));
    });
    const auto* panel = reinterpret_cast<const Operand*>(memory.data());
    gemm::TileMemory tile;
    for (int64_t row = 0; row < M; row += kernels.mr) {
      const int64_t m = std::min(kernels.mr, M - row), at = batch * M + row;
      kernels.multiply_in_order(m, K, kernels.at(rows, at * K), K, panel, tile.tiles());
      for (int64_t i = 0; i < m; ++i)
        std::copy_n(tile.data + i * nr * bytes, n * bytes,
                    reinterpret_cast<char*>(kernels.at(to, (at + i) * N + column)));
    }
  });
  return out;
}

// Row x of n numbers: its exponentials over their sum, or the logarithm. Of nothing but -inf: zeros, NaN if
// log.
template <class T>
void softmax_row(const Kernels& kernels, const T* x, int64_t n, bool log, T* out) {
  T largest = -std::numeric_limits<T>::infinity();
  bool is_nan = false;
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, x[i]);
    is_nan |= x[i] != x[i];
  }
  if (is_nan || (std::isinf(largest) && (largest > 0 || log))) {
    std::fill_n(out, n, std::numeric_limits<T>::quiet_NaN());
    return;
  }
  if (std::isinf(largest)) {
    std::fill_n(out, n, T{});
    return;
  }
  kernels.exponentials(reinterpret_cast<const Acc*>(x), n, reinterpret_cast<const Acc*>(&largest),
                       reinterpret_cast<Acc*>(out));
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += out[i];
  if (log) {
    const double shift = largest + std::log(sum);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(x[i] - shift);
  } else {
    const T scale = static_cast<T>(1 / sum);
    for (int64_t i = 0; i < n; ++i) out[i] *= scale;
  }
}

Tensor softmax_in_order_cpu(Tensor x_, bool log) {
  check_wide(x_, "x");
  check_dim(x_, 2, "x", "[R, N]");
  const Tensor x = as_contiguous(x_);
  const int64_t rows = x.size(0), n = x.size(1);
  Tensor out = torch::stable::empty_like(x);
  const Kernels& kernels = gemm::kernels_for(x.scalar_type());
  const int64_t at_once = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, n));
  for_each_job(n == 0 ? 0 : gemm::divide_up(rows, at_once), [&](int64_t job) {
    for (int64_t row = job * at_once; row < std::min(rows, (job + 1) * at_once); ++row) {
      const auto compute = [&](auto zero) {
        using T = decltype(zero);
        softmax_row(kernels, static_cast<const T*>(x.const_data_ptr()) + row * n, n, log,
                    static_cast<T*>(out.mutable_data_ptr()) + row * n);
      };
      x.scalar_type() == ScalarType::Double ? compute(double{}) : compute(float{});
    }
  });
  return out;
}

}  // namespace

namespace detail {
std::atomic<bool> batch_invariant{false};
thread_local bool thread_batch_invariant = false;
}  // namespace detail

STABLE_TORCH_LIBRARY_FRAGMENT(fmoe_ext, m) {
  m.def("_set_batch_invariant(bool on) -> ()");
  m.def("_set_thread_batch_invariant(bool on) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("_set_batch_invariant", TORCH_BOX(&set_batch_invariant));
  m.impl("_set_thread_batch_invariant", TORCH_BOX(&set_thread_batch_invariant));
}
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("_matmul_in_order", TORCH_BOX(&matmul_in_order_cpu));
  m.impl("_softmax_in_order", TORCH_BOX(&softmax_in_order_cpu));
}

}  // namespace fmoe_ext
