// apply_capacity and drop_choices on the CPU: topk_idx [T, K] -> the same with -1 for choices over each
// expert's capacity. Priority: all first choices in token order, then all second choices, and so on; a
// token's first choice is thus never dropped in favour of another token's second.
//
// The histograms that rank the choices are what a balance loss counts: drop_choices returns them too.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "float_types.h"
#include "topk_idx.h"

namespace fmoe_ext {
namespace {

void check_not_negative(const Tensor& capacity) {
  const Tensor values = as_contiguous(capacity);
  const auto* data = static_cast<const int64_t*>(values.const_data_ptr());
  for (int64_t e = 0; e < values.numel(); ++e)
    STD_TORCH_CHECK(data[e] >= 0, "capacity must not be negative, but expert ", e, " has ", data[e]);
}

// limit(e): choices that expert e takes. counts [K, E], if given: first, second, ... choices before any is
// dropped.
template <class index_t, class Limit>
void apply_capacity(const index_t* idx, const TokenChunks& chunks, int64_t num_experts, const Limit& limit,
                    index_t* kept, int64_t* counts = nullptr) {
  const int64_t num_choices = chunks.num_choices, histogram_size = num_choices * num_experts;
  std::vector<int32_t> cursors =
      count_chunks(idx, chunks, num_experts, /*by_choice=*/true);  // [num_chunks, K, E]
  for (int64_t e = 0; e < num_experts; ++e) {
    int32_t rank = 0;
    for (int64_t k = 0; k < num_choices; ++k) {
      const int32_t before = rank;
      for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk) {
        int32_t& cursor = cursors[chunk * histogram_size + k * num_experts + e];
        const int32_t count = cursor;
        cursor = rank;
        rank += count;
      }
      if (counts) counts[k * num_experts + e] = rank - before;
    }
  }
  for_each_job(chunks.num_chunks, [&](int64_t chunk) {
    int32_t* mine = cursors.data() + chunk * histogram_size;
    const int64_t end = chunks.end(chunk);
    for (int64_t i = chunks.begin(chunk); i < end;) {
      for (int64_t k = 0; k < num_choices; ++k, ++i) {
        const index_t e = idx[i];
        kept[i] = e >= 0 && mine[k * num_experts + e]++ < limit(e) ? e : -1;
      }
    }
  });
}

Tensor apply_capacity_cpu(Tensor topk_idx, Tensor capacity) {
  check_cpu(capacity, "capacity");
  check_cpu(topk_idx, "topk_idx");
  check_apply_capacity(topk_idx, capacity);
  check_not_negative(capacity);
  const int64_t num_experts = capacity.numel();
  Tensor idx = as_contiguous(topk_idx), limits = as_contiguous(capacity);
  Tensor kept = torch::stable::new_empty(idx, {idx.size(0), idx.size(1)});
  dispatch_index(idx, [&](auto* data) {
    using index_t = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    const auto* limit = static_cast<const int64_t*>(limits.const_data_ptr());
    apply_capacity(
        data, TokenChunks(idx, idx.size(1) * num_experts), num_experts, [&](index_t e) { return limit[e]; },
        static_cast<index_t*>(kept.mutable_data_ptr()));
  });
  return kept;
}

// GShard's random routing: drops a choice after the first, of weight w, with probability max(0, 1 - 2 w).
template <class index_t, class T>
void drop_at_random(const T* weights, const T* uniform, int64_t num_tokens, int64_t num_choices,
                    index_t* kept) {
  for (int64_t t = 0; t < num_tokens; ++t)
    for (int64_t k = 1; k < num_choices; ++k)
      if (2 * weights[t * num_choices + k] < uniform[t]) kept[t * num_choices + k] = -1;
}

void check_uniform(const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& uniform) {
  check_cpu(topk_weights, "topk_weights");
  check_cpu(uniform, "uniform");
  check_dim(topk_weights, 2, "topk_weights", "[T, K]");
  check_size(topk_weights, 0, topk_idx.size(0), "topk_weights", "[T, K]");
  check_size(topk_weights, 1, topk_idx.size(1), "topk_weights", "[T, K]");
  STD_TORCH_CHECK(
      topk_weights.scalar_type() == ScalarType::Float || topk_weights.scalar_type() == ScalarType::Double,
      "topk_weights must be float32 or float64, but got ", dtype_text(topk_weights));
  check_dim(uniform, 1, "uniform", "[T]");
  check_size(uniform, 0, topk_idx.size(0), "uniform", "[T]");
  check_same_dtype(uniform, topk_weights, "uniform", "topk_weights");
}

std::tuple<Tensor, Tensor> drop_choices_cpu(Tensor topk_idx, int64_t num_experts, int64_t capacity,
                                            std::optional<Tensor> topk_weights,
                                            std::optional<Tensor> uniform) {
  check_cpu(topk_idx, "topk_idx");
  check_topk_idx(topk_idx, num_experts);
  STD_TORCH_CHECK(capacity >= 0, "capacity must not be negative, but got ", capacity);
  STD_TORCH_CHECK(topk_weights.has_value() == uniform.has_value(),
                  "topk_weights and uniform must both be given, or none of them");
  if (uniform) check_uniform(topk_idx, *topk_weights, *uniform);
  const int64_t num_tokens = topk_idx.size(0), num_choices = topk_idx.size(1);
  const Tensor idx = as_contiguous(topk_idx);
  Tensor kept = torch::stable::new_empty(idx, {num_tokens, num_choices});
  Tensor counts = torch::stable::new_empty(idx, {num_choices, num_experts}, ScalarType::Long);
  dispatch_index(idx, [&](auto* data) {
    using index_t = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    auto* to = static_cast<index_t*>(kept.mutable_data_ptr());
    apply_capacity(
        data, TokenChunks(idx, num_choices * num_experts), num_experts, [&](index_t) { return capacity; }, to,
        static_cast<int64_t*>(counts.mutable_data_ptr()));
    if (!uniform) return;
    const Tensor weights = as_contiguous(*topk_weights), random = as_contiguous(*uniform);
    const auto drop = [&](auto tag) {
      using T = decltype(tag);
      drop_at_random(static_cast<const T*>(weights.const_data_ptr()),
                     static_cast<const T*>(random.const_data_ptr()), num_tokens, num_choices, to);
    };
    weights.scalar_type() == ScalarType::Double ? drop(double{}) : drop(float{});
  });
  return {kept, counts};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("apply_capacity", TORCH_BOX(&apply_capacity_cpu));
  m.impl("drop_choices", TORCH_BOX(&drop_choices_cpu));
}

}  // namespace fmoe_ext
