// Weights in and out: load() takes folders of Python's fmoe_ext.checkpoint.save(), safetensors files and
// folders, and those of Hugging Face with a name for each expert or fused; save() writes a safetensors file.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_folder.h"
#include "layers.h"

namespace fmoe {

// The parameters and buffers of a module, not copied, by their names in Python's state dict.
inline StateDict state_dict(const torch::nn::Module& module) {
  StateDict state;
  for (const auto& entry : module.named_parameters())
    if (entry.value().defined()) state.emplace(entry.key(), entry.value());
  for (const auto& entry : module.named_buffers()) state.emplace(entry.key(), entry.value());
  return state;
}

namespace detail {

// {file: tensors that the folder's index has in it}; one file without any if there is no index. config.json
// may name the file or the index (transformers_weights), as Transformers reads it.
inline std::map<std::string, std::set<std::string>> model_files(const std::filesystem::path& path) {
  if (path.extension() == ".safetensors") return {{path.string(), {}}};
  json::Value named;
  if (std::filesystem::exists(path / "config.json")) {
    json::Value name;
    name.kind = json::Value::string;
    name.text = "config.json";
    const json::Value config = read_json(inside(path, name));
    if (const auto* found = config.find("transformers_weights")) named = *found;
  }
  const auto ends_with = [&](const std::string& end) {
    return named.text.size() >= end.size() &&
           named.text.compare(named.text.size() - end.size(), end.size(), end) == 0;
  };
  auto index = path / "model.safetensors.index.json";
  if (named.kind != json::Value::null) {
    const auto file = inside(path, named);
    if (ends_with(".safetensors")) return {{file.string(), {}}};
    TORCH_CHECK(ends_with(".safetensors.index.json"), path.string(), ": transformers_weights is ", named.text,
                ", which is no safetensors file or index");
    index = file;
  }
  if (!std::filesystem::exists(index)) {
    const auto single = path / "model.safetensors";
    TORCH_CHECK(std::filesystem::exists(single), "no model in ", path.string(),
                ": it has no manifest.json, model.safetensors or model.safetensors.index.json");
    return {{single.string(), {}}};
  }
  const json::Value content = read_json(index);
  const auto* map = content.find("weight_map");
  TORCH_CHECK(map && !map->members.empty(), index.string(), " is damaged: it has no weight_map");
  std::map<std::string, std::set<std::string>> files;
  for (const auto& [tensor, name] : map->members) {
    files[inside(path, name).string()].insert(tensor);
  }
  return files;
}

// Takes an entry out of a state dict.
inline Tensor take(StateDict& state, const std::string& name) {
  const auto found = state.find(name);
  TORCH_CHECK(found != state.end(), "the model's folder lacks ", name);
  return state.extract(found).mapped();
}

// The experts of one layer with names for each: gate and up rows [E, 2H, D], down rows [E, D, H].
inline void fuse_experts(StateDict& state, const std::string& layer,
                         const std::array<const char*, 3>& names) {
  std::vector<Tensor> gate_up, down;
  for (int e = 0; state.count(layer + "experts." + std::to_string(e) + "." + names[0] + ".weight"); ++e) {
    const std::string expert = layer + "experts." + std::to_string(e) + ".";
    const Tensor gate = take(state, expert + names[0] + ".weight");
    gate_up.push_back(torch::cat({gate, take(state, expert + names[1] + ".weight")}));
    down.push_back(take(state, expert + names[2] + ".weight"));
  }
  state[layer + "experts.htoh4.weight"] = torch::stack(gate_up);
  state[layer + "experts.h4toh.weight"] = torch::stack(down);
}

}  // namespace detail

// A state dict in a Hugging Face layout -> in ours: Mixtral (block_sparse_moe, w1 w3 w2), Qwen-MoE and OLMoE
// (mlp, gate_proj up_proj down_proj), and both fused (gate_up_proj, down_proj). Other entries pass through.
inline StateDict from_huggingface(StateDict state) {
  std::vector<std::string> gates;
  for (const auto& [name, tensor] : state)
    if (name.size() > 11 && name.compare(name.size() - 11, 11, "gate.weight") == 0) gates.push_back(name);
  for (const std::string& gate : gates) {
    const std::string layer = gate.substr(0, gate.size() - 11);
    if (state.count(layer + "experts.0.gate_proj.weight")) {
      detail::fuse_experts(state, layer, {"gate_proj", "up_proj", "down_proj"});
    } else if (state.count(layer + "experts.0.w1.weight")) {
      detail::fuse_experts(state, layer, {"w1", "w3", "w2"});
    } else if (state.count(layer + "experts.gate_up_proj")) {
      state[layer + "experts.htoh4.weight"] = detail::take(state, layer + "experts.gate_up_proj");
      state[layer + "experts.h4toh.weight"] = detail::take(state, layer + "experts.down_proj");
    } else {
      continue;
    }
    state[layer + "gate.gate.weight"] = detail::take(state, gate);
  }
  return state;
}

// The tensors of a safetensors file, or of a folder with manifest.json, latest, model.safetensors or
// model.safetensors.index.json.
inline StateDict read_model(const std::string& path) {
  if (detail::is_checkpoint(path)) return read_checkpoint(path);
  StateDict state;
  std::set<std::string> settled;  // names whose file the index names
  for (const auto& [file, named] : detail::model_files(path)) {
    for (auto& [name, value] : read_safetensors(file)) {
      const bool is_named = named.count(name);
      TORCH_CHECK(is_named || !settled.count(name), path, ": ", name,
                  " is in two files, and the index names another than ", file,
                  ", which Transformers reads, the last by name: leave the tensor in one file");
      if (is_named) {
        settled.insert(name);
        state.insert_or_assign(name, value);
      } else {
        state.emplace(name, value);
      }
    }
  }
  return from_huggingface(std::move(state));
}

// Loads a model from a file or folder; with a group, each rank keeps its own experts. Every tensor must be
// there and fit, or nothing is changed; no other tensor may be there.
inline void load(const std::string& path, torch::nn::Module& model) {
  StateDict given = read_model(path);
  std::vector<std::pair<Tensor, Tensor>> pairs;
  std::map<const void*, Group> groups;  // of the experts of layers that have one
  const auto note = [&](torch::nn::Module& module) {
    if (const auto* layer = dynamic_cast<FMoE*>(&module); layer && layer->group)
      for (const Tensor& p : layer->experts->parameters()) groups[p.data_ptr()] = layer->group;
  };
  note(model);
  for (const auto& module : model.modules(/*include_self=*/false)) note(*module);
  for (const auto& [name, value] : state_dict(model)) {
    const auto found = given.find(name);
    TORCH_CHECK(found != given.end(), "loading ", path, ": it lacks ", name);
    Tensor tensor = given.extract(found).mapped();
    const auto group = groups.find(value.data_ptr());
    if (group != groups.end() && tensor.dim() > 0 &&
        tensor.size(0) == value.size(0) * group->second->getSize())
      tensor = tensor.narrow(0, group->second->getRank() * value.size(0), value.size(0));
    TORCH_CHECK(tensor.sizes() == value.sizes() && tensor.scalar_type() == value.scalar_type(), "loading ",
                path, ": ", name, " is ", tensor.scalar_type(), " ", tensor.sizes(), ", but the model's is ",
                value.scalar_type(), " ", value.sizes());
    pairs.emplace_back(value, tensor);
  }
  TORCH_CHECK(given.empty(), "loading ", path, ": the model has no ",
              given.empty() ? "" : given.begin()->first);
  torch::NoGradGuard no_grad;
  for (auto& [value, tensor] : pairs) value.copy_(tensor);
}

// Writes folder/model.safetensors, which Python loads by checkpoint.load(folder, model).
inline void save(const std::string& folder, torch::nn::Module& model) {
  const auto check = [](torch::nn::Module& module) {
    const auto* layer = dynamic_cast<FMoE*>(&module);
    TORCH_CHECK(!layer || !layer->group || layer->group->getSize() == 1,
                "this rank has a part of the experts only: gather them into a model of one process first");
  };
  check(model);
  for (const auto& module : model.modules(/*include_self=*/false)) check(*module);
  std::filesystem::create_directories(folder);
  write_safetensors((std::filesystem::path(folder) / "model.safetensors").string(), state_dict(model));
}

}  // namespace fmoe
