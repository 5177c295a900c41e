// What the Hopper kernels share. Their bodies are compiled for sm_90a only (and for the emulator).
#pragma once

#include "grouped_rows.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FMOE_SM90A 1
#endif

namespace fmoe_ext {

using bf16 = __nv_bfloat16;

constexpr int kSwizzledK = 64;  // bfloat16 elements in a 128-byte row of a swizzled tile
constexpr size_t kSharedAlignment = 1024;

__device__ __forceinline__ char* align_shared(char* p) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kSharedAlignment - 1) &
                                 ~(kSharedAlignment - 1));
}

// wgmma operand whose rows run along k: 128-byte rows, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}
constexpr int kDescriptorK16 = 32 >> 4;       // 16 elements further along k
constexpr int kDescriptor64Rows = 8192 >> 4;  // 64 rows further down

// Encodes a bfloat16 tensor map with the 128-byte swizzle; throws when the driver refuses. Strides in
// elements.
struct TensorMapShape {
  int rank;
  uint64_t dims[5], strides[4];
  uint32_t box[5];
};
inline void encode_tensor_map(CUtensorMap* map, const void* base, const TensorMapShape& shape) {
#ifdef __CUDACC__
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (!encode)
    throw std::runtime_error(
        "fmoe_ext: the CUDA driver has no cuTensorMapEncodeTiled: version 12.0 is needed");
#else
  constexpr auto encode = emu::encode_tiled;
#endif
  cuuint64_t dims[5], strides[4];
  cuuint32_t box[5];
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < shape.rank; ++i) {
    dims[i] = shape.dims[i];
    box[i] = shape.box[i];
    if (i) strides[i - 1] = shape.strides[i - 1] * sizeof(bf16);
  }
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, shape.rank, const_cast<void*>(base), dims, strides, box,
             ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("fmoe_ext: encoding a tensor map failed with CUresult " +
                             std::to_string(result));
}

}  // namespace fmoe_ext
