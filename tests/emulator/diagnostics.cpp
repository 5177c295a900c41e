// Errors and the report of who waits for what.
#include <cstdarg>
#include <cstdio>

#include "state.h"

namespace emu {
namespace {

constexpr const char* kWaitNames[] = {"ready",
                                      "done",
                                      "mbarrier",
                                      "bar.sync",
                                      "a warp operation",
                                      "wgmma.wait_group",
                                      "cp.async.wait_group",
                                      "cp.async.bulk.wait_group",
                                      "setmaxnreg.inc"};

std::string format_text(const char* format, va_list args) {
  char text[1024];
  vsnprintf(text, sizeof text, format, args);
  return text;
}
std::string text(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string result = format_text(format, args);
  va_end(args);
  return result;
}

// "0-31,64": thread numbers as ranges, cut after a while.
std::string ranges(const std::vector<Fiber*>& fibers) {
  std::string result;
  for (size_t i = 0, j; i < fibers.size(); i = j) {
    for (j = i + 1; j < fibers.size() && fibers[j]->index == fibers[j - 1]->index + 1; ++j) continue;
    if (i) result += ",";
    result += std::to_string(fibers[i]->index);
    if (j - i > 1) result += "-" + std::to_string(fibers[j - 1]->index);
    if (result.size() > 160) return result + ",...";
  }
  return result;
}

std::string wait_detail(Cta* cta, const Fiber* f) {
  using ul = unsigned long;
  switch (f->wait) {
    case Wait::mbarrier: {
      const Location l = locate(static_cast<uint32_t>(f->wait_a), 8, 8);
      const Mbarrier& m = l.cta->mbarriers[l.offset];
      return text(
          " %s parity %lu; it is in phase %lu (parity %lu), %ld of %u arrivals and %ld bytes outstanding",
          place(l.cta, l.offset).c_str(), ul(f->wait_b), ul(m.phase), ul(m.phase & 1), long(m.pending),
          m.count, long(m.tx_bytes));
    }
    case Wait::barrier: {
      const NamedBarrier& b = cta->barriers[f->wait_a];
      return text(" %lu: %d of %d arrived", ul(f->wait_a), b.arrived,
                  b.expected ? b.expected : cta->live_threads);
    }
    case Wait::warp:
      return text(": %s mask %08x, arrived %08x", f->warp_op->what, f->warp_op->mask, f->warp_op->arrived);
    case Wait::wgmma:
      return text(" for group %lu; %lu done", ul(f->wait_a), ul(f->warpgroup->groups_done));
    case Wait::registers:
      return text(" to %lu; %ld registers free", ul(f->wait_a), long(cta->free_registers));
    default:
      return "";
  }
}

}  // namespace

void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  machine.error = format_text(format, args);
  va_end(args);
  if (!machine.in_fiber) throw Error(machine.error);
  const Fiber* f = self();
  machine.error +=
      text(" [block (%u,%u,%u) thread %u]", f->block_idx.x, f->block_idx.y, f->block_idx.z, f->index);
  leave_failed_thread();
}

std::string place(Cta* cta, uint32_t offset) {
  auto label = cta->labels.find(offset);
  return text("shared+0x%x%s%s", offset - cta->dynamic_offset, label == cta->labels.end() ? "" : " ",
              label == cta->labels.end() ? "" : label->second.c_str());
}

std::string report(const char* head) {
  Cta* cta = machine.cta.get();
  std::map<std::tuple<Wait, uint64_t, uint64_t>, std::vector<Fiber*>> groups;
  for (Fiber* f : cta->threads)
    if (f->wait != Wait::done) groups[{f->wait, f->wait_a, f->wait_b}].push_back(f);
  std::string result = head;
  result += text("\n block (%u,%u,%u): %d of %zu threads live", cta->block_idx.x, cta->block_idx.y,
                 cta->block_idx.z, cta->live_threads, cta->threads.size());
  for (auto& [key, fibers] : groups)
    result += text("\n  threads %s wait for %s", ranges(fibers).c_str(),
                   kWaitNames[static_cast<int>(fibers[0]->wait)]) +
              wait_detail(cta, fibers[0]);
  return result;
}

void check_thread_exit(Fiber* f) {
  if (f->copies_in_flight) fail("thread %u exits with %d cp.async in flight", f->index, f->copies_in_flight);
  if (!f->stores.empty()) fail("thread %u exits before its TMA stores were read", f->index);
  if (f->wgmma_commits > f->warpgroup->groups_done || f->wgmma_next > f->warpgroup->first_op)
    fail("thread %u exits with wgmma in flight", f->index);
}

void check_block_exit(Cta* cta) {
  const uint3 b = cta->block_idx;
  for (auto& work : machine.pool)
    if (work.tma) fail("block (%u,%u,%u) exits with a TMA load in flight", b.x, b.y, b.z);
  for (auto& [offset, m] : cta->mbarriers)
    if (m.tx_bytes)
      fail("block exits with mbarrier %s short of %ld bytes", place(cta, offset).c_str(), long(m.tx_bytes));
}

}  // namespace emu
