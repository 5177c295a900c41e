// What the registered CUDA ops share: the device and stream they run on, checks of devices, registration.
// Built with FMOE_EMULATOR the same ops work on CPU tensors and register under fmoe_ext_emu (tests/emulator).
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "launchers.h"

#ifdef FMOE_EMULATOR
#define FMOE_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(fmoe_ext_emu, CPU, m)
#else
#define FMOE_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CUDA, m)
#endif

namespace fmoe_ext {

// Makes the device of a tensor current for the lifetime of the object; converts to that device's current stream.
#ifdef FMOE_EMULATOR
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor&) {}
  operator LaunchStream() const { return nullptr; }
};
#else
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) : device_(t.get_device_index()), guard_(device_) {}
  operator LaunchStream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return static_cast<LaunchStream>(stream);
  }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
};
#endif

inline void check_same_device(const Tensor& t, const Tensor& other, const char* name, const char* other_name) {
  STD_TORCH_CHECK(
      t.device() == other.device(), name, " must be on the device of ", other_name, " (index ",
      other.get_device_index(), "), but it is on another one (index ", t.get_device_index(), ")");
}

inline Indices as_indices(const Tensor& idx) { return {idx.const_data_ptr(), idx.scalar_type() == ScalarType::Long}; }

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
}

}  // namespace fmoe_ext
