// multiply_in_order and exponentials of the table (kernels.h), for batch_invariant.cpp. Sums over k are one
// chain, from the first position to the last: zeros before or after the other terms change no bit. So the
// results for a sequence have the same bits with padding before it, in a longer cache, and in parts. Both are
// null for pairs of bfloat16.
#pragma once

#include "curves.h"
#include "multiply.h"

#include "isa_begin.h"

template <class T>
void multiply_in_order(int64_t m, int64_t k, const OperandOf<T>* a, int64_t stride, const OperandOf<T>* panel,
                       AccOf<T>* tile) {
  constexpr int64_t kWhole = int64_t{1} << 62;  // columns of one part: more than any k
  multiply<typename UnitOf<T>::type, false, kWhole>(m, k, a, stride, panel, tile);
}

// out [n] = exp(x - *largest) for x up to *largest; in float 0 for x < *largest - 86.4.
template <class T>
void exponentials(const AccOf<T>* x, int64_t n, const AccOf<T>* largest, AccOf<T>* out) {
  if constexpr (sizeof(AccOf<T>) == 8) {
    for (int64_t i = 0; i < n; ++i) out[i] = std::exp(x[i] - *largest);
  } else {
    for (int64_t i = 0; i < n; i += W)
      store_n(out + i, exp_negative(load_n(x + i, n - i) - broadcast(*largest)), n - i);
  }
}

#include "isa_end.h"
