// Sums and counts over the ranks that share a gate's experts, which gates call: OneRank for one process,
// GroupRanks for a c10d group. The same as fmoe_ext/ep/ranks.py and OneRank of fmoe_ext/gates/base_gate.py.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/version.h>

#include "ops.h"

namespace fmoe {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct Ranks {
  virtual ~Ranks() = default;
  virtual int64_t rank() const = 0;
  // Ranks whose sums a gate needs; 1 needs no exchange.
  virtual int64_t size() const = 0;
  // Tokens of all ranks.
  virtual int64_t num_tokens(int64_t num_local_tokens) const = 0;
  // Sum of x over the ranks, differentiable.
  virtual Tensor sum(const Tensor& x) const = 0;
  // topk_idx with -1 for all but the first `capacity` choices of each expert, over the ranks.
  virtual Tensor apply_capacity(const Tensor& topk_idx, int64_t num_experts, int64_t capacity) const = 0;
};

struct OneRank : Ranks {
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  int64_t num_tokens(int64_t num_local_tokens) const override { return num_local_tokens; }
  Tensor sum(const Tensor& x) const override { return x; }
  Tensor apply_capacity(const Tensor& topk_idx, int64_t num_experts, int64_t capacity) const override {
    return fmoe::apply_capacity(topk_idx,
                                torch::full({num_experts}, capacity, topk_idx.options().dtype(at::kLong)));
  }
};

namespace detail {

inline Tensor all_reduce(Tensor x, const Group& group) {
  std::vector<Tensor> tensors = {x};
  group->allreduce(tensors)->wait();
  return x;
}

// The device of tensors that the host reads after a collective call: CUDA if the group has no other backend.
inline at::Device host_device(const Group& group) {
  const auto devices = group->getDeviceTypes();
  const auto has = [&](at::DeviceType type) {
    return std::any_of(devices.begin(), devices.end(), [&](const at::Device& d) { return d.type() == type; });
  };
  return has(at::kCUDA) && !has(at::kCPU) ? at::kCUDA : at::kCPU;
}

struct SumOverRanks : Function<SumOverRanks> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, Group group) {
    ctx->saved_data["factor"] = static_cast<double>(group->getSize());
    return all_reduce(x.detach().clone(), group);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    // The sum over all copies of the loss, which a later mean over the ranks divides by their number.
    return {grads[0] * ctx->saved_data["factor"].toDouble(), Tensor()};
  }
};

// x [n, *] of every rank, where n may differ, not differentiable; rows are padded to the longest on the way.
inline std::vector<Tensor> gather_rows(const Tensor& x, const Group& group) {
  const auto each_of = [&](const Tensor& mine) {
    std::vector<std::vector<Tensor>> out(1);
    for (int i = 0; i < group->getSize(); ++i) out[0].push_back(torch::empty_like(mine));
    std::vector<Tensor> in = {mine};
    group->allgather(out, in)->wait();
    return out[0];
  };
  std::vector<int64_t> sizes;
  int64_t longest = 0;
  for (const Tensor& size : each_of(torch::full({1}, x.size(0), x.options().dtype(at::kLong)))) {
    sizes.push_back(size.item<int64_t>());
    longest = std::max(longest, sizes.back());
  }
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = longest;
  Tensor padded = x.new_zeros(shape);
  padded.narrow(0, 0, x.size(0)).copy_(x);
  std::vector<Tensor> parts = longest == 0 ? std::vector<Tensor>(sizes.size(), padded) : each_of(padded);
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = parts[i].narrow(0, 0, sizes[i]);
  return parts;
}

}  // namespace detail

// The ranks of a c10d group: a gate's losses and capacities span all their tokens.
struct GroupRanks : Ranks {
  explicit GroupRanks(Group group_) : group(std::move(group_)), device(detail::host_device(group)) {}

  int64_t rank() const override { return group->getRank(); }
  int64_t size() const override { return group->getSize(); }
  int64_t num_tokens(int64_t num_local_tokens) const override {
    const auto mine = torch::full({}, num_local_tokens, torch::dtype(at::kLong).device(device));
    return detail::all_reduce(mine, group).item<int64_t>();
  }
  Tensor sum(const Tensor& x) const override { return detail::SumOverRanks::apply(x, group); }

  // As in one process whose batch is the ranks' batches one after the other: first choices first.
  Tensor apply_capacity(const Tensor& topk_idx, int64_t num_experts, int64_t capacity) const override {
    std::vector<Tensor> counts, kept;
    const auto choices = topk_idx.split(1, 1);
    for (const Tensor& choice : choices) counts.push_back(count_tokens(choice, num_experts));
    const Tensor everyone =
        torch::stack(detail::gather_rows(torch::stack(counts), group), 1);  // [K, ranks, E]
    const Tensor flat = everyone.flatten(0, 1);
    const Tensor before = (flat.cumsum(0) - flat).view_as(everyone).select(1, rank());  // [K, E]
    const Tensor room = (capacity - before).clamp_min(0);
    for (size_t k = 0; k < choices.size(); ++k)
      kept.push_back(fmoe::apply_capacity(choices[k], room[static_cast<int64_t>(k)]));
    return torch::cat(kept, 1);
  }

  Group group;
  at::Device device;  // of numbers that the host reads
};

}  // namespace fmoe
