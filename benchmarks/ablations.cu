// B1 and B2 behind C functions, for bench_gpu_ablations.py; FMOE_WITHOUT (cuda/common.cuh) leaves parts out.
#include <stdexcept>
#include <string>

#include "common.cuh"

namespace {

thread_local std::string error;

template <class Body>
const char* guarded(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return error.c_str();
  }
}

}  // namespace

using namespace fmoe_ext;

// Of bfloat16; null, or an error. dy and x are [T, D], their rows read through row_idx.
extern "C" const char* grad_hidden(int gated, const void* dy, const void* h, const int* offs,
                                   const int* row_idx, const float* weights, const void* w2, void* dh,
                                   void* scaled_a, float* dots, int64_t num_rows, int num_experts, int top_k,
                                   int D, int H, int num_sms, int columns, void* stream) {
  return guarded([&] {
    const ActivationRows rows{h, offs, row_idx, weights, num_experts, top_k, num_rows, num_rows, true};
    launch_grad_hidden_sm90(Dtype::bf16, gated ? CurveKind::silu : CurveKind::gelu, gated, dy, rows, w2, D, H,
                            dh, scaled_a, dots, {num_sms, 1, 128, columns},
                            static_cast<LaunchStream>(stream));
  });
}

// dw2 [E, D, H] of the gathered rows of dy and scaled_a.
extern "C" const char* grad_weight(const void* dy, const void* scaled_a, const int* offs, const int* row_idx,
                                   const int* order, void* dw2, int64_t num_rows, int num_experts, int top_k,
                                   int D, int H, int num_sms, int cluster, void* stream) {
  return guarded([&] {
    launch_grad_weight_sm90(Dtype::bf16, {dy, D, row_idx, top_k, num_rows}, {scaled_a, H, nullptr, 1, 0},
                            offs, order, num_experts, num_rows, {dw2, false, false}, {num_sms, cluster},
                            static_cast<LaunchStream>(stream));
  });
}
