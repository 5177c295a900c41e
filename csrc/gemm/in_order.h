// multiply_in_order and exponentials of the table, for batch_invariant.cpp. Sums over k are one chain, from
// the first position to the last: zeros in front of the others, or behind them, change no bit. So a sequence
// has the same bits behind padding, in a longer cache, and in parts.
#pragma once

#include "curves.h"
#include "multiply.h"

#include "isa_begin.h"

template <class T>
void multiply_in_order(int64_t m, int64_t k, const OperandOf<T>* a, int64_t stride, const OperandOf<T>* panel,
                       AccOf<T>* tile) {
  constexpr int64_t kWhole = int64_t{1} << 62;
  multiply<typename UnitOf<T>::type, false, kWhole>(m, k, a, stride, panel, tile);
}

// out [n] = exp(x - *largest) for x up to *largest, 0 for minus infinity.
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
