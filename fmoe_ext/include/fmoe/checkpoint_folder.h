// read_checkpoint(), for read_model() of checkpoint.h: folders that Python's fmoe_ext.checkpoint.save()
// writes. manifest.json says where each tensor is; its parts are in *.distcp files as torch.save writes them,
// and torch::pickle_load reads those.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <torch/serialize.h>

#include "json.h"
#include "safetensors.h"

namespace fmoe {

namespace detail {

inline json::Value read_json(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, path.string(), " cannot be read");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return json::Reader(text, path.string()).read();
}

// folder/name, where name is one component and the file, links followed, is in the folder, or among the blobs
// of the Hugging Face hub's cache.
inline std::filesystem::path inside(const std::filesystem::path& folder, const json::Value& name) {
  const bool is_name = name.kind == json::Value::string && !name.text.empty() && name.text[0] != '.' &&
                       name.text.find_first_of("/\\") == std::string::npos;
  TORCH_CHECK(is_name, folder.string(), ": \"", name.text, "\" is no name of a file in this folder");
  const auto path = folder / name.text;
  std::error_code error;
  const auto target = std::filesystem::canonical(path, error);
  TORCH_CHECK(!error, path.string(), " is missing");
  const auto parent = std::filesystem::canonical(folder);
  const bool of_hub = parent.parent_path().filename() == "snapshots" &&
                      target.parent_path() == parent.parent_path().parent_path() / "blobs";
  TORCH_CHECK(target.parent_path() == parent || of_hub, path.string(), " is a link to ", target.string(),
              ", outside the folder");
  return path;
}

inline bool is_checkpoint(const std::filesystem::path& path) {
  return std::filesystem::exists(path / "manifest.json") || std::filesystem::exists(path / "latest");
}

// The folder of one step: the path itself, or the newest one in it.
inline std::filesystem::path step_folder(const std::filesystem::path& path) {
  if (std::filesystem::exists(path / "manifest.json")) return path;
  json::Value name;
  name.kind = json::Value::string;
  std::getline(std::ifstream(path / "latest") >> std::ws, name.text);
  return inside(path, name);
}

inline std::vector<int64_t> sizes_of(const std::string& where, const json::Value& list) {
  TORCH_CHECK(list.kind == json::Value::array && list.items.size() <= 64, where, " has no list of sizes");
  std::vector<int64_t> sizes;
  for (const auto& item : list.items) sizes.push_back(item.size(where));
  return sizes;
}

inline at::ScalarType dtype_named(const std::string& where, const std::string& name) {
  for (const auto& known : kDtypeNames)
    if (dtype_text(known.dtype) == "torch." + name) return known.dtype;
  TORCH_CHECK(false, where, " has dtype \"", name, "\"");
}

// One part of a tensor: [offsets, sizes, file, first byte, number of bytes].
inline Tensor read_part(const std::filesystem::path& folder, const std::string& where,
                        const json::Value& part, at::ScalarType dtype) {
  const auto path = inside(folder, part.items[2]);
  const int64_t begin = part.items[3].size(where), num_bytes = part.items[4].size(where);
  const auto file_size = static_cast<int64_t>(std::filesystem::file_size(path));
  TORCH_CHECK(num_bytes <= file_size && begin <= file_size - num_bytes, path.string(),
              " is truncated: it has no ", num_bytes, " bytes at ", begin);
  std::vector<char> bytes(num_bytes);
  std::ifstream file(path, std::ios::binary);
  file.seekg(begin);
  file.read(bytes.data(), num_bytes);
  TORCH_CHECK(file, path.string(), " cannot be read at ", begin);
  torch::IValue value;
  try {
    value = torch::pickle_load(bytes);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, path.string(), ": the part of ", where, " at ", begin,
                " cannot be read: ", error.what());
  }
  TORCH_CHECK(value.isTensor(), path.string(), ": the part of ", where, " at ", begin, " is no tensor");
  const Tensor tensor = value.toTensor();
  const auto sizes = sizes_of(where, part.items[1]);
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes() == sizes, path.string(), ": the part of ",
              where, " at ", begin, " is ", tensor.scalar_type(), " ", tensor.sizes(), ", expected ", dtype,
              " ", at::IntArrayRef(sizes));
  return tensor;
}

inline Tensor read_tensor(const std::filesystem::path& folder, const std::string& where,
                          const json::Value& entry) {
  const auto *shape = entry.find("shape"), *dtype = entry.find("dtype"), *parts = entry.find("chunks");
  TORCH_CHECK(shape && dtype && parts && parts->kind == json::Value::array, where,
              " has no shape, dtype or chunks");
  const auto sizes = sizes_of(where, *shape);
  Tensor whole;
  std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> places;  // offsets, lengths
  int64_t missing = 1;
  for (const int64_t size : sizes)
    TORCH_CHECK(!__builtin_mul_overflow(missing, size, &missing), where, " is too large");
  for (const auto& part : parts->items) {
    TORCH_CHECK(part.items.size() == 5, where, " has a part without place");
    const auto offsets = sizes_of(where, part.items[0]), lengths = sizes_of(where, part.items[1]);
    bool fits = offsets.size() == sizes.size() && lengths.size() == sizes.size();
    for (size_t i = 0; fits && i < sizes.size(); ++i) fits = offsets[i] + lengths[i] <= sizes[i];
    TORCH_CHECK(fits, where, " has a part that is outside of it");
    for (const auto& [begins, counts] : places) {
      bool overlap = true;  // in every dimension
      for (size_t i = 0; i < sizes.size(); ++i)
        overlap &= offsets[i] < begins[i] + counts[i] && begins[i] < offsets[i] + lengths[i];
      TORCH_CHECK(!overlap, where, " has parts that overlap");  // they would leave a gap
    }
    places.emplace_back(offsets, lengths);
    const Tensor tensor = read_part(folder, where, part, dtype_named(where, dtype->text));
    if (!whole.defined()) whole = torch::empty(sizes, tensor.options());
    Tensor place = whole;
    for (size_t i = 0; i < sizes.size(); ++i)
      place = place.narrow(static_cast<int64_t>(i), offsets[i], lengths[i]);
    place.copy_(tensor);
    missing -= tensor.numel();
  }
  TORCH_CHECK(missing == 0, where, ": its parts are not together ", at::IntArrayRef(sizes));
  return whole.defined() ? whole : torch::empty(sizes, dtype_named(where, dtype->text));
}

}  // namespace detail

// The model's tensors in a folder of checkpoint.save(), the newest step of it or one step's own folder.
// c10::Error that names file and tensor for truncated files and parts that do not fit. Hashes are not
// compared: `python -m fmoe_ext.checkpoint inspect` does that.
inline StateDict read_checkpoint(const std::string& path) {
  const auto folder = detail::step_folder(path);
  const std::string where = (folder / "manifest.json").string();
  const json::Value manifest = detail::read_json(where);
  const auto *version = manifest.find("version"), *tensors = manifest.find("tensors");
  // 3 has the `extra` of every rank, which is not read here
  TORCH_CHECK(version && (version->text == "2" || version->text == "3") && tensors &&
                  tensors->kind == json::Value::object,
              where, " is no manifest of version 2 or 3: Python's checkpoint.load() reads older ones");
  const std::string prefix = "model.";
  StateDict state;
  for (const auto& [key, entry] : tensors->members)
    if (key.compare(0, prefix.size(), prefix) == 0)
      state.emplace(key.substr(prefix.size()), detail::read_tensor(folder, where + ": " + key, entry));
  return state;
}

}  // namespace fmoe
