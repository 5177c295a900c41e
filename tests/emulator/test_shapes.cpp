// Every Hopper kernel of select.h on shapes drawn at random from classes: experts without rows, with one,
// with a tile less or more than one row; widths of one unit, of tails, of odd and even numbers of tiles;
// padding; more blocks than tiles.
//
//     test_shapes [number] [first]
//
// Shape n is drawn from seed n: a failure names it.
#include "../../cuda/select.h"
#include "sm90_backward.h"
#include "sm90_forward.h"

using namespace fmoe_ext;

namespace {

using bf16 = __nv_bfloat16;
constexpr int kUnit = 8;             // every width is a multiple of it
constexpr int64_t kMost = 48 << 20;  // multiplications of a shape
constexpr int kNumCurves = static_cast<int>(CurveKind::clamped_silu) + 1;

struct Drawn {
  const Entry* entry;
  Case shape;
  CurveKind curve;
  bool gated, flags[3];
};

struct Draw {
  std::mt19937 random;
  int below(int n) { return static_cast<int>(random() % n); }
  int of(std::initializer_list<int> values) { return values.begin()[below(static_cast<int>(values.size()))]; }

  int rows(int tile) {
    return of({0, 0, 1, 2 + below(tile - 3), tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1 + below(tile)});
  }
  int width(int tile, int unit) {
    const int tail = unit * (1 + below(std::max(tile / unit - 1, 1)));
    return of({unit, tail, tile - unit, tile, tile + unit, tile + tail, 2 * tile, 2 * tile + tail, 3 * tile});
  }
};

// The two widths as a Case names them: D and H.
void draw_widths(Draw& draw, const Entry& entry, Case& c) {
  constexpr int kStep = 64;
  const int columns = entry.tile_columns;
  c.D = draw.width(kStep, kUnit);
  c.H = draw.width(columns, kUnit);
  if (entry.product == Product::rows_by_weight || entry.product == Product::grad_input) std::swap(c.D, c.H);
  if (entry.product == Product::grad_weight) {
    c.D = draw.width(128, kUnit);
    c.H = draw.width(256, kUnit);
    if (draw.below(2)) std::swap(c.D, c.H);
  }
}

Drawn draw_shape(unsigned seed) {
  Draw draw{std::mt19937(seed)};
  const Entry& entry = kEntries[seed % kNumEntries];
  Case c{{}, 0, 0, 0, 1 + draw.below(9), entry.tile_columns};
  draw_widths(draw, entry, c);
  c.padding = draw.of({0, 0, 1, 2, 134});
  int64_t rows = c.padding;
  for (int e = 1 + draw.below(5); e > 0; --e) {
    int count = draw.rows(128);
    if ((rows + count) * c.D * c.H > kMost) count = draw.of({0, 1, 2});
    c.counts.push_back(count);
    rows += count;
  }
  const auto curve = static_cast<CurveKind>(draw.below(kNumCurves));
  const auto coin = [&] { return draw.below(2) > 0; };
  return {&entry, c, curve, coin(), {coin(), coin(), coin()}};
}

template <class T>
void run(const Drawn& drawn) {
  const auto& [entry, c, curve, gated, flags] = drawn;
  switch (entry->product) {
    case Product::up:
      return run_up<T>(c, {curve, gated, flags[0], flags[1]});
    case Product::rows_by_weight:
      return run_rows<T>(c, {curve, gated, flags[0], flags[1]});
    case Product::grad_hidden:
      return run_hidden<T>(c, {curve, gated, flags[0], flags[1], flags[2]});
    case Product::grad_input:
      return run_input<T>(c);
    case Product::grad_weight: {
      const Gathered gathered = flags[0] ? Gathered::a : flags[1] ? Gathered::b : Gathered::none;
      return flags[2] ? run_weight<T, float>(c, gathered) : run_weight<T, T>(c, gathered);
    }
  }
}

std::string text_of(unsigned seed, const Drawn& drawn) {
  const Case& c = drawn.shape;
  std::string counts;
  for (const int count : c.counts) counts += std::to_string(count) + " ";
  return "shape " + std::to_string(seed) + ", " + drawn.entry->name + ": rows " + counts + "padding " +
         std::to_string(c.padding) + ", D " + std::to_string(c.D) + ", H " + std::to_string(c.H) +
         ", blocks " + std::to_string(c.blocks);
}

void run_shape(unsigned seed) {
  const Drawn drawn = draw_shape(seed);
  const std::string text = text_of(seed, drawn);
  const int before = failures;
  emu::config = {};
  emu::config.landing = kLandings[seed / 7 % std::size(kLandings)];
  emu::config.seed = seed;
  emu::config.preempt = seed % 5 == 4 ? 4 : 0;
  try {
    seed % 3 == 2 ? run<__half>(drawn) : run<bf16>(drawn);
  } catch (emu::Error& error) {
    CHECK(false, "%s: %s", text.c_str(), error.what());
  }
  if (failures != before) std::printf("%s\n", text.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  end_after_cpu_seconds(900);
  const int number = argc > 1 ? std::atoi(argv[1]) : 500, first = argc > 2 ? std::atoi(argv[2]) : 0;
  for (int seed = first; seed < first + number && !failures; ++seed) run_shape(seed);
  return finish();
}
