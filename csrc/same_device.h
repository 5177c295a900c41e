// Checks that the tensors of a call are there (not None) and on one device, for the operators of cuda/. Those
// of csrc/ take CPU tensors alone: check_cpu() in checks.h.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "checks.h"

namespace fmoe_ext {

struct NamedTensor {
  NamedTensor(const Tensor& t, const char* name_) : tensor(&t), name(name_) {}
  NamedTensor(const std::optional<Tensor>& t, const char* name_) : tensor(t ? &*t : nullptr), name(name_) {}

  const Tensor* tensor;  // null: optional, and not given
  const char* name;
};

inline std::string device_text(const Tensor& t) {
  using torch::headeronly::DeviceType;
  const auto device = t.device();
  if (device.type() == DeviceType::CPU) return "cpu";
  if (device.type() == DeviceType::Meta) return "meta";
  if (device.type() == DeviceType::CUDA) return "cuda:" + std::to_string(device.index());
  return "another kind of device";
}

// Raises unless all tensors are on the device of the first, which must be given (not an optional), in the
// words of Python's fake kernels: register_fake() in fmoe_ext/ops/_autograd.py.
inline void check_same_device(std::initializer_list<NamedTensor> tensors) {
  const NamedTensor& first = *tensors.begin();
  for (const auto& [t, name] : tensors) {
    if (!t) continue;
    STD_TORCH_CHECK(t->defined(), name, " must be a tensor, but got None");
    STD_TORCH_CHECK(t->device() == first.tensor->device(), name, " must be on ", device_text(*first.tensor),
                    " like ", first.name, ", but it is on ", device_text(*t));
  }
}

}  // namespace fmoe_ext
