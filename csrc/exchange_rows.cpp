// What a rank computes of its choices before and after rows travel to the ranks of their experts: five
// operators of fmoe_ext/ops/exchange_rows.py, whose shapes ops.cpp has.
//
// With exchange="choice" a row is one choice. With exchange="token" the choices of a token that go one way
// share a row; a way is a chunk of a rank's experts. The kind of a row is the number of its expert, or of its
// way, on the rank that gets it. Rows are sorted by that rank: the counts of rows say where each begins.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "topk_idx.h"

namespace fmoe_ext {
namespace {

void check_counts(const Tensor& counts, const char* name) {
  check_cpu(counts, name);
  STD_TORCH_CHECK(counts.scalar_type() == ScalarType::Long, name, " must be int64, but got ",
                  dtype_text(counts));
}

// Places in a buffer where the rows for rank w begin at w * max_rows; rows that do not fit are left out.
std::tuple<Tensor, Tensor> pad_routing_cpu(Tensor row_idx, Tensor inverse, Tensor tokens_per_expert,
                                           int64_t num_ranks, int64_t max_rows) {
  check_cpu(row_idx, "row_idx");
  check_int32(row_idx, "row_idx");
  check_dim(row_idx, 1, "row_idx", "[R]");
  check_cpu(inverse, "inverse");
  check_int32(inverse, "inverse");
  check_dim(inverse, 2, "inverse", "[T, K]");
  check_counts(tokens_per_expert, "tokens_per_expert");
  check_dim(tokens_per_expert, 1, "tokens_per_expert", "[W n]");
  STD_TORCH_CHECK(num_ranks >= 1 && tokens_per_expert.numel() % num_ranks == 0, "num_ranks must divide the ",
                  tokens_per_expert.numel(), " counts of tokens_per_expert, but is ", num_ranks);
  STD_TORCH_CHECK(max_rows >= 1 && max_rows <= INT32_MAX / num_ranks,
                  "max_rows must be at least 1 and fit into int32 for all ranks, but is ", max_rows);
  const Tensor rows = as_contiguous(row_idx), counts = as_contiguous(tokens_per_expert);
  Tensor padded = torch::stable::new_empty(rows, {num_ranks * max_rows});
  Tensor places = torch::stable::new_empty(rows, {inverse.size(0), inverse.size(1)});
  const auto* choice_of = static_cast<const int32_t*>(rows.const_data_ptr());
  const auto* count = static_cast<const int64_t*>(counts.const_data_ptr());
  auto* to = static_cast<int32_t*>(padded.mutable_data_ptr());
  auto* place = static_cast<int32_t*>(places.mutable_data_ptr());
  const int64_t num_kinds = counts.numel() / num_ranks, num_choices = places.numel();
  std::fill(to, to + padded.numel(), -1);
  std::fill(place, place + num_choices, -1);
  int64_t begin = 0;
  for (int64_t w = 0; w < num_ranks; ++w) {
    int64_t needed = 0;
    for (int64_t i = 0; i < num_kinds; ++i) needed += count[w * num_kinds + i];
    STD_TORCH_CHECK(needed >= 0 && begin + needed <= rows.numel(), "tokens_per_expert counts more than the ",
                    rows.numel(), " rows of row_idx");
    for (int64_t p = 0; p < std::min(needed, max_rows); ++p) {
      const int64_t choice = choice_of[begin + p];
      STD_TORCH_CHECK(choice >= 0 && choice < num_choices, "row_idx must be in [0, T * K = ", num_choices,
                      ") before tokens_per_expert ends, but element ", begin + p, " is ", choice);
      to[w * max_rows + p] = static_cast<int32_t>(choice);
      place[choice] = static_cast<int32_t>(w * max_rows + p);
    }
    begin += needed;
  }
  return {padded, places};
}

// What a rank tells each other one: the header, the most rows that it has for one rank, its counts.
Tensor counts_to_send_cpu(Tensor counts, Tensor header, std::optional<Tensor> order, int64_t num_ranks,
                          bool has_most) {
  check_counts(counts, "counts");
  check_dim(counts, 1, "counts", "[W n]");
  check_counts(header, "header");
  check_dim(header, 1, "header", "[h]");
  const int64_t num_counts = counts.numel();
  STD_TORCH_CHECK(num_ranks >= 1 && num_counts % num_ranks == 0, "num_ranks must divide the ", num_counts,
                  " counts, but is ", num_ranks);
  const int64_t* place = nullptr;
  Tensor table;
  if (order) {
    check_counts(*order, "order");
    check_dim(*order, 1, "order", "[W n]");
    check_size(*order, 0, num_counts, "order", "[W n]");
    table = as_contiguous(*order);
    place = static_cast<const int64_t*>(table.const_data_ptr());
    for (int64_t i = 0; i < num_counts; ++i)
      STD_TORCH_CHECK(place[i] >= 0 && place[i] < num_counts, "order must be in [0, W n = ", num_counts,
                      "), but element ", i, " is ", place[i]);
  }
  const Tensor input = as_contiguous(counts), first = as_contiguous(header);
  const int64_t n = num_counts / num_ranks, length = first.numel() + has_most;
  Tensor sent = torch::stable::new_empty(input, {num_ranks, length + n});
  const auto* count = static_cast<const int64_t*>(input.const_data_ptr());
  const auto* begin = static_cast<const int64_t*>(first.const_data_ptr());
  auto* to = static_cast<int64_t*>(sent.mutable_data_ptr());
  int64_t most = 0;
  for (int64_t w = 0; w < num_ranks; ++w) {
    int64_t *row = to + w * (length + n), rows = 0;
    std::copy(begin, begin + first.numel(), row);
    for (int64_t i = w * n; i < (w + 1) * n; ++i)
      rows += *(row + length + i - w * n) = count[place ? place[i] : i];
    most = std::max(most, rows);
  }
  if (has_most)
    for (int64_t w = 0; w < num_ranks; ++w) to[w * (length + n) + length - 1] = most;
  return sent;
}

// Of each row that came from W ranks, the kind counted from `first` on, with the kinds first .. end - 1 of
// counts [W, n]: rows come rank by rank, each rank's by kind. With max_rows, -1 fills up those of a rank.
Tensor columns_of_rows_cpu(Tensor counts, int64_t first, int64_t end, int64_t max_rows, int64_t num_rows) {
  check_counts(counts, "counts");
  check_dim(counts, 2, "counts", "[W, n]");
  const Tensor input = as_contiguous(counts);
  const int64_t W = input.size(0), n = input.size(1);
  STD_TORCH_CHECK(0 <= first && first <= end && end <= n, "first and end must bound some of the ", n,
                  " columns of counts, but are ", first, " and ", end);
  const auto* count = static_cast<const int64_t*>(input.const_data_ptr());
  int64_t total = 0;
  for (int64_t i = 0; i < W * n; ++i) {
    if (i % n < first || i % n >= end) continue;
    STD_TORCH_CHECK(count[i] >= 0 && count[i] <= INT32_MAX, "counts must be in [0, 2^31), but element ", i,
                    " is ", count[i]);
    total += count[i];
  }
  STD_TORCH_CHECK(max_rows >= 0 && max_rows <= INT32_MAX, "max_rows must be in [0, 2^31), but is ", max_rows);
  const int64_t expected = max_rows ? W * max_rows : total;
  STD_TORCH_CHECK(num_rows == expected, "num_rows must be ", expected, ", as counts",
                  max_rows ? " of max_rows each" : "", " say, but is ", num_rows);
  Tensor columns = torch::stable::new_empty(input, {num_rows, 1}, ScalarType::Int);
  auto* to = static_cast<int32_t*>(columns.mutable_data_ptr());
  int64_t row = 0;
  for (int64_t w = 0; w < W; ++w) {
    // the rows of a rank end where its counts do, or are as many as max_rows says
    const int64_t last = max_rows ? (w + 1) * max_rows : num_rows;
    for (int64_t column = first; column < end; ++column) {
      const int64_t here = std::min(count[w * n + column], last - row);
      std::fill(to + row, to + row + here, static_cast<int32_t>(column - first));
      row += here;
    }
    if (max_rows) {
      std::fill(to + row, to + last, -1);
      row = last;
    }
  }
  return columns;
}

// Of each choice its way, and the same with -1 where an earlier choice of the token goes that way already:
// the choices of `first` are the rows that are sent.
std::tuple<Tensor, Tensor> token_ways_cpu(Tensor topk_idx, Tensor ways) {
  check_cpu(topk_idx, "topk_idx");
  check_counts(ways, "ways");
  check_dim(ways, 1, "ways", "[E]");
  check_topk_idx(topk_idx, ways.numel());
  const Tensor idx = as_contiguous(topk_idx), table = as_contiguous(ways);
  const int64_t T = idx.size(0), K = idx.size(1), E = table.numel();
  Tensor way = torch::stable::new_empty(idx, {T, K}, ScalarType::Long);
  Tensor first = torch::stable::new_empty(idx, {T, K}, ScalarType::Long);
  const auto* way_of = static_cast<const int64_t*>(table.const_data_ptr());
  auto *to = static_cast<int64_t*>(way.mutable_data_ptr()),
       *once = static_cast<int64_t*>(first.mutable_data_ptr());
  dispatch_index(idx, [&](auto* data) {
    for (int64_t t = 0; t < T; ++t) {
      const int64_t begin = t * K;
      for (int64_t i = begin; i < begin + K; ++i) {
        const int64_t e = data[i];
        if (e < -1 || e >= E) throw_bad_expert(e, i, E);
        to[i] = e < 0 ? -1 : way_of[e];
        once[i] = std::find(to + begin, to + i, to[i]) == to + i ? to[i] : -1;
      }
    }
  });
  return {way, first};
}

// Of each row that is sent, the local numbers of the experts that its token chose on this way, -1 for its
// other choices.
Tensor experts_of_rows_cpu(Tensor topk_idx, Tensor way, Tensor local, Tensor row_idx, bool wide) {
  check_cpu(topk_idx, "topk_idx");
  check_counts(local, "local");
  check_dim(local, 1, "local", "[E]");
  check_topk_idx(topk_idx, local.numel());
  check_counts(way, "way");
  check_dim(way, 2, "way", "[T, K]");
  check_size(way, 0, topk_idx.size(0), "way", "[T, K]");
  check_size(way, 1, topk_idx.size(1), "way", "[T, K]");
  check_cpu(row_idx, "row_idx");
  check_int32(row_idx, "row_idx");
  check_dim(row_idx, 1, "row_idx", "[R]");
  const Tensor idx = as_contiguous(topk_idx), ways = as_contiguous(way), table = as_contiguous(local),
               rows = as_contiguous(row_idx);
  const int64_t K = idx.size(1), E = table.numel(), R = rows.numel(), num_choices = idx.numel();
  Tensor experts = torch::stable::new_empty(idx, {R, K}, wide ? ScalarType::Int : ScalarType::Short);
  const auto* way_of = static_cast<const int64_t*>(ways.const_data_ptr());
  const auto* local_of = static_cast<const int64_t*>(table.const_data_ptr());
  const auto* choice_of = static_cast<const int32_t*>(rows.const_data_ptr());
  dispatch_index(idx, [&](auto* data) {
    const auto fill = [&](auto* to) {
      using label_t = std::remove_pointer_t<decltype(to)>;
      for (int64_t r = 0; r < R; ++r, to += K) {
        const int64_t choice = choice_of[r];
        STD_TORCH_CHECK(choice >= -1 && choice < num_choices, "row_idx must be in [-1, T * K = ", num_choices,
                        "), but element ", r, " is ", choice);
        std::fill(to, to + K, label_t(-1));
        if (choice < 0) continue;
        const int64_t begin = choice / K * K;
        for (int64_t k = 0; k < K; ++k) {
          const int64_t e = data[begin + k];
          if (e < -1 || e >= E) throw_bad_expert(e, begin + k, E);
          if (e >= 0 && way_of[begin + k] == way_of[choice]) to[k] = static_cast<label_t>(local_of[e]);
        }
      }
    };
    if (wide)
      fill(static_cast<int32_t*>(experts.mutable_data_ptr()));
    else
      fill(static_cast<int16_t*>(experts.mutable_data_ptr()));
  });
  return experts;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("_pad_routing", TORCH_BOX(&pad_routing_cpu));
  m.impl("_counts_to_send", TORCH_BOX(&counts_to_send_cpu));
  m.impl("_columns_of_rows", TORCH_BOX(&columns_of_rows_cpu));
  m.impl("_token_ways", TORCH_BOX(&token_ways_cpu));
  m.impl("_experts_of_rows", TORCH_BOX(&experts_of_rows_cpu));
}

}  // namespace fmoe_ext
