// The k largest of a row of numbers, for topk_gate.cpp: largest first, lower index first among equals, NaN
// above everything. Numbers are compared as integer keys of the same order, which makes every comparison
// total.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace fmoe_ext {

// Below the key of every number: never selected while anything else is left.
template <class Key>
constexpr Key kRemovedKey = std::numeric_limits<Key>::min();

template <class Float, class Key = std::conditional_t<sizeof(Float) == 4, int32_t, int64_t>>
inline Key order_key(Float x) {
  const Key bits = std::bit_cast<Key>(x + Float{0});  // turns -0 into +0, its equal
  const Key key = bits ^ ((bits >> (8 * sizeof(Key) - 1)) & std::numeric_limits<Key>::max());
  return x == x ? key : std::numeric_limits<Key>::max();
}

// Insertion into a short list: few of n numbers ever enter it.
struct PortableSelect {
  static constexpr int64_t kKeysAtATime = 1;

  template <class Key>
  static void select(Key* keys, int64_t num_keys, int64_t k, int64_t* idx) {
    int64_t num = 0;
    for (int64_t i = 0; i < num_keys; ++i) {
      if (num == k && keys[i] <= keys[idx[k - 1]]) continue;
      int64_t place = num < k ? num++ : k - 1;
      for (; place > 0 && keys[idx[place - 1]] < keys[i]; --place) idx[place] = idx[place - 1];
      idx[place] = i;
    }
  }
};

#if FMOE_X86
// Keeps the maximum of every 16 keys; each round takes the largest and renews one maximum.
struct Avx512Select {
  static constexpr int64_t kKeysAtATime = 16;
  static constexpr int64_t kMaxKeys = 16 * 256;

  // num_keys is a multiple of 16, at most kMaxKeys. Overwrites the keys it selects.
  FMOE_AVX512 static void select(int32_t* keys, int64_t num_keys, int64_t k, int64_t* idx) {
    if (num_keys <= 256)
      select_rounds<1>(keys, num_keys, k, idx);
    else
      select_rounds<16>(keys, num_keys, k, idx);
  }

 private:
  template <int kVectors>
  FMOE_AVX512 static void select_rounds(int32_t* keys, int64_t num_keys, int64_t k, int64_t* idx) {
    const __m512i removed = _mm512_set1_epi32(kRemovedKey<int32_t>);
    const int vectors = kVectors == 1 ? 1 : static_cast<int>((num_keys + 255) / 256);
    __m512i maxima[kVectors];
    for (int v = 0; v < vectors; ++v) maxima[v] = removed;
    for (int64_t block = 0; block < num_keys / 16; ++block) {
      const int32_t largest = _mm512_reduce_max_epi32(_mm512_loadu_si512(keys + 16 * block));
      __m512i& group = maxima[kVectors == 1 ? 0 : block / 16];
      group = _mm512_mask_set1_epi32(group, static_cast<__mmask16>(1u << (block % 16)), largest);
    }
    for (int64_t i = 0; i < k; ++i) {
      __m512i largest = maxima[0];
      for (int v = 1; v < vectors; ++v) largest = _mm512_max_epi32(largest, maxima[v]);
      largest = _mm512_set1_epi32(_mm512_reduce_max_epi32(largest));
      int v = 0;
      __mmask16 equal = _mm512_cmpeq_epi32_mask(maxima[0], largest);
      while (kVectors > 1 && equal == 0) equal = _mm512_cmpeq_epi32_mask(maxima[++v], largest);
      const int place = std::countr_zero(static_cast<uint32_t>(equal));
      const int64_t block = 16 * v + place;
      __m512i block_keys = _mm512_loadu_si512(keys + 16 * block);
      const int lane = std::countr_zero(static_cast<uint32_t>(_mm512_cmpeq_epi32_mask(block_keys, largest)));
      idx[i] = 16 * block + lane;
      block_keys = _mm512_mask_mov_epi32(block_keys, static_cast<__mmask16>(1u << lane), removed);
      _mm512_storeu_si512(keys + 16 * block, block_keys);
      maxima[v] = _mm512_mask_set1_epi32(maxima[v], static_cast<__mmask16>(1u << place),
                                         _mm512_reduce_max_epi32(block_keys));
    }
  }
};
#endif

}  // namespace fmoe_ext
