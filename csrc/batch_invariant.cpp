#include "batch_invariant.h"

#include <torch/csrc/stable/library.h>

namespace fmoe_ext {
namespace {

void set_batch_invariant(bool on) { detail::batch_invariant = on; }

void set_thread_batch_invariant(bool on) { detail::thread_batch_invariant = on; }

}  // namespace

namespace detail {
std::atomic<bool> batch_invariant{false};
thread_local bool thread_batch_invariant = false;
}  // namespace detail

STABLE_TORCH_LIBRARY_FRAGMENT(fmoe_ext, m) {
  m.def("_set_batch_invariant(bool on) -> ()");
  m.def("_set_thread_batch_invariant(bool on) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("_set_batch_invariant", TORCH_BOX(&set_batch_invariant));
  m.impl("_set_thread_batch_invariant", TORCH_BOX(&set_thread_batch_invariant));
}

}  // namespace fmoe_ext
