// What the tests of the Hopper kernels share: routings with every kind of tail, buffers of exactly their size
// that are full of NaN where nothing was written, activations in double, comparisons.
#pragma once

#include <cmath>

#include "../../cuda/common.cuh"
#include "check.h"

namespace fmoe_ext {

template <class T>
constexpr Dtype kDtype = std::is_same_v<T, __half> ? Dtype::f16 : Dtype::bf16;
template <class T>
constexpr double kRounding = std::is_same_v<T, __half> ? 1. / 1000 : 1. / 200;
template <>
inline constexpr double kRounding<float> = 1e-5;

struct Case {
  std::vector<int> counts;  // rows of each expert
  int padding, D, H, blocks, tile_columns = 192;
  Grid grid() const { return {blocks, tile_columns}; }
};

// Memory that begins at 128 bytes as a tensor does; filled with a NaN that no result can be. What follows it
// must stay as it is; AddressSanitizer guards it itself. `exact`: nor may it be read.
template <class T>
struct Buffer {
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kGuardBytes = 0;
#else
  static constexpr size_t kGuardBytes = 4096;
#endif
  explicit Buffer(size_t count, bool exact = false)
      : size(count),
        guard_bytes(exact ? 0 : kGuardBytes),
        before_page(exact && kGuardBytes),
        data(before_page
                 ? BeforeGuardPage<T>().allocate(count)
                 : static_cast<T*>(aligned_alloc(128, (count * sizeof(T) + guard_bytes + 127) / 128 * 128))) {
    std::memset(static_cast<void*>(data), 0xff, count * sizeof(T) + guard_bytes);
  }
  ~Buffer() {
    if (before_page) {
      BeforeGuardPage<T>().deallocate(data, size);
      return;
    }
    const auto* guard = reinterpret_cast<const unsigned char*>(data + size);
    for (size_t i = 0; i < guard_bytes; ++i)
      if (guard[i] != 0xff) {
        CHECK(false, "byte %zu past the end of a buffer was written", i);
        break;
      }
    free(data);
  }
  Buffer(const Buffer&) = delete;
  T& operator[](size_t i) { return data[i]; }
  double at(size_t i) const { return to_acc(data[i]); }
  void fill(std::mt19937& random, float scale, size_t unfilled = 0) {
    for (size_t i = 0; i < size - unfilled; ++i)
      data[i] = round_to<T>(scale * (int(random() % 2001) - 1000) / 1000.f);
  }
  void spoil(size_t first, size_t count) {
    std::memset(static_cast<void*>(data + first), 0xff, count * sizeof(T));
  }
  size_t size, guard_bytes;
  bool before_page;
  T* data;
};

// The choices of kTokens tokens, sorted by expert; then padding.
struct Routing {
  static constexpr int kTokens = 150, kTopK = 2, kNumChoices = kTokens * kTopK;

  Routing(const Case& c, std::mt19937& random) : num_experts(static_cast<int>(c.counts.size())) {
    for (int e = 0; e < num_experts; ++e) {
      for (int i = 0; i < c.counts[e]; ++i) {
        const bool dropped = i == 2;  // an index out of range is a row of zeros
        row_idx.push_back(dropped ? 1 << 30 : random() % kNumChoices);
        expert.push_back(dropped ? -1 : e);
      }
      offs.push_back(static_cast<int>(row_idx.size()));
    }
    for (int i = 0; i < c.padding; ++i) {
      row_idx.push_back(-1);
      expert.push_back(-1);
    }
  }
  size_t num_rows() const { return row_idx.size(); }
  size_t token(size_t row) const { return row_idx[row] / kTopK; }
  int owner(size_t row) const {  // the expert of a row, dropped or not; num_experts: padding
    return static_cast<int>(std::upper_bound(offs.begin(), offs.end(), static_cast<int>(row)) - offs.begin());
  }

  int num_experts;
  std::vector<int> offs, row_idx, expert;  // expert of a row; -1: dropped or padding
};

struct CurvePoint {
  double value, slope;
};
inline CurvePoint activate(CurveKind curve, double x) {
  const auto gaussian = [](double v) { return std::exp(-v * v / 2) / std::sqrt(2 * M_PI); };
  switch (curve) {
    case CurveKind::gelu: {
      const double cdf = std::erfc(-x / std::sqrt(2)) / 2;
      return {x * cdf, cdf + x * gaussian(x)};
    }
    case CurveKind::gelu_tanh: {
      const double root = std::sqrt(2 / M_PI), t = std::tanh(root * (x + 0.044715 * x * x * x));
      return {x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x) / 2};
    }
    case CurveKind::relu:
      return {x > 0 ? x : 0, x > 0 ? 1. : 0.};
    case CurveKind::relu2:
      return {x > 0 ? x * x : 0, x > 0 ? 2 * x : 0};
    case CurveKind::clamped_silu: {
      const double v = std::min(x, 7.), s = 1 / (1 + std::exp(-1.702 * v));
      return {v * s, x > 7 ? 0 : s * (1 + 1.702 * v * (1 - s))};
    }
    case CurveKind::silu: {
      const double s = 1 / (1 + std::exp(-x));
      return {x * s, s * (1 + x * (1 - s))};
    }
  }
  return {};
}

// What the gate is multiplied by, of up.
inline CurvePoint factor_of(CurveKind curve, double up) {
  if (curve != CurveKind::clamped_silu) return {up, 1};
  return {std::clamp(up, -7., 7.) + 1, std::abs(up) <= 7 ? 1. : 0.};
}

// `size` is what the terms of a sum add up to without their signs; the sum itself when not given.
template <class T>
void check_value(const char* what, double got, double expected, size_t row, size_t column, double size = 0) {
  const double tolerance = std::max(std::abs(expected), size) * kRounding<T> + 1e-4 * (kRounding<T> > 1e-4);
  const bool right = std::isnan(expected) ? std::isnan(got) : std::abs(got - expected) <= tolerance;
  CHECK(right, "%s[%zu,%zu] = %g, expected %g", what, row, column, got, expected);
}

}  // namespace fmoe_ext
