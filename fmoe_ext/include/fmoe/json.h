// A reader of JSON for headers of safetensors files, manifests, indexes and config.json: errors say where.
// Numbers are kept as they are written, and only whole ones are read (size()); escapes of surrogates are
// refused.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

namespace fmoe::json {

struct Value {
  enum Kind { null, boolean, number, string, array, object };
  Kind kind = null;
  bool truth = false;
  std::string text;  // of a string; of a number as it was written
  std::vector<Value> items;
  std::map<std::string, Value> members;

  // The member of an object, null if there is none.
  const Value* find(const std::string& name) const {
    const auto found = members.find(name);
    return kind == object && found != members.end() ? &found->second : nullptr;
  }
  // A whole number in [0, 10^18); c10::Error that names `where` for anything else.
  int64_t size(const std::string& where) const {
    const bool good = kind == number && !text.empty() && text.size() <= 18 &&
                      text.find_first_not_of("0123456789") == std::string::npos;
    TORCH_CHECK(good, where, " is no size in [0, 10^18)");
    return std::stoll(text);
  }
};

// The one value of a text; c10::Error that names `where` for anything else.
class Reader {
 public:
  Reader(const std::string& text, std::string where) : text_(text), where_(std::move(where)) {}

  Value read() {
    Value value = read_value(0);
    skip_space();
    check(at_ == text_.size(), "there is more after the value");
    return value;
  }

 private:
  static constexpr int kMaxDepth = 64;

  void check(bool good, const char* what) const {
    TORCH_CHECK(good, where_, " is damaged: ", what, " at byte ", at_, " of its JSON");
  }
  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }
  char peek() {
    skip_space();
    check(at_ < text_.size(), "it ends too early");
    return text_[at_];
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  bool take_word(const char* word) {
    const std::string expected = word;
    if (text_.compare(at_, expected.size(), expected) != 0) return false;
    at_ += expected.size();
    return true;
  }

  Value read_value(int depth) {
    check(depth < kMaxDepth, "it is nested too deeply");
    Value value;
    const char first = peek();
    if (first == '{') {
      read_object(value, depth);
    } else if (first == '[') {
      read_array(value, depth);
    } else if (first == '"') {
      value.kind = Value::string;
      value.text = read_string();
    } else if (take_word("true") || take_word("false")) {
      value.kind = Value::boolean;
      value.truth = first == 't';
    } else if (!take_word("null")) {
      read_number(value);
    }
    return value;
  }

  void read_object(Value& value, int depth) {
    value.kind = Value::object;
    take('{');
    if (take('}')) return;
    do {
      check(peek() == '"', "a name is missing");
      std::string name = read_string();
      check(take(':'), "a colon is missing");
      check(value.members.emplace(name, read_value(depth + 1)).second, "a name comes twice");
    } while (take(','));
    check(take('}'), "a brace is missing");
  }

  void read_array(Value& value, int depth) {
    value.kind = Value::array;
    take('[');
    if (take(']')) return;
    do value.items.push_back(read_value(depth + 1));
    while (take(','));
    check(take(']'), "a bracket is missing");
  }

  void read_number(Value& value) {
    value.kind = Value::number;
    const size_t end = text_.find_first_not_of("+-0123456789.eE", at_);
    value.text = text_.substr(at_, end == std::string::npos ? end : end - at_);
    check(!value.text.empty(), "there is no value");
    at_ += value.text.size();
  }

  std::string read_string() {
    std::string out;
    ++at_;
    for (;; ++at_) {
      check(at_ < text_.size(), "a string does not end");
      check(static_cast<unsigned char>(text_[at_]) >= ' ', "a string has a control character");
      if (text_[at_] == '"') break;
      if (text_[at_] != '\\') {
        out += text_[at_];
        continue;
      }
      ++at_;
      check(at_ < text_.size(), "a string does not end");
      read_escape(out);
    }
    ++at_;
    return out;
  }

  void read_escape(std::string& out) {
    const std::string escapes = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
    const size_t known = escapes.find(text_[at_]);
    if (known != std::string::npos) {
      out += meanings[known];
      return;
    }
    check(text_[at_] == 'u' && at_ + 4 < text_.size(), "an escape is unknown");
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      const std::string digits = "0123456789abcdef";
      const size_t digit = digits.find(static_cast<char>(text_[++at_] | 0x20));
      check(digit != std::string::npos, "an escape is unknown");
      code = code * 16 + static_cast<uint32_t>(digit);
    }
    check(code < 0xD800 || code > 0xDFFF, "a name has a surrogate");
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
    } else {
      out += {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 0x3F)),
              static_cast<char>(0x80 | (code & 0x3F))};
    }
  }

  const std::string& text_;
  std::string where_;
  size_t at_ = 0;
};

// A string as JSON writes it.
inline std::string quoted(const std::string& text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (byte < ' ') {
      out += std::string("\\u00") + kDigits[byte >> 4] + kDigits[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace fmoe::json
