// fmoe_ext_emu::set_schedule(seed, preempt): in which order the emulated threads of later launches run.
#include <torch/csrc/stable/library.h>

#include "emu.h"

namespace {

void set_schedule(int64_t seed, int64_t preempt) {
  emu::config.seed = static_cast<uint64_t>(seed);
  emu::config.preempt = static_cast<int>(preempt);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fmoe_ext_emu, m) { m.def("set_schedule(int seed, int preempt) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext_emu, CompositeExplicitAutograd, m) {
  m.impl("set_schedule", TORCH_BOX(&set_schedule));
}
