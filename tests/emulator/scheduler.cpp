// Fibers and the launch loop: start a block, run its ready threads one after another, let asynchronous work
// land.
#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>

// Saves the callee-saved registers and the stack pointer in *save and continues on the stack `to`.
extern "C" void emu_switch_stack(void** save, void* to);
asm(R"(
.text
.globl emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch_stack,.-emu_switch_stack
)");

namespace emu {

Config config;
Statistics statistics;
Thread* current;
dim3 grid_dim, block_dim;
Machine machine;

namespace {

constexpr size_t kStackBytes = kAsan ? 512 << 10 : 128 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr uint32_t kRegistersPerCta = 65536;

const std::function<void()>* body;
void* caller_stack_pointer;
[[maybe_unused]] const void* caller_stack;
[[maybe_unused]] size_t caller_stack_bytes;
std::vector<Fiber*> free_fibers;

void to_scheduler([[maybe_unused]] bool for_good) {
  Fiber* f = self();
  statistics.switches++;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &f->asan_fake_stack, caller_stack, caller_stack_bytes);
#endif
  emu_switch_stack(&f->stack_pointer, caller_stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(f->asan_fake_stack, &caller_stack, &caller_stack_bytes);
#endif
}

void resume(Fiber* f) {
  current = f;
  machine.in_fiber = true;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack;
  __sanitizer_start_switch_fiber(&fake_stack, f->stack, kStackBytes);
#endif
  emu_switch_stack(&caller_stack_pointer, f->stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  machine.in_fiber = false;
}

void thread_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &caller_stack, &caller_stack_bytes);
#endif
  tsan_start_thread(self());
  (*body)();
  tsan_end_thread();
  self()->wait = Wait::done;
  to_scheduler(true);
  __builtin_trap();
}

Fiber* new_fiber() {
  Fiber* f;
  if (free_fibers.empty()) {
    f = new Fiber;
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw Error("no memory for the stack of a thread");
    mprotect(stack, kGuardBytes, PROT_NONE);
    f->stack = static_cast<char*>(stack);
  } else {
    f = free_fibers.back();
    free_fibers.pop_back();
    char* stack = f->stack;
    void* tsan_fiber = f->tsan_fiber;
    *f = Fiber();
    f->stack = stack;
    f->tsan_fiber = tsan_fiber;
  }
  asan_unpoison(f->stack + kGuardBytes, kStackBytes - kGuardBytes);
  void** sp = reinterpret_cast<void**>(f->stack + kStackBytes);
  *--sp = nullptr;
  *--sp = reinterpret_cast<void*>(&thread_main);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  f->stack_pointer = sp;
  tsan_new_fiber(f);
  return f;
}

void start_block(uint64_t index, size_t shared_bytes) {
  const auto x = static_cast<uint32_t>(index % grid_dim.x), rest = static_cast<uint32_t>(index / grid_dim.x);
  const uint32_t num_threads = block_dim.x * block_dim.y * block_dim.z;
  auto cta = std::make_unique<Cta>();
  cta->block_idx = {x, rest % grid_dim.y, rest / grid_dim.y};
  cta->live_threads = num_threads;
  tsan_new_cta(cta.get());

  // The dynamic part is only 16-byte aligned, as on the device: a random offset shows code that assumes more.
  cta->dynamic_offset = kReservedBytes + (config.seed ? random_number() % 64 * 16 : 0);
  cta->end = cta->dynamic_offset + shared_bytes;
  cta->capacity = (cta->end + kMaxStaticBytes + 1023) / 1024 * 1024 + 1024;  // room for gaps between arrays
  Unobserved unobserved;
  cta->shared.reset(static_cast<char*>(aligned_alloc(1024, cta->capacity)));
  raw_fill(cta->shared.get(), 0xff, cta->capacity);
  asan_poison(cta->shared.get(), cta->capacity);
  asan_unpoison(cta->shared.get() + cta->dynamic_offset, shared_bytes);
  cta->chunks.resize(cta->capacity / 16);

  cta->warps = std::vector<Warp>(ceil_div(num_threads, 32));
  if (config.seed) cta->warps[random_number() % cta->warps.size()].slow = true;
  cta->warpgroups = std::vector<Warpgroup>(ceil_div(num_threads, 128));
  for (size_t i = 0; i < cta->warpgroups.size(); ++i) {
    cta->warpgroups[i].cta = cta.get();
    cta->warpgroups[i].index = static_cast<int>(i);
  }
  const uint32_t registers = std::min<uint32_t>(255, kRegistersPerCta / (cta->warps.size() * 32) / 8 * 8);
  for (uint32_t t = 0; t < num_threads; ++t) {
    Fiber* f = new_fiber();
    f->cta = cta.get();
    f->index = t;
    f->lane = t % 32;
    f->warp = &cta->warps[t / 32];
    f->warp->lane[f->lane] = f;
    f->warp->registers = registers;
    f->warpgroup = &cta->warpgroups[t / 128];
    f->block_idx = cta->block_idx;
    f->thread_idx = {t % block_dim.x, t / block_dim.x % block_dim.y, t / block_dim.x / block_dim.y};
    cta->threads.push_back(f);
    machine.ready.push_back(f);
  }
  machine.cta = std::move(cta);
}

void retire_block() {
  Unobserved unobserved;
  Cta* cta = machine.cta.get();
  tsan_retire_cta(cta);
  asan_unpoison(cta->shared.get(), cta->capacity);
  for (Fiber* f : cta->threads) {
    tsan_retire_fiber(f);
    free_fibers.push_back(f);
  }
  machine.pool.clear();  // commits and arrivals that nobody waits for
  machine.cta.reset();
}

void end_thread(Fiber* f) {
  check_thread_exit(f);
  --f->cta->live_threads;
  finish_barrier(f->cta, 0);
}

Fiber* next_ready() {
  auto& ready = machine.ready;
  // A warp that lags far behind shows what a fair order hides, a missing barrier above all.
  for (int draw = 0; config.seed && draw < 4; ++draw) {
    std::swap(ready.front(), ready[random_number() % ready.size()]);
    if (!ready.front()->warp->slow) break;
  }
  Fiber* f = ready.front();
  ready.pop_front();
  return f;
}

void run_block() {
  Cta* cta = machine.cta.get();
  while (cta->live_threads) {
    const bool lands_now = config.landing == Landing::random && random_number() % 8 == 0;
    if (!machine.pool.empty() && (machine.ready.empty() || lands_now)) {
      land(config.seed ? random_number() % machine.pool.size() : 0);
      continue;
    }
    if (machine.ready.empty()) throw Error(report("deadlock:"));
    Fiber* f = next_ready();
    resume(f);
    if (machine.failed) throw Error(machine.error);
    if (f->wait == Wait::done) end_thread(f);
  }
  check_block_exit(cta);
  statistics.blocks++;
}

}  // namespace

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (shared_bytes > kMaxSharedBytes) throw Error("more than 227 KiB of dynamic shared memory");
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0)
    throw Error("launch with a shape that the device refuses");
  ensure_context();
  TsanLaunch tsan_launch;
  machine = Machine{};
  machine.random_state = config.seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  body = &kernel;
  grid_dim = grid;
  block_dim = block;
  try {
    const uint64_t num_blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    // The device promises no order: what only the blocks that come later repair is seen when they come
    // earlier.
    for (uint64_t i = 0; i < num_blocks; ++i) {
      start_block(config.seed % 2 ? num_blocks - 1 - i : i, shared_bytes);
      run_block();
      retire_block();
    }
  } catch (...) {
    machine.landing = false;
    machine.in_fiber = false;
    if (machine.cta) retire_block();
    throw;
  }
}

uint64_t random_number() {
  uint64_t& x = machine.random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

void block(Wait wait, uint64_t a, uint64_t b) {
  Fiber* f = self();
  f->wait = wait;
  f->wait_a = a;
  f->wait_b = b;
  to_scheduler(false);
}

void wake(Fiber* f) {
  f->wait = Wait::ready;
  machine.ready.push_back(f);
}

void wake_all(std::vector<Fiber*>& fibers) {
  for (Fiber* f : fibers) wake(f);
  fibers.clear();
}

void maybe_preempt() {
  if (config.preempt == 0 || random_number() % config.preempt != 0) return;
  wake(self());
  to_scheduler(false);
}

void leave_failed_thread() {
  machine.failed = true;
  to_scheduler(true);
  __builtin_trap();
}

}  // namespace emu
