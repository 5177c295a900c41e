// What every kernel file needs: launch(), which throws where a launch is refused, shared memory, warp
// reductions, element conversions, 16-byte vectors. nvcc compiles it for a GPU; under g++ (FMOE_EMULATOR) the
// names of CUDA are those of tests/emulator.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "launchers.h"
#include "ptx.cuh"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define FMOE_DYNAMIC_SHARED(name) extern __shared__ char name[]
#define FMOE_SHARED_ARRAY(T, name, count) __shared__ T name[count]
#endif

namespace fmoe_ext {

#ifdef __CUDACC__
// Lets a kernel have more shared memory than a block has by itself. Asked for once by each thread of the
// host, for each kernel and device: a kernel that needs so much always needs the same.
inline cudaError_t allow_shared(const void* kernel, size_t shared_bytes) {
  if (shared_bytes <= kStaticSharedBytes) return cudaSuccess;
  thread_local std::vector<std::pair<const void*, int>> allowed;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const std::pair<const void*, int> mine(kernel, device);
  if (error != cudaSuccess || std::find(allowed.begin(), allowed.end(), mine) != allowed.end()) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes));
  if (error == cudaSuccess) allowed.push_back(mine);
  return error;
}

// Starts kernel<<<grid, block, shared_bytes, stream>>>(args...); throws when the launch is refused.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Args&&... args) {
  const cudaLaunchConfig_t config{grid, block, shared_bytes, stream, nullptr, 0};
  cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  if (error == cudaSuccess) return;
  const char* name = "a kernel";
  cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel));
  throw std::runtime_error(std::string("fmoe_ext: launching ") + name + " with " + std::to_string(grid.x) +
                           " blocks of " + std::to_string(block.x) + " threads and " +
                           std::to_string(shared_bytes) +
                           " bytes of shared memory failed: " + cudaGetErrorString(error));
}
#else
using emu::launch;
#endif

using Stream = cudaStream_t;

constexpr unsigned kFullMask = 0xffffffffu;

// Blocks of a grid, at most: kernels loop over what is left. The emulator's grid is small, so that its tests
// loop.
#ifdef FMOE_EMULATOR
constexpr int kMaxGrid = 2;
#else
constexpr int kMaxGrid = 1 << 16;
#endif

template <typename A, typename B>
constexpr __host__ __device__ int64_t ceil_div(A a, B b) {
  return (static_cast<int64_t>(a) + b - 1) / b;
}
inline unsigned grid_for(int64_t blocks) {
  return static_cast<unsigned>(blocks < kMaxGrid ? blocks : kMaxGrid);
}

// ---- elements: stored as T, computed with as acc_t<T>, which is float, or double for double
template <typename T>
struct Acc {
  using type = float;
};
template <>
struct Acc<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Acc<T>::type;

__device__ __forceinline__ double to_acc(double v) { return v; }
__device__ __forceinline__ float to_acc(float v) { return v; }
__device__ __forceinline__ float to_acc(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_acc(__half v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T round_to(acc_t<T> v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(v);
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(v);
  else
    return v;
}

// kCount elements that are read and written by one access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vec {
  T v[kCount];
};
template <typename T>
constexpr int kVec16 = 16 / sizeof(T);

// Two 16-bit elements in a register, the first in its lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof bits);
    return __half22float2(pair);
  } else {  // a bfloat16 is the upper half of a float
    const uint32_t floats[2] = {bits << 16, bits & 0xffff0000u};
    float2 pair;
    memcpy(&pair, floats, sizeof pair);
    return pair;
  }
}

// Calls body with a value of the C++ type of a dtype.
template <class Body>
void dispatch_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::f64:
      return body(double{});
    case Dtype::f32:
      return body(float{});
    case Dtype::bf16:
      return body(__nv_bfloat16{});
    case Dtype::f16:
      return body(__half{});
  }
}

// Calls body with the indices in their own type.
template <class Body>
void dispatch_indices(Indices indices, const Body& body) {
  indices.is_int64 ? body(static_cast<const int64_t*>(indices.data))
                   : body(static_cast<const int32_t*>(indices.data));
}

// True if rows of `width` elements of all these matrices can be read 16 bytes at a time.
template <typename T>
bool is_wide(int64_t width, std::initializer_list<const void*> matrices) {
  return width % kVec16<T> == 0 && std::all_of(matrices.begin(), matrices.end(), [](const void* p) {
           return reinterpret_cast<uintptr_t>(p) % 16 == 0;
         });
}

// ---- warps
template <typename T>
__device__ __forceinline__ T warp_sum(T v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kFullMask, v, step);
  return v;
}
// The sum of this lane's value and those of the lanes before it (inclusive).
template <typename T>
__device__ __forceinline__ T warp_prefix_sum(T v) {
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(kFullMask, v, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) v += before;
  }
  return v;
}

}  // namespace fmoe_ext
