#!/usr/bin/env bash
# Builds the CPU kernels with AddressSanitizer and UBSan into a folder of their own and runs the operator tests on them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
folder=$PWD/build/asan
mkdir -p "$folder"
rm -rf "$folder"/{csrc,cuda,fmoe_ext,tests}
# -a keeps the times of the files, so that the second time compiles what has changed only
cp -a setup.py pyproject.toml README.md LICENSE csrc cuda fmoe_ext tests "$folder/"
find "$folder/fmoe_ext" -name '*.so' -delete
cd "$folder"
FMOE_SANITIZE=1 FMOE_CUDA=0 "$python" setup.py -q build_ext --inplace
# Python is not instrumented, so the runtimes are loaded first, before torch's libstdc++ (verify_asan_link_order=0);
# detect_leaks=0: Python and torch never free everything. Every other finding ends the run.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# --capture=sys: pytest would swallow the report of a run that is ended
exec "$python" -m pytest -q -p no:cacheprovider --capture=sys --hypothesis-profile=whole tests/ops "$@"
