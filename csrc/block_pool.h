// Memory of large tensors that a step frees and the next step needs again, for new_reused() of huge_pages.h:
// weight gradients, saved rows, workspaces. The C library returns blocks of this size to the system at once,
// and the next step pays for each page again, which can cost a tenth of a training step.
#pragma once

#include <cstdint>

namespace fmoe_ext {

// Keeps freed blocks for tensors of about their size. Their pages are marked as free (MADV_FREE): the system
// takes them where it needs memory, from kept blocks before anything is swapped. Blocks in use and kept ones
// together are at most what was in use at once since the last release(), unless two threads meet here.
class BlockPool {
 public:
  static constexpr int64_t kSmallest = 4 << 20;  // bytes; smaller blocks come from the C library

  struct Block {
    void* data = nullptr;  // null if there is none, and always outside Linux: ask the C library
    int64_t bytes = 0;
  };

  static Block take(int64_t bytes);
  static void give(Block block);
  static void release();  // returns all kept blocks to the system
};

}  // namespace fmoe_ext
