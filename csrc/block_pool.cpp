// BlockPool of block_pool.h: blocks of mmap(), of which freed ones are kept in a list for the next take();
// and its release() as the operator _release_memory, for ops.release_memory().
#include "block_pool.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <vector>

#include "huge_pages.h"

namespace fmoe_ext {
namespace {

#if defined(__linux__) && defined(MADV_FREE) && !defined(__SANITIZE_ADDRESS__)
constexpr uintptr_t kHugePage = 2 << 20;

int64_t unmap(const BlockPool::Block& block) {
  munmap(block.data, block.bytes);
  return block.bytes;
}

// A block that begins at a huge page; none if the system refuses it.
BlockPool::Block map(int64_t bytes) {
  void* const data =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
  char* const begin = static_cast<char*>(data);
  char* const aligned =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage);
  if (aligned != begin) munmap(begin, aligned - begin);
  if (begin + kHugePage != aligned) munmap(aligned + bytes, begin + kHugePage - aligned);
  advise_huge_pages(aligned, bytes);
  return {aligned, bytes};
}

class Kept {
 public:
  std::mutex mutex;  // of all but used

  // The smallest block that is large enough: not much larger, or of any size if a new one would unmap others.
  BlockPool::Block find(int64_t bytes) {
    const int64_t room = most_ - used.load();
    const int64_t largest = bytes + bytes_ > room ? std::max(room, bytes + bytes / 4) : bytes + bytes / 4;
    size_t best = blocks_.size();
    for (size_t i = 0; i < blocks_.size(); ++i)
      if (blocks_[i].bytes >= bytes && blocks_[i].bytes <= largest &&
          (best == blocks_.size() || blocks_[i].bytes <= blocks_[best].bytes))
        best = i;
    if (best == blocks_.size()) return {};
    const BlockPool::Block block = blocks_[best];
    blocks_.erase(blocks_.begin() + best);
    bytes_ -= block.bytes;
    return block;
  }

  void add(const BlockPool::Block& block) {
    blocks_.push_back(block);
    bytes_ += block.bytes;
  }

  // Unmaps those that were freed first, until all and `more` bytes that are about to be used fit.
  void trim(int64_t more) {
    const int64_t now = used.load() + more, most = std::max(most_, now);
    size_t count = 0;
    while (count < blocks_.size() && now + bytes_ > most) bytes_ -= unmap(blocks_[count++]);
    blocks_.erase(blocks_.begin(), blocks_.begin() + count);
  }

  // After `used` has grown, and not before: a block that the system refuses bounds nothing.
  void note_use() { most_ = std::max(most_, used.load()); }

  void release() {
    for (const BlockPool::Block& block : blocks_) unmap(block);
    blocks_.clear();
    bytes_ = 0;
    most_ = used.load();
  }

  std::atomic<int64_t> used{0};  // bytes of blocks in use

 private:
  std::vector<BlockPool::Block> blocks_;  // the one that was freed last at the end
  int64_t bytes_ = 0;                     // of blocks_
  int64_t most_ = 0;                      // bytes that were in use at once
};

// Never destroyed: tensors may outlive it at exit.
Kept& kept() {
  static Kept* const instance = new Kept;
  return *instance;
}
#endif

}  // namespace

#if defined(__linux__) && defined(MADV_FREE) && !defined(__SANITIZE_ADDRESS__)

// take() and give() never wait: a fork may have copied a mutex that another thread held.
BlockPool::Block BlockPool::take(int64_t bytes) {
  // To an eighth of a power of two: workspaces differ a little from step to step, by the load of the experts.
  const int64_t unit = std::bit_floor(static_cast<uint64_t>(std::max(bytes, kSmallest))) / 8;
  bytes = (bytes + unit - 1) / unit * unit;
  Block block;
  const std::unique_lock lock(kept().mutex, std::try_to_lock);
  if (lock) {
    block = kept().find(bytes);
    kept().trim(block.data ? block.bytes : bytes);
  }
  if (!block.data) block = map(bytes);
  kept().used += block.bytes;
  if (lock) kept().note_use();
  return block;
}

void BlockPool::give(Block block) {
  kept().used -= block.bytes;
  const std::unique_lock lock(kept().mutex, std::try_to_lock);
  if (!lock || madvise(block.data, block.bytes, MADV_FREE) != 0) {
    unmap(block);
    return;
  }
  kept().add(block);
  kept().trim(0);
}

void BlockPool::release() {
  const std::lock_guard lock(kept().mutex);
  kept().release();
}

#else

BlockPool::Block BlockPool::take(int64_t) { return {}; }
void BlockPool::give(Block) {}
void BlockPool::release() {}

#endif

namespace {
void release_memory() { BlockPool::release(); }
}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fmoe_ext, m) { m.def("_release_memory() -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("_release_memory", TORCH_BOX(&release_memory));
}

}  // namespace fmoe_ext
