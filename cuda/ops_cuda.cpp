// PyInit__C_cuda and the routing ops on CUDA tensors: checks, allocation, launch. The kernels are in <op>.cu.
#include <Python.h>

#include "device.h"

namespace fmoe_ext {
namespace {

void check_topk_idx_cuda(const Tensor& topk_idx, int64_t num_experts) {
  check_index_dtype(topk_idx, "topk_idx");
  check_dim(topk_idx, 2, "topk_idx", "[T, K]");
  STD_TORCH_CHECK(
      num_experts >= 1 && num_experts <= INT32_MAX, "num_experts must be at least 1 and below 2^31, but got ",
      num_experts);
  STD_TORCH_CHECK(
      topk_idx.numel() <= INT32_MAX, "topk_idx must have fewer than 2^31 elements (offsets are int32), but got shape ",
      shape_text(topk_idx));
}

Tensor count_tokens_cuda(Tensor topk_idx, int64_t num_experts) {
  check_topk_idx_cuda(topk_idx, num_experts);
  const OnDeviceOf device(topk_idx);
  Tensor idx = as_contiguous(topk_idx);
  Tensor counts = torch::stable::new_zeros(idx, {num_experts}, ScalarType::Long);
  launch_count_tokens(as_indices(idx), idx.numel(), num_experts, data<int64_t>(counts), device);
  return counts;
}

}  // namespace

FMOE_CUDA_LIBRARY(m) { m.impl("count_tokens", TORCH_BOX(&count_tokens_cuda)); }

}  // namespace fmoe_ext

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
