// What the registered CUDA ops share: the device and stream they run on, registration, and the conversion of
// tensors for the launchers.
// Built with FMOE_EMULATOR the same ops work on CPU tensors and register under fmoe_ext_emu (tests/emulator).
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <optional>

#include "checks.h"
#include "launchers.h"
#include "same_device.h"

#ifdef FMOE_EMULATOR
#define FMOE_CUDA_NAMESPACE fmoe_ext_emu
#define FMOE_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(fmoe_ext_emu, CPU, m)
#else
#define FMOE_CUDA_NAMESPACE fmoe_ext
#define FMOE_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CUDA, m)
#endif

namespace fmoe_ext {

// Makes the device of a tensor current for the lifetime of the object, which converts to that device's
// current stream: pass it to a launcher in the stream's place.
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

inline Dtype as_dtype(const Tensor& t) {  // of a tensor that passed check_float: others would be f16
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return Dtype::f64;
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    default:
      return Dtype::f16;
  }
}
// The type in which sums and products of a tensor are computed.
inline ScalarType compute_type(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline Indices as_indices(const Tensor& idx) {  // of a tensor that passed check_index_dtype
  return {idx.const_data_ptr(), idx.scalar_type() == ScalarType::Long};
}

// The elements of a tensor that is only read, or has just been made. By const_data_ptr: mutable_data_ptr
// would copy a lazy clone (a tensor that shares its memory until one of the two is written) that is only
// read.
template <typename T = void>
T* data(const Tensor& t) {
  return static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
}
template <typename T = void>
T* data(const std::optional<Tensor>& t) {
  return t ? data<T>(*t) : nullptr;
}
// The elements of a caller's tensor that is written.
template <typename T = void>
T* data_to_write(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace fmoe_ext
