// The launchers of every kernel file, with their contracts: plain pointers and a stream, no torch.
// The ops_*.cpp files and products.h call them. Matrices are contiguous, on the current device and allocated
// by the caller; a launcher returns once its kernels are queued, and throws std::runtime_error where a launch
// is refused. Letters as in csrc/ops.cpp.
#pragma once

#include <cstdint>

#include "activation.h"

struct CUstream_st;

namespace fmoe_ext {

namespace gemm {
struct PackedMatrix;
}

using LaunchStream = CUstream_st*;

constexpr int kStaticSharedBytes = 48 * 1024;  // what a thread block has without asking for more

enum class Dtype { f64, f32, bf16, f16 };

// ---- device_info.cu: of the current device
struct DeviceInfo {
  int capability;  // 10 major + minor
  int num_sms;
};
DeviceInfo current_device_info();
bool is_capturing(LaunchStream);  // a CUDA graph

// An index tensor as the ops accept it.
struct Indices {
  const void* data;
  bool is_int64;
};

// ---- count_tokens.cu: tokens_per_expert [E] is zero on entry; indices outside [0, E) are not counted
void launch_count_tokens(Indices topk_idx, int64_t num_choices, int num_experts, int64_t* tokens_per_expert,
                         LaunchStream);

// ---- sort_tokens.cu: workspace holds rank_workspace_ints() ints. Results of sort_tokens: tokens_per_expert
// and offs [E], row_idx [T * K], inverse [T, K]; of apply_capacity: out like topk_idx [T, K], capacity is [E]
constexpr int kMaxSortExperts = kStaticSharedBytes / sizeof(int);
int64_t rank_workspace_ints(int64_t num_choices, int num_experts);
void launch_sort_tokens(Indices topk_idx, int64_t num_choices, int num_experts, int* workspace,
                        int64_t* tokens_per_expert, int* offs, int* row_idx, int* inverse, LaunchStream);
void launch_apply_capacity(Indices topk_idx, int64_t num_tokens, int64_t top_k, int num_experts,
                           const int64_t* capacity, int* workspace, void* out, LaunchStream);

// ---- permute.cu: weights [T, K] and their gradient in float, double for f64, null: every weight is 1;
// num_choices is T * K. permute: out [R, ..] of any dtype = x [T, ..] of the rows' tokens; unpermute: out [T,
// width] = the weighted sums of each token's rows of y [R, width]
void launch_permute(const void* x, const int* row_idx, int64_t num_rows, int64_t num_choices, int top_k,
                    int64_t row_bytes, void* out, LaunchStream);
void launch_unpermute(Dtype, const void* y, const int* inverse, const void* weights, int64_t num_tokens,
                      int top_k, int64_t num_rows, int64_t width, void* out, LaunchStream);
// grad_weights is zero on entry; it is left alone when y is null
void launch_unpermute_backward(Dtype, const void* grad_out, const void* y, const int* row_idx,
                               const void* weights, int64_t num_rows, int64_t num_choices, int top_k,
                               int64_t width, void* grad_y, void* grad_weights, LaunchStream);

// ---- topk_gate.cu: bias [E] in float, double for f64, or null; topk_idx and topk_weights [T, K]
struct GateParams {
  int num_experts, top_k, num_groups, topk_groups;
  bool sigmoid, normalize;
  double scale;
};
int64_t max_gate_values(Dtype);  // limit of num_experts + 2 * num_groups
void launch_topk_gate(Dtype, const void* logits, const void* bias, const GateParams&, int64_t num_tokens,
                      int64_t* topk_idx, void* topk_weights, LaunchStream);
void launch_topk_gate_backward(Dtype, const void* grad_weights, const void* logits, const int64_t* topk_idx,
                               const void* topk_weights, const GateParams&, int64_t num_tokens,
                               void* grad_logits, LaunchStream);

// ---- grouped_gemm.cu
// Row r is row r of data [.., width], or, with an index, row index[r] / divisor; index[r] outside [0,
// num_indexed) is a row of zeros.
struct GroupedRows {
  const void* data;
  int64_t width;
  const int* index;
  int divisor;
  int64_t num_indexed;
};
// [num_experts, rows, columns]; along_n: k runs along the rows and n along the columns, else the other way
// round.
struct GroupedWeight {
  const void* data;
  int num_experts;
  int64_t rows, columns;
  bool along_n;
};
// Row r is multiplied by weights[row_idx[r]] (float, double for f64), by 0 where row_idx[r] is outside
// [0, num_choices); no factor when weights is null.
struct RowScale {
  const void* weights;
  const int* row_idx;
  int64_t num_choices;
};
// out [num_rows, N] = scale (x weight[e]^T + bias[e]), zero in padding; bias may be null
void launch_rows_by_weight(Dtype, const GroupedRows& x, const GroupedWeight&, const int* offs,
                           int64_t num_rows, const void* bias, const RowScale&, void* out, LaunchStream);
struct WeightGrad {
  void* data;       // of the dtype; float32 (double for f64) if accumulate
  bool accumulate;  // data is a main gradient: add to it
};
// out[e] [a.width, b.width] = sum over the rows r of expert e of a[r]^T b[r]; zero for an expert without
// rows, which is left alone when accumulating
void launch_rows_by_rows(Dtype, const GroupedRows& a, const GroupedRows& b, const int* offs, int num_experts,
                         int64_t num_rows, const WeightGrad& out, LaunchStream);
// out [E, width] = the sum of each expert's rows, times their factors
void launch_sum_rows(Dtype, const GroupedRows&, const int* offs, int num_experts, int64_t num_rows,
                     const RowScale&, void* out, LaunchStream);

// ---- heaviest_first.cu: order [E] is a permutation of the experts, those with most rows first, then by
// index
void launch_heaviest_first(const int* offs, int num_experts, int64_t num_rows, int* order, LaunchStream);

// ---- decode_packed.cu: out [num_experts, rows, columns] in f32, bf16 or f16, gates before ups
void launch_decode_packed(Dtype, const gemm::PackedMatrix&, void* out, LaunchStream);

// ---- torch_products.cu: what torch's grouped_mm leaves to do
// clamped [num_experts]: offs inside the rows and rising, whatever it held
void launch_clamp_offs(const int* offs, int num_experts, int64_t num_rows, int* clamped, LaunchStream);
// In place: y [R, N] = scale (y + bias), zero in padding; offs are clamped, bias may be null
void launch_finish_rows(Dtype, void* y, const int* offs, int num_experts, int64_t num_rows, int64_t N,
                        const void* bias, const RowScale&, LaunchStream);
// product [num_experts, size] of an expert without rows becomes zero; with a main gradient (float32) it
// stays, and the main gradient is increased by the products of the experts that have rows
void launch_finish_weight_grad(Dtype, void* product, const int* offs, int num_experts, int64_t num_rows,
                               int64_t size, float* main_grad, LaunchStream);

// ---- activation.cu: h is [R, H], or [R, 2 H] (gate, then up) when gated
struct ActivationRows {
  const void* h;
  const int* offs;
  const int* row_idx;
  const void* weights;  // by choice, float or double; null: 1
  int num_experts, top_k;
  int64_t num_rows, num_choices;
  bool dy_by_token;  // dy is [T, D] rather than [R, D]
};
void launch_activation(Dtype, CurveKind, bool gated, const void* h, const int* offs, int num_experts,
                       int64_t num_rows, int64_t H, void* a, LaunchStream);
// dscale may be null; it is zero on entry
void launch_activation_backward(Dtype, CurveKind, bool gated, const void* grad, const ActivationRows&,
                                const void* dy, const void* b2, int64_t H, int64_t D, void* dh,
                                void* scaled_a, void* dscale, LaunchStream);

// ---- sm90_*.cu: the Hopper path, compiled for sm_90a.
// Of all of them: bf16 or f16 (another dtype throws); D and H are multiples of 8; every matrix is contiguous
// and begins at a multiple of 16 bytes; num_rows < kMaxHopperRows. offs and row_idx may hold anything, as on
// the portable path.
constexpr int64_t kMaxHopperRows = INT32_MAX - 256;  // tiles are counted in 32 bits
struct Grid {
  int num_blocks;          // the number of SMs; any positive number is right
  int tile_columns = 192;  // 192 or 256, of rows_by_weight and grad_input; the other kernels have one size
};

// sm90_up.cu: h [R, F] = x_rows w1^T + b1, with w1 [E, F, D] (F = 2 H when gated), and a [R, H] as
// launch_activation computes it from h. b1 [E, F] and h may be null; padding rows are zero.
void launch_up_sm90(Dtype, CurveKind, bool gated, const GroupedRows& x, const int* offs, const void* w1,
                    const void* b1, int64_t num_rows, int num_experts, int H, void* h, void* a, const Grid&,
                    LaunchStream);
// sm90_rows_by_weight.cu: what launch_rows_by_weight writes, rows without an index, padding rows zero
void launch_rows_by_weight_sm90(Dtype, const void* rows, const GroupedWeight&, const int* offs,
                                int64_t num_rows, const void* bias, const RowScale&, void* out, const Grid&,
                                LaunchStream);
// sm90_grad_hidden.cu: dA = dy_rows w2 is never stored. dh and scaled_a as
// launch_activation_backward writes them; dots [R, num_hidden_dots_sm90(H)] holds <dA, act(h)> by tile
// of columns, for launch_sum_dots. Rows of dots in the padding are not written; dots may be null.
int64_t num_hidden_dots_sm90(int H);
void launch_grad_hidden_sm90(Dtype, CurveKind, bool gated, const void* dy, const ActivationRows&,
                             const void* w2, int D, int H, void* dh, void* scaled_a, float* dots, const Grid&,
                             LaunchStream);
// dscale, zero on entry, by choice: the sum of the row's num_dots dots, and <dy, b2>; b2 may be null
void launch_sum_dots(Dtype, const ActivationRows&, const float* dots, int64_t num_dots, const void* dy,
                     const void* b2, int64_t D, float* dscale, LaunchStream);
// sm90_grad_weight.cu: what launch_rows_by_rows writes. At most one of a and b has an index; both widths are
// multiples of 8. order, of launch_heaviest_first, is the one in which the experts are taken.
void launch_grad_weight_sm90(Dtype, const GroupedRows& a, const GroupedRows& b, const int* offs,
                             const int* order, int num_experts, int64_t num_rows, const WeightGrad& out,
                             const Grid&, LaunchStream);

}  // namespace fmoe_ext
