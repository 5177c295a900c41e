#include <torch/csrc/stable/library.h>

#include "expert_rows.h"
#include "kept_rows.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

constexpr int64_t kWorkspace = 32 << 20;  // bytes, about: everything row-sized of one chunk

// All of the backward, or one of its halves: the inputs' half keeps what the weights' half reads.
enum class Half { both, inputs, weights };

// dh [R, F] and the weighted activated rows [R, H], between the halves, where they are needed.
struct Kept {
  std::optional<KeptRows> dh, scaled_a;
};

ExpertMlpNeeds of_half(ExpertMlpNeeds needs, Half half) {
  if (half == Half::inputs) needs.dw1 = needs.db1 = needs.dw2 = needs.db2 = false;
  if (half == Half::weights) needs.dx = needs.dtopk_weights = false;
  return needs;
}

// Chunk by chunk: the gradients of the activated rows, from them dh and the rows a (first phase); then every
// product that reads these two from the workspace (second phase).
class Backward {
 public:
  // h is not read by the weights' half; nothing is kept by both.
  Backward(const ExpertRows& args, const Tensor& grad_y, const Tensor& h, bool combine,
           const ExpertMlpNeeds& all_needs, Half half, const Kept& kept,
           const std::optional<Tensor>& main_dw1, const std::optional<Tensor>& main_dw2)
      : args_(args),
        kernels_(args.kernels),
        needs_(of_half(all_needs, half)),
        half_(half),
        kept_(kept),
        keeps_operands_(half != Half::both && kernels_.operand_bytes == kernels_.storage_bytes),
        needs_a_(all_needs.dw2),
        grad_y_(grad_y),
        h_(h),
        combine_(combine),
        scales_grad_(kernels_, needs_.dtopk_weights ? args.R : 0),
        do_stride_(RowMajor::stride_for(kernels_, args.D)),
        a_stride_(RowMajor::stride_for(kernels_, args.H)),
        dh_stride_(RowMajor::stride_for(kernels_, args.F)),
        do_panels_(kernels_, args.D, kernels_.mr),
        x_panels_(kernels_, args.D, kernels_.nr),
        dw1_sums_(kernels_, args.bounds, args.F, args.D),
        dw2_sums_(kernels_, args.bounds, args.D, args.H),
        db1_sums_(kernels_, needs_.db1 ? args.E : 0, args.F),
        db2_sums_(kernels_, needs_.db2 ? args.E : 0, args.D) {
    const auto dtype = args.x.scalar_type();
    const auto output = [&](bool needed, std::initializer_list<int64_t> shape) {
      return needed ? new_large(args.x, shape, dtype) : torch::stable::new_empty(args.x, {0});
    };
    const auto weight_output = [&](bool needed, ExpertGradient& sums,
                                   const std::optional<Tensor>& main_grad) {
      if (main_grad) sums.accumulate_into(*main_grad);
      return needed && !main_grad ? sums.make_output(args.x) : output(false, {});
    };
    dx_rows_ = output(needs_.dx, {args.R, args.D});
    dw1 = weight_output(needs_.dw1, dw1_sums_, main_dw1);
    db1 = output(needs_.db1, {args.E, args.F});
    dw2 = weight_output(needs_.dw2, dw2_sums_, main_dw2);
    db2 = output(needs_.db2, {args.E, args.D});
  }

  void run() {
    // The same chunks whatever is needed, so that a gradient does not depend on what else is.
    const int64_t row_bytes = (do_stride_ + a_stride_ + dh_stride_ + 2 * args_.D) * kernels_.operand_bytes;
    const auto chunks = make_chunks(args_.bounds, rows_within(kWorkspace, row_bytes));
    int64_t bytes = 0;
    for (const Chunk& chunk : chunks) bytes = std::max(bytes, bytes_of_chunk(chunk));
    const Workspace workspace(args_.x, bytes);
    for (const Chunk& chunk : chunks) {
      place(chunk, workspace.data());
      if (half_ != Half::weights || needs_.db2) gather_grad(chunk);
      if (half_ == Half::weights && needs_.db1 && !keeps_operands_) load_dh(chunk);
      first_phase(chunk);
      if (half_ == Half::inputs && !keeps_operands_) keep(chunk);
      second_phase(chunk);
    }
    if (needs_.db1) db1_sums_.store(db1);
    if (needs_.db2) db2_sums_.store(db2);
  }

  Tensor dx() const { return needs_.dx ? args_.sum_choices(dx_rows_) : dx_rows_; }

  // [T, K] of the dtype of topk_weights; dropped choices get zero.
  Tensor dtopk_weights() const {
    if (!needs_.dtopk_weights) return torch::stable::new_empty(args_.x, {0});
    Tensor grad = torch::stable::new_zeros(*args_.topk_weights, {args_.T, args_.K});
    dispatch_float(grad.scalar_type(), [&](auto tag) {
      auto* out = static_cast<decltype(tag)*>(grad.mutable_data_ptr());
      for (int64_t r = 0; r < args_.num_rows(); ++r) out[args_.row_idx[r]] = scales_grad_.get(r);
    });
    return grad;
  }

  Tensor dw1, db1, dw2, db2;

 private:
  int64_t bytes_of_chunk(const Chunk& chunk) const {
    const int64_t rows = chunk.rows() * (do_stride_ + a_stride_ + dh_stride_) * kernels_.operand_bytes;
    return rows + (needs_.dw2 ? do_panels_.bytes(chunk) : 0) + (needs_.dw1 ? x_panels_.bytes(chunk) : 0);
  }

  // Every block is a whole number of cache lines, so that the next one is aligned as well.
  void place(const Chunk& chunk, char* memory) {
    const int64_t bytes = kernels_.operand_bytes;
    do_rows_ = {memory, do_stride_, bytes};
    a_rows_ = {do_rows_.at(chunk.rows()), a_stride_, bytes};
    dh_rows_ = {a_rows_.at(chunk.rows()), dh_stride_, bytes};
    memory = dh_rows_.at(chunk.rows());
    if (keeps_operands_ && kept_.dh) dh_rows_ = kept_.dh->from(chunk.begin);
    if (keeps_operands_ && kept_.scaled_a) a_rows_ = kept_.scaled_a->from(chunk.begin);
    if (needs_.dw2) do_panels_.place(chunk, memory);
    if (needs_.dw1) x_panels_.place(chunk, memory + (needs_.dw2 ? do_panels_.bytes(chunk) : 0));
  }

  const char* grad_row(int64_t row) const {
    return args_.row_of(grad_y_, combine_ ? args_.token(row) : row, args_.D);
  }

  RowMajor rows_of(const RowMajor& block, const Chunk& chunk, const Segment& segment) const {
    return block.from(segment.begin - chunk.begin);
  }

  void gather_grad(const Chunk& chunk) {
    for_each_row_slice(chunk.begin, chunk.end, [&](int64_t begin, int64_t end) {
      std::vector<const void*> rows;
      for (int64_t r = begin; r < end; ++r) rows.push_back(grad_row(r));
      kernels_.copy_rows(rows.data(), end - begin, args_.D, do_rows_.at(begin - chunk.begin), do_stride_);
    });
  }

  void keep(const Chunk& chunk) {
    for_each_row_slice(chunk.begin, chunk.end, [&](int64_t begin, int64_t end) {
      const int64_t row = begin - chunk.begin;
      if (kept_.dh) kept_.dh->round(begin, end, dh_rows_.from(row));
      if (kept_.scaled_a) kept_.scaled_a->round(begin, end, a_rows_.from(row));
    });
  }

  void load_dh(const Chunk& chunk) {
    for_each_row_slice(chunk.begin, chunk.end, [&](int64_t begin, int64_t end) {
      kept_.dh->load(begin, end, dh_rows_.from(begin - chunk.begin));
    });
  }

  // dh and a of the chunk's rows, <dO, y> of each row, and the panels that the weight gradients share.
  void first_phase(const Chunk& chunk) {
    std::vector<Job> products, do_packs, x_packs;
    for (const Segment& segment : chunk.segments) {
      if (half_ != Half::weights)
        add_jobs(products, segment, divide_up(args_.H, kernels_.nr), 2 * args_.D * kernels_.nr,
                 args_.D * kernels_.nr * kernels_.storage_bytes);
      if (needs_.dw2) do_panels_.add_pack_jobs(do_packs, segment);
      if (needs_.dw1) x_panels_.add_pack_jobs(x_packs, segment);
    }
    int64_t groups = 0;
    for (const Job& job : products) groups = std::max(groups, job.group + 1);
    RowScales partial(kernels_, needs_.dtopk_weights ? groups * chunk.rows() : 0);

    const int64_t num_products = products.size(), num_do = do_packs.size(), num_x = x_packs.size();
    for_each_job(num_products + num_do + num_x, [&](int64_t job) {
      if (job < num_products) return activation_job(chunk, products[job], partial);
      if (job < num_products + num_do)
        return do_panels_.pack(do_packs[job - num_products], [&](int64_t r) { return grad_row(r); });
      x_panels_.pack(x_packs[job - num_products - num_do],
                     [&](int64_t r) { return args_.row_of(args_.x, args_.token(r), args_.D); });
    });

    // Depth of the product with W1 that is not a multiple of k_step is padded with zeros.
    if (half_ != Half::weights && args_.F % kernels_.k_step)
      for (int64_t r = 0; r < chunk.rows(); ++r)
        std::fill_n(dh_rows_.at(r, args_.F), kernels_.operand_bytes, 0);
    if (needs_.dtopk_weights) sum_scale_grads(chunk, partial, groups);
  }

  void activation_job(const Chunk& chunk, const Job& job, RowScales& partial) {
    const int64_t D = args_.D, H = args_.H, F = args_.F;
    const Segment& segment = *job.segment;
    const char* w2 = args_.row_of(args_.w2, segment.expert * D, H);
    rows_by_weight_transposed(
        kernels_, job, rows_of(do_rows_, chunk, segment), D, w2, H,
        [&](int64_t p, const void* tile, int64_t row, int64_t m) {
          const int64_t column = p * kernels_.nr, row_of_chunk = segment.begin - chunk.begin + row;
          kernels_.act_backward({
              .curve = args_.activation.curve,
              .gated = args_.activation.gated,
              .tile = tile,
              .m = m,
              .n = std::min(kernels_.nr, H - column),
              .h = bytes_of(h_) + ((segment.begin + row) * F + column) * kernels_.storage_bytes,
              .h_stride = F,
              .up_offset = H,
              .scale = args_.scale(segment.begin + row),
              .dh = dh_rows_.at(row_of_chunk, column),
              .dh_stride = dh_rows_.stride,
              .a = needs_a_ ? a_rows_.at(row_of_chunk, column) : nullptr,
              .a_stride = a_rows_.stride,
              .dscale = needs_.dtopk_weights ? partial.at(job.group * chunk.rows() + row_of_chunk) : nullptr,
          });
        });
  }

  void sum_scale_grads(const Chunk& chunk, const RowScales& partial, int64_t groups) {
    for (const Segment& segment : chunk.segments)
      for (int64_t r = segment.begin; r < segment.end; ++r) {
        double sum = 0;
        for (int64_t group = 0; group < groups; ++group)
          sum += partial.get(group * chunk.rows() + r - chunk.begin);
        if (args_.b2) {
          RowScales product(kernels_, 1);
          kernels_.dot(grad_row(r), args_.row_of(*args_.b2, segment.expert, args_.D), args_.D, product.at(0));
          sum += product.get(0);
        }
        scales_grad_.set(r, sum);
      }
  }

  void second_phase(const Chunk& chunk) {
    std::vector<Job> dx, dw1, dw2, db1, db2;
    const int64_t D = args_.D, H = args_.H, F = args_.F, bytes = kernels_.storage_bytes;
    for (const Segment& segment : chunk.segments) {
      if (needs_.dx)
        add_jobs(dx, segment, divide_up(D, kernels_.nr), 2 * F * kernels_.nr, F * kernels_.nr * bytes);
      if (needs_.dw1)
        add_jobs(dw1, segment, divide_up(F, kernels_.mr), 2 * D * kernels_.mr, D * kernels_.mr * bytes);
      if (needs_.dw2)
        add_jobs(dw2, segment, divide_up(H, kernels_.nr), 2 * D * kernels_.nr, D * kernels_.nr * bytes);
      for (int64_t part = 0; needs_.db1 && part < db1_sums_.parts(); ++part)
        db1.push_back({&segment, part, part + 1, part});
      for (int64_t part = 0; needs_.db2 && part < db2_sums_.parts(); ++part)
        db2.push_back({&segment, part, part + 1, part});
    }
    if (needs_.dw1) dw1_sums_.begin(chunk);
    if (needs_.dw2) dw2_sums_.begin(chunk);

    using Kind = void (Backward::*)(const Chunk&, const Job&);
    std::vector<std::pair<Kind, Job>> jobs;
    const auto add = [&](Kind kind, const std::vector<Job>& more) {
      for (const Job& job : more) jobs.emplace_back(kind, job);
    };
    add(&Backward::dx_job, dx);
    add(&Backward::dw1_job, dw1);
    add(&Backward::dw2_job, dw2);
    add(&Backward::db1_job, db1);
    add(&Backward::db2_job, db2);
    for_each_job(jobs.size(), [&](int64_t i) { (this->*jobs[i].first)(chunk, jobs[i].second); });

    if (needs_.dw1) dw1_sums_.end(chunk);
    if (needs_.dw2) dw2_sums_.end(chunk);
  }

  // Columns of a segment's rows, from the block where they are operands or as they were kept.
  OwnPanels own_panels(const std::optional<KeptRows>& kept, const RowMajor& block, const Chunk& chunk,
                       const Segment& segment, int64_t column, int64_t n, int64_t lanes) const {
    const bool is_stored = half_ == Half::weights && !keeps_operands_;
    const RowMajor rows = is_stored ? kept->from(segment.begin) : rows_of(block, chunk, segment);
    return {kernels_, rows, segment.rows(), column, n, lanes};
  }

  void dx_job(const Chunk& chunk, const Job& job) {  // dX = dH W1
    const int64_t D = args_.D, F = args_.F;
    const Segment& segment = *job.segment;
    const char* w1 = args_.row_of(args_.w1, segment.expert * F, D);
    rows_by_weight_transposed(
        kernels_, job, rows_of(dh_rows_, chunk, segment), F, w1, D,
        [&](int64_t p, const void* tile, int64_t row, int64_t m) {
          const int64_t column = p * kernels_.nr;
          kernels_.store(
              tile, m, std::min(kernels_.nr, D - column), nullptr, nullptr,
              mutable_bytes_of(dx_rows_) + ((segment.begin + row) * D + column) * kernels_.storage_bytes, D);
        });
  }

  void dw1_job(const Chunk& chunk, const Job& job) {  // dW1 = dH^T X
    const Segment& segment = *job.segment;
    const int64_t first = job.begin * kernels_.mr, n = std::min(job.end * kernels_.mr, args_.F) - first;
    const OwnPanels dh = own_panels(kept_.dh, dh_rows_, chunk, segment, first, n, kernels_.mr);
    multiply_packed_panels(kernels_, dh.panels, n, x_panels_.of(segment), args_.D, segment.rows(),
                           [&](const void* tile, int64_t row, int64_t column, int64_t m, int64_t width) {
                             dw1_sums_.add(segment, tile, first + row, column, m, width);
                           });
  }

  void dw2_job(const Chunk& chunk, const Job& job) {  // dW2 = dO^T A
    const Segment& segment = *job.segment;
    const int64_t first = job.begin * kernels_.nr, n = std::min(job.end * kernels_.nr, args_.H) - first;
    const OwnPanels a = own_panels(kept_.scaled_a, a_rows_, chunk, segment, first, n, kernels_.nr);
    multiply_packed_panels(kernels_, do_panels_.of(segment), args_.D, a.panels, n, segment.rows(),
                           [&](const void* tile, int64_t row, int64_t column, int64_t m, int64_t width) {
                             dw2_sums_.add(segment, tile, row, first + column, m, width);
                           });
  }

  void db1_job(const Chunk& chunk, const Job& job) {
    db1_sums_.add(*job.segment, rows_of(dh_rows_, chunk, *job.segment), nullptr, job.begin);
  }

  void db2_job(const Chunk& chunk, const Job& job) {
    db2_sums_.add(*job.segment, rows_of(do_rows_, chunk, *job.segment), args_.scale(job.segment->begin),
                  job.begin);
  }

  const ExpertRows& args_;
  const Kernels& kernels_;
  const ExpertMlpNeeds needs_;  // of this half
  const Half half_;
  const Kept kept_;
  const bool keeps_operands_;  // where they are computed, without a copy
  const bool needs_a_;
  const Tensor& grad_y_;
  const Tensor& h_;
  const bool combine_;
  Tensor dx_rows_;         // [R, D]
  RowScales scales_grad_;  // <dO, y> of each row, y not weighted
  const int64_t do_stride_, a_stride_, dh_stride_;
  RowMajor do_rows_, a_rows_, dh_rows_;
  SharedPanels do_panels_, x_panels_;
  ExpertGradient dw1_sums_, dw2_sums_;
  BiasGradient db1_sums_, db2_sums_;
};

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Kept kept(const ExpertRows& args, const ExpertMlpNeeds& needs, const Tensor& dh, const Tensor& scaled_a) {
  Kept found;
  if (needs.dw1 || needs.db1) found.dh.emplace(args.kernels, dh);
  if (needs.dw2) found.scaled_a.emplace(args.kernels, scaled_a);
  return found;
}

void check_main_grads_cpu(const Tensor& w1, const Tensor& w2, const std::optional<Tensor>& main_dw1,
                          const std::optional<Tensor>& main_dw2) {
  if (main_dw1) check_cpu(*main_dw1, "main_dw1");
  if (main_dw2) check_cpu(*main_dw2, "main_dw2");
  check_expert_main_grads(w1, w2, main_dw1, main_dw2);
}

Gradients expert_mlp_backward_accumulate_cpu(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse,
                                             Tensor offs, Tensor w1, Tensor w2, std::optional<Tensor> b2,
                                             std::optional<Tensor> topk_weights, Tensor h, int64_t activation,
                                             bool combine, std::vector<bool> needs,
                                             std::optional<Tensor> main_dw1, std::optional<Tensor> main_dw2) {
  const ExpertRows args(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights, activation);
  check_cpu(grad_y, "grad_y");
  check_cpu(h, "h");
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_hidden_rows(h, x, inverse, args.F, "h", "[R, F]");
  check_main_grads_cpu(w1, w2, main_dw1, main_dw2);
  const Tensor grad = as_contiguous(grad_y), rows = as_contiguous(h);
  Backward backward(args, grad, rows, combine, ExpertMlpNeeds(needs, topk_weights), Half::both, {}, main_dw1,
                    main_dw2);
  backward.run();
  return {backward.dx(), backward.dw1, backward.db1, backward.dw2, backward.db2, backward.dtopk_weights()};
}

Gradients expert_mlp_backward_cpu(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs,
                                  Tensor w1, Tensor w2, std::optional<Tensor> b2,
                                  std::optional<Tensor> topk_weights, Tensor h, int64_t activation,
                                  bool combine, std::vector<bool> needs) {
  return expert_mlp_backward_accumulate_cpu(grad_y, x, row_idx, inverse, offs, w1, w2, b2, topk_weights, h,
                                            activation, combine, needs, std::nullopt, std::nullopt);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_mlp_backward_inputs_cpu(
    Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2,
    std::optional<Tensor> b2, std::optional<Tensor> topk_weights, Tensor h, int64_t activation, bool combine,
    std::vector<bool> needs_) {
  const ExpertRows args(x, row_idx, inverse, offs, w1, std::nullopt, w2, b2, topk_weights, activation);
  check_cpu(grad_y, "grad_y");
  check_cpu(h, "h");
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  check_hidden_rows(h, x, inverse, args.F, "h", "[R, F]");
  const ExpertMlpNeeds needs(needs_, topk_weights);
  const Tensor none = torch::stable::new_empty(x, {0});
  const auto new_kept = [&](bool needed, int64_t width) {
    return needed ? KeptRows::make(x, args.R, args.num_rows(), width) : none;
  };
  const Tensor dh = new_kept(needs.dw1 || needs.db1, args.F), scaled_a = new_kept(needs.dw2, args.H);
  const Tensor grad = as_contiguous(grad_y), rows = as_contiguous(h);
  Backward backward(args, grad, rows, combine, needs, Half::inputs, kept(args, needs, dh, scaled_a),
                    std::nullopt, std::nullopt);
  backward.run();
  return {backward.dx(), backward.dtopk_weights(), dh, scaled_a};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_mlp_backward_weights_cpu(
    Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2,
    std::optional<Tensor> topk_weights, Tensor dh, Tensor scaled_a, int64_t activation, bool combine,
    std::vector<bool> needs_, std::optional<Tensor> main_dw1, std::optional<Tensor> main_dw2) {
  const ExpertRows args(x, row_idx, inverse, offs, w1, std::nullopt, w2, std::nullopt, topk_weights,
                        activation);
  check_cpu(grad_y, "grad_y");
  check_cpu(dh, "dh");
  check_cpu(scaled_a, "scaled_a");
  check_expert_mlp_grad(grad_y, x, inverse, combine);
  const ExpertMlpNeeds needs(needs_, topk_weights);
  if (needs.dw1 || needs.db1) check_hidden_rows(dh, x, inverse, args.F, "dh", "[R, F]");
  if (needs.dw2) check_hidden_rows(scaled_a, x, inverse, args.H, "scaled_a", "[R, H]");
  check_main_grads_cpu(w1, w2, main_dw1, main_dw2);
  const Tensor grad = as_contiguous(grad_y), none = torch::stable::new_empty(x, {0});
  Backward backward(args, grad, none, combine, needs, Half::weights, kept(args, needs, dh, scaled_a),
                    main_dw1, main_dw2);
  backward.run();
  return {backward.dw1, backward.db1, backward.dw2, backward.db2};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("expert_mlp_backward", TORCH_BOX(&expert_mlp_backward_cpu));
  m.impl("expert_mlp_backward_accumulate", TORCH_BOX(&expert_mlp_backward_accumulate_cpu));
  m.impl("expert_mlp_backward_inputs", TORCH_BOX(&expert_mlp_backward_inputs_cpu));
  m.impl("expert_mlp_backward_weights", TORCH_BOX(&expert_mlp_backward_weights_cpu));
}

}  // namespace fmoe_ext
