// Tensor maps and the copies that go through them, up to 5 dimensions, with swizzle and clipping.
#include "state.h"

namespace emu {
namespace {

thread_local bool has_context = false;

constexpr uint64_t kMapMagic = 0x7465'6e73'6f72'6d61ull;
constexpr uint32_t kSwizzleSpan[] = {0, 32, 64, 128};  // by CUtensorMapSwizzle

TensorMap decode(const CUtensorMap* encoded, int rank) {
  TensorMap map;
  if (reinterpret_cast<uintptr_t>(encoded) % 64)
    fail("tensor map at %p is not aligned to 64", static_cast<const void*>(encoded));
  copy_bytes(&map, encoded, sizeof map);
  if (map.magic != kMapMagic) fail("tensor map was not made by the encode function");
  if (map.rank != rank) fail("tensor map has rank %d, the instruction %d", map.rank, rank);
  return map;
}

uint32_t box_bytes(const TensorMap& map) {
  uint32_t bytes = map.element_bytes;
  for (int i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

// Calls fn(offset in the box, address in global memory or null where the box leaves the tensor) for every
// element.
template <class Fn>
void for_box(const TmaCopy& copy, Fn fn) {
  const TensorMap& map = copy.map;
  uint64_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  for (uint64_t row = 0; row < rows; ++row) {
    char* global = map.base;
    bool inside = true;
    uint64_t rest = row;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t x = copy.coordinates[i] + static_cast<int64_t>(rest % map.box[i]);
      rest /= map.box[i];
      inside &= x >= 0 && x < static_cast<int64_t>(map.dims[i]);
      global += x * static_cast<int64_t>(map.strides[i - 1]);
    }
    for (uint32_t i = 0; i < map.box[0]; ++i) {
      const int64_t x = static_cast<int64_t>(copy.coordinates[0]) + i;
      const bool valid = inside && x >= 0 && x < static_cast<int64_t>(map.dims[0]);
      fn((row * map.box[0] + i) * map.element_bytes, valid ? global + x * map.element_bytes : nullptr);
    }
  }
}

// As red.add.f32 does in global memory.
void add_float(char* sum, const char* term) {
  float a, b;
  copy_bytes(&a, sum, sizeof a);
  copy_bytes(&b, term, sizeof b);
  a = flushed(flushed(a) + flushed(b));
  copy_bytes(sum, &a, sizeof a);
}

TmaCopy new_copy(const CUtensorMap* encoded, int rank, const int* coordinates) {
  TmaCopy copy;
  copy.map = decode(encoded, rank);
  for (int i = 0; i < rank; ++i) copy.coordinates[i] = coordinates[i];
  copy.issuer = self();
  return copy;
}

}  // namespace

void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int rank, const int* coordinates) {
  Inside inside;
  maybe_preempt();
  auto copy = std::make_shared<TmaCopy>(new_copy(map, rank, coordinates));
  const uint32_t bytes = box_bytes(copy->map);
  Location l = locate(dst, bytes, 128);
  check_published(locate(bar, 8, 8), "TMA load");
  copy->cta = l.cta;
  copy->shared = l.offset;
  copy->bar = bar;
  release(self(), &self()->issued);
  check_async_destination(l.cta, l.offset, bytes, "TMA load");
  if (copy_in_flight(l.cta, l.offset, bytes))
    fail("TMA load overwrites %s while another copy to it is in flight", place(l.cta, l.offset).c_str());
  for (uint32_t offset = l.offset; offset < l.offset + bytes; offset += 16)
    if (used_without_fence(l.cta, offset, self()->proxy_fence))
      fail("TMA load overwrites %s, used through the generic proxy, without fence.proxy.async",
           place(l.cta, offset).c_str());
  mark_copies(l.cta, l.offset, bytes, 1);
  submit({Work::tma_load, nullptr, nullptr, copy});
}

void land_tma_load(TmaCopy& copy) {
  acquire(nullptr, &copy.issuer->issued);
  const TensorMap& map = copy.map;
  const uint32_t bytes = box_bytes(map);
  mark_copies(copy.cta, copy.shared, bytes, -1);
  for_box(copy, [&](uint32_t offset, const char* global) {
    char* dst = copy.cta->shared.get() + swizzle(copy.shared + offset, kSwizzleSpan[map.swizzle]);
    if (offset % 16 == 0) {
      note_write(nullptr, dst, 16);
      if (global) note_read(nullptr, global, map.element_bytes);
    }
    if (global)
      copy_bytes(dst, global, map.element_bytes);
    else
      zero_bytes(dst, map.element_bytes);
  });
  note_async_write(copy.cta, copy.shared, bytes);
  complete_tx(locate(copy.bar, 8, 8), bytes);
}

void tma_store(const CUtensorMap* map, uint32_t src, int rank, const int* coordinates, bool add) {
  Inside inside;
  maybe_preempt();
  Fiber* f = self();
  TmaCopy copy = new_copy(map, rank, coordinates);
  copy.add = add;
  if (add && copy.map.type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
    fail("TMA adds to float32 here, but the tensor map has type %d", copy.map.type);
  const uint32_t bytes = box_bytes(copy.map);
  Location l = locate(src, bytes, 128);
  copy.cta = l.cta;
  copy.shared = l.offset;
  release(f, &f->issued);
  for (uint32_t offset = l.offset; offset < l.offset + bytes; offset += 16)
    if (written_without_fence(l.cta, offset, f->proxy_fence))
      fail("TMA store reads %s written through the generic proxy without fence.proxy.async",
           place(l.cta, offset).c_str());
  mark_stores(l.cta, l.offset, bytes, 1);
  f->stores.push_back(copy);
}

void land_bulk_stores(Fiber* f) {
  while (!f->stores.empty()) {
    const TmaCopy copy = f->stores.front();
    f->stores.pop_front();
    if (copy.commit) {
      f->stores_done++;
      break;
    }
    acquire(nullptr, &f->issued);
    for_box(copy, [&](uint32_t offset, char* global) {
      const uint32_t address = swizzle(copy.shared + offset, kSwizzleSpan[copy.map.swizzle]);
      const char* src = copy.cta->shared.get() + address;
      if (offset % 16 == 0) {
        note_read(nullptr, src, 16);
        if (copy_in_flight(copy.cta, address, 16))
          fail("TMA store reads %s while a copy to it is in flight", place(copy.cta, address).c_str());
      }
      if (global == nullptr) return;
      note_write(nullptr, global, copy.map.element_bytes);
      if (copy.add)
        add_float(global, src);
      else
        copy_bytes(global, src, copy.map.element_bytes);
    });
    mark_stores(copy.cta, copy.shared, box_bytes(copy.map), -1);
  }
  release(nullptr, &f->landed);
  if (f->wait == Wait::bulk && f->stores_committed - f->stores_done <= f->wait_a) wake(f);
}

void ensure_context() { has_context = true; }

CUresult encode_tiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                      const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle_mode, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  static constexpr uint8_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};  // by CUtensorMapDataType
  bool valid = rank >= 1 && rank <= 5 && type <= CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 &&
               reinterpret_cast<uintptr_t>(base) % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0 &&
               interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
               swizzle_mode <= CU_TENSOR_MAP_SWIZZLE_128B;
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  TensorMap map{};
  map.magic = kMapMagic;
  map.base = static_cast<char*>(base);
  map.rank = rank;
  map.element_bytes = kElementBytes[type];
  map.swizzle = swizzle_mode;
  map.type = type;
  for (uint32_t i = 0; i < rank; ++i) {
    map.dims[i] = dims[i];
    map.box[i] = box[i];
    valid &= dims[i] >= 1 && dims[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 && element_strides[i] == 1;
    if (i == 0) continue;
    map.strides[i - 1] = strides[i - 1];
    valid &= strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40;
  }
  const uint32_t inner = map.box[0] * map.element_bytes, span = kSwizzleSpan[swizzle_mode];
  valid &= inner % 16 == 0 && (span == 0 || inner == span);  // hardware allows inner < span; we never use it
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  std::memset(static_cast<void*>(out), 0, sizeof *out);
  std::memcpy(static_cast<void*>(out), &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace emu
