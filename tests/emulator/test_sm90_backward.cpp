// The Hopper kernels of the backward, B1, B2 / B5 and B3, against plain loops in double, over tails, empty
// experts, padding and schedules.
#include "sm90_cases.h"

using namespace fmoe_ext;

namespace {

struct Form {
  CurveKind curve;
  bool gated, by_token, weighted, with_b2;
};

template <class T>
void run_hidden(const Case& c, const Form& form) {
  std::mt19937 random(11);
  const Routing routing(c, random);
  const auto& [E, offs, row_idx, expert] = routing;
  const size_t R = routing.num_rows(), D = c.D, H = c.H, F = form.gated ? 2 * H : H;
  const size_t num_dots = num_hidden_dots_sm90(c.H, c.grid());
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

// out[e] = sum over the rows of e of a^T b, with a gathered, or b, or neither.
enum class Gathered { a, b, none };
template <class T, class Out>
void run_weight(const Case& c, Gathered gathered, bool accumulate) {
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
  if (E > 2 && !index_a) a.spoil(offs[1] * M, M);  // and so is the first row of expert 2
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
                          {out.data, std::is_same_v<Out, float>, accumulate}, c.grid(), nullptr);
  for (size_t i = 0; i < out.size; ++i)
    check_value<Out>("grad_weight", out.at(i), expected[i], i / N, i % N, size[i] / 100);
}

// The experts are taken in the order that is given: of one that it leaves out nothing is written.
void test_order() {
  const int offs[] = {1, 2}, order[] = {1, 1};
  Buffer<__nv_bfloat16> a(2 * 8), b(2 * 8), out(2 * 8 * 8);
  std::mt19937 random(23);
  a.fill(random, 1);
  b.fill(random, 1);
  const GroupedRows rows_a{a.data, 8, nullptr, 1, 0}, rows_b{b.data, 8, nullptr, 1, 0};
  launch_grad_weight_sm90(Dtype::bf16, rows_a, rows_b, offs, order, 2, 2, {out.data, false, false}, {1},
                          nullptr);
  for (size_t i = 0; i < 64; ++i) {
    CHECK(std::isnan(out.at(i)), "an expert that is not in the order was written");
    check_value<__nv_bfloat16>("grad_weight", out.at(64 + i), a.at(8 + i / 8) * b.at(8 + i % 8), i / 8,
                               i % 8);
  }
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
  launch_grad_input_sm90(kDtype<T>, dh.data, offs.data(), w1.data, R, E, c.D, 2 * c.H, dx.data, c.grid(),
                         nullptr);
  for (size_t r = 0, e = 0; r < R; ++r) {
    while (e < offs.size() && r >= static_cast<size_t>(offs[e])) ++e;
    for (size_t j = 0; j < D; ++j) {
      double sum = 0;
      for (size_t k = 0; k < F && e < offs.size(); ++k) sum += dh.at(r * F + k) * w1.at((e * F + k) * D + j);
      check_value<T>("dx", dx.at(r * D + j), sum, r, j);
    }
  }
}

// Whatever offs holds, pairs stay in step and every row is written, none past the end.
void test_garbage_offs() {
  constexpr int R = 200, D = 136, F = 40;
  std::mt19937 random(29);
  Buffer<__nv_bfloat16> dh(R * F), w1(3 * F * D), dw1(3 * F * D);
  dh.fill(random, 1);
  w1.fill(random, 1);
  const int order[] = {2, 0, 1};
  for (const auto& offs : {std::vector<int>{5, 2, 90}, {-4, 130, 130}, {INT32_MAX, 0, 0}, {R, 10, -1}}) {
    Buffer<__nv_bfloat16> dx(R * D);
    launch_grad_input_sm90(Dtype::bf16, dh.data, offs.data(), w1.data, R, 3, D, F, dx.data, {4, 2}, nullptr);
    for (size_t i = 0; i < dx.size; ++i) CHECK(!std::isnan(dx.at(i)), "row %zu was not written", i / D);
    launch_grad_weight_sm90(Dtype::bf16, {dx.data, D, nullptr, 1, 0}, {dh.data, F, nullptr, 1, 0},
                            offs.data(), order, 3, R, {dw1.data, false, false}, {4, 2}, nullptr);
    for (size_t i = 0; i < dw1.size; ++i) CHECK(!std::isnan(dw1.at(i)), "sum %zu was not written", i);
  }
}

void test_refusals() {
  const auto refuses = [](const char* expected, Dtype dtype, const int* index_b, WeightGrad out) {
    const int offs[] = {0}, index[] = {0};
    std::string text;
    try {
      launch_grad_weight_sm90(dtype, {nullptr, 8, index, 1, 1}, {nullptr, 8, index_b, 1, 1}, offs, index, 1,
                              0, out, {1}, nullptr);
    } catch (std::runtime_error& error) {
      text = error.what();
    }
    CHECK(text.find(expected) != std::string::npos, "expected '%s', got '%s'", expected, text.c_str());
  };
  const int index[] = {0};
  refuses("bfloat16 or float16", Dtype::f32, nullptr, {});
  refuses("not both", Dtype::bf16, index, {});
  refuses("into float32 only", Dtype::bf16, nullptr, {nullptr, false, true});
}

}  // namespace

int main(int argc, char** argv) {
  using bf16 = __nv_bfloat16;
  end_after_cpu_seconds(600);
  const int num_seeds = argc > 1 ? std::atoi(argv[1]) : 1;
  const std::vector<Case> cases = {
      {{0, 130, 70}, 0, 128, 128, 1},     // several tiles a block
      {{0, 71, 40, 0}, 140, 72, 136, 3},  // tails of k and of columns, two tiles of padding
      {{5, 0, 97, 1}, 2, 200, 264, 2},   {{1}, 0, 8, 8, 16}, {{0, 0}, 3, 64, 64, 4},
  };
  const std::vector<Case> cases_of_pairs = {
      {{0, 130, 70}, 0, 128, 128, 2, 2},        // one pair; two row tiles, then one; one weight tile
      {{5, 0, 257, 1, 64}, 140, 72, 40, 7, 2},  // three pairs and a block too many; three row tiles
      {{1}, 0, 200, 264, 8, 2},                 // two weight tiles along m and along n
      {{0, 0}, 3, 64, 64, 4, 2},
  };
  const Case few_rows_each{{3, 5, 3, 64, 3, 1, 3, 2, 3, 4, 1, 3}, 0, 40, 40, 2, 2};  // nothing of most by TMA
  const Case three_weight_tiles{{67, 0}, 0, 264, 520, 4, 2};
  const std::vector<Case> cases_of_64_rows = {
      {{0, 130, 70}, 0, 40, 200, 1, 1, 64},  // more steps than stages
      {{5, 0, 64, 1, 65}, 70, 72, 40, 3, 1, 64},
      {{5, 0, 130, 1}, 70, 200, 40, 4, 2, 64},  // pairs of them
  };
  const std::vector<Case> cases_of_256_columns = {
      {{0, 130, 70}, 0, 264, 200, 1, 1, 128, 256},     // more steps than stages, two tiles of columns
      {{5, 0, 257, 1}, 140, 200, 40, 7, 2, 128, 256},  // pairs; one of the warpgroups without rows
      {{0, 0}, 3, 72, 8, 3, 1, 128, 256},
  };
  test_refusals();
  for_every_schedule(num_seeds, [&] {
    for (const Case& c : cases) {
      run_hidden<bf16>(c, {CurveKind::silu, true, true, true, false});
      run_input<bf16>(c);
      run_weight<bf16, bf16>(c, Gathered::a, false);
      run_weight<bf16, float>(c, Gathered::b, true);
    }
    for (const CurveKind curve : {CurveKind::gelu, CurveKind::gelu_tanh, CurveKind::relu, CurveKind::silu,
                                  CurveKind::relu2, CurveKind::clamped_silu}) {
      run_hidden<bf16>({{9, 0, 17}, 1, 16, 72, 2}, {curve, false, true, false, true});
      run_hidden<__half>({{70, 3}, 1, 24, 40, 2}, {curve, true, false, true, true});
    }
    // More row tiles of an expert, or tiles of m, than go through all columns together.
    run_hidden<bf16>({{2100}, 0, 8, 136, 5}, {CurveKind::silu, false, true, false, false});
    run_weight<bf16, bf16>({{5}, 0, 2056, 264, 7}, Gathered::a, false);
    // A warpgroup that has no rows of any tile, while the stages go round.
    run_weight<bf16, bf16>({{130, 270}, 0, 40, 520, 1}, Gathered::b, false);
    for (const Case& c : cases_of_pairs) {
      run_input<bf16>(c);
      run_weight<bf16, bf16>(c, Gathered::a, false);
      run_weight<bf16, float>(c, Gathered::b, true);
    }
    run_weight<bf16, bf16>(few_rows_each, Gathered::a, false);
    run_weight<bf16, bf16>(three_weight_tiles, Gathered::a, false);
    run_weight<bf16, bf16>(three_weight_tiles, Gathered::b, false);
    run_hidden<__half>({{5, 0, 257, 1, 64}, 140, 72, 40, 7}, {CurveKind::gelu, false, false, true, true});
    run_weight<__half, float>(cases_of_pairs[1], Gathered::none, true);
    run_input<__half>({{2100}, 0, 200, 8, 6, 2});  // more pairs of row tiles than go through together
    for (const Case& c : cases_of_64_rows) run_input<bf16>(c);
    for (Case c : cases_of_256_columns) {
      run_input<bf16>(c);
      c.cluster = 1;
      run_hidden<bf16>(c, {CurveKind::silu, true, true, true, false});
    }
    // Two tiles of columns, of which the second has two of four units; a block takes several tiles.
    run_hidden<bf16>({{0, 130, 70}, 0, 136, 328, 1, 1, 128, 256}, {CurveKind::silu, true, true, true, true});
    run_hidden<__half>({{70, 3}, 1, 24, 584, 2, 1, 128, 256}, {CurveKind::gelu, false, false, true, true});
    run_input<__half>(cases_of_64_rows[1]);
    const Case& c = cases[1];
    run_input<__half>(c);
    run_weight<__half, __half>(c, Gathered::b, false);
    run_weight<__half, float>(c, Gathered::none, false);
    test_order();
    test_garbage_offs();
  });
  return finish();
}
