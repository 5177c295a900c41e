// Shared memory: allocation, addresses, swizzles, and the record of who wrote what through which proxy.
#include <algorithm>

#include "state.h"

namespace emu {

char* dynamic_shared() { return self()->cta->shared.get() + self()->cta->dynamic_offset; }

void* static_shared(const void* tag, size_t bytes, size_t align) {
  Inside inside;
  Cta* cta = self()->cta;
  auto found = cta->statics.find(tag);
  if (found == cta->statics.end()) {
    const uint32_t offset = (cta->end + 16 + align - 1) / align * align;
    cta->static_bytes += bytes;
    if (cta->static_bytes > kMaxStaticBytes || offset + bytes > cta->capacity)
      fail("static shared memory of this kernel exceeds 48 KiB");
    cta->end = offset + bytes;
    found = cta->statics.emplace(tag, offset).first;
    asan_unpoison(cta->shared.get() + offset, bytes);
  }
  return cta->shared.get() + found->second;
}

uint32_t shared_address(const void* p) {
  const Cta* cta = self()->cta;
  const ptrdiff_t offset = static_cast<const char*>(p) - cta->shared.get();
  if (offset < cta->dynamic_offset || offset > cta->end)
    fail("%p is not in the shared memory of this block", p);
  return static_cast<uint32_t>(offset);
}

uint4 ld_shared16(uint32_t address) {
  Inside inside;
  maybe_preempt();
  Location l = locate(address, 16, 16);
  if (copy_in_flight(l.cta, l.offset, 16))
    fail("ld.shared reads %s during an asynchronous copy", place(l.cta, l.offset).c_str());
  note_read(self(), l.pointer(), 16);
  check_lane_order(l, false, self(), "ld.shared");
  note_generic_read(l.cta, l.offset, 16, self());
  uint4 v;
  copy_bytes(&v, l.pointer(), 16);
  return v;
}

namespace {
void st_shared(uint32_t address, const void* v, uint32_t bytes) {
  Inside inside;
  maybe_preempt();
  Location l = locate(address, bytes, bytes);
  if (copy_in_flight(l.cta, l.offset, bytes))
    fail("st.shared writes %s during an asynchronous copy", place(l.cta, l.offset).c_str());
  check_async_destination(l.cta, l.offset, bytes, "st.shared");
  check_lane_order(l, true, self(), "st.shared", bytes == 16);
  note_write(self(), l.pointer(), bytes);
  note_generic_write(l.cta, l.offset, bytes, self());
  copy_bytes(l.pointer(), v, bytes);
}
}  // namespace
void st_shared16(uint32_t address, const uint4& v) { st_shared(address, &v, 16); }
void st_shared8(uint32_t address, const float2& v) { st_shared(address, &v, 8); }

void label_shared(const void* p, const char* label) {
  Inside inside;
  self()->cta->labels[shared_address(p)] = label;
}

Location locate(uint32_t address, size_t bytes, size_t align) {
  Cta* cta = machine.cta.get();
  if (address < cta->dynamic_offset || address + bytes > cta->end)
    fail("shared-memory access [0x%x, +%zu) outside the allocation [0x%x, 0x%x)", address, bytes,
         cta->dynamic_offset, cta->end);
  if (address % align) fail("shared-memory address 0x%x is not aligned to %zu", address, align);
  return {cta, address};
}

namespace {
template <class Fn>
void for_chunks(Cta* cta, uint32_t offset, uint32_t bytes, Fn fn) {
  for (uint32_t i = offset / 16; i <= (offset + bytes - 1) / 16; ++i) fn(cta->chunks[i]);
}
}  // namespace

void mark_copies(Cta* cta, uint32_t offset, uint32_t bytes, int delta) {
  for_chunks(cta, offset, bytes, [&](Chunk& c) { c.copies_in_flight += delta; });
  // Under ASan plain accesses to the destination of an unfinished copy trap.
  if (delta > 0)
    asan_poison(cta->shared.get() + offset, bytes);
  else
    asan_unpoison(cta->shared.get() + offset, bytes);
}
void mark_stores(Cta* cta, uint32_t offset, uint32_t bytes, int delta) {
  for_chunks(cta, offset, bytes, [&](Chunk& c) { c.stores_reading += delta; });
}
bool copy_in_flight(Cta* cta, uint32_t offset, uint32_t bytes) {
  bool found = false;
  for_chunks(cta, offset, bytes, [&](Chunk& c) { found |= c.copies_in_flight != 0; });
  return found;
}
bool store_reading(Cta* cta, uint32_t offset, uint32_t bytes) {
  bool found = false;
  for_chunks(cta, offset, bytes, [&](Chunk& c) { found |= c.stores_reading != 0; });
  return found;
}
void note_generic_write(Cta* cta, uint32_t offset, uint32_t bytes, Fiber* writer, bool copied) {
  ++machine.clock;
  for_chunks(cta, offset, bytes, [&](Chunk& c) {
    c.written = machine.clock;
    c.writer = writer;
    c.copied = copied;
  });
}
void note_async_write(Cta* cta, uint32_t offset, uint32_t bytes) {
  ++machine.clock;
  for_chunks(cta, offset, bytes, [&](Chunk& c) { c.written = c.read = 0; });
}
void note_generic_read(Cta* cta, uint32_t offset, uint32_t bytes, Fiber* reader) {
  ++machine.clock;
  for_chunks(cta, offset, bytes, [&](Chunk& c) {
    c.read = machine.clock;
    c.reader = reader;
  });
}
// Of one warp: an access to what another lane wrote, or overwriting what it read, since they last met. Of a
// write that is not `whole` another lane may write the rest of the 16 bytes.
void check_lane_order(const Location& l, bool write, Fiber* who, const char* what, bool whole) {
  const Chunk& c = l.cta->chunks[l.offset / 16];
  const auto unordered = [&](uint64_t time, const Fiber* other) {
    return time > who->ordered && other && other != who && other->warp == who->warp;
  };
  if ((whole && unordered(c.written, c.copied ? nullptr : c.writer)) ||
      (write && unordered(c.read, c.reader)))
    fail("%s touches %s, which another lane of the warp used without __syncwarp in between", what,
         place(l.cta, l.offset).c_str());
}
bool used_without_fence(Cta* cta, uint32_t offset, uint64_t overwriter_fence) {
  const Chunk& c = cta->chunks[offset / 16];
  const bool read = c.read > overwriter_fence && c.reader->proxy_fence < c.read;
  if (c.copied) return read || c.written > std::max(overwriter_fence, cta->proxy_fence);
  return read || written_without_fence(cta, offset, overwriter_fence);
}
bool written_without_fence(Cta* cta, uint32_t offset, uint64_t reader_fence) {
  const Chunk& c = cta->chunks[offset / 16];
  return c.written > reader_fence && c.writer->proxy_fence < c.written;
}

void check_async_destination(Cta* cta, uint32_t offset, uint32_t bytes, const char* who) {
  if (store_reading(cta, offset, bytes))
    fail("%s overwrites %s while a TMA store reads it", who, place(cta, offset).c_str());
  for (auto& warpgroup : cta->warpgroups)
    for (auto& op : warpgroup.ops)
      for (int operand = 0; operand < 2; ++operand)
        if (offset < op.end_byte[operand] && offset + bytes > op.first_byte[operand])
          fail("%s overwrites %s while an unfinished wgmma of warpgroup %d may read it", who,
               place(cta, offset).c_str(), warpgroup.index);
}

// Swizzle: the address bits above each 16-byte column are mixed into it, within 128-, 64- or 32-byte rows.
uint32_t swizzle(uint32_t address, uint32_t span) {
  const uint32_t mask = span == 128 ? 0x70 : span == 64 ? 0x30 : span == 32 ? 0x10 : 0;
  return address ^ (address >> 3 & mask);
}

}  // namespace emu
