// The Hopper products of the forward, F1 and F2, against plain loops in double.
#pragma once

#include "sm90_cases.h"

namespace fmoe_ext {

struct ForwardForm {
  CurveKind curve;
  bool gated, biased, weighted;
};

// h = x_rows w1^T + b1 and its activation a
template <class T>
void run_up(const Case& c, const ForwardForm& form, float bias_scale = 1) {
  std::mt19937 random(7);
  const Routing routing(c, random);
  const auto& [E, offs, row_idx, expert] = routing;
  const size_t R = routing.num_rows(), D = c.D, H = c.H, F = form.gated ? 2 * H : H;
  Buffer<T> x(routing.kTokens * D + 64), w1(E * F * D), b1(E * F, true), h(R * F), a(R * H),
      a_without_h(R * H);
  x.fill(random, 1, 64);  // NaN follows the last row
  w1.fill(random, 0.3f);
  b1.fill(random, bias_scale);

  const GroupedRows rows{x.data, c.D, row_idx.data(), routing.kTopK, routing.kNumChoices};
  const auto up = [&](T* h_out, T* a_out) {
    launch_up_sm90(kDtype<T>, form.curve, form.gated, rows, offs.data(), w1.data,
                   form.biased ? b1.data : nullptr, R, E, c.H, h_out, a_out, c.grid(), nullptr);
  };
  up(h.data, a.data);
  up(nullptr, a_without_h.data);
  CHECK(std::memcmp(a.data, a_without_h.data, R * H * sizeof(T)) == 0, "a depends on whether h is kept");
  for (size_t r = 0; r < R; ++r) {
    const size_t e = routing.owner(r);
    const bool padding = e == offs.size();
    for (size_t j = 0; j < F; ++j) {
      double sum = form.biased && !padding ? b1.at(e * F + j) : 0;
      for (size_t k = 0; k < D && expert[r] >= 0; ++k)
        sum += x.at(routing.token(r) * D + k) * w1.at((e * F + j) * D + k);
      check_value<T>("h", h.at(r * F + j), sum, r, j);
    }
    for (size_t j = 0; j < H; ++j) {  // of h as stored
      const double value = activate(form.curve, h.at(r * F + j)).value;
      const double factor = form.gated ? factor_of(form.curve, h.at(r * F + H + j)).value : 1;
      check_value<T>("a", a.at(r * H + j), value * factor, r, j);
    }
  }
}

// y = scale (a w2^T + b2)
template <class T>
void run_rows(const Case& c, const ForwardForm& form) {
  std::mt19937 random(7);
  const Routing routing(c, random);
  const auto& [E, offs, row_idx, expert] = routing;
  const size_t R = routing.num_rows(), D = c.D, H = c.H;
  Buffer<T> a(R * H), w2(E * D * H), b2(E * D, true), y(R * D);
  Buffer<float> weights(routing.kNumChoices);
  a.fill(random, 1);
  w2.fill(random, 0.3f);
  b2.fill(random, 1);
  weights.fill(random, 1);
  const RowScale scale{form.weighted ? weights.data : nullptr, row_idx.data(), routing.kNumChoices};
  launch_rows_by_weight_sm90(kDtype<T>, a.data, {w2.data, static_cast<int>(E), c.D, c.H, false}, offs.data(),
                             R, form.biased ? b2.data : nullptr, scale, y.data, c.grid(), nullptr);
  for (size_t r = 0; r < R; ++r) {
    const size_t e = routing.owner(r);
    const bool padding = e == offs.size();
    const double factor = !form.weighted ? 1 : expert[r] < 0 ? 0 : weights.at(row_idx[r]);
    for (size_t j = 0; j < D; ++j) {
      double sum = form.biased && !padding ? b2.at(e * D + j) : 0;
      for (size_t k = 0; k < H && !padding; ++k) sum += a.at(r * H + k) * w2.at((e * D + j) * H + k);
      check_value<T>("y", y.at(r * D + j), factor * sum, r, j);
    }
  }
}

}  // namespace fmoe_ext
