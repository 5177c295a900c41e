// The Hopper kernels of the backward over tails, empty experts, padding and schedules.
#include "sm90_backward.h"

using namespace fmoe_ext;

namespace {

// The experts are taken in the order that is given: of one that it leaves out nothing is written.
void test_order() {
  const int offs[] = {1, 2}, order[] = {1, 1};
  Buffer<__nv_bfloat16> a(2 * 8), b(2 * 8), out(2 * 8 * 8);
  std::mt19937 random(23);
  a.fill(random, 1);
  b.fill(random, 1);
  const GroupedRows rows_a{a.data, 8, nullptr, 1, 0}, rows_b{b.data, 8, nullptr, 1, 0};
  launch_grad_weight_sm90(Dtype::bf16, rows_a, rows_b, offs, order, 2, 2, {out.data, false}, {1}, nullptr);
  for (size_t i = 0; i < 64; ++i) {
    CHECK(std::isnan(out.at(i)), "an expert that is not in the order was written");
    check_value<__nv_bfloat16>("grad_weight", out.at(64 + i), a.at(8 + i / 8) * b.at(8 + i % 8), i / 8,
                               i % 8);
  }
}

// Whatever offs holds, every row is written, none past the end.
void test_garbage_offs() {
  constexpr int R = 200, D = 136, F = 40;
  std::mt19937 random(29);
  Buffer<__nv_bfloat16> dh(R * F), w1(3 * F * D), dw1(3 * F * D);
  dh.fill(random, 1);
  w1.fill(random, 1);
  const int order[] = {2, 0, 1};
  for (const auto& offs : {std::vector<int>{5, 2, 90}, {-4, 130, 130}, {INT32_MAX, 0, 0}, {R, 10, -1}}) {
    Buffer<__nv_bfloat16> dx(R * D);
    launch_rows_by_weight_sm90(Dtype::bf16, dh.data, {w1.data, 3, F, D, true}, offs.data(), R, nullptr,
                               RowScale{}, dx.data, {4}, nullptr);
    for (size_t i = 0; i < dx.size; ++i) CHECK(!std::isnan(dx.at(i)), "row %zu was not written", i / D);
    launch_grad_weight_sm90(Dtype::bf16, {dx.data, D, nullptr, 1, 0}, {dh.data, F, nullptr, 1, 0},
                            offs.data(), order, 3, R, {dw1.data, false}, {4}, nullptr);
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
  const std::vector<Case> cases_of_weights = {
      {{5, 0, 257, 1, 64}, 140, 72, 40, 7},  // three row tiles, a block too many
      {{1}, 0, 200, 264, 8},                 // two weight tiles along m and along n
      {{0, 0}, 3, 64, 64, 4},
  };
  const Case few_rows_each{{3, 5, 3, 64, 3, 1, 3, 2, 3, 4, 1, 3}, 0, 40, 40, 2};  // nothing of most by TMA
  const Case three_weight_tiles{{67, 0}, 0, 264, 520, 4};
  const std::vector<Case> cases_of_256_columns = {
      {{0, 130, 70}, 0, 264, 200, 1, 256},     // more steps than stages, two tiles of columns
      {{5, 0, 257, 1}, 140, 200, 40, 7, 256},  // one of the warpgroups without rows
      {{0, 0}, 3, 72, 8, 3, 256},
  };
  test_refusals();
  for_every_schedule(num_seeds, [&] {
    for (const Case& c : cases) {
      run_hidden<bf16>(c, {CurveKind::silu, true, true, true, false});
      run_input<bf16>(c);
      run_weight<bf16, bf16>(c, Gathered::a);
      run_weight<bf16, float>(c, Gathered::b);
    }
    for (const CurveKind curve : {CurveKind::gelu, CurveKind::gelu_tanh, CurveKind::relu, CurveKind::silu,
                                  CurveKind::relu2, CurveKind::clamped_silu}) {
      run_hidden<bf16>({{9, 0, 17}, 1, 16, 72, 2}, {curve, false, true, false, true});
      run_hidden<__half>({{70, 3}, 1, 24, 40, 2}, {curve, true, false, true, true});
    }
    // More row tiles of an expert, or tiles of m, than go through all columns together.
    run_hidden<bf16>({{2100}, 0, 8, 136, 5}, {CurveKind::silu, false, true, false, false});
    run_weight<bf16, bf16>({{5}, 0, 2056, 264, 7}, Gathered::a);
    // A warpgroup that has no rows of any tile, while the stages go round.
    run_weight<bf16, bf16>({{130, 270}, 0, 40, 520, 1}, Gathered::b);
    for (const Case& c : cases_of_weights) {
      run_input<bf16>(c);
      run_weight<bf16, bf16>(c, Gathered::a);
      run_weight<bf16, float>(c, Gathered::b);
    }
    run_weight<bf16, bf16>(few_rows_each, Gathered::a);
    run_weight<bf16, bf16>(three_weight_tiles, Gathered::a);
    run_weight<bf16, bf16>(three_weight_tiles, Gathered::b);
    run_hidden<__half>({{5, 0, 257, 1, 64}, 140, 72, 40, 7}, {CurveKind::gelu, false, false, true, true});
    run_weight<__half, float>(cases_of_weights[0], Gathered::none);
    run_input<__half>({{2100}, 0, 200, 8, 6});  // more row tiles than go through together
    for (const Case& c : cases_of_256_columns) run_input<bf16>(c);
    const Case& c = cases[1];
    run_input<__half>(c);
    run_weight<__half, __half>(c, Gathered::b);
    run_weight<__half, float>(c, Gathered::none);
    test_order();
    test_garbage_offs();
  });
  return finish();
}
