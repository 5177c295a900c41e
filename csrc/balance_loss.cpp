// balance_loss and its backward on the CPU: the balance loss of a gate, E * sum_e share_e * mean_t p[t, e].
// share_e is expert e's share of counts, p the scores of a token divided by their sum. _choose_experts
// (topk_gate.cpp) calls it too.
//
// p [T, E] is not kept: the backward computes it again from the logits, which the gate keeps anyway.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu_features.h"
#include "float_types.h"
#include "parallel.h"
#include "scores.h"
#include "simd.h"
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

template <class A>
struct LossArgs {
  const A* logits;  // [T, E]
  const A* slope;   // [E]
  int64_t E;
  bool is_sigmoid;
};

// Tokens are taken kLanes at a time, their values turned to [E, kLanes]: every step is one vector for each
// expert, whatever E is, and no sum runs across a vector.
constexpr int64_t kLanes = 16;

// What num <= kLanes tokens have, past them the last one again: p = score / sum.
template <class A>
struct TokenScores {
  explicit TokenScores(int64_t E) : score(E * kLanes) {}

  std::vector<A> score;  // [E, kLanes]
  A sum[kLanes];
  double mean[kLanes];  // sum_e p[e] * slope[e]: the tokens' share of the loss
};

template <class A>
FMOE_INLINE void compute_scores(const LossArgs<A>& args, const A* logits, int64_t num,
                                TokenScores<A>& found) {
  const int64_t E = args.E;
  A* score = found.score.data();
  const A* rows[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) rows[j] = logits + std::min(j, num - 1) * E;
  for (int64_t e = 0; e < E; ++e)
    for (int64_t j = 0; j < kLanes; ++j) score[e * kLanes + j] = rows[j][e];
  // a vector, since gcc leaves a loop over an array of the largest scalar
  typedef A Lanes __attribute__((vector_size(kLanes * sizeof(A))));
  Lanes best;
  std::memcpy(&best, score, sizeof(best));
  for (int64_t e = 1; e < E; ++e) {
    Lanes x;
    std::memcpy(&x, score + e * kLanes, sizeof(x));
    best = x > best ? x : best;
  }
  A largest[kLanes], sum[kLanes] = {};
  std::memcpy(largest, &best, sizeof(best));
  double weighted[kLanes] = {};
  const auto add = [&](int64_t e, int64_t j, A x) __attribute__((always_inline)) {
    score[e * kLanes + j] = x;
    sum[j] += x;
    weighted[j] += static_cast<double>(x) * args.slope[e];
  };
  if (!args.is_sigmoid) {
    for (int64_t e = 0; e < E; ++e)
      for (int64_t j = 0; j < kLanes; ++j) add(e, j, exp_nonpositive(score[e * kLanes + j] - largest[j]));
  } else {
    for (int64_t e = 0; e < E; ++e)
      for (int64_t j = 0; j < kLanes; ++j) {
        // Where every sigmoid is all but exp, their ratios are those of a softmax, which does not underflow.
        const A x = score[e * kLanes + j];
        const bool is_small = largest[j] < -40;
        const A small = exp_nonpositive(is_small ? x - largest[j] : x < 0 ? x : -x);
        add(e, j, is_small ? small : (x < 0 ? small : A{1}) / (1 + small));
      }
  }
  for (int64_t j = 0; j < kLanes; ++j) found.sum[j] = sum[j], found.mean[j] = weighted[j] / sum[j];
}

// The loss of tokens begin to end.
struct LossOfRange {
  template <class A>
  FMOE_INLINE static void compute(const LossArgs<A>& args, int64_t begin, int64_t end, double* loss) {
    TokenScores<A> scores(args.E);
    for (int64_t t = begin; t < end; t += kLanes) {
      const int64_t num = std::min(end - t, kLanes);
      compute_scores(args, args.logits + t * args.E, num, scores);
      for (int64_t j = 0; j < num; ++j) *loss += scores.mean[j];
    }
  }
};

template <class A>
struct GradArgs : LossArgs<A> {
  A grad;
  A* grad_logits;  // [T, E]
};

struct GradsOfRange {
  template <class A>
  FMOE_INLINE static void compute(const GradArgs<A>& args, int64_t begin, int64_t end, double*) {
    const int64_t E = args.E;
    TokenScores<A> scores(E);
    A* turned = scores.score.data();
    for (int64_t t = begin; t < end; t += kLanes) {
      const int64_t num = std::min(end - t, kLanes);
      const A* rows = args.logits + t * E;
      A* grads = args.grad_logits + t * E;
      compute_scores(args, rows, num, scores);
      A factor[kLanes], mean[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        factor[j] = args.grad / scores.sum[j];
        mean[j] = static_cast<A>(scores.mean[j]);
      }
      for (int64_t e = 0; e < E; ++e)
        for (int64_t j = 0; j < kLanes; ++j) turned[e * kLanes + j] *= factor[j] * (args.slope[e] - mean[j]);
      for (int64_t j = 0; j < num; ++j)
        for (int64_t e = 0; e < E; ++e) grads[j * E + e] = turned[e * kLanes + j];
      if (args.is_sigmoid)  // d log(sigmoid(x)) / dx
        for (int64_t i = 0; i < num * E; ++i) grads[i] *= sigmoid(-rows[i]);
    }
  }
};

#if FMOE_X86
template <class Range, class Args>
FMOE_AVX2 void compute_avx2(const Args& args, int64_t begin, int64_t end, double* loss) {
  Range::compute(args, begin, end, loss);
}

template <class Range, class Args>
FMOE_AVX512 void compute_avx512(const Args& args, int64_t begin, int64_t end, double* loss) {
  Range::compute(args, begin, end, loss);
}
#endif

template <class Range, class Args>
void compute_range(const Args& args, int64_t begin, int64_t end, double* loss) {
#if FMOE_X86
  if (use_avx512()) return compute_avx512<Range>(args, begin, end, loss);
  if (use_avx2()) return compute_avx2<Range>(args, begin, end, loss);
#endif
  Range::compute(args, begin, end, loss);
}

// Range::compute of all tokens -> the sum of the losses. A sum a job, added in their order: the number of
// threads changes no bit.
template <class Range, class Args>
double for_each_range(int64_t num_tokens, const Args& args) {
  std::vector<double> losses((num_tokens + kTokensPerJob - 1) / kTokensPerJob);
  for_each_job(losses.size(), [&](int64_t job) {
    compute_range<Range>(args, job * kTokensPerJob, std::min(num_tokens, (job + 1) * kTokensPerJob),
                         &losses[job]);
  });
  double loss = 0;
  for (const double l : losses) loss += l;
  return loss;
}

}  // namespace

Tensor balance_loss_cpu(Tensor logits, Tensor counts, int64_t score) {
  check_balance_loss(logits, counts);
  const bool is_sigmoid = checked_sigmoid(score);
  const Tensor input = as_contiguous(logits), load = as_contiguous(counts);
  Tensor loss = torch::stable::new_empty(input, {});
  const auto compute = [&](auto tag) {
    using A = decltype(tag);
    const int64_t T = input.size(0), E = input.size(1);
    const auto slope = slopes<A>(static_cast<const int64_t*>(load.const_data_ptr()), T, E);
    const LossArgs<A> args{static_cast<const A*>(input.const_data_ptr()), slope.data(), E, is_sigmoid};
    *static_cast<A*>(loss.mutable_data_ptr()) = static_cast<A>(for_each_range<LossOfRange>(T, args));
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
    const int64_t T = input.size(0), E = input.size(1);
    const auto slope = slopes<A>(static_cast<const int64_t*>(load.const_data_ptr()), T, E);
    for_each_range<GradsOfRange>(
        T, GradArgs<A>{{static_cast<const A*>(input.const_data_ptr()), slope.data(), E, is_sigmoid},
                       *static_cast<const A*>(grad.const_data_ptr()),
                       static_cast<A*>(grad_logits.mutable_data_ptr())});
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
