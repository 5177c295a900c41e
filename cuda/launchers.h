// The launchers of every kernel file: plain pointers and a stream, no torch. Letters as in csrc/ops.cpp.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace fmoe_ext {

using LaunchStream = CUstream_st*;

// An index tensor as the ops accept it.
struct Indices {
  const void* data;
  bool is_int64;
};

// tokens_per_expert [E] is zero on entry; indices outside [0, E) are not counted.
void launch_count_tokens(Indices topk_idx, int64_t num_choices, int num_experts, int64_t* tokens_per_expert, LaunchStream);

}  // namespace fmoe_ext
