#!/usr/bin/env bash
# Everything that needs a GPU: one command whose limits sum to 540 seconds.
#
#   benchmarks/run_gpu.sh             products, layers, portable kernels, decoding, torch's products, a whole layer, proof,
#                                     SonicMoE (if --peers' packages were carried along)
#   benchmarks/run_gpu.sh --main-grads  proof, main gradients and kernels of Qwen3 and Mixtral, 190 seconds
#   benchmarks/run_gpu.sh --tests     tests of operators on the GPU, and NCCL, 150 seconds
#   --dry-run                         the same steps where there is no GPU, in two minutes: their arguments, and the
#                                     benchmarks on the CPU with tiny shapes
#   --out FOLDER                      results and logs go there (default: benchmarks/results)
#   --archive FILE                    all of it as .tar.gz, written again after each step: what a run that was cut off has
#
# The most telling steps come first, and each has a limit, so that all fit. `python -m benchmarks.pack_gpu` makes
# build/gpu, which a machine without a network needs: our modules, peers' wheels. PYTHON names the interpreter (default:
# .venv/bin/python, else python3); it needs torch and pytest. `python -m benchmarks.gpu_sentences FOLDER` writes what was
# measured into README.md and docs/measurements.md.
set -uo pipefail
cd "$(dirname "$0")/.."

dry_run=0 part=everything out=benchmarks/results archive=
while (($#)); do
  case $1 in
    --dry-run) dry_run=1 ;;
    --main-grads) part=main_grads ;;
    --tests) part=tests ;;
    --out) shift; out=${1:?"--out needs a folder"} ;;
    --archive) shift; archive=${1:?"--archive needs a file"} ;;
    *) echo "unknown argument $1: see the head of $0" >&2; exit 2 ;;
  esac
  shift
done
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
((dry_run)) && out=$(mktemp -d)
logs=$out/logs
mkdir -p "$logs"
site=${FMOE_GPU_SITE:-/tmp/fmoe_gpu_site}  # where the carried packages are unpacked
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1
failed=()

step() {  # step NAME SECONDS COMMAND...: runs it, keeps its output in a log, goes on when it fails
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "== $name: $*"
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$logs/$name.log" | tail -n 25
  local status=${PIPESTATUS[0]}
  echo "== $name: $((SECONDS - start)) s, exit status $status; $SECONDS s in all"
  ((status == 0)) || failed+=("$name")
  [[ -z $archive ]] || tar -czf "$archive" -C "$out" .
}
bench() {  # bench NAME SECONDS MODULE ARGUMENTS...: results in $out/NAME.json
  local name=$1 limit=$2 module=$3
  shift 3
  local dry=()
  ((dry_run)) && dry=(--dry-run)
  step "$name" "$limit" "$python" -m "benchmarks.$module" --out "$out/$name.json" "${dry[@]}" "$@"
}
build() {
  local loads='import torch
from fmoe_ext import ops
assert torch.version.cuda is None or ops.cuda_module_missing is None, ops.cuda_module_missing'
  for module in build/gpu/modules/*.so; do
    [[ -f $module && ! -f fmoe_ext/${module##*/} ]] && cp "$module" fmoe_ext/
  done
  if ((dry_run)) || "$python" -c "$loads"; then
    step info 20 "$python" -m fmoe_ext.info
  else
    step build 600 env FMOE_CUDA=1 "$python" setup.py build_ext --inplace
  fi
}

prove() {
  if ((dry_run)); then
    step prove 40 "$python" -m fmoe_ext.gpu prove --help
  else
    step prove 100 "$python" -m fmoe_ext.gpu prove --limit 30 --budget 85
    mkdir -p fmoe_ext/gpu/proofs
    cp "${XDG_CACHE_HOME:-$HOME/.cache}"/fmoe_ext/gpu/*.json fmoe_ext/gpu/proofs/  # where the package looks for it
  fi
}
main_grads() {
  prove
  bench gpu_main_grads 45 bench_gpu_main_grads
  bench gpu_kernels 45 bench_gpu_kernels --shapes "Qwen:16384,Mixtral:16384" --frozen Qwen:256
}

everything() {
  export FMOE_GPU_KERNELS=all  # until they are proved
  bench gpu_kernels 60 bench_gpu_kernels --shapes "Qwen:16384,Mixtral:16384,GPT-OSS:16384" --frozen GPT-OSS:256,Qwen:256
  bench gpu 100 bench_gpu_layer --tokens 16384 --budget 85 --shapes "Qwen,OLMoE,Mixtral,GPT-OSS,DeepSeek,E64,E96" \
    --only "compiled grouped_mm,transformers grouped_mm"
  FMOE_GPU_KERNELS=portable bench gpu_portable 40 bench_gpu_layer --tokens 16384 --budget 20 --shapes Qwen \
    --only "compiled grouped_mm"
  FMOE_GPU_KERNELS=torch bench gpu_torch 40 bench_gpu_layer --tokens 16384 --budget 30 --shapes "Qwen,Mixtral" \
    --only "compiled grouped_mm"
  bench gpu_host 40 bench_gpu_host --tokens 1024,4096
  bench gpu_main_grads 35 bench_gpu_main_grads
  unset FMOE_GPU_KERNELS
  prove
  beside_sonicmoe
  ((dry_run)) || [[ $out != benchmarks/results ]] || "$python" -m benchmarks.gpu_sentences "$out"
}
tests() {
  local pytest=("$python" -m pytest -q -p no:cacheprovider)
  step device 90 "${pytest[@]}" tests/cuda/test_on_gpu.py tests/cuda/test_graph.py
  if compgen -G "fmoe_ext/_C_nccl*" >/dev/null; then
    step nccl 60 "${pytest[@]}" -m "" tests/distributed/test_nccl.py
  else
    echo "== nccl: left out, _C_nccl is not built"
  fi
}

beside_sonicmoe() {
  compgen -G "build/gpu/peers/*.whl" >/dev/null || ((dry_run)) || { echo "== SonicMoE: left out, no packages"; return; }
  mkdir -p "$site"
  if compgen -G "build/gpu/peers/*.whl" >/dev/null && ! ((dry_run)); then
    step wheels 10 "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" build/gpu/peers/*.whl
    step dsl 15 tar -xJf build/gpu/peers/dsl.tar.xz -C "$site"
  fi
  [[ -f $site/nvidia_cutlass_dsl.pth ]] &&
    export PYTHONPATH=$PYTHONPATH:$site/$(grep -v import "$site/nvidia_cutlass_dsl.pth" | head -n 1)
  bench gpu_peers 80 bench_gpu_layer --tokens 16384 --shapes Qwen --tuning --budget 55 \
    --only "SonicMoE,compiled grouped_mm"
}

build
"$part"
echo "== $SECONDS s in all; results in $out"
((dry_run)) && rm -r "$out"
if ((${#failed[@]})); then
  echo "== failed: ${failed[*]}"
  exit 1
fi
exit 0
