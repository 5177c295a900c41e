// Barriers: bar.sync, mbarriers, and the register pool of setmaxnreg.
#include <cstdlib>

#include "state.h"

namespace emu {

namespace {
// An mbarrier's word in shared memory holds this and its offset, so that overwriting it shows.
constexpr uint64_t kMbarrierMagic = 0x7ab5'c31e'0000'0000ull;
}  // namespace

void finish_barrier(Cta* cta, int id) {
  NamedBarrier& b = cta->barriers[id];
  const int needed = b.expected ? b.expected : cta->live_threads;
  if (b.arrived == 0 || b.arrived < needed) return;
  // The device counts warps, and a warp has to come as a whole (.aligned).
  for (size_t w = 0; w < cta->warps.size(); ++w) {
    uint32_t live = 0;
    for (Fiber* f : cta->warps[w].lane)
      if (f && f->wait != Wait::done) live |= 1u << f->lane;
    if (b.arrived_lanes[w] && b.arrived_lanes[w] != live)
      fail("bar.sync %d is complete, but of warp %zu only the lanes %08x of %08x arrived", id, w,
           b.arrived_lanes[w], live);
    b.arrived_lanes[w] = 0;
  }
  b.arrived = b.expected = 0;
  ++b.generation;
  wake_all(b.waiting);
}

void bar_sync(int id, int num_threads) {
  Inside inside;
  maybe_preempt();
  Fiber* f = self();
  Cta* cta = f->cta;
  if (id < 0 || id > 15 || num_threads % 32 || num_threads > static_cast<int>(cta->threads.size()))
    fail("bar.sync %d, %d: bad operands", id, num_threads);
  NamedBarrier& b = cta->barriers[id];
  if (b.arrived && b.expected != num_threads)
    fail("bar.sync %d: thread count %d, but earlier arrivals said %d", id, num_threads, b.expected);
  char* token = &b.tokens[b.generation % kPhases];
  release(f, token);
  b.expected = num_threads;
  ++b.arrived;
  b.arrived_lanes[f->index / 32] |= 1u << f->lane;
  b.waiting.push_back(f);
  finish_barrier(cta, id);  // the last arrival wakes everybody, itself included
  block(Wait::barrier, id);
  acquire(f, token);
  f->ordered = machine.clock;
}

Mbarrier& mbarrier_at(Location l) {
  auto found = l.cta->mbarriers.find(l.offset);
  if (found == l.cta->mbarriers.end())
    fail("mbarrier %s used before mbarrier.init", place(l.cta, l.offset).c_str());
  if (!kAsan) {  // under ASan the words of live mbarriers are poisoned instead
    uint64_t word;
    std::memcpy(&word, l.pointer(), sizeof word);
    if (word != (kMbarrierMagic | l.offset))
      fail("mbarrier %s was overwritten in shared memory", place(l.cta, l.offset).c_str());
  }
  return found->second;
}

void check_published(Location l, const char* who) {
  if (!mbarrier_at(l).published)
    fail("%s at mbarrier %s, whose initialisation no fence.mbarrier_init has made visible", who,
         place(l.cta, l.offset).c_str());
}

void fence_mbar_init() {
  Inside inside;
  for (auto& [offset, m] : self()->cta->mbarriers)
    if (m.initialiser == self()) m.published = true;
}

namespace {
void settle(Mbarrier& m) {
  if (m.pending != 0 || m.tx_bytes != 0) return;
  ++m.phase;
  m.pending = m.count;
  wake_all(m.waiting);
}
}  // namespace

void arrive(Location l, uint32_t expect_tx) {
  Mbarrier& m = mbarrier_at(l);
  if (m.pending < 1)
    fail("mbarrier %s: more than its %u arrivals in phase %lu", place(l.cta, l.offset).c_str(), m.count,
         static_cast<unsigned long>(m.phase));
  release(machine.in_fiber ? self() : nullptr, &m.tokens[m.phase % kPhases]);
  m.tx_bytes += expect_tx;
  if (m.tx_bytes > 0xfffff) fail("mbarrier %s: transaction count overflows", place(l.cta, l.offset).c_str());
  --m.pending;
  settle(m);
}

void complete_tx(Location l, uint32_t bytes) {
  Mbarrier& m = mbarrier_at(l);
  release(nullptr, &m.tokens[m.phase % kPhases]);
  m.tx_bytes -= bytes;
  settle(m);
}

void mbar_init(uint32_t bar, uint32_t count) {
  Inside inside;
  Location l = locate(bar, 8, 8);
  if (count == 0 || count > 0xfffff) fail("mbarrier.init with count %u", count);
  const uint64_t word = kMbarrierMagic | l.offset;
  asan_unpoison(l.pointer(), 8);
  std::memcpy(l.pointer(), &word, sizeof word);
  asan_poison(l.pointer(), 8);
  Mbarrier& m = l.cta->mbarriers[l.offset] = {};
  m.count = count;
  m.pending = count;
  m.initialiser = self();
}

void mbar_arrive(uint32_t bar, uint32_t expect_tx) {
  Inside inside;
  maybe_preempt();
  arrive(locate(bar, 8, 8), expect_tx);
}

void mbar_wait(uint32_t bar, uint32_t parity) {
  Inside inside;
  maybe_preempt();
  Location l = locate(bar, 8, 8);
  if (parity > 1) fail("mbarrier wait with parity %u", parity);
  while ((mbarrier_at(l).phase & 1) == parity) {
    mbarrier_at(l).waiting.push_back(self());
    block(Wait::mbarrier, bar, parity);
  }
  Mbarrier& m = mbarrier_at(l);
  acquire(self(), &m.tokens[(m.phase - 1) % kPhases]);
  self()->ordered = machine.clock;
}

void setmaxnreg(int registers, bool increase) {
  Inside inside;
  Fiber* f = self();
  Warp* warp = f->warp;
  Cta* cta = f->cta;
  if (registers % 8 || registers < 24 || registers > 256) fail("setmaxnreg to %d registers", registers);
  collective(WarpOpKind::sync, ~0u, {}, "setmaxnreg");
  if (f->lane == 0) {
    const int64_t freed = (static_cast<int64_t>(warp->registers) - registers) * 32;
    if (freed != 0 && increase != (freed < 0))
      fail("setmaxnreg.%s to %d with %u registers held", increase ? "inc" : "dec", registers,
           warp->registers);
    while (cta->free_registers + freed < 0) {
      cta->waiting_for_registers.push_back(f);
      block(Wait::registers, registers);
    }
    cta->free_registers += freed;
    warp->registers = registers;
    if (!increase) wake_all(cta->waiting_for_registers);
  }
  collective(WarpOpKind::sync, ~0u, {}, "setmaxnreg");
}

}  // namespace emu
