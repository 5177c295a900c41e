// set_schedule(seed, preempt): in which order the emulated threads of later launches run;
// set_device(capability, num_sms): which device the ops find; set_capturing(): whether a graph is captured;
// wgmmas(): how many instructions of the Hopper kernels ran so far.
#include <torch/csrc/stable/library.h>

#include "emu.h"

namespace {

void set_schedule(int64_t seed, int64_t preempt) {
  emu::config.seed = static_cast<uint64_t>(seed);
  emu::config.preempt = static_cast<int>(preempt);
}

void set_device(int64_t capability, int64_t num_sms) {
  emu::config.capability = static_cast<int>(capability);
  emu::config.num_sms = static_cast<int>(num_sms);
}

void set_capturing(bool is_capturing) { emu::config.is_capturing = is_capturing; }

int64_t wgmmas() { return static_cast<int64_t>(emu::statistics.wgmmas); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fmoe_ext_emu, m) {
  m.def("set_schedule(int seed, int preempt) -> ()");
  m.def("set_device(int capability, int num_sms) -> ()");
  m.def("set_capturing(bool is_capturing) -> ()");
  m.def("wgmmas() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fmoe_ext_emu, CompositeExplicitAutograd, m) {
  m.impl("set_schedule", TORCH_BOX(&set_schedule));
  m.impl("set_device", TORCH_BOX(&set_device));
  m.impl("set_capturing", TORCH_BOX(&set_capturing));
  m.impl("wgmmas", TORCH_BOX(&wgmmas));
}
