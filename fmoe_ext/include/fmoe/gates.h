// What gates, the modules that choose experts for every token, share: Gate, their losses, and NaiveGate,
// which most of all_gates.h derive from. The same as fmoe_ext/gates, with the same names of parameters.
#pragma once

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ranks.h"

namespace fmoe {

namespace detail {

inline at::ScalarType widest(at::ScalarType a, at::ScalarType b) {
  return c10::promoteTypes(c10::promoteTypes(a, b), at::kFloat);
}

// torch::linear of wider copies, which backward makes again: kept are the tensors as they came.
struct WideLinearFunction : Function<WideLinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& inp, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
    const auto dtype = widest(inp.scalar_type(), weight.scalar_type());
    keep_given(ctx, {true, true, bias.has_value()});
    ctx->save_for_backward({inp, weight, bias.value_or(Tensor())});
    return torch::linear(inp.to(dtype), weight.to(dtype), bias ? bias->to(dtype) : Tensor());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const Tensor &inp = saved[0], &weight = saved[1], &bias = saved[2], &grad = grads[0];
    variable_list results(3);
    if (needs_grad(ctx, 0)) results[0] = grad.matmul(weight.to(grad.dtype())).to(inp.dtype());
    if (needs_grad(ctx, 1)) results[1] = grad.t().matmul(inp.to(grad.dtype())).to(weight.dtype());
    if (needs_grad(ctx, 2)) results[2] = grad.sum(0).to(bias.dtype());
    return results;
  }
};

}  // namespace detail

// torch::linear computed in float32 or wider, whatever the dtypes and autocast: the scores of a gate.
// inp [T, D], weight [E, D], bias [E] or undefined -> [T, E].
inline Tensor wide_linear(const Tensor& inp, const Tensor& weight, const Tensor& bias = {}) {
  const auto dtype = detail::widest(inp.scalar_type(), weight.scalar_type());
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (inp.scalar_type() == dtype && weight.scalar_type() == dtype)
    return torch::linear(inp, weight, bias.defined() ? bias.to(dtype) : bias);
  return detail::WideLinearFunction::apply(inp, weight, detail::opt(bias));
}

// nn::Linear computed by wide_linear.
struct WideLinear : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  Tensor forward(const Tensor& inp) { return wide_linear(inp, weight, bias); }
};

// Choices [E], sum of the scores [E] and number of tokens of all ranks; on one rank num_tokens is undefined.
struct LoadSums {
  Tensor num_choices, score_sum, num_tokens;
  int64_t num_local_tokens = 0;
};

inline LoadSums sum_over_ranks(const Tensor& scores, const Tensor& topk_idx, const Ranks& ranks) {
  const int64_t num_local_tokens = scores.size(0), num_experts = scores.size(1);
  const Tensor num_choices = count_tokens(topk_idx, num_experts).to(scores.dtype());
  if (dynamic_cast<const OneRank*>(&ranks)) return {num_choices, scores.sum(0), Tensor(), num_local_tokens};
  const Tensor local = scores.new_full({1}, num_local_tokens);
  const auto parts = ranks.sum(torch::cat({num_choices, scores.sum(0), local}))
                         .split_with_sizes({num_experts, num_experts, 1});
  return {parts[0], parts[1], parts[2].squeeze(0), num_local_tokens};
}

// E * sum_e f_e * p_e over all tokens: f_e the share of the choices of expert e, p_e its mean score.
// scores [T, E], topk_idx [T, K] (-1 counts for nobody) -> scalar, 1 when balanced.
inline Tensor balance_loss(const Tensor& scores, const Tensor& topk_idx, const Ranks& ranks) {
  const LoadSums sums = sum_over_ranks(scores, topk_idx, ranks);
  const Tensor num_choices = sums.num_choices.detach();
  const Tensor share = num_choices / num_choices.sum().clamp_min(1);
  const auto num_experts = static_cast<double>(sums.score_sum.size(0));
  if (sums.num_tokens.defined())  // reciprocal() * E: what Python makes of E / tensor
    return (share * (sums.num_tokens.detach().clamp_min(1).reciprocal() * num_experts) * sums.score_sum)
        .sum();
  const auto num_tokens = static_cast<double>(std::max<int64_t>(sums.num_local_tokens, 1));
  return (share * (num_experts / num_tokens) * sums.score_sum).sum();
}

// balance_loss of the probabilities of logits [T, E], by one operator on one rank, as in Python.
inline Tensor balance_loss_of_logits(const Tensor& logits, const Tensor& topk_idx, const Ranks& ranks,
                                     const std::string& score = "softmax") {
  if (dynamic_cast<const OneRank*>(&ranks) && logits.is_cpu())
    return balance_loss(logits, count_tokens(topk_idx, logits.size(1)), score);
  const Tensor log_scores = score == "sigmoid" ? torch::log_sigmoid(logits) : logits;
  return balance_loss(log_scores.softmax(-1), topk_idx, ranks);
}

// The mean over tokens of logsumexp(logits)^2, which keeps logits small: logits [T, E] -> scalar.
inline Tensor z_loss(const Tensor& logits, const Ranks& ranks) {
  const Tensor sum = logits.logsumexp(1).square().sum();
  const Tensor totals = ranks.sum(torch::stack({sum, sum.new_full({}, logits.size(0))}));
  return totals[0] / totals[1].clamp_min(1);
}

// Choices that each expert takes: ceil(factor * T * K / E).
inline int64_t expert_capacity(double factor, int64_t num_tokens, int64_t top_k, int64_t num_experts) {
  const auto tokens = static_cast<double>(num_tokens), k = static_cast<double>(top_k);
  return static_cast<int64_t>(std::ceil(factor * tokens * k / static_cast<double>(num_experts)));
}

// Base class of gates: forward(inp [T, d_model]) -> topk_idx [T, K] int64 (-1: dropped), topk_weights [T, K];
// `loss` is the balance loss of the last forward.
struct Gate : torch::nn::Module {
  Gate(int64_t num_expert, int64_t world_size, int64_t top_k_) : top_k(top_k_) {
    TORCH_CHECK_VALUE(num_expert >= 1 && world_size >= 1,
                      "num_expert and world_size must be at least 1, but got ", num_expert, " and ",
                      world_size);
    tot_expert = num_expert * world_size;
    TORCH_CHECK_VALUE(1 <= top_k && top_k <= tot_expert, "top_k must be between 1 and the ", tot_expert,
                      " experts, but got ", top_k);
  }
  virtual Choices forward(const Tensor& inp) = 0;
  // Called after each step of the optimizer, by fmoe::after_optimizer_step(model).
  virtual void after_optimizer_step() {}

  int64_t tot_expert = 0, top_k;
  Tensor loss;
  std::shared_ptr<Ranks> ranks = std::make_shared<OneRank>();
};

// A linear layer, the top_k experts of each token, and the softmax over their scores.
struct NaiveGate : Gate {
  NaiveGate(int64_t d_model_, int64_t num_expert, int64_t world_size, int64_t top_k = 2,
            bool gate_bias = true, bool normalize_ = true)
      : Gate(num_expert, world_size, top_k), d_model(d_model_), normalize(normalize_) {
    gate = register_module(
        "gate", std::make_shared<WideLinear>(torch::nn::LinearOptions(d_model, tot_expert).bias(gate_bias)));
  }

  Choices forward(const Tensor& inp) override {
    const Tensor scores = logits(inp);
    auto [topk_idx, topk_weights] = topk_gate(scores, top_k, "softmax", normalize);
    loss = scores.new_zeros({1});
    return {topk_idx, topk_weights};
  }

  // Score of every expert: inp [T, d_model] -> [T, E], in float32 or wider.
  Tensor logits(const Tensor& inp) {
    TORCH_CHECK_VALUE(inp.dim() == 2 && inp.size(1) == d_model, "inp must have shape [T, d_model=", d_model,
                      "], but got ", inp.sizes());
    const Tensor scores = gate->forward(inp);
    return scores.to(c10::promoteTypes(scores.scalar_type(), at::kFloat));
  }

  int64_t d_model;
  bool normalize;
  std::shared_ptr<WideLinear> gate;
};

}  // namespace fmoe
