// The backward of frozen_mlp on the CPU: gradients of x, the adapters and topk_weights, none of the weights.
// It goes by chunks of rows that fit in a workspace; the adapters' gradients are summed over them.
#include "frozen_mlp.h"

#include <torch/csrc/stable/library.h>

#include "gemm/gradients.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

// Needed gradients, in the order of the results.
struct Needs {
  bool dx, da1, db1, da2, db2, dtopk_weights;

  Needs(const std::vector<bool>& needs, const Adapters& adapters, const std::optional<Tensor>& topk_weights) {
    STD_TORCH_CHECK(
        needs.size() == 6,
        "needs must have 6 entries (dx, dlora_a1, dlora_b1, dlora_a2, dlora_b2, dtopk_weights), but got ",
        needs.size());
    dx = needs[0];
    da1 = needs[1];
    db1 = needs[2];
    da2 = needs[3];
    db2 = needs[4];
    dtopk_weights = needs[5];
    STD_TORCH_CHECK((!da1 && !db1) || adapters.first,
                    "needs asks for the gradient of lora_a1 or lora_b1, which is None");
    STD_TORCH_CHECK((!da2 && !db2) || adapters.second,
                    "needs asks for the gradient of lora_a2 or lora_b2, which is None");
    STD_TORCH_CHECK(!dtopk_weights || topk_weights,
                    "needs asks for the gradient of topk_weights, which is None");
  }
};

// With scale a row's weight and s1, s2 the lora_scales: t2 = s2 grad_y B2, da = grad_y W2 + t2 A2, dh = scale
// act'(h) da, t1 = s1 dh B1, dx = dh W1 + t1 A1; and over the rows of an expert dB2 = grad_y^T (scale u2),
// dA2 = t2^T (scale a), dB1 = dh^T u1, dA1 = t1^T x.
class Backward {
 public:
  Backward(const ExpertRows& args, const FrozenWeights& weights, const Adapters& adapters,
           const Tensor& grad_y, const Tensor& h, const Tensor& u1, const Tensor& u2, bool combine,
           const Needs& needs)
      : args_(args),
        weights_(weights),
        kernels_(args.kernels),
        adapters_(adapters),
        products_(args),
        needs_(needs),
        grad_rows_(args, grad_y, combine),
        h_rows_(args.rows_of(h)),
        u1_rows_(args.rows_of(u1)),
        u2_rows_(args.rows_of(u2)),
        t1_(ThinRows::make(args, adapters.first)),
        t2_(ThinRows::make(args, adapters.second)),
        scale_grads_(args, grad_rows_, needs.dtopk_weights),
        da1_(kernels_, args.bounds, rank_of(adapters.first), args.D),
        db1_(kernels_, args.bounds, args.F, rank_of(adapters.first)),
        da2_(kernels_, args.bounds, rank_of(adapters.second), args.H),
        db2_(kernels_, args.bounds, args.D, rank_of(adapters.second)) {
    const auto none = [&] { return torch::stable::new_empty(args.x, {0}); };  // results share no memory
    dx_rows_ = needs.dx ? new_reused(args.x, {args.R, args.D}) : none();
    grads = {needs.da1 ? da1_.make_output(args.x) : none(), needs.db1 ? db1_.make_output(args.x) : none(),
             needs.da2 ? da2_.make_output(args.x) : none(), needs.db2 ? db2_.make_output(args.x) : none()};
    const int64_t r1 = rank_of(adapters.first), r2 = rank_of(adapters.second);
    const int64_t row_bytes = bytes_of_rows(kernels_, {args.D, args.H, args.F, args.D, r1, r1, r2, r2});
    for_each_chunk(
        make_chunks(args.bounds, args.limits_within(2 * kFrozenWorkspace, row_bytes)), args.x,
        [&](const Chunk& chunk) { return chunk.rows() * row_bytes; },
        [&](const Chunk& chunk, char* memory) { multiply(chunk, memory); });
  }

  Tensor dx() const { return needs_.dx ? args_.sum_choices(dx_rows_) : dx_rows_; }

  Tensor dtopk_weights() const { return scale_grads_.output(); }

  std::vector<Tensor> grads;  // of lora_a1, lora_b1, lora_a2, lora_b2

 private:
  struct Rows {
    RowMajor dout, a, dh, x, u1, t1, u2, t2;
  };

  void multiply(const Chunk& chunk, char* memory) {
    Blocks blocks(kernels_, memory, chunk.rows());
    const int64_t r1 = rank_of(adapters_.first), r2 = rank_of(adapters_.second);
    const Rows rows{blocks.next(args_.D), blocks.next(args_.H), blocks.next(args_.F), blocks.next(args_.D),
                    blocks.next(r1),      blocks.next(r1),      blocks.next(r2),      blocks.next(r2)};
    Tasks gathers, reduces2, middle, reduces1, last;
    gather_rows(gathers, chunk, rows);
    gathers.run();
    if (adapters_.second)
      products_.reduce_transposed(reduces2, chunk, rows.dout, *adapters_.second, {t2_, rows.t2});
    reduces2.run();
    activate(chunk, rows);
    pad_depth(kernels_, rows.dh, chunk.rows(), args_.F);
    if (adapters_.first && (needs_.dx || needs_.da1))
      products_.reduce_transposed(reduces1, chunk, rows.dh, *adapters_.first, {t1_, rows.t1});
    reduces1.run();
    if (needs_.dx) multiply_w1(last, chunk, rows);
    if (needs_.da1) outer(last, chunk, rows.t1, r1, rows.x, args_.D, da1_);
    if (needs_.db1) outer(last, chunk, rows.dh, args_.F, rows.u1, r1, db1_);
    if (needs_.da2) outer(last, chunk, rows.t2, r2, rows.a, args_.H, da2_);
    if (needs_.db2) outer(last, chunk, rows.dout, args_.D, rows.u2, r2, db2_);
    for (ExpertGradient* sums : {&da1_, &db1_, &da2_, &db2_}) sums->begin(chunk);
    last.run();
    for (ExpertGradient* sums : {&da1_, &db1_, &da2_, &db2_}) sums->end(chunk);
  }

  void gather_rows(Tasks& tasks, const Chunk& chunk, const Rows& rows) const {
    const auto add = [&](bool needed, int64_t columns, const RowMajor& block, const auto& row) {
      if (needed) gather(tasks, kernels_, chunk, columns, block, row);
    };
    const StoredRows x = args_.rows_of(args_.x);
    add(true, args_.D, rows.dout, [this](int64_t r) { return grad_rows_.at(r); });
    add(needs_.da1, args_.D, rows.x, [this, x](int64_t r) { return x.at(args_.token(r)); });
    add(needs_.db1, rank_of(adapters_.first), rows.u1, [this](int64_t r) { return u1_rows_.at(r); });
    add(needs_.db2, rank_of(adapters_.second), rows.u2, [this](int64_t r) { return u2_rows_.at(r); });
  }

  void activate(const Chunk& chunk, const Rows& rows) {
    const int64_t H = args_.H, nr = kernels_.nr;
    const bool needs_scale = needs_.dtopk_weights;
    RowScales partial(kernels_, needs_scale ? divide_up(H, nr) * chunk.rows() : 0);
    Tasks tasks;
    products_.by_weight_transposed(
        tasks, chunk, rows.dout, weights_.w2, pointer_to(adapters_.second), rows.t2,
        [&](const Segment& segment, const Acc* tile, int64_t row, int64_t m, int64_t column) {
          const int64_t r = segment.begin + row, in_chunk = r - chunk.begin;
          kernels_.act_backward({
              .curve = args_.activation.curve,
              .gated = args_.activation.gated,
              .tile = tile,
              .m = m,
              .n = std::min(nr, H - column),
              .h = h_rows_.at(r, column),
              .h_stride = args_.F,
              .up_offset = H,
              .scale = args_.scale(r),
              .dh = rows.dh.at(in_chunk, column),
              .dh_stride = rows.dh.stride,
              .a = needs_.da2 ? rows.a.at(in_chunk, column) : nullptr,
              .a_stride = rows.a.stride,
              .dscale = needs_scale ? partial.at(column / nr * chunk.rows() + in_chunk) : nullptr,
          });
        });
    tasks.run();
    if (needs_scale) scale_grads_.sum(chunk, partial, divide_up(H, nr));
  }

  void multiply_w1(Tasks& tasks, const Chunk& chunk, const Rows& rows) {
    const int64_t D = args_.D;
    products_.by_weight_transposed(
        tasks, chunk, rows.dh, weights_.w1, pointer_to(adapters_.first), rows.t1,
        [=, this](const Segment& segment, const Acc* tile, int64_t row, int64_t m, int64_t column) {
          kernels_.store(tile, m, std::min(kernels_.nr, D - column), nullptr, nullptr,
                         kernels_.at(mutable_stored(dx_rows_), (segment.begin + row) * D + column), D);
        });
  }

  // The sum over each segment's rows of left[r]^T right[r], [M, N].
  void outer(Tasks& tasks, const Chunk& chunk, const RowMajor& left, int64_t M, const RowMajor& right,
             int64_t N, ExpertGradient& sums) const {
    const bool by_rows = M > N;
    const int64_t lanes = by_rows ? kernels_.mr : kernels_.nr, size = by_rows ? M : N;
    std::vector<Job> jobs;
    for (const Segment& segment : chunk.segments)
      add_jobs(jobs, segment, divide_up(size, lanes), 2 * kernels_.mr * kernels_.nr, 0);
    tasks.add(jobs, [=, this, &sums, begin = chunk.begin](const Job& job) {
      const Segment& segment = *job.segment;
      const int64_t first = job.begin * lanes, n = std::min(job.end * lanes, size) - first;
      if (n <= 0) return;
      const int64_t row0 = by_rows ? first : 0, column0 = by_rows ? 0 : first;
      const int64_t num_rows = by_rows ? n : M, num_columns = by_rows ? N : n, depth = segment.rows();
      const OwnPanels b(kernels_, right.from(segment.begin - begin), depth, column0, num_columns,
                        kernels_.nr);
      const RowMajor rows = left.from(segment.begin - begin);
      std::unique_ptr<char[]> memory;
      const Transposed a = columns_of(rows, depth, row0, num_rows, memory);
      multiply_transposed(kernels_, a, num_rows, b.panels, num_columns, depth,
                          [&](const Acc* tile, int64_t row, int64_t column, int64_t m, int64_t width) {
                            sums.add(segment, tile, row0 + row, column0 + column, m, width);
                          });
    });
  }

  // Columns of rows, mr at a time: where they lie if the kernels can read them there, else packed in memory.
  Transposed columns_of(const RowMajor& rows, int64_t depth, int64_t column, int64_t n,
                        std::unique_ptr<char[]>& memory) const {
    if (kernels_.k_step == 1 && depth * rows.stride * rows.bytes <= kCoreBytes)
      return Transposed::of(kernels_, rows, column);
    memory.reset(new char[divide_up(n, kernels_.mr) * panel_bytes(kernels_, depth, kernels_.mr)]);
    const Panels panels = Panels::in(memory.get(), kernels_, depth, kernels_.mr);
    std::vector<const Operand*> pointers(depth);
    for (int64_t r = 0; r < depth; ++r) pointers[r] = rows.at(r);
    kernels_.pack_operand_rows(pointers.data(), depth, column, n, kernels_.mr, panels.data, panels.stride);
    return Transposed::of(kernels_, panels);
  }

  const ExpertRows& args_;
  const FrozenWeights& weights_;
  const Kernels& kernels_;
  const Adapters& adapters_;
  const FrozenProducts products_;
  const Needs needs_;
  const GradRows grad_rows_;
  const StoredRows h_rows_, u1_rows_, u2_rows_;  // those of u2 weighted
  const Tensor t1_, t2_;                         // [R, rank]
  Tensor dx_rows_;                               // [R, D]
  ScaleGrads scale_grads_;
  ExpertGradient da1_, db1_, da2_, db2_;
};

// u2 times the weight of its row, in the type of storage.
Tensor weighted(const ExpertRows& args, const Tensor& u2) {
  if (!args.scales || u2.numel() == 0) return u2;
  const Tensor out = new_large(args.x, {u2.size(0), u2.size(1)}, u2.scalar_type());
  dispatch_float(u2.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const auto* from = static_cast<const T*>(u2.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    for (int64_t r = 0; r < args.num_rows(); ++r)
      for (int64_t j = 0; j < u2.size(1); ++j)
        to[r * u2.size(1) + j] =
            static_cast<T>(static_cast<double>(from[r * u2.size(1) + j]) * args.scales->get(r));
  });
  zero_rows_from(out, args.num_rows());
  return out;
}

using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> frozen_mlp_backward_cpu(
    Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2, Optional b2,
    Optional topk_weights, Tensor h, Tensor u1, Tensor u2, int64_t activation, bool combine,
    std::vector<bool> needs, Optional w1_scale, Optional w1_zero, int64_t w1_format, bool w1_interleaved,
    Optional w2_scale, Optional w2_zero, int64_t w2_format, Optional lora_a1, Optional lora_b1,
    double lora_scale1, Optional lora_a2, Optional lora_b2, double lora_scale2) {
  const FrozenWeights weights{FrozenWeight(w1, {w1_scale, w1_zero, w1_format, w1_interleaved}, "w1"),
                              FrozenWeight(w2, {w2_scale, w2_zero, w2_format, false}, "w2")};
  const ExpertRows args(x, row_idx, inverse, offs, weights.w1, std::nullopt, weights.w2, b2, topk_weights,
                        activation);
  const Adapters adapters(x, weights, lora_a1, lora_b1, lora_scale1, lora_a2, lora_b2, lora_scale2);
  check_cpu(grad_y, "grad_y");
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_cpu(h, "h");
  check_hidden_rows(h, x, inverse, args.F, "h", "[R, F]");
  check_cpu(u1, "u1");
  check_hidden_rows(u1, x, inverse, rank_of(adapters.first), "u1", "[R, rank]");
  check_cpu(u2, "u2");
  check_hidden_rows(u2, x, inverse, rank_of(adapters.second), "u2", "[R, rank]");
  const Tensor grad = as_contiguous(grad_y), rows = as_contiguous(h), thin1 = as_contiguous(u1);
  const Tensor thin2 = weighted(args, as_contiguous(u2));
  const Backward backward(args, weights, adapters, grad, rows, thin1, thin2, combine,
                          Needs(needs, adapters, topk_weights));
  const auto& g = backward.grads;
  return {backward.dx(), g[0], g[1], g[2], g[3], backward.dtopk_weights()};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("frozen_mlp_backward", TORCH_BOX(&frozen_mlp_backward_cpu));
}

}  // namespace fmoe_ext
