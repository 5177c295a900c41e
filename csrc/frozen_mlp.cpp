// The forward of frozen_mlp on the CPU, as expert_mlp.cpp but for its products: h = x W1^T + u1 B1^T + b1
// with u1 = scale1 x A1^T, then the same of act(h) with the second weight. Weights may be packed
// (FrozenProducts). u1 and u2 are always returned, h where `save`.
#include "frozen_mlp.h"

#include <torch/csrc/stable/library.h>

namespace fmoe_ext {
namespace {

using namespace gemm;

// Constructed, it has computed y, h, u1 and u2.
class Forward {
 public:
  Forward(const ExpertRows& args, const FrozenWeights& weights, const Adapters& adapters, bool combine,
          bool save)
      : args_(args),
        weights_(weights),
        kernels_(args.kernels),
        adapters_(adapters),
        products_(args),
        save_(save),
        u1(ThinRows::make(args, adapters.first)),
        u2(ThinRows::make(args, adapters.second)),
        // As in expert_mlp.cpp: combined, y is gone when the call ends, else its owner may resize its
        // storage.
        y(combine ? new_reused(args.x, {args.R, args.D})
                  : new_large(args.x, {args.R, args.D}, args.x.scalar_type())),
        h(save ? new_reused(args.x, {args.R, args.F}) : torch::stable::new_empty(args.x, {0})) {
    zero_rows_from(y, args.num_rows());
    if (save) zero_rows_from(h, args.num_rows());
    const int64_t row_bytes =
        bytes_of_rows(kernels_, {args.D, args.H, rank_of(adapters.first), rank_of(adapters.second)});
    for_each_chunk(
        make_chunks(args.bounds, args.limits_within(kFrozenWorkspace, row_bytes)), args.x,
        [&](const Chunk& chunk) { return chunk.rows() * row_bytes; },
        [&](const Chunk& chunk, char* memory) { multiply(chunk, memory); });
  }

 private:
  void multiply(const Chunk& chunk, char* memory) {
    Blocks blocks(kernels_, memory, chunk.rows());
    const RowMajor x_rows = blocks.next(args_.D), a_rows = blocks.next(args_.H);
    const ThinRows thin1{u1, blocks.next(rank_of(adapters_.first))};
    const ThinRows thin2{u2, blocks.next(rank_of(adapters_.second))};
    // One after the other: each reads what the one before wrote.
    Tasks gathers, reduces1, ups, reduces2, downs;
    const StoredRows x = args_.rows_of(args_.x);
    gather(gathers, kernels_, chunk, args_.D, x_rows, [this, x](int64_t r) { return x.at(args_.token(r)); });
    gathers.run();
    if (adapters_.first) products_.reduce(reduces1, chunk, x_rows, *adapters_.first, thin1);
    reduces1.run();
    multiply_w1(ups, chunk, x_rows, thin1.operands, a_rows);
    ups.run();
    pad_depth(kernels_, a_rows, chunk.rows(), args_.H);
    if (adapters_.second) products_.reduce(reduces2, chunk, a_rows, *adapters_.second, thin2);
    reduces2.run();
    multiply_w2(downs, chunk, a_rows, thin2.operands);
    downs.run();
  }

  const Stored* bias(const std::optional<Tensor>& b, int64_t expert, int64_t column) const {
    return b ? kernels_.at(stored(*b), expert * b->size(1) + column) : nullptr;
  }

  // The epilogues of both products are expert_mlp.cpp's.
  void multiply_w1(Tasks& tasks, const Chunk& chunk, const RowMajor& x_rows, const RowMajor& thin,
                   const RowMajor& a_rows) {
    const bool gated = args_.activation.gated;
    const int64_t H = args_.H, F = args_.F, width = gated ? kernels_.nr / 2 : kernels_.nr;
    products_.by_weight(
        tasks, chunk, x_rows, weights_.w1, gated, pointer_to(adapters_.first), thin,
        [=, this, &chunk](const Segment& segment, const Acc* tile, int64_t row, int64_t m, int64_t column) {
          const int64_t r = segment.begin + row;
          kernels_.act_forward({
              .curve = args_.activation.curve,
              .gated = gated,
              .tile = tile,
              .m = m,
              .n = std::min(width, H - column),
              .bias = bias(args_.b1, segment.expert, column),
              .h = save_ ? kernels_.at(mutable_stored(h), r * F + column) : nullptr,
              .h_stride = F,
              .up_offset = H,
              .a = a_rows.at(r - chunk.begin, column),
              .a_stride = a_rows.stride,
          });
        });
  }

  void multiply_w2(Tasks& tasks, const Chunk& chunk, const RowMajor& a_rows, const RowMajor& thin) {
    const int64_t D = args_.D;
    products_.by_weight(
        tasks, chunk, a_rows, weights_.w2, false, pointer_to(adapters_.second), thin,
        [=, this](const Segment& segment, const Acc* tile, int64_t row, int64_t m, int64_t column) {
          const int64_t r = segment.begin + row;
          kernels_.store(tile, m, std::min(kernels_.nr, D - column), bias(args_.b2, segment.expert, column),
                         args_.scale(r), kernels_.at(mutable_stored(y), r * D + column), D);
        });
  }

  const ExpertRows& args_;
  const FrozenWeights& weights_;
  const Kernels& kernels_;
  const Adapters& adapters_;
  const FrozenProducts products_;
  const bool save_;

 public:
  Tensor u1, u2;  // [R, rank], lora_scale * rows A^T
  Tensor y;       // [R, D], weighted
  Tensor h;       // [R, F], or empty
};

using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor> frozen_mlp_cpu(
    Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Optional b1, Tensor w2, Optional b2,
    Optional topk_weights, int64_t activation, bool combine, bool save, Optional w1_scale, Optional w1_zero,
    int64_t w1_format, bool w1_interleaved, Optional w2_scale, Optional w2_zero, int64_t w2_format,
    Optional lora_a1, Optional lora_b1, double lora_scale1, Optional lora_a2, Optional lora_b2,
    double lora_scale2) {
  const FrozenWeights weights{FrozenWeight(w1, {w1_scale, w1_zero, w1_format, w1_interleaved}, "w1"),
                              FrozenWeight(w2, {w2_scale, w2_zero, w2_format, false}, "w2")};
  const ExpertRows args(x, row_idx, inverse, offs, weights.w1, b1, weights.w2, b2, topk_weights, activation);
  const Adapters adapters(x, weights, lora_a1, lora_b1, lora_scale1, lora_a2, lora_b2, lora_scale2);
  const Forward forward(args, weights, adapters, combine, save);
  return {combine ? args.sum_choices(forward.y) : forward.y, forward.h, forward.u1, forward.u2};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) { m.impl("frozen_mlp", TORCH_BOX(&frozen_mlp_cpu)); }

}  // namespace fmoe_ext
