// The two-layer MLP of each expert with frozen weights and low-rank adapters (LoRA, arXiv 2106.09685):
// a weight W [out, in] with the adapter (A [rank, in], B [out, rank]) is x W^T + scale (x A^T) B^T.
// frozen_mlp.cpp and frozen_mlp_backward.cpp compute what they multiply by weights and adapters with
// FrozenProducts.
#pragma once

#include <functional>
#include <memory>

#include "expert_rows.h"

namespace fmoe_ext::gemm {

// The adapter of a weight [E, out, in]: a [E, rank, in], b [E, out, rank].
struct Adapter {
  Tensor a, b;
  double scale;
  int64_t rank, in, out;

  static std::optional<Adapter> of(const std::optional<Tensor>& a, const std::optional<Tensor>& b,
                                   double scale, const FrozenWeight& weight, const Tensor& x,
                                   const char* a_name, const char* b_name) {
    STD_TORCH_CHECK(a.has_value() == b.has_value(), a_name, " and ", b_name,
                    " must be given together, or neither of them");
    if (!a) return std::nullopt;
    check_cpu(*a, a_name);
    check_cpu(*b, b_name);
    check_same_dtype(*a, x, a_name, "x");
    check_same_dtype(*b, x, b_name, "x");
    check_dim(*a, 3, a_name, "[E, rank, in]");
    check_dim(*b, 3, b_name, "[E, out, rank]");
    check_size(*a, 0, weight.size(0), a_name, "[E, rank, in]");
    check_size(*a, 2, weight.size(2), a_name, "[E, rank, in]");
    check_size(*b, 0, weight.size(0), b_name, "[E, out, rank]");
    check_size(*b, 1, weight.size(1), b_name, "[E, out, rank]");
    check_size(*b, 2, a->size(1), b_name, "[E, out, rank]");
    check_width(*a, 1, a_name, "[E, rank, in]");
    return Adapter{as_contiguous(*a), as_contiguous(*b), scale, a->size(1), weight.size(2), weight.size(1)};
  }
};

// Rows of an adapter's rank: stored for the whole call, and as operands of one chunk.
struct ThinRows {
  Tensor stored;  // [R, rank]
  RowMajor operands;

  static Tensor make(const ExpertRows& args, const std::optional<Adapter>& adapter) {
    const Tensor rows = new_large(args.x, {args.R, adapter ? adapter->rank : 0}, args.x.scalar_type());
    zero_rows_from(rows, args.num_rows());
    return rows;
  }
};

// Jobs that threads do at the same time, in kinds that each have one function.
class Tasks {
 public:
  // body(i) for i in [0, count).
  template <class Body>
  void add(int64_t count, const Body& body) {
    kinds_.push_back({count_, body});
    count_ += count;
  }
  // body(job) for each job.
  template <class Body>
  void add(std::vector<Job> jobs, const Body& body) {
    const int64_t count = jobs.size();
    add(count, [jobs = std::move(jobs), body](int64_t i) { body(jobs[i]); });
  }

  void run() const {
    for_each_job(count_, [&](int64_t i) {
      auto kind = kinds_.rbegin();
      while (i < kind->begin) ++kind;
      kind->body(i - kind->begin);
    });
  }

 private:
  struct Kind {
    int64_t begin;  // its first job
    std::function<void(int64_t)> body;
  };
  std::vector<Kind> kinds_;
  int64_t count_ = 0;
};

// What the forward and the backward share: products of a chunk's rows with a weight, the adapter's part
// included.
class FrozenProducts {
 public:
  explicit FrozenProducts(const ExpertRows& args) : args_(args), kernels_(args.kernels) {}

  // Each product adds its jobs to tasks; what it is given lives until they have run.
  // An epilogue is called with (segment, tile, row, m, column): tile [m, nr] of the rows from `row` on,
  // counted from the segment's first one, and of the columns from `column` on.

  // body(part, row, m) for tiles of at most mr rows: where rows are few, a tile has all of them, which are
  // more than the adapter's product takes.
  template <class Body>
  void in_tiles(const Acc* tile, int64_t rows, const Body& body) const {
    for (int64_t row = 0; row < rows; row += kernels_.mr)
      body(kernels_.at(tile, row * kernels_.nr), row, std::min(kernels_.mr, rows - row));
  }

  // rows [.., in] times weight[e]^T, weight [E, out, in]. gated: a panel has nr / 2 gate columns, then the up
  // columns that belong to them.
  template <class Weight, class Epilogue>  // a Tensor, or a FrozenWeight
  void by_weight(Tasks& tasks, const Chunk& chunk, const RowMajor& rows, const Weight& weight, bool gated,
                 const Adapter* adapter, const RowMajor& thin, const Epilogue& epilogue) const {
    const int64_t out = weight.size(1), in = weight.size(2);
    const int64_t width = gated ? kernels_.nr / 2 : kernels_.nr, count = gated ? out / 2 : out;
    const int64_t chunk_begin = chunk.begin;
    tasks.add(panel_jobs(kernels_, chunk, divide_up(count, width), in), [=, this, &weight](const Job& job) {
      const Segment& segment = *job.segment;
      const int64_t first = segment.begin - chunk_begin;
      const auto columns = [&](const Tensor& t, int64_t depth, int64_t column, const Stored** pointers) {
        const Stored* rows_of_expert = args_.row_of(t, segment.expert * out, depth);
        if (gated)
          gated_columns(kernels_, rows_of_expert, count, depth, column, pointers);
        else
          weight_columns(kernels_, rows_of_expert, count, depth, column, pointers);
      };
      Added added(kernels_, adapter, kPackedPanels);
      const auto pack_factor = [&](int64_t p) {
        if (!adapter) return;
        const Stored* factor[kMaxPanelLanes];
        columns(adapter->b, adapter->rank, p * width, factor);
        kernels_.pack_columns(factor, adapter->rank, added.panel(p % kPackedPanels));
      };
      const auto take = [&](int64_t p, const Acc* tile, int64_t row, int64_t m) {
        in_tiles(tile, m, [&](const Acc* part, int64_t r, int64_t n) {
          if (adapter) part = added.to(part, p % kPackedPanels, thin.from(first + row + r), n);
          epilogue(segment, part, row + r, n, p * width);
        });
      };
      if constexpr (std::is_same_v<Weight, FrozenWeight>)
        if (weight.is_packed())
          return rows_by_packed(
              kernels_, job, rows.from(first), in, weight.integers(),
              [&](int64_t p, PackedRow* packed) {
                packed_columns(weight, segment.expert, gated, count, p * width, packed);
                pack_factor(p);
              },
              take);
      rows_by_weight(
          kernels_, job, rows.from(first), in,
          [&](int64_t p, const Stored** pointers) {
            columns(tensor_of(weight), in, p * width, pointers);
            pack_factor(p);
          },
          take);
    });
  }

  // rows [.., out] times weight[e], weight [E, out, in].
  template <class Weight, class Epilogue>
  void by_weight_transposed(Tasks& tasks, const Chunk& chunk, const RowMajor& rows, const Weight& weight,
                            const Adapter* adapter, const RowMajor& thin, const Epilogue& epilogue) const {
    const int64_t out = weight.size(1), in = weight.size(2);
    const int64_t chunk_begin = chunk.begin;
    tasks.add(
        panel_jobs(kernels_, chunk, divide_up(in, kernels_.nr), out), [=, this, &weight](const Job& job) {
          const Segment& segment = *job.segment;
          const int64_t first = segment.begin - chunk_begin;
          Added added(kernels_, adapter, job.end - job.begin);
          if (adapter && job.begin < job.end)
            pack_weight_rows(kernels_, args_.row_of(adapter->a, segment.expert * adapter->rank, in), in,
                             adapter->rank, job.begin, job.end - job.begin, added.panels());
          const auto take = [&](int64_t p, const Acc* tile, int64_t row, int64_t m) {
            in_tiles(tile, m, [&](const Acc* part, int64_t r, int64_t n) {
              if (adapter) part = added.to(part, p - job.begin, thin.from(first + row + r), n);
              epilogue(segment, part, row + r, n, p * kernels_.nr);
            });
          };
          if constexpr (std::is_same_v<Weight, FrozenWeight>)
            if (weight.is_packed())
              return rows_by_packed_transposed(
                  kernels_, job, rows.from(first), out,
                  [&](int64_t row) {
                    PackedRow packed;
                    weight.row(segment.expert, row, packed);
                    return packed;
                  },
                  in, take);
          rows_by_weight_transposed(kernels_, job, rows.from(first), out,
                                    args_.row_of(tensor_of(weight), segment.expert * out, in), in, take);
        });
  }

 private:
  // scale * tile, rounded, goes to the stored rows and from there to the operands.
  auto store_thin(const Chunk& chunk, const Adapter& adapter, const ThinRows& thin) const {
    RowScales scales(kernels_, kernels_.mr);
    for (int64_t i = 0; i < kernels_.mr; ++i) scales.set(i, adapter.scale);
    return [this, rank = adapter.rank, thin, scales, begin = chunk.begin](
               const Segment& segment, const Acc* tile, int64_t row, int64_t m, int64_t column) {
      const int64_t first = segment.begin + row, n = std::min(kernels_.nr, rank - column);
      Stored* const corner = kernels_.at(mutable_stored(thin.stored), first * rank + column);
      const Stored* rows[kMaxTileRows];
      for (int64_t r = 0; r < m; ++r) rows[r] = kernels_.at(corner, r * rank);
      kernels_.store(tile, m, n, nullptr, scales.at(0), corner, rank);
      kernels_.copy_rows(rows, m, n, thin.operands.at(first - begin, column), thin.operands.stride);
    };
  }

 public:
  // scale * rows [.., in] A[e]^T -> thin, A [E, rank, in].
  void reduce(Tasks& tasks, const Chunk& chunk, const RowMajor& rows, const Adapter& adapter,
              const ThinRows& thin) const {
    by_weight(tasks, chunk, rows, adapter.a, false, nullptr, {}, store_thin(chunk, adapter, thin));
  }
  // scale * rows [.., out] B[e] -> thin, B [E, out, rank].
  void reduce_transposed(Tasks& tasks, const Chunk& chunk, const RowMajor& rows, const Adapter& adapter,
                         const ThinRows& thin) const {
    by_weight_transposed(tasks, chunk, rows, adapter.b, nullptr, {}, store_thin(chunk, adapter, thin));
  }

 private:
  // The adapter's part of tiles: its packed panels, and room for a sum.
  class Added {
   public:
    Added(const Kernels& kernels, const Adapter* adapter, int64_t num_panels)
        : kernels_(kernels), rank_(adapter ? adapter->rank : 0) {
      if (adapter)
        memory_.reset(new char[kTileBytes + num_panels * panel_bytes(kernels, rank_, kernels.nr) + 64]);
    }
    Panels panels() { return Panels::in(sum() + kTileBytes, kernels_, rank_, kernels_.nr); }
    Operand* panel(int64_t p) { return panels().panel(p); }
    const Acc* to(const Acc* tile, int64_t p, const RowMajor& thin, int64_t m) {
      auto* total = reinterpret_cast<Acc*>(sum());
      kernels_.multiply_row_major(m, rank_, thin.data, thin.stride, panel(p), total);
      kernels_.accumulate(tile, m, kernels_.nr, total, kernels_.nr);
      return total;
    }

   private:
    char* sum() const {
      return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
    }
    const Kernels& kernels_;
    const int64_t rank_;
    std::unique_ptr<char[]> memory_;  // not filled with zeros, unlike a vector's
  };

  static const Tensor& tensor_of(const Tensor& weight) { return weight; }
  static const Tensor& tensor_of(const FrozenWeight& weight) { return weight.tensor(); }

  // The packed rows of a panel, as gated_columns() and weight_columns() order them.
  void packed_columns(const FrozenWeight& weight, int64_t expert, bool gated, int64_t count, int64_t column,
                      PackedRow* packed) const {
    const int64_t half = gated ? kernels_.nr / 2 : kernels_.nr;
    for (int64_t part = 0; part * half < kernels_.nr; ++part)
      fmoe_ext::packed_columns(weight, expert, part * count, count, column, half, packed + part * half);
  }

  const ExpertRows& args_;
  const Kernels& kernels_;
};

constexpr int64_t kFrozenWorkspace = 16 << 20;  // bytes, about, of the rows of one chunk

// Both weights of the experts, contiguous.
struct FrozenWeights {
  FrozenWeight w1, w2;
};

struct Adapters {
  std::optional<Adapter> first, second;  // of w1 and of w2

  Adapters(const Tensor& x, const FrozenWeights& weights, const std::optional<Tensor>& a1,
           const std::optional<Tensor>& b1, double scale1, const std::optional<Tensor>& a2,
           const std::optional<Tensor>& b2, double scale2)
      : first(Adapter::of(a1, b1, scale1, weights.w1, x, "lora_a1", "lora_b1")),
        second(Adapter::of(a2, b2, scale2, weights.w2, x, "lora_a2", "lora_b2")) {}
};

inline const Adapter* pointer_to(const std::optional<Adapter>& adapter) {
  return adapter ? &*adapter : nullptr;
}

inline int64_t rank_of(const std::optional<Adapter>& adapter) { return adapter ? adapter->rank : 0; }

// Rows of one chunk, one block after another.
class Blocks {
 public:
  Blocks(const Kernels& kernels, char* memory, int64_t num_rows)
      : kernels_(kernels), memory_(memory), num_rows_(num_rows) {}
  RowMajor next(int64_t columns) {
    if (columns == 0) return {};
    const RowMajor block{reinterpret_cast<Operand*>(memory_), RowMajor::stride_for(kernels_, columns),
                         kernels_.operand_bytes};
    memory_ = reinterpret_cast<char*>(block.at(num_rows_));
    return block;
  }

 private:
  const Kernels& kernels_;
  char* memory_;
  const int64_t num_rows_;
};

inline int64_t bytes_of_rows(const Kernels& kernels, std::initializer_list<int64_t> columns) {
  int64_t bytes = 0;
  for (const int64_t n : columns)
    if (n > 0) bytes += RowMajor::stride_for(kernels, n) * kernels.operand_bytes;
  return bytes;
}

// Operands [.., columns] of the chunk's rows; row(r) is the address of row r.
template <class Row>
void gather(Tasks& tasks, const Kernels& kernels, const Chunk& chunk, int64_t columns, const RowMajor& block,
            const Row& row) {
  constexpr int64_t kSlice = 64;
  tasks.add(divide_up(chunk.rows(), kSlice), [=, &kernels, &chunk](int64_t slice) {
    const int64_t begin = chunk.begin + slice * kSlice, end = std::min(begin + kSlice, chunk.end);
    const Stored* rows[kSlice];
    for (int64_t r = begin; r < end; ++r) rows[r - begin] = row(r);
    kernels.copy_rows(rows, end - begin, columns, block.at(begin - chunk.begin), block.stride);
  });
}

}  // namespace fmoe_ext::gemm
