// Which kernel computes a product of grouped_gemm and expert_mlp: products.h asks torch_takes(), then
// select(). Torch's grouped_mm takes the classes of products at which it won its races, which are timed
// comparisons with our kernels (gpu/races.py). Of ours the table alone decides, from dtype, sizes, alignment
// and device, never from a value on the device; what no entry fits is computed by the portable kernels.
//
// Entries are switched on and off by name (ops_select.cpp): gpu/kernels.py turns off what no GPU has proved.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>
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

// What the host knows of one product.
struct Task {
  Product product;
  Dtype dtype;
  int capability;              // of the device
  std::vector<int64_t> sizes;  // of all matrices, but for their numbers of rows and experts
  std::vector<const void*> matrices;
  int64_t num_rows;
  int num_experts;
  int64_t N = 0, K = 0;  // of rows_by_weight and grad_input: columns of the result, and terms
};

// Beyond what an entry needs: whether it is the best of those that could.
using Preference = bool (*)(const Task&);
inline bool always(const Task&) { return true; }

// Tiles of 128 x 256, many steps of k. Cycles of a tile: a step of 64 k takes 1,280 where one of 192 columns
// takes 1,000, and only the latter's results are stored beside other products (measured on an H100).
inline bool wide_tiles_pay(const Task& task) {
  constexpr int64_t kWideStep = 1280, kStep = 1000, kWideStore = 4000;
  const auto tiles = [&](int64_t columns) { return (task.N + columns - 1) / columns; };
  const int64_t steps = (task.K + 63) / 64;
  const int64_t wide = tiles(256) * (steps * kWideStep + kWideStore), narrow = tiles(192) * steps * kStep;
  return task.num_rows >= int64_t{512} * task.num_experts && 100 * wide < 97 * narrow;
}

// What every entry needs: 16 bits, and compute capability 9.0 exactly, since code for sm_90a runs nowhere
// else.
constexpr int kHopper = 90;
constexpr int kDivisor = 8;     // of every size
constexpr int kAlignment = 16;  // of every matrix, in bytes

struct Entry {
  const char* name;  // stable: what a GPU has proved is kept by it
  Product product;
  const char* source;  // whose digest a proof is kept by (sources_digest.py)
  int tile_columns;
  Preference prefers;
};
inline constexpr Entry kEntries[] = {
    {"up.128x256", Product::up, "sm90_up", 256, always},
    {"rows_by_weight.128x256", Product::rows_by_weight, "sm90_rows_by_weight", 256, wide_tiles_pay},
    {"rows_by_weight.128x192", Product::rows_by_weight, "sm90_rows_by_weight", 192, always},
    {"grad_hidden.128x128", Product::grad_hidden, "sm90_grad_hidden", 128, always},
    {"grad_input.128x256", Product::grad_input, "sm90_rows_by_weight", 256, wide_tiles_pay},
    {"grad_input.128x192", Product::grad_input, "sm90_rows_by_weight", 192, always},
    {"grad_weight.128x256", Product::grad_weight, "sm90_grad_weight", 256, always},
};
inline constexpr int kNumEntries = static_cast<int>(sizeof kEntries / sizeof *kEntries);
static_assert(kNumEntries <= 64);

// ---- run time: bit i stands for entry i
inline std::atomic<uint64_t> entries_on{~0ull};
inline std::atomic<int64_t> entry_runs[kNumEntries];  // how often each was chosen
inline bool is_on(int entry) { return entries_on.load(std::memory_order_relaxed) >> entry & 1; }

// setup.py defines FMOE_HAS_SM90A when sm_90a is among the architectures; without it the Hopper kernels are
// empty.
#if defined(FMOE_HAS_SM90A) || defined(FMOE_EMULATOR)
inline constexpr bool kHasHopperCode = true;
#else
inline constexpr bool kHasHopperCode = false;
#endif

inline bool can_run(const Task& task) {
  const bool is_16_bit = task.dtype == Dtype::bf16 || task.dtype == Dtype::f16;
  return is_16_bit && kHasHopperCode && task.capability == kHopper && task.num_rows < kMaxHopperRows;
}
inline bool fits(const Entry& entry, const Task& task) {
  const auto divides = [&](int64_t size) { return size > 0 && size <= INT32_MAX && size % kDivisor == 0; };
  const auto is_aligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % kAlignment == 0; };
  return entry.product == task.product && can_run(task) && task.num_rows > 0 && task.num_experts > 0 &&
         std::all_of(task.sizes.begin(), task.sizes.end(), divides) &&
         std::all_of(task.matrices.begin(), task.matrices.end(), is_aligned);
}

// The first entry that is on, fits and is the best; else the last that is on and fits; null: the portable
// kernels.
inline const Entry* select(const Task& task) {
  const Entry* chosen = nullptr;
  for (int i = 0; i < kNumEntries; ++i) {
    const Entry& entry = kEntries[i];
    if (!is_on(i) || !fits(entry, task)) continue;
    chosen = &entry;
    if (entry.prefers(task)) break;
  }
  if (chosen) entry_runs[chosen - kEntries].fetch_add(1, std::memory_order_relaxed);
  return chosen;
}

// ---- torch's grouped_mm instead of our kernels, for the classes of products at which it won its race
// What it does with offs, and how many groups it takes (aten/src/ATen/native/cuda of torch 2.11 to 2.13): its
// CUTLASS kernels raise at 1,024 groups; without them it loops over the groups on the host, which waits for
// the device and cannot be captured.
struct GroupedMm {
  bool reads_host;
  int most_groups;
};
inline GroupedMm grouped_mm_on(int capability, Dtype dtype) {
  const bool has_kernels = dtype == Dtype::bf16 && (capability == 90 || capability / 10 == 10);
  return has_kernels ? GroupedMm{false, 1023} : GroupedMm{true, INT32_MAX};
}

// A class of problems: a product, "16 bits" or "tf32", and rows an expert on average. 16 bits are timed in
// bfloat16, and what torch wins there holds for float16 too, whose groups it multiplies one by one, in a loop
// on the host that first reads offs.
enum class TorchProduct { up, rows_by_weight, grad_hidden, grad_input, grad_weight, main_grad };
inline constexpr const char* kTorchProducts[] = {"up",         "rows_by_weight", "grad_hidden",
                                                 "grad_input", "grad_weight",    "main_grad"};
inline constexpr const char* kTorchNumbers[] = {"16 bits", "tf32"};
struct RowsClass {
  const char* name;
  int64_t first;
};
inline constexpr RowsClass kRowsClasses[] = {{"thousands", 1024}, {"hundreds", 64}, {"few", 0}};
inline constexpr int kTorchClasses = 6 * 2 * 3;
inline int torch_class(TorchProduct product, bool is_tf32, int64_t num_rows, int num_experts) {
  int rows = 0;
  while (num_rows < kRowsClasses[rows].first * num_experts) ++rows;
  return (static_cast<int>(product) * 2 + is_tf32) * 3 + rows;
}
inline std::string torch_class_name(int i) {
  return std::string(kTorchProducts[i / 6]) + "/" + kTorchNumbers[i / 3 % 2] + "/" + kRowsClasses[i % 3].name;
}
inline std::atomic<uint64_t> torch_wins{0};  // bit i stands for class i
inline std::atomic<int64_t> torch_runs[6];   // how often torch computed each product

// True if torch's grouped_mm won the class of a product and can compute it: without copies of what it is
// given, and in a graph under capture without a read by the host. tf32_allowed is asked of float32 alone.
template <class IsCapturing, class Allowed>
bool torch_takes(const Task& task, TorchProduct product, const IsCapturing& is_capturing,
                 const Allowed& tf32_allowed) {
  const uint64_t wins = torch_wins.load(std::memory_order_relaxed);
  if (!wins || task.dtype == Dtype::f64 || task.num_rows == 0 || task.num_experts == 0) return false;
  const bool is_wide = task.dtype == Dtype::f32;
  const GroupedMm can = grouped_mm_on(task.capability, task.dtype);
  const int64_t unit = is_wide ? 4 : 8;
  const auto suits = [&](int64_t size) { return size > 0 && size % unit == 0; };
  const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool won = wins >> torch_class(product, is_wide, task.num_rows, task.num_experts) & 1;
  if (!won || task.num_experts > can.most_groups || (can.reads_host && is_capturing()) ||
      !std::all_of(task.sizes.begin(), task.sizes.end(), suits) ||
      !std::all_of(task.matrices.begin(), task.matrices.end(), is_aligned) || (is_wide && !tf32_allowed()))
    return false;
  torch_runs[static_cast<int>(product)].fetch_add(1, std::memory_order_relaxed);
  return true;
}

// SMs that persistent kernels leave to others: those of NCCL cannot share one with a block that takes all of
// its registers and shared memory, and a block that has to wait for an SM begins its whole share late.
inline std::atomic<int> sm_margin{0};
inline Grid grid_of(const Entry& entry, int num_sms) {
  return {std::max(num_sms - sm_margin.load(std::memory_order_relaxed), 1), entry.tile_columns};
}

}  // namespace fmoe_ext
