// Asynchronous work: the pool it waits in, cp.async and the groups of TMA stores.
#include "state.h"

namespace emu {

void land(size_t index) {
  Work work = machine.pool[index];
  machine.pool[index] = machine.pool.back();
  machine.pool.pop_back();
  statistics.landings++;
  Cta* cta = work.tma ? work.tma->cta : work.warpgroup ? work.warpgroup->cta : work.fiber->cta;
  machine.landing_tsan_fiber = cta->tsan_fiber;
  machine.landing = true;
  switch (work.kind) {
    case Work::cp_async: {
      Fiber* f = work.fiber;
      while (!f->copies.empty()) {
        const CpAsync item = f->copies.front();
        f->copies.pop_front();
        if (item.kind == CpAsync::arrive) {
          arrive({cta, item.dst}, 0);
          break;
        }
        if (item.kind == CpAsync::commit) {
          f->copies_done++;
          break;
        }
        char* dst = cta->shared.get() + item.dst;
        mark_copies(cta, item.dst, item.chunk, -1);
        acquire(nullptr, &f->issued);
        note_read(nullptr, item.src, item.bytes);
        note_write(nullptr, dst, item.chunk);
        copy_bytes(dst, item.src, item.bytes);
        zero_bytes(dst + item.bytes, item.chunk - item.bytes);
        note_generic_write(cta, item.dst, item.chunk, f, true);
        f->copies_in_flight--;
      }
      release(nullptr, &f->landed);
      f->copies_queued = !f->copies.empty();
      if (f->copies_queued) machine.pool.push_back(work);
      const int64_t allowed = static_cast<int64_t>(f->wait_a);
      const bool satisfied = allowed < 0
                                 ? f->copies.empty()
                                 : f->copies_committed - f->copies_done <= static_cast<uint64_t>(allowed);
      if (f->wait == Wait::cp_async && satisfied) wake(f);
      break;
    }
    case Work::tma_load:
      land_tma_load(*work.tma);
      break;
    case Work::bulk_store: {
      Fiber* f = work.fiber;
      land_bulk_stores(f);
      f->stores_queued = !f->stores.empty();
      if (f->stores_queued) machine.pool.push_back(work);
      break;
    }
    case Work::wgmma_group:
      land_wgmma_group(work.warpgroup);
      break;
  }
  machine.landing = false;
}

void submit(Work work) {
  machine.pool.push_back(std::move(work));
  if (config.landing != Landing::eager) return;
  while (!machine.pool.empty()) land(machine.pool.size() - 1);
}

namespace {
void queue_copy(Fiber* f, const CpAsync& item) {
  f->copies.push_back(item);
  if (f->copies_queued) return;
  f->copies_queued = true;
  submit({Work::cp_async, f, nullptr, nullptr});
}
}  // namespace

void cp_async(uint32_t dst, const void* src, int chunk, int bytes) {
  Inside inside;
  maybe_preempt();
  Location l = locate(dst, chunk, chunk);
  Fiber* f = self();
  if (bytes < 0 || bytes > chunk) fail("cp.async of %d bytes into a chunk of %d", bytes, chunk);
  if (reinterpret_cast<uintptr_t>(src) % chunk) fail("cp.async source %p is not aligned to %d", src, chunk);
  check_async_destination(l.cta, l.offset, chunk, "cp.async");
  mark_copies(l.cta, l.offset, chunk, 1);
  f->copies_in_flight++;
  release(f, &f->issued);
  queue_copy(f, {CpAsync::copy, l.offset, src, chunk, bytes});
}

void cp_async_mbar_arrive_noinc(uint32_t bar) {
  Inside inside;
  Location l = locate(bar, 8, 8);
  mbarrier_at(l);
  queue_copy(self(), {CpAsync::arrive, l.offset});
}

void cp_async_commit() {
  Inside inside;
  self()->copies_committed++;
  queue_copy(self(), {CpAsync::commit});
}

void cp_async_wait(int pending) {
  Inside inside;
  maybe_preempt();
  Fiber* f = self();
  const bool must_wait = pending < 0 ? !f->copies.empty()
                                     : f->copies_committed - f->copies_done > static_cast<uint64_t>(pending);
  if (must_wait) block(Wait::cp_async, static_cast<uint64_t>(static_cast<int64_t>(pending)));
  acquire(f, &f->landed);
}

void bulk_commit() {
  Inside inside;
  Fiber* f = self();
  f->stores_committed++;
  TmaCopy end;
  end.commit = true;
  f->stores.push_back(end);
  if (f->stores_queued) return;
  f->stores_queued = true;
  submit({Work::bulk_store, f, nullptr, nullptr});
}

void bulk_wait(int pending) {
  Inside inside;
  maybe_preempt();
  Fiber* f = self();
  if (f->stores_committed - f->stores_done > static_cast<uint64_t>(pending)) block(Wait::bulk, pending);
  acquire(f, &f->landed);
}

void fence_proxy_async() {
  Inside inside;
  self()->proxy_fence = self()->cta->proxy_fence = ++machine.clock;
}

}  // namespace emu
