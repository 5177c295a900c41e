// The mode of batch_invariant() in Python, for kernels of the CPU: whether the result of a row must not
// depend on which other rows are there. Off by default: products with few rows then skip the packing of
// weights, and sum in another order than products with many.
#pragma once

#include <atomic>

namespace fmoe_ext {

namespace detail {
extern std::atomic<bool> batch_invariant;         // of the process
extern thread_local bool thread_batch_invariant;  // of this thread, which a block has switched on
}  // namespace detail

inline bool is_batch_invariant() {
  return detail::thread_batch_invariant || detail::batch_invariant.load(std::memory_order_relaxed);
}

// The mode of the thread that shares out its work, on the threads that help it, as for_each_job() does.
class AsOnCaller {
 public:
  explicit AsOnCaller(bool on) : before_(detail::thread_batch_invariant) {
    detail::thread_batch_invariant = on;
  }
  ~AsOnCaller() { detail::thread_batch_invariant = before_; }
  AsOnCaller(const AsOnCaller&) = delete;
  AsOnCaller& operator=(const AsOnCaller&) = delete;

 private:
  bool before_;
};

}  // namespace fmoe_ext
