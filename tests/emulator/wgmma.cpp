// wgmma: operands by shared-memory descriptor, groups that finish later, accumulators in flight.
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>

#include "state.h"

namespace emu {

float element_to_float(uint16_t bits, bool f16) {
  return f16 ? __half2float(std::bit_cast<__half>(bits))
             : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

namespace {

constexpr float kInFlight =
    std::bit_cast<float>(0x7fc0dead);  // a NaN: what registers hold while a wgmma owns them

// The fields of a matrix descriptor (PTX ISA, "Matrix descriptor"), in bytes.
struct Descriptor {
  uint32_t start, leading, stride, span;
  explicit Descriptor(uint64_t d)
      : start((d & 0x3fff) << 4), leading((d >> 16 & 0x3fff) << 4), stride((d >> 32 & 0x3fff) << 4) {
    static constexpr uint32_t kSpan[] = {16, 128, 64, 32};
    span = kSpan[d >> 62];
    if (d >> 49 & 7) fail("wgmma: the base offset of a descriptor is not emulated");
  }
  // Address of the 16 bytes that hold elements (row, 8 k8 .. 8 k8 + 7), for operands whose rows run along k.
  uint32_t k_major(int row, int k8) const {
    const uint32_t in_row = span == 16 ? row % 8 * 16 + k8 * leading : row % 8 * span + k8 * 16;
    return swizzle(start + row / 8 * stride + in_row, span);
  }
  // Address of the 16 bytes that hold elements (8 mn8 .. 8 mn8 + 7, k), for operands whose rows run along m
  // or n.
  uint32_t mn_major(int mn8, int k) const {
    if (span == 16) fail("wgmma: operands along m or n without swizzle are not emulated");
    const int per_row = span / 16;
    return swizzle(start + mn8 / per_row * leading + mn8 % per_row * 16 + k / 8 * stride + k % 8 * span,
                   span);
  }
};

// Calls fn(address, first row, first k) for each 16-byte piece of an operand [rows x 16].
template <class Fn>
void for_pieces(uint64_t descriptor, int rows, bool mn_major, Fn fn) {
  const Descriptor d(descriptor);
  if (mn_major) {
    for (int mn8 = 0; mn8 < rows / 8; ++mn8)
      for (int k = 0; k < 16; ++k) fn(d.mn_major(mn8, k), mn8 * 8, k);
  } else {
    for (int row = 0; row < rows; ++row)
      for (int k8 = 0; k8 < 2; ++k8) fn(d.k_major(row, k8), row, k8 * 8);
  }
}

void find_extent(Wgmma& op, int operand) {
  const bool mn_major = operand ? op.shape.b_mn_major : op.shape.a_mn_major;
  for_pieces(operand ? op.b : op.a, operand ? op.shape.n : 64, mn_major, [&](uint32_t address, int, int) {
    op.first_byte[operand] = std::min(op.first_byte[operand], address);
    op.end_byte[operand] = std::max(op.end_byte[operand], address + 16);
  });
}

// out[row * row_stride + k * k_stride]
void load_operand(Cta* cta, const Wgmma& op, int operand, float* out, int row_stride, int k_stride) {
  const bool mn_major = operand ? op.shape.b_mn_major : op.shape.a_mn_major;
  const char* name = operand ? "B" : "A";
  for_pieces(
      operand ? op.b : op.a, operand ? op.shape.n : 64, mn_major, [&](uint32_t address, int row, int k) {
        if (address < kReservedBytes || address + 16 > cta->end)
          fail("wgmma: the descriptor of %s reaches 0x%x, outside shared memory", name, address);
        if (cta->chunks[address / 16].copies_in_flight)
          fail("wgmma reads %s at %s while a copy to it is in flight", name, place(cta, address).c_str());
        if (written_without_fence(cta, address, op.fence))
          fail("wgmma reads %s at %s written through the generic proxy without fence.proxy.async", name,
               place(cta, address).c_str());
        note_read(nullptr, cta->shared.get() + address, 16);
        uint16_t elements[8];
        copy_bytes(elements, cta->shared.get() + address, 16);
        const int step = mn_major ? row_stride : k_stride;
        for (int e = 0; e < 8; ++e)
          out[row * row_stride + k * k_stride + e * step] = element_to_float(elements[e], op.shape.f16);
      });
}

__attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default"), optimize("O3"))) void
multiply_add(const float* __restrict a, const float* __restrict b, float* __restrict d, int n) {
  for (int m = 0; m < 64; ++m) {
    float* __restrict row = d + m * 256;
    for (int k = 0; k < 16; k += 4) {
      const float a0 = a[m * 16 + k], a1 = a[m * 16 + k + 1], a2 = a[m * 16 + k + 2], a3 = a[m * 16 + k + 3];
      const float* __restrict p = b + k * 256;
      for (int j = 0; j < n; ++j)
        row[j] += (a0 * p[j] + a1 * p[256 + j]) + (a2 * p[512 + j] + a3 * p[768 + j]);
    }
  }
}

// Where register i of thread t lies in the 64 x n accumulator.
int fragment_row(int t, int i) { return t / 32 * 16 + t % 32 / 4 + (i >> 1 & 1) * 8; }
int fragment_col(int t, int i) { return i / 4 * 8 + t % 4 * 2 + (i & 1); }

Accumulator* find_accumulator(Warpgroup* w, int thread, float* d, int n) {
  for (auto& a : w->accumulators)
    if (a->registers[thread] == d) return a.get();
  w->accumulators.push_back(std::make_unique<Accumulator>());
  w->accumulators.back()->n = n;
  return w->accumulators.back().get();
}

void finish(Warpgroup* w, Accumulator* a) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < a->n / 2; ++i)
      a->registers[t][i] = a->value[fragment_row(t, i) * 256 + fragment_col(t, i)];
  std::erase_if(w->accumulators, [&](auto& other) { return other.get() == a; });
}

}  // namespace

void land_wgmma_group(Warpgroup* w) {
  static float a[64 * 16], b[16 * 256];
  acquire(nullptr, &w->issued);
  while (w->first_op < w->group_end[w->groups_done]) {
    Wgmma& op = w->ops.front();
    statistics.wgmmas++;
    if (op.num_threads != 128)
      fail("wgmma issued by %d of the 128 threads of warpgroup %d", op.num_threads, w->index);
    load_operand(w->cta, op, 0, a, 16, 1);
    load_operand(w->cta, op, 1, b, 1, 256);
    Accumulator* acc = op.accumulator;
    if (!op.shape.accumulate) std::fill(std::begin(acc->value), std::end(acc->value), 0.f);
    multiply_add(a, b, acc->value, op.shape.n);
    if (--acc->users == 0) finish(w, acc);
    w->ops.pop_front();
    w->first_op++;
  }
  w->groups_done++;
  release(nullptr, &w->landed);
  wake_all(w->waiting);
}

void wgmma(float* d, WgmmaShape shape, uint64_t a, uint64_t b) {
  Inside inside;
  Fiber* f = self();
  Warpgroup* w = f->warpgroup;
  const int thread = f->index % 128;
  release(f, &w->issued);
  if (!f->wgmma_fenced) fail("wgmma without wgmma.fence after the accumulators were last read");
  if (f->wgmma_next < w->first_op) fail("wgmma: a thread fell behind its warpgroup");
  if (f->wgmma_next - w->first_op == w->ops.size()) {
    Wgmma& op = w->ops.emplace_back();
    op.shape = shape;
    op.a = a;
    op.b = b;
    find_extent(op, 0);
    find_extent(op, 1);
  }
  Wgmma& op = w->ops[f->wgmma_next++ - w->first_op];
  if (op.shape != shape || op.a != a || op.b != b)
    fail("wgmma operands differ between the threads of warpgroup %d", w->index);
  op.num_threads++;
  op.fence = std::min(op.fence, f->proxy_fence);
  if (!op.accumulator) {
    op.accumulator = find_accumulator(w, thread, d, shape.n);
    op.accumulator->users++;
  }
  Accumulator* acc = op.accumulator;
  if (acc->n != shape.n) fail("wgmma: two shapes on one accumulator in flight");
  if (acc->registers[thread] && acc->registers[thread] != d)
    fail("wgmma: accumulators differ between threads");
  if (acc->registers[thread]) return;
  acc->registers[thread] = d;
  for (int i = 0; i < shape.n / 2; ++i) {
    if (shape.accumulate) acc->value[fragment_row(thread, i) * 256 + fragment_col(thread, i)] = d[i];
    d[i] = kInFlight;
  }
}

void wgmma_fence() {
  Inside inside;
  self()->wgmma_fenced = true;
}

void wgmma_commit() {
  Inside inside;
  Fiber* f = self();
  Warpgroup* w = f->warpgroup;
  const uint64_t group = f->wgmma_commits++;
  if (group == w->group_end.size()) {
    w->group_end.push_back(f->wgmma_next);
    w->group_threads.push_back(0);
  }
  if (w->group_end[group] != f->wgmma_next)
    fail("wgmma.commit_group: groups differ between the threads of warpgroup %d", w->index);
  if (++w->group_threads[group] == 128) submit({Work::wgmma_group, nullptr, w, nullptr});
}

void wgmma_wait(int pending) {
  Inside inside;
  maybe_preempt();
  Fiber* f = self();
  Warpgroup* w = f->warpgroup;
  if (pending == 0) f->wgmma_fenced = false;
  while (f->wgmma_commits > w->groups_done + pending) {
    w->waiting.push_back(f);
    block(Wait::wgmma, f->wgmma_commits - pending);
  }
  acquire(f, &w->landed);
}

}  // namespace emu
