// TMA stores and sums: what they write, and the rules that the emulator holds kernels to.
#include "../../cuda/common.cuh"
#include "check.h"

using namespace fmoe_ext;

namespace {

constexpr int kExperts = 2, kRows = 20, kColumns = 40;  // of out; a box has 16 rows of 32 columns
float out[kExperts][kRows][kColumns];

enum class Slip { none, no_fence, no_wait, waits_for_the_older, not_committed, no_wait_at_the_end };

CUtensorMap make_map(CUtensorMapDataType type) {
  emu::ensure_context();
  CUtensorMap map;
  const bool is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const cuuint64_t bytes = is_float ? 4 : 2, dims[] = {kColumns, kRows, kExperts},
                   strides[] = {kColumns * bytes, kRows * kColumns * bytes};
  const cuuint32_t box[] = {is_float ? 32u : 64u, 16, 1}, ones[] = {1, 1, 1};
  CHECK(emu::encode_tiled(&map, type, 3, out, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
        "encode");
  return map;
}

// Columns 32 .. 63 of rows 16 .. 31 of an expert: value + 0 .. 31; rows 20 on and columns 40 on are not
// there. With a slip the box is staged twice.
void store_kernel(const CUtensorMap map, int expert, float value, bool add, Slip slip) {
  FMOE_DYNAMIC_SHARED(raw);
  char* base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  const uint32_t tile = ptx::shared_address(base);
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  for (int round = 0; round < (slip == Slip::none ? 1 : 2); ++round) {
    if (threadIdx.x == 0 && round) {
      if (slip == Slip::waits_for_the_older)
        ptx::bulk_wait_read<1>();
      else if (slip != Slip::no_wait)
        ptx::bulk_wait_read<0>();
    }
    __syncwarp();
    for (int piece = 0; piece < 8; ++piece) {  // the halves of 16 bytes by two lanes
      const float v = value + 4 * piece + 2 * half;
      ptx::st_shared8(tile + row * 128 + ((piece ^ (row & 7)) << 4) + 8 * half, {v, v + 1});
    }
    if (slip != Slip::no_fence) ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x) continue;
    add ? ptx::tma_add(&map, tile, 32, 16, expert) : ptx::tma_store(&map, tile, 32, 16, expert);
    if (slip != Slip::not_committed) ptx::bulk_commit();
  }
  if (threadIdx.x == 0 && slip != Slip::no_wait_at_the_end) ptx::bulk_wait_read<0>();
}

void run(bool add, float value, Slip slip = Slip::none,
         CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32) {
  launch(store_kernel, 1, 32, 8192, nullptr, make_map(type), 0, value, add, slip);
}

void check_sums(bool add) {
  for (auto& expert : out)
    for (auto& row : expert) std::fill(std::begin(row), std::end(row), 3.f);
  run(add, 100);
  for (int e = 0; e < kExperts; ++e)
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) {
        const bool inside = e == 0 && r >= 16 && c >= 32;
        const float expected = inside ? 100.f + (c - 32) + (add ? 3 : 0) : 3;
        CHECK(out[e][r][c] == expected, "out[%d,%d,%d] = %g, expected %g", e, r, c, out[e][r][c], expected);
      }
}

// As red.add.f32 in global memory; a store keeps every bit.
void check_subnormal_numbers() {
  out[0][16][32] = 0x1p-127f;
  run(true, 0x1p-127f);
  CHECK(out[0][16][32] == 0, "a sum below 2^-126 is %g", out[0][16][32]);
  run(false, 0x1p-127f);
  CHECK(out[0][16][32] == 0x1p-127f, "2^-127 is stored as %g", out[0][16][32]);
}

void check_slips() {
  emu::config.landing = emu::Landing::lazy;
  check_stops("without fence.proxy.async", [] { run(true, 1, Slip::no_fence); });
  check_stops("while a TMA store reads it", [] { run(true, 1, Slip::no_wait); });
  check_stops("while a TMA store reads it", [] { run(false, 1, Slip::waits_for_the_older); });
  check_stops("before its TMA stores were read", [] { run(true, 1, Slip::no_wait_at_the_end); });
  check_stops("while a TMA store reads it", [] { run(true, 1, Slip::not_committed); });
  check_stops("adds to float32", [] { run(true, 1, Slip::none, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16); });
}

}  // namespace

int main() {
  end_after_cpu_seconds(60);
  for_every_schedule(3, [] {
    check_sums(false);
    check_sums(true);
    check_subnormal_numbers();
  });
  check_slips();
  return finish();
}
