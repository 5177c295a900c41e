// The Hopper products of the forward over activations, biases, factors, tails, empty experts, padding and
// schedules.
#include "../../cuda/activation.cuh"
#include "../../cuda/select.h"
#include "sm90_forward.h"

using namespace fmoe_ext;

namespace {

using Form = ForwardForm;

template <class T>
void run_case(const Case& c, const Form& form, float bias_scale = 1) {
  run_up<T>(c, form, bias_scale);
  if (bias_scale == 1) run_rows<T>(c, form);
}

// The fast activations wherever a 16-bit number may lie, against double.
template <CurveKind kCurve>
void test_fast_curve() {
  for (float x = -130; x <= 130; x += 0.125f) {
    const auto fast = activate_fast<kCurve>(x);
    const auto exact = activate(kCurve, static_cast<double>(x));
    CHECK(std::abs(fast.value - exact.value) <= 1e-5 * (1 + std::abs(x)), "curve %d at %g: %g, expected %g",
          static_cast<int>(kCurve), x, fast.value, exact.value);
    CHECK(std::abs(fast.slope - exact.slope) <= 1e-4, "slope of curve %d at %g: %g, expected %g",
          static_cast<int>(kCurve), x, fast.slope, exact.slope);
  }
}

// What select.h names for a product of so many rows, with N columns and sums of K terms.
std::string chosen(Product product, int64_t num_rows, int64_t N = 0, int64_t K = 0) {
  const Entry* entry = select({.product = product,
                               .dtype = Dtype::bf16,
                               .capability = 90,
                               .sizes = {8},
                               .num_rows = num_rows,
                               .num_experts = 8,
                               .N = N,
                               .K = K});
  return entry ? entry->name : "portable";
}
void test_selection() {
  const auto is = [](const std::string& got, const std::string& expected) {
    CHECK(got == expected, "expected %s, got %s", expected.c_str(), got.c_str());
  };
  for (const auto& [product, name] :
       {std::pair(Product::rows_by_weight, "rows_by_weight"), std::pair(Product::grad_input, "grad_input")}) {
    const std::string tile = name + std::string(".128x192"), wide = name + std::string(".128x256");
    is(chosen(product, 3), tile);
    // 8 columns of 256 against 11 of 192: from 75 steps of k; 1 against 2: from 7; 12 against 15, 3 against
    // 3: never
    is(chosen(product, 512 * 8, 2048, 74 * 64), tile);
    is(chosen(product, 512 * 8, 2048, 74 * 64 + 8), wide);
    is(chosen(product, 512 * 8 - 1, 2048, 14336), tile);
    is(chosen(product, 1024 * 8, 256, 6 * 64), tile);
    is(chosen(product, 1024 * 8, 256, 6 * 64 + 8), wide);
    for (const int64_t columns : {2880, 576}) is(chosen(product, 1024 * 8, columns, 28672), tile);
  }
  is(chosen(Product::up, 1024 * 8), "up.128x256");
  is(chosen(Product::grad_hidden, 4096 * 8), "grad_hidden.128x128");
  is(chosen(Product::grad_weight, 512 * 8), "grad_weight.128x256");
}
// What is switched off is not chosen; what is left serves whatever it can compute.
void test_switches() {
  const auto only = [](const std::string& name) {
    uint64_t on = 0;
    for (int i = 0; i < kNumEntries; ++i) on |= uint64_t{kEntries[i].name == name} << i;
    entries_on = on;
  };
  for (const Entry& entry : kEntries) {
    only(entry.name);
    for (const int64_t rows : {1, 1024 * 8})
      CHECK(chosen(entry.product, rows, 1) == entry.name, "%s was not chosen", entry.name);
  }
  only("up.128x256");
  CHECK(chosen(Product::grad_input, 1) == "portable", "an entry that is off was chosen");
  entries_on = ~0ull;
}

}  // namespace

int main(int argc, char** argv) {
  using bf16 = __nv_bfloat16;
  end_after_cpu_seconds(600);
  const int num_seeds = argc > 1 ? std::atoi(argv[1]) : 1;
  const Form swiglu{CurveKind::silu, true, false, false}, gelu{CurveKind::gelu, false, true, true};
  const std::vector<Case> cases_of_256_columns = {
      {{0, 130, 70}, 0, 264, 392, 1, 256},     // more steps than stages, two tiles of columns
      {{5, 0, 257, 1}, 140, 136, 72, 7, 256},  // one of the warpgroups without rows
      {{1}, 0, 8, 8, 5, 256},
      {{0, 0}, 70, 72, 64, 3, 256},
  };
  std::vector<int> many_experts(70, 0);  // more than a warp has lanes
  for (const int e : {0, 5, 31, 32, 40, 63, 64, 69}) many_experts[e] = 2 + e;
  test_selection();
  test_switches();
  test_fast_curve<CurveKind::gelu>();
  test_fast_curve<CurveKind::gelu_tanh>();
  test_fast_curve<CurveKind::relu>();
  test_fast_curve<CurveKind::silu>();
  test_fast_curve<CurveKind::relu2>();
  test_fast_curve<CurveKind::clamped_silu>();
  for_every_schedule(num_seeds, [&] {
    run_case<bf16>({{0, 130, 70}, 0, 128, 128, 1}, swiglu);  // several tiles a block
    // Tails of k and of columns, two tiles of columns, two of padding.
    run_case<bf16>({{0, 131, 70, 0}, 150, 200, 136, 3}, {CurveKind::silu, true, true, true});
    run_case<bf16>({{0, 71, 40, 0}, 140, 200, 264, 3}, gelu);
    run_case<__half>({{5, 0, 257, 1}, 2, 72, 192, 2}, swiglu);
    run_case<bf16>({{1}, 0, 8, 8, 16}, gelu);
    run_case<bf16>({{0, 0}, 3, 64, 64, 4}, gelu);
    for (const CurveKind curve : {CurveKind::gelu, CurveKind::gelu_tanh, CurveKind::relu, CurveKind::silu,
                                  CurveKind::relu2, CurveKind::clamped_silu}) {
      run_case<bf16>({{9, 0, 17}, 1, 16, 72, 2}, {curve, false, false, true});
      run_case<__half>({{70, 3}, 1, 24, 40, 2}, {curve, true, true, false});
      run_case<bf16>({{9}, 0, 16, 72, 2}, {curve, true, true, false}, 120);  // where exponentials overflow
    }
    run_case<bf16>({many_experts, 3, 8, 8, 3}, gelu);
    for (const Case& c : cases_of_256_columns) run_case<bf16>(c, {CurveKind::gelu, false, true, true});
    run_case<__half>({{130}, 0, 72, 200, 2}, gelu);
  });
  return finish();
}
