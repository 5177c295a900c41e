// The activations of expert_mlp by name, for every device.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

namespace fmoe_ext {

enum class Curve { kGelu, kGeluTanh, kRelu, kSilu };

// a = curve(h), or curve(gate) * up where h is [gate; up].
struct Activation {
  Curve curve;
  bool gated;
};

inline Activation parse_activation(const std::string& name) {
  if (name == "gelu") return {Curve::kGelu, false};
  if (name == "gelu_tanh") return {Curve::kGeluTanh, false};
  if (name == "relu") return {Curve::kRelu, false};
  if (name == "silu") return {Curve::kSilu, false};
  if (name == "swiglu") return {Curve::kSilu, true};
  if (name == "geglu") return {Curve::kGelu, true};
  if (name == "geglu_tanh") return {Curve::kGeluTanh, true};
  STD_TORCH_CHECK(false, "unknown activation \"", name,
                  "\": known are gelu, gelu_tanh, relu, silu, swiglu, geglu, geglu_tanh");
}

}  // namespace fmoe_ext
