#!/usr/bin/env bash
# Everything that needs a GPU, in five parts of less than ten minutes each on an H100. Parts may run on one machine one
# after the other, or in calls of their own: each adds its rows to the same files of results.
#
#   benchmarks/run_gpu.sh --part 1 [--out FOLDER]   results and logs go to FOLDER (default: benchmarks/results)
#   benchmarks/run_gpu.sh                           all parts, one after the other
#   benchmarks/run_gpu.sh --dry-run                 the same steps where there is no GPU, in less than three minutes:
#                                                   their arguments, and the benchmarks on the CPU with tiny shapes
#
#   1  build or unpack, prove, times of kernels (frozen MXFP4 weights too), layers at 16,384 tokens beside the peer of record
#   2  unpack the peers' packages, layers beside Liger and SonicMoE; 32,768 tokens
#   3  SonicMoE's twelve shapes; skewed choices
#   4  ablations of B1 and B2; counters of B1, B2 and F1 by ncu
#   5  host time, tests of operators and layers, 4,096 tokens, compute-sanitizer
#
# `python -m benchmarks.pack_gpu` makes build/gpu, which a machine without a network needs: our modules, peers' wheels.
# PYTHON names the interpreter (default: .venv/bin/python, else python3); it needs torch and pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

dry_run=0
out=benchmarks/results
parts=(1 2 3 4 5)
while (($#)); do
  case $1 in
    --dry-run) dry_run=1 ;;
    --out) shift; out=${1:?"--out needs a folder"} ;;
    --part) shift; parts=("${1:?"--part needs a number from 1 to 5"}") ;;
    *) echo "unknown argument $1: see the head of $0" >&2; exit 2 ;;
  esac
  shift
done
[[ ${parts[0]} == [1-5] ]] || { echo "there is no part ${parts[0]}: 1 to 5" >&2; exit 2; }
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
((dry_run)) && out=$(mktemp -d)
logs=$out/logs
mkdir -p "$logs"
site=${FMOE_GPU_SITE:-/tmp/fmoe_gpu_site}  # where the carried packages are unpacked
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1
failed=()

# Rows of earlier parts, if they came to another folder.
if [[ $out != benchmarks/results ]] && ! ((dry_run)); then
  for file in gpu.json gpu_kernels.json; do
    [[ -f $out/$file || ! -f benchmarks/results/$file ]] || cp "benchmarks/results/$file" "$out/$file"
  done
fi

step() {  # step NAME SECONDS COMMAND...: runs it, keeps its output in a log, goes on when it fails
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$logs/$name.log" | tail -n 40
  local status=${PIPESTATUS[0]}
  echo "== $name: $((SECONDS - start)) s, exit status $status"
  ((status == 0)) || failed+=("$name")
}
layer() {  # layer NAME SECONDS ARGUMENTS...: the layer's benchmark, which ends by itself before the limit
  local name=$1 limit=$2
  shift 2
  if ((dry_run)); then
    step "$name" 100 "$python" -m benchmarks.bench_gpu_layer --dry-run --merge --out "$out/gpu.json" "$@"
  else
    step "$name" "$limit" "$python" -m benchmarks.bench_gpu_layer --budget $((limit - 25)) --merge --out "$out/gpu.json" "$@"
  fi
}
has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

build() {
  local loads='import torch
from fmoe_ext import ops
cuda = torch.version.cuda is not None
assert not cuda or ops.cuda_module_missing is None, ops.cuda_module_missing'
  for module in build/gpu/base/*.so; do
    [[ -f $module && ! -f fmoe_ext/${module##*/} ]] && cp "$module" fmoe_ext/
  done
  if ! "$python" -c "$loads" 2>/dev/null; then
    if ((dry_run)); then
      step build 20 "$python" -c "$loads"
    else
      step build 600 env FMOE_CUDA=1 "$python" setup.py build_ext --inplace
    fi
  fi
  # Proofs are kept by the build's hash: a part on a fresh machine finds that of part 1.
  [[ -d $out/proof && ! -d ${XDG_CACHE_HOME:-$HOME/.cache}/fmoe_ext/gpu ]] && ! ((dry_run)) &&
    mkdir -p "${XDG_CACHE_HOME:-$HOME/.cache}/fmoe_ext/gpu" &&
    cp "$out"/proof/*.json "${XDG_CACHE_HOME:-$HOME/.cache}/fmoe_ext/gpu/"
  true
}

part_1() {
  step info 40 "$python" -m fmoe_ext.info
  local pytest=("$python" -m pytest -q -p no:cacheprovider)
  if ((dry_run)); then
    step prove 40 "$python" -m fmoe_ext.gpu prove --help
    step device 40 "${pytest[@]}" tests/cuda/test_on_gpu.py tests/cuda/test_graph.py
    step kernels 40 "$python" -m benchmarks.bench_gpu_kernels --dry-run --out "$out/gpu_kernels.json"
  else
    # Kernels that fail or lose here are off in all that follows; a proof that is there already is made again.
    step prove 260 "$python" -m fmoe_ext.gpu prove --limit 40 --budget 240
    mkdir -p "$out/proof" && cp "${XDG_CACHE_HOME:-$HOME/.cache}"/fmoe_ext/gpu/*.json "$out/proof/"
    step device 60 "${pytest[@]}" tests/cuda/test_on_gpu.py tests/cuda/test_graph.py
    step kernels 65 "$python" -m benchmarks.bench_gpu_kernels --out "$out/gpu_kernels.json"
  fi
  layer layer_16384 160 --tokens 16384 --shapes "Mixtral,Qwen,OLMoE,GPT-OSS,DeepSeek,E64,E96"
}

part_2() {
  mkdir -p "$site"
  if compgen -G "build/gpu/base/*.whl" >/dev/null && ! ((dry_run)); then
    step wheels 40 "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" build/gpu/base/*.whl
  fi
  [[ -f build/gpu/dsl/dsl.tar.xz ]] && ! ((dry_run)) && step dsl 90 tar -xJf build/gpu/dsl/dsl.tar.xz -C "$site"
  [[ -f $site/nvidia_cutlass_dsl.pth ]] &&
    export PYTHONPATH=$PYTHONPATH:$site/$(grep -v import "$site/nvidia_cutlass_dsl.pth" | head -n 1)
  has sonicmoe && step sonicmoe 60 "$python" -c "import sonicmoe.functional; print(sonicmoe.functional.__file__)"
  layer peers 240 --tokens 16384 --shapes "Qwen,OLMoE" --tuning --rounds 5
  layer layer_32768 120 --tokens 32768 --shapes "Mixtral,Qwen,OLMoE,GPT-OSS,DeepSeek,E64,E96"
}

part_3() {
  [[ -f $site/nvidia_cutlass_dsl.pth ]] &&
    export PYTHONPATH=$PYTHONPATH:$site/$(grep -v import "$site/nvidia_cutlass_dsl.pth" | head -n 1)
  layer sonic_shapes 430 --shapes "SonicMoE" --tuning --only "SonicMoE,compiled grouped_mm"
  layer skew 120 --tokens 16384 --shapes "Qwen,OLMoE" --routing zipf
}

part_4() {
  if ((dry_run)); then
    step ablations 60 "$python" -m benchmarks.bench_gpu_ablations --dry-run --out "$out/gpu_ablations.json"
    return
  fi
  step ablations 150 "$python" -m benchmarks.bench_gpu_ablations --out "$out/gpu_ablations.json"
  if command -v ncu >/dev/null; then
    local shape
    for shape in Qwen:16384 E64:16384; do
      step "ncu_${shape%%:*}" 180 ncu --clock-control none --set full --target-processes all --launch-count 6 \
        --kernel-name 'regex:up_kernel|up_turns|grad_hidden|grad_weight' --csv --page details \
        "$python" -m benchmarks.bench_gpu_kernels --shapes "$shape" --once
    done
  else
    echo "== ncu was not found: no counters"
  fi
}

part_5() {
  if ((dry_run)); then
    step host 60 "$python" -m benchmarks.bench_gpu_host --dry-run --out "$out/gpu_host.json"
    step tests 60 "$python" -m pytest -q -p no:cacheprovider --device cuda --collect-only tests/ops
  else
    local parallel=()
    local on_gpu=(tests/ops tests/gates tests/test_layers.py tests/test_linear.py tests/test_transformer.py tests/test_balance.py)
    has xdist && parallel=(-n "$(($(nproc) < 12 ? $(nproc) : 12))" --dist worksteal)
    step host 120 "$python" -m benchmarks.bench_gpu_host --out "$out/gpu_host.json"
    step tests 120 "$python" -m pytest -q -p no:cacheprovider --device cuda "${parallel[@]}" "${on_gpu[@]}"
  fi
  layer layer_4096 160 --tokens 4096 --shapes "E64,E96,Qwen,OLMoE,GPT-OSS"
  local small=(tests/ops/test_expert_mlp.py tests/ops/test_grouped_gemm.py tests/ops/test_topk_gate.py)
  if command -v compute-sanitizer >/dev/null && ! ((dry_run)); then
    step memory 90 compute-sanitizer --error-exitcode 1 --kernel-regex kns=fmoe_ext \
      "$python" -m pytest -q -p no:cacheprovider --device cuda -k "shapes or garbage" "${small[@]}"
  else
    echo "== memory: left out, compute-sanitizer was not found"
  fi
}

build
for part in "${parts[@]}"; do "part_$part"; done

tar -czf "$out/logs_part_$(IFS=_; echo "${parts[*]}").tar.gz" -C "$logs" .
echo "== $SECONDS s in all; results in $out"
if ((${#failed[@]})); then
  echo "== failed: ${failed[*]}"
  exit 1
fi
((dry_run)) && rm -r "$out"
exit 0
