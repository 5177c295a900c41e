// The Hopper products F1 and F2 against plain loops in double, over tails, empty experts, padding and
// schedules.
#include <cmath>

#include "../../cuda/common.cuh"
#include "check.h"

using namespace fmoe_ext;
using bf16 = __nv_bfloat16;

namespace {

struct Case {
  std::vector<int> counts;  // rows of each expert
  int padding, D, H, blocks;
};

// Memory that begins at 128 bytes as a tensor does; filled with a NaN that no result can be.
struct Buffer {
  explicit Buffer(size_t count)
      : size(count), data(static_cast<bf16*>(aligned_alloc(128, (count * 2 + 127) / 128 * 128))) {
    std::memset(static_cast<void*>(data), 0xff, count * 2);
  }
  ~Buffer() { free(data); }
  Buffer(const Buffer&) = delete;
  bf16& operator[](size_t i) { return data[i]; }
  double at(size_t i) const { return __bfloat162float(data[i]); }
  void fill(std::mt19937& random, float scale, size_t unfilled = 0) {
    for (size_t i = 0; i < size - unfilled; ++i)
      data[i] = __float2bfloat16(scale * (int(random() % 2001) - 1000) / 1000.f);
  }
  size_t size;
  bf16* data;
};

void check_value(const char* what, double got, double expected, size_t row, size_t column) {
  const double tolerance = std::abs(expected) / 200 + 1e-4;
  CHECK(std::abs(got - expected) <= tolerance, "%s[%zu,%zu] = %g, expected %g", what, row, column, got,
        expected);
}

void run_case(const Case& c) {
  const int T = 50, K = 2, E = static_cast<int>(c.counts.size());
  std::mt19937 random(7);
  std::vector<int> offs, row_idx, expert;
  for (int e = 0; e < E; ++e) {
    for (int i = 0; i < c.counts[e]; ++i) {
      const bool dropped = i == 2;  // an index out of range is a row of zeros
      row_idx.push_back(dropped ? 1 << 30 : random() % (T * K));
      expert.push_back(dropped ? -1 : e);
    }
    offs.push_back(static_cast<int>(row_idx.size()));
  }
  for (int i = 0; i < c.padding; ++i) {
    row_idx.push_back(-1);
    expert.push_back(-1);
  }
  const size_t R = row_idx.size(), D = c.D, H = c.H;
  Buffer x(T * D + 64), w1(E * 2 * H * D), w2(E * D * H), h(R * 2 * H), a(R * H), y(R * D);
  x.fill(random, 1, 64);  // NaN follows the last row
  w1.fill(random, 0.3f);
  w2.fill(random, 0.3f);

  launch_up_swiglu_sm90(x.data, row_idx.data(), offs.data(), w1.data, R, T * K, K, E, c.D, c.H, h.data,
                        a.data, c.blocks, nullptr);
  for (size_t r = 0; r < R; ++r)
    for (size_t j = 0; j < H; ++j) {
      double gate = 0, up = 0;
      const size_t w = (expert[r] < 0 ? 0 : expert[r]) * 2 * H * D;
      for (size_t k = 0; k < D && expert[r] >= 0; ++k) {
        gate += x.at(row_idx[r] / K * D + k) * w1.at(w + j * D + k);
        up += x.at(row_idx[r] / K * D + k) * w1.at(w + (H + j) * D + k);
      }
      check_value("gate", h.at(r * 2 * H + j), gate, r, j);
      check_value("up", h.at(r * 2 * H + H + j), up, r, j);
      gate = h.at(r * 2 * H + j);  // a is the activation of h as stored
      up = h.at(r * 2 * H + H + j);
      check_value("a", a.at(r * H + j), gate * up / (1 + std::exp(-gate)), r, j);
    }

  launch_down_sm90(a.data, offs.data(), w2.data, R, E, c.D, c.H, y.data, c.blocks, nullptr);
  for (size_t r = 0; r < R; ++r)
    for (size_t j = 0; j < D; ++j) {
      double sum = 0;
      for (size_t k = 0; k < H && expert[r] >= 0; ++k)
        sum += a.at(r * H + k) * w2.at((expert[r] * D + j) * H + k);
      check_value("y", y.at(r * D + j), sum, r, j);
    }
}

}  // namespace

int main(int argc, char** argv) {
  alarm(300);
  const int num_seeds = argc > 1 ? std::atoi(argv[1]) : 1;
  const std::vector<Case> cases = {
      {{0, 130, 70}, 0, 128, 128, 1},       // several tiles a block
      {{0, 131, 70, 0}, 150, 200, 136, 3},  // tails of k and of columns, two tiles of padding
      {{5, 0, 257, 1}, 2, 72, 192, 2},     {{1}, 0, 8, 8, 132}, {{0, 0}, 3, 64, 64, 4},
  };
  for_every_schedule(num_seeds, [&] {
    for (const Case& c : cases) run_case(c);
  });
  return finish();
}
