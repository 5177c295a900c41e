// Rows of random codes in a format of packed weights, with scales that keep values near 1.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "gemm/packed.h"

namespace fmoe_ext::gemm {

constexpr const char* kFormatNames[kNumPackedFormats] = {"none",   "mxfp4",  "fp8_block", "int4", "q8_0",
                                                         "q4_k",   "q6_k",   "nf4",       "q4_0", "q5_k",
                                                         "iq4_nl", "iq4_xs", "mxfp8",     "nvfp4"};

class RandomRow {
 public:
  RandomRow(PackedFormat format, int64_t columns, uint64_t seed) : state_(seed * 2 + 1) {
    const PackedLayout& layout = layout_of(format);
    const int64_t blocks = columns / layout.block_columns;
    data_.resize(blocks * layout.block_bytes);
    for (uint8_t& byte : data_) byte = next();
    if (format == PackedFormat::fp8_block || format == PackedFormat::mxfp8)
      for (uint8_t& byte : data_) byte = finite(byte);
    for (const int64_t place : halves_of(format))
      for (int64_t b = 0; b < blocks; ++b) {
        const uint16_t half = 0x2c00 | next();
        std::memcpy(data_.data() + b * layout.block_bytes + place, &half, 2);
      }
    row_ = {format, layout.scale_types[0], data_.data(), columns, nullptr, 32, nullptr, 0, nullptr};
    const auto count = [&](int64_t group) { return (columns + group - 1) / group; };
    if (layout.scaled == Scaled::square) row_.group = kScaledSquare;
    if (layout.scaled == Scaled::block) row_.group = layout.block_columns / layout.scales_of_block;
    if (row_.scale_type == ScaleType::float32) {
      for (int64_t i = 0; i < count(row_.group); ++i) scales_.push_back(0.5f + next() / 256.f);
      row_.scale = reinterpret_cast<const char*>(scales_.data());
    } else if (layout.scaled != Scaled::inside) {
      for (int64_t i = 0; i < count(row_.group); ++i)
        small_scales_.push_back(row_.scale_type == ScaleType::e8m0 ? 124 + next() % 4 : finite(next()));
      row_.scale = reinterpret_cast<const char*>(small_scales_.data());
    }
    if (layout.third == Third::factors) row_.factors = factors_;
  }
  RandomRow(const RandomRow&) = delete;
  const PackedRow& row() const { return row_; }

 private:
  static uint8_t finite(uint8_t e4m3) { return (e4m3 & 0x7f) == 0x7f ? e4m3 & 0xfe : e4m3; }
  // Where a block has numbers in float16.
  static std::vector<int64_t> halves_of(PackedFormat format) {
    if (layout_of(format).scaled != Scaled::inside) return {};
    if (format == PackedFormat::q6_k) return {208};
    if (format == PackedFormat::q4_k || format == PackedFormat::q5_k) return {0, 2};
    return {0};
  }
  uint8_t next() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return state_ >> 56;
  }

  uint64_t state_;
  std::vector<uint8_t> data_, small_scales_;
  std::vector<float> scales_;
  float factors_[2] = {0.03f, 7.f};
  PackedRow row_;
};

}  // namespace fmoe_ext::gemm
