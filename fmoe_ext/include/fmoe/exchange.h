// Expert parallelism over a c10d group (gloo, NCCL): tokens travel to the ranks of their experts and back.
// The same exchange as fmoe_ext/ep/schedule.py and plan.py, with one chunk and a row for each choice.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "experts.h"

namespace fmoe {

// Tokens that are where their experts compute.
struct ExpertInput {
  Tensor x;             // [N, D]
  Tensor topk_idx;      // [N, K], numbers of experts of this rank; -1 for none
  Tensor topk_weights;  // [N, K]
};

namespace detail {

// Starts the exchange of rows of x [sum(send), *] into out [sum(receive), *]: rows of rank p follow those of
// p - 1.
inline c10::intrusive_ptr<c10d::Work> start_exchange(Tensor out, Tensor x, std::vector<int64_t> send,
                                                     std::vector<int64_t> receive, const Group& group) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return group->all_to_all_single(out, x, receive, send);
#else
  return group->alltoall_base(out, x, receive, send);
#endif
}

inline Tensor exchange_counts(const Tensor& counts, const Group& group) {
  Tensor received = torch::empty_like(counts);
  const std::vector<int64_t> one_each(group->getSize(), 1);
  start_exchange(received, counts, one_each, one_each, group)->wait();
  return received;
}

// The rows of one forward, in both directions: what is under way, and what came back.
struct Transit : torch::CustomClassHolder {
  Transit(Group group_, SortedTokens handle_) : group(std::move(group_)), handle(std::move(handle_)) {}

  void to_experts(const variable_list& rows) {
    start(rows, send_splits, recv_splits, num_sent(), num_received());
  }
  void to_tokens(const variable_list& rows) {
    start(rows, recv_splits, send_splits, num_received(), handle.row_idx.size(0));
  }
  variable_list finish() {
    for (const auto& work : works) work->wait();
    works.clear();
    sources.clear();
    return std::exchange(targets, {});
  }
  int64_t num_sent() const { return c10::sum_integers(send_splits); }
  int64_t num_received() const { return c10::sum_integers(recv_splits); }

  Group group;
  SortedTokens handle;
  std::vector<int64_t> send_splits, recv_splits;

 private:
  // Rows of dropped choices, behind those that travel, are zero.
  void start(const variable_list& rows, const std::vector<int64_t>& send, const std::vector<int64_t>& receive,
             int64_t num_out, int64_t num_rows) {
    for (const Tensor& row : rows) {
      auto shape = row.sizes().vec();
      shape[0] = num_rows;
      const Tensor target = row.new_empty(shape);
      const int64_t num_in = c10::sum_integers(receive);
      target.narrow(0, num_in, num_rows - num_in).zero_();
      sources.push_back(row.contiguous().narrow(0, 0, num_out));
      targets.push_back(target);
      works.push_back(start_exchange(target.narrow(0, 0, num_in), sources.back(), send, receive, group));
    }
  }

  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  variable_list sources, targets;
};

using TransitPtr = c10::intrusive_ptr<Transit>;

inline void keep(AutogradContext* ctx, const TransitPtr& transit) {
  ctx->saved_data["transit"] = c10::IValue::make_capsule(transit);
}
inline TransitPtr kept(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Transit>(ctx->saved_data["transit"].toCapsule());
}

// The four halves of the exchanges there and back. Between them a ticket, a scalar, stands for rows that are
// under way: nobody can read what has not come, and autograd knows the order.
struct Send : Function<Send> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& weights, TransitPtr transit) {
    keep(ctx, transit);
    transit->to_experts({rows, weights});
    return weights.new_zeros({});
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    auto grads = kept(ctx)->finish();
    return {grads[0], grads[1], Tensor()};
  }
};

struct Receive : Function<Receive> {
  static variable_list forward(AutogradContext* ctx, const Tensor& ticket, TransitPtr transit) {
    keep(ctx, transit);
    return transit->finish();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    kept(ctx)->to_tokens(grads);
    return {grads[1].new_zeros({}), Tensor()};
  }
};

struct Return : Function<Return> {
  static Tensor forward(AutogradContext* ctx, const Tensor& results, TransitPtr transit) {
    keep(ctx, transit);
    transit->to_tokens({results});
    return results.new_zeros({});
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    return {kept(ctx)->finish()[0], Tensor()};
  }
};

struct Collect : Function<Collect> {
  static Tensor forward(AutogradContext* ctx, const Tensor& ticket, TransitPtr transit) {
    keep(ctx, transit);
    return unpermute(transit->finish()[0], transit->handle.row_idx, transit->handle.inverse);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto transit = kept(ctx);
    transit->to_experts({permute(grads[0], transit->handle.row_idx, transit->handle.inverse)});
    return {grads[0].new_zeros({}), Tensor()};
  }
};

}  // namespace detail

// Tokens on their way to the experts of all ranks of a group: receive(), give_back() the results, combine().
// With an undefined group all experts are here, and nothing moves.
class Dispatched {
 public:
  Dispatched(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, int64_t num_experts,
             const Group& group)
      : tokens_{x, topk_idx, topk_weights} {
    if (group) send(num_experts, group);
  }

  ExpertInput receive() {
    if (!transit_) return tokens_;
    const auto received = detail::Receive::apply(ticket_, transit_);
    return {received[0], columns_, received[1]};
  }
  void give_back(const Tensor& results) {
    results_ = transit_ ? detail::Return::apply(results, transit_) : results;
  }
  Tensor combine() { return transit_ ? detail::Collect::apply(results_, transit_) : results_; }

 private:
  void send(int64_t num_experts, const Group& group) {
    const int64_t size = group->getSize();
    transit_ = c10::make_intrusive<detail::Transit>(group, sort_tokens(tokens_.topk_idx, num_experts));
    const SortedTokens& handle = transit_->handle;
    plan(handle.tokens_per_expert.view({size, -1}));
    const Tensor weights = detail::widen(tokens_.topk_weights, tokens_.x.scalar_type());
    const Tensor rows = permute(tokens_.x, handle.row_idx, handle.inverse);
    const Tensor row_weights =
        permute(weights.reshape({-1, 1}), handle.row_idx, handle.inverse.reshape({-1, 1}));
    ticket_ = detail::Send::apply(rows, row_weights, transit_);
  }

  // Tells the ranks how many rows come for each of their experts: counts [ranks, e].
  void plan(const Tensor& counts) {
    constexpr int64_t kHeader = 2;  // dtype and width of a token, the same on all ranks
    const Tensor header =
        torch::tensor({static_cast<int64_t>(tokens_.x.scalar_type()), tokens_.x.size(1)}, counts.options());
    const Tensor sent = torch::cat({header.expand({counts.size(0), -1}), counts}, 1);
    const Tensor received = detail::exchange_counts(sent, transit_->group).to(at::kCPU);
    check_headers(received.narrow(1, 0, kHeader));
    const Tensor came = received.narrow(1, kHeader, counts.size(1));
    const auto row_sums = [](const Tensor& t) {
      const Tensor sums = t.to(at::kCPU).sum(1);
      return std::vector<int64_t>(sums.data_ptr<int64_t>(), sums.data_ptr<int64_t>() + sums.numel());
    };
    transit_->send_splits = row_sums(counts);
    transit_->recv_splits = row_sums(came);
    const Tensor column = torch::arange(counts.size(1), torch::dtype(at::kInt)).repeat({counts.size(0)});
    columns_ = column.repeat_interleave(came.flatten()).unsqueeze(1).to(counts.device());
  }

  static void check_headers(const Tensor& headers) {
    constexpr std::array<const char*, 2> kNames = {"the dtype of the tokens", "the elements of a token"};
    const auto values = headers.contiguous();
    std::string text;
    for (size_t i = 0; i < kNames.size(); ++i) {
      const Tensor column = values.select(1, static_cast<int64_t>(i));
      if (column.eq(column[0]).all().item<bool>()) continue;
      text += (text.empty() ? "" : "; ") + std::string(kNames[i]) + " (";
      for (int64_t rank = 0; rank < column.size(0); ++rank)
        text += (rank ? ", rank " : "rank ") + std::to_string(rank) + ": " +
                std::to_string(column[rank].item<int64_t>());
      text += ')';
    }
    TORCH_CHECK(text.empty(), "the ranks do not exchange the same tokens; they differ in ", text);
  }

  ExpertInput tokens_;
  detail::TransitPtr transit_;
  Tensor ticket_, columns_, results_;
};

// Sends every token to the ranks of its experts: x [T, D], topk_idx [T, K] (-1 dropped), topk_weights [T, K].
inline Dispatched dispatch(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights,
                           int64_t num_experts, const Group& group) {
  return {x, topk_idx, topk_weights, num_experts, group};
}

// Brings the results back to the ranks of their tokens -> their sum for each token, [T, D].
inline Tensor combine(Dispatched& dispatched) { return dispatched.combine(); }

}  // namespace fmoe
