// Large fresh tensors: filling one in 4 KB pages costs as much time in page faults as the arithmetic that
// fills it.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "checks.h"

namespace fmoe_ext {

// Asks for huge pages under memory that is about to be written for the first time. A hint: failure changes
// nothing.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kWorthwhile = 4 << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kWorthwhile) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// An uninitialised tensor on the device of `like`.
inline Tensor new_large(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  Tensor t = torch::stable::new_empty(like, shape, dtype);
  advise_huge_pages(t.mutable_data_ptr(), t.numel() * t.element_size());
  return t;
}

}  // namespace fmoe_ext
