// The eight tile registers of AMX, Intel's matrix unit: the instructions, or with FMOE_EMULATE_AMX the same
// on a processor without them. A thread configures the registers before it uses them and releases them after,
// as TileRun does (amx.h); cpu_features.cpp asks Linux for them.
#pragma once

#include <cstdint>
#ifdef FMOE_EMULATE_AMX
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

#include "isa_begin.h"  // opens fmoe_ext::gemm

// What ldtilecfg reads, 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#ifdef FMOE_EMULATE_AMX

// As in Intel's manual, for all eight tiles in use at once; a wrong use ends the program. Not asked for: that
// the three tiles of a product differ, and that their rows are a multiple of 4 bytes.
struct TileRegisters {
  TileConfig config;
  bool are_configured = false;
  uint8_t data[8][16][64] = {};

  void require(bool holds, const char* rule) const {
    if (holds) return;
    std::fprintf(stderr, "emulated AMX: %s\n", rule);
    std::abort();
  }
  void require_configured() const { require(are_configured, "a tile is used that is not configured"); }
};

inline TileRegisters& tile_registers() {
  static thread_local TileRegisters registers;
  return registers;
}

inline void configure_tiles(const TileConfig& config) {
  TileRegisters& registers = tile_registers();
  registers.require(config.palette == 1 && config.start_row == 0, "another palette or first row");
  for (uint8_t byte : config.reserved) registers.require(byte == 0, "a reserved byte is set");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = config.rows[tile], bytes = config.row_bytes[tile];
    registers.require(tile < 8 ? rows > 0 && rows <= 16 : rows == 0, "a tile has from 1 to 16 rows");
    registers.require(tile < 8 ? bytes > 0 && bytes <= 64 : bytes == 0, "a row has from 1 to 64 bytes");
  }
  registers.config = config;
  registers.are_configured = true;
  std::memset(registers.data, 0, sizeof registers.data);
}

inline void release_tiles() { tile_registers() = {}; }

template <int tile>
inline void zero_tile() {
  tile_registers().require_configured();
  std::memset(tile_registers().data[tile], 0, sizeof tile_registers().data[tile]);
}

template <int tile>
inline void load_tile(const void* from, int64_t stride) {
  TileRegisters& registers = tile_registers();
  registers.require_configured();
  std::memset(registers.data[tile], 0, sizeof registers.data[tile]);
  for (int row = 0; row < registers.config.rows[tile]; ++row)
    std::memcpy(registers.data[tile][row], static_cast<const char*>(from) + row * stride,
                registers.config.row_bytes[tile]);
}

// store_tile() is another: of results, to rows of a matrix (epilogue.h).
template <int tile>
inline void store_tile_register(void* to, int64_t stride) {
  const TileRegisters& registers = tile_registers();
  registers.require_configured();
  for (int row = 0; row < registers.config.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, registers.data[tile][row],
                registers.config.row_bytes[tile]);
}

inline float without_denormals(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.f, x) : x; }
inline float widen_tile_value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return without_denormals(x);
}

// tdpbf16ps: sums of the even and of the odd k apart, each a chain of fused products.
template <int sum, int left, int right>
inline void add_tile_product() {
  TileRegisters& registers = tile_registers();
  const TileConfig& config = registers.config;
  registers.require_configured();
  registers.require(config.rows[sum] == config.rows[left], "tiles of other numbers of rows are multiplied");
  registers.require(config.row_bytes[sum] == config.row_bytes[right], "tiles of other widths are multiplied");
  registers.require(config.row_bytes[left] / 4 == config.rows[right], "tiles of other depths are multiplied");
  for (int m = 0; m < config.rows[left]; ++m) {
    float parts[2][16] = {}, sums[16];
    uint16_t a[32], b[32];
    std::memcpy(a, registers.data[left][m], sizeof a);
    for (int k = 0; k < config.row_bytes[left] / 4; ++k) {
      std::memcpy(b, registers.data[right][k], sizeof b);
      for (int odd = 0; odd < 2; ++odd)
        for (int n = 0; n < config.row_bytes[right] / 4; ++n)
          parts[odd][n] = without_denormals(
              std::fma(widen_tile_value(a[2 * k + odd]), widen_tile_value(b[2 * n + odd]), parts[odd][n]));
    }
    std::memcpy(sums, registers.data[sum][m], sizeof sums);
    for (int n = 0; n < config.row_bytes[sum] / 4; ++n)
      sums[n] = without_denormals(without_denormals(sums[n]) + without_denormals(parts[0][n] + parts[1][n]));
    std::memcpy(registers.data[sum][m], sums, sizeof sums);
  }
}

#else

// In assembly: gcc's intrinsics do not tell the compiler that they read memory.
inline void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease" : : : "memory"); }
template <int tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void store_tile_register(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int sum, int left, int right>
inline void add_tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(left), "i"(right));
}

#endif

#include "isa_end.h"
