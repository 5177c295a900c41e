// Products with weights in MXFP4, portable and on Hopper, against plain loops over decoded values in double.
#pragma once

#include "gemm/packed.h"
#include "sm90_cases.h"

namespace fmoe_ext {

struct PackedForm {
  bool along_n, interleaved, biased;
};

inline double e2m1(int code) {
  const int magnitude = code & 7;
  const double value =
      magnitude < 2 ? magnitude * 0.5 : std::ldexp(1 + magnitude % 2 * 0.5, magnitude / 2 - 1);
  return code & 8 ? -value : value;
}

inline double value_of(int code, int scale) {
  const double value = std::ldexp(e2m1(code), scale - 127);
  return scale == 255 ? NAN : std::abs(value) >= 0x1p128 ? std::copysign(INFINITY, value) : value;
}

// The decoded weight [E, out, in], rows with gates first.
inline std::vector<double> decoded(const Buffer<uint8_t>& data, const Buffer<uint8_t>& scale, size_t E,
                                   size_t out, size_t in, bool interleaved) {
  std::vector<double> weight(E * out * in);
  for (size_t e = 0; e < E; ++e)
    for (size_t n = 0; n < out; ++n) {
      const size_t half = out / 2, stored = !interleaved ? n : n < half ? 2 * n : 2 * (n - half) + 1;
      for (size_t k = 0; k < in; ++k) {
        const size_t at = (e * out + stored) * in + k;
        const int s = scale.data[at / 32], code = data.data[at / 2] >> (at % 2 * 4) & 15;
        weight[(e * out + n) * in + k] = value_of(code, s);
      }
    }
  return weight;
}

// Case::D is in, Case::H is out. The NaN that follows the last row of x must not be read into a product, nor
// anything past the end of data and scale.
inline void run_mxfp4(const Case& c, const PackedForm& form, bool portable, bool odd_scales = false) {
  using T = __nv_bfloat16;
  std::mt19937 random(7);
  const Routing routing(c, random);
  const auto& offs = routing.offs;
  const size_t R = routing.num_rows(), E = c.counts.size(), in = c.D, out = c.H;
  const size_t K = form.along_n ? out : in, N = form.along_n ? in : out;
  Buffer<T> x(R * K), y(R * N), bias(E * N, true);
  Buffer<uint8_t> data(E * out * in / 2, true), scale(E * out * in / 32, true);
  x.fill(random, 1);
  bias.fill(random, 1);
  for (size_t i = 0; i < data.size; ++i) data.data[i] = static_cast<uint8_t>(random());
  for (size_t i = 0; i < scale.size; ++i)
    scale.data[i] = odd_scales && random() % 16 == 0 ? std::vector{0, 1, 253, 254, 255}[random() % 5]
                                                     : 120 + random() % 4;
  for (size_t r = offs.empty() ? 0 : offs.back(); r < R; ++r) x.spoil(r * K, K);  // padding

  gemm::PackedMatrix weight{};
  weight.interleaved = form.interleaved;
  weight.data = data.data;
  weight.scale = reinterpret_cast<const char*>(scale.data);
  weight.num_experts = E, weight.rows = out, weight.columns = in;
  const void* shift = form.biased ? bias.data : nullptr;
  if (portable)
    launch_rows_by_mxfp4({x.data, static_cast<int64_t>(K), nullptr, 1, 0}, weight, form.along_n, offs.data(),
                         R, shift, y.data, nullptr);
  else
    launch_rows_by_mxfp4_sm90(x.data, weight, form.along_n, offs.data(), R, shift, y.data, c.grid(), nullptr);

  const auto w = decoded(data, scale, E, out, in, form.interleaved);
  for (size_t r = 0; r < R; ++r) {
    const size_t e = routing.owner(r);
    for (size_t j = 0; j < N; ++j) {
      double sum = 0, size = 0;
      bool is_nan = false, large = false;
      for (size_t k = 0; k < K && e < E; ++k) {
        const double value = form.along_n ? w[(e * out + k) * in + j] : w[(e * out + j) * in + k];
        const double term = x.at(r * K + k) * value;
        is_nan |= std::isnan(term);
        large |= std::abs(term) > 1e30;
        sum += term, size += std::abs(term);
      }
      if (form.biased && e < E) sum += bias.at(e * N + j);
      const double got = y.at(r * N + j);
      if (is_nan)
        CHECK(std::isnan(got), "y[%zu,%zu] = %g, expected a NaN", r, j, got);
      else if (large)  // a sum may overflow on its way
        CHECK(!std::isfinite(got) || std::abs(got - sum) <= size / 100, "y[%zu,%zu] = %g, expected %g", r, j,
              got, sum);
      else
        check_value<T>("y", got, sum, r, j, size / 8);
    }
  }
}

}  // namespace fmoe_ext
