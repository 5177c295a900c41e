// The Hopper kernels of the backward, B1, B2 / B5 and B3, against plain loops in double.
#pragma once

#include "sm90_cases.h"

namespace fmoe_ext {

struct HiddenForm {
  CurveKind curve;
  bool gated, by_token, weighted, with_b2;
};

template <class T>
void run_hidden(const Case& c, const HiddenForm& form) {
  std::mt19937 random(11);
  const Routing routing(c, random);
  const auto& [E, offs, row_idx, expert] = routing;
  const size_t R = routing.num_rows(), D = c.D, H = c.H, F = form.gated ? 2 * H : H;
  const size_t num_dots = num_hidden_dots_sm90(c.H);
  Buffer<T> dy((form.by_token ? routing.kTokens : R) * D), w2(E * D * H), h(R * F), b2(E * D), dh(R * F),
      scaled_a(R * H);
  Buffer<float> weights(routing.kNumChoices), dots(R * num_dots);
  std::vector<float> dscale(routing.kNumChoices, 0), expected_dscale(dscale);
  std::vector<int> unique(row_idx);  // a choice has one row, or its gradient would be written twice
  for (size_t r = 0, next = 0; r < R; ++r)
    if (expert[r] >= 0) unique[r] = next < dscale.size() ? static_cast<int>(next++) : 1 << 30;
  dy.fill(random, 1);
  w2.fill(random, 0.3f);
  h.fill(random, form.curve == CurveKind::clamped_silu ? 12 : 2);
  b2.fill(random, 1);
  weights.fill(random, 1);
  for (size_t r = 0; r < R; ++r)
    if (unique[r] >= routing.kNumChoices || unique[r] < 0) h.spoil(r * F, F);

  const ActivationRows rows{h.data,
                            offs.data(),
                            unique.data(),
                            form.weighted ? weights.data : nullptr,
                            E,
                            routing.kTopK,
                            static_cast<int64_t>(R),
                            routing.kNumChoices,
                            form.by_token};
  launch_grad_hidden_sm90(kDtype<T>, form.curve, form.gated, dy.data, rows, w2.data, c.D, c.H, dh.data,
                          scaled_a.data, dots.data, c.grid(), nullptr);
  launch_sum_dots(kDtype<T>, rows, dots.data, num_dots, dy.data, form.with_b2 ? b2.data : nullptr, c.D,
                  dscale.data(), nullptr);

  for (size_t r = 0; r < R; ++r) {
    const bool kept = expert[r] >= 0 && unique[r] < routing.kNumChoices;
    const size_t dy_row = form.by_token ? unique[r] / routing.kTopK : r;
    const double scale = form.weighted && kept ? weights.at(unique[r]) : 1;
    double dot = 0, size = 0;
    for (size_t j = 0; j < H; ++j) {
      double grad = 0, terms = 0;
      for (size_t d = 0; d < D && kept; ++d) {
        const double term = dy.at(dy_row * D + d) * w2.at((expert[r] * D + d) * H + j);
        grad += term;
        terms += std::abs(term);
      }
      const CurvePoint act = activate(form.curve, kept ? h.at(r * F + j) : 0);
      const CurvePoint factor =
          kept && form.gated ? factor_of(form.curve, h.at(r * F + H + j)) : CurvePoint{kept ? 1. : 0., 1};
      const double up = factor.value;
      dot += grad * act.value * up;
      size += terms * std::abs(act.value * up);
      check_value<T>("dh", dh.at(r * F + j), scale * grad * act.slope * up, r, j);
      if (form.gated)
        check_value<T>("dh of up", dh.at(r * F + H + j), scale * grad * act.value * factor.slope, r, j);
      check_value<T>("scaled_a", scaled_a.at(r * H + j), scale * act.value * up, r, j);
    }
    if (!kept) continue;
    for (size_t d = 0; d < D && form.with_b2; ++d) {
      const double term = dy.at(dy_row * D + d) * b2.at(expert[r] * D + d);
      dot += term;
      size += std::abs(term);
    }
    check_value<float>("dscale", dscale[unique[r]], dot, r, 0, size);
  }
}

// out[e] = sum over the rows of e of a^T b, or is increased by it; with a gathered, or b, or neither.
enum class Gathered { a, b, none };
template <class T, class Out>
void run_weight(const Case& c, Gathered gathered) {
  constexpr bool accumulate = std::is_same_v<Out, float>;  // into a main gradient
  std::mt19937 random(13);
  const Routing routing(c, random);
  const auto& [E, offs, row_idx, expert] = routing;
  const size_t R = routing.num_rows(), M = c.D, N = c.H;
  const bool index_a = gathered == Gathered::a, index_b = gathered == Gathered::b;
  Buffer<T> a((index_a ? routing.kTokens : R) * M, true), b((index_b ? routing.kTokens : R) * N, true);
  Buffer<Out> out(E * M * N);
  a.fill(random, 1);
  b.fill(random, 1);
  const int last = offs.back();  // what follows the rows of the last expert is NaN
  if (!index_a) a.spoil(last * M, (R - last) * M);
  if (!index_b) b.spoil(last * N, (R - last) * N);
  // and so is the first row after expert 1
  if (E > 2 && !index_a && offs[1] < last) a.spoil(offs[1] * M, M);
  if (accumulate) out.fill(random, 1);
  std::vector<double> expected(out.size, 0), size(out.size, 0);
  for (size_t i = 0; i < out.size && accumulate; ++i) expected[i] = out.at(i);
  for (size_t r = 0, e = 0; r < static_cast<size_t>(last); ++r) {
    while (r >= static_cast<size_t>(offs[e])) ++e;
    const bool indexed = index_a || index_b;
    if (indexed && expert[r] < 0 && !(E > 2 && index_b && r == static_cast<size_t>(offs[1]))) continue;
    for (size_t m = 0; m < M; ++m)
      for (size_t n = 0; n < N; ++n) {
        const double term =
            a.at((index_a ? routing.token(r) : r) * M + m) * b.at((index_b ? routing.token(r) : r) * N + n);
        expected[(e * M + m) * N + n] += term;
        size[(e * M + m) * N + n] += std::abs(term);
      }
  }
  const auto rows = [&](const Buffer<T>& t, size_t width, bool indexed) {
    return GroupedRows{t.data, static_cast<int64_t>(width), indexed ? row_idx.data() : nullptr, routing.kTopK,
                       routing.kNumChoices};
  };
  Buffer<int> order(E);
  launch_heaviest_first(offs.data(), E, R, order.data, nullptr);
  launch_grad_weight_sm90(kDtype<T>, rows(a, M, index_a), rows(b, N, index_b), offs.data(), order.data, E, R,
                          {out.data, accumulate}, c.grid(), nullptr);
  for (size_t i = 0; i < out.size; ++i)
    check_value<Out>("grad_weight", out.at(i), expected[i], i / N, i % N, size[i] / 100);
}

template <class T>
void run_input(const Case& c) {
  std::mt19937 random(17);
  const Routing routing(c, random);
  const auto& [E, offs, row_idx, expert] = routing;
  const size_t R = routing.num_rows(), D = c.D, F = 2 * c.H;
  Buffer<T> dh(R * F), w1(E * F * D), dx(R * D);
  dh.fill(random, 1, c.padding * F);
  w1.fill(random, 0.3f);
  launch_rows_by_weight_sm90(kDtype<T>, dh.data, {w1.data, static_cast<int>(E), 2 * c.H, c.D, true},
                             offs.data(), R, nullptr, RowScale{}, dx.data, c.grid(), nullptr);
  for (size_t r = 0, e = 0; r < R; ++r) {
    while (e < offs.size() && r >= static_cast<size_t>(offs[e])) ++e;
    for (size_t j = 0; j < D; ++j) {
      double sum = 0;
      for (size_t k = 0; k < F && e < offs.size(); ++k) sum += dh.at(r * F + k) * w1.at((e * F + k) * D + j);
      check_value<T>("dx", dx.at(r * D + j), sum, r, j);
    }
  }
}

}  // namespace fmoe_ext
