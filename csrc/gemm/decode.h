// decode() of the table (kernels.h): columns of a packed row -> numbers, 32 at a time, by a Decoder of each
// format of packed.h; for one instruction set. All sets decode to the same bits: in float, by the products
// and sums that a format defines, in their order, then rounded to the dtype.
#pragma once

#include "decode_vectors.h"

#include "isa_begin.h"

// open(b), then group(s): the columns [32 s, 32 s + 32) of block b, which has 32 kGroups.
template <PackedFormat format>
struct Decoder;

// 16 bytes of codes of E2M1: twice the values of the first 16 columns, and of the others.
inline void twice_e2m1(B16 bytes, B16& first, B16& second) {
  const B16 table = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
  B16 low, high;
  alternate(bytes, low, high);
  first = look_up(table, low);
  second = look_up(table, high);
}

template <>
struct Decoder<PackedFormat::mxfp4> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float half_scale = 0;
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    half_scale = 0.5f * e8m0(row.scale[b]);
    bytes = load_bytes<B16>(row.data + 16 * b);
  }
  Decoded group(int) const {
    B16 first, second;
    twice_e2m1(bytes, first, second);
    return scaled(first, second, half_scale);
  }
};

template <>
struct Decoder<PackedFormat::nvfp4> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scales[2] = {};  // of 16 columns each
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    for (int half = 0; half < 2; ++half)
      scales[half] = e4m3(row.scale[2 * b + half]) * row.factors[0] / row.factors[1];
    bytes = load_bytes<B16>(row.data + 16 * b);
  }
  Decoded group(int) const {
    B16 twice[2];
    twice_e2m1(bytes, twice[0], twice[1]);
    Decoded d;
    for (int half = 0; half < 2; ++half) {
      VF* part = d.part + half * (kParts / 2);
      widen_signed(twice[half], part);
      // the first is exact, and half of a scale need not be
      for (int i = 0; i < kParts / 2; ++i) part[i] = part[i] * 0.5f * scales[half];
    }
    return d;
  }
};

// 32 numbers of E4M3, divided by 256.
inline Decoded small_e4m3(const B16 (&bytes)[2]) {
  Decoded d;
  for (int half = 0; half < 2; ++half) {
    H16 bits;
    halves_of_e4m3(bytes[half], bits);
    for (int i = 0; i < kParts / 2; ++i)
      d.part[half * (kParts / 2) + i] = widen_half(load_bytes<VH>((const char*)&bits + i * sizeof(VH)));
  }
  return d;
}

template <>
struct Decoder<PackedFormat::fp8_block> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes[2] = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = scale_at(row, b / (128 / kGroup));
    const int64_t left = row.columns - b * kGroup;
    if (left >= kGroup) {
      __builtin_memcpy(bytes, row.data + b * kGroup, kGroup);
    } else {
      __builtin_memset(bytes, 0, kGroup);
      __builtin_memcpy(bytes, row.data + b * kGroup, left);
    }
  }
  Decoded group(int) const {
    Decoded d = small_e4m3(bytes);
#pragma GCC unroll 8
    for (VF& v : d.part) v = v * 256.f * scale;  // the first is exact, and 256 * scale may be infinite
    return d;
  }
};

template <>
struct Decoder<PackedFormat::mxfp8> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes[2] = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = e8m0(row.scale[b]);
    __builtin_memcpy(bytes, row.data + kGroup * b, kGroup);
  }
  Decoded group(int) const {
    Decoded d = small_e4m3(bytes);
#pragma GCC unroll 8
    for (VF& v : d.part) v = v * 256.f * scale;  // as fp8_block
    return d;
  }
};

template <>
struct Decoder<PackedFormat::int4> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  uint8_t zero = 0;
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    const int64_t group = b * kGroup / row.group;
    scale = scale_at(row, group);
    bytes = load_bytes<B16>(row.data + 16 * b);
    zero = row.zero ? uint32_t(row.zero[group]) >> row.zero_shift & 15 : 8;
  }
  Decoded group(int) const {
    B16 first, second;
    alternate(bytes, first, second);
    return scaled(first - zero, second - zero, scale);
  }
};

template <>
struct Decoder<PackedFormat::q8_0> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes[2] = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = half_at(row.data + 34 * b);
    __builtin_memcpy(bytes, row.data + 34 * b + 2, kGroup);
  }
  Decoded group(int) const { return scaled(bytes[0], bytes[1], scale); }
};

// A block of 32 columns: a scale in float16, and 16 bytes of codes.
struct HalfAndCodes {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = half_at(row.data + 18 * b);
    bytes = load_bytes<B16>(row.data + 18 * b + 2);
  }
};

template <>
struct Decoder<PackedFormat::q4_0> : HalfAndCodes {
  Decoded group(int) const { return scaled((bytes & 15) - 8, (bytes >> 4) - 8, scale); }
};

// The scales and the minima of the eight groups of a block of Q4_K or Q5_K.
struct StepsOfK {
  F8 scale = {}, minimum = {};

  __attribute__((always_inline)) void open(const uint8_t* block) {
    const float d = half_at(block), dmin = half_at(block + 2);
    uint32_t low, middle, high;  // four bytes each of the packed scales and minima
    __builtin_memcpy(&low, block + 4, 4);
    __builtin_memcpy(&middle, block + 8, 4);
    __builtin_memcpy(&high, block + 12, 4);
    const uint32_t scales[2] = {low & 0x3f3f3f3fu, (high & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u)};
    const uint32_t minima[2] = {middle & 0x3f3f3f3fu,
                                (high >> 4 & 0x0f0f0f0fu) | (middle >> 2 & 0x30303030u)};
    widen_eight(scales, scale);
    widen_eight(minima, minimum);
    scale *= d;
    minimum *= -dmin;
  }
  void apply(Decoded& codes, int s) const {
#pragma GCC unroll 8
    for (VF& v : codes.part) v = fma(v, broadcast(scale[s]), broadcast(minimum[s]));  // the product is exact
  }
};

template <>
struct Decoder<PackedFormat::q4_k> {
  static constexpr int kGroups = 8;
  const PackedRow& row;
  StepsOfK steps = {};
  const uint8_t* codes = nullptr;

  __attribute__((always_inline)) void open(int64_t b) {
    const uint8_t* block = row.data + 144 * b;
    steps.open(block);
    codes = block + 16;
  }
  Decoded group(int s) const {
    Decoded d;
    for (int half = 0; half < 2; ++half) {
      const B16 pairs = load_bytes<B16>(codes + 32 * (s / 2) + 16 * half);
#if FMOE_BYTES == 64
      const VI wide = (VI)_mm512_cvtepu8_epi32((__m128i)pairs);
      d.part[half] = look_up_floats(kCounting, s % 2 ? wide >> 4 : wide);
#else
      widen_signed(s % 2 ? pairs >> 4 : pairs & 15, d.part + half * (kParts / 2));
#endif
    }
    steps.apply(d, s);
    return d;
  }
};

template <>
struct Decoder<PackedFormat::q5_k> {
  static constexpr int kGroups = 8;
  const PackedRow& row;
  StepsOfK steps = {};
  const uint8_t* codes = nullptr;  // 32 bytes with a bit of each group, then the low four bits

  __attribute__((always_inline)) void open(int64_t b) {
    const uint8_t* block = row.data + 176 * b;
    steps.open(block);
    codes = block + 16;
  }
  Decoded group(int s) const {
    Decoded d;
    for (int half = 0; half < 2; ++half) {
      const B16 pairs = load_bytes<B16>(codes + 32 + 32 * (s / 2) + 16 * half);
      const B16 high = load_bytes<B16>(codes + 16 * half) >> s & 1;
      widen_signed((s % 2 ? pairs >> 4 : pairs & 15) | high << 4, d.part + half * (kParts / 2));
    }
    steps.apply(d, s);
    return d;
  }
};

template <>
struct Decoder<PackedFormat::q6_k> {
  static constexpr int kGroups = 8;
  const PackedRow& row;
  float d = 0;
  const uint8_t* block = nullptr;

  __attribute__((always_inline)) void open(int64_t b) {
    block = row.data + 210 * b;
    d = half_at(block + 208);
  }
  Decoded group(int s) const {
    const int half = s / 4, quarter = s % 4;
    Decoded out;
    for (int i = 0; i < 2; ++i) {
      const B16 pairs = load_bytes<B16>(block + 64 * half + 32 * (quarter % 2) + 16 * i);
      const B16 high = load_bytes<B16>(block + 128 + 32 * half + 16 * i) >> (2 * quarter) & 3;
      const B16 low = quarter / 2 ? pairs >> 4 : pairs & 15;
      VF* part = out.part + i * (kParts / 2);
      widen_signed((low | high << 4) - 32, part);
      const float scale = d * float(int8_t(block[192 + 2 * s + i]));
      for (int j = 0; j < kParts / 2; ++j) part[j] *= scale;
    }
    return out;
  }
};

template <>
struct Decoder<PackedFormat::nf4> {
  static constexpr int kGroups = 1;
  const PackedRow& row;
  float scale = 0;
  B16 bytes = {};

  __attribute__((always_inline)) void open(int64_t b) {
    scale = scale_at(row, b * kGroup / row.group);
    bytes = load_bytes<B16>(row.data + 16 * b);
  }
  Decoded group(int) const {
    const B16 low = bytes & 15, high = bytes >> 4;  // the high one is first
    VI index[kParts];
    widen_bytes(interleave_low(high, low), index);
    widen_bytes(interleave_high(high, low), index + kParts / 2);
    Decoded d;
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) d.part[i] = look_up_floats(kQuantiles, index[i]) * scale;
    return d;
  }
};

// 16 bytes of codes of IQ4: those of the first 16 columns in the low bits, of the others in the high ones.
inline Decoded iq4(B16 bytes, float scale) {
  const B16 table = {129, 152, 173, 191, 207, 221, 234, 246, 1, 13, 25, 38, 53, 69, 89, 113};  // kIq4
  return scaled(look_up(table, bytes & 15), look_up(table, bytes >> 4), scale);
}

template <>
struct Decoder<PackedFormat::iq4_nl> : HalfAndCodes {
  Decoded group(int) const { return iq4(bytes, scale); }
};

template <>
struct Decoder<PackedFormat::iq4_xs> {
  static constexpr int kGroups = 8;
  const PackedRow& row;
  float d = 0;
  uint16_t high = 0;  // two bits of the scale of each group
  const uint8_t* block = nullptr;

  __attribute__((always_inline)) void open(int64_t b) {
    block = row.data + 136 * b;
    d = half_at(block);
    __builtin_memcpy(&high, block + 2, 2);
  }
  float scale(int s) const {
    const int low = block[4 + s / 2] >> 4 * (s % 2) & 15;
    return d * float((low | (high >> 2 * s & 3) << 4) - 32);
  }
  B16 bytes(int s) const { return load_bytes<B16>(block + 8 + 16 * s); }
  Decoded group(int s) const { return iq4(bytes(s), scale(s)); }
};

template <class Body>
inline void with_format(PackedFormat format, const Body& body) {
  switch (format) {
    case PackedFormat::mxfp4:
      return body(std::integral_constant<PackedFormat, PackedFormat::mxfp4>{});
    case PackedFormat::fp8_block:
      return body(std::integral_constant<PackedFormat, PackedFormat::fp8_block>{});
    case PackedFormat::int4:
      return body(std::integral_constant<PackedFormat, PackedFormat::int4>{});
    case PackedFormat::q8_0:
      return body(std::integral_constant<PackedFormat, PackedFormat::q8_0>{});
    case PackedFormat::q4_k:
      return body(std::integral_constant<PackedFormat, PackedFormat::q4_k>{});
    case PackedFormat::q6_k:
      return body(std::integral_constant<PackedFormat, PackedFormat::q6_k>{});
    case PackedFormat::nf4:
      return body(std::integral_constant<PackedFormat, PackedFormat::nf4>{});
    case PackedFormat::q4_0:
      return body(std::integral_constant<PackedFormat, PackedFormat::q4_0>{});
    case PackedFormat::q5_k:
      return body(std::integral_constant<PackedFormat, PackedFormat::q5_k>{});
    case PackedFormat::iq4_nl:
      return body(std::integral_constant<PackedFormat, PackedFormat::iq4_nl>{});
    case PackedFormat::iq4_xs:
      return body(std::integral_constant<PackedFormat, PackedFormat::iq4_xs>{});
    case PackedFormat::mxfp8:
      return body(std::integral_constant<PackedFormat, PackedFormat::mxfp8>{});
    case PackedFormat::nvfp4:
      return body(std::integral_constant<PackedFormat, PackedFormat::nvfp4>{});
    case PackedFormat::none:
      return;
  }
}

template <class T>
inline void store_decoded(T* to, const Decoded& d) {
  if constexpr (sizeof(T) == 8) {
    float buffer[kGroup];
    __builtin_memcpy(buffer, &d, sizeof buffer);
    for (int i = 0; i < kGroup; ++i) to[i] = buffer[i];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) store(to + i * W, d.part[i]);
  }
}

// Columns [begin, begin + n) of a row.
template <class T>
void decode(const PackedRow& row, int64_t begin, int64_t n, T* to) {
  with_format(row.format, [&](auto format) {
    using D = Decoder<decltype(format)::value>;
    constexpr int64_t kBlock = D::kGroups * kGroup;
    D decoder{row};
    const int64_t end = begin + n;
    for (int64_t b = begin / kBlock; b * kBlock < end; ++b) {
      decoder.open(b);
#pragma GCC unroll 8
      for (int s = 0; s < D::kGroups; ++s) {
        const int64_t first = b * kBlock + s * kGroup;
        if (first >= begin && first + kGroup <= end) {
          store_decoded(to + first - begin, decoder.group(s));
        } else if (first + kGroup > begin && first < end) {
          T buffer[kGroup];
          store_decoded(buffer, decoder.group(s));
          const int64_t from = first < begin ? begin - first : 0;
          const int64_t until = first + kGroup > end ? end - first : kGroup;
          __builtin_memcpy(to + first + from - begin, buffer + from, (until - from) * sizeof(T));
        }
      }
    }
  });
}

#include "isa_end.h"
