#!/usr/bin/env bash
# Builds the CPU kernels with AddressSanitizer and UBSan into a folder of their own and runs the operator tests on them.
set -euo pipefail
source "$(dirname "$0")/build_apart.sh" asan FMOE_SANITIZE=1
# Python is not instrumented, so the runtimes are loaded first, before torch's libstdc++ (verify_asan_link_order=0);
# detect_leaks=0: Python and torch never free everything. Every other finding ends the run.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# --capture=sys: pytest would swallow the report of a run that is ended
exec "$python" -m pytest -q -p no:cacheprovider --capture=sys --hypothesis-profile=whole tests/ops "$@"
