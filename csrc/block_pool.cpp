#include "block_pool.h"

#include <torch/csrc/stable/library.h>

#include <mutex>
#include <vector>

#include "huge_pages.h"

namespace fmoe_ext {
namespace {

// Blocks that are kept, the one that was freed last at the end. Never destroyed: tensors may outlive it at
// exit.
struct Kept {
  std::mutex mutex;
  std::vector<BlockPool::Block> blocks;
};

Kept& kept() {
  static Kept* const instance = new Kept;
  return *instance;
}

#if defined(__linux__) && defined(MADV_FREE) && !defined(__SANITIZE_ADDRESS__)
constexpr size_t kMostBlocks = 256;
constexpr uintptr_t kHugePage = 2 << 20;

void unmap(const BlockPool::Block& block) { munmap(block.data, block.bytes); }

// A block that begins at a huge page.
BlockPool::Block map(int64_t bytes) {
  void* const data =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
  char* const begin = static_cast<char*>(data);
  char* const aligned =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage);
  if (aligned != begin) munmap(begin, aligned - begin);
  munmap(aligned + bytes, begin + kHugePage - aligned);
  advise_huge_pages(aligned, bytes);
  return {aligned, bytes};
}
#endif

}  // namespace

#if defined(__linux__) && defined(MADV_FREE) && !defined(__SANITIZE_ADDRESS__)

// A thread never waits here: a fork may have copied a mutex that another thread held.
BlockPool::Block BlockPool::take(int64_t bytes) {
  constexpr int64_t kPage = 4096;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  if (const std::unique_lock lock(kept().mutex, std::try_to_lock); lock) {
    std::vector<Block>& blocks = kept().blocks;
    size_t best = blocks.size();
    for (size_t i = 0; i < blocks.size(); ++i)
      if (blocks[i].bytes >= bytes && blocks[i].bytes <= bytes + bytes / 4 &&
          (best == blocks.size() || blocks[i].bytes <= blocks[best].bytes))
        best = i;
    if (best < blocks.size()) {
      const Block block = blocks[best];
      blocks.erase(blocks.begin() + best);
      return block;
    }
  }
  return map(bytes);
}

void BlockPool::give(Block block) {
  const std::unique_lock lock(kept().mutex, std::try_to_lock);
  if (!lock || madvise(block.data, block.bytes, MADV_FREE) != 0) return unmap(block);
  std::vector<Block>& blocks = kept().blocks;
  if (blocks.size() == kMostBlocks) {
    unmap(blocks.front());
    blocks.erase(blocks.begin());
  }
  blocks.push_back(block);
}

void BlockPool::release() {
  const std::lock_guard lock(kept().mutex);
  for (const Block& block : kept().blocks) unmap(block);
  kept().blocks.clear();
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
