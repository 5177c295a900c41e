// Trains a layer for as many steps as FOLDER/CASE.in.safetensors has inputs, from the weights that are there,
// and writes every step's loss, output and gradients to FOLDER/CASE.out.safetensors. tests/test_cpp.py does
// the same in Python.
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/library.h>

#include <fmoe/fmoe.h>

#include "first_program.inc"  // first_program(), the main() of docs/cpp.md

namespace {

using torch::Tensor;

fmoe::ScoredOptions scored(double z_weight, double capacity_factor, double scale) {
  fmoe::ScoredOptions options;
  options.z_weight = z_weight;
  options.capacity_factor = capacity_factor;
  options.scale = scale;
  return options;
}

fmoe::MlpOptions options_of(const std::string& name) {
  fmoe::MlpOptions o;
  o.num_expert = 4;
  o.d_model = 8;
  o.d_hidden = 16;
  if (name == "naive") return o;
  if (name == "softmax") {
    o.gate = fmoe::make_gate<fmoe::SoftmaxGate>(scored(0.1, 1.25, 1.5));
    o.activation = "swiglu";
    o.bias = false;
  } else if (name == "sigmoid") {
    fmoe::ScoredOptions options = scored(0, 0, 2.5);
    options.bias_update_speed = 0.01;
    o.gate = fmoe::make_gate<fmoe::SigmoidGate>(options);
    o.gate_bias = false;
    o.activation = "silu";
  } else if (name == "noisy") {
    o.gate = fmoe::make_gate<fmoe::NoisyGate>();
    o.activation = "relu";
  } else if (name == "switch") {
    o.gate = fmoe::make_gate<fmoe::SwitchGate>();
    o.top_k = 1;
    o.activation = "gelu_tanh";
  } else if (name == "gshard") {
    o.gate = fmoe::make_gate<fmoe::GShardGate>();
    o.activation = "geglu";
  } else if (name == "shared" || name == "valid" || name == "bfloat16") {
    o.gate = fmoe::make_gate<fmoe::SoftmaxGate>();
    o.shared_expert_hidden = 12;
    o.shared_expert_gate = true;
    o.activation = "geglu_tanh";
  } else {
    TORCH_CHECK(false, "no case ", name);
  }
  return o;
}

}  // namespace

void run_case(const std::string& folder, const std::string& name, const std::string& group_name) {
  torch::AutoGradMode with_gradients(true);
  if (const char* isa = std::getenv("FMOE_CPU_ISA")) fmoe::set_cpu_isa(isa);
  const std::string kind = name.substr(0, name.find('.'));  // softmax.0 on rank 0
  const fmoe::StateDict given = fmoe::read_safetensors(folder + "/" + name + ".in.safetensors");
  fmoe::MlpOptions options = options_of(kind);
  if (!group_name.empty()) {
    options.group = c10d::resolve_process_group(group_name);
    options.num_expert /= options.group->getSize();
  }
  torch::manual_seed(7);
  auto layer = std::make_shared<fmoe::FMoETransformerMLP>(options);
  fmoe::StateDict results;
  for (const auto& [key, value] : fmoe::state_dict(*layer)) results["first." + key] = value.detach().clone();
  const Tensor inputs = given.at("inputs"), valid = given.count("valid") ? given.at("valid") : Tensor();
  layer->to(inputs.scalar_type());
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  std::map<std::string, std::vector<Tensor>> records;
  for (int64_t step = 0; step < inputs.size(0); ++step) {
    optimizer.zero_grad();
    const Tensor x = inputs[step].detach().clone().requires_grad_();
    const Tensor y = layer->forward(x, valid);
    const Tensor loss = y.square().mean() + 0.1 * fmoe::total_loss(*layer);
    loss.backward();
    records["loss"].push_back(loss.detach());
    records["y"].push_back(y.detach());
    records["grad.x"].push_back(x.grad());
    for (const auto& entry : layer->named_parameters())
      records["grad." + entry.key()].push_back(entry.value().grad().clone());
    optimizer.step();
    fmoe::after_optimizer_step(*layer);
  }
  for (const auto& [key, values] : records) results[key] = torch::stack(values);
  for (const auto& [key, value] : fmoe::state_dict(*layer)) results["last." + key] = value;
  fmoe::write_safetensors(folder + "/" + name + ".out.safetensors", results);
}

namespace {

Tensor forward(const Tensor& x, const std::optional<Tensor>& valid) {
  auto layer = std::make_shared<fmoe::FMoETransformerMLP>(options_of("naive"));
  return layer->forward(x, valid.value_or(Tensor()));
}

// The loss of a NoisyGate with these weights, from random numbers of one seed, and its gradient of w_noise.
std::vector<Tensor> noisy_loss(const Tensor& x, const Tensor& w_gate, const Tensor& w_noise) {
  torch::AutoGradMode with_gradients(true);
  fmoe::NoisyGate gate(w_gate.size(0), w_gate.size(1), 1);
  {
    torch::NoGradGuard no_grad;
    gate.w_gate.copy_(w_gate);
    gate.w_noise.copy_(w_noise);
  }
  torch::manual_seed(0);
  gate.forward(x);
  return {gate.loss.detach(), torch::autograd::grad({gate.loss}, {gate.w_noise})[0]};
}

// A layer in a Hugging Face folder, under the name of its block, on x.
Tensor forward_of_folder(const std::string& folder, const Tensor& x) {
  fmoe::MlpOptions options = options_of("softmax");
  options.gate = fmoe::make_gate<fmoe::SoftmaxGate>();
  options.gate_bias = false;
  const bool is_mixtral = fmoe::read_model(folder).count("block_sparse_moe.gate.gate.weight");
  auto layer = std::make_shared<fmoe::FMoETransformerMLP>(options);
  auto model = std::make_shared<torch::nn::Module>();
  model->register_module(is_mixtral ? "block_sparse_moe" : "mlp", layer);
  fmoe::load(folder, *model);
  torch::NoGradGuard no_grad;
  return layer->forward(x);
}

// A file with one tensor, "x".
void write_file(const std::string& path, const Tensor& x) { fmoe::write_safetensors(path, {{"x", x}}); }

// Seconds of each of a number of steps, forward and backward, of a layer on [tokens, 64].
std::vector<double> step_seconds(int64_t tokens, int64_t steps) {
  torch::AutoGradMode with_gradients(true);
  fmoe::MlpOptions options = options_of("softmax");
  options.num_expert = 8;
  options.d_model = options.d_hidden = 64;
  options.gate = fmoe::make_gate<fmoe::SoftmaxGate>();
  auto layer = std::make_shared<fmoe::FMoETransformerMLP>(options);
  const Tensor x = torch::randn({tokens, 64}), grad = torch::ones({tokens, 64});
  std::vector<double> seconds;
  for (int64_t step = 0; step < steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    layer->forward(x).backward(grad);
    layer->zero_grad();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return seconds;
}

// Where the gates of a layer over a group count tokens: "cuda" if the group has no other backend, else "cpu".
std::string counts_on(const std::string& group_name) {
  return fmoe::GroupRanks(c10d::resolve_process_group(group_name)).device.str();
}

}  // namespace

TORCH_LIBRARY(fmoe_parity, m) {
  m.def("run_case(str folder, str name, str group_name) -> ()", &run_case);
  m.def("counts_on(str group_name) -> str", &counts_on);
  m.def("write_file(str path, Tensor x) -> ()", &write_file);
  m.def("step_seconds(int tokens, int steps) -> float[]", &step_seconds);
  m.def("forward(Tensor x, Tensor? valid) -> Tensor", &forward);
  m.def("noisy_loss(Tensor x, Tensor w_gate, Tensor w_noise) -> Tensor[]", &noisy_loss);
  m.def("forward_of_folder(str folder, Tensor x) -> Tensor", &forward_of_folder);
}
