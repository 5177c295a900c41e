#!/usr/bin/env bash
# Everything that needs a GPU, in one command that ends in under 8 minutes on an H100: build (or take the modules that
# are there), the proof of the kernels, tests on the GPU, memory checks, times of kernels and layers, their tables.
#
#   benchmarks/run_gpu.sh [--out FOLDER]      results and logs go to FOLDER (default: benchmarks/results)
#   benchmarks/run_gpu.sh --dry-run           the same steps where there is no GPU: what they import, their arguments,
#                                             and the benchmark itself on the CPU with tiny shapes
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3); it needs torch and pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

dry_run=0
out=benchmarks/results
while (($#)); do
  case $1 in
    --dry-run) dry_run=1 ;;
    --out) shift; out=${1:?"--out needs a folder"} ;;
    *) echo "unknown argument $1: see the head of $0" >&2; exit 2 ;;
  esac
  shift
done
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
((dry_run)) && out=$(mktemp -d)
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
failed=()

step() {  # step NAME SECONDS COMMAND...: runs it, keeps its output in a log, goes on when it fails
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log" | tail -n 60
  local status=${PIPESTATUS[0]}
  echo "== $name: $((SECONDS - start)) s, exit status $status"
  ((status == 0)) || failed+=("$name")
}

loads='import torch
from fmoe_ext import ops
cuda = torch.version.cuda is not None
assert not cuda or ops.cuda_module_missing is None, ops.cuda_module_missing'
if ! "$python" -c "$loads" 2>/dev/null; then
  if ((dry_run)); then
    step build 10 "$python" -c "$loads"
  else
    step build 600 env FMOE_CUDA=1 "$python" setup.py build_ext --inplace
  fi
fi
step info 30 "$python" -m fmoe_ext.info

# Kernels that fail or lose here are off in all that follows; a proof that is there already is made again.
if ((dry_run)); then
  step prove 60 "$python" -m fmoe_ext.gpu prove --help
else
  step prove 150 "$python" -m fmoe_ext.gpu prove --limit 30 --budget 130
fi

on_gpu=(tests/ops tests/gates tests/test_layers.py tests/test_linear.py tests/test_transformer.py tests/test_balance.py)
small=(tests/ops/test_expert_mlp.py tests/ops/test_grouped_gemm.py tests/ops/test_topk_gate.py)
pytest=("$python" -m pytest -q -p no:cacheprovider --device cuda)
parallel=()
if "$python" -c 'import xdist' 2>/dev/null; then parallel=(-n "$(($(nproc) < 12 ? $(nproc) : 12))" --dist worksteal); fi
if ((dry_run)); then
  step tests 300 "${pytest[@]}" --collect-only -q "${on_gpu[@]}"
  step device 60 "$python" -m pytest -q -p no:cacheprovider tests/cuda/test_on_gpu.py
  step memory 300 "${pytest[@]}" --collect-only -q -k "shapes or garbage" "${small[@]}"
  step kernels 60 "$python" -m benchmarks.bench_gpu_kernels --dry-run --out "$out/gpu_kernels.json"
  step layer 300 "$python" -m benchmarks.bench_gpu_layer --dry-run --out "$out/gpu.json"
else
  step device 50 "$python" -m pytest -q -p no:cacheprovider tests/cuda/test_on_gpu.py
  step tests 120 "${pytest[@]}" "${parallel[@]}" "${on_gpu[@]}"
  if command -v compute-sanitizer >/dev/null; then
    step memory 50 compute-sanitizer --error-exitcode 1 --kernel-regex kns=fmoe_ext \
      "${pytest[@]}" -k "shapes or garbage" "${small[@]}"
  else
    echo "== memory: left out, compute-sanitizer was not found"
  fi
  step kernels 40 "$python" -m benchmarks.bench_gpu_kernels --out "$out/gpu_kernels.json"
  step layer 130 "$python" -m benchmarks.bench_gpu_layer --budget 110 --out "$out/gpu.json"
fi

echo "== $SECONDS s in all; results in $out"
if ((${#failed[@]})); then
  echo "== failed: ${failed[*]}"
  exit 1
fi
((dry_run)) && rm -r "$out"
exit 0
