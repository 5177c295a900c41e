// F2 and B3 of docs/kernels.md on Hopper, for products.h; contract in launchers.h: out = scale (rows weight^T
// + bias), and dx_rows = dh w1, where the rows of the weight run along n. The kernel is in
// sm90_rows_by_weight.cuh.
#include "sm90_rows_by_weight.cuh"

namespace fmoe_ext {
namespace {

template <class T, bool kAlongN, int kColumns>
void start(const T* rows, const GroupedWeight& weight, const int* offs, int64_t num_rows, const T* bias,
           const RowScale& scale, T* out, const Grid& grid, LaunchStream stream) {
  using P = RowsByWeight<T, kColumns>;
  const uint64_t n = kAlongN ? weight.columns : weight.rows, k = kAlongN ? weight.rows : weight.columns,
                 r = num_rows, experts = weight.num_experts;
  const uint32_t box = kBlockColumns;
  CUtensorMap row_map, weight_map;
  encode_tensor_map<T>(&row_map, rows, {2, {k, r}, {k}, {box, P::kM}});
  if (kAlongN)
    encode_tensor_map<T>(&weight_map, weight.data, {3, {n, k, experts}, {n, k * n}, {box, box, 1}});
  else
    encode_tensor_map<T>(&weight_map, weight.data, {3, {k, n, experts}, {k, n * k}, {box, P::kN, 1}});
  const P params{{offs, num_rows, weight.num_experts, static_cast<int>(ceil_div(n, P::kN))},
                 bias,
                 scale,
                 out,
                 static_cast<int>(n),
                 static_cast<int>(k)};
  launch_sm90(rows_by_weight_sm90_kernel<T, kAlongN, kColumns>, grid, P::kSharedBytes, stream, row_map,
              weight_map, params);
}

}  // namespace

void launch_rows_by_weight_sm90(Dtype dtype, const void* rows, const GroupedWeight& weight, const int* offs,
                                int64_t num_rows, const void* bias, const RowScale& scale, void* out,
                                const Grid& grid, LaunchStream stream) {
  if (num_rows == 0 || (weight.along_n ? weight.columns : weight.rows) == 0) return;
  dispatch_16bit(dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool wide = grid.tile_columns == 256;
    const auto run = weight.along_n ? (wide ? start<T, true, 256> : start<T, true, 192>)
                                    : (wide ? start<T, false, 256> : start<T, false, 192>);
    run(static_cast<const T*>(rows), weight, offs, num_rows, static_cast<const T*>(bias), scale,
        static_cast<T*>(out), grid, stream);
  });
}

}  // namespace fmoe_ext
