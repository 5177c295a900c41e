// The gates with balance losses: SoftmaxGate, SigmoidGate, NoisyGate, SwitchGate, GShardGate. make_gate()
// makes one for a layer's options; a training loop calls total_loss() and after_optimizer_step() for all
// gates of a model. The same as fmoe_ext/gates/<gate>.py; options that are not here are Python's alone.
#pragma once

#include <cmath>
#include <memory>
#include <utility>

#include "layers.h"

namespace fmoe {

// Options of SoftmaxGate and SigmoidGate, named as those of ScoredGate in Python.
struct ScoredOptions {
  bool normalize = true;
  double scale = 1.0;
  bool balance_loss = true;  // "global"; false: None
  double balance_weight = 1.0;
  double z_weight = 0.0;
  double capacity_factor = 0.0;     // 0: drops nothing; drop_policy "position"
  double bias_update_speed = 1e-3;  // of SigmoidGate
};

// Base class of SoftmaxGate and SigmoidGate.
struct ScoredGate : NaiveGate {
  ScoredGate(int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k, bool gate_bias,
             const ScoredOptions& o_)
      : NaiveGate(d_model, num_expert, world_size, top_k, gate_bias, o_.normalize), o(o_) {
    TORCH_CHECK_VALUE(o.balance_weight >= 0, "balance_weight must not be negative, but got ",
                      o.balance_weight);
    TORCH_CHECK_VALUE(o.z_weight >= 0, "z_weight must not be negative, but got ", o.z_weight);
    TORCH_CHECK_VALUE(o.scale > 0 && std::isfinite(o.scale), "scale must be a positive number, but got ",
                      o.scale);
    TORCH_CHECK_VALUE(o.capacity_factor >= 0, "capacity_factor must be positive, or 0 for no limit, but got ",
                      o.capacity_factor);
  }

  Choices forward(const Tensor& inp) override {
    const Tensor scores = logits(inp);
    auto [topk_idx, topk_weights] = select(scores);
    loss = scores.new_zeros({});
    if (o.balance_loss)
      loss = fmoe::balance_loss_of_logits(scores, balance_choices(scores, topk_idx), *ranks, score());
    if (o.balance_loss && o.balance_weight != 1) loss = loss * o.balance_weight;
    if (o.z_weight != 0) loss = loss + o.z_weight * z_loss(scores, *ranks);
    if (o.capacity_factor > 0) {
      const int64_t num_tokens = ranks->num_tokens(topk_idx.size(0));
      const int64_t capacity = expert_capacity(o.capacity_factor, num_tokens, top_k, tot_expert);
      topk_idx = ranks->apply_capacity(topk_idx, tot_expert, capacity);
    }
    return {topk_idx, topk_weights};
  }

  ScoredOptions o;

 protected:
  // logits [T, E] -> topk_idx, topk_weights [T, K], before any choice is dropped.
  virtual Choices select(const Tensor& scores) = 0;
  // The score whose probabilities the balance loss averages, and the choices [T, K] that it counts.
  virtual const char* score() const = 0;
  virtual Tensor balance_choices(const Tensor& scores, const Tensor& topk_idx) = 0;
};

// Top-k of the softmax, the gate of most open models; balance loss of the global batch.
struct SoftmaxGate : ScoredGate {
  SoftmaxGate(int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k = 2,
              bool gate_bias = true, const ScoredOptions& options = {})
      : ScoredGate(d_model, num_expert, world_size, top_k, gate_bias, options) {}

 protected:
  Choices select(const Tensor& scores) override {
    return topk_gate(scores, top_k, "softmax", normalize, {}, 1, 1, o.scale);
  }
  const char* score() const override { return "softmax"; }
  Tensor balance_choices(const Tensor&, const Tensor& topk_idx) override { return topk_idx; }
};

// The gate of DeepSeek-V3: sigmoid scores, balanced by a bias that after_optimizer_step() moves. Its balance
// loss is off by default (no_loss()); ScoredOptions has it on.
struct SigmoidGate : ScoredGate {
  SigmoidGate(int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k = 2,
              bool gate_bias = true, const ScoredOptions& options = no_loss())
      : ScoredGate(d_model, num_expert, world_size, top_k, gate_bias, options) {
    TORCH_CHECK_VALUE(o.bias_update_speed >= 0, "bias_update_speed must not be negative, but got ",
                      o.bias_update_speed);
    expert_bias = register_buffer("expert_bias", torch::zeros({tot_expert}));
    pending_load = register_buffer("pending_load", torch::zeros({tot_expert}, at::kLong));
  }

  static ScoredOptions no_loss() {
    ScoredOptions options;
    options.balance_loss = false;
    return options;
  }

  // One step of the bias from the load of all ranks since the last one.
  void after_optimizer_step() override {
    if (o.bias_update_speed == 0) return;
    torch::NoGradGuard no_grad;
    const Tensor load = ranks->sum(pending_load).to(at::kFloat);
    expert_bias += o.bias_update_speed * torch::sign(load.mean() - load);
    pending_load.zero_();
  }

  Tensor expert_bias, pending_load;

 protected:
  Choices select(const Tensor& scores) override {
    const Tensor bias = expert_bias.to(scores.dtype());
    auto [topk_idx, topk_weights] = topk_gate(scores, top_k, "sigmoid", normalize, bias, 1, 1, o.scale);
    if (is_training()) pending_load += count_tokens(topk_idx, tot_expert);
    return {topk_idx, topk_weights};
  }
  const char* score() const override { return "sigmoid"; }
  Tensor balance_choices(const Tensor& scores, const Tensor&) override {
    return std::get<0>(topk_gate(scores.detach(), top_k, "sigmoid"));
  }
};

// The gate of "Outrageously Large Neural Networks" (2017): top-k of logits with learned noise.
struct NoisyGate : Gate {
  NoisyGate(int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k = 2)
      : Gate(num_expert, world_size, top_k) {
    w_gate = register_parameter("w_gate", torch::empty({d_model, tot_expert}));
    w_noise = register_parameter("w_noise", torch::empty({d_model, tot_expert}));
    torch::nn::init::kaiming_uniform_(w_gate, std::sqrt(5.0));
    torch::nn::init::kaiming_uniform_(w_noise, std::sqrt(5.0));
  }

  Choices forward(const Tensor& inp) override {
    TORCH_CHECK_VALUE(inp.dim() == 2 && inp.size(1) == w_gate.size(0),
                      "inp must have shape [T, d_model=", w_gate.size(0), "], but got ", inp.sizes());
    constexpr double kNoiseFloor = 1e-2;  // smallest standard deviation, so that the load is differentiable
    const Tensor clean = wide_linear(inp, w_gate.t());
    const Tensor stddev = torch::softplus(wide_linear(inp, w_noise.t())) + kNoiseFloor;
    const Tensor noisy = is_training() ? clean + torch::randn_like(clean) * stddev : clean;
    auto [topk_idx, topk_weights] = topk_gate(noisy, top_k);
    const Tensor gates = torch::zeros_like(noisy).scatter(1, topk_idx, topk_weights);
    const Tensor load = is_training() && top_k < tot_expert ? prob_in_top_k(clean, noisy, stddev).sum(0)
                                                            : (gates > 0).sum(0).to(clean.dtype());
    const Tensor sums = ranks->sum(torch::stack({gates.sum(0), load}));
    loss = cv_squared(sums[0]) + cv_squared(sums[1]);
    return {topk_idx, topk_weights};
  }

  Tensor w_gate, w_noise;

 private:
  // Probability [T, E] that an expert is chosen when its noise alone is drawn again.
  Tensor prob_in_top_k(const Tensor& clean, const Tensor& noisy, const Tensor& stddev) const {
    const Tensor top = std::get<0>(noisy.topk(top_k + 1, 1));
    const auto last = top.slice(1, -2).split(1, 1);
    const Tensor others = torch::where(noisy > last[1], last[1], last[0]);  // best value that must be beaten
    const Tensor lead = clean - others;
    const Tensor decided = lead.isfinite().logical_not();  // one of them is -inf: no noise changes that
    const Tensor drawn = torch::special::ndtr(lead.masked_fill(decided, 0) / stddev);
    return torch::where(decided, (clean > others).to(drawn.scalar_type()), drawn);
  }
  // Unbiased variance / mean^2 of x [E], 0 for one expert.
  static Tensor cv_squared(const Tensor& x) {
    if (x.numel() == 1) return x.new_zeros({});
    return x.var() / (x.mean().square() + 1e-10);
  }
};

// Base class of SwitchGate and GShardGate: what they do with the capacity of experts in training and in
// evaluation.
struct CapacityGate : NaiveGate {
  CapacityGate(int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k, bool gate_bias,
               bool normalize, std::pair<double, double> capacity_)
      : NaiveGate(d_model, num_expert, world_size, top_k, gate_bias, normalize), capacity(capacity_) {
    TORCH_CHECK_VALUE(capacity.first > 0 && capacity.second > 0,
                      "capacity must be two positive factors (training, evaluation), but got (",
                      capacity.first, ", ", capacity.second, ")");
  }
  double factor() const { return is_training() ? capacity.first : capacity.second; }

  std::pair<double, double> capacity;
};

// The gate of the Switch Transformer: top-1 weighted by its probability, jitter, capacity, balance loss.
struct SwitchGate : CapacityGate {
  SwitchGate(int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k = 1,
             bool gate_bias = true, double switch_eps_ = 0.1, std::pair<double, double> capacity = {1.2, 2.4})
      : CapacityGate(d_model, num_expert, world_size, top_k, gate_bias, false, capacity),
        switch_eps(switch_eps_) {}

  Choices forward(const Tensor& inp) override {
    const Tensor scores = logits(jittered(inp));
    const auto [chosen, topk_weights] = topk_gate(scores, top_k, "softmax", false);
    const int64_t num_tokens = ranks->num_tokens(chosen.size(0));
    const int64_t limit = expert_capacity(factor(), num_tokens, top_k, tot_expert);
    const Tensor topk_idx = ranks->apply_capacity(chosen, tot_expert, limit);
    loss = balance_loss_of_logits(scores, chosen, *ranks);
    return {topk_idx, topk_weights};
  }

  double switch_eps;

 private:
  Tensor jittered(const Tensor& inp) const {
    if (!is_training() || switch_eps == 0) return inp;
    const Tensor wide = inp.to(c10::promoteTypes(inp.scalar_type(), at::kFloat));
    return wide * (torch::rand_like(wide) * (2 * switch_eps) + (1 - switch_eps));
  }
};

// The gate of GShard: top-2 with normalised weights, capacity, random second choice and balance loss.
struct GShardGate : CapacityGate {
  GShardGate(int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k = 2,
             bool gate_bias = true, std::pair<double, double> capacity = {1.2, 2.4},
             bool random_routing_ = true)
      : CapacityGate(d_model, num_expert, world_size, top_k, gate_bias, true, capacity),
        random_routing(random_routing_) {
    TORCH_CHECK_VALUE(top_k == 2, "GShardGate chooses two experts: topk must be 2, but got ", top_k);
  }

  Choices forward(const Tensor& inp) override {
    const Tensor scores = logits(inp);
    const auto [chosen, topk_weights] = topk_gate(scores, top_k);
    loss = balance_loss_of_logits(scores, chosen.slice(1, 0, 1), *ranks);
    const auto num_tokens = static_cast<double>(ranks->num_tokens(chosen.size(0)));
    const int64_t limit = static_cast<int64_t>(std::ceil(factor() * num_tokens)) * top_k / tot_expert;
    Tensor topk_idx = ranks->apply_capacity(chosen, tot_expert, limit);
    if (random_routing && is_training()) topk_idx = drop_at_random(topk_idx, topk_weights);
    return {topk_idx, topk_weights};
  }

  bool random_routing;

 private:
  // A second choice of weight w stays with probability min(1, 2 * w).
  static Tensor drop_at_random(const Tensor& topk_idx, const Tensor& topk_weights) {
    const Tensor weight = topk_weights.select(1, 1).detach();
    const Tensor second = torch::where(2 * weight < torch::rand_like(weight), -1, topk_idx.select(1, 1));
    return torch::stack({topk_idx.select(1, 0), second}, 1);
  }
};

// A GateMaker of a gate class: MlpOptions.gate = make_gate<SoftmaxGate>(). options: the gate's, after
// gate_bias.
template <class Class, class... Options>
GateMaker make_gate(Options... options) {
  return
      [options...](int64_t d_model, int64_t num_expert, int64_t world_size, int64_t top_k, bool gate_bias) {
        if constexpr (std::is_same_v<Class, NoisyGate>)
          return std::make_shared<Class>(d_model, num_expert, world_size, top_k, options...);
        else
          return std::make_shared<Class>(d_model, num_expert, world_size, top_k, gate_bias, options...);
      };
}

namespace detail {
inline void for_each_gate(torch::nn::Module& model, const std::function<void(Gate&)>& visit) {
  if (auto* gate = dynamic_cast<Gate*>(&model)) visit(*gate);
  for (const auto& module : model.modules(/*include_self=*/false))
    if (auto* gate = dynamic_cast<Gate*>(module.get())) visit(*gate);
}
}  // namespace detail

// The sum of the losses that the gates of a model have from their last forward -> scalar.
inline Tensor total_loss(torch::nn::Module& model) {
  Tensor total;
  detail::for_each_gate(model, [&](Gate& gate) {
    if (gate.loss.defined()) total = (total.defined() ? total : gate.loss.new_zeros({})) + gate.loss.sum();
  });
  TORCH_CHECK_VALUE(total.defined(), "the model has no gate of fmoe with a loss: call its forward first");
  return total;
}

// Moves the biases of SigmoidGates. Call it after each step of the optimizer.
inline void after_optimizer_step(torch::nn::Module& model) {
  detail::for_each_gate(model, [](Gate& gate) { gate.after_optimizer_step(); });
}

}  // namespace fmoe
