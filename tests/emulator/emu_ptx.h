// The functions of cuda/ptx.cuh in terms of the emulator.
#pragma once

#include "cuda_surface.h"

namespace fmoe_ext::ptx {

inline uint32_t shared_address(const void* p) { return emu::shared_address(p); }

inline void cp_async16(uint32_t dst, const void* src, int bytes) { emu::cp_async(dst, src, 16, bytes); }
inline void cp_async_commit() { emu::cp_async_commit(); }
template <int kPending>
void cp_async_wait() {
  emu::cp_async_wait(kPending);
}
inline void cp_async_wait_all() { emu::cp_async_wait(-1); }

inline float ex2_ftz(float v) { return emu::flushed(std::exp2(emu::flushed(v))); }
inline float rcp_ftz(float v) { return emu::flushed(1.f / emu::flushed(v)); }

inline uint4 ld_shared16(uint32_t p) { return emu::ld_shared16(p); }
inline void st_shared16(uint32_t p, const uint4& v) { emu::st_shared16(p, v); }
inline void st_shared8(uint32_t p, const float2& v) { emu::st_shared8(p, v); }
inline void st_global16(void* p, const uint4& v) { *static_cast<uint4*>(p) = v; }

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emu::Operand operand;
  operand.arg = std::is_same_v<T, __half>;
  std::memcpy(operand.regs, a, sizeof a);
  std::memcpy(operand.regs + 4, b, sizeof b);
  std::memcpy(operand.regs + 6, d, sizeof d);
  operand = emu::collective(emu::WarpOpKind::mma, ~0u, operand, "mma.sync");
  std::memcpy(d, operand.regs + 6, sizeof d);
}
template <bool kTranspose>
void ldmatrix_x4(uint32_t (&r)[4], uint32_t p) {
  const emu::Operand operand =
      emu::collective(emu::WarpOpKind::ldmatrix, ~0u, {p, 4, kTranspose}, "ldmatrix");
  std::memcpy(r, operand.regs, sizeof r);
}
inline void stmatrix_x4(uint32_t p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emu::collective(emu::WarpOpKind::stmatrix, ~0u, {p, 4, 0, {a, b, c, d}}, "stmatrix");
}

inline void mbar_init(uint32_t bar, uint32_t count) { emu::mbar_init(bar, count); }
inline void mbar_arrive(uint32_t bar) { emu::mbar_arrive(bar); }
inline void mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes) { emu::mbar_arrive(bar, bytes); }
inline void mbar_wait(uint32_t bar, uint32_t parity) { emu::mbar_wait(bar, parity); }
inline void cp_async_mbar_arrive_noinc(uint32_t bar) { emu::cp_async_mbar_arrive_noinc(bar); }
inline void fence_mbar_init() { emu::fence_mbar_init(); }
inline void fence_proxy_async() { emu::fence_proxy_async(); }

template <class... C>
void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, C... coordinates) {
  const int c[] = {coordinates...};
  emu::tma_load(dst, map, bar, sizeof...(C), c);
}
inline void tma_store(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2) {
  const int c[] = {c0, c1, c2};
  emu::tma_store(map, src, 3, c, false);
}
inline void tma_add(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2) {
  const int c[] = {c0, c1, c2};
  emu::tma_store(map, src, 3, c, true);
}
inline void bulk_commit() { emu::bulk_commit(); }
template <int kPending>
void bulk_wait_read() {
  emu::bulk_wait(kPending);
}

template <int kRegisters>
void setmaxnreg_inc() {
  emu::setmaxnreg(kRegisters, true);
}
template <int kRegisters>
void setmaxnreg_dec() {
  emu::setmaxnreg(kRegisters, false);
}
template <int kBarrier, int kThreads>
void bar_sync() {
  emu::bar_sync(kBarrier, kThreads);
}

inline void wgmma_fence() { emu::wgmma_fence(); }
inline void wgmma_commit() { emu::wgmma_commit(); }
template <int kPending>
void wgmma_wait() {
  emu::wgmma_wait(kPending);
}
template <int kCount>
void fence_accumulators(float (&)[kCount]) {}
template <class T, bool kAlongM, bool kAlongN, int kRegisters>
void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, bool accumulate) {
  emu::wgmma(d, {2 * kRegisters, accumulate, kAlongM, kAlongN, std::is_same_v<T, __half>}, a, b);
}

}  // namespace fmoe_ext::ptx
