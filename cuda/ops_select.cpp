// The switches of select.h as operators, with which gpu/kernels.py turns kernels on and off in every process;
// `python -m fmoe_ext.gpu` and the tests call them too. They touch no GPU.
#include <string>
#include <vector>

#include "device.h"
#include "select.h"

namespace fmoe_ext {
namespace {

std::vector<std::string> gpu_kernels() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) names.emplace_back(entry.name);
  return names;
}

#ifndef FMOE_KERNEL_SOURCES
#define FMOE_KERNEL_SOURCES  // by setup.py: "file:digest/..." (sources_digest.py); else "unknown"
#endif
#define FMOE_TEXT(x) #x
#define FMOE_TEXT_OF(x) FMOE_TEXT(x)
// Digests of the sources of the portable kernels first, then of each entry's.
std::vector<std::string> gpu_kernel_sources() {
  const std::string all = FMOE_TEXT_OF(FMOE_KERNEL_SOURCES);
  const auto digest_of = [&](const std::string& file) -> std::string {
    const size_t found = all.find(file + ":");
    return found == std::string::npos ? "unknown" : all.substr(found + file.size() + 1, 16);
  };
  std::vector<std::string> digests{digest_of("portable")};
  for (const Entry& entry : kEntries) digests.push_back(digest_of(entry.source));
  return digests;
}

void set_gpu_kernels(std::vector<std::string> names) {
  uint64_t on = 0;
  for (const std::string& name : names) {
    const auto* entry = std::find_if(std::begin(kEntries), std::end(kEntries),
                                     [&](const Entry& candidate) { return candidate.name == name; });
    STD_TORCH_CHECK(entry != std::end(kEntries), "there is no GPU kernel \"", name,
                    "\": torch.ops.fmoe_ext._gpu_kernels() lists them");
    on |= 1ull << (entry - kEntries);
  }
  entries_on.store(on, std::memory_order_relaxed);
}

std::vector<int64_t> gpu_kernel_runs() {
  std::vector<int64_t> runs;
  for (const auto& count : entry_runs) runs.push_back(count.load(std::memory_order_relaxed));
  return runs;
}

std::vector<std::string> gpu_torch_classes() {
  std::vector<std::string> names;
  for (int i = 0; i < kTorchClasses; ++i) names.push_back(torch_class_name(i));
  return names;
}

void set_gpu_torch_wins(std::vector<std::string> names) {
  uint64_t on = 0;
  for (const std::string& name : names) {
    int i = 0;
    while (i < kTorchClasses && torch_class_name(i) != name) ++i;
    STD_TORCH_CHECK(i < kTorchClasses, "there is no class of products \"", name,
                    "\": torch.ops.fmoe_ext._gpu_torch_classes() lists them");
    on |= 1ull << i;
  }
  torch_wins.store(on, std::memory_order_relaxed);
}

std::vector<int64_t> gpu_torch_runs() {
  std::vector<int64_t> runs;
  for (const auto& count : torch_runs) runs.push_back(count.load(std::memory_order_relaxed));
  return runs;
}

void set_gpu_sm_margin(int64_t sms) {
  STD_TORCH_CHECK(sms >= 0 && sms <= 1024, "sms must be in [0, 1024], but got ", sms);
  sm_margin.store(static_cast<int>(sms), std::memory_order_relaxed);
}

}  // namespace

// FMOE_CUDA_NAMESPACE: fmoe_ext, or the emulator's
STABLE_TORCH_LIBRARY_FRAGMENT(FMOE_CUDA_NAMESPACE, m) {
  m.def("_gpu_kernels() -> str[]");                 // names of the entries of select.h, in its order
  m.def("_gpu_kernel_sources() -> str[]");          // source digests: portable kernels, then each entry
  m.def("_set_gpu_kernels(str[] names) -> ()");     // these on, all others off, on every device
  m.def("_gpu_kernel_runs() -> int[]");             // how often each has been chosen by this process
  m.def("_gpu_torch_classes() -> str[]");           // "product/numbers/rows": what torch's grouped_mm may win
  m.def("_set_gpu_torch_wins(str[] names) -> ()");  // torch's grouped_mm computes these only
  m.def("_gpu_torch_runs() -> int[]");              // how often torch computed each of kTorchProducts
  m.def("_set_gpu_sm_margin(int sms) -> ()");       // SMs that the Hopper kernels leave to NCCL's
}
STABLE_TORCH_LIBRARY_IMPL(FMOE_CUDA_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("_gpu_kernels", TORCH_BOX(&gpu_kernels));
  m.impl("_gpu_kernel_sources", TORCH_BOX(&gpu_kernel_sources));
  m.impl("_set_gpu_kernels", TORCH_BOX(&set_gpu_kernels));
  m.impl("_gpu_kernel_runs", TORCH_BOX(&gpu_kernel_runs));
  m.impl("_gpu_torch_classes", TORCH_BOX(&gpu_torch_classes));
  m.impl("_set_gpu_torch_wins", TORCH_BOX(&set_gpu_torch_wins));
  m.impl("_gpu_torch_runs", TORCH_BOX(&gpu_torch_runs));
  m.impl("_set_gpu_sm_margin", TORCH_BOX(&set_gpu_sm_margin));
}

}  // namespace fmoe_ext
