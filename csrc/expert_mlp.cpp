// expert_mlp on the CPU, chunk by chunk: rows of x are gathered, h = x W1^T + b1, a = act(h) and y = s (a
// W2^T + b2), s being a row's weight. combine sums the rows of each token at the end; save_h keeps h for the
// backward (expert_backward.h). A gated W1 has H rows of gates, then H of ups.
#include "expert_mlp.h"

#include <torch/csrc/stable/library.h>

#include "expert_rows.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

constexpr int64_t kWorkspace = 16 << 20;  // bytes, about: the gathered x and the activated rows of one chunk

// Constructed, it has computed y and h.
class Forward {
 public:
  Forward(const ExpertRows& args, bool combine, bool save_h)
      : args_(args),
        kernels_(args.kernels),
        gated_(args.activation.gated),
        save_h_(save_h),
        x_stride_(RowMajor::stride_for(kernels_, args.D)),
        a_stride_(RowMajor::stride_for(kernels_, args.H)),
        // Combined, y is gone when the call ends. Else it is the result, whose storage its owner may resize.
        y(combine ? new_reused(args.x, {args.R, args.D})
                  : new_large(args.x, {args.R, args.D}, args.x.scalar_type())),
        h(save_h ? new_reused(args.x, {args.R, args.F}) : torch::stable::new_empty(args.x, {0})) {
    zero_rows_from(y, args.num_rows());
    if (save_h) zero_rows_from(h, args.num_rows());
    const int64_t row_bytes = (x_stride_ + a_stride_) * kernels_.operand_bytes;
    const auto bytes = [&](const Chunk& chunk) { return chunk.rows() * row_bytes; };
    for_each_chunk(make_chunks(args.bounds, args.limits_within(kWorkspace, row_bytes)), args.x, bytes,
                   [&](const Chunk& chunk, char* memory) { multiply({chunk, memory, *this}); });
  }

 private:
  // A chunk, and where its gathered rows of x and its activated rows lie.
  struct Work {
    const Chunk& chunk;
    const RowMajor x_rows, a_rows;

    Work(const Chunk& chunk, char* memory, const Forward& forward)
        : chunk(chunk),
          x_rows{reinterpret_cast<Operand*>(memory), forward.x_stride_, forward.kernels_.operand_bytes},
          a_rows{x_rows.at(chunk.rows()), forward.a_stride_, forward.kernels_.operand_bytes} {}
  };

  void multiply(const Work& work) {
    gather(work);
    multiply_w1(work);
    multiply_w2(work);
  }

  void gather(const Work& work) {
    const StoredRows x = args_.rows_of(args_.x);
    for_each_row_slice(work.chunk.begin, work.chunk.end, [&](int64_t begin, int64_t end) {
      std::vector<const Stored*> rows;
      for (int64_t r = begin; r < end; ++r) rows.push_back(x.at(args_.token(r)));
      kernels_.copy_rows(rows.data(), end - begin, args_.D, work.x_rows.at(begin - work.chunk.begin),
                         x_stride_);
    });
  }

  void multiply_w1(const Work& work) {
    const Chunk& chunk = work.chunk;
    const int64_t D = args_.D, H = args_.H, F = args_.F, columns = gated_ ? kernels_.nr / 2 : kernels_.nr;
    const auto jobs = panel_jobs(kernels_, chunk, divide_up(H, columns), D);
    for_each_job(jobs.size(), [&](int64_t job) {
      const Segment& segment = *jobs[job].segment;
      const Stored* w1 = args_.row_of(args_.w1, segment.expert * F, D);
      const int64_t first_row = segment.begin - chunk.begin;
      rows_by_weight(
          kernels_, jobs[job], work.x_rows.from(first_row), D,
          [&](int64_t p, const Stored** pointers) {
            if (gated_)
              gated_columns(kernels_, w1, H, D, p * columns, pointers);
            else
              weight_columns(kernels_, w1, H, D, p * columns, pointers);
          },
          [&](int64_t p, const Acc* tile, int64_t row, int64_t m) {
            const int64_t column = p * columns, corner = (segment.begin + row) * F + column;
            kernels_.act_forward({
                .curve = args_.activation.curve,
                .gated = gated_,
                .tile = tile,
                .m = m,
                .n = std::min(columns, H - column),
                .bias = args_.b1 ? kernels_.at(stored(*args_.b1), segment.expert * F + column) : nullptr,
                .h = save_h_ ? kernels_.at(mutable_stored(h), corner) : nullptr,
                .h_stride = F,
                .up_offset = H,
                .a = work.a_rows.at(first_row + row, column),
                .a_stride = a_stride_,
            });
          });
    });
    pad_depth(kernels_, work.a_rows, chunk.rows(), args_.H);
  }

  void multiply_w2(const Work& work) {
    const Chunk& chunk = work.chunk;
    const int64_t D = args_.D, H = args_.H;
    const auto jobs = panel_jobs(kernels_, chunk, divide_up(D, kernels_.nr), H);
    for_each_job(jobs.size(), [&](int64_t job) {
      const Segment& segment = *jobs[job].segment;
      const Stored* w2 = args_.row_of(args_.w2, segment.expert * D, H);
      rows_by_weight(
          kernels_, jobs[job], work.a_rows.from(segment.begin - chunk.begin), H,
          [&](int64_t p, const Stored** pointers) {
            weight_columns(kernels_, w2, D, H, p * kernels_.nr, pointers);
          },
          [&](int64_t p, const Acc* tile, int64_t row, int64_t m) {
            const int64_t column = p * kernels_.nr;
            const Stored* bias =
                args_.b2 ? kernels_.at(stored(*args_.b2), segment.expert * D + column) : nullptr;
            kernels_.store(tile, m, std::min(kernels_.nr, D - column), bias, args_.scale(segment.begin + row),
                           kernels_.at(mutable_stored(y), (segment.begin + row) * D + column), D);
          });
    });
  }

  const ExpertRows& args_;
  const Kernels& kernels_;
  const bool gated_, save_h_;
  const int64_t x_stride_, a_stride_;

 public:
  Tensor y;  // [R, D], weighted
  Tensor h;  // [R, F], or empty
};

std::tuple<Tensor, Tensor> expert_mlp_cpu(Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1,
                                          std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
                                          std::optional<Tensor> topk_weights, int64_t activation,
                                          bool combine, bool save_h) {
  const ExpertRows args(x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation);
  const Forward forward(args, combine, save_h);
  return {combine ? args.sum_choices(forward.y) : forward.y, forward.h};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("expert_mlp", TORCH_BOX(&expert_mlp_cpu)); }

}  // namespace fmoe_ext
