#!/usr/bin/env bash
# The CPU kernels with the tile registers of AMX emulated, in a folder of their own, and the operator tests on them: the
# processor needs AVX512_BF16, not AMX. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$PWD/.venv/bin/python
folder=$PWD/build/amx/emulated
mkdir -p "$folder"
rm -rf "$folder"/{csrc,cuda,fmoe_ext,tests}
# -a keeps the times of the files, so that the second time compiles what has changed only
cp -a setup.py pyproject.toml README.md LICENSE csrc cuda fmoe_ext tests "$folder/"
find "$folder/fmoe_ext" -name '*.so' -delete
cd "$folder"
FMOE_EMULATE_AMX=1 FMOE_CUDA=0 "$python" setup.py -q build_ext --inplace
[ $# -gt 0 ] || set -- -k 'not compile' tests/ops/test_{grouped_gemm,expert_mlp,split_backward,main_grad,frozen_mlp,frozen_gemm}.py
PYTHONPATH=$PWD "$python" -m pytest -q -p no:cacheprovider "$@"
