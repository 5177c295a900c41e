// Several steps of a layer in one call, for a new token: what attention begins with, and the choice of
// experts; see frozen/decode.py.
#include <torch/csrc/stable/library.h>

#include "decode.h"
#include "entries.h"
#include "gemm_jobs.h"
#include "grouped_gemm.h"

namespace fmoe_ext {
namespace {

using namespace gemm;
using OptionalTensors = std::vector<std::optional<Tensor>>;

// x [R, D] times each weight [1, N, D]^T -> [R, N] each; threads share the jobs of all products.
std::vector<Tensor> multiply_each(const Tensor& x, const std::vector<FrozenWeight>& weights) {
  const Kernels& kernels = kernels_for(x.scalar_type());
  const int64_t R = x.size(0), D = x.size(1), stride = RowMajor::stride_for(kernels, D);
  const Workspace workspace(x, R * stride * kernels.operand_bytes);
  const RowMajor rows{reinterpret_cast<Operand*>(workspace.data()), stride, kernels.operand_bytes};
  const Chunk chunk{0, R, {{0, 0, R, false}}};
  copy_chunk(kernels, stored(x), D, chunk, rows);
  std::vector<Tensor> products;
  std::vector<Job> jobs;
  std::vector<size_t> ends;  // of the jobs of each product
  for (const FrozenWeight& weight : weights) {
    products.push_back(torch::stable::new_empty(x, {R, weight.size(1)}));
    add_jobs(jobs, chunk.segments[0], divide_up(weight.size(1), kernels.nr), 2 * D * kernels.nr,
             D * kernels.nr * kernels.storage_bytes);
    ends.push_back(jobs.size());
  }
  for_each_job(jobs.size(), [&](int64_t job) {
    size_t i = 0;
    while (static_cast<size_t>(job) >= ends[i]) ++i;
    multiply_job(kernels, jobs[job], rows, weights[i], std::nullopt, products[i]);
  });
  return products;
}

// Queries, keys and values of one new token a sequence, the first two with norms and rotary positions.
std::tuple<Tensor, Tensor, Tensor> attention_inputs_cpu(Tensor x, std::vector<Tensor> weights_,
                                                        OptionalTensors packing, std::vector<int64_t> options,
                                                        OptionalTensors norms, Tensor cos, Tensor sin,
                                                        double eps) {
  constexpr const char* kNames[] = {"q", "k", "v"};
  STD_TORCH_CHECK(weights_.size() == 3 && packing.size() == 6 && options.size() == 6 && norms.size() == 2,
                  "weights, packing, options and norms must have 3, 6, 6 and 2 entries");
  check_cpu(x, "x");
  std::vector<FrozenWeight> weights;
  for (int i = 0; i < 3; ++i) {
    weights.emplace_back(weights_[i],
                         Packing{packing[2 * i], packing[2 * i + 1], options[2 * i], options[2 * i + 1] != 0},
                         kNames[i]);
    STD_TORCH_CHECK(weights[i].is_packed(), kNames[i], " must be packed");
    check_grouped_gemm(x, weights[i], std::nullopt, std::nullopt);
  }
  const int64_t R = x.size(0);
  for (const auto& [t, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
    check_cpu(*t, name);
    check_same_dtype(*t, x, name, "x");
    check_dim(*t, 3, name, "[R, 1, width]");
    check_size(*t, 0, R, name, "[R, 1, width]");
    check_size(*t, 1, 1, name, "[R, 1, width]");
    check_size(*t, 2, cos.size(2), name, "[R, 1, width]");
  }
  const int64_t width = cos.size(2);
  for (int i = 0; i < 3; ++i)
    STD_TORCH_CHECK(width > 0 && width % 2 == 0 && weights[i].size(1) % width == 0, kNames[i],
                    " must have rows for heads of the even width ", width, ", but got shape ",
                    shape_text(weights[i]));
  for (std::optional<Tensor>& norm : norms) {
    if (!norm) continue;
    check_cpu(*norm, "norm");
    check_same_dtype(*norm, x, "norm", "x");
    check_dim(*norm, 1, "norm", "[width]");
    check_size(*norm, 0, width, "norm", "[width]");
    norm = as_contiguous(*norm);
  }
  const std::vector<Tensor> rows = multiply_each(as_contiguous(x), weights);
  const Tensor c = as_contiguous(cos), s = as_contiguous(sin);
  dispatch_float(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    // Jobs of up to kHeads heads of one sequence, those of queries first.
    constexpr int64_t kHeads = 8;
    const int64_t heads[] = {weights[0].size(1) / width, weights[1].size(1) / width};
    const int64_t groups[] = {divide_up(heads[0], kHeads), divide_up(heads[1], kHeads)};
    for_each_job(R * (groups[0] + groups[1]), [&](int64_t job) {
      const int i = job < R * groups[0] ? 0 : 1;
      if (i == 1) job -= R * groups[0];
      const int64_t r = job / groups[i], first = job % groups[i] * kHeads;
      const int64_t n = std::min(kHeads, heads[i] - first);
      T* const data = static_cast<T*>(rows[i].mutable_data_ptr()) + (r * heads[i] + first) * width;
      if (norms[i]) norm_rows(data, static_cast<const T*>(norms[i]->const_data_ptr()), n, width, eps, data);
      rotate_rows(data, static_cast<const T*>(c.const_data_ptr()) + r * width,
                  static_cast<const T*>(s.const_data_ptr()) + r * width, 1, n, width, data);
    });
  });
  const auto heads_of = [&](int i) {
    return torch::stable::view(rows[i], {R, weights[i].size(1) / width, 1, width});
  };
  return {heads_of(0), heads_of(1), heads_of(2)};
}

std::tuple<Tensor, Tensor, Tensor> route_cpu(Tensor x, Tensor weight, int64_t top_k, bool normalize) {
  Tensor logits = few_rows_linear_cpu(x, weight);
  auto [idx, weights] = topk_gate_cpu(logits, top_k, 0, normalize, std::nullopt, 1, 1, 1.0);
  return {logits, weights, idx};
}

// x + y, in the memory of y.
Tensor with_residual(const Tensor& x_, Tensor y) {
  const Tensor x = as_contiguous(x_);
  dispatch_float(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    add_to(static_cast<const T*>(x.const_data_ptr()), x.numel(), static_cast<T*>(y.mutable_data_ptr()));
  });
  return y;
}

// Rows [R, G, 1, width] into position `at` of a cache [R, G, room, width].
void put_in_cache(const Tensor& rows, const Tensor& cache, int64_t at) {
  const int64_t bytes = rows.element_size(), width = rows.size(3) * bytes;
  const auto* from = static_cast<const char*>(rows.const_data_ptr());
  auto* to = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t r = 0; r < rows.size(0); ++r)
    for (int64_t g = 0; g < rows.size(1); ++g, from += width)
      std::copy_n(from, width,
                  to + (r * cache.stride(0) + g * cache.stride(1) + at * cache.stride(2)) * bytes);
}

// Attention of one new token a sequence, with the norm before it and the residual.
Tensor token_attention_cpu(Tensor x, Tensor norm, std::vector<Tensor> weights, OptionalTensors packing,
                           std::vector<int64_t> options, OptionalTensors norms, Tensor cos, Tensor sin,
                           Tensor keys, Tensor values, int64_t length, std::optional<Tensor> mask,
                           std::vector<double> constants) {
  check_entries(weights, 4, "weights", "q, k, v, o");
  check_entries(packing, 8, "packing", "scale and zero point of q, k, v, o");
  check_entries(options, 8, "options", "format and interleaved of q, k, v, o");
  check_entries(constants, 3, "constants", "eps of norm, eps of norms, scale");
  const auto first = [](const auto& list, int n) {
    return std::remove_cvref_t<decltype(list)>(list.begin(), list.begin() + n);
  };
  const auto [q, k, v] =
      attention_inputs_cpu(rms_norm_cpu(x, norm, constants[0]), first(weights, 3), first(packing, 6),
                           first(options, 6), norms, cos, sin, constants[1]);
  for (const auto& [cache, rows, name] : {std::tuple{&keys, &k, "keys"}, std::tuple{&values, &v, "values"}}) {
    check_cpu(*cache, name);
    check_same_dtype(*cache, x, name, "x");
    check_dim(*cache, 4, name, "[R, G, room, width]");
    for (const int d : {0, 1, 3}) check_size(*cache, d, rows->size(d), name, "[R, G, room, width]");
    STD_TORCH_CHECK(length >= 0 && length < cache->size(2) && cache->stride(3) == 1, name,
                    " must have contiguous rows and room behind ", length, " tokens, but got shape ",
                    shape_text(*cache));
    put_in_cache(*rows, *cache, length);
  }
  const auto there = [&](Tensor cache) { return torch::stable::narrow(cache, 2, 0, length + 1); };
  const Tensor out = attend_cpu(q, there(keys), there(values), mask, constants[2]);
  const Tensor rows = torch::stable::view(out, {x.size(0), out.size(2) * out.size(3)});
  STD_TORCH_CHECK(weights[3].dim() == 3 && weights[3].size(1) == x.size(1), "o must have ", x.size(1),
                  " rows, but got shape ", shape_text(weights[3]));
  return with_residual(x, frozen_gemm_cpu(rows, weights[3], std::nullopt, std::nullopt, packing[6],
                                          packing[7], options[6], options[7] != 0));
}

// The experts that a gate chooses for x [R, D], with the norm before them and the residual.
Tensor token_experts_cpu(Tensor x, Tensor norm, double eps, Tensor gate, int64_t top_k, bool normalize,
                         OptionalTensors weights, OptionalTensors packing, std::vector<int64_t> options) {
  const Tensor rows = rms_norm_cpu(x, norm, eps);
  const auto [logits, shares, chosen] = route_cpu(rows, gate, top_k, normalize);
  return with_residual(x, frozen_experts_cpu(rows, chosen, shares, weights, packing, options));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CPU, m) {
  m.impl("_attention_inputs", TORCH_BOX(&attention_inputs_cpu));
  m.impl("_route", TORCH_BOX(&route_cpu));
  m.impl("_token_attention", TORCH_BOX(&token_attention_cpu));
  m.impl("_token_experts", TORCH_BOX(&token_experts_cpu));
}

}  // namespace fmoe_ext
