// Sums over the rows of each expert, for the backwards of expert_mlp, frozen_mlp and grouped_gemm: columns
// packed as panels over the rows (OwnPanels, SharedPanels), and the gradients that are summed chunk by chunk
// (ExpertGradient of a weight or an adapter, BiasGradient).
#pragma once

#include <vector>

#include "gemm/grouped.h"

namespace fmoe_ext::gemm {

// Columns [column, column + n) of a block of rows, operands or storage, as panels of `lanes` lanes over
// k = rows, in the memory of the thread: a thread may have one OwnPanels at a time, and no other ThreadBuffer
// beside it.
class OwnPanels {
 public:
  template <class Role>
  OwnPanels(const Kernels& kernels, const RowMajorOf<Role>& block, int64_t rows, int64_t column, int64_t n,
            int64_t lanes)
      : buffer_(divide_up(n, lanes) * panel_bytes(kernels, rows, lanes)),
        panels(Panels::in(buffer_.data(), kernels, rows, lanes)) {
    std::vector<const Role*> pointers(rows);
    for (int64_t r = 0; r < rows; ++r) pointers[r] = block.at(r);
    if constexpr (std::is_same_v<Role, Operand>)
      kernels.pack_operand_rows(pointers.data(), rows, column, n, lanes, panels.data, panels.stride);
    else
      kernels.pack_rows(pointers.data(), rows, column, n, lanes, panels.data, panels.stride);
  }

 private:
  const ThreadBuffer buffer_;

 public:
  const Panels panels;
};

// All columns of a tensor, for the rows of each segment of a chunk, as panels over k = rows that all jobs
// share.
class SharedPanels {
 public:
  SharedPanels(const Kernels& kernels, int64_t columns, int64_t lanes)
      : kernels_(kernels), columns_(columns), lanes_(lanes) {}

  int64_t bytes(const Chunk& chunk) const {
    int64_t total = 0;
    for (const Segment& segment : chunk.segments)
      total += num_panels() * panel_bytes(kernels_, segment.rows(), lanes_);
    return total;
  }

  void place(const Chunk& chunk, char* memory) {
    panels_.clear();
    for (const Segment& segment : chunk.segments) {
      panels_.push_back(Panels::in(memory, kernels_, segment.rows(), lanes_));
      memory += num_panels() * panel_bytes(kernels_, segment.rows(), lanes_);
    }
    first_ = chunk.segments.data();
  }

  void add_pack_jobs(std::vector<Job>& jobs, const Segment& segment) const {
    constexpr int64_t kFlopsWorth = 16;  // packing an element takes the time of about so many operations
    add_jobs(jobs, segment, num_panels(), kFlopsWorth * lanes_, 0);
  }

  // row(r) is the address of row r of the tensor.
  template <class Row>
  void pack(const Job& job, const Row& row) const {
    if (job.begin == job.end) return;
    const Segment& segment = *job.segment;
    std::vector<const Stored*> rows(segment.rows());
    for (int64_t r = 0; r < segment.rows(); ++r) rows[r] = row(segment.begin + r);
    const int64_t column = job.begin * lanes_;
    kernels_.pack_rows(rows.data(), segment.rows(), column, std::min(job.end * lanes_, columns_) - column,
                       lanes_, of(segment).panel(job.begin), of(segment).stride);
  }

  const Panels& of(const Segment& segment) const { return panels_[&segment - first_]; }

 private:
  int64_t num_panels() const { return divide_up(columns_, lanes_); }

  const Kernels& kernels_;
  int64_t columns_, lanes_;
  std::vector<Panels> panels_;
  const Segment* first_ = nullptr;
};

// The gradient of one parameter [E, rows, columns]. An expert that lies whole in one chunk is stored at once;
// the sums of one that is cut are kept over its segments and rounded after the last. With accumulate_into(),
// all is added to a main gradient in the type of the sums instead.
class ExpertGradient {
 public:
  ExpertGradient(const Kernels& kernels, const std::vector<int64_t>& bounds, int64_t rows, int64_t columns)
      : kernels_(kernels), bounds_(bounds), rows_(rows), columns_(columns) {}

  // The tensor [E, rows, columns] that the sums go to; experts without rows are zero in it at once.
  Tensor make_output(const Tensor& like) {
    const int64_t num_experts = static_cast<int64_t>(bounds_.size()) - 1;
    int64_t num_idle = 0;
    for (int64_t e = 0; e < num_experts; ++e) num_idle += bounds_[e] == bounds_[e + 1];
    if (2 * num_idle > num_experts) {
      const Tensor out = new_untouched_zeros(like, {num_experts, rows_, columns_});
      out_ = mutable_stored(out);
      return out;
    }
    const Tensor out = new_reused(like, {num_experts, rows_, columns_});
    out_ = mutable_stored(out);
    const int64_t bytes = rows_ * columns_ * kernels_.storage_bytes;
    for_each_job(num_experts, [&](int64_t e) {
      if (bounds_[e] == bounds_[e + 1]) std::fill_n(mutable_bytes_of(out) + e * bytes, bytes, 0);
    });
    return out;
  }

  // Instead of make_output: adds the sums to main_grad [E, rows, columns], contiguous.
  void accumulate_into(const Tensor& main_grad) {
    main_grad_ = static_cast<Acc*>(main_grad.mutable_data_ptr());
  }

  // Before the jobs of a chunk: a cut expert starts with zero sums. Its segments are chunks of their own.
  void begin(const Chunk& chunk) {
    const Segment& segment = chunk.segments.front();
    if (!main_grad_ && segment.cut && segment.begin == bounds_[segment.expert])
      sums_.assign(checked_product({rows_, columns_, kernels_.acc_bytes}), 0);
  }

  void add(const Segment& segment, const Acc* tile, int64_t row, int64_t column, int64_t m, int64_t n) {
    const int64_t in_expert = row * columns_ + column, at = segment.expert * rows_ * columns_ + in_expert;
    if (main_grad_)
      kernels_.accumulate(tile, m, n, kernels_.at(main_grad_, at), columns_);
    else if (segment.cut)
      kernels_.accumulate(tile, m, n, kernels_.at(sums(), in_expert), columns_);
    else
      kernels_.stream(tile, m, n, kernels_.at(out_, at), columns_);
  }

  // After the jobs of a chunk.
  void end(const Chunk& chunk) {
    const Segment& segment = chunk.segments.front();
    if (main_grad_ || !segment.cut || segment.end != bounds_[segment.expert + 1]) return;
    for_each_job(rows_, [&](int64_t row) {
      kernels_.round(kernels_.at(sums(), row * columns_), columns_,
                     kernels_.at(out_, (segment.expert * rows_ + row) * columns_));
    });
    sums_ = {};
  }

 private:
  Acc* sums() { return reinterpret_cast<Acc*>(sums_.data()); }

  const Kernels& kernels_;
  Stored* out_ = nullptr;
  Acc* main_grad_ = nullptr;
  const std::vector<int64_t>& bounds_;
  int64_t rows_, columns_;
  std::vector<char> sums_;
};

// The gradient of a bias [E, columns]: rows are summed in blocks, in row order (sum_over_rows), and the
// blocks' sums are added in double.
class BiasGradient {
 public:
  BiasGradient(const Kernels& kernels, int64_t num_experts, int64_t columns)
      : kernels_(kernels), columns_(columns), sums_(checked_product({num_experts, columns}), 0.0) {}

  static constexpr int64_t kColumns = 256;  // of one part
  int64_t parts() const { return divide_up(columns_, kColumns); }

  // rows starts at the segment's first row; so does scale, null for 1.
  void add(const Segment& segment, const RowMajor& rows, const Acc* scale, int64_t part) {
    const int64_t column = part * kColumns;
    kernels_.sum_over_rows(rows.at(0, column), rows.stride, segment.rows(),
                           std::min(kColumns, columns_ - column), scale,
                           sums_.data() + segment.expert * columns_ + column);
  }

  void store(const Tensor& out) const {
    const auto round = [&](const auto& sums) {
      kernels_.round(reinterpret_cast<const Acc*>(sums.data()), sums.size(), mutable_stored(out));
    };
    if (kernels_.acc_bytes == sizeof(double)) return round(sums_);
    round(std::vector<float>(sums_.begin(), sums_.end()));
  }

 private:
  const Kernels& kernels_;
  int64_t columns_;
  std::vector<double> sums_;
};

}  // namespace fmoe_ext::gemm
