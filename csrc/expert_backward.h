// The backward of expert_mlp on the CPU, whole or one half of it, for expert_mlp_backward.cpp. With dO the
// rows of grad_y, s their weights and a = act(h), not weighted:
//   dH = act'(h) s dO W2   dX = dH W1   dW1 = dH^T X   dW2 = dO^T s a   ds = <dO, a W2^T + b2>, row by row
// and db1, db2 are the sums of dH and s dO over the rows of an expert.
#pragma once

#include "expert_rows.h"
#include "gemm/gradients.h"
#include "kept_rows.h"

namespace fmoe_ext::gemm {

constexpr int64_t kBackwardWorkspace = 32 << 20;  // bytes, about: everything row-sized of one chunk

// All of the backward, or one of its halves: the inputs' half keeps what the weights' half reads.
enum class BackwardHalf { both, inputs, weights };

// dh [R, F] and the weighted activated rows [R, H], between the halves, where they are needed.
struct Kept {
  std::optional<KeptRows> dh, scaled_a;
};

inline ExpertMlpNeeds of_half(ExpertMlpNeeds needs, BackwardHalf half) {
  if (half == BackwardHalf::inputs) needs.dw1 = needs.db1 = needs.dw2 = needs.db2 = false;
  if (half == BackwardHalf::weights) needs.dx = needs.dtopk_weights = false;
  return needs;
}

// run() goes chunk by chunk: the gradients of the activated rows, from them dh and the weighted rows a (first
// phase); then every product that reads these two from the workspace (second phase).
class ExpertBackward {
  // A chunk, what it has in its memory, and whether weight gradients read dO and dH there, without a
  // packed copy.
  struct Work {
    const Chunk& chunk;
    bool in_place;
    RowMajor do_rows, a_rows, dh_rows;
    SharedPanels do_panels, x_panels;

    RowMajor of(const RowMajor& block, const Segment& segment) const {
      return block.from(segment.begin - chunk.begin);
    }
  };

 public:
  // The weights' half does not read h. kept is empty for BackwardHalf::both.
  ExpertBackward(const ExpertRows& args, const Tensor& grad_y, const Tensor& h, bool combine,
                 const ExpertMlpNeeds& all_needs, BackwardHalf half, const Kept& kept,
                 const std::optional<Tensor>& main_dw1, const std::optional<Tensor>& main_dw2)
      : args_(args),
        kernels_(args.kernels),
        needs_(of_half(all_needs, half)),
        half_(half),
        kept_(kept),
        keeps_operands_(half != BackwardHalf::both && kernels_.operand_bytes == kernels_.storage_bytes),
        needs_a_(all_needs.dw2),
        grad_rows_(args, grad_y, combine),
        h_rows_(half == BackwardHalf::weights ? StoredRows{} : args.rows_of(h)),
        scale_grads_(args, grad_rows_, needs_.dtopk_weights),
        do_stride_(RowMajor::stride_for(kernels_, args.D)),
        a_stride_(RowMajor::stride_for(kernels_, args.H)),
        dh_stride_(RowMajor::stride_for(kernels_, args.F)),
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
    dx_rows_ = needs_.dx ? new_reused(args.x, {args.R, args.D}) : output(false, {});
    dw1 = weight_output(needs_.dw1, dw1_sums_, main_dw1);
    db1 = output(needs_.db1, {args.E, args.F});
    dw2 = weight_output(needs_.dw2, dw2_sums_, main_dw2);
    db2 = output(needs_.db2, {args.E, args.D});
  }

  void run() {
    // The same chunks whatever is needed, so that a gradient does not depend on what else is.
    const int64_t all_bytes = row_bytes() + 2 * args_.D * kernels_.operand_bytes;
    const auto chunks = make_chunks(args_.bounds, args_.limits_within(kBackwardWorkspace, all_bytes));
    const auto bytes = [&](const Chunk& chunk) { return bytes_of_chunk(chunk); };
    for_each_chunk(chunks, args_.x, bytes, [&](const Chunk& chunk, char* memory) {
      const Work work = place(chunk, memory);
      if (half_ != BackwardHalf::weights || needs_.db2 || (needs_.dw2 && work.in_place)) gather_grad(work);
      if (half_ == BackwardHalf::weights && needs_.db1 && !keeps_operands_) load_dh(work);
      first_phase(work);
      if (half_ == BackwardHalf::inputs && !keeps_operands_) keep(work);
      second_phase(work);
    });
    if (needs_.db1) db1_sums_.store(db1);
    if (needs_.db2) db2_sums_.store(db2);
  }

  Tensor dx() const { return needs_.dx ? args_.sum_choices(dx_rows_) : dx_rows_; }

  Tensor dtopk_weights() const { return scale_grads_.output(); }

  Tensor dw1, db1, dw2, db2;

 private:
  SharedPanels do_panels() const { return {kernels_, args_.D, kernels_.mr}; }
  SharedPanels x_panels() const { return {kernels_, args_.D, kernels_.nr}; }

  // Rows of a small chunk are in the cache, where products read single numbers of each without a packed copy.
  bool reads_in_place(const Chunk& chunk) const {
    return chunk.rows() * row_bytes() <= kCoreBytes && kernels_.k_step == 1 &&
           (half_ != BackwardHalf::weights || keeps_operands_);
  }

  int64_t row_bytes() const { return (do_stride_ + a_stride_ + dh_stride_) * kernels_.operand_bytes; }

  int64_t bytes_of_chunk(const Chunk& chunk) const {
    return chunk.rows() * row_bytes() +
           (needs_.dw2 && !reads_in_place(chunk) ? do_panels().bytes(chunk) : 0) +
           (needs_.dw1 ? x_panels().bytes(chunk) : 0);
  }

  // Every block is a whole number of cache lines, so that the next one is aligned as well.
  Work place(const Chunk& chunk, char* memory) const {
    Work work{chunk, reads_in_place(chunk), {}, {}, {}, do_panels(), x_panels()};
    const int64_t bytes = kernels_.operand_bytes;
    work.do_rows = {reinterpret_cast<Operand*>(memory), do_stride_, bytes};
    work.a_rows = {work.do_rows.at(chunk.rows()), a_stride_, bytes};
    work.dh_rows = {work.a_rows.at(chunk.rows()), dh_stride_, bytes};
    memory = reinterpret_cast<char*>(work.dh_rows.at(chunk.rows()));
    if (keeps_operands_ && kept_.dh) work.dh_rows = kept_.dh->operands_from(chunk.begin);
    if (keeps_operands_ && kept_.scaled_a) work.a_rows = kept_.scaled_a->operands_from(chunk.begin);
    if (needs_.dw2 && !work.in_place) {
      work.do_panels.place(chunk, memory);
      memory += work.do_panels.bytes(chunk);
    }
    if (needs_.dw1) work.x_panels.place(chunk, memory);
    return work;
  }

  void gather_grad(const Work& work) {
    for_each_row_slice(work.chunk.begin, work.chunk.end, [&](int64_t begin, int64_t end) {
      std::vector<const Stored*> rows;
      for (int64_t r = begin; r < end; ++r) rows.push_back(grad_rows_.at(r));
      kernels_.copy_rows(rows.data(), end - begin, args_.D, work.do_rows.at(begin - work.chunk.begin),
                         do_stride_);
    });
  }

  void keep(const Work& work) {
    for_each_row_slice(work.chunk.begin, work.chunk.end, [&](int64_t begin, int64_t end) {
      const int64_t row = begin - work.chunk.begin;
      if (kept_.dh) kept_.dh->round(begin, end, work.dh_rows.from(row));
      if (kept_.scaled_a) kept_.scaled_a->round(begin, end, work.a_rows.from(row));
    });
  }

  void load_dh(const Work& work) {
    for_each_row_slice(work.chunk.begin, work.chunk.end, [&](int64_t begin, int64_t end) {
      kept_.dh->load(begin, end, work.dh_rows.from(begin - work.chunk.begin));
    });
  }

  // dh and a of the chunk's rows, <dO, y> of each row, and the panels that the weight gradients share.
  void first_phase(const Work& work) {
    const Chunk& chunk = work.chunk;
    std::vector<Job> products, do_packs, x_packs;
    for (const Segment& segment : chunk.segments) {
      if (half_ != BackwardHalf::weights)
        add_jobs(products, segment, divide_up(args_.H, kernels_.nr), 2 * args_.D * kernels_.nr,
                 args_.D * kernels_.nr * kernels_.storage_bytes);
      if (needs_.dw2 && !work.in_place) work.do_panels.add_pack_jobs(do_packs, segment);
      if (needs_.dw1) work.x_panels.add_pack_jobs(x_packs, segment);
    }
    int64_t groups = 0;
    for (const Job& job : products) groups = std::max(groups, job.group + 1);
    RowScales partial(kernels_, needs_.dtopk_weights ? groups * chunk.rows() : 0);

    const int64_t num_products = products.size(), num_do = do_packs.size(), num_x = x_packs.size();
    const StoredRows x = args_.rows_of(args_.x);
    for_each_job(num_products + num_do + num_x, [&](int64_t job) {
      if (job < num_products) return activation_job(work, products[job], partial);
      if (job < num_products + num_do)
        return work.do_panels.pack(do_packs[job - num_products], [&](int64_t r) { return grad_rows_.at(r); });
      work.x_panels.pack(x_packs[job - num_products - num_do],
                         [&](int64_t r) { return x.at(args_.token(r)); });
    });

    if (half_ != BackwardHalf::weights) pad_depth(kernels_, work.dh_rows, chunk.rows(), args_.F);
    if (needs_.dtopk_weights) scale_grads_.sum(chunk, partial, groups);
  }

  void activation_job(const Work& work, const Job& job, RowScales& partial) {
    const Chunk& chunk = work.chunk;
    const int64_t D = args_.D, H = args_.H, F = args_.F;
    const Segment& segment = *job.segment;
    const Stored* w2 = args_.row_of(args_.w2, segment.expert * D, H);
    rows_by_weight_transposed(
        kernels_, job, work.of(work.do_rows, segment), D, w2, H,
        [&](int64_t p, const Acc* tile, int64_t row, int64_t m) {
          const int64_t column = p * kernels_.nr, row_of_chunk = segment.begin - chunk.begin + row;
          kernels_.act_backward({
              .curve = args_.activation.curve,
              .gated = args_.activation.gated,
              .tile = tile,
              .m = m,
              .n = std::min(kernels_.nr, H - column),
              .h = h_rows_.at(segment.begin + row, column),
              .h_stride = F,
              .up_offset = H,
              .scale = args_.scale(segment.begin + row),
              .dh = work.dh_rows.at(row_of_chunk, column),
              .dh_stride = work.dh_rows.stride,
              .a = needs_a_ ? work.a_rows.at(row_of_chunk, column) : nullptr,
              .a_stride = work.a_rows.stride,
              .dscale = needs_.dtopk_weights ? partial.at(job.group * chunk.rows() + row_of_chunk) : nullptr,
          });
        });
  }

  void second_phase(const Work& work) {
    const Chunk& chunk = work.chunk;
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

    using Kind = void (ExpertBackward::*)(const Work&, const Job&);
    std::vector<std::pair<Kind, Job>> jobs;
    const auto add = [&](Kind kind, const std::vector<Job>& more) {
      for (const Job& job : more) jobs.emplace_back(kind, job);
    };
    add(&ExpertBackward::dx_job, dx);
    add(&ExpertBackward::dw1_job, dw1);
    add(&ExpertBackward::dw2_job, dw2);
    add(&ExpertBackward::db1_job, db1);
    add(&ExpertBackward::db2_job, db2);
    for_each_job(jobs.size(), [&](int64_t i) { (this->*jobs[i].first)(work, jobs[i].second); });

    if (needs_.dw1) dw1_sums_.end(chunk);
    if (needs_.dw2) dw2_sums_.end(chunk);
  }

  // Columns of a segment's rows, from the block where they are operands or as they were kept.
  OwnPanels own_panels(const std::optional<KeptRows>& kept, const RowMajor& block, const Work& work,
                       const Segment& segment, int64_t column, int64_t n, int64_t lanes) const {
    const bool is_stored = half_ == BackwardHalf::weights && !keeps_operands_;
    if (is_stored) return {kernels_, kept->from(segment.begin), segment.rows(), column, n, lanes};
    return {kernels_, work.of(block, segment), segment.rows(), column, n, lanes};
  }

  void dx_job(const Work& work, const Job& job) {  // dX = dH W1
    const int64_t D = args_.D, F = args_.F;
    const Segment& segment = *job.segment;
    const Stored* w1 = args_.row_of(args_.w1, segment.expert * F, D);
    rows_by_weight_transposed(
        kernels_, job, work.of(work.dh_rows, segment), F, w1, D,
        [&](int64_t p, const Acc* tile, int64_t row, int64_t m) {
          const int64_t column = p * kernels_.nr;
          kernels_.store(tile, m, std::min(kernels_.nr, D - column), nullptr, nullptr,
                         kernels_.at(mutable_stored(dx_rows_), (segment.begin + row) * D + column), D);
        });
  }

  void dw1_job(const Work& work, const Job& job) {  // dW1 = dH^T X
    const Segment& segment = *job.segment;
    const int64_t first = job.begin * kernels_.mr, n = std::min(job.end * kernels_.mr, args_.F) - first;
    const auto multiply = [&](const Transposed& dh) {
      multiply_transposed(kernels_, dh, n, work.x_panels.of(segment), args_.D, segment.rows(),
                          [&](const Acc* tile, int64_t row, int64_t column, int64_t m, int64_t width) {
                            dw1_sums_.add(segment, tile, first + row, column, m, width);
                          });
    };
    if (work.in_place) return multiply(Transposed::of(kernels_, work.of(work.dh_rows, segment), first));
    const OwnPanels dh = own_panels(kept_.dh, work.dh_rows, work, segment, first, n, kernels_.mr);
    multiply(Transposed::of(kernels_, dh.panels));
  }

  void dw2_job(const Work& work, const Job& job) {  // dW2 = dO^T A
    const Segment& segment = *job.segment;
    const int64_t first = job.begin * kernels_.nr, n = std::min(job.end * kernels_.nr, args_.H) - first;
    const OwnPanels a = own_panels(kept_.scaled_a, work.a_rows, work, segment, first, n, kernels_.nr);
    const Transposed dout = work.in_place ? Transposed::of(kernels_, work.of(work.do_rows, segment), 0)
                                          : Transposed::of(kernels_, work.do_panels.of(segment));
    multiply_transposed(kernels_, dout, args_.D, a.panels, n, segment.rows(),
                        [&](const Acc* tile, int64_t row, int64_t column, int64_t m, int64_t width) {
                          dw2_sums_.add(segment, tile, row, first + column, m, width);
                        });
  }

  void db1_job(const Work& work, const Job& job) {
    db1_sums_.add(*job.segment, work.of(work.dh_rows, *job.segment), nullptr, job.begin);
  }

  void db2_job(const Work& work, const Job& job) {
    db2_sums_.add(*job.segment, work.of(work.do_rows, *job.segment), args_.scale(job.segment->begin),
                  job.begin);
  }

  const ExpertRows& args_;
  const Kernels& kernels_;
  const ExpertMlpNeeds needs_;  // of this half
  const BackwardHalf half_;
  const Kept kept_;
  const bool keeps_operands_;  // where they are computed, without a copy
  const bool needs_a_;
  const GradRows grad_rows_;
  const StoredRows h_rows_;
  Tensor dx_rows_;  // [R, D]
  ScaleGrads scale_grads_;
  const int64_t do_stride_, a_stride_, dh_stride_;
  ExpertGradient dw1_sums_, dw2_sums_;
  BiasGradient db1_sums_, db2_sums_;
};

}  // namespace fmoe_ext::gemm
