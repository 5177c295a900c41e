// The jobs of a product x W^T that starts from the rows of x and ends in the rows of y.
#pragma once

#include <optional>
#include <vector>

#include "frozen_weight.h"
#include "gemm/grouped.h"

namespace fmoe_ext::gemm {

// Rows [begin, end) of t [R, columns] into a block of operand rows.
inline void copy_chunk(const Kernels& kernels, const Stored* t, int64_t columns, const Chunk& chunk,
                       const RowMajor& block) {
  for_each_row_slice(chunk.begin, chunk.end, [&](int64_t begin, int64_t end) {
    std::vector<const Stored*> rows;
    for (int64_t r = begin; r < end; ++r) rows.push_back(kernels.at(t, r * columns));
    kernels.copy_rows(rows.data(), end - begin, columns, block.at(begin - chunk.begin), block.stride);
  });
}

// Panels of one segment: a, its rows [.., D], times weight[e]^T into y [R, N]. weight: a contiguous Tensor
// [E, N, D], or a FrozenWeight that is packed.
template <class Weight>
void multiply_job(const Kernels& kernels, const Job& job, const RowMajor& a, const Weight& weight,
                  const std::optional<Tensor>& bias, const Tensor& y) {
  const Segment& segment = *job.segment;
  const int64_t N = weight.size(1), D = weight.size(2);
  Stored* const out = mutable_stored(y);
  const auto store = [&](int64_t p, const Acc* tile, int64_t row, int64_t m) {
    const int64_t column = p * kernels.nr;
    const Stored* b = bias ? kernels.at(stored(*bias), segment.expert * N + column) : nullptr;
    kernels.store(tile, m, std::min(kernels.nr, N - column), b, nullptr,
                  kernels.at(out, (segment.begin + row) * N + column), N);
  };
  if constexpr (std::is_same_v<Weight, FrozenWeight>) {
    rows_by_packed(
        kernels, job, a, D, weight.integers(),
        [&](int64_t p, PackedRow* rows) {
          packed_columns(weight, segment.expert, 0, N, p * kernels.nr, kernels.nr, rows);
        },
        store);
  } else {
    const Stored* w = kernels.at(stored(weight), segment.expert * N * D);
    rows_by_weight(
        kernels, job, a, D,
        [&](int64_t p, const Stored** pointers) {
          weight_columns(kernels, w, N, D, p * kernels.nr, pointers);
        },
        store);
  }
}

}  // namespace fmoe_ext::gemm
