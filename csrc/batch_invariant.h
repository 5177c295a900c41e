// Whether the result of a row may depend on which other rows are there. Off (it may) by default: products
// with few rows then skip the packing of weights, and sum in another order than products with many.
#pragma once

#include <atomic>

namespace fmoe_ext {

namespace detail {
extern std::atomic<bool> batch_invariant;
}

inline bool is_batch_invariant() { return detail::batch_invariant.load(std::memory_order_relaxed); }

}  // namespace fmoe_ext
