// Safetensors files: read whole, checked before a byte of them is used, and written so that Python loads
// them.
//
// The format: 8 bytes with the length of the header, a JSON header, the tensors one after the other.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "json.h"
#include "ops.h"

namespace fmoe {

using StateDict = std::map<std::string, Tensor>;

namespace detail {

struct DtypeName {
  const char* name;
  at::ScalarType dtype;
};
inline constexpr DtypeName kDtypeNames[] = {{"F64", at::kDouble},    {"F32", at::kFloat}, {"F16", at::kHalf},
                                            {"BF16", at::kBFloat16}, {"I64", at::kLong},  {"I32", at::kInt},
                                            {"I16", at::kShort},     {"I8", at::kChar},   {"U8", at::kByte},
                                            {"BOOL", at::kBool}};

struct Placed {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  int64_t begin, end;
};

inline Placed placed(const std::string& path, const std::string& name, const json::Value& entry) {
  const std::string where = path + ": " + name;
  const auto *dtype = entry.find("dtype"), *shape = entry.find("shape"),
             *offsets = entry.find("data_offsets");
  TORCH_CHECK(dtype && shape && shape->kind == json::Value::array && offsets && offsets->items.size() == 2,
              where, " has no dtype, shape or data_offsets");
  const auto* known = std::find_if(std::begin(kDtypeNames), std::end(kDtypeNames),
                                   [&](const DtypeName& d) { return dtype->text == d.name; });
  TORCH_CHECK(known != std::end(kDtypeNames), path, ": unknown dtype ", dtype->text, " of ", name);
  Placed place{name, known->dtype, {}, offsets->items[0].size(where), offsets->items[1].size(where)};
  int64_t num_bytes = static_cast<int64_t>(c10::elementSize(place.dtype));
  for (const auto& size : shape->items) {
    place.shape.push_back(size.size(where));
    TORCH_CHECK(!__builtin_mul_overflow(num_bytes, place.shape.back(), &num_bytes), where, " is too large");
  }
  TORCH_CHECK(place.begin <= place.end && place.end - place.begin == num_bytes, where, " has ",
              place.end - place.begin, " bytes, but its shape and dtype need ", num_bytes);
  return place;
}

// Reads the header of a file -> its tensors in the order of their places. They cover the file without gaps,
// or the file is refused.
inline std::vector<Placed> read_header(std::ifstream& file, const std::string& path, int64_t& data_begin) {
  std::error_code error;
  const auto file_size = std::filesystem::file_size(path, error);
  TORCH_CHECK(file && !error, path, " cannot be read");
  uint64_t length = 0;
  TORCH_CHECK(file_size >= sizeof length, path, " is no safetensors file, or truncated: it has ", file_size,
              " bytes");
  file.read(reinterpret_cast<char*>(&length),
            sizeof length);  // little-endian, as the processors that we support
  TORCH_CHECK(length <= file_size - sizeof length, path, " is no safetensors file, or truncated: it has ",
              file_size, " bytes, but its header says that it is ", length, " long");
  std::string text(length, '\0');
  file.read(text.data(), static_cast<std::streamsize>(length));
  TORCH_CHECK(file, path, " cannot be read");
  data_begin = static_cast<int64_t>(sizeof length + length);
  const json::Value header = json::Reader(text, path).read();
  TORCH_CHECK(header.kind == json::Value::object, path, " is damaged: its header is no object");
  std::vector<Placed> tensors;
  for (const auto& [name, entry] : header.members)
    if (name != "__metadata__") tensors.push_back(placed(path, name, entry));
  std::sort(tensors.begin(), tensors.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  int64_t end = 0;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.begin == end, path, " is damaged: ", tensor.name, " begins at ", tensor.begin,
                ", the tensor before it ends at ", end);
    end = tensor.end;
  }
  TORCH_CHECK(data_begin + end == static_cast<int64_t>(file_size), path, " is truncated or damaged: it has ",
              file_size, " bytes, its header needs ", data_begin + end);
  return tensors;
}

}  // namespace detail

// The tensors of a file, on the CPU. c10::Error that names the file, and the tensor, for truncated and
// damaged ones.
inline StateDict read_safetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  int64_t data_begin = 0;
  StateDict tensors;
  for (const auto& place : detail::read_header(file, path, data_begin)) {
    const Tensor tensor = torch::empty(place.shape, place.dtype);
    file.seekg(data_begin + place.begin);
    file.read(static_cast<char*>(tensor.data_ptr()), place.end - place.begin);
    TORCH_CHECK(file, path, " cannot be read at ", place.name);
    tensors.emplace(place.name, tensor);
  }
  return tensors;
}

// Writes tensors to one file that takes its name when it is whole, and leaves nothing behind if that fails.
inline void write_safetensors(const std::string& path, const StateDict& tensors) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  int64_t end = 0;
  for (const auto& [name, value] : tensors) {
    const Tensor& tensor = value;  // which a lambda of clang 14 cannot have from the line above
    const auto* known = std::find_if(std::begin(detail::kDtypeNames), std::end(detail::kDtypeNames),
                                     [&](const auto& d) { return tensor.scalar_type() == d.dtype; });
    TORCH_CHECK(known != std::end(detail::kDtypeNames), path, ": safetensors has no name for ",
                tensor.scalar_type(), ", the dtype of ", name);
    const int64_t begin = std::exchange(end, end + static_cast<int64_t>(tensor.nbytes()));
    std::string shape;
    for (const int64_t size : tensor.sizes()) shape += (shape.empty() ? "" : ",") + std::to_string(size);
    header += "," + json::quoted(name) + ":{\"dtype\":\"" + known->name + "\",\"shape\":[" + shape +
              "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::string unfinished = path + ".tmp";
  try {
    {
      std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
      const uint64_t length = header.size();
      file.write(reinterpret_cast<const char*>(&length), sizeof length);
      file << header;
      for (const auto& [name, tensor] : tensors) {
        const Tensor local = tensor.detach().cpu().contiguous();
        file.write(static_cast<const char*>(local.data_ptr()), static_cast<std::streamsize>(local.nbytes()));
      }
      file.flush();
      TORCH_CHECK(file, path, " cannot be written: no space, or no such folder");
    }
    std::filesystem::rename(unfinished, path);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(unfinished, ignored);
    throw;
  }
}

}  // namespace fmoe
