// A functional emulator of the CUDA C++ and sm_90a PTX that cuda/ uses: same kernel sources, g++ instead of
// nvcc.
//
// Every CUDA thread is a fiber, all on one OS thread. Synchronisation is modelled exactly; asynchronous work
// (cp.async, TMA, wgmma groups) lands eagerly, as late as possible or at random moments, so that a missing
// wait shows.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <tuple>
#include <type_traits>

namespace emu {

enum class Landing { eager, lazy, random };

struct Config {
  uint64_t seed = 0;                 // 0: threads run in order; otherwise in an order drawn from the seed
  Landing landing = Landing::lazy;   // lazy: asynchronous work lands only when no thread can run
  int preempt = 0;                   // > 0: an emulated call gives way with probability 1 / preempt
  int capability = 80, num_sms = 3;  // what current_device_info() says
  bool is_capturing = false;         // what is_capturing() says
};
extern Config config;

struct Statistics {
  uint64_t switches, landings, wgmmas, blocks;
};
extern Statistics statistics;

// A launch that did what no correct kernel does; the text names the place and the threads.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Thread {
  uint3 thread_idx, block_idx;
};
extern Thread* current;  // the thread that runs now
extern dim3 grid_dim, block_dim;

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);
[[noreturn]] void fail(const char* format, ...);

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
            Args&&... args) {
  std::tuple<std::remove_cv_t<Params>...> params(static_cast<Params>(args)...);
  run(grid, block, shared_bytes, [&] { std::apply(kernel, params); });
}

// ---- shared memory; addresses are offsets in the block's window
char* dynamic_shared();
void* static_shared(const void* tag, size_t bytes, size_t align);
uint32_t shared_address(const void* p);
uint4 ld_shared16(uint32_t address);
void st_shared16(uint32_t address, const uint4& v);
void st_shared8(uint32_t address, const float2& v);
inline float flushed(float v) { return std::fabs(v) < 0x1p-126f ? v * 0.f : v; }
void label_shared(const void* p, const char* label);  // a name for reports

// ---- threads and warps
void bar_sync(int id, int num_threads);  // num_threads 0: the whole block
void setmaxnreg(int registers, bool increase);

enum class WarpOpKind { sync, shfl, shfl_up, shfl_xor, ballot, match_any, stmatrix, ldmatrix, mma };
struct Operand {
  uint64_t value = 0;
  uint32_t arg = 0, width = 0;
  uint32_t regs[10] = {};
};
Operand collective(WarpOpKind kind, uint32_t mask, const Operand& operand, const char* what);

template <class T>
uint64_t to_bits(T v) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// ---- mbarriers
void mbar_init(uint32_t bar, uint32_t count);
void mbar_arrive(uint32_t bar, uint32_t expect_tx = 0);
void mbar_wait(uint32_t bar, uint32_t parity);

// ---- asynchronous copies
void cp_async(uint32_t dst, const void* src, int chunk, int bytes);
void cp_async_mbar_arrive_noinc(uint32_t bar);
void cp_async_commit();
void cp_async_wait(int pending);  // < 0: everything
void tma_load(uint32_t dst, const CUtensorMap*, uint32_t bar, int rank, const int* coordinates);
void tma_store(const CUtensorMap*, uint32_t src, int rank, const int* coordinates, bool add);
void bulk_commit();
void bulk_wait(int pending);
void fence_proxy_async();
void fence_mbar_init();
void ensure_context();  // of this OS thread; a launch binds one too
CUresult encode_tiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void* base, const cuuint64_t* dims,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                      CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill);

// ---- warpgroup matrix multiply: d [64 x n] += a [64 x 16] b [16 x n], operands by descriptor
struct WgmmaShape {
  int n;
  bool accumulate, a_mn_major, b_mn_major, f16;
  bool operator==(const WgmmaShape&) const = default;
};
void wgmma(float* d, WgmmaShape, uint64_t a, uint64_t b);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace emu
