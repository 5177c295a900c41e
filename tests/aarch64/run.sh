#!/usr/bin/env bash
# The CPU kernels on 64-bit Arm without an Arm machine: a cross compiler builds, qemu-user emulates the processor.
# First every kernel alone (kernels.cpp, a minute), then the wheel, with the torch that Arm machines install, and the
# tests of the operators on it (an hour). Arguments go to pytest; the one argument "kernels" leaves the wheel out.
#
# The first wheel downloads half a gigabyte, into build/aarch64. There, CPU=cortex-a76 emulates a processor that has no
# bfloat16; the default has all that qemu knows.
set -euo pipefail
cd "$(dirname "$0")/../.."
repo=$PWD
folder=$repo/build/aarch64
root=$folder/root   # Debian's Python and C library for Arm
site=$folder/site   # torch and what the tests import, for Arm
stubs=$folder/stubs # CUDA's libraries, which that torch asks for
cross=aarch64-linux-gnu
tools=(qemu-user g++-12-$cross gcc-12-$cross)

install_tools() {
  command -v qemu-aarch64 "$cross-g++-12" "$cross-gcc-12" >/dev/null && return
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "qemu-aarch64 or $cross-g++-12 is missing: install ${tools[*]} (Debian 12, Ubuntu 22.04 or newer)" >&2
    exit 1
  fi
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${tools[@]}"
}

# Every kernel of every set, with no library but the C++ one.
test_kernels() {
  local include objects=() file
  include=$(.venv/bin/python -c 'from torch.utils.cpp_extension import include_paths as p; print(p()[0])')
  mkdir -p "$folder/kernels"
  for file in csrc/gemm/{portable,neon,neon_bf16}.cpp tests/aarch64/kernels.cpp; do
    objects+=("$folder/kernels/$(basename "$file").o")
    $cross-g++-12 -std=c++20 -O3 -fno-math-errno -fno-trapping-math -Icsrc -Itests/aarch64 -I"$include" -c "$file" -o "${objects[-1]}"
  done
  $cross-g++-12 -static "${objects[@]}" -o "$folder/kernels/test"
  qemu-aarch64 -cpu max "$folder/kernels/test"
}

# Python for Arm, unpacked beside the system's and not installed into it: with apt lists of its own.
unpack_python() {
  [ -e "$folder/python.done" ] && return
  mkdir -p "$folder"/apt/{state/lists/partial,cache/archives/partial} "$folder/debs"
  touch "$folder/apt/status"
  cat >"$folder/apt.conf" <<EOF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$folder/apt/state";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
EOF
  export APT_CONFIG=$folder/apt.conf
  apt-get update -qq
  (cd "$folder/debs" && apt-get download -qq libc6 libgcc-s1 libstdc++6 zlib1g libbz2-1.0 liblzma5 libssl3 libexpat1 \
    libcrypt1 libffi8 libncursesw6 libtinfo6 libreadline8 libsqlite3-0 libuuid1 \
    {,lib}python3.11-minimal libpython3.11-{stdlib,dev})
  unset APT_CONFIG
  for deb in "$folder"/debs/*.deb; do dpkg -x "$deb" "$root"; done
  # qemu shows the files of this machine's kernel, on which torch's look at the processor crashes.
  mkdir -p "$root/proc"
  for cpu in 0 1; do
    mkdir -p "$root/sys/devices/system/cpu/cpu$cpu/regs/identification"
    echo 0x00000000410fd490 >"$root/sys/devices/system/cpu/cpu$cpu/regs/identification/midr_el1"
    printf 'processor\t: %d\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\n' "$cpu"
    printf 'CPU variant\t: 0x0\nCPU part\t: 0xd49\nCPU revision\t: 0\n\n'
  done >"$root/proc/cpuinfo"
  touch "$folder/python.done"
}

install_torch() {
  local pinned
  mapfile -t pinned < <(grep -hE '^(torch|pytest|hypothesis|setuptools|wheel|packaging)==|^numpy==.*< "3.12"' requirements*.txt | cut -d';' -f1)
  [ "$(cat "$folder/torch.done" 2>/dev/null)" = "${pinned[*]}" ] && return
  rm -rf "$site"
  .venv/bin/python -m pip install -q --disable-pip-version-check --target "$site" --no-deps --only-binary=:all: \
    --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --platform any "${pinned[@]}" \
    filelock typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec pluggy iniconfig pygments attrs sortedcontainers
  .venv/bin/python tests/aarch64/cuda_stubs.py "$site/torch/lib" "$stubs"
  echo "${pinned[*]}" >"$folder/torch.done"
}

arm_python() {
  qemu-aarch64 -cpu "${CPU:-max}" -L "$root" -E LD_LIBRARY_PATH="$stubs" -E PYTHONHOME="$root/usr" \
    -E PYTHONPATH="$site" -E PYTHONNOUSERSITE=1 "$root/usr/bin/python3.11" "$@"
}

# setup.py as an Arm machine runs it; the compiler is a program of this machine, and as fast as one.
build_wheel() {
  mkdir -p "$folder/src"
  rm -rf "$folder"/src/{csrc,cuda,fmoe_ext,tests,dist}
  cp -a setup.py pyproject.toml README.md LICENSE csrc cuda fmoe_ext tests "$folder/src/"
  find "$folder/src/fmoe_ext" -name '*.so' -delete
  (cd "$folder/src" && CC=$cross-gcc-12 CXX=$cross-g++-12 LDSHARED="$cross-gcc-12 -shared" \
    LDCXXSHARED="$cross-g++-12 -shared" CPATH="$root/usr/include:$root/usr/include/python3.11" \
    PATH="$repo/.venv/bin:$PATH" FMOE_CUDA=0 arm_python setup.py -q bdist_wheel)
  rm -rf "$folder/installed"
  .venv/bin/python -m zipfile -e "$folder"/src/dist/fmoe_ext-*.whl "$folder/installed"
}

install_tools
test_kernels
[ "$*" != kernels ] || exit 0
unpack_python
install_torch
build_wheel
# The tests find the wheel's modules, not the sources: fmoe_ext is not beside them.
mkdir -p "$folder/tests"
rm -rf "$folder/tests/tests"
cp -a tests pyproject.toml "$folder/tests/"
site=$folder/installed:$site
cd "$folder/tests"
# torch.compile runs in the emulator too, and takes a quarter of an hour a test. Two tests start Python, which only the
# emulator could, or ask for the process' memory, which is the emulator's.
[ $# -gt 0 ] || set -- -k 'not compile and not allocation_that_failed and not keeps_little' tests/ops/test_{grouped_gemm,expert_mlp,limits,split_backward}.py
arm_python -m pytest -q -p no:cacheprovider "$@"
