// grouped_gemm, its backward and frozen_gemm on the CPU: y = x weight[e]^T + bias[e] on the rows of each
// expert e. multiply() is the forward, for plain and packed weights.
#include "grouped_gemm.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "frozen_weight.h"
#include "gemm/gradients.h"
#include "gemm/grouped.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

constexpr int64_t kWorkspace = 16 << 20;  // bytes, about

// Rows [begin, end) of t [R, columns] into a block of operand rows.
void copy_chunk(const Kernels& kernels, const Stored* t, int64_t columns, const Chunk& chunk,
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

// weight: a contiguous Tensor, or a FrozenWeight that is packed.
template <class Weight>
Tensor multiply(const Tensor& x, const Weight& weight, const std::vector<int64_t>& bounds,
                const std::optional<Tensor>& bias) {
  const int64_t R = x.size(0), D = x.size(1), N = weight.size(1);
  const Kernels& kernels = kernels_for(x.scalar_type());
  Tensor y = new_large(x, {R, N}, x.scalar_type());
  zero_rows_from(y, bounds.back());

  const int64_t stride = RowMajor::stride_for(kernels, D), row_bytes = stride * kernels.operand_bytes;
  const auto chunks = make_chunks(bounds, {rows_within(kWorkspace, row_bytes)});
  const auto bytes = [&](const Chunk& chunk) { return chunk.rows() * row_bytes; };
  for_each_chunk(chunks, x, bytes, [&](const Chunk& chunk, char* memory) {
    const RowMajor block{reinterpret_cast<Operand*>(memory), stride, kernels.operand_bytes};
    copy_chunk(kernels, stored(x), D, chunk, block);
    const auto jobs = panel_jobs(kernels, chunk, divide_up(N, kernels.nr), D);
    for_each_job(jobs.size(), [&](int64_t job) {
      const RowMajor a = block.from(jobs[job].segment->begin - chunk.begin);
      multiply_job(kernels, jobs[job], a, weight, bias, y);
    });
  });
  return y;
}

Tensor grouped_gemm_cpu(Tensor x, Tensor weight, Tensor offs, std::optional<Tensor> bias) {
  check_cpu(x, "x");
  check_cpu(weight, "weight");
  check_cpu(offs, "offs");
  check_grouped_gemm(x, weight, offs, bias);
  if (bias) bias = as_contiguous(*bias);
  return multiply(as_contiguous(x), as_contiguous(weight), read_offs(as_contiguous(offs), x.size(0)), bias);
}

// Chunk by chunk: the rows of grad_y as operands, and from them every product that is needed.
// x is read for dweight alone. weight: as multiply() has it, read for dx alone.
template <class Weight>
class Backward {
 public:
  Backward(const Tensor& grad_y, const Tensor& x, const Weight& weight, const std::vector<int64_t>& bounds,
           const GroupedGemmNeeds& needs, const std::optional<Tensor>& main_dweight)
      : needs_(needs),
        kernels_(kernels_for(grad_y.scalar_type())),
        dy_(grad_y),
        x_(x),
        weight_(weight),
        D(weight.size(2)),
        N(weight.size(1)),
        dy_stride_(RowMajor::stride_for(kernels_, N)),
        // The same chunks whatever is needed, so that a gradient does not depend on what else is.
        chunks_(make_chunks(bounds, {rows_within(kWorkspace, (dy_stride_ + D) * kernels_.operand_bytes)})),
        x_panels_(kernels_, D, kernels_.nr),
        dweight_sums_(kernels_, bounds, N, D),
        dbias_sums_(kernels_, needs.dbias ? weight.size(0) : 0, N) {
    const auto output = [&](bool needed, std::initializer_list<int64_t> shape) {
      return needed ? new_large(dy_, shape, dy_.scalar_type()) : torch::stable::new_empty(dy_, {0});
    };
    dx = output(needs.dx, {dy_.size(0), D});
    if (needs.dx) zero_rows_from(dx, bounds.back());
    if (main_dweight) dweight_sums_.accumulate_into(*main_dweight);
    dweight = needs.dweight && !main_dweight ? dweight_sums_.make_output(dy_) : output(false, {});
    dbias = output(needs.dbias, {weight.size(0), N});
  }

  void run() {
    const auto bytes = [&](const Chunk& chunk) { return bytes_of_chunk(chunk); };
    for_each_chunk(chunks_, dy_, bytes, [&](const Chunk& chunk, char* memory) {
      dy_rows_ = {reinterpret_cast<Operand*>(memory), dy_stride_, kernels_.operand_bytes};
      copy_chunk(kernels_, stored(dy_), N, chunk, dy_rows_);
      if (needs_.dweight) pack_x(chunk);
      multiply(chunk);
    });
    if (needs_.dbias) dbias_sums_.store(dbias);
  }

  Tensor dx, dweight, dbias;

 private:
  int64_t bytes_of_chunk(const Chunk& chunk) const {
    return chunk.rows() * dy_stride_ * kernels_.operand_bytes + (needs_.dweight ? x_panels_.bytes(chunk) : 0);
  }

  void pack_x(const Chunk& chunk) {
    std::vector<Job> jobs;
    for (const Segment& segment : chunk.segments) x_panels_.add_pack_jobs(jobs, segment);
    x_panels_.place(chunk, reinterpret_cast<char*>(dy_rows_.at(chunk.rows())));
    for_each_job(jobs.size(), [&](int64_t job) {
      x_panels_.pack(jobs[job], [&](int64_t r) { return kernels_.at(stored(x_), r * D); });
    });
  }

  void multiply(const Chunk& chunk) {
    const int64_t mr = kernels_.mr, nr = kernels_.nr, bytes = kernels_.storage_bytes;
    std::vector<Job> inputs, weights, biases;
    for (const Segment& segment : chunk.segments) {
      if (needs_.dx) add_jobs(inputs, segment, divide_up(D, nr), 2 * N * nr, N * nr * bytes);
      if (needs_.dweight) add_jobs(weights, segment, divide_up(N, mr), 2 * D * mr, D * mr * bytes);
      for (int64_t part = 0; needs_.dbias && part < dbias_sums_.parts(); ++part)
        biases.push_back({&segment, part, part + 1, part});
    }
    if (needs_.dweight) dweight_sums_.begin(chunk);
    const int64_t num_inputs = inputs.size(), num_weights = weights.size(), num_biases = biases.size();
    for_each_job(num_inputs + num_weights + num_biases, [&](int64_t job) {
      if (job < num_inputs) return input_job(chunk, inputs[job]);
      if (job < num_inputs + num_weights) return weight_job(chunk, weights[job - num_inputs]);
      bias_job(chunk, biases[job - num_inputs - num_weights]);
    });
    if (needs_.dweight) dweight_sums_.end(chunk);
  }

  RowMajor rows_of(const Chunk& chunk, const Segment& segment) const {
    return dy_rows_.from(segment.begin - chunk.begin);
  }

  void input_job(const Chunk& chunk, const Job& job) {  // dX = dY W
    const Segment& segment = *job.segment;
    const auto store = [&](int64_t p, const Acc* tile, int64_t first, int64_t m) {
      const int64_t column = p * kernels_.nr, n = std::min(kernels_.nr, D - column);
      Stored* corner = kernels_.at(mutable_stored(dx), (segment.begin + first) * D + column);
      kernels_.store(tile, m, n, nullptr, nullptr, corner, D);
    };
    if constexpr (std::is_same_v<Weight, FrozenWeight>) {
      const auto row = [&](int64_t i) {
        PackedRow packed;
        weight_.row(segment.expert, i, packed);
        return packed;
      };
      rows_by_packed_transposed(kernels_, job, rows_of(chunk, segment), N, row, D, store);
    } else {
      const Stored* w = kernels_.at(stored(weight_), segment.expert * N * D);
      rows_by_weight_transposed(kernels_, job, rows_of(chunk, segment), N, w, D, store);
    }
  }

  void weight_job(const Chunk& chunk, const Job& job) {  // dW = dY^T X
    const Segment& segment = *job.segment;
    const int64_t first = job.begin * kernels_.mr, n = std::min(job.end * kernels_.mr, N) - first;
    const OwnPanels dy(kernels_, rows_of(chunk, segment), segment.rows(), first, n, kernels_.mr);
    multiply_transposed(kernels_, Transposed::of(kernels_, dy.panels), n, x_panels_.of(segment), D,
                        segment.rows(),
                        [&](const Acc* tile, int64_t row, int64_t column, int64_t m, int64_t width) {
                          dweight_sums_.add(segment, tile, first + row, column, m, width);
                        });
  }

  void bias_job(const Chunk& chunk, const Job& job) {
    dbias_sums_.add(*job.segment, rows_of(chunk, *job.segment), nullptr, job.begin);
  }

  const GroupedGemmNeeds needs_;
  const Kernels& kernels_;
  const Tensor &dy_, &x_;
  const Weight& weight_;
  const int64_t D, N, dy_stride_;
  const Chunks chunks_;
  RowMajor dy_rows_;
  SharedPanels x_panels_;
  ExpertGradient dweight_sums_;
  BiasGradient dbias_sums_;
};

std::tuple<Tensor, Tensor, Tensor> grouped_gemm_backward_cpu(Tensor grad_y, Tensor x, Tensor weight,
                                                             Tensor offs, std::vector<bool> needs,
                                                             std::optional<Tensor> main_dweight) {
  check_cpu(grad_y, "grad_y");
  check_cpu(x, "x");
  check_cpu(weight, "weight");
  check_cpu(offs, "offs");
  if (main_dweight) check_cpu(*main_dweight, "main_dweight");
  check_grouped_gemm_backward(grad_y, x, weight, offs, main_dweight);
  const GroupedGemmNeeds wanted(needs);
  const Tensor dy = as_contiguous(grad_y), rows = as_contiguous(x);
  const Tensor w = wanted.dx ? as_contiguous(weight) : weight;  // else only its shape is read
  const auto bounds = read_offs(as_contiguous(offs), rows.size(0));
  Backward backward(dy, rows, w, bounds, wanted, main_dweight);
  backward.run();
  return {backward.dx, backward.dweight, backward.dbias};
}

Tensor frozen_gemm_cpu(Tensor x, Tensor weight_, std::optional<Tensor> offs, std::optional<Tensor> bias,
                       std::optional<Tensor> weight_scale, std::optional<Tensor> weight_zero,
                       int64_t weight_format, bool weight_interleaved, bool transposed) {
  const FrozenWeight weight(weight_, {weight_scale, weight_zero, weight_format, weight_interleaved},
                            "weight");
  STD_TORCH_CHECK(weight.is_packed(),
                  "weight_format must be of a packed format, not 0: grouped_gemm "
                  "multiplies with weights that are not packed");
  check_cpu(x, "x");
  if (offs) check_cpu(*offs, "offs");
  if (bias) check_cpu(*bias, "bias");
  if (transposed) {
    STD_TORCH_CHECK(!bias, "bias must be None with transposed=True");
    check_float(x, "x");
    check_dim(x, 2, "x", "[R, N]");
    check_size(x, 1, weight.size(1), "x", "[R, N]");
    check_offs(offs, x, weight, "x");
  } else {
    check_grouped_gemm(x, weight, offs, bias);
  }
  const Tensor rows = as_contiguous(x);
  const std::vector<int64_t> bounds =
      offs ? read_offs(as_contiguous(*offs), rows.size(0)) : std::vector<int64_t>{0, rows.size(0)};
  if (!transposed) {
    if (bias) bias = as_contiguous(*bias);
    return multiply(rows, weight, bounds, bias);
  }
  Backward backward(rows, rows, weight, bounds, GroupedGemmNeeds({true, false, false}), std::nullopt);
  backward.run();
  return backward.dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("frozen_gemm", TORCH_BOX(&frozen_gemm_cpu));
  m.impl("grouped_gemm", TORCH_BOX(&grouped_gemm_cpu));
  m.impl("grouped_gemm_backward", TORCH_BOX(&grouped_gemm_backward_cpu));
}

}  // namespace fmoe_ext
