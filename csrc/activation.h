// The activations of expert_mlp and frozen_mlp, for the kernels of every device: no torch here.
#pragma once

#include <cstdint>

namespace fmoe_ext {

enum class CurveKind { gelu, gelu_tanh, relu, silu, relu2, clamped_silu };

// Of GPT-OSS: clamped_silu(x) = v sigmoid(kClampedAlpha v) of v = min(x, kClampedLimit). Its up is clamped to
// +-kClampedLimit, and 1 is added.
constexpr float kClampedAlpha = 1.702f, kClampedLimit = 7.f;

// a = curve(h), or curve(gate) * up where h is [gate; up]; up is clamped and increased beside clamped_silu.
struct Activation {
  CurveKind curve;
  bool gated;
};

// An operator names an activation by its place in this list, which is that of ops.ACTIVATIONS in Python. (A
// string would leak: torch's conversion of std::string through the stable ABI never frees.)
constexpr Activation kActivations[] = {
    {CurveKind::gelu, false},     {CurveKind::gelu_tanh, false}, {CurveKind::relu, false},
    {CurveKind::silu, false},     {CurveKind::silu, true},       {CurveKind::gelu, true},
    {CurveKind::gelu_tanh, true}, {CurveKind::relu2, false},     {CurveKind::clamped_silu, true},
};
constexpr int64_t kNumActivations = sizeof(kActivations) / sizeof(kActivations[0]);

}  // namespace fmoe_ext
