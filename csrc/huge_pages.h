// Large fresh tensors of CPU operators: filling one in 4 KB pages costs as much time in page faults as the
// arithmetic that fills it.
//   new_large             under huge pages
//   new_reused            also from memory that the last step freed (block_pool.h)
//   new_untouched_zeros   zeros that cost nothing until they are written
#pragma once

#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "block_pool.h"
#include "checks.h"

namespace fmoe_ext {

// Asks for huge pages under CPU memory that is about to be written for the first time. A hint: failure
// changes nothing.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < BlockPool::kSmallest) return;  // the size from which page faults are worth avoiding
  // whole pages inside, or madvise() fails; they have 64 KB on some arm64 kernels
  static const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

inline torch::stable::Device cpu_device() {
  return torch::stable::Device(torch::headeronly::DeviceType::CPU);
}

inline std::vector<int64_t> contiguous_strides(std::initializer_list<int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape.begin()[d];
  return strides;
}

// An uninitialised CPU tensor for results; `like` must be one, too.
inline Tensor new_large(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  Tensor t = torch::stable::new_empty(like, shape, dtype);
  advise_huge_pages(t.mutable_data_ptr(), t.numel() * t.element_size());
  return t;
}

// The same, of the dtype of `like`, for what a step frees and the next one needs again. Its storage cannot be
// resized. (If from_blob() throws here or below, for want of memory for the tensor itself, the block is
// lost.)
inline Tensor new_reused(const Tensor& like, std::initializer_list<int64_t> shape) {
  int64_t bytes = like.element_size();
  for (const int64_t size : shape) bytes = checked_product({bytes, size});
  const BlockPool::Block block = bytes < BlockPool::kSmallest ? BlockPool::Block{} : BlockPool::take(bytes);
  if (!block.data) return new_large(like, shape, like.scalar_type());
  return torch::stable::from_blob(block.data, shape, contiguous_strides(shape), cpu_device(),
                                  like.scalar_type(), [block](void*) { BlockPool::give(block); });
}

// A CPU tensor of zeros whose memory is not touched: pages come from the system, zero, when they are first
// written. For results of which most will stay zero. A small one is filled, for that costs less than mmap().
inline Tensor new_untouched_zeros(const Tensor& like, std::initializer_list<int64_t> shape) {
#if defined(__linux__)
  int64_t numel = 1;
  for (const int64_t size : shape) numel = checked_product({numel, size});
  const size_t bytes = checked_product({numel, static_cast<int64_t>(like.element_size())});
  constexpr size_t kFilled = 256 << 10;  // bytes; a backward of a few KB takes half the time
  void* data = bytes < kFilled
                   ? MAP_FAILED
                   : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data != MAP_FAILED) {
    advise_huge_pages(data, bytes);
    return torch::stable::from_blob(data, shape, contiguous_strides(shape), cpu_device(), like.scalar_type(),
                                    [bytes](void* memory) { munmap(memory, bytes); });
  }
#endif
  return torch::stable::new_zeros(like, shape);
}

}  // namespace fmoe_ext
