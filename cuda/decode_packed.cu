// A packed weight decoded in memory, in one pass, for frozen_gemm and frozen_mlp on CUDA: the operator
// _decode_packed, whose result frozen/kept.py may keep for the backward.
//
// A format says where the codes of a row lie, what a code stands for, and where the scale of its block lies:
// in the row's bytes (GGUF), in a tensor beside it, or once for 128 x 128 numbers. Every number is computed
// in float as csrc/gemm/decode.h does it, operation by operation, and rounded once: the bits are the CPU's.
//
// The pass is bound by memory: of most formats 4 bits are read and 16 written for a number. So a warp takes a
// row, a thread 8 columns, which it stores by one access of 16 bytes (float32: two); 8 columns never straddle
// a block, whose scale is looked up once. Columns and places in a row are 32-bit numbers, and the group of a
// column is found by a multiplication (Divisor): 64-bit divisions were most of the instructions.
#include "grouped_rows.cuh"
#include "gemm/packed.h"

namespace fmoe_ext {
namespace {

using gemm::PackedFormat;
using gemm::PackedMatrix;
using gemm::ScaleType;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 8;

struct Table {
  float v[16];
  constexpr __host__ __device__ Table(const float (&from)[16]) : v() {
    for (int i = 0; i < 16; ++i) v[i] = from[i];
  }
};
__device__ constexpr Table kE2M1(gemm::kE2M1), kIq4(gemm::kIq4), kQuantiles(gemm::kQuantiles);

__device__ __forceinline__ float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

__device__ __forceinline__ float half_of(uint32_t bits) {
  const uint16_t low = static_cast<uint16_t>(bits);
  __half h;
  memcpy(&h, &low, sizeof h);
  return __half2float(h);
}
__device__ __forceinline__ float half_at(const uint8_t* p) { return half_of(p[0] | p[1] << 8); }

// 2^(e - 127): 2^-127 is subnormal, and 255 is NaN.
__device__ __forceinline__ float e8m0(uint32_t e) {
  return float_of(e == 0 ? 0x400000u : e == 255 ? 0x7fc00000u : e << 23);
}

// A number of E4M3 as a half, divided by 256: the bits of its exponent go where a half has its own, whose
// bias is greater by 8.
__device__ __forceinline__ float small_e4m3(uint32_t e) {
  const uint32_t magnitude = (e & 0x7f) << 7;
  return half_of(magnitude | (e & 0x80) << 8 | (magnitude == 0x3f80 ? 0x7c00 : 0));
}

// Four bytes, wherever they begin.
__device__ __forceinline__ uint32_t four_bytes(const uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 4 == 0) return *reinterpret_cast<const uint32_t*>(p);
  return p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
}

// A weight, and what the pass divides columns and rows by.
struct Source {
  explicit Source(const PackedMatrix& matrix)
      : m(matrix),
        rows(static_cast<int>(m.rows)),
        columns(static_cast<int>(m.columns)),
        groups(static_cast<int>(m.group ? m.columns / m.group : 0)),
        part_rows(static_cast<int>(m.part_rows)),
        group(static_cast<int>(m.group)),
        part(part_rows) {}
  PackedMatrix m;
  // Of an expert. fp8_block: a matrix of several parts (gate and up) has squares of its own in each, of
  // part_rows rows.
  int rows, columns, groups, part_rows;
  Divisor group, part;
};

// One row of a packed weight.
struct Row {
  const uint8_t* data;   // its codes, and in GGUF's formats its scales
  const char* scale;     // its scales; null if they lie in data
  const int32_t* zero;   // int4: words of zero points, one a group, of 8 rows each; or null
  int zero_shift;        // where this row's four bits are in such a word
  const float* factors;  // nvfp4: the row's two numbers, a factor and a divisor of its scales
};

template <PackedFormat format>
__device__ __forceinline__ Row row_of(const Source& s, int64_t expert, int row) {
  const PackedMatrix& m = s.m;
  const int half = s.rows / 2;
  const int at = !m.interleaved ? row : row < half ? 2 * row : 2 * (row - half) + 1;
  const int64_t line = expert * s.rows + at;
  int64_t scale_row = line;
  if constexpr (format == PackedFormat::fp8_block) {
    constexpr int kSquare = gemm::kScaledSquare;
    const int part = s.part.divide(at);
    scale_row = expert * m.scale_rows + part * ((s.part_rows + kSquare - 1) / kSquare) +
                (at - part * s.part_rows) / kSquare;
  }
  return {m.data + line * m.row_bytes, m.scale ? m.scale + scale_row * m.scale_row_bytes : nullptr,
          m.zero ? m.zero + (expert * ((s.rows + 7) / 8) + at / 8) * s.groups : nullptr, at % 8 * 4,
          m.factors ? m.factors + 2 * line : nullptr};
}

__device__ __forceinline__ float scale_at(ScaleType type, const Row& row, int i) {
  const auto* p = reinterpret_cast<const uint8_t*>(row.scale);
  if (type == ScaleType::float32) return reinterpret_cast<const float*>(p)[i];
  if (type == ScaleType::float16) return half_at(p + 2 * i);
  return float_of(static_cast<uint32_t>(p[2 * i]) << 16 | static_cast<uint32_t>(p[2 * i + 1]) << 24);
}

// The scale and the minimum of group s of a block of Q4_K or Q5_K.
__device__ __forceinline__ float2 step_of_k(const uint8_t* block, int s) {
  const uint8_t* q = block + 4;
  const int scale = s < 4 ? q[s] & 63 : (q[s + 4] & 15) | q[s - 4] >> 6 << 4;
  const int minimum = s < 4 ? q[s + 4] & 63 : q[s + 4] >> 4 | q[s] >> 6 << 4;
  return {static_cast<float>(scale) * half_at(block), static_cast<float>(minimum) * -half_at(block + 2)};
}

// Columns [c, c + 8) of a row. Bytes past its end are not read; what belongs there has no meaning.
template <PackedFormat format>
__device__ __forceinline__ void decode_eight(const Source& source, const Row& row, int c,
                                             float (&out)[kColumns]) {
  const int group = c / 32, block = c / 256, in_group = c % 32, s = c % 256 / 32;
  if constexpr (format == PackedFormat::mxfp4 || format == PackedFormat::nvfp4 ||
                format == PackedFormat::int4 || format == PackedFormat::nf4) {
    const uint32_t codes = four_bytes(row.data + c / 2);
    float scale = 0;
    int zero = 8;
    if constexpr (format == PackedFormat::mxfp4) scale = e8m0(static_cast<uint8_t>(row.scale[group]));
    if constexpr (format == PackedFormat::nvfp4)
      scale = 256.f * small_e4m3(static_cast<uint8_t>(row.scale[c / 16])) * row.factors[0] / row.factors[1];
    if constexpr (format == PackedFormat::int4 || format == PackedFormat::nf4) {
      const int own = source.group.divide(c);
      scale = scale_at(source.m.scale_type, row, own);
      if (format == PackedFormat::int4 && row.zero)
        zero = static_cast<uint32_t>(row.zero[own]) >> row.zero_shift & 15;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int code = codes >> 4 * (format == PackedFormat::nf4 ? i ^ 1 : i) & 15;
      if constexpr (format == PackedFormat::mxfp4)
        out[i] = 2 * kE2M1.v[code] * (0.5f * scale);  // the value * scale, by the steps of decode.h
      else if constexpr (format == PackedFormat::nvfp4)
        out[i] = kE2M1.v[code] * scale;
      else if constexpr (format == PackedFormat::int4)
        out[i] = static_cast<float>(code - zero) * scale;
      else
        out[i] = kQuantiles.v[code] * scale;
    }
  } else if constexpr (format == PackedFormat::fp8_block || format == PackedFormat::mxfp8) {
    constexpr bool is_mx = format == PackedFormat::mxfp8;
    const float scale = is_mx ? e8m0(static_cast<uint8_t>(row.scale[group]))
                              : scale_at(source.m.scale_type, row, c / int{gemm::kScaledSquare});
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float small = c + i < source.columns ? small_e4m3(row.data[c + i]) : 0.f;
      out[i] = small * 256.f * scale;  // the first is exact, and 256 * scale may be infinite
    }
  } else if constexpr (format == PackedFormat::q8_0) {
    const uint8_t* bytes = row.data + 34 * group;
    const float scale = half_at(bytes);
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      out[i] = static_cast<float>(static_cast<int8_t>(bytes[2 + in_group + i])) * scale;
  } else if constexpr (format == PackedFormat::q4_0 || format == PackedFormat::iq4_nl ||
                       format == PackedFormat::iq4_xs) {
    constexpr bool is_xs = format == PackedFormat::iq4_xs;
    const uint8_t* bytes = row.data + (is_xs ? 136 * block : 18 * group);
    float scale = half_at(bytes);
    if constexpr (is_xs) {
      const int low = bytes[4 + s / 2] >> 4 * (s % 2) & 15, high = (bytes[2] | bytes[3] << 8) >> 2 * s & 3;
      scale *= static_cast<float>((low | high << 4) - 32);
    }
    const uint8_t* codes = bytes + (is_xs ? 8 + 16 * s : 2) + in_group % 16;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int code = codes[i] >> (in_group < 16 ? 0 : 4) & 15;
      out[i] = (format == PackedFormat::q4_0 ? static_cast<float>(code - 8) : kIq4.v[code]) * scale;
    }
  } else if constexpr (format == PackedFormat::q4_k || format == PackedFormat::q5_k) {
    constexpr bool has_fifth = format == PackedFormat::q5_k;
    const uint8_t* bytes = row.data + (has_fifth ? 176 : 144) * block;
    const uint8_t* codes = bytes + (has_fifth ? 48 : 16) + 32 * (s / 2) + in_group;
    const float2 step = step_of_k(bytes, s);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      int code = codes[i] >> 4 * (s % 2) & 15;
      if constexpr (has_fifth) code |= (bytes[16 + in_group + i] >> s & 1) << 4;
      out[i] = static_cast<float>(code) * step.x + step.y;  // the product is exact
    }
  } else {
    static_assert(format == PackedFormat::q6_k);
    const uint8_t* bytes = row.data + 210 * block;
    const int half = s / 4, quarter = s % 4;
    const auto of_part = static_cast<int8_t>(bytes[192 + 2 * s + in_group / 16]);
    const float scale = half_at(bytes + 208) * static_cast<float>(of_part);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int low = bytes[64 * half + 32 * (quarter % 2) + in_group + i] >> 4 * (quarter / 2) & 15;
      const int high = bytes[128 + 32 * half + in_group + i] >> 2 * quarter & 3;
      out[i] = static_cast<float>((low | high << 4) - 32) * scale;
    }
  }
}

// Six blocks on a multiprocessor are 40 registers: left to itself, ptxas takes 32 for some formats, and
// spills.
template <PackedFormat format, typename T>
__global__ void __launch_bounds__(kThreads, 6)
    decode_packed_kernel(const __grid_constant__ Source source, T* __restrict__ out) {
  // The columns of other formats are a multiple of 32.
  const bool is_wide = format != PackedFormat::fp8_block || source.columns % kColumns == 0;
  for (int64_t expert = blockIdx.y; expert < source.m.num_experts; expert += gridDim.y)
    for (int r = blockIdx.x * kWarps + threadIdx.x / 32; r < source.rows; r += gridDim.x * kWarps) {
      const Row row = row_of<format>(source, expert, r);
      T* const out_row = out + (expert * source.rows + r) * source.columns;
      for (int c = threadIdx.x % 32 * kColumns; c < source.columns; c += 32 * kColumns) {
        float values[kColumns];
        decode_eight<format>(source, row, c, values);
        Vec<T, kColumns> rounded;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) rounded.v[i] = round_to<T>(values[i]);
        if (is_wide)
          *reinterpret_cast<Vec<T, kColumns>*>(out_row + c) = rounded;
        else
          for (int i = 0; i < kColumns && c + i < source.columns; ++i) out_row[c + i] = rounded.v[i];
      }
    }
}

// Starts the kernel of the matrix's format; formats are numbered from 1.
template <typename T, size_t... numbers>
void decode_packed(const PackedMatrix& m, T* out, LaunchStream stream, std::index_sequence<numbers...>) {
  const dim3 grid(grid_for(ceil_div(m.rows, kWarps)),
                  static_cast<unsigned>(std::min<int64_t>(m.num_experts, kMaxGrid - 1)));
  const auto start = [&](auto kernel) { launch(kernel, grid, kThreads, 0, stream, Source(m), out); };
  ((static_cast<size_t>(m.format) == numbers + 1
        ? start(decode_packed_kernel<static_cast<PackedFormat>(numbers + 1), T>)
        : void()),
   ...);
}

}  // namespace

void launch_decode_packed(Dtype dtype, const PackedMatrix& m, void* out, LaunchStream stream) {
  if (m.num_experts == 0 || m.rows == 0 || m.columns == 0) return;
  constexpr auto formats = std::make_index_sequence<gemm::kNumPackedFormats - 1>();
  if (dtype == Dtype::bf16) return decode_packed(m, static_cast<__nv_bfloat16*>(out), stream, formats);
  if (dtype == Dtype::f16) return decode_packed(m, static_cast<__half*>(out), stream, formats);
  decode_packed(m, static_cast<float*>(out), stream, formats);
}

}  // namespace fmoe_ext
