// FMoE and FMoETransformerMLP: a gate chooses experts for every token, the experts compute, their results are
// summed by weight. FMoE::forward reads beside that of fmoe_ext/layers.py.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "exchange.h"

namespace fmoe {

// Makes a gate of (d_model, num_expert, world_size, top_k, gate_bias).
using GateMaker = std::function<std::shared_ptr<Gate>(int64_t, int64_t, int64_t, int64_t, bool)>;

namespace detail {

// Rows at their places in zeros [T, *]: the gradient is that of the rows.
struct PutBack : Function<PutBack> {
  static Tensor forward(AutogradContext* ctx, const Tensor& out, const Tensor& rows, int64_t num_tokens) {
    ctx->save_for_backward({rows});
    auto shape = out.sizes().vec();
    shape[0] = num_tokens;
    return out.new_zeros(shape).index_copy(0, rows, out);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {grads[0].index_select(0, ctx->get_saved_variables()[0]), Tensor(), Tensor()};
  }
};

}  // namespace detail

// One forward. x: the tokens to compute, without padding. rows [V] int64: the real ones, undefined for all.
struct Step {
  Tensor x, rows;
  int64_t num_tokens = 0;

  // out at the places of the real tokens plus beside, zero at the others -> [T, *].
  Tensor end(Tensor out, const Tensor& beside) const {
    if (beside.defined()) out = out + beside;
    return rows.defined() ? detail::PutBack::apply(out, rows, num_tokens) : out;
  }
};

// The step of a forward: moe_inp [T, D]; valid: T entries, 0 for padding, undefined for none.
inline Step begin(const Tensor& moe_inp, const Tensor& valid) {
  TORCH_CHECK_VALUE(moe_inp.dim() > 0, "moe_inp must be a tensor [T, *], but got ", moe_inp.sizes());
  TORCH_CHECK_TYPE(moe_inp.is_floating_point(), "moe_inp must have tokens of a floating dtype, but got ",
                   detail::dtype_text(moe_inp.scalar_type()));
  const int64_t num_tokens = moe_inp.size(0);
  if (!valid.defined()) return {moe_inp, {}, num_tokens};
  TORCH_CHECK_VALUE(
      !valid.is_floating_point() || !((valid != 0) & (valid != 1)).any().item<bool>(),
      "valid must be True (1) for real tokens and False (0) for padding, but has other values: an "
      "additive attention mask is valid = mask == 0");
  TORCH_CHECK_VALUE(
      valid.numel() == num_tokens, "valid, token_ids or the packed sequences have ", valid.numel(),
      " entries but the input has ", num_tokens, " tokens. ",
      "Call a layer whose tokens differ from the model's outside of these blocks, with its own valid=");
  const Tensor rows = valid.detach().flatten().nonzero().squeeze(1);
  if (rows.size(0) == num_tokens) return {moe_inp, {}, num_tokens};
  return {moe_inp.index_select(0, rows), rows, num_tokens};
}

// A Mixture-of-Experts layer: any gate, FusedExperts, and SharedExperts or null.
// group: a c10d group whose ranks have num_expert experts each, expert i on rank i // num_expert; all of them
// call forward, with any number of tokens each. Null: one process.
struct FMoE : torch::nn::Module {
  FMoE(int64_t num_expert, int64_t d_model_, std::shared_ptr<Gate> gate_,
       std::shared_ptr<FusedExperts> experts_, std::shared_ptr<SharedExperts> shared, Group group_ = {})
      : num_experts(num_expert * (group_ ? group_->getSize() : 1)),
        d_model(d_model_),
        group(std::move(group_)) {
    TORCH_CHECK_VALUE(gate_->tot_expert == num_experts, "the gate is for ", gate_->tot_expert,
                      " experts, but the layer has ", num_experts);
    gate = register_module("gate", std::move(gate_));
    experts = register_module("experts", std::move(experts_));
    if (shared) shared_experts = register_module("shared_experts", std::move(shared));
    if (group) gate->ranks = std::make_shared<GroupRanks>(group);
  }

  // Sends every token through its experts: moe_inp [T, d_model] -> [T, d_model].
  // valid: T entries, 0 for padding, which reaches no expert, loss or capacity and gets zero.
  Tensor forward(const Tensor& moe_inp, const Tensor& valid = {}) {
    // 1. Take off padding.
    const Step step = begin(moe_inp, valid);
    // 2. The gate chooses experts for every token.
    const auto [topk_idx, topk_weights] = choose(step);
    // 3. Tokens go to the ranks of their experts; meanwhile the shared experts run.
    Dispatched dispatched = dispatch(step.x, topk_idx, topk_weights, num_experts, group);
    const Tensor beside = shared_experts ? shared_experts->forward(step.x) : Tensor();
    // 4. The experts compute what has come and weigh their results.
    dispatched.give_back(compute(dispatched.receive()));
    // 5. Results come back to their tokens and are summed; what was taken off is put back.
    return step.end(combine(dispatched), beside);
  }

  int64_t num_experts, d_model;
  Group group;
  std::shared_ptr<Gate> gate;
  std::shared_ptr<FusedExperts> experts;
  std::shared_ptr<SharedExperts> shared_experts;

 private:
  Choices choose(const Step& step) const {
    auto [topk_idx, topk_weights] = gate->forward(step.x);
    const int64_t num_tokens = step.x.size(0);
    TORCH_CHECK_VALUE(
        topk_idx.dim() == 2 && topk_idx.size(0) == num_tokens && topk_weights.sizes() == topk_idx.sizes(),
        "the gate must return topk_idx and topk_weights [T=", num_tokens, ", K=", gate->top_k,
        "], but returned ", topk_idx.sizes(), " and ", topk_weights.sizes());
    return {topk_idx, topk_weights};
  }

  Tensor compute(const ExpertInput& tokens) const {
    const SortedTokens handle = sort_tokens(tokens.topk_idx, experts->htoh4->weight.size(0));
    return experts->forward(tokens.x, handle, tokens.topk_weights);
  }
};

// Options of FMoETransformerMLP, named as in Python.
struct MlpOptions {
  int64_t num_expert = 32;  // of this rank
  int64_t d_model = 1024;
  int64_t d_hidden = 4096;
  std::string activation = "gelu";  // a name of kActivations
  int64_t top_k = 2;
  GateMaker gate;  // NaiveGate if empty; see fmoe/all_gates.h
  bool gate_bias = true;
  bool bias = true;
  int64_t shared_expert_hidden = 0;  // 0: no shared experts
  bool shared_expert_gate = false;
  Group group;  // null: one process
};

// FMoE whose experts are two-layer MLPs d_model -> d_hidden -> d_model, computed by one operator.
struct FMoETransformerMLP : FMoE {
  explicit FMoETransformerMLP(const MlpOptions& o)
      // braces: in this order, in which random numbers are drawn
      : FMoE{o.num_expert, o.d_model, make_gate(o), make_experts(o), make_shared_experts(o), o.group} {}

  // inp [..., d_model] -> [..., d_model], without residual. valid [...]: the tokens that are not padding.
  Tensor forward(const Tensor& inp, const Tensor& valid = {}) {
    TORCH_CHECK_VALUE(inp.dim() > 0 && inp.size(-1) == d_model, "inp must have shape [..., d_model=", d_model,
                      "], but got ", inp.sizes());
    // a view of a matrix too, so that gate and experts sum their gradients before a residual joins them
    const Tensor out = FMoE::forward(inp.reshape({-1, d_model}), valid);
    return inp.dim() == 2 ? out : out.reshape(inp.sizes());
  }

 private:
  static void check_size(const char* name, int64_t size) {
    TORCH_CHECK_VALUE(size >= 1, name, " must be at least 1, but got ", size);
  }
  static int64_t size_of(const MlpOptions& o) { return o.group ? o.group->getSize() : 1; }

  static std::shared_ptr<Gate> make_gate(const MlpOptions& o) {
    check_size("num_expert", o.num_expert);
    check_size("d_model", o.d_model);
    check_size("d_hidden", o.d_hidden);
    check_size("top_k", o.top_k);
    if (o.gate) return o.gate(o.d_model, o.num_expert, size_of(o), o.top_k, o.gate_bias);
    return std::make_shared<NaiveGate>(o.d_model, o.num_expert, size_of(o), o.top_k, o.gate_bias);
  }
  static std::shared_ptr<FusedExperts> make_experts(const MlpOptions& o) {
    const int64_t rank = o.group ? o.group->getRank() : 0;
    return std::make_shared<FusedExperts>(o.num_expert, o.d_model, o.d_hidden, o.activation, o.bias, rank);
  }
  static std::shared_ptr<SharedExperts> make_shared_experts(const MlpOptions& o) {
    TORCH_CHECK_VALUE(o.shared_expert_hidden > 0 || !o.shared_expert_gate,
                      "shared_expert_gate=True needs shared_expert_hidden, the width of the shared experts");
    if (o.shared_expert_hidden == 0) return nullptr;
    return std::make_shared<SharedExperts>(o.d_model, o.shared_expert_hidden, o.activation, o.bias,
                                           o.shared_expert_gate);
  }
};

}  // namespace fmoe
