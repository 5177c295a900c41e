// The operators of fmoe_ext with their gradients: permute, unpermute, topk_gate, balance_loss, grouped_gemm,
// expert_mlp; and without: count_tokens, sort_tokens, apply_capacity.
//
// Kernels, checks and their errors are in the library of the target fmoe::fmoe and are called through the
// dispatcher; here are the formulas of the gradients, those of fmoe_ext/ops/<operator>.py in the same order.
//
// Letters: T tokens, K choices a token, E experts, R = T * K rows in expert-major order, D model width, H
// expert width. An undefined Tensor stands for Python's None.
#pragma once

#include <array>
#include <cctype>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/torch.h>

namespace fmoe {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct NamedActivation {
  const char* name;
  bool gated;
};
// Activations, at the places that operators know.
inline constexpr NamedActivation kActivations[] = {
    {"gelu", false}, {"gelu_tanh", false}, {"relu", false},  {"silu", false},          {"swiglu", true},
    {"geglu", true}, {"geglu_tanh", true}, {"relu2", false}, {"clamped_swiglu", true},
};
// Names of scores, at the places that topk_gate knows.
inline constexpr std::array<const char*, 2> kScores = {"softmax", "sigmoid"};

// topk_idx [T, K] int64, -1 for dropped choices, and topk_weights [T, K].
using Choices = std::tuple<Tensor, Tensor>;

// Place of each choice when the rows are grouped by expert; rows at or past offs[-1] are padding.
struct SortedTokens {
  Tensor tokens_per_expert;  // [E] int64
  Tensor offs;               // [E] int32, cumulative ends
  Tensor row_idx;            // [T * K] int32, flat choice t * K + k of each row, -1 in the padding
  Tensor inverse;            // [T, K] int32, row of each choice, -1 for a dropped one
};

namespace detail {

using OptTensor = std::optional<Tensor>;

inline OptTensor opt(const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; }

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(op, name, " is not registered: link the CMake target fmoe::fmoe, which loads the operators");
  return op->template typed<Signature>();
}

// Calls an operator below autograd and autocast, which this file does itself.
template <class Signature, class... Args>
auto call(const c10::TypedOperatorHandle<Signature>& op, Args&&... args) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(std::forward<Args>(args)...);
}

// "torch.float32": a dtype as Python's errors have it.
inline std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "torch.float64";
    case at::kFloat:
      return "torch.float32";
    case at::kLong:
      return "torch.int64";
    case at::kInt:
      return "torch.int32";
    case at::kBool:
      return "torch.bool";
    case at::kByte:
      return "torch.uint8";
    default:
      std::string name = c10::toString(dtype);
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      return "torch." + (name == "half" ? "float16" : name);
  }
}

inline bool learns(const Tensor& t) { return t.defined() && t.requires_grad(); }

template <class... Tensors>
bool needs_graph(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (learns(tensors) || ...);
}

// Keeps which gradients autograd may want: it numbers the tensors that a Function was given, and skips the
// others.
inline void keep_given(AutogradContext* ctx, const std::vector<bool>& given) {
  std::vector<int64_t> edges;
  int64_t num_given = 0;
  for (const bool is_given : given) edges.push_back(is_given ? num_given++ : -1);
  ctx->saved_data["edges"] = edges;
}
inline bool needs_grad(AutogradContext* ctx, size_t place) {
  const int64_t edge = ctx->saved_data["edges"].toIntVector()[place];
  return edge >= 0 && ctx->needs_input_grad(static_cast<size_t>(edge));
}

// Passes gradients on; to differentiate them again raises instead of giving gradients that lack a term.
struct OnceDifferentiable : Function<OnceDifferentiable> {
  static variable_list forward(AutogradContext* ctx, variable_list grads, variable_list from,
                               std::string name) {
    ctx->saved_data["name"] = name;
    for (auto& grad : grads)
      if (grad.defined()) grad = grad.view_as(grad);
    return grads;
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    TORCH_CHECK(false, ctx->saved_data["name"].toStringRef(),
                " cannot be differentiated: second derivatives are not implemented");
  }
};

inline variable_list once(variable_list grads, variable_list from, const char* name) {
  if (!at::GradMode::is_enabled()) return grads;
  variable_list given;
  for (const auto& grad : grads)
    if (grad.defined()) given.push_back(grad);
  given = OnceDifferentiable::apply(given, std::move(from), std::string(name));
  auto next = given.begin();
  for (auto& grad : grads)
    if (grad.defined()) grad = *next++;
  return grads;
}

// The tensor as an operator's autocast rule makes it.
inline Tensor for_autocast(const Tensor& t, c10::DeviceType device) {
  if (!t.defined() || t.scalar_type() == at::kDouble || !at::autocast::is_autocast_enabled(device)) return t;
  return t.to(at::autocast::get_autocast_dtype(device));
}

inline int64_t activation_number(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < std::size(kActivations); ++i) {
    if (name == kActivations[i].name) return static_cast<int64_t>(i);
    known += (i ? ", " : "") + std::string(kActivations[i].name);
  }
  TORCH_CHECK(false, "unknown activation \"", name, "\": known are ", known);
}

inline int64_t score_number(const std::string& name) {
  for (size_t i = 0; i < kScores.size(); ++i)
    if (name == kScores[i]) return static_cast<int64_t>(i);
  TORCH_CHECK(false, "score must be \"softmax\" or \"sigmoid\", but got \"", name, "\"");
}

}  // namespace detail

// Limits the CPU kernels to an instruction set, as FMOE_CPU_ISA does for Python; false if this processor
// lacks it.
inline bool set_cpu_isa(const std::string& name) {
  static const auto op = detail::find<bool(c10::string_view)>("fmoe_ext::_set_cpu_isa");
  return detail::call(op, c10::string_view(name));
}

// Number of choices that each expert got: topk_idx [T, K] int64 or int32, -1 dropped -> [E] int64.
inline Tensor count_tokens(const Tensor& topk_idx, int64_t num_experts) {
  static const auto op = detail::find<Tensor(const Tensor&, int64_t)>("fmoe_ext::count_tokens");
  return detail::call(op, topk_idx, num_experts);
}

// Stable sort of the choices by expert; equivalent to torch.argsort(topk_idx.flatten(), stable=True).
inline SortedTokens sort_tokens(const Tensor& topk_idx, int64_t num_experts) {
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  static const auto op = detail::find<Result(const Tensor&, int64_t)>("fmoe_ext::sort_tokens");
  auto [tokens_per_expert, offs, row_idx, inverse] = detail::call(op, topk_idx, num_experts);
  return {tokens_per_expert, offs, row_idx, inverse};
}

// topk_idx [T, K] with -1 for every choice over its expert's capacity: [E] int64. First choices go first.
inline Tensor apply_capacity(const Tensor& topk_idx, const Tensor& capacity) {
  static const auto op = detail::find<Tensor(const Tensor&, const Tensor&)>("fmoe_ext::apply_capacity");
  return detail::call(op, topk_idx, capacity);
}

// For each token the sum of its experts' rows, weighted by topk_weights if given: y [R, D] -> [T, D].
Tensor unpermute(const Tensor& y, const Tensor& row_idx, const Tensor& inverse,
                 const Tensor& topk_weights = {});

namespace detail {

struct Permute : Function<Permute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& row_idx, const Tensor& inverse) {
    static const auto op = find<Tensor(const Tensor&, const Tensor&, const Tensor&)>("fmoe_ext::permute");
    ctx->save_for_backward({row_idx, inverse});
    return call(op, x, row_idx, inverse);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {unpermute(grads[0], saved[0], saved[1]), Tensor(), Tensor()};
  }
};

}  // namespace detail

// Copies every token to the rows of its experts, padding is zero: x [T, D] -> [R, D]. Equivalent to x[row_idx
// / K].
inline Tensor permute(const Tensor& x, const Tensor& row_idx, const Tensor& inverse) {
  return detail::Permute::apply(x, row_idx, inverse);
}

namespace detail {

struct Unpermute : Function<Unpermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& y, const Tensor& row_idx, const Tensor& inverse,
                        const OptTensor& topk_weights) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptTensor&);
    static const auto op = find<Signature>("fmoe_ext::unpermute");
    const Tensor weights = topk_weights.value_or(Tensor());
    ctx->save_for_backward({learns(weights) ? y : Tensor(), row_idx, inverse, weights});
    return call(op, y, row_idx, inverse, topk_weights);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const OptTensor&, const Tensor&,
                                                 const Tensor&, const OptTensor&);
    static const auto op = find<Signature>("fmoe_ext::unpermute_backward");
    const auto saved = ctx->get_saved_variables();
    const Tensor &y = saved[0], &row_idx = saved[1], &inverse = saved[2], &topk_weights = saved[3];
    if (!topk_weights.defined()) return {permute(grads[0], row_idx, inverse), Tensor(), Tensor(), Tensor()};
    auto [grad_y, grad_weights] = call(op, grads[0], opt(y), row_idx, inverse, opt(topk_weights));
    variable_list results = {grad_y, Tensor(), Tensor(), y.defined() ? grad_weights : Tensor()};
    return once(std::move(results), {grads[0], topk_weights}, "fmoe_ext::unpermute_backward");
  }
};

struct TopkGate : Function<TopkGate> {
  using Result = std::tuple<Tensor, Tensor>;
  using Signature = Result(const Tensor&, int64_t, int64_t, bool, const OptTensor&, int64_t, int64_t, double);

  static Result compute(const Tensor& logits, int64_t top_k, int64_t score, bool normalize,
                        const OptTensor& bias, int64_t num_groups, int64_t topk_groups, double scale) {
    static const auto op = find<Signature>("fmoe_ext::topk_gate");
    return call(op, logits, top_k, score, normalize, bias, num_groups, topk_groups, scale);
  }
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const OptTensor& bias,
                               int64_t top_k, int64_t score, bool normalize, int64_t num_groups,
                               int64_t topk_groups, double scale) {
    auto [topk_idx, topk_weights] =
        compute(logits, top_k, score, normalize, bias, num_groups, topk_groups, scale);
    ctx->mark_non_differentiable({topk_idx});
    ctx->save_for_backward({logits, topk_idx, topk_weights});
    ctx->saved_data["score"] = score;
    ctx->saved_data["normalize"] = normalize;
    ctx->saved_data["scale"] = scale;
    return {topk_idx, topk_weights};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    using Signature =
        Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, bool, double);
    static const auto op = find<Signature>("fmoe_ext::topk_gate_backward");
    const auto saved = ctx->get_saved_variables();
    const Tensor grad = call(op, grads[1], saved[0], saved[1], saved[2], ctx->saved_data["score"].toInt(),
                             ctx->saved_data["normalize"].toBool(), ctx->saved_data["scale"].toDouble());
    variable_list results(8);
    results[0] = grad;
    return once(std::move(results), {grads[1], saved[0]}, "fmoe_ext::topk_gate_backward");
  }
};

struct BalanceLoss : Function<BalanceLoss> {
  using Signature = Tensor(const Tensor&, const Tensor&, int64_t);

  static Tensor compute(const Tensor& logits, const Tensor& counts, int64_t score) {
    static const auto op = find<Signature>("fmoe_ext::balance_loss");
    return call(op, logits, counts, score);
  }
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& counts, int64_t score) {
    ctx->save_for_backward({logits, counts});
    ctx->saved_data["score"] = score;
    return compute(logits, counts, score);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static const auto op =
        find<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t)>("fmoe_ext::balance_loss_backward");
    const auto saved = ctx->get_saved_variables();
    const Tensor grad = call(op, grads[0], saved[0], saved[1], ctx->saved_data["score"].toInt());
    return once({grad, Tensor(), Tensor()}, {grads[0], saved[0]}, "fmoe_ext::balance_loss_backward");
  }
};

}  // namespace detail

inline Tensor unpermute(const Tensor& y, const Tensor& row_idx, const Tensor& inverse,
                        const Tensor& topk_weights) {
  return detail::Unpermute::apply(y, row_idx, inverse, detail::opt(topk_weights));
}

// The top_k experts of each token by score, best first, and their weights: logits [T, E] -> topk_idx [T, K]
// int64, topk_weights [T, K]. score: "softmax" or "sigmoid"; bias [E] shifts the selection only. See
// ops.topk_gate in Python.
inline Choices topk_gate(const Tensor& logits, int64_t top_k, const std::string& score = "softmax",
                         bool normalize = true, const Tensor& bias = {}, int64_t num_groups = 1,
                         int64_t topk_groups = 1, double scale = 1.0) {
  const int64_t number = detail::score_number(score);
  if (!detail::needs_graph(logits))
    return detail::TopkGate::compute(logits, top_k, number, normalize, detail::opt(bias), num_groups,
                                     topk_groups, scale);
  auto chosen = detail::TopkGate::apply(logits, detail::opt(bias), top_k, number, normalize, num_groups,
                                        topk_groups, scale);
  return {chosen[0], chosen[1]};
}

// E * sum_e f_e * p_e of logits [T, E]: f_e the share of counts [E] int64, p_e the mean probability ->
// scalar.
inline Tensor balance_loss(const Tensor& logits, const Tensor& counts, const std::string& score = "softmax") {
  const int64_t number = detail::score_number(score);
  if (!detail::needs_graph(logits)) return detail::BalanceLoss::compute(logits, counts, number);
  return detail::BalanceLoss::apply(logits, counts, number);
}

namespace detail {

struct GroupedGemm : Function<GroupedGemm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& offs,
                        const OptTensor& bias) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptTensor&);
    static const auto op = find<Signature>("fmoe_ext::grouped_gemm");
    keep_given(ctx, {true, true, true, bias.has_value()});
    // without a gradient of x, backward reads only the weight's shape
    ctx->save_for_backward({x, learns(x) ? weight : weight.new_empty({}).expand(weight.sizes()), offs});
    return call(op, x, weight, offs, bias);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    using Result = std::tuple<Tensor, Tensor, Tensor>;
    using Signature = Result(const Tensor&, const Tensor&, const Tensor&, const Tensor&, at::ArrayRef<bool>,
                             const OptTensor&);
    static const auto op = find<Signature>("fmoe_ext::grouped_gemm_backward");
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 3> needs = {needs_grad(ctx, 0), needs_grad(ctx, 1), needs_grad(ctx, 3)};
    auto [dx, dweight, dbias] =
        call(op, grads[0], saved[0], saved[1], saved[2], at::ArrayRef<bool>(needs), OptTensor());
    variable_list results = {needs[0] ? dx : Tensor(), needs[1] ? dweight : Tensor(), Tensor(),
                             needs[2] ? dbias : Tensor()};
    return once(std::move(results), {grads[0], saved[0], saved[1]}, "fmoe_ext::grouped_gemm_backward");
  }
};

struct ExpertMlp : Function<ExpertMlp> {
  using Result = std::tuple<Tensor, Tensor>;
  using Signature = Result(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const OptTensor&, const Tensor&, const OptTensor&, const OptTensor&, int64_t, bool,
                           bool);

  static Result compute(const Tensor& x, const Tensor& row_idx, const Tensor& inverse, const Tensor& offs,
                        const Tensor& w1, const OptTensor& b1, const Tensor& w2, const OptTensor& b2,
                        const OptTensor& topk_weights, int64_t activation, bool combine, bool save_h) {
    static const auto op = find<Signature>("fmoe_ext::expert_mlp");
    return call(op, x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine, save_h);
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& row_idx, const Tensor& inverse,
                        const Tensor& offs, const Tensor& w1, const OptTensor& b1, const Tensor& w2,
                        const OptTensor& b2, const OptTensor& topk_weights, int64_t activation,
                        bool combine) {
    auto [y, h] = compute(x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine, true);
    keep_given(
        ctx, {true, true, true, true, true, b1.has_value(), true, b2.has_value(), topk_weights.has_value()});
    const auto kept = [](const OptTensor& t) { return t.value_or(Tensor()); };
    ctx->save_for_backward({x, row_idx, inverse, offs, w1, w2, kept(b2), kept(topk_weights), h});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["combine"] = combine;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
    using Backward = Grads(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&, const OptTensor&, const OptTensor&, const Tensor&,
                           int64_t, bool, at::ArrayRef<bool>, const OptTensor&, const OptTensor&);
    static const auto op = find<Backward>("fmoe_ext::expert_mlp_backward");
    constexpr std::array<size_t, 6> kPlaces = {0, 4, 5, 6, 7, 8};  // x, w1, b1, w2, b2, topk_weights
    std::array<bool, 6> needs{};
    for (size_t i = 0; i < kPlaces.size(); ++i) needs[i] = needs_grad(ctx, kPlaces[i]);
    const auto s = ctx->get_saved_variables();
    auto [dx, dw1, db1, dw2, db2, dtopk_weights] =
        call(op, grads[0], s[0], s[1], s[2], s[3], s[4], s[5], opt(s[6]), opt(s[7]), s[8],
             ctx->saved_data["activation"].toInt(), ctx->saved_data["combine"].toBool(),
             at::ArrayRef<bool>(needs), OptTensor(), OptTensor());
    variable_list results(11);
    const std::array<Tensor, 6> computed = {dx, dw1, db1, dw2, db2, dtopk_weights};
    for (size_t i = 0; i < kPlaces.size(); ++i)
      if (needs[i]) results[kPlaces[i]] = computed[i];
    return once(std::move(results), {grads[0], s[0], s[4], s[5], s[7]}, "fmoe_ext::expert_mlp_backward");
  }
};

}  // namespace detail

// Multiplies the rows of each expert by its weight: y = x @ weight[e].T + bias[e] on offs[e - 1]:offs[e].
// x [R, D], weight [E, N, D], bias [E, N] of one floating dtype, offs [E] int32 -> [R, N].
inline Tensor grouped_gemm(const Tensor& x, const Tensor& weight, const Tensor& offs,
                           const Tensor& bias = {}) {
  const auto device = x.device().type();
  return detail::GroupedGemm::apply(detail::for_autocast(x, device), detail::for_autocast(weight, device),
                                    offs, detail::opt(detail::for_autocast(bias, device)));
}

// Two-layer MLP of each expert over the tokens that chose it, with dispatch and combine fused in.
// x [T, D]; row_idx, inverse, offs: of sort_tokens; w1 [E, H, D] (gated: [E, 2H, D], gate rows before up
// rows), b1, w2 [E, D, H], b2 of the dtype of x; topk_weights [T, K] -> the weighted sum over each token's
// choices [T, D], or with combine=false the (weighted) rows [T * K, D].
inline Tensor expert_mlp(const Tensor& x, const Tensor& row_idx, const Tensor& inverse, const Tensor& offs,
                         const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2,
                         const Tensor& topk_weights = {}, const std::string& activation = "gelu",
                         bool combine = true) {
  const int64_t number = detail::activation_number(activation);
  const auto device = x.device().type();
  const auto cast = [device](const Tensor& t) { return detail::for_autocast(t, device); };
  const auto maybe = [cast](const Tensor& t) { return detail::opt(cast(t)); };
  if (!detail::needs_graph(x, w1, b1, w2, b2, topk_weights))
    return std::get<0>(detail::ExpertMlp::compute(cast(x), row_idx, inverse, offs, cast(w1), maybe(b1),
                                                  cast(w2), maybe(b2), detail::opt(topk_weights), number,
                                                  combine, false));
  return detail::ExpertMlp::apply(cast(x), row_idx, inverse, offs, cast(w1), maybe(b1), cast(w2), maybe(b2),
                                  detail::opt(topk_weights), number, combine);
}

}  // namespace fmoe
