// The balance loss of a gate, E * sum_e share_e * mean_t p[t, e]: share_e is expert e's share of counts, p
// the scores of a token divided by their sum.
//
// p [T, E] is not kept: the backward computes it again from the logits, which the gate keeps anyway.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "float_types.h"
#include "parallel.h"
#include "scores.h"
#include "topk_gate.h"

namespace fmoe_ext {
namespace {

constexpr int64_t kTokensPerJob = 256;

void check_balance_loss(const Tensor& logits, const Tensor& counts) {
  check_cpu(logits, "logits");
  check_cpu(counts, "counts");
  check_logits(logits);
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float || logits.scalar_type() == ScalarType::Double,
                  "logits must be float32 or float64, but got ", dtype_text(logits));
  check_dim(counts, 1, "counts", "[E]");
  check_size(counts, 0, logits.size(1), "counts", "[E]");
  STD_TORCH_CHECK(counts.scalar_type() == ScalarType::Long, "counts must be int64, but got ",
                  dtype_text(counts));
}

// p [E] of one token.
template <class A>
FMOE_INLINE void probabilities(const A* logits, int64_t E, bool is_sigmoid, A* p) {
  if (is_sigmoid) {
    const A largest = *std::max_element(logits, logits + E);
    // Where every sigmoid is all but exp, their ratios are those of a softmax, which does not underflow.
    if (!(largest < -40)) {
      A sum = 0;
      for (int64_t e = 0; e < E; ++e) sum += p[e] = sigmoid(logits[e]);
      for (int64_t e = 0; e < E; ++e) p[e] /= sum;
      return;
    }
  }
  const SoftmaxTotals<A> totals = softmax_totals(logits, E);
  for (int64_t e = 0; e < E; ++e) p[e] = exp_nonpositive(logits[e] - totals.largest) / totals.sum;
}

// d loss / d p[t, e], the same for every token.
template <class A>
std::vector<A> slopes(const int64_t* counts, int64_t num_tokens, int64_t E) {
  int64_t total = 0;
  for (int64_t e = 0; e < E; ++e) total += counts[e];
  const double factor = static_cast<double>(E) /
                        (static_cast<double>(std::max<int64_t>(total, 1)) * std::max<int64_t>(num_tokens, 1));
  std::vector<A> slope(E);
  for (int64_t e = 0; e < E; ++e) slope[e] = static_cast<A>(counts[e] * factor);
  return slope;
}

template <class Body>
void for_each_range(int64_t num_tokens, const Body& body) {
  for_each_job((num_tokens + kTokensPerJob - 1) / kTokensPerJob, [&](int64_t job) {
    body(job, job * kTokensPerJob, std::min(num_tokens, (job + 1) * kTokensPerJob));
  });
}

template <class A>
A loss_of(const A* logits, const int64_t* counts, int64_t num_tokens, int64_t E, bool is_sigmoid) {
  const std::vector<A> slope = slopes<A>(counts, num_tokens, E);
  // A sum a job, added in their order, so that the number of threads changes no bit.
  std::vector<double> sums((num_tokens + kTokensPerJob - 1) / kTokensPerJob);
  for_each_range(num_tokens, [&](int64_t job, int64_t begin, int64_t end) {
    std::vector<A> p(E);
    std::vector<double> of_expert(E);
    for (int64_t t = begin; t < end; ++t) {
      probabilities(logits + t * E, E, is_sigmoid, p.data());
      for (int64_t e = 0; e < E; ++e) of_expert[e] += p[e];
    }
    for (int64_t e = 0; e < E; ++e) sums[job] += of_expert[e] * slope[e];
  });
  double loss = 0;
  for (const double sum : sums) loss += sum;
  return static_cast<A>(loss);
}

template <class A>
void grads_of(A grad, const A* logits, const int64_t* counts, int64_t num_tokens, int64_t E, bool is_sigmoid,
              A* grad_logits) {
  const std::vector<A> slope = slopes<A>(counts, num_tokens, E);
  for_each_range(num_tokens, [&](int64_t, int64_t begin, int64_t end) {
    std::vector<A> p(E);
    for (int64_t t = begin; t < end; ++t) {
      const A* row = logits + t * E;
      A* to = grad_logits + t * E;
      probabilities(row, E, is_sigmoid, p.data());
      double dot = 0;
      for (int64_t e = 0; e < E; ++e) dot += static_cast<double>(p[e]) * slope[e];
      const A mean = static_cast<A>(dot);
      for (int64_t e = 0; e < E; ++e) to[e] = grad * p[e] * (slope[e] - mean);
      if (is_sigmoid)  // d log(sigmoid(x)) / dx
        for (int64_t e = 0; e < E; ++e) to[e] *= sigmoid(-row[e]);
    }
  });
}

}  // namespace

Tensor balance_loss_cpu(Tensor logits, Tensor counts, int64_t score) {
  check_balance_loss(logits, counts);
  const bool is_sigmoid = checked_sigmoid(score);
  const Tensor input = as_contiguous(logits), load = as_contiguous(counts);
  Tensor loss = torch::stable::new_empty(input, {});
  const auto compute = [&](auto tag) {
    using A = decltype(tag);
    *static_cast<A*>(loss.mutable_data_ptr()) =
        loss_of(static_cast<const A*>(input.const_data_ptr()),
                static_cast<const int64_t*>(load.const_data_ptr()), input.size(0), input.size(1), is_sigmoid);
  };
  input.scalar_type() == ScalarType::Double ? compute(double{}) : compute(float{});
  return loss;
}

namespace {

Tensor balance_loss_backward_cpu(Tensor grad, Tensor logits, Tensor counts, int64_t score) {
  check_gradient_mode("balance_loss_backward", "ops.balance_loss");
  check_cpu(grad, "grad");
  check_balance_loss(logits, counts);
  check_dim(grad, 0, "grad", "[]");
  check_same_dtype(grad, logits, "grad", "logits");
  const bool is_sigmoid = checked_sigmoid(score);
  const Tensor input = as_contiguous(logits), load = as_contiguous(counts);
  Tensor grad_logits = torch::stable::new_empty(input, {input.size(0), input.size(1)});
  const auto compute = [&](auto tag) {
    using A = decltype(tag);
    grads_of(*static_cast<const A*>(grad.const_data_ptr()), static_cast<const A*>(input.const_data_ptr()),
             static_cast<const int64_t*>(load.const_data_ptr()), input.size(0), input.size(1), is_sigmoid,
             static_cast<A*>(grad_logits.mutable_data_ptr()));
  };
  input.scalar_type() == ScalarType::Double ? compute(double{}) : compute(float{});
  return grad_logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("balance_loss", TORCH_BOX(&balance_loss_cpu));
  m.impl("balance_loss_backward", TORCH_BOX(&balance_loss_backward_cpu));
}

}  // namespace fmoe_ext
