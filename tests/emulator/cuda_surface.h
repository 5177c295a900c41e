// The CUDA C++ language surface for g++: qualifiers, built-in variables, warp functions, atomics, fast maths.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cmath>

#include "emu.h"

#undef __global__
#undef __device__
#undef __host__
#undef __grid_constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::emu::current->thread_idx)
#define blockIdx (::emu::current->block_idx)
#define gridDim (::emu::grid_dim)
#define blockDim (::emu::block_dim)

#define FMOE_DYNAMIC_SHARED(name) char* name = ::emu::dynamic_shared()
#define FMOE_SHARED_ARRAY(T, name, count) \
  static char name##_tag;                 \
  T(&name)[count] = *(T(*)[count])::emu::static_shared(&name##_tag, sizeof(T) * (count), alignof(T))

inline void __syncthreads() { emu::bar_sync(0, 0); }
inline void __syncwarp(unsigned mask = ~0u) {
  emu::collective(emu::WarpOpKind::sync, mask, {}, "__syncwarp");
}
inline void __threadfence() {}

#define EMU_SHUFFLE(name, kind)                                                                            \
  template <class T>                                                                                       \
  T name(unsigned mask, T v, int arg, int width = 32) {                                                    \
    const emu::Operand operand{emu::to_bits(v), static_cast<uint32_t>(arg), static_cast<uint32_t>(width)}; \
    return emu::from_bits<T>(emu::collective(emu::WarpOpKind::kind, mask, operand, #name).value);          \
  }
EMU_SHUFFLE(__shfl_sync, shfl)
EMU_SHUFFLE(__shfl_up_sync, shfl_up)
EMU_SHUFFLE(__shfl_down_sync, shfl_down)
EMU_SHUFFLE(__shfl_xor_sync, shfl_xor)
#undef EMU_SHUFFLE

#define EMU_WARP(result, name, kind, type)                                             \
  inline result name(unsigned mask, type v) {                                          \
    return static_cast<result>(                                                        \
        emu::collective(emu::WarpOpKind::kind, mask, {emu::to_bits(v)}, #name).value); \
  }
EMU_WARP(unsigned, __ballot_sync, ballot, int)
EMU_WARP(int, __all_sync, all, int)
EMU_WARP(int, __any_sync, any, int)
EMU_WARP(unsigned, __reduce_add_sync, reduce_add, unsigned)
EMU_WARP(unsigned, __reduce_min_sync, reduce_min, unsigned)
EMU_WARP(unsigned, __reduce_max_sync, reduce_max, unsigned)
EMU_WARP(unsigned, __match_any_sync, match_any, int)
EMU_WARP(unsigned, __match_any_sync, match_any, unsigned)
#undef EMU_WARP

inline int __popc(unsigned v) { return std::popcount(v); }
inline int __ffs(int v) { return v ? std::countr_zero(static_cast<unsigned>(v)) + 1 : 0; }
inline int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }
// As the device: results too small for a normal number are 0, and so is a quotient by more than 2^126.
inline float __expf(float x) {
  const float value = expf(x);
  return std::isnormal(value) || value != value || std::isinf(value) ? value : 0.f;
}
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p126f ? a * 0.f : a / b; }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline long long __double_as_longlong(double v) { return std::bit_cast<long long>(v); }

// One OS thread runs every CUDA thread, so reading and then writing is atomic; the builtins tell
// ThreadSanitizer.
#define EMU_ATOMIC(name, expression)            \
  template <class T>                            \
  T name(T* p, std::type_identity_t<T> v) {     \
    T old;                                      \
    __atomic_load(p, &old, __ATOMIC_RELAXED);   \
    T next = static_cast<T>(expression);        \
    __atomic_store(p, &next, __ATOMIC_RELAXED); \
    return old;                                 \
  }
EMU_ATOMIC(atomicAdd, old + v)
EMU_ATOMIC(atomicMax, old < v ? v : old)
EMU_ATOMIC(atomicMin, v < old ? v : old)
#undef EMU_ATOMIC

template <class T>
  requires std::is_integral_v<T>
T min(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}
template <class T>
  requires std::is_integral_v<T>
T max(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}
