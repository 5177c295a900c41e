// The experts of a layer, for layers.h: two-layer MLPs computed by one operator (FusedExperts), and those
// that see every token (SharedExperts). The same as FMoELinear and FusedExperts in fmoe_ext/linear.py and
// experts.py, with the same draw of weights.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include "gates.h"

namespace fmoe {

namespace detail {

inline bool is_gated(const std::string& activation) {
  for (const NamedActivation& known : kActivations)
    if (activation == known.name) return known.gated;
  return false;
}

// Fills params, each [E, *], uniformly from [-bound, bound]. What expert e gets depends on seed and on
// first_expert + e alone, its number in the whole layer, so that every layout draws the same experts.
inline void draw_experts(const std::vector<Tensor>& params, double bound, int64_t seed,
                         int64_t first_expert) {
  constexpr uint64_t kNextExpert = 0x9E3779B97F4A7C15;  // as in fmoe_ext/linear.py
  torch::NoGradGuard no_grad;
  for (int64_t e = 0; e < params[0].size(0); ++e) {
    const uint64_t number =
        static_cast<uint64_t>(seed) + static_cast<uint64_t>(first_expert + e) * kNextExpert;
    auto generator = at::detail::createCPUGenerator(number & (uint64_t{1} << 63) - 1);
    for (const Tensor& param : params) param[e].uniform_(-bound, bound, generator);
  }
}

// tokens in the dtype of weights, which is that of the result; as they are under autocast.
inline Tensor cast_to_weight(const Tensor& inp, const Tensor& weight) {
  if (at::autocast::is_autocast_enabled(inp.device().type())) return inp;
  TORCH_CHECK_TYPE(inp.scalar_type() != at::kDouble || weight.scalar_type() == at::kDouble,
                   "tokens are torch.float64, but the weights of their experts ",
                   dtype_text(weight.scalar_type()), ": give them layer.double(), or tokens x.to(",
                   dtype_text(weight.scalar_type()), ")");
  return inp.to(weight.scalar_type());
}

// topk_weights in the dtype in which rows of dtype are summed: float32, or float64 for float64.
inline Tensor widen(const Tensor& topk_weights, at::ScalarType dtype) {
  return topk_weights.defined() ? topk_weights.to(c10::promoteTypes(dtype, at::kFloat)) : topk_weights;
}

}  // namespace detail

// A linear layer for each of num_expert experts: weight [E, out_feat, in_feat], bias [E, out_feat] or
// undefined.
struct FMoELinear : torch::nn::Module {
  FMoELinear(int64_t num_expert, int64_t in_feat, int64_t out_feat, bool has_bias = true, int64_t rank = 0) {
    weight = register_parameter("weight", torch::empty({num_expert, out_feat, in_feat}));
    bias = register_parameter("bias", has_bias ? torch::empty({num_expert, out_feat}) : Tensor(), has_bias);
    const auto seed = torch::randint(int64_t{1} << 62, {}, at::kLong).item<int64_t>();
    const double bound = in_feat > 0 ? 1 / std::sqrt(static_cast<double>(in_feat)) : 0;
    detail::draw_experts(has_bias ? std::vector<Tensor>{weight, bias} : std::vector<Tensor>{weight}, bound,
                         seed, rank * num_expert);
  }

  // inp [R, in_feat] sorted by expert, offs [E] int32 cumulative ends -> [R, out_feat].
  Tensor forward(const Tensor& inp, const Tensor& offs) const {
    return grouped_gemm(detail::cast_to_weight(inp, weight), weight, offs, bias);
  }

  Tensor weight, bias;
};

// E experts y = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e]; activation: a name of kActivations.
struct FusedExperts : torch::nn::Module {
  FusedExperts(int64_t num_experts, int64_t d_model, int64_t d_hidden, std::string activation_ = "gelu",
               bool bias = true, int64_t rank = 0)
      : activation(std::move(activation_)) {
    detail::activation_number(activation);
    const int64_t rows = detail::is_gated(activation) ? 2 * d_hidden : d_hidden;
    htoh4 = register_module("htoh4", std::make_shared<FMoELinear>(num_experts, d_model, rows, bias, rank));
    h4toh =
        register_module("h4toh", std::make_shared<FMoELinear>(num_experts, d_hidden, d_model, bias, rank));
  }

  // Tokens [T, D] through an index -> [T, D], the weighted sum of each token's experts.
  Tensor forward(const Tensor& inp, const SortedTokens& handle, const Tensor& topk_weights) const {
    return compute(inp, handle.row_idx, handle.inverse, handle.offs, topk_weights, true);
  }

  // Rows [R, D] sorted by expert, tokens_per_expert [E] -> [R, D].
  Tensor on_rows(const Tensor& rows, const Tensor& tokens_per_expert) const {
    const Tensor offs = tokens_per_expert.to(rows.device()).cumsum(0, at::kInt);
    const Tensor row = torch::arange(rows.size(0), offs.options());
    const Tensor row_idx = torch::where(row < offs[-1], row, -1);
    return compute(rows, row_idx, row_idx.unsqueeze(1), offs, {}, false);
  }

  std::string activation;
  std::shared_ptr<FMoELinear> htoh4, h4toh;

 private:
  Tensor compute(const Tensor& inp, const Tensor& row_idx, const Tensor& inverse, const Tensor& offs,
                 const Tensor& topk_weights, bool combine) const {
    const Tensor x = detail::cast_to_weight(inp, htoh4->weight);
    return expert_mlp(x, row_idx, inverse, offs, htoh4->weight, htoh4->bias, h4toh->weight, h4toh->bias,
                      detail::widen(topk_weights, x.scalar_type()), activation, combine);
  }
};

// Experts that compute every token beside its chosen ones: sigmoid(gate(x)) * mlp(x), without has_gate
// mlp(x).
struct SharedExperts : torch::nn::Module {
  SharedExperts(int64_t d_model, int64_t d_hidden, std::string activation = "gelu", bool bias = true,
                bool has_gate = false) {
    mlp = register_module("mlp",
                          std::make_shared<FusedExperts>(1, d_model, d_hidden, std::move(activation), bias));
    if (has_gate)
      gate = register_module("gate",
                             std::make_shared<WideLinear>(torch::nn::LinearOptions(d_model, 1).bias(false)));
  }

  Tensor forward(const Tensor& x) const {
    const Tensor out = mlp->on_rows(x, torch::full({1}, x.size(0), x.options().dtype(at::kLong)));
    return gate ? out * gate->forward(x).sigmoid().to(out.dtype()) : out;
  }

  std::shared_ptr<FusedExperts> mlp;
  std::shared_ptr<WideLinear> gate;
};

}  // namespace fmoe
