// use_amx(): replaces products and packing in a table of avx512_bf16's kernels, which kernels_for.cpp passes,
// by those of amx.h. Products of few rows, and all other kernels, stay avx512_bf16's.
#include "isa.h"

#if defined(__x86_64__)

#define FMOE_TARGET "avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#define FMOE_BYTES 64
#define FMOE_MR 14
#define FMOE_BF16_DOT
#include "amx.h"

namespace fmoe_ext::gemm {
void use_amx(Kernels& kernels) {
  kernels.mr = kAmxRows;
  kernels.k_step = kTileDepth;
  kernels.row_step = 2 * kTileSide;
  kernels.few_rows = kDotRows;
  kernels.few_rows_transposed = kDotRowsTransposed;
  kernels.copy_rows = Entry<BF16, copy_rows_amx>();
  kernels.pack_columns = Entry<BF16, pack_columns_amx>();
  kernels.pack_rows = Entry<BF16, pack_rows_amx>();
  kernels.pack_operand_rows = Entry<BF16, pack_rows_amx>();
  kernels.multiply_row_major = Entry<BF16, multiply_row_major_amx>();
  kernels.multiply_transposed = Entry<BF16, multiply_transposed_amx>();
  kernels.multiply_turned = [](int64_t m, int64_t k, const Operand* rows, const Stored* const* columns,
                               Acc* tile) {
    return multiply_turned_amx(m, k, elements_of<BF16>(rows), elements_of<BF16>(columns),
                               elements_of<BF16>(tile));
  };
  kernels.most_turned_rows = kTurnedRows;
  kernels.begin_tiles = TileRun::begin;
  kernels.end_tiles = TileRun::end;
}
}  // namespace fmoe_ext::gemm

#else

namespace fmoe_ext::gemm {
void use_amx(Kernels&) {}
}  // namespace fmoe_ext::gemm
#endif
