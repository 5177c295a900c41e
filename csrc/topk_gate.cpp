// topk_gate, its backward and _choose_experts on the CPU, logits [T, E] -> topk_idx, topk_weights [T, K].
//
// Scores, group-limited selection and weights of one token at a time, all of it in the first-level cache:
// gate_token(), and gate_backward_tokens() for the gradient. A weight is the softmax or sigmoid of a chosen
// logit, divided by the sum over the chosen if normalize, times scale.
//
// Without a bias the experts are ordered by logit: both scores grow with it, and no two logits merge by
// rounding.

#include "topk_gate.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu_features.h"
#include "float_types.h"
#include "huge_pages.h"
#include "parallel.h"
#include "scores.h"
#include "stream_row.h"
#include "topk_idx.h"
#include "topk_select.h"

namespace fmoe_ext {
namespace {

constexpr int64_t kTokensPerJob = 256;

struct Gate {
  int64_t num_experts, top_k;
  bool sigmoid, normalize;
  int64_t num_groups, topk_groups;
  double scale;
};

// softmax over the chosen logits
template <class A>
FMOE_INLINE void softmax_chosen(const A* logits, const int64_t* idx, int64_t top_k, A* weights) {
  A largest = logits[idx[0]];
  double sum = 0;
  for (int64_t k = 1; k < top_k; ++k) largest = logits[idx[k]] > largest ? logits[idx[k]] : largest;
  for (int64_t k = 0; k < top_k; ++k) sum += weights[k] = exp_nonpositive(logits[idx[k]] - largest);
  for (int64_t k = 0; k < top_k; ++k) weights[k] = static_cast<A>(weights[k] / sum);
}

template <class A>
FMOE_INLINE void sigmoid_chosen(const A* logits, const int64_t* idx, int64_t top_k, bool normalize,
                                A* weights) {
  A largest = logits[idx[0]];
  double sum = 0;
  for (int64_t k = 1; k < top_k; ++k) largest = logits[idx[k]] > largest ? logits[idx[k]] : largest;
  // Where every sigmoid is all but exp, their ratios are those of a softmax, which does not underflow.
  if (normalize && largest < -40) return softmax_chosen(logits, idx, top_k, weights);
  for (int64_t k = 0; k < top_k; ++k) sum += weights[k] = sigmoid(logits[idx[k]]);
  if (normalize)
    for (int64_t k = 0; k < top_k; ++k) weights[k] = static_cast<A>(weights[k] / sum);
}

template <class A>
struct GateBuffers {
  using Key = decltype(order_key(A{}));

  explicit GateBuffers(const Gate& gate)
      : logits(gate.num_experts),
        scores(gate.num_experts),
        weights(gate.top_k),
        keys((gate.num_experts + 15) / 16 * 16, kRemovedKey<Key>),
        group_keys(gate.num_groups),
        groups(gate.topk_groups) {}

  std::vector<A> logits, scores, weights;
  std::vector<Key> keys, group_keys;
  std::vector<int64_t> groups;
};

// The rank of a group: the sum of its two best scores, or its best logit.
template <class A>
FMOE_INLINE A group_rank(const A* values, int64_t num, bool two_best) {
  A first = -std::numeric_limits<A>::infinity(), second = first, nan = 0;
  for (int64_t e = 0; e < num; ++e) {
    const A v = values[e], low = v < first ? v : first;
    first = v > first ? v : first;
    second = low > second ? low : second;
    nan = v == v ? nan : v;
  }
  return nan + (two_best && num > 1 ? first + second : first);
}

template <class A>
FMOE_INLINE void keep_best_groups(const Gate& gate, const A* values, bool two_best, GateBuffers<A>& buffers) {
  const int64_t size = gate.num_experts / gate.num_groups;
  for (int64_t g = 0; g < gate.num_groups; ++g)
    buffers.group_keys[g] = order_key(group_rank(values + g * size, size, two_best));
  PortableSelect::select(buffers.group_keys.data(), gate.num_groups, gate.topk_groups, buffers.groups.data());
  auto* keys = buffers.keys.data();
  auto* kept_end = buffers.groups.data() + gate.topk_groups;
  for (int64_t g = 0; g < gate.num_groups; ++g)
    if (std::find(buffers.groups.data(), kept_end, g) == kept_end)
      std::fill(keys + g * size, keys + (g + 1) * size, kRemovedKey<typename GateBuffers<A>::Key>);
}

template <class Select, class A>
FMOE_INLINE void gate_token(const Gate& gate, const A* logits, const A* bias, GateBuffers<A>& buffers,
                            int64_t* idx) {
  const int64_t num_experts = gate.num_experts;
  const bool limited = gate.topk_groups < gate.num_groups;
  A* scores = buffers.scores.data();
  SoftmaxTotals<A> totals{};
  if (!gate.sigmoid && (bias || !gate.normalize)) totals = softmax_totals(logits, num_experts);
  if (gate.sigmoid && (bias || limited))
    for (int64_t e = 0; e < num_experts; ++e) scores[e] = sigmoid(logits[e]);
  if (!gate.sigmoid && bias)
    for (int64_t e = 0; e < num_experts; ++e)
      scores[e] = exp_nonpositive(logits[e] - totals.largest) / totals.sum;
  if (bias)
    for (int64_t e = 0; e < num_experts; ++e) scores[e] += bias[e];

  auto* keys = buffers.keys.data();
  const A* order = bias ? scores : logits;
  for (int64_t e = 0; e < num_experts; ++e) keys[e] = order_key(order[e]);
  if (limited) {
    const bool two_best = bias || gate.sigmoid;
    keep_best_groups(gate, two_best ? scores : logits, two_best, buffers);
  }
  const int64_t num_keys =
      (num_experts + Select::kKeysAtATime - 1) / Select::kKeysAtATime * Select::kKeysAtATime;
  Select::select(keys, num_keys, gate.top_k, idx);

  A* weights = buffers.weights.data();
  if (gate.sigmoid) {
    sigmoid_chosen(logits, idx, gate.top_k, gate.normalize, weights);
  } else if (gate.normalize) {
    softmax_chosen(logits, idx, gate.top_k, weights);
  } else {
    for (int64_t k = 0; k < gate.top_k; ++k)
      weights[k] = exp_nonpositive(logits[idx[k]] - totals.largest) / totals.sum;
  }
  // With a bias, the logit that makes a softmax undefined need not be among the chosen.
  if (totals.sum != totals.sum) std::fill(weights, weights + gate.top_k, totals.sum);
}

template <class T, class A = compute_t<T>>
struct GateArgs {
  const Gate& gate;
  const T* logits;  // [T, E]
  const A* bias;    // [E] or null
  int64_t* idx;     // [T, K]
  T* weights;       // [T, K]
};

template <class Select, class T, class A = compute_t<T>>
FMOE_INLINE void gate_tokens(const GateArgs<T>& args, int64_t begin, int64_t end) {
  const Gate& gate = args.gate;
  GateBuffers<A> buffers(gate);
  for (int64_t t = begin; t < end; ++t) {
    const T* row = args.logits + t * gate.num_experts;
    const A* logits;
    if constexpr (std::is_same_v<T, A>) {
      logits = row;
    } else {
      for (int64_t e = 0; e < gate.num_experts; ++e) buffers.logits[e] = static_cast<A>(row[e]);
      logits = buffers.logits.data();
    }
    gate_token<Select>(gate, logits, args.bias, buffers, args.idx + t * gate.top_k);
    for (int64_t k = 0; k < gate.top_k; ++k)
      args.weights[t * gate.top_k + k] = static_cast<T>(buffers.weights[k] * static_cast<A>(gate.scale));
  }
}

template <class T>
void gate_tokens_portable(const GateArgs<T>& args, int64_t begin, int64_t end) {
  gate_tokens<PortableSelect>(args, begin, end);
}

#if FMOE_X86
template <class T>
FMOE_AVX512 void gate_tokens_avx512(const GateArgs<T>& args, int64_t begin, int64_t end) {
  gate_tokens<Avx512Select>(args, begin, end);
}
#endif

template <class T>
auto best_gate_tokens(int64_t num_experts) {
#if FMOE_X86
  if constexpr (!std::is_same_v<T, double>)
    if (use_avx512() && num_experts <= Avx512Select::kMaxKeys) return gate_tokens_avx512<T>;
#endif
  return gate_tokens_portable<T>;
}

template <class Body>
void for_each_token_range(int64_t num_tokens, const Body& body) {
  for_each_job((num_tokens + kTokensPerJob - 1) / kTokensPerJob, [&](int64_t job) {
    body(job * kTokensPerJob, std::min(num_tokens, (job + 1) * kTokensPerJob));
  });
}

std::tuple<Tensor, Tensor> topk_gate_cpu(Tensor logits, int64_t top_k, int64_t score, bool normalize,
                                         std::optional<Tensor> bias, int64_t num_groups, int64_t topk_groups,
                                         double scale) {
  check_cpu(logits, "logits");
  check_topk_gate(logits, top_k, bias, num_groups, topk_groups);
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
  const Gate gate{num_experts, top_k, checked_sigmoid(score), normalize, num_groups, topk_groups, scale};
  std::optional<Tensor> shift;
  if (bias) {
    check_cpu(*bias, "bias");
    const auto compute = logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    shift = as_contiguous(torch::stable::to(*bias, compute));
  }
  const Tensor input = as_contiguous(logits);
  Tensor idx = torch::stable::new_empty(input, {num_tokens, top_k}, ScalarType::Long);
  Tensor weights = torch::stable::new_empty(input, {num_tokens, top_k});
  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const GateArgs<T> args{gate, static_cast<const T*>(input.const_data_ptr()),
                           shift ? static_cast<const compute_t<T>*>(shift->const_data_ptr()) : nullptr,
                           static_cast<int64_t*>(idx.mutable_data_ptr()),
                           static_cast<T*>(weights.mutable_data_ptr())};
    const auto kernel = best_gate_tokens<T>(num_experts);
    for_each_token_range(num_tokens, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
  return {idx, weights};
}

// The whole gate of a softmax on one rank: topk_gate, and the balance loss of each token's first num_counted
// choices. Without a kernel for autograd, for a node of ours.
std::tuple<Tensor, Tensor, Tensor, Tensor> choose_experts_cpu(Tensor logits, int64_t top_k, bool normalize,
                                                              int64_t num_counted) {
  auto [idx, weights] = topk_gate_cpu(logits, top_k, /*score=*/0, normalize, std::nullopt, 1, 1, 1.0);
  STD_TORCH_CHECK(num_counted >= 0 && num_counted <= top_k, "num_counted must be in [0, top_k] = [0, ", top_k,
                  "], but got ", num_counted);
  if (num_counted == 0)
    return {idx, weights, torch::stable::new_empty(idx, {0}), torch::stable::new_empty(weights, {0})};
  const int64_t num_experts = logits.size(1), histogram_size = top_k * num_experts;
  Tensor counts = torch::stable::new_zeros(idx, {num_experts});
  auto* total = static_cast<int64_t*>(counts.mutable_data_ptr());
  const TokenChunks chunks(idx, histogram_size);
  const std::vector<int32_t> found = count_chunks(static_cast<const int64_t*>(idx.const_data_ptr()), chunks,
                                                  num_experts, /*by_choice=*/true);
  for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk)
    for (int64_t i = 0; i < num_counted * num_experts; ++i)
      total[i % num_experts] += found[chunk * histogram_size + i];
  return {idx, weights, counts, balance_loss_cpu(logits, counts, /*score=*/0)};
}

template <class T>
struct GateBackwardArgs {
  const Gate& gate;
  const T* grad_weights;  // [T, K]
  const T* logits;        // [T, E]
  const int64_t* idx;     // [T, K]
  const T* weights;       // [T, K]
  T* grad_logits;         // [T, E]
  int64_t num_tokens;
};

[[gnu::cold, gnu::noinline]] void throw_bad_choice(int64_t e, int64_t i, int64_t num_experts) {
  STD_TORCH_CHECK(false, "topk_idx must be in [0, ", num_experts, "), but element ", i, " is ", e);
}

// grad_logits of tokens begin to end. Of a softmax over all experts (dense) every logit has a gradient; else
// only the chosen ones, whose row is built in a buffer that is zero between tokens.
template <class T, class A = compute_t<T>>
FMOE_INLINE void gate_backward_tokens(const GateBackwardArgs<T>& args, int64_t begin, int64_t end) {
  const Gate& gate = args.gate;
  const int64_t E = gate.num_experts, K = gate.top_k;
  const A scale = static_cast<A>(gate.scale);
  const bool dense = !gate.sigmoid && !gate.normalize;
  const RowWriter writer(args.grad_logits, args.num_tokens, E * sizeof(T));
  std::vector<T> row(E, T(0));
  std::vector<A> wide(dense ? E : 0), dense_row(dense ? E : 0);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t* idx = args.idx + t * K;
    const T *grad = args.grad_weights + t * K, *weights = args.weights + t * K, *logits = args.logits + t * E;
    for (int64_t k = 0; k < K; ++k)
      if (idx[k] < 0 || idx[k] >= E) throw_bad_choice(idx[k], t * K + k, E);
    double dot = 0, sum = 0;
    if (dense) {
      for (int64_t e = 0; e < E; ++e) wide[e] = static_cast<A>(logits[e]);
      const SoftmaxTotals<A> totals = softmax_totals(wide.data(), E);
      for (int64_t e = 0; e < E; ++e) wide[e] = exp_nonpositive(wide[e] - totals.largest) / totals.sum;
      for (int64_t k = 0; k < K; ++k) dot += static_cast<double>(grad[k]) * wide[idx[k]];
      const A shared = static_cast<A>(dot);
      for (int64_t e = 0; e < E; ++e) dense_row[e] = -shared * scale * wide[e];
      for (int64_t k = 0; k < K; ++k)
        dense_row[idx[k]] = (static_cast<A>(grad[k]) - shared) * scale * wide[idx[k]];
      for (int64_t e = 0; e < E; ++e) row[e] = static_cast<T>(dense_row[e]);
      writer.copy(t, row.data());
      continue;
    }
    if (gate.normalize) {
      for (int64_t k = 0; k < K; ++k) {
        dot += static_cast<double>(grad[k]) * static_cast<double>(weights[k]);
        sum += static_cast<double>(weights[k]);
      }
      dot = sum == 0 ? 0 : dot / sum;  // the sum is scale, up to rounding that cancels here
    }
    const A shared = static_cast<A>(dot);
    for (int64_t k = 0; k < K; ++k) {
      const A logit = gate.sigmoid ? static_cast<A>(logits[idx[k]]) : A{0};
      const A weight = gate.normalize ? static_cast<A>(weights[k]) : sigmoid(logit) * scale;
      const A slope = gate.sigmoid ? sigmoid(-logit) : A{1};
      row[idx[k]] = static_cast<T>(weight * (static_cast<A>(grad[k]) - shared) * slope);
    }
    writer.copy(t, row.data());
    for (int64_t k = 0; k < K; ++k) row[idx[k]] = T(0);
  }
  writer.finish();
}

template <class T>
void gate_backward_tokens_portable(const GateBackwardArgs<T>& args, int64_t begin, int64_t end) {
  gate_backward_tokens(args, begin, end);
}

#if FMOE_X86
template <class T>
FMOE_AVX512 void gate_backward_tokens_avx512(const GateBackwardArgs<T>& args, int64_t begin, int64_t end) {
  gate_backward_tokens(args, begin, end);
}
#endif

Tensor topk_gate_backward_cpu(Tensor grad_weights, Tensor logits, Tensor topk_idx, Tensor topk_weights,
                              int64_t score, bool normalize, double scale) {
  check_cpu(grad_weights, "grad_weights");
  check_cpu(logits, "logits");
  check_cpu(topk_idx, "topk_idx");
  check_cpu(topk_weights, "topk_weights");
  check_topk_gate_backward(grad_weights, logits, topk_idx, topk_weights);
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1), top_k = topk_idx.size(1);
  const Gate gate{num_experts, top_k, checked_sigmoid(score), normalize, 1, 1, scale};
  const Tensor grad = as_contiguous(grad_weights), input = as_contiguous(logits),
               idx = as_contiguous(topk_idx), weights = as_contiguous(topk_weights);
  Tensor grad_logits = torch::stable::new_empty(input, {num_tokens, num_experts});
  advise_huge_pages(grad_logits.mutable_data_ptr(), grad_logits.numel() * grad_logits.element_size());
  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const GateBackwardArgs<T> args{gate,
                                   static_cast<const T*>(grad.const_data_ptr()),
                                   static_cast<const T*>(input.const_data_ptr()),
                                   static_cast<const int64_t*>(idx.const_data_ptr()),
                                   static_cast<const T*>(weights.const_data_ptr()),
                                   static_cast<T*>(grad_logits.mutable_data_ptr()),
                                   num_tokens};
    auto kernel = gate_backward_tokens_portable<T>;
#if FMOE_X86
    if (use_avx512()) kernel = gate_backward_tokens_avx512<T>;
#endif
    for_each_token_range(num_tokens, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
  return grad_logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("topk_gate", TORCH_BOX(&topk_gate_cpu));
  m.impl("_choose_experts", TORCH_BOX(&choose_experts_cpu));
  m.impl("topk_gate_backward", TORCH_BOX(&topk_gate_backward_cpu));
}

}  // namespace fmoe_ext
