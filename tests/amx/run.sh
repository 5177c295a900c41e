#!/usr/bin/env bash
# The CPU kernels with the tile registers of AMX emulated, in a folder of their own, and the operator tests on them: the
# processor needs AVX512_BF16, not AMX. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/../build_apart.sh" amx/emulated FMOE_EMULATE_AMX=1
[ $# -gt 0 ] || set -- -k 'not compile' tests/ops/test_{grouped_gemm,expert_mlp,split_backward,main_grad,frozen_mlp,frozen_gemm}.py
PYTHONPATH=$PWD "$python" -m pytest -q -p no:cacheprovider "$@"
