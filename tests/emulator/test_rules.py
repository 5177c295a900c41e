"""The coding rules that keep every kernel emulatable (docs/kernels.md, "Rules"), checked by reading the sources."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[2] / "cuda"
KERNELS = sorted([*CUDA.glob("*.cu"), *CUDA.glob("*.cuh")])
PTX = {"ptx.cuh"}
SURFACE = {"ptx.cuh", "common.cuh"}

FORBIDDEN = [  # (what, pattern, files that may)
    ("inline PTX outside ptx.cuh", r"\basm\b", PTX),
    ("a launch outside launch()", r"<<<|cudaLaunchKernel", {"common.cuh"}),
    ("__shared__ outside the two macros", r"__shared__", {"common.cuh"}),
    ("a CUDA header", r"#include\s*<(cuda|cooperative_groups|mma|cub|thrust|cute)", SURFACE),
    ("a torch header", r"#include\s*[<\"](torch|ATen|c10)", set()),
    ("a generic-to-shared conversion", r"__cvta_generic_to_shared", PTX),
    ("__constant__ memory", r"__constant__", set()),
    ("a texture", r"\btex[123]D\b|cudaTextureObject_t", set()),
    ("a floating-point atomic", r"atomicAdd\([^;]*\b(float|double|acc)\b", set()),
    ("another .cu file", r"#include\s*\"[^\"]*\.cu\"", set()),
    ("a host synchronisation", r"cuda(Device|Stream|Event)Synchronize|cudaMemcpy\b", set()),
    ("a warp function without a mask", r"__(shfl|shfl_up|shfl_down|shfl_xor|ballot|any|all)\s*\(", set()),
    ("bar.sync with a run-time id", r"bar_sync\(", PTX),
]


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


@pytest.mark.parametrize(("what", "pattern", "allowed"), FORBIDDEN, ids=[what for what, *_ in FORBIDDEN])
def test_no(what, pattern, allowed):
    found = []
    for path in KERNELS:
        if path.name in allowed:
            continue
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.name}:{number}: {line.strip()}")
    assert not found, f"{what}:\n" + "\n".join(found)


def test_patterns_find_what_they_are_for():
    samples = [
        "asm volatile",
        "k<<<1, 2>>>()",
        "__shared__ int x",
        "#include <cuda.h>",
        "#include <torch/x.h>",
    ]
    for (what, pattern, _), sample in zip(FORBIDDEN, samples, strict=False):
        assert re.search(pattern, sample), what


def test_tensor_maps_are_passed_by_value_as_grid_constants():
    for path in KERNELS:
        for parameters in re.findall(
            r"__global__[^{;]*?\(([^{;]*)\)\s*{", without_comments(path.read_text())
        ):
            for parameter in parameters.split(","):
                if "CUtensorMap" in parameter:
                    assert "__grid_constant__" in parameter, f"{path.name}: {parameter.strip()}"
                    assert "*" not in parameter and "&" not in parameter, f"{path.name}: {parameter.strip()}"


def test_every_launcher_is_declared_once():
    header = (CUDA / "launchers.h").read_text()
    defined = [
        name
        for path in CUDA.glob("*.cu")
        for name in re.findall(r"^void (launch_\w+)\(", path.read_text(), re.M)
    ]
    assert len(defined) == len(set(defined)) > 10
    assert sorted(defined) == sorted(re.findall(r"^void (launch_\w+)\(", header, re.M))


# allow_shared() of common.cuh between a runtime that counts and a main that calls it; nvcc alone compiles the rest.
RUNTIME = """
#include <algorithm>
#include <cstdio>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
constexpr int kStaticSharedBytes = 48 * 1024;
int device = 0, calls = 0, refused = 0;
cudaError_t cudaGetDevice(int* d) { *d = device; return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, int, int bytes) {
  ++calls;
  return bytes > 232448 ? ++refused, cudaErrorInvalidValue : cudaSuccess;
}
"""
CALLS = """
int main() {
  static char a, b;
  const auto says = [](const char* what) { std::printf("%s %d\\n", what, calls); };
  allow_shared(&a, 1000), says("small");
  for (int i = 0; i < 3; ++i) allow_shared(&a, 200000);
  says("launched three times");
  allow_shared(&b, 200000), says("another kernel");
  device = 1;
  for (int i = 0; i < 2; ++i) allow_shared(&a, 200000);
  says("another device");
  device = 0, allow_shared(&a, 200000), says("back again");
  const bool failed = allow_shared(&device, 1 << 20) != cudaSuccess && allow_shared(&device, 1 << 20) != cudaSuccess;
  std::printf("refused %d, said so %d\\n", refused, failed);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ was not found")
def test_shared_memory_is_asked_for_once_a_kernel_and_device(tmp_path):
    text = (CUDA / "common.cuh").read_text()
    function = re.search(r"^inline cudaError_t allow_shared\(.*?^}\n", text, re.M | re.S).group()
    source = tmp_path / "allow_shared.cpp"
    source.write_text(f"{RUNTIME}\n{function}\n{CALLS}")
    subprocess.run(["g++", "-std=c++20", str(source), "-o", str(tmp_path / "program")], check=True)
    said = subprocess.run([str(tmp_path / "program")], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "small 0", "launched three times 1", "another kernel 2", "another device 3", "back again 3",
        "refused 2, said so 1",
    ]  # fmt: skip
