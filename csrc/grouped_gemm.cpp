#include "grouped_gemm.h"

#include <torch/csrc/stable/library.h>

#include "gemm/grouped.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

constexpr int64_t kWorkspace = 16 << 20;  // bytes, about

// Rows [begin, end) of t [R, columns] into a block of operand rows.
void copy_chunk(const Kernels& kernels, const char* t, int64_t columns, const Chunk& chunk,
                const RowMajor& block) {
  for_each_row_slice(chunk.begin, chunk.end, [&](int64_t begin, int64_t end) {
    std::vector<const void*> rows;
    for (int64_t r = begin; r < end; ++r) rows.push_back(t + r * columns * kernels.storage_bytes);
    kernels.copy_rows(rows.data(), end - begin, columns, block.at(begin - chunk.begin), block.stride);
  });
}

Tensor grouped_gemm_cpu(Tensor x_, Tensor weight_, Tensor offs_, std::optional<Tensor> bias_) {
  check_cpu(x_, "x");
  check_cpu(weight_, "weight");
  check_cpu(offs_, "offs");
  check_grouped_gemm(x_, weight_, offs_, bias_);
  const Tensor x = as_contiguous(x_), weight = as_contiguous(weight_), offs = as_contiguous(offs_);
  std::optional<Tensor> bias;
  if (bias_) bias = as_contiguous(*bias_);
  const int64_t R = x.size(0), D = x.size(1), N = weight.size(1);

  const Kernels& kernels = kernels_for(x.scalar_type());
  const auto bounds = read_offs(offs, R);
  Tensor y = new_large(x, {R, N}, x.scalar_type());
  zero_rows_from(y, bounds.back());

  const int64_t stride = RowMajor::stride_for(kernels, D), row_bytes = stride * kernels.operand_bytes;
  const auto chunks = make_chunks(bounds, rows_within(kWorkspace, row_bytes));
  const Workspace workspace(x, largest_chunk(chunks) * row_bytes);
  const RowMajor block{workspace.data(), stride, kernels.operand_bytes};
  for (const Chunk& chunk : chunks) {
    copy_chunk(kernels, bytes_of(x), D, chunk, block);
    const auto jobs = panel_jobs(kernels, chunk, divide_up(N, kernels.nr), D);
    for_each_job(jobs.size(), [&](int64_t job) {
      const Segment& segment = *jobs[job].segment;
      const RowMajor a{block.at(segment.begin - chunk.begin), stride, block.bytes};
      const char* w = bytes_of(weight) + segment.expert * N * D * kernels.storage_bytes;
      multiply_weight_columns(
          kernels, jobs[job], a, D,
          [&](int64_t p, const void** pointers) {
            weight_columns(kernels, w, N, D, p * kernels.nr, pointers);
          },
          [&](int64_t p, const void* tile, int64_t row, int64_t m) {
            const int64_t column = p * kernels.nr;
            const char* b =
                bias ? bytes_of(*bias) + (segment.expert * N + column) * kernels.storage_bytes : nullptr;
            kernels.store(tile, m, std::min(kernels.nr, N - column), b, nullptr,
                          mutable_bytes_of(y) + ((segment.begin + row) * N + column) * kernels.storage_bytes,
                          N);
          });
    });
  }
  return y;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_y_, const Tensor& x_, const Tensor& weight_,
                                            const Tensor& offs_, const std::vector<bool>& needs,
                                            const std::optional<Tensor>& main_dweight) {
  check_cpu(grad_y_, "grad_y");
  check_cpu(x_, "x");
  check_cpu(weight_, "weight");
  check_cpu(offs_, "offs");
  if (main_dweight) check_cpu(*main_dweight, "main_dweight");
  check_grouped_gemm_backward(grad_y_, x_, weight_, offs_, needs, main_dweight);
  const Tensor dy = as_contiguous(grad_y_), x = as_contiguous(x_), weight = as_contiguous(weight_),
               offs = as_contiguous(offs_);
  const int64_t R = x.size(0), D = x.size(1), E = weight.size(0), N = weight.size(1);
  const bool need_dx = needs[0], need_dw = needs[1], need_db = needs[2];

  const auto dtype = x.scalar_type();
  const Kernels& kernels = kernels_for(dtype);
  const auto bounds = read_offs(offs, R);
  Tensor dx = need_dx ? new_large(x, {R, D}, dtype) : new_large(x, {0}, dtype);
  Tensor db = need_db ? new_large(x, {E, N}, dtype) : new_large(x, {0}, dtype);
  if (need_dx) zero_rows_from(dx, bounds.back());

  const int64_t stride = RowMajor::stride_for(kernels, N), row_bytes = stride * kernels.operand_bytes;
  const auto chunks = make_chunks(bounds, rows_within(kWorkspace, row_bytes + D * kernels.operand_bytes));
  SharedPanels x_panels(kernels, D, kernels.nr);
  int64_t bytes = 0;
  for (const Chunk& chunk : chunks)
    bytes = std::max(bytes, chunk.rows() * row_bytes + (need_dw ? x_panels.bytes(chunk) : 0));
  const Workspace workspace(x, bytes);
  const RowMajor block{workspace.data(), stride, kernels.operand_bytes};

  ExpertGradient dweight(kernels, bounds, N, D);
  const bool stores_dw = need_dw && !main_dweight;
  const Tensor dw = stores_dw ? dweight.make_output(x) : new_large(x, {0}, dtype);
  if (main_dweight) dweight.accumulate_into(*main_dweight);
  BiasGradient dbias(kernels, need_db ? E : 0, N);

  for (const Chunk& chunk : chunks) {
    copy_chunk(kernels, bytes_of(dy), N, chunk, block);
    std::vector<Job> packs, inputs, weights, biases;
    for (const Segment& segment : chunk.segments) {
      if (need_dx)
        add_jobs(inputs, segment, divide_up(D, kernels.nr), 2 * N * kernels.nr,
                 N * kernels.nr * kernels.storage_bytes);
      if (need_dw) {
        x_panels.add_pack_jobs(packs, segment);
        add_jobs(weights, segment, divide_up(N, kernels.mr), 2 * D * kernels.mr,
                 D * kernels.mr * kernels.storage_bytes);
      }
      if (need_db)
        for (int64_t part = 0; part < dbias.parts(); ++part)
          biases.push_back({&segment, part, part + 1, part});
    }
    if (need_dw) {
      x_panels.place(chunk, block.at(chunk.rows()));
      for_each_job(packs.size(), [&](int64_t job) {
        x_panels.pack(packs[job], [&](int64_t r) { return bytes_of(x) + r * D * kernels.storage_bytes; });
      });
      dweight.begin(chunk);
    }

    const auto input_job = [&](const Job& job) {
      const Segment& segment = *job.segment;
      const RowMajor a{block.at(segment.begin - chunk.begin), stride, block.bytes};
      const char* w = bytes_of(weight) + segment.expert * N * D * kernels.storage_bytes;
      multiply_weight_rows(
          kernels, job, a, N, w, D, [&](int64_t p, const void* tile, int64_t row, int64_t m) {
            const int64_t column = p * kernels.nr;
            kernels.store(tile, m, std::min(kernels.nr, D - column), nullptr, nullptr,
                          mutable_bytes_of(dx) + ((segment.begin + row) * D + column) * kernels.storage_bytes,
                          D);
          });
    };
    const auto weight_job = [&](const Job& job) {
      const Segment& segment = *job.segment;
      const RowMajor rows{block.at(segment.begin - chunk.begin), stride, block.bytes};
      const int64_t first = job.begin * kernels.mr, n = std::min(job.end * kernels.mr, N) - first;
      const Panels a{thread_buffer((job.end - job.begin) * panel_bytes(kernels, segment.rows(), kernels.mr)),
                     Panels::stride_for(kernels, segment.rows(), kernels.mr), kernels.operand_bytes};
      pack_block(kernels, rows, segment.rows(), first, n, kernels.mr, a);
      multiply_packed_panels(kernels, a, n, x_panels.of(segment), D, segment.rows(),
                             [&](const void* tile, int64_t row, int64_t column, int64_t m, int64_t k) {
                               dweight.add(segment, tile, first + row, column, m, k);
                             });
    };
    const auto bias_job = [&](const Job& job) {
      const RowMajor rows{block.at(job.segment->begin - chunk.begin), stride, block.bytes};
      dbias.add(*job.segment, rows, nullptr, job.begin);
    };
    const int64_t num_inputs = inputs.size(), num_weights = weights.size(), num_biases = biases.size();
    for_each_job(num_inputs + num_weights + num_biases, [&](int64_t job) {
      if (job < num_inputs) return input_job(inputs[job]);
      if (job < num_inputs + num_weights) return weight_job(weights[job - num_inputs]);
      bias_job(biases[job - num_inputs - num_weights]);
    });
    if (need_dw) dweight.end(chunk);
  }
  if (need_db) dbias.store(db);
  return {dx, dw, db};
}

std::tuple<Tensor, Tensor, Tensor> grouped_gemm_backward_cpu(Tensor grad_y, Tensor x, Tensor weight,
                                                             Tensor offs, std::vector<bool> needs) {
  return backward(grad_y, x, weight, offs, needs, std::nullopt);
}

std::tuple<Tensor, Tensor, Tensor> grouped_gemm_backward_accumulate_cpu(Tensor grad_y, Tensor x,
                                                                        Tensor weight, Tensor offs,
                                                                        std::vector<bool> needs,
                                                                        Tensor main_dweight) {
  return backward(grad_y, x, weight, offs, needs, main_dweight);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("grouped_gemm", TORCH_BOX(&grouped_gemm_cpu));
  m.impl("grouped_gemm_backward", TORCH_BOX(&grouped_gemm_backward_cpu));
  m.impl("grouped_gemm_backward_accumulate", TORCH_BOX(&grouped_gemm_backward_accumulate_cpu));
}

}  // namespace fmoe_ext
