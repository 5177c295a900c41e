// The only header with inline PTX. Kernels call these functions; under g++ the emulator supplies the same
// ones.
//
// Shared-memory operands are 32-bit addresses from shared_address(). Names follow the instruction they stand
// for.
#pragma once

#ifdef __CUDACC__

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#define PTX_FN __device__ __forceinline__

namespace fmoe_ext::ptx {

PTX_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- cp.async (sm_80): copies `bytes` of 16 and fills the rest with zeros
PTX_FN void cp_async16(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
PTX_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
PTX_FN void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
PTX_FN void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- warp matrix instructions (sm_80): d[4] += a[4] (16 x 16) * b[2] (16 x 8)
template <class T>
PTX_FN void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#define FMOE_MMA(type)                                                      \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same_v<T, __half>)
    FMOE_MMA("f16");
  else
    FMOE_MMA("bf16");
#undef FMOE_MMA
}
// ---- 2^v and 1 / v within 2 units in the last place; what is below 2^-126, v or the result, is zero
PTX_FN float ex2_ftz(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
PTX_FN float rcp_ftz(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// ---- shared memory by its own address: through a pointer whose origin the compiler has lost it is a generic
// load
PTX_FN uint4 ld_shared16(uint32_t p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
  return v;
}
PTX_FN void st_shared16(uint32_t p, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
PTX_FN void st_shared8(uint32_t p, const float2& v) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(p), "f"(v.x), "f"(v.y) : "memory");
}
// Whole, where the compiler would make four stores of a uint4.
PTX_FN void st_global16(void* p, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTranspose>
PTX_FN void ldmatrix_x4(uint32_t (&r)[4], uint32_t p) {
  if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
}
// Everything below is for sm_90a; it is compiled only where a kernel instantiates or calls it.
PTX_FN void stmatrix_x4(uint32_t p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// ---- mbarriers: barriers in shared memory that threads and asynchronous copies arrive at; a wait is for the
// end of a phase, named by its parity
PTX_FN void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
PTX_FN void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
PTX_FN void mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
PTX_FN void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\nL%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @!p bra L%=;\n}" ::"r"(
          bar),
      "r"(parity)
      : "memory");
}
PTX_FN void cp_async_mbar_arrive_noinc(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
PTX_FN void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX_FN void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- TMA copies a box of a tensor (a CUtensorMap) by its coordinates, of the fastest dimension first
PTX_FN void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1)
      : "memory");
}
PTX_FN void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
PTX_FN void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, int c3,
                     int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3,%4,%5,%6,%7}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// From shared memory. Of an element outside the tensor nothing is written.
PTX_FN void tma_store(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(map),
               "r"(src), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
// Adds; float32 below 2^-126, what is there, what is added or the sum, is zero.
PTX_FN void tma_add(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(
          map),
      "r"(src), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
PTX_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
PTX_FN void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---- warpgroups; a named barrier takes its id as a template argument, else the compiler reserves all
// sixteen
template <int kRegisters>
PTX_FN void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
PTX_FN void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kBarrier, int kThreads>
PTX_FN void bar_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
PTX_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
PTX_FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// After a wait: no read of the accumulators may move before it.
template <int kCount>
PTX_FN void fence_accumulators(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- warpgroup matrix instructions: d [64, N] (+)= a [64, 16] b [N, 16]^T, N twice the number of
// accumulators. Operands by descriptor; the rows of an operand in shared memory run along k, or (kAlongM,
// kAlongN) along m or n. The text of an instruction names each accumulator: "%0, %1, .." by tens, and their
// constraints by eights.
#define FMOE_TEN(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FMOE_SIXTY FMOE_TEN() FMOE_TEN(1) FMOE_TEN(2) FMOE_TEN(3) FMOE_TEN(4) FMOE_TEN(5)
#define FMOE_D8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FMOE_D32(i) FMOE_D8(i), FMOE_D8(i + 8), FMOE_D8(i + 16), FMOE_D8(i + 24)
// a, b, accumulate and the two transposes are the operands after the accumulators.
#define FMOE_WGMMA_TYPE(type, n, registers, A, B, C, TA, TB, ...)                                           \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C ", 0; wgmma.mma_async.sync.aligned.m64n" #n             \
               "k16.f32." type "." type " {" registers "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";}" \
               : __VA_ARGS__                                                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kAlongM), "n"(kAlongN))
#define FMOE_WGMMA(count, ...)                                                    \
  template <class T, bool kAlongM, bool kAlongN>                                  \
  PTX_FN void wgmma(float (&d)[count], uint64_t a, uint64_t b, bool accumulate) { \
    if constexpr (std::is_same_v<T, __half>)                                      \
      FMOE_WGMMA_TYPE("f16", __VA_ARGS__);                                        \
    else                                                                          \
      FMOE_WGMMA_TYPE("bf16", __VA_ARGS__);                                       \
  }
FMOE_WGMMA(64, 128, FMOE_SIXTY "%60,%61,%62,%63", 64, 65, 66, 67, 68, FMOE_D32(0), FMOE_D32(32))
FMOE_WGMMA(96, 192, FMOE_SIXTY FMOE_TEN(6) FMOE_TEN(7) FMOE_TEN(8) "%90,%91,%92,%93,%94,%95", 96, 97, 98, 99,
           100, FMOE_D32(0), FMOE_D32(32), FMOE_D32(64))
FMOE_WGMMA(128, 256,
           FMOE_SIXTY FMOE_TEN(6) FMOE_TEN(7) FMOE_TEN(8) FMOE_TEN(9) FMOE_TEN(10)
               FMOE_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127",
           128, 129, 130, 131, 132, FMOE_D32(0), FMOE_D32(32), FMOE_D32(64), FMOE_D32(96))
#undef FMOE_TEN
#undef FMOE_SIXTY
#undef FMOE_D8
#undef FMOE_D32
#undef FMOE_WGMMA_TYPE
#undef FMOE_WGMMA

}  // namespace fmoe_ext::ptx

#else
#include "emu_ptx.h"
#endif
