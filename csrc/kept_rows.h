// Rows that the inputs' half of expert_mlp's backward keeps for the weights' half, dh and the weighted
// activated rows: [R, columns] in the type of storage.
#pragma once

#include "gemm/grouped.h"
#include "stream_row.h"

namespace fmoe_ext::gemm {

class KeptRows {
 public:
  // Memory for them, zero from row num_used on. Rows are as far apart as rows of operands, which they are
  // where operands are what is stored (fmoe_ext/ops/expert_mlp.py says the same of the shape).
  static Tensor make(const Tensor& like, int64_t num_rows, int64_t num_used, int64_t columns) {
    const int64_t stride = RowMajor::odd_lines(columns, like.element_size());
    Tensor memory = new_reused(like, {num_rows, stride});
    zero_rows_from(memory, num_used);
    return torch::stable::narrow(memory, 1, 0, columns);
  }

  KeptRows(const Kernels& kernels, const Tensor& rows)
      : kernels_(kernels), rows_(rows.stride(1) == 1 ? rows : as_contiguous(rows)) {}

  // Rows from `row` on, as they lie; as operands where those are what is stored.
  RowMajorOf<Stored> from(int64_t row) const {
    return RowMajorOf<Stored>{mutable_stored(rows_), rows_.stride(0), kernels_.storage_bytes}.from(row);
  }
  RowMajor operands_from(int64_t row) const {
    const auto rows = from(row);
    return {reinterpret_cast<Operand*>(rows.data), rows.stride, rows.bytes};
  }

  // Keeps rows [begin, end), operands in a block that starts at begin. Past the caches: what is kept is read
  // again only when the whole of it has been written.
  void round(int64_t begin, int64_t end, const RowMajor& block) const {
    const int64_t row_bytes = rows_.stride(0) * kernels_.storage_bytes;
    const RowWriter writer(rows_.mutable_data_ptr(), rows_.size(0), row_bytes);
    std::vector<char> rounded(row_bytes);  // operands that are not what is stored are of the type of sums
    for (int64_t r = begin; r < end; ++r) {
      kernels_.round(reinterpret_cast<const Acc*>(block.at(r - begin)), rows_.size(1),
                     reinterpret_cast<Stored*>(rounded.data()));
      writer.copy(r, rounded.data());
    }
    writer.finish();
  }

  // The same rows as operands again.
  void load(int64_t begin, int64_t end, const RowMajor& block) const {
    std::vector<const Stored*> rows;
    for (int64_t r = begin; r < end; ++r) rows.push_back(from(r).data);
    kernels_.copy_rows(rows.data(), end - begin, rows_.size(1), block.data, block.stride);
  }

 private:
  const Kernels& kernels_;
  const Tensor rows_;
};

}  // namespace fmoe_ext::gemm
