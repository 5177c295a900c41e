// The schemas of the operators in C++, but for switches, which stand beside their kernels (_set_cpu_isa,
// _set_batch_invariant, _release_memory, cuda/ops_select.cpp). Kernels register themselves from <op>.cpp
// (CPU) and cuda/ (CUDA); autograd, fake kernels and autocast rules are registered from fmoe_ext/ops/<op>.py
// and fmoe_ext/frozen.
//
// Letters: T tokens, K choices a token, E experts, R = T * K rows in expert-major order, D model width, H
// expert width. A row of an expert-major tensor at or past offs[-1] belongs to a dropped choice: row_idx is
// -1 there, data is zero.

#include <string>

#include <torch/csrc/stable/library.h>

#ifndef FMOE_BUILD_INFO
#define FMOE_BUILD_INFO unknown
#endif
#define FMOE_TEXT(...) #__VA_ARGS__
#define FMOE_TEXT_OF(...) FMOE_TEXT(__VA_ARGS__)

namespace {
std::string build_info() { return FMOE_TEXT_OF(FMOE_BUILD_INFO); }
}  // namespace

// clang-format off: one schema a line
STABLE_TORCH_LIBRARY(fmoe_ext, m) {
  // What setup.py knew: "torch=...,cxx=...,modules=...", for python -m fmoe_ext.info.
  m.def("build_info() -> str");

  m.def("count_tokens(Tensor topk_idx, int num_experts) -> Tensor");

  // -> tokens_per_expert [E] int64, offs [E] int32, row_idx [T * K] int32, inverse [T, K] int32
  m.def("sort_tokens(Tensor topk_idx, int num_experts) -> (Tensor, Tensor, Tensor, Tensor)");

  m.def("permute(Tensor x, Tensor row_idx, Tensor inverse) -> Tensor");
  m.def("unpermute(Tensor y, Tensor row_idx, Tensor inverse, Tensor? topk_weights) -> Tensor");
  // -> grad_y [R, D], grad_topk_weights [T, K] (empty unless y is given)
  m.def("unpermute_backward(Tensor grad_out, Tensor? y, Tensor row_idx, Tensor inverse, Tensor? topk_weights) -> (Tensor, Tensor)");

  m.def("apply_capacity(Tensor topk_idx, Tensor capacity) -> Tensor");
  // One capacity for all experts, and random routing by topk_weights [T, K] and uniform [T]; on the CPU.
  // -> topk_idx with -1 for what is dropped, counts [K, E] int64 of first, second, ... choices before that
  m.def("drop_choices(Tensor topk_idx, int num_experts, int capacity, Tensor? topk_weights, Tensor? uniform) -> (Tensor, Tensor)");

  // The exchange of expert parallelism (exchange_rows.cpp), on the CPU. W ranks, n kinds of rows for each of them.
  // row_idx [R], inverse [T, K], tokens_per_expert [W n]: of rows sorted by rank -> row_idx [W max_rows], inverse [T, K]
  m.def("_pad_routing(Tensor row_idx, Tensor inverse, Tensor tokens_per_expert, int num_ranks, int max_rows) -> (Tensor, Tensor)");
  // counts [W n], sent as they are or, with order [W n], counts[order]; header [h]
  // -> [W, h + n], for each rank the header and its counts; has_most: one more between them, the most rows for one rank
  m.def("_counts_to_send(Tensor counts, Tensor header, Tensor? order, int num_ranks, bool has_most) -> Tensor");
  // counts [W, n]: rows from each rank in the columns [first, end) -> the kind of each row that comes, counted from first,
  // [num_rows, 1] int32; max_rows: of each rank, 0 as counted
  m.def("_columns_of_rows(Tensor counts, int first, int end, int max_rows, int num_rows) -> Tensor");
  // ways [E] -> the way of each choice [T, K], and the same with -1 where an earlier choice of the token goes it too
  m.def("_token_ways(Tensor topk_idx, Tensor ways) -> (Tensor, Tensor)");
  // local [E] -> for each row to send, local[choice] of the choices of its token that go its way, else -1:
  // [R, K] int16, or int32 if wide
  m.def("_experts_of_rows(Tensor topk_idx, Tensor way, Tensor local, Tensor row_idx, bool wide) -> Tensor");

  // score: 0 softmax, 1 sigmoid; bias shifts the selection only.
  // -> topk_idx [T, K] int64, topk_weights [T, K]
  m.def("topk_gate(Tensor logits, int top_k, int score=0, bool normalize=True, Tensor? bias=None, int num_groups=1, int topk_groups=1, float scale=1.0) -> (Tensor, Tensor)");
  m.def("topk_gate_backward(Tensor grad_weights, Tensor logits, Tensor topk_idx, Tensor topk_weights, int score, bool normalize, float scale) -> Tensor");

  // topk_gate by softmax with the balance loss of each token's first num_counted choices, of a gate's node; on the CPU
  // -> topk_idx, topk_weights [T, K], counts [E] int64, the loss; both empty for num_counted = 0
  m.def("_choose_experts(Tensor logits, int top_k, bool normalize, int num_counted) -> (Tensor, Tensor, Tensor, Tensor)");

  // counts [E] int64: choices of each expert -> the loss, a scalar; see gates.balance_loss.
  m.def("balance_loss(Tensor logits, Tensor counts, int score) -> Tensor");
  m.def("balance_loss_backward(Tensor grad, Tensor logits, Tensor counts, int score) -> Tensor");

  m.def("grouped_gemm(Tensor x, Tensor weight, Tensor offs, Tensor? bias=None) -> Tensor");
  // needs: dx, dweight, dbias; an output that is not needed is empty. A dweight that is needed is added to
  // main_dweight, if given (float32, or float64), and is empty itself. Since it may write to an argument, AOTAutograd
  // wraps it in auto_functionalized_v2 in the graph of a backward, although compiled graphs never give main gradients:
  // Inductor takes that off again, other backends run it as it is. vmap has a rule of ours (register_vmap_in_turn).
  m.def("grouped_gemm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor offs, bool[] needs, Tensor(a!)? main_dweight=None) -> (Tensor, Tensor, Tensor)");

  // h [R, 2 H] -> [R, H]; see experts.GatedActivation.
  m.def("clamped_glu(Tensor h, float alpha, float limit, float offset, bool interleaved, bool clamps_activated) -> Tensor");
  m.def("clamped_glu_backward(Tensor grad, Tensor h, float alpha, float limit, float offset, bool interleaved, bool clamps_activated) -> Tensor");

  // For each matrix of x [E, M, N], steps times: G = x x^T, x = a x + (b G + c G G) x.
  m.def("newton_schulz(Tensor x, float a, float b, float c, int steps) -> Tensor");

  // grouped_gemm with a frozen weight, packed as in frozen_mlp; without offs its one expert has all rows.
  // transposed: x [R, N] times weight[e] -> [R, D], the gradient of the product and without a bias.
  m.def("frozen_gemm(Tensor x, Tensor weight, Tensor? offs, Tensor? bias, Tensor? weight_scale, Tensor? weight_zero, int weight_format, bool weight_interleaved, bool transposed) -> Tensor");
  // A weight that is packed as in frozen_mlp -> [E, out, in], gates before ups
  m.def("_decode_packed(Tensor weight, Tensor? weight_scale, Tensor? weight_zero, int weight_format, bool weight_interleaved, ScalarType dtype) -> Tensor");
  // torch.nn.functional.grouped_mm for the CUDA kernels, in Python (gpu/torch_path.py): a b of each group's rows,
  // with the last two dimensions of a or b transposed; and whether torch allows TF32 at this moment.
  m.def("_torch_grouped_mm(Tensor a, Tensor b, Tensor offs, bool a_transposed, bool b_transposed) -> Tensor");
  m.def("_tf32_allowed() -> bool");

  // activation: a place in kActivations (activation.h), which is one in ops.ACTIVATIONS.
  // -> y [R, D], or [T, D] when combine; h [R, H or 2H] when save_h, else empty.
  m.def("expert_mlp(Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? topk_weights, int activation, bool combine, bool save_h) -> (Tensor, Tensor)");
  // needs: dx, dw1, db1, dw2, db2, dtopk_weights, in the order of the results. A dw1 or dw2 that is needed is added
  // to its main gradient, if given, and is empty itself.
  m.def("expert_mlp_backward(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2, Tensor? b2, Tensor? topk_weights, Tensor h, int activation, bool combine, bool[] needs, Tensor(a!)? main_dw1=None, Tensor(b!)? main_dw2=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // The two halves of expert_mlp_backward, of the same bits: the gradients of the inputs,
  // -> dx, dtopk_weights, and for the other half dh [R, H or 2H] if dw1 or db1 is needed, and scaled_a [R, H], the
  // weighted activated rows, if dw2 is; and, from those two, the gradients of the weights -> dw1, db1, dw2, db2.
  m.def("expert_mlp_backward_inputs(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2, Tensor? b2, Tensor? topk_weights, Tensor h, int activation, bool combine, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("expert_mlp_backward_weights(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2, Tensor? topk_weights, Tensor dh, Tensor scaled_a, int activation, bool combine, bool[] needs, Tensor(a!)? main_dw1, Tensor(b!)? main_dw2) -> (Tensor, Tensor, Tensor, Tensor)");

  // expert_mlp with frozen weights and an adapter on one or both of them: w + lora_scale * lora_b lora_a.
  // A packed weight is uint8 [E, out, bytes of a row], with the scales and zero points of its format (packed.h); formats
  // are numbers in frozen.FORMATS, 0 for a weight that is not packed.
  // -> y, and what the backward keeps: h [R, H or 2H], empty unless save, and u = lora_scale * rows lora_a^T [R, rank]
  // of each weight.
  m.def("frozen_mlp(Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? topk_weights, int activation, bool combine, bool save, Tensor? w1_scale, Tensor? w1_zero, int w1_format, bool w1_interleaved, Tensor? w2_scale, Tensor? w2_zero, int w2_format, Tensor? lora_a1, Tensor? lora_b1, float lora_scale1, Tensor? lora_a2, Tensor? lora_b2, float lora_scale2) -> (Tensor, Tensor, Tensor, Tensor)");
  // needs: dx, dlora_a1, dlora_b1, dlora_a2, dlora_b2, dtopk_weights, in the order of the results.
  m.def("frozen_mlp_backward(Tensor grad_y, Tensor x, Tensor row_idx, Tensor inverse, Tensor offs, Tensor w1, Tensor w2, Tensor? b2, Tensor? topk_weights, Tensor h, Tensor u1, Tensor u2, int activation, bool combine, bool[] needs, Tensor? w1_scale, Tensor? w1_zero, int w1_format, bool w1_interleaved, Tensor? w2_scale, Tensor? w2_zero, int w2_format, Tensor? lora_a1, Tensor? lora_b1, float lora_scale1, Tensor? lora_a2, Tensor? lora_b2, float lora_scale2) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Products and softmax whose sums run along k, or along a row, from the first to the last: in_order.h. On the CPU.
  // a [B, M, K] float32 or float64, b [B, K, N] of any strides and dtype, float64 beside float64 -> [B, M, N] as a
  m.def("_matmul_in_order(Tensor a, Tensor b) -> Tensor");
  // x [R, N] float32 or float64 -> softmax or its logarithm; a row of -inf alone gives zeros, NaN if log
  m.def("_softmax_in_order(Tensor x, bool log) -> Tensor");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(fmoe_ext, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
}
