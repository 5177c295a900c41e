// The emulator's own tests: what must work, and what must be caught.
#include <thread>

#include "../../cuda/common.cuh"
#include "check.h"

using namespace fmoe_ext;
using bf16 = __nv_bfloat16;

namespace {

// ---- warps and barriers
void warp_kernel(int* out) {
  const int lane = threadIdx.x % 32;
  int* mine = out + threadIdx.x * 5;
  mine[0] = __shfl_xor_sync(kFullMask, lane, 5);
  mine[1] = __shfl_up_sync(kFullMask, lane, 3);
  mine[2] = __shfl_sync(kFullMask, lane * 2, 7);
  mine[3] = static_cast<int>(__ballot_sync(kFullMask, lane % 3 == 0));
  mine[4] = static_cast<int>(__match_any_sync(kFullMask, lane % 4));
}
void test_warp() {
  std::vector<int> out(64 * 5, -1);
  launch(warp_kernel, 1, 64, 0, nullptr, out.data());
  for (int t = 0; t < 64; ++t) {
    const int lane = t % 32, *mine = &out[t * 5];
    CHECK(mine[0] == (lane ^ 5), "%d", mine[0]);
    CHECK(mine[1] == (lane < 3 ? lane : lane - 3), "%d", mine[1]);
    CHECK(mine[2] == 14, "%d", mine[2]);
    CHECK(mine[3] == 0x49249249, "%x", mine[3]);
    CHECK(mine[4] == 0x11111111 << lane % 4, "%x", mine[4]);
  }
}

void reverse_kernel(int* data, bool with_barrier) {
  FMOE_SHARED_ARRAY(int, staged, 128);
  staged[threadIdx.x] = data[threadIdx.x];
  if (with_barrier) __syncthreads();
  data[threadIdx.x] = staged[127 - threadIdx.x];
}
void test_barrier() {
  std::vector<int> data(128);
#if defined(__SANITIZE_THREAD__)
  const std::vector<bool> cases{true};  // the race of the other case is TSan's to report
#else
  const std::vector<bool> cases{true, false};
#endif
  for (bool with_barrier : cases) {
    for (int i = 0; i < 128; ++i) data[i] = i;
    launch(reverse_kernel, 1, 128, 0, nullptr, data.data(), with_barrier);
    bool right = true;
    for (int i = 0; i < 128; ++i) right &= data[i] == 127 - i;
    CHECK(right == with_barrier, "a missing __syncthreads must show");
  }
}

void divergent_barrier_kernel() {
  if (threadIdx.x < 32) __syncwarp(threadIdx.x < 16 ? 0xffffu : ~0u);
}
void outside_kernel() {
  FMOE_DYNAMIC_SHARED(shared);
  ptx::cp_async16(ptx::shared_address(shared) + 1024, shared, 16);
}
void lone_wait_kernel() {
  FMOE_SHARED_ARRAY(uint64_t, bar, 1);
  emu::label_shared(bar, "full[0]");
  if (threadIdx.x == 0) ptx::mbar_init(ptx::shared_address(bar), 2);
  __syncthreads();
  if (threadIdx.x == 0) ptx::mbar_arrive(ptx::shared_address(bar));
  ptx::mbar_wait(ptx::shared_address(bar), 0);
}
void uninitialised_mbarrier_kernel() {
  FMOE_SHARED_ARRAY(uint64_t, bar, 1);
  ptx::mbar_wait(ptx::shared_address(bar), 0);
}
void half_warp_kernel() {
  if (threadIdx.x >= 32 && threadIdx.x < 48) ptx::bar_sync<1, 32>();
  if (threadIdx.x < 16) ptx::bar_sync<1, 32>();
}
void register_kernel() { threadIdx.x < 128 ? ptx::setmaxnreg_inc<240>() : ptx::setmaxnreg_dec<160>(); }
void test_diagnostics() {
  check_stops("threads 16-31 wait for a warp operation: __syncwarp",
              [] { launch(divergent_barrier_kernel, 1, 32, 0, nullptr); });
  check_stops("outside the allocation", [] { launch(outside_kernel, 1, 1, 1024, nullptr); });
  check_stops("threads 0-63 wait for mbarrier", [] { launch(lone_wait_kernel, 1, 64, 0, nullptr); });
  check_stops("full[0] parity 0; it is in phase 0", [] { launch(lone_wait_kernel, 1, 64, 0, nullptr); });
  check_stops("before mbarrier.init", [] { launch(uninitialised_mbarrier_kernel, 1, 1, 0, nullptr); });
  check_stops("setmaxnreg.inc to 240", [] { launch(register_kernel, 1, 384, 0, nullptr); });
  check_stops("the device refuses", [] { launch(outside_kernel, 0, 1, 0, nullptr); });
  check_stops("only the lanes 0000ffff of ffffffff arrived",
              [] { launch(half_warp_kernel, 1, 64, 0, nullptr); });
}

// ---- a TMA load into memory that was used through the generic proxy
CUtensorMap make_map(void* p, uint64_t columns, uint64_t rows, uint32_t box_columns, uint32_t box_rows,
                     int rank = 2);
enum class Used { fenced, written, stored, read };
void reuse_kernel(const CUtensorMap map, Used used) {
  FMOE_DYNAMIC_SHARED(raw);
  char* base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  const uint32_t tile = ptx::shared_address(base), bar = tile + 8192;
  if (threadIdx.x == 0) {
    ptx::mbar_init(bar, 1);
    ptx::fence_mbar_init();
  }
  __syncwarp();
  const uint32_t row = tile + threadIdx.x * 16;
  if (used == Used::read)
    ptx::ld_shared16(row);
  else if (used == Used::stored)
    ptx::st_shared16(row, {1, 2, 3, 4});
  else
    ptx::stmatrix_x4(row, 1, 2, 3, 4);
  if (used == Used::fenced) ptx::fence_proxy_async();
  __syncwarp();
  if (threadIdx.x == 0) {
    ptx::mbar_arrive_expect_tx(bar, 8192);
    ptx::tma_load(tile, &map, bar, 0, 0);
  }
  ptx::mbar_wait(bar, 0);
}
void test_proxies() {
  static bf16 global[64 * 64];
  const auto run = [](Used used) {
    launch(reuse_kernel, 1, 32, 16384, nullptr, make_map(global, 64, 64, 64, 64), used);
  };
  run(Used::fenced);
  for (const Used used : {Used::written, Used::stored, Used::read})
    check_stops("used through the generic proxy, without fence.proxy.async", [&] { run(used); });
}
// ---- an OS thread that has used no CUDA
void test_context() {
  std::thread([] {
    CUtensorMap map;
    const cuuint64_t dims[] = {64, 64}, strides[] = {128};
    const cuuint32_t box[] = {64, 64}, ones[] = {1, 1};
    const auto encode = [&] {
      return emu::encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, &map, dims, strides, box, ones,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CHECK(encode() == CUDA_ERROR_INVALID_CONTEXT, "a thread has a context from the start");
    emu::ensure_context();
    CHECK(encode() != CUDA_ERROR_INVALID_CONTEXT, "a bound context is not seen");
  }).join();
}
void test_fast_math() {
  CHECK(ptx::ex2_ftz(-126.5f) == 0 && ptx::ex2_ftz(128) > 3e38f && ptx::ex2_ftz(3) == 8, "powers of two");
  CHECK(ptx::rcp_ftz(0x1p127f) == 0 && ptx::rcp_ftz(0x1p-127f) > 3e38f && ptx::rcp_ftz(4) == 0.25f,
        "reciprocals");
}

// ---- cp.async: correct with the wait, stale without
void copy_kernel(const float4* in, float4* out, bool wait) {
  FMOE_SHARED_ARRAY(float4, staged, 64);
  ptx::cp_async16(ptx::shared_address(staged + threadIdx.x), in + threadIdx.x, threadIdx.x % 2 ? 8 : 16);
  ptx::cp_async_commit();
  if (wait) ptx::cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = staged[63 - threadIdx.x];
  ptx::cp_async_wait_all();
}
void test_cp_async() {
  std::vector<float4> in(64), out(64);
  for (int i = 0; i < 64; ++i) in[i] = {float(i), 1, 2, 3};
  auto right = [&] {
    for (int i = 0; i < 64; ++i)
      if (out[i].x != 63 - i || out[i].y != 1 || out[i].w != ((63 - i) % 2 ? 0 : 3)) return false;
    return true;
  };
  launch(copy_kernel, 1, 64, 0, nullptr, in.data(), out.data(), true);
  CHECK(right(), "copied values");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  if (emu::config.landing != emu::Landing::lazy) return;
  launch(copy_kernel, 1, 64, 0, nullptr, in.data(), out.data(), false);
  CHECK(!right(), "a missing wait must show");
#endif
}

// ---- mma.sync with ldmatrix
void mma_kernel(const bf16* a, const bf16* b, float* d) {  // a [16, 16], b [16, 8] row-major
  FMOE_SHARED_ARRAY(uint4, tile, 48);
  bf16* shared = reinterpret_cast<bf16*>(tile);
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) shared[i] = a[i];
  for (int i = lane; i < 128; i += 32) shared[256 + i] = b[i];
  __syncwarp();
  uint32_t fa[4], fb[4];
  ptx::ldmatrix_x4<false>(fa, ptx::shared_address(shared + lane % 16 * 16 + lane / 16 * 8));
  ptx::ldmatrix_x4<true>(fb, ptx::shared_address(shared + 256 + lane % 16 * 8));
  float acc[4] = {1, 1, 1, 1};
  const uint32_t b2[2] = {fb[0], fb[1]};
  ptx::mma_m16n8k16<bf16>(acc, fa, b2);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = acc[i];
}
void test_mma() {
  std::mt19937 random(1);
  std::vector<bf16> a(256), b(128);
  std::vector<float> d(128);
  for (bf16& v : a) v = __float2bfloat16(int(random() % 17) - 8);
  for (bf16& v : b) v = __float2bfloat16(int(random() % 17) - 8);
  launch(mma_kernel, 1, 32, 0, nullptr, a.data(), b.data(), d.data());
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += __bfloat162float(a[m * 16 + k]) * __bfloat162float(b[k * 8 + n]);
      CHECK(d[m * 8 + n] == sum, "d[%d,%d] = %g, expected %g", m, n, d[m * 8 + n], sum);
    }
}

// ---- TMA and every operand form of wgmma: A and B along k or along m / n
bf16 a_global[64 * 64], b_global[128 * 64], d_global[64 * 128];
float d_float[64 * 128];

struct Form {
  bool a_mn, b_mn, skip_fence, skip_init_fence;
};
CUtensorMap make_map(void* p, uint64_t columns, uint64_t rows, uint32_t box_columns, uint32_t box_rows,
                     int rank) {
  emu::ensure_context();
  CUtensorMap map;
  const cuuint64_t dims[] = {columns, rows, 1}, strides[] = {columns * 2, columns * rows * 2};
  const cuuint32_t box[] = {box_columns, box_rows, 1}, ones[] = {1, 1, 1};
  CHECK(emu::encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, p, dims, strides, box, ones,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
        "encode");
  return map;
}
void wgmma_kernel(const CUtensorMap map_a, const CUtensorMap map_b, const CUtensorMap map_d, Form form) {
  FMOE_DYNAMIC_SHARED(raw);
  char* base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  const uint32_t a = ptx::shared_address(base), b = a + 8192, d = b + 16384, bar = d + 16384;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if (t == 0) {
    ptx::mbar_init(bar, 1);
    if (!form.skip_init_fence) ptx::fence_mbar_init();
  }
  __syncthreads();
  if (t == 0) {
    ptx::mbar_arrive_expect_tx(bar, 8192 + 16384);
    ptx::tma_load(a, &map_a, bar, 0, 0);
    ptx::tma_load(b, &map_b, bar, 0, 0);
    if (form.b_mn) ptx::tma_load(b + 8192, &map_b, bar, 64, 0);
  }
  ptx::mbar_wait(bar, 0);
  float acc[64];
  for (float& v : acc) v = 1.f;
  const int row = warp * 16 + lane % 16;
  ptx::wgmma_fence();
  for (int kk = 0; kk < 4; ++kk) {  // 16 k are 32 bytes of a row along k, 2 KiB of rows along m or n
    const uint64_t swizzle128 = 1ull << 62 | uint64_t{1024 >> 4} << 32;
    const uint64_t da = swizzle128 | 1ull << 16 | (a + kk * (form.a_mn ? 2048 : 32)) >> 4;
    const uint64_t db =
        swizzle128 | uint64_t(form.b_mn ? 8192 >> 4 : 1) << 16 | (b + kk * (form.b_mn ? 2048 : 32)) >> 4;
    emu::wgmma(acc, {128, true, form.a_mn, form.b_mn, false}, da, db);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < 64; ++i)
    d_float[(warp * 16 + lane / 4 + (i & 2) * 4) * 128 + i / 4 * 8 + lane % 4 * 2 + (i & 1)] = acc[i];
  auto two = [&](int i) { return pack<bf16>(acc[i], acc[i + 1]); };
  for (int i = 0; i < 16; i += 2)  // two halves of 64 columns
    ptx::stmatrix_x4(d + i / 8 * 8192 + row * 128 + (((i % 8 + lane / 16) ^ (row & 7)) << 4), two(i * 4),
                     two(i * 4 + 2), two(i * 4 + 4), two(i * 4 + 6));
  if (!form.skip_fence) ptx::fence_proxy_async();
  __syncthreads();
  if (t != 0) return;
  ptx::tma_store(&map_d, d, 0, 0, 0);
  ptx::tma_store(&map_d, d + 8192, 64, 0, 0);
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
}
void run_wgmma(Form form) {
  std::mt19937 random(5);
  std::vector<float> a(64 * 64), b(128 * 64);
  auto draw = [&](bf16& global, float& plain) {
    global = __float2bfloat16(int(random() % 17) - 8);
    plain = __bfloat162float(global);
  };
  for (int m = 0; m < 64; ++m)
    for (int k = 0; k < 64; ++k) draw(a_global[form.a_mn ? k * 64 + m : m * 64 + k], a[m * 64 + k]);
  for (int n = 0; n < 128; ++n)
    for (int k = 0; k < 64; ++k) draw(b_global[form.b_mn ? k * 128 + n : n * 64 + k], b[n * 64 + k]);
  std::fill(d_float, d_float + 64 * 128, -1.f);
  const CUtensorMap map_a = make_map(a_global, 64, 64, 64, 64),
                    map_d = make_map(d_global, 128, 64, 64, 64, 3);
  const CUtensorMap map_b =
      form.b_mn ? make_map(b_global, 128, 64, 64, 64) : make_map(b_global, 64, 128, 64, 128);
  launch(wgmma_kernel, 1, 128, 48 * 1024, nullptr, map_a, map_b, map_d, form);
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < 128; ++n) {
      float sum = 1;
      for (int k = 0; k < 64; ++k) sum += a[m * 64 + k] * b[n * 64 + k];
      CHECK(d_float[m * 128 + n] == sum, "d[%d,%d] = %g, expected %g", m, n, d_float[m * 128 + n], sum);
      const float stored = __bfloat162float(d_global[m * 128 + n]),
                  rounded = __bfloat162float(__float2bfloat16(sum));
      CHECK(stored == rounded, "stored d[%d,%d] = %g, expected %g", m, n, stored, rounded);
    }
}
void test_wgmma() {
  for (Form form : {Form{}, Form{true}, Form{false, true}, Form{true, true}}) run_wgmma(form);
  check_stops("without fence.proxy.async", [] { run_wgmma({false, false, true}); });
  check_stops("no fence.mbarrier_init", [] { run_wgmma({false, false, false, true}); });
}

}  // namespace

int main() {
  end_after_cpu_seconds(120);
  test_barrier();
  test_context();
  test_fast_math();
  test_diagnostics();
  for_every_schedule(3, [] {
    test_warp();
    test_cp_async();
    test_mma();
    test_wgmma();
    test_proxies();
  });
  return finish();
}
