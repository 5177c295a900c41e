// The portable kernels on buffers of exactly their size, for the sanitizers: ASan sees an access outside,
// TSan two threads that disagree. Values are checked against plain loops here, and against the oracles from
// Python.
#include <algorithm>
#include <cmath>

#include "../../cuda/common.cuh"
#include "check.h"

using namespace fmoe_ext;

namespace {

std::mt19937 generator(11);

template <typename T>
std::vector<T> random_values(size_t count) {
  std::vector<T> values(count);
  for (T& v : values) v = round_to<T>(acc_t<T>(int(generator() % 2001) - 1000) / 1000);
  return values;
}

// Routing as sort_tokens defines it, by a loop.
struct Sorted {
  std::vector<int> offs, row_idx, inverse;
  std::vector<int64_t> tokens_per_expert;
};
template <typename index_t>
Sorted sort_by_loop(const std::vector<index_t>& idx, int E) {
  Sorted s{{}, {}, std::vector<int>(idx.size(), -1), {}};
  for (int e = 0; e < E; ++e) {
    for (size_t i = 0; i < idx.size(); ++i)
      if (idx[i] == e) {
        s.inverse[i] = static_cast<int>(s.row_idx.size());
        s.row_idx.push_back(static_cast<int>(i));
      }
    s.tokens_per_expert.push_back(static_cast<int64_t>(s.row_idx.size()) - (e ? s.offs.back() : 0));
    s.offs.push_back(static_cast<int>(s.row_idx.size()));
  }
  s.row_idx.resize(idx.size(), -1);
  return s;
}

template <typename index_t>
void test_routing(int T, int K, int E) {
  std::vector<index_t> idx(T * K);
  for (index_t& e : idx)
    if ((e = static_cast<index_t>(int(generator() % (E + 2)) - 1)) == E) e = 1 << 30;  // far out of range
  const Indices indices{idx.data(), sizeof(index_t) == 8};
  const Sorted expected = sort_by_loop(idx, E);

  std::vector<int64_t> counts(E, 0);
  launch_count_tokens(indices, T * K, E, counts.data(), nullptr);
  CHECK(counts == expected.tokens_per_expert, "count_tokens T %d K %d E %d", T, K, E);

  Sorted ours{std::vector<int>(E, -7), std::vector<int>(T * K, -7), std::vector<int>(T * K, -7),
              std::vector<int64_t>(E, -7)};
  std::vector<int> workspace(rank_workspace_ints(T * K, E));
  launch_sort_tokens(indices, T * K, E, workspace.data(), ours.tokens_per_expert.data(), ours.offs.data(),
                     ours.row_idx.data(), ours.inverse.data(), nullptr);
  CHECK(ours.tokens_per_expert == expected.tokens_per_expert, "tokens_per_expert T %d K %d E %d", T, K, E);
  CHECK(ours.offs == expected.offs, "offs T %d K %d E %d", T, K, E);
  CHECK(ours.row_idx == expected.row_idx, "row_idx T %d K %d E %d", T, K, E);
  CHECK(ours.inverse == expected.inverse, "inverse T %d K %d E %d", T, K, E);

  std::vector<int64_t> capacity(E), left;
  for (int64_t& c : capacity) c = generator() % (2 * T * K / E + 2);
  std::vector<index_t> kept(T * K, 99), kept_by_loop(T * K, -1);
  left = capacity;
  for (int k = 0; k < K; ++k)
    for (int t = 0; t < T; ++t) {
      const index_t e = idx[t * K + k];
      if (e >= 0 && e < E && left[e]-- > 0) kept_by_loop[t * K + k] = e;
    }
  launch_apply_capacity(indices, T, K, E, capacity.data(), workspace.data(), kept.data(), nullptr);
  CHECK(kept == kept_by_loop, "apply_capacity T %d K %d E %d", T, K, E);
}

template <typename T>
void check_near(const char* what, T got, double expected) {
  const double tolerance = (sizeof(T) == 2 ? 1e-2 : 1e-5) * (1 + std::abs(expected));
  CHECK(std::abs(static_cast<double>(to_acc(got)) - expected) <= tolerance, "%s: %g, expected %g", what,
        static_cast<double>(to_acc(got)), expected);
}

template <typename T>
void test_permute(Dtype dtype, int64_t D) {
  const int tokens = 13, K = 2, E = 3, R = tokens * K;
  std::vector<int64_t> idx(R);
  for (int64_t& e : idx) e = int(generator() % (E + 1)) - 1;
  const Sorted s = sort_by_loop(idx, E);
  const auto x = random_values<T>(tokens * D);
  const auto weights = random_values<acc_t<T>>(R);
  std::vector<T> rows(R * D), out(tokens * D), grad_rows(R * D);
  launch_permute(x.data(), s.row_idx.data(), R, R, K, D * sizeof(T), rows.data(), nullptr);
  for (int r = 0; r < R; ++r)
    for (int64_t d = 0; d < D; ++d)
      check_near("permute", rows[r * D + d],
                 s.row_idx[r] < 0 ? 0 : static_cast<double>(to_acc(x[s.row_idx[r] / K * D + d])));
  launch_unpermute(dtype, rows.data(), s.inverse.data(), weights.data(), tokens, K, R, D, out.data(),
                   nullptr);
  for (int t = 0; t < tokens; ++t)
    for (int64_t d = 0; d < D; ++d) {
      double sum = 0;
      for (int k = 0; k < K; ++k)
        if (s.inverse[t * K + k] >= 0) sum += static_cast<double>(weights[t * K + k]) * to_acc(x[t * D + d]);
      check_near("unpermute", out[t * D + d], sum);
    }
  std::vector<acc_t<T>> grad_weights(R, 0);
  launch_unpermute_backward(dtype, x.data(), rows.data(), s.row_idx.data(), weights.data(), R, R, K, D,
                            grad_rows.data(), grad_weights.data(), nullptr);
  for (int r = 0; r < R; ++r) {
    double norm = 0;
    for (int64_t d = 0; d < D; ++d) {
      const double v = s.row_idx[r] < 0 ? 0 : static_cast<double>(to_acc(x[s.row_idx[r] / K * D + d]));
      check_near("grad_y", grad_rows[r * D + d], s.row_idx[r] < 0 ? 0 : v * weights[s.row_idx[r]]);
      norm += v * v;
    }
    if (s.row_idx[r] >= 0) check_near("grad_weights", grad_weights[s.row_idx[r]], norm);
  }
}

template <typename T>
void test_gate(Dtype dtype, int E, int K) {
  const int tokens = 6;
  const auto logits = random_values<T>(tokens * E);
  std::vector<int64_t> idx(tokens * K);
  std::vector<T> weights(tokens * K), grad(tokens * K, round_to<T>(1)), grad_logits(tokens * E);
  const GateParams params{E, K, 1, 1, false, true, 1.0};
  launch_topk_gate(dtype, logits.data(), nullptr, params, tokens, idx.data(), weights.data(), nullptr);
  for (int t = 0; t < tokens; ++t) {
    std::vector<int> order(E);
    for (int e = 0; e < E; ++e) order[e] = e;
    const auto value = [&](int e) { return static_cast<double>(to_acc(logits[t * E + e])); };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return value(a) > value(b); });
    double sum = 0;
    for (int k = 0; k < K; ++k) sum += std::exp(value(order[k]));
    for (int k = 0; k < K; ++k) {
      CHECK(idx[t * K + k] == order[k], "token %d choice %d: %ld, expected %d", t, k, idx[t * K + k],
            order[k]);
      check_near("weight", weights[t * K + k], std::exp(value(order[k])) / sum);
    }
  }
  launch_topk_gate_backward(dtype, grad.data(), logits.data(), idx.data(), weights.data(), params, tokens,
                            grad_logits.data(), nullptr);
  for (const T& v : grad_logits)
    check_near("grad_logits", v, 0);  // the weights sum to one whatever the logits
}

template <typename T>
void test_products(Dtype dtype, std::vector<int> counts, int64_t D, int64_t N) {
  const int E = static_cast<int>(counts.size()), padding = 2;
  std::vector<int> offs, expert;
  for (int e = 0; e < E; ++e) {
    expert.insert(expert.end(), counts[e], e);
    offs.push_back(static_cast<int>(expert.size()));
  }
  const int used = static_cast<int>(expert.size()), R = used + padding;
  const auto x = random_values<T>(R * D), dy = random_values<T>(R * N), bias = random_values<T>(E * N);
  auto w = random_values<T>(E * N * D);
  w.resize(w.size() + N * D, round_to<T>(NAN));  // whoever takes the padding for an expert reads this
  std::vector<int> row_idx(R);
  for (int r = 0; r < R; ++r) row_idx[r] = r % 5 == 4 ? 1 << 30 : int(generator() % R);
  const auto weights = random_values<acc_t<T>>(R);
  const auto factor = [&](int r) { return row_idx[r] < R ? static_cast<double>(weights[row_idx[r]]) : 0; };
  std::vector<T> y(R * N), dx(R * D), dw(E * N * D, round_to<T>(1)), db(E * N);
  const GroupedRows x_rows{x.data(), D, nullptr, 1, 0}, dy_rows{dy.data(), N, nullptr, 1, 0};
  launch_rows_by_weight(dtype, x_rows, {w.data(), E, N, D, false}, offs.data(), R, bias.data(),
                        {weights.data(), row_idx.data(), R}, y.data(), nullptr);
  launch_rows_by_weight(dtype, dy_rows, {w.data(), E, N, D, true}, offs.data(), R, nullptr, {}, dx.data(),
                        nullptr);
  launch_rows_by_rows(dtype, dy_rows, x_rows, offs.data(), E, R, {dw.data(), false}, nullptr);
  const auto main_values = random_values<acc_t<T>>(E * N * D);
  std::vector<acc_t<T>, BeforeGuardPage<acc_t<T>>> main_dw(main_values.begin(), main_values.end());
  for (int e = 0; e < E; ++e)  // -0 + 0 would be 0: without rows there is no addition
    if (counts[e] == 0) std::fill_n(&main_dw[e * N * D], N * D, -acc_t<T>(0));
  const auto main_before = main_dw;
  launch_rows_by_rows(dtype, dy_rows, x_rows, offs.data(), E, R, {main_dw.data(), true}, nullptr);
  launch_sum_rows(dtype, dy_rows, offs.data(), E, R, {}, db.data(), nullptr);
  const auto at = [](const std::vector<T>& v, int64_t i) { return static_cast<double>(to_acc(v[i])); };
  for (int r = 0; r < R; ++r) {
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < D && r < used; ++k)
        sum += at(x, r * D + k) * at(w, (expert[r] * N + n) * D + k);
      if (r < used) sum = (sum + at(bias, expert[r] * N + n)) * factor(r);
      check_near("y", y[r * N + n], sum);
    }
    for (int64_t d = 0; d < D; ++d) {
      double sum = 0;
      for (int64_t n = 0; n < N && r < used; ++n)
        sum += at(dy, r * N + n) * at(w, (expert[r] * N + n) * D + d);
      check_near("dx", dx[r * D + d], sum);
    }
  }
  for (int e = 0; e < E; ++e)
    for (int64_t n = 0; n < N; ++n) {
      double total = 0;
      for (int r = 0; r < used; ++r) total += expert[r] == e ? at(dy, r * N + n) : 0;
      check_near("db", db[e * N + n], total);
      for (int64_t d = 0; d < D; ++d) {
        double sum = 0;
        for (int r = 0; r < used; ++r) sum += expert[r] == e ? at(dy, r * N + n) * at(x, r * D + d) : 0;
        const int64_t i = (e * N + n) * D + d;
        check_near("dw", dw[i], sum);
        check_near("main_dw", main_dw[i], static_cast<double>(main_before[i]) + sum);
        if (counts[e] == 0) CHECK(std::signbit(main_dw[i]), "main_dw of an expert without rows was written");
      }
    }
}

double curve(CurveKind kind, double x) {
  switch (kind) {
    case CurveKind::gelu:
      return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
    case CurveKind::gelu_tanh:
      return x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))) / 2;
    case CurveKind::silu:
      return x / (1 + std::exp(-x));
    case CurveKind::relu2:
      return x > 0 ? x * x : 0;
    case CurveKind::clamped_silu:
      return std::min(x, 7.) / (1 + std::exp(-1.702 * std::min(x, 7.)));
    default:
      return x > 0 ? x : 0;
  }
}
double factor(CurveKind kind, double up) {
  return kind == CurveKind::clamped_silu ? std::clamp(up, -7., 7.) + 1 : up;
}
double slope(CurveKind kind, double x) {
  if (kind == CurveKind::relu) return x > 0;
  if (kind == CurveKind::clamped_silu && x == 7) x -= 1e-5;  // the limit still moves
  return (curve(kind, x + 1e-5) - curve(kind, x - 1e-5)) / 2e-5;
}

// Two experts, one choice out of range, two rows of padding, weights and a bias; forward and backward.
template <typename T>
void test_activation(Dtype dtype, CurveKind kind, bool gated, int64_t H) {
  const int E = 2, K = 2, tokens = 4, R = tokens * K;
  const int64_t D = 5, F = gated ? 2 * H : H;
  const std::vector<int> offs = {4, 6}, row_idx = {5, 0, 1 << 30, 2, 7, 3, -1, -1};
  auto h = random_values<T>(R * F);
  for (size_t i = 0; kind == CurveKind::clamped_silu && i < h.size();
       ++i)  // below, inside and above the limits
    h[i] = round_to<T>(to_acc(h[i]) * 20);
  const auto grad = random_values<T>(R * H), b2 = random_values<T>(E * D), dy = random_values<T>(tokens * D);
  const auto weights = random_values<acc_t<T>>(R);
  std::vector<T> a(R * H), dh(R * F), scaled(R * H);
  std::vector<acc_t<T>> dscale(R, 0);
  const ActivationRows rows{h.data(), offs.data(), row_idx.data(), weights.data(), E, K, R, R, true};
  launch_activation(dtype, kind, gated, h.data(), offs.data(), E, R, H, a.data(), nullptr);
  launch_activation_backward(dtype, kind, gated, grad.data(), rows, dy.data(), b2.data(), H, D, dh.data(),
                             scaled.data(), dscale.data(), nullptr);
  const auto at = [](const std::vector<T>& v, int64_t i) { return static_cast<double>(to_acc(v[i])); };
  std::vector<double> dots(R, 0);
  for (int r = 0; r < R; ++r) {
    const int choice = row_idx[r], expert = r < 4 ? 0 : 1;
    const bool kept = choice >= 0 && choice < R;
    for (int64_t j = 0; j < H; ++j) {
      const double x = at(h, r * F + j), linear = gated ? at(h, r * F + H + j) : 1, g = at(grad, r * H + j);
      const double up = gated ? factor(kind, linear) : 1;
      const bool moves = kind != CurveKind::clamped_silu || std::abs(linear) <= 7;
      const double w = kept ? weights[choice] : 0;
      check_near("a", a[r * H + j], r < 6 ? curve(kind, x) * up : 0);
      check_near("dh", dh[r * F + j], w * g * slope(kind, x) * up);
      if (gated) check_near("dh of up", dh[r * F + H + j], moves ? w * g * curve(kind, x) : 0);
      check_near("scaled a", scaled[r * H + j], w * curve(kind, x) * up);
      if (kept) dots[choice] += g * curve(kind, x) * up;
    }
    for (int64_t d = 0; kept && d < D; ++d)
      dots[choice] += at(dy, choice / K * D + d) * at(b2, expert * D + d);
  }
  for (int i = 0; i < R; ++i) check_near("dscale", dscale[i], dots[i]);
}

// Whatever offs holds: a permutation of the experts by the rows that rows_of() gives them.
void test_heaviest_first(const std::vector<int>& offs, int64_t num_rows) {
  const int E = static_cast<int>(offs.size());
  std::vector<int> order(E, -7), expected(E), rows(E);
  for (int e = 0; e < E; ++e) {
    const auto clamp = [&](int64_t row) { return std::clamp<int64_t>(row, 0, num_rows); };
    const int64_t begin = clamp(e ? offs[e - 1] : 0);
    rows[e] = static_cast<int>(std::max(clamp(offs[e]), begin) - begin);
    expected[e] = e;
  }
  std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) { return rows[a] > rows[b]; });
  launch_heaviest_first(offs.data(), E, num_rows, order.data(), nullptr);
  CHECK(order == expected, "heaviest_first E %d", E);
}

}  // namespace

int main(int argc, char** argv) {
  end_after_cpu_seconds(300);
  test_routing<int32_t>(4300, 2, 6500);  // more than 32 tiles
  for_every_schedule(argc > 1 ? std::atoi(argv[1]) : 1, [] {
    test_routing<int64_t>(33, 4, 7);
    test_routing<int32_t>(900, 3, 40);
    test_routing<int64_t>(2, 1, 3000);
    test_permute<float>(Dtype::f32, 5);
    test_permute<__nv_bfloat16>(Dtype::bf16, 72);
    test_gate<float>(Dtype::f32, 70, 6);
    test_gate<double>(Dtype::f64, 3, 3);
    test_products<float>(Dtype::f32, {130, 0, 3}, 132, 136);
    test_products<float>(Dtype::f32, {3, 0, 70}, 21, 13);
    test_products<__nv_bfloat16>(Dtype::bf16, {130, 0, 3}, 200, 136);
    test_products<__half>(Dtype::f16, {5}, 7, 3);
    test_products<double>(Dtype::f64, {4, 70}, 22, 4);
    test_products<double>(Dtype::f64, {4, 3}, 21, 3);
    test_activation<double>(Dtype::f64, CurveKind::gelu, false, 3);
    test_activation<float>(Dtype::f32, CurveKind::gelu_tanh, true, 40);
    test_activation<__half>(Dtype::f16, CurveKind::relu, false, 33);
    test_activation<__nv_bfloat16>(Dtype::bf16, CurveKind::silu, true, 24);
    test_activation<float>(Dtype::f32, CurveKind::relu2, false, 33);
    test_activation<__nv_bfloat16>(Dtype::bf16, CurveKind::relu2, true, 24);
    test_activation<float>(Dtype::f32, CurveKind::clamped_silu, true, 33);
    test_activation<double>(Dtype::f64, CurveKind::clamped_silu, true, 24);
    test_activation<__half>(Dtype::f16, CurveKind::clamped_silu, true, 24);
    test_heaviest_first({}, 4);
    test_heaviest_first({3, 3, 8, 11, 16}, 20);
    test_heaviest_first({90, -5, 1 << 30, 7, 7, 31}, 40);
    std::vector<int> offs(75);
    for (int& end : offs) end = (&end == offs.data() ? 0 : (&end)[-1]) + generator() % 5;
    test_heaviest_first(offs, 400);
  });
  return finish();
}
