// What the launchers of the Hopper kernels share (sm90_*.cu, on the host): dispatch by dtype, launches, and
// tensor maps, by which TMA knows where a tensor lies.
#pragma once

#include "sm90.cuh"

namespace fmoe_ext {

// Calls body with a value of the C++ type of a 16-bit dtype.
template <class Body>
void dispatch_16bit(Dtype dtype, const Body& body) {
  if (dtype == Dtype::bf16) return body(__nv_bfloat16{});
  if (dtype == Dtype::f16) return body(__half{});
  throw std::runtime_error("fmoe_ext: the Hopper kernels take bfloat16 or float16 only");
}

// launch() with a Grid and the three warpgroups that every Hopper kernel has.
template <class... Params, class... Args>
void launch_sm90(void (*kernel)(Params...), const Grid& grid, size_t shared_bytes, LaunchStream stream,
                 Args&&... args) {
  launch(kernel, grid.num_blocks, kSm90Threads, shared_bytes, stream, std::forward<Args>(args)...);
}

#ifdef __CUDACC__
// A function of the driver, found by the runtime: the extension does not link libcuda.
template <class Function>
Function driver_function(const char* name, int since_version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, since_version, cudaEnableDefault, &found);
  if (error != cudaSuccess)  // perhaps of an earlier kernel, which is reported by the next call
    throw std::runtime_error(std::string("fmoe_ext: asking the CUDA driver for ") + name +
                             " failed: " + cudaGetErrorString(error));
  if (found != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("fmoe_ext: the CUDA driver has no ") + name +
                             ": a driver for CUDA 12.0 or newer is needed");
  return reinterpret_cast<Function>(entry);
}

// Tensor maps are encoded in the current context. A thread that has not used CUDA has none, and torch's guard
// binds none for the device that is current by default.
inline void ensure_context() {
  static const auto get_current = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent", 4000);
  CUcontext context = nullptr;
  if (get_current(&context) == CUDA_SUCCESS && context) return;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("fmoe_ext: binding the CUDA context of device ") +
                             std::to_string(device) + " failed: " + cudaGetErrorString(error));
}
#else
using emu::ensure_context;
#endif

// A tensor as TMA sees it, its fastest dimension first: strides[i] is that of dimension i + 1, in elements;
// box is what one copy moves.
struct TensorMapShape {
  int rank;
  uint64_t dims[5], strides[4];
  uint32_t box[5];
};

// Encodes the map of a tensor of 16 bits or float with the 128-byte swizzle, for a box whose rows are 128
// bytes; throws when the driver refuses.
template <class T>
void encode_tensor_map(CUtensorMap* map, const void* base, const TensorMapShape& shape) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
#ifdef __CUDACC__
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
#else
  constexpr auto encode = emu::encode_tiled;
#endif
  ensure_context();
  constexpr auto kType = std::is_same_v<T, float>    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                         : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint64_t dims[5], strides[4];
  cuuint32_t box[5];
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < shape.rank; ++i) {
    dims[i] = shape.dims[i];
    box[i] = shape.box[i];
    if (i) strides[i - 1] = shape.strides[i - 1] * sizeof(T);
  }
  const CUresult result = encode(map, kType, shape.rank, const_cast<void*>(base), dims, strides, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("fmoe_ext: encoding a tensor map failed with CUresult " +
                             std::to_string(result));
}

}  // namespace fmoe_ext
