// A weight of frozen_mlp, frozen_gemm and _decode_packed, [E, out, in]: a tensor of the dtype of x, or packed
// in a format of packed.h, whose arguments are checked here. The CPU multiplies with its rows (row(),
// rows()); CUDA decodes the whole of it (matrix()).
#pragma once

#include <algorithm>
#include <optional>

#include "checks.h"
#include "gemm/packed.h"

namespace fmoe_ext {

// What a caller says of a packed weight beside its bytes.
struct Packing {
  std::optional<Tensor> scale, zero;
  int64_t format;    // a number in frozen.FORMATS, plus kIntegers if it may be multiplied in integers
  bool interleaved;  // rows of gate and up take turns
};

class FrozenWeight {
 public:
  static constexpr int64_t kIntegers = 64;  // added to the number of a format: integer products

  // data: the weight, or bytes [E, out, bytes of a row]; name: of the argument.
  FrozenWeight(const Tensor& data, const Packing& packing, const char* name, bool on_cpu = true)
      : data_(data), packing_(packing), name_(name), on_cpu_(on_cpu) {
    check_device(data);
    integers_ = packing.format >= kIntegers;
    const int64_t format = packing.format - (integers_ ? kIntegers : 0);
    STD_TORCH_CHECK(format >= 0 && format < gemm::kNumPackedFormats, name, "_format must be in [0, ",
                    gemm::kNumPackedFormats, "), a number in frozen.FORMATS, but got ", packing.format);
    format_ = static_cast<gemm::PackedFormat>(format);
    STD_TORCH_CHECK(!integers_ || gemm::block_of_integers(format_), name,
                    "_format must be q8_0 or q4_k for integer products, but got ", format);
    if (!is_packed()) {
      data_ = as_contiguous(data);
      STD_TORCH_CHECK(!packing.scale && !packing.zero && !packing.interleaved, name,
                      "_scale, zero and interleaved must be left out: ", name, " is not packed");
      return;
    }
    check_dim(data, 3, name, "[E, out, bytes of a row]");
    for (int d = 0; d < 3; ++d) sizes_[d] = data.size(d);
    STD_TORCH_CHECK(data.scalar_type() == ScalarType::Byte, name,
                    " must be uint8 when it is packed, but got ", dtype_text(data));
    STD_TORCH_CHECK(!packing.interleaved || sizes_[1] % 2 == 0, name,
                    " must have an even number of rows when they are interleaved, but got shape ",
                    shape_text(data));
    data_ = as_contiguous(data);
    if (packing.scale) packing_.scale = as_contiguous(*packing.scale);
    if (packing.zero) packing_.zero = as_contiguous(*packing.zero);
    check_packed();
    find_rows();
  }

  // The format if products with it are in integers, else none.
  gemm::PackedFormat integers() const { return integers_ ? format_ : gemm::PackedFormat::none; }
  bool is_packed() const { return format_ != gemm::PackedFormat::none; }
  const Tensor& tensor() const { return data_; }
  int64_t dim() const { return data_.dim(); }
  int64_t size(int64_t d) const { return is_packed() ? sizes_[d] : data_.size(d); }

  gemm::PackedMatrix matrix() const {
    return {format_,          scale_type_,  packing_.interleaved,
            bytes_,           scale_bytes_, zero_words_,
            factors_,         sizes_[0],    sizes_[1],
            sizes_[2],        group_,       row_bytes_,
            scale_row_bytes_, scale_rows_,  part_rows_};
  }

  // Rows [first, first + n) of an expert, counted with gates before ups; n > 0.
  void rows(int64_t expert, int64_t first, int64_t n, gemm::PackedRow* out) const {
    row(expert, first, out[0]);
    const bool in_step = !packing_.interleaved && !zero_words_ && !has_squares();
    const uint8_t* data = out[0].data;
    const char* scale = out[0].scale;
    const float* factors = out[0].factors;
    for (int64_t j = 1; j < n; ++j) {
      if (in_step)
        out[j] = {format_,
                  scale_type_,
                  data += row_bytes_,
                  sizes_[2],
                  scale += scale_row_bytes_,
                  group_,
                  nullptr,
                  0,
                  factors ? factors += 2 : nullptr};
      else
        row(expert, first + j, out[j]);
    }
  }
  // Row `row` of an expert.
  void row(int64_t expert, int64_t row, gemm::PackedRow& out) const {
    const int64_t at = stored(row), line = expert * sizes_[1] + at;
    out.format = format_;
    out.scale_type = scale_type_;
    out.data = bytes_ + line * row_bytes_;
    out.columns = sizes_[2];
    out.group = group_;
    out.scale = nullptr;
    out.zero = nullptr;
    out.zero_shift = 0;
    out.factors = factors_ ? factors_ + 2 * line : nullptr;
    if (scale_bytes_) {
      out.scale =
          scale_bytes_ + (has_squares() ? expert * scale_rows_ + block_row(at) : line) * scale_row_bytes_;
    }
    if (zero_words_) {
      out.zero = zero_words_ + (expert * ((sizes_[1] + 7) / 8) + at / 8) * (sizes_[2] / group_);
      out.zero_shift = static_cast<int>(at % 8 * 4);
    }
  }

 private:
  void check_device(const Tensor& t) const {
    if (on_cpu_) check_cpu(t, name_);
  }
  static constexpr int64_t kBlock = gemm::kScaledSquare;
  const gemm::PackedLayout& layout() const { return gemm::layout_of(format_); }
  bool has_squares() const { return layout().scaled == gemm::Scaled::square; }
  static int64_t blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }
  int64_t stored(int64_t row) const {
    const int64_t half = sizes_[1] / 2;
    return !packing_.interleaved ? row : row < half ? 2 * row : 2 * (row - half) + 1;
  }
  int64_t block_row(int64_t row) const {
    return row / part_rows_ * blocks(part_rows_) + row % part_rows_ / kBlock;
  }

  gemm::ScaleType scale_type_of(const Tensor& t) const {
    switch (t.scalar_type()) {
      case ScalarType::Float:
        return gemm::ScaleType::float32;
      case ScalarType::BFloat16:
        return gemm::ScaleType::bfloat16;
      case ScalarType::Half:
        return gemm::ScaleType::float16;
      case ScalarType::Byte:
        return layout().scale_types[0] == gemm::ScaleType::e4m3 ? gemm::ScaleType::e4m3
                                                                : gemm::ScaleType::e8m0;
      default:
        return gemm::ScaleType::none;
    }
  }
  void check_scale() {
    STD_TORCH_CHECK(packing_.scale, name_, "_scale must be given: format ", packing_.format, " has scales");
    const Tensor& t = *packing_.scale;
    check_device(t);
    scale_type_ = scale_type_of(t);
    bool known = false;
    for (const gemm::ScaleType type : layout().scale_types)
      known |= type == scale_type_ && type != gemm::ScaleType::none;
    STD_TORCH_CHECK(known, name_, "_scale must have a dtype of format ", packing_.format, ", but got ",
                    dtype_text(t));
    const int64_t dims = has_squares() && t.dim() == 4 ? 4 : 3;
    STD_TORCH_CHECK(t.dim() == dims && t.size(0) == sizes_[0], name_, "_scale must have shape [", sizes_[0],
                    ", rows, groups], but got shape ", shape_text(t));
  }
  void check_scale_shape(int64_t rows, int64_t columns) const {
    const Tensor& t = *packing_.scale;
    STD_TORCH_CHECK(t.size(1) == rows && t.size(2) == columns, name_, "_scale must have shape [", sizes_[0],
                    ", ", rows, ", ", columns, "] for ", name_, " ", shape_text(data_), ", but got shape ",
                    shape_text(t));
  }
  // Scales are for `group` columns each, a multiple of 32.
  void check_groups() {
    const int64_t groups = packing_.scale->size(2);
    check_scale_shape(sizes_[1], groups);
    STD_TORCH_CHECK(groups > 0 && sizes_[2] % groups == 0 && sizes_[2] / groups % 32 == 0, name_,
                    "_scale must be for groups of a multiple of 32 columns, but ", name_, " has ", sizes_[2],
                    " columns and ", groups, " groups");
    group_ = std::max<int64_t>(sizes_[2] / groups, 32);  // without columns too, for kernels divide by it
  }
  // Scales [E, rows, columns] of one matrix, or [E, parts, rows, columns] of parts that follow each other,
  // whose last blocks may be partial.
  void check_squares() {
    const Tensor& t = *packing_.scale;
    const bool joined = t.dim() == 4;
    const int64_t parts = joined ? t.size(1) : 1;
    STD_TORCH_CHECK(parts > 0 && sizes_[1] % parts == 0, name_, " must have ", parts,
                    " equal parts, as its scale has, but got shape ", shape_text(data_));
    part_rows_ = std::max<int64_t>(sizes_[1] / parts, 1);
    STD_TORCH_CHECK(t.size(-2) == blocks(sizes_[1] / parts) && t.size(-1) == blocks(sizes_[2]), name_,
                    "_scale must have shape [", sizes_[0], ", ", joined ? std::to_string(parts) + ", " : "",
                    blocks(sizes_[1] / parts), ", ", blocks(sizes_[2]), "] for ", name_, " ",
                    shape_text(data_), ", but got shape ", shape_text(t));
  }
  void check_packed() {
    using gemm::Scaled;
    STD_TORCH_CHECK(!packing_.zero || layout().third != gemm::Third::none, name_,
                    "_zero must be None for format ", packing_.format);
    if (layout().scaled != Scaled::inside)
      check_scale();
    else
      STD_TORCH_CHECK(!packing_.scale, name_, "_scale must be None: format ", packing_.format,
                      " has its scales inside");
    STD_TORCH_CHECK(data_.size(2) % layout().block_bytes == 0, name_, " must have rows of whole blocks of ",
                    layout().block_bytes, " bytes, but got shape ", shape_text(data_));
    sizes_[2] = data_.size(2) / layout().block_bytes * layout().block_columns;
    switch (layout().scaled) {
      case Scaled::inside:
        break;
      case Scaled::block:
        group_ = layout().block_columns / layout().scales_of_block;
        check_scale_shape(sizes_[1], sizes_[2] / group_);
        break;
      case Scaled::group:
        check_groups();
        break;
      case Scaled::square:
        group_ = kBlock;
        check_squares();
        break;
    }
    if (layout().third == gemm::Third::factors)
      check_factors();
    else if (packing_.zero)
      check_zero(*packing_.zero);
  }
  // Asking a tensor for its address costs as much as a short row.
  void find_rows() {
    bytes_ = static_cast<const uint8_t*>(data_.const_data_ptr());
    row_bytes_ = data_.size(2);
    if (packing_.scale) {
      scale_bytes_ = static_cast<const char*>(packing_.scale->const_data_ptr());
      scale_row_bytes_ = packing_.scale->size(-1) * packing_.scale->element_size();
      scale_rows_ =
          packing_.scale->numel() / std::max<int64_t>(packing_.scale->size(0) * packing_.scale->size(-1), 1);
    }
    if (!packing_.zero) return;
    if (layout().third == gemm::Third::factors)
      factors_ = static_cast<const float*>(packing_.zero->const_data_ptr());
    else
      zero_words_ = static_cast<const int32_t*>(packing_.zero->const_data_ptr());
  }
  void check_zero(const Tensor& zero) const {
    check_device(zero);
    const int64_t words = (sizes_[1] + 7) / 8, groups = packing_.scale->size(2);
    STD_TORCH_CHECK(zero.scalar_type() == ScalarType::Int && zero.dim() == 3 && zero.size(0) == sizes_[0] &&
                        zero.size(1) == words && zero.size(2) == groups,
                    name_, "_zero must be int32 [", sizes_[0], ", ", words, ", ", groups, "], but got ",
                    dtype_text(zero), " ", shape_text(zero));
  }

  void check_factors() const {
    STD_TORCH_CHECK(packing_.zero, name_, "_zero must be given: format ", packing_.format,
                    " has two factors of each row there");
    const Tensor& t = *packing_.zero;
    check_device(t);
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 3 && t.size(0) == sizes_[0] &&
                        t.size(1) == sizes_[1] && t.size(2) == 2,
                    name_, "_zero must be float32 [", sizes_[0], ", ", sizes_[1], ", 2], but got ",
                    dtype_text(t), " ", shape_text(t));
  }

  Tensor data_;
  Packing packing_;
  const char* name_;
  bool on_cpu_;  // else the caller has compared the devices
  gemm::PackedFormat format_ = gemm::PackedFormat::none;
  bool integers_ = false;
  gemm::ScaleType scale_type_ = gemm::ScaleType::none;
  int64_t sizes_[3] = {}, group_ = 0;  // [E, out, in], and columns of one scale
  const uint8_t* bytes_ = nullptr;
  const char* scale_bytes_ = nullptr;
  const int32_t* zero_words_ = nullptr;
  const float* factors_ = nullptr;
  int64_t row_bytes_ = 0, scale_rows_ = 0, scale_row_bytes_ = 0, part_rows_ = 1;
};

// Rows [first + column, first + column + n) of an expert, for a panel; those from first + count on are zero.
inline void packed_columns(const FrozenWeight& weight, int64_t expert, int64_t first, int64_t count,
                           int64_t column, int64_t n, gemm::PackedRow* packed) {
  const int64_t there = std::clamp<int64_t>(count - column, 1, n);
  weight.rows(expert, first + std::min(column, count - 1), there, packed);
  for (int64_t j = 0; j < n; ++j) {
    if (j >= there) packed[j] = packed[0];
    if (column + j >= count) packed[j].data = nullptr;
  }
}

inline std::string shape_text(const FrozenWeight& w) {
  if (!w.is_packed()) return shape_text(w.tensor());
  return "[" + std::to_string(w.size(0)) + ", " + std::to_string(w.size(1)) + ", " +
         std::to_string(w.size(2)) + "]";
}
inline void check_cpu(const FrozenWeight&, const char*) {}  // its constructor did
inline void check_same_dtype(const FrozenWeight& w, const Tensor& other, const char* name,
                             const char* other_name) {
  if (!w.is_packed()) check_same_dtype(w.tensor(), other, name, other_name);
}

}  // namespace fmoe_ext
