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

#define EMU_SHUFFLE(name, kind)                                                                            \
  template <class T>                                                                                       \
  T name(unsigned mask, T v, int arg, int width = 32) {                                                    \
    const emu::Operand operand{emu::to_bits(v), static_cast<uint32_t>(arg), static_cast<uint32_t>(width)}; \
    return emu::from_bits<T>(emu::collective(emu::WarpOpKind::kind, mask, operand, #name).value);          \
  }
EMU_SHUFFLE(__shfl_sync, shfl)
EMU_SHUFFLE(__shfl_up_sync, shfl_up)
EMU_SHUFFLE(__shfl_xor_sync, shfl_xor)
#undef EMU_SHUFFLE

#define EMU_WARP(result, name, kind, type)                                             \
  inline result name(unsigned mask, type v) {                                          \
    return static_cast<result>(                                                        \
        emu::collective(emu::WarpOpKind::kind, mask, {emu::to_bits(v)}, #name).value); \
  }
EMU_WARP(unsigned, __ballot_sync, ballot, int)
EMU_WARP(unsigned, __match_any_sync, match_any, int)
#undef EMU_WARP

inline int __popc(unsigned v) { return std::popcount(v); }
inline int __ffs(int v) { return v ? std::countr_zero(static_cast<unsigned>(v)) + 1 : 0; }

// One OS thread runs every CUDA thread, so reading and then writing is atomic; the builtins tell
// ThreadSanitizer.
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  T old;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  T next = old + v;
  __atomic_store(p, &next, __ATOMIC_RELAXED);
  return old;
}

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
