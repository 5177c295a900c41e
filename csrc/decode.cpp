// What a new token needs beside its products: norms, rotary positions, attention; see frozen/decode.py.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "decode.h"
#include "gemm/grouped.h"

namespace fmoe_ext {
namespace {

using namespace gemm;

Tensor rotate_cpu(Tensor x, Tensor cos, Tensor sin) {
  check_cpu(x, "x");
  check_float(x, "x");
  check_dim(x, 4, "x", "[B, H, 1, D]");
  check_size(x, 2, 1, "x", "[B, H, 1, D]");
  const int64_t B = x.size(0), H = x.size(1), D = x.size(3);
  STD_TORCH_CHECK(D % 2 == 0, "x must have an even last dimension, but got shape ", shape_text(x));
  for (const auto& [t, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
    check_cpu(*t, name);
    check_same_dtype(*t, x, name, "x");
    check_dim(*t, 3, name, "[B, 1, D]");
    check_size(*t, 0, B, name, "[B, 1, D]");
    check_size(*t, 1, 1, name, "[B, 1, D]");
    check_size(*t, 2, D, name, "[B, 1, D]");
  }
  const Tensor rows = as_contiguous(x), c = as_contiguous(cos), s = as_contiguous(sin);
  Tensor out = torch::stable::empty_like(rows);
  dispatch_float(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    rotate_rows(static_cast<const T*>(rows.const_data_ptr()), static_cast<const T*>(c.const_data_ptr()),
                static_cast<const T*>(s.const_data_ptr()), B, H, D, static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

// e^x for x <= 0, within 2 units in the last place; compilers make vectors of a loop over it.
inline float exp_of(float x) {
  const float clamped = x < -87.f ? -87.f : x;
  const float n = (clamped * 1.44269504f + 12582912.f) - 12582912.f;  // the nearest integer
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  for (const float c :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < -87.f ? 0.f : (p * r * r + r + 1.f) * scale;
}

// Attention of one query of each head: the heads of a group share their keys and values.
class Attention {
 public:
  Attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
            double scale)
      : kernels_(kernels_for(q.scalar_type())),
        q_(q),
        k_(k),
        v_(v),
        B(q.size(0)),
        G(k.size(1)),
        heads_(q.size(1) / G),
        S(k.size(2)),
        D(q.size(3)),
        V(v.size(3)),
        scale_(static_cast<float>(scale)),
        out(torch::stable::new_empty(q, {B, 1, q.size(1), V})) {
    if (mask) mask_ = static_cast<const float*>(mask->const_data_ptr());
    for_each_job(B * G, [&](int64_t job) { attend(job / G, job % G); });
  }

 private:
  const Stored* row_of(const Tensor& t, int64_t b, int64_t g, int64_t s) const {
    return kernels_.at(stored(t), b * t.stride(0) + g * t.stride(1) + s * t.stride(2));
  }

  void attend(int64_t b, int64_t g) const {
    // A pair of bfloat16 is as exact as float is needed to be: the weights of keys as the sum of two.
    const bool in_two = kernels_.operand_bytes == 2;
    const int64_t m = heads_, parts = in_two ? 2 : 1, nr = kernels_.nr;
    const int64_t q_stride = RowMajor::stride_for(kernels_, D), p_stride = RowMajor::stride_for(kernels_, S);
    std::vector<float> scores(m * S), tile(divide_up(V, nr) * parts * m * nr);
    tile.resize(std::max<size_t>(tile.size(), m * nr));
    std::vector<char> memory(std::max(m * q_stride, parts * m * p_stride) * kernels_.operand_bytes + 64, 0);
    auto* const operands = reinterpret_cast<Operand*>(memory.data());
    auto* const tiles = reinterpret_cast<Acc*>(tile.data());
    std::vector<const Stored*> rows(std::max(m, nr));
    for (int64_t h = 0; h < m; ++h) rows[h] = row_of(q_, b, g * m + h, 0);
    kernels_.copy_rows(rows.data(), m, D, operands, q_stride);
    for (int64_t s = 0; s < S; s += nr) {
      for (int64_t j = 0; j < nr; ++j) rows[j] = s + j < S ? row_of(k_, b, g, s + j) : nullptr;
      kernels_.multiply_columns(m, D, operands, q_stride, rows.data(), tiles);
      for (int64_t h = 0; h < m; ++h)
        std::copy_n(tile.data() + h * nr, std::min(nr, S - s), scores.data() + h * S + s);
    }
    for (int64_t h = 0; h < m; ++h) softmax(scores.data() + h * S, mask_ ? mask_ + b * S : nullptr);
    std::fill(memory.begin(), memory.end(), 0);
    for (int64_t h = 0; h < m; ++h) put(scores.data() + h * S, in_two, operands, h, h + m, p_stride);
    kernels_.multiply_rows_of(parts * m, 0, S, S, operands, p_stride, row_of(v_, b, g, 0), v_.stride(2), V,
                              tiles);
    for (int64_t h = 0; h < m; ++h) {
      Stored* to = kernels_.at(mutable_stored(out), ((b * G + g) * m + h) * V);
      for (int64_t column = 0; column < V; column += nr) {
        const int64_t at = (column / nr * parts * m + h) * nr;
        for (int64_t j = 0; in_two && j < nr; ++j) tile[at + j] += tile[at + m * nr + j];
        kernels_.round(kernels_.at(tiles, at), std::min(nr, V - column), kernels_.at(to, column));
      }
    }
  }

  // scale * scores + mask -> their shares.
  void softmax(float* scores, const float* mask) const {
    float most = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t s = 0; s < S; ++s) {
      scores[s] = scores[s] * scale_ + (mask ? mask[s] : 0.f);
      most = std::max(most, scores[s]);
    }
    if (most == -std::numeric_limits<float>::infinity()) most = 0;  // no key at all: zeros
    for (int64_t s = 0; s < S; ++s) scores[s] = exp_of(scores[s] - most);
    for (int64_t s = 0; s < S; ++s) sum += scores[s];
    const float factor = sum > 0 ? 1.f / sum : 0.f;
    for (int64_t s = 0; s < S; ++s) scores[s] *= factor;
  }

  // The shares of a head as operands: of bfloat16 the rounded ones in row `first`, what is left in `second`.
  void put(const float* shares, bool in_two, Operand* operands, int64_t first, int64_t second,
           int64_t stride) const {
    if (!in_two) {
      std::copy_n(shares, S, reinterpret_cast<float*>(operands) + first * stride);
      return;
    }
    auto* high = reinterpret_cast<uint16_t*>(operands) + first * stride;
    auto* low = reinterpret_cast<uint16_t*>(operands) + second * stride;
    for (int64_t s = 0; s < S; ++s) {
      const uint32_t bits = bits_of_bfloat16(shares[s]);
      float rounded;
      std::memcpy(&rounded, &bits, sizeof rounded);
      high[s] = static_cast<uint16_t>(bits >> 16);
      low[s] = static_cast<uint16_t>(bits_of_bfloat16(shares[s] - rounded) >> 16);
    }
  }

  const Kernels& kernels_;
  const Tensor &q_, &k_, &v_;
  const int64_t B, G, heads_, S, D, V;
  const float scale_;
  const float* mask_ = nullptr;

 public:
  Tensor out;  // [B, 1, H, V]
};

}  // namespace

Tensor rms_norm_cpu(Tensor x, Tensor weight, double eps) {
  check_cpu(x, "x");
  check_cpu(weight, "weight");
  check_float(x, "x");
  check_same_dtype(weight, x, "weight", "x");
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1),
                  "weight must have as many elements as the last dimension of x ", shape_text(x),
                  ", but got shape ", shape_text(weight));
  const Tensor rows = as_contiguous(x), factors = as_contiguous(weight);
  Tensor out = torch::stable::empty_like(rows);
  const int64_t D = weight.size(0);
  dispatch_float(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    norm_rows(static_cast<const T*>(rows.const_data_ptr()), static_cast<const T*>(factors.const_data_ptr()),
              rows.numel() / D, D, eps, static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

Tensor attend_cpu(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, double scale) {
  check_cpu(q, "q");
  check_float(q, "q");
  STD_TORCH_CHECK(q.scalar_type() != ScalarType::Double, "q must be float32, bfloat16 or float16");
  check_dim(q, 4, "q", "[B, H, 1, D]");
  check_size(q, 2, 1, "q", "[B, H, 1, D]");
  for (const auto& [t, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    check_cpu(*t, name);
    check_same_dtype(*t, q, name, "q");
    check_dim(*t, 4, name, "[B, G, S, *]");
    check_size(*t, 0, q.size(0), name, "[B, G, S, *]");
    check_size(*t, 1, k.size(1), name, "[B, G, S, *]");
    check_size(*t, 2, k.size(2), name, "[B, G, S, *]");
    STD_TORCH_CHECK(t->stride(3) == 1, name, " must have rows that are contiguous");
  }
  check_size(k, 3, q.size(3), "k", "[B, G, S, D]");
  STD_TORCH_CHECK(k.size(1) > 0 && k.size(2) > 0 && q.size(1) % k.size(1) == 0,
                  "q must have a multiple of the heads of k ", shape_text(k), ", but got shape ",
                  shape_text(q));
  if (mask) {
    check_cpu(*mask, "mask");
    check_dim(*mask, 2, "mask", "[B, S]");
    check_size(*mask, 0, q.size(0), "mask", "[B, S]");
    check_size(*mask, 1, k.size(2), "mask", "[B, S]");
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Float && mask->is_contiguous(),
                    "mask must be float32 and contiguous");
  }
  const Tensor query = as_contiguous(q);
  return Attention(query, k, v, mask, scale).out;
}

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("_rms_norm", TORCH_BOX(&rms_norm_cpu));
  m.impl("_rotate", TORCH_BOX(&rotate_cpu));
  m.impl("_attend", TORCH_BOX(&attend_cpu));
}

}  // namespace fmoe_ext
