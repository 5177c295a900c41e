// The Hopper products of the forward, F1 and F2, against plain loops in double, over tails, empty experts,
// padding and schedules.
#include "../../cuda/select.h"
#include "sm90_cases.h"

using namespace fmoe_ext;

namespace {

template <class T>
void run_case(const Case& c) {
  std::mt19937 random(7);
  const Routing routing(c, random);
  const auto& [E, offs, row_idx, expert] = routing;
  const size_t R = routing.num_rows(), D = c.D, H = c.H;
  Buffer<T> x(routing.kTokens * D + 64), w1(E * 2 * H * D), w2(E * D * H), h(R * 2 * H), a(R * H), y(R * D);
  x.fill(random, 1, 64);  // NaN follows the last row
  w1.fill(random, 0.3f);
  w2.fill(random, 0.3f);

  launch_up_swiglu_sm90(kDtype<T>, x.data, row_idx.data(), offs.data(), w1.data, R, routing.kNumChoices,
                        routing.kTopK, E, c.D, c.H, h.data, a.data, c.blocks, nullptr);
  for (size_t r = 0; r < R; ++r)
    for (size_t j = 0; j < H; ++j) {
      double gate = 0, up = 0;
      const size_t w = (expert[r] < 0 ? 0 : expert[r]) * 2 * H * D;
      for (size_t k = 0; k < D && expert[r] >= 0; ++k) {
        gate += x.at(routing.token(r) * D + k) * w1.at(w + j * D + k);
        up += x.at(routing.token(r) * D + k) * w1.at(w + (H + j) * D + k);
      }
      check_value<T>("gate", h.at(r * 2 * H + j), gate, r, j);
      check_value<T>("up", h.at(r * 2 * H + H + j), up, r, j);
      gate = h.at(r * 2 * H + j);  // a is the activation of h as stored
      up = h.at(r * 2 * H + H + j);
      check_value<T>("a", a.at(r * H + j), gate * up / (1 + std::exp(-gate)), r, j);
    }

  launch_down_sm90(kDtype<T>, a.data, offs.data(), w2.data, R, E, c.D, c.H, y.data, c.grid(), nullptr);
  for (size_t r = 0; r < R; ++r)
    for (size_t j = 0; j < D; ++j) {
      double sum = 0;
      for (size_t k = 0; k < H && expert[r] >= 0; ++k)
        sum += a.at(r * H + k) * w2.at((expert[r] * D + j) * H + k);
      check_value<T>("y", y.at(r * D + j), sum, r, j);
    }
}

void test_grids() {
  const auto is = [](const Grid& grid, int cluster, int tile_rows) {
    CHECK(grid.num_blocks == 7 && grid.cluster == cluster && grid.tile_rows == tile_rows,
          "expected %d blocks a cluster and %d rows, got %d and %d", cluster, tile_rows, grid.cluster,
          grid.tile_rows);
  };
  for (const Product product : {Product::rows_by_weight, Product::grad_input}) {
    is(select_grid(product, 47 * 8 + 7, 8, 7), 1, 64);
    is(select_grid(product, 48 * 8, 8, 7), 1, 128);
    is(select_grid(product, 2048 * 8 - 1, 8, 7), 1, 128);
    is(select_grid(product, 2048 * 8, 8, 7), 2, 128);
  }
  is(select_grid(Product::grad_hidden, 1, 8, 7), 1, 128);
  is(select_grid(Product::grad_hidden, 2048 * 8, 8, 7), 2, 128);
  const auto of_weight = [](int64_t M, int64_t N, const int* index_b) {
    return select_weight_grid({nullptr, M, nullptr, 1, 0}, {nullptr, N, index_b, 1, 0}, 7);
  };
  const int index = 0;
  is(of_weight(200, 256, nullptr), 2, 128);  // A gathered: two tiles of m
  is(of_weight(264, 512, nullptr), 1, 128);
  is(of_weight(31 * 128, 8, nullptr), 2, 128);
  is(of_weight(200, 256, &index), 1, 128);  // B gathered: one tile of n
  is(of_weight(8, 512, &index), 2, 128);
}

}  // namespace

int main(int argc, char** argv) {
  end_after_cpu_seconds(600);
  const int num_seeds = argc > 1 ? std::atoi(argv[1]) : 1;
  const std::vector<Case> cases = {
      {{0, 130, 70}, 0, 128, 128, 1},       // several tiles a block
      {{0, 131, 70, 0}, 150, 200, 136, 3},  // tails of k and of columns, two tiles of padding
      {{5, 0, 257, 1}, 2, 72, 192, 2},     {{1}, 0, 8, 8, 132}, {{0, 0}, 3, 64, 64, 4},
  };
  const std::vector<Case> cases_of_pairs = {
      {{0, 130, 70}, 0, 200, 64, 2, 2},        // one pair; two row tiles, then one
      {{5, 0, 257, 1, 0}, 140, 72, 72, 7, 2},  // three pairs and a block too many; three row tiles
      {{1}, 0, 8, 8, 8, 2},
      {{0, 0}, 3, 64, 64, 4, 2},
  };
  const std::vector<Case> cases_of_64_rows = {
      {{0, 130, 70}, 0, 40, 392, 1, 1, 64},  // more steps than stages
      {{5, 0, 64, 1, 65}, 70, 200, 72, 3, 1, 64},
      {{1}, 0, 8, 8, 5, 1, 64},
      {{5, 0, 130, 1}, 70, 72, 72, 4, 2, 64},  // pairs of them
  };
  test_grids();
  for_every_schedule(num_seeds, [&] {
    for (const Case& c : cases) run_case<__nv_bfloat16>(c);
    run_case<__half>(cases[2]);
    for (const Case& c : cases_of_pairs) run_case<__nv_bfloat16>(c);
    for (const Case& c : cases_of_64_rows) run_case<__nv_bfloat16>(c);
    run_case<__half>(cases_of_pairs[1]);
    run_case<__half>(cases_of_64_rows[1]);
  });
  return finish();
}
