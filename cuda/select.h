// Which kernel computes a product of grouped_gemm and expert_mlp, and into what tiles it is cut. The tables
// are the only place that decides: from dtype, shape and device, never from a measurement at run time nor
// from a value on the device. What no rule fits is computed by the portable kernels.
#pragma once

#include <algorithm>
#include <vector>

#include "launchers.h"

namespace fmoe_ext {

enum class Product {
  up,              // h = x_rows w1^T + b1 and its activation a, x gathered
  rows_by_weight,  // scale (rows w^T + bias)
  grad_hidden,     // dh and a of dA = dy_rows w2
  grad_input,      // rows w
  grad_weight      // a^T b, expert by expert
};
enum class Kernel { portable, hopper };

// The operands of one call: the widths of all matrices, and where they begin.
struct Operands {
  Dtype dtype;
  std::vector<int64_t> widths;
  std::vector<const void*> matrices;
};

struct Rule {
  Product product;
  Kernel kernel;
  int capability;  // of the device, exactly: code for sm_90a runs nowhere else
  bool is_16_bit;
  int divisor;    // of every width
  int alignment;  // of every matrix, in bytes
};
inline constexpr Rule kRules[] = {
    // product               kernel          sm  16 bit  widths  bytes
    {Product::up, Kernel::hopper, 90, true, 8, 16},
    {Product::rows_by_weight, Kernel::hopper, 90, true, 8, 16},
    {Product::grad_hidden, Kernel::hopper, 90, true, 8, 16},
    {Product::grad_input, Kernel::hopper, 90, true, 8, 16},
    {Product::grad_weight, Kernel::hopper, 90, true, 8, 16},
};

// setup.py defines FMOE_HAS_SM90A when sm_90a is among the architectures; without it the Hopper kernels are
// empty.
#if defined(FMOE_HAS_SM90A) || defined(FMOE_EMULATOR)
inline constexpr bool kHasHopperCode = true;
#else
inline constexpr bool kHasHopperCode = false;
#endif

inline bool fits(const Rule& rule, const Operands& operands, int capability) {
  const auto divides = [&](int64_t width) {
    return width > 0 && width <= INT32_MAX && width % rule.divisor == 0;
  };
  const auto is_aligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % rule.alignment == 0; };
  const bool is_16_bit = operands.dtype == Dtype::bf16 || operands.dtype == Dtype::f16;
  return capability == rule.capability && (is_16_bit || !rule.is_16_bit) &&
         (kHasHopperCode || rule.kernel != Kernel::hopper) &&
         std::all_of(operands.widths.begin(), operands.widths.end(), divides) &&
         std::all_of(operands.matrices.begin(), operands.matrices.end(), is_aligned);
}

inline Kernel select(Product product, const Operands& operands, int capability) {
  for (const Rule& rule : kRules)
    if (rule.product == product && fits(rule, operands, capability)) return rule.kernel;
  return Kernel::portable;
}

// The tiles of a Hopper product along rows: the first rule whose number of rows the experts reach on average.
// Pairs gain up to a third of the loads and waste half a tile an expert; tiles of 64 rows load less where
// experts have no more than that (docs/kernels.md, "Pairs and small tiles").
struct GridRule {
  Product product;
  int64_t rows_per_expert;
  int cluster, tile_rows;
};
inline constexpr GridRule kGridRules[] = {
    {.product = Product::up, .rows_per_expert = 2048, .cluster = 2, .tile_rows = 128},
    {.product = Product::rows_by_weight, .rows_per_expert = 2048, .cluster = 2, .tile_rows = 128},
    {.product = Product::rows_by_weight, .rows_per_expert = 48, .cluster = 1, .tile_rows = 128},
    {.product = Product::rows_by_weight, .rows_per_expert = 0, .cluster = 1, .tile_rows = 64},
    {.product = Product::grad_hidden, .rows_per_expert = 2048, .cluster = 2, .tile_rows = 128},
    {.product = Product::grad_input, .rows_per_expert = 2048, .cluster = 2, .tile_rows = 128},
    {.product = Product::grad_input, .rows_per_expert = 48, .cluster = 1, .tile_rows = 128},
    {.product = Product::grad_input, .rows_per_expert = 0, .cluster = 1, .tile_rows = 64},
};
inline Grid select_grid(Product product, int64_t num_rows, int num_experts, int num_sms) {
  for (const GridRule& rule : kGridRules)
    if (rule.product == product && num_rows >= rule.rows_per_expert * num_experts)
      return {num_sms, rule.cluster, rule.tile_rows};
  return {num_sms};
}

// Of a weight gradient: pairs where they waste nothing (an even number of tiles along the operand that they
// do not share) or little.
inline constexpr int kManyWeightTiles = 31;
inline Grid select_weight_grid(const GroupedRows& a, const GroupedRows& b, int num_sms) {
  const int64_t tiles = b.index ? (b.width - 1) / kWeightTileN + 1 : (a.width - 1) / kWeightTileM + 1;
  return {num_sms, tiles % 2 == 0 || tiles >= kManyWeightTiles ? 2 : 1};
}

}  // namespace fmoe_ext
