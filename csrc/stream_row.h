// RowWriter writes rows of large outputs past the caches, which saves reading each cache line before it is
// overwritten; for permute.cpp, the backward of topk_gate.cpp and kept_rows.h. Outside x86-64 it copies.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace fmoe_ext {

class RowWriter {
 public:
  // Streams when the whole output is too large to be found in the caches by whoever reads it next.
  RowWriter(void* data, int64_t num_rows, int64_t row_bytes)
      : data_(static_cast<char*>(data)),
        row_bytes_(row_bytes),
        stream_(num_rows * row_bytes >= kStreamBytes && row_bytes % 16 == 0 &&
                reinterpret_cast<uintptr_t>(data) % 16 == 0) {}

  void copy(int64_t row, const void* source) const {
    char* to = data_ + row * row_bytes_;
#if FMOE_X86
    if (stream_) {
      const char* from = static_cast<const char*>(source);
      int64_t i = 0;
      for (; i + 64 <= row_bytes_; i += 64) {
        const __m128i a = load(from + i), b = load(from + i + 16), c = load(from + i + 32),
                      d = load(from + i + 48);
        store(to + i, a);
        store(to + i + 16, b);
        store(to + i + 32, c);
        store(to + i + 48, d);
      }
      for (; i < row_bytes_; i += 16) store(to + i, load(from + i));
      return;
    }
#endif
    if (row_bytes_ > 0) std::memcpy(to, source, row_bytes_);  // empty tensors have null pointers
  }

  void zero(int64_t row) const {
    if (row_bytes_ > 0) std::memset(data_ + row * row_bytes_, 0, row_bytes_);
  }

  // Each thread calls it after its last row: streamed stores are weakly ordered.
  void finish() const {
#if FMOE_X86
    if (stream_) _mm_sfence();
#endif
  }

 private:
  static constexpr int64_t kStreamBytes = int64_t{4} << 20;

#if FMOE_X86
  static __m128i load(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static void store(char* p, __m128i v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), v); }
#endif

  char* data_;
  int64_t row_bytes_;
  bool stream_;
};

}  // namespace fmoe_ext
