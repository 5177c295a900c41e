"""fmoe_ext.cpu.keep_memory(): what it does to page faults and to the memory of a process of its own."""

import json
import subprocess
import sys

import pytest

from fmoe_ext import cpu

PROGRAM = """
import json, resource, torch
from fmoe_ext import cpu, ops

LARGE = 64 << 20  # bytes; glibc never moves its threshold for blocks of the system's above 32 MiB

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def step(size=LARGE):
    torch.empty(size, dtype=torch.uint8).fill_(1)

def faults(size=LARGE, before=3):
    for _ in range(before):
        step(size)
    counted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - counted

torch.set_num_threads(1)
found = {"default": faults()}
beginning = resident()
cpu.keep_memory()
found["kept"] = faults(before=32)  # until the caches that keep_memory() tells of are full
found["kept bytes"] = resident() - beginning
cpu.keep_memory(LARGE // 2)
found["bounded bytes"] = resident() - beginning
cpu.keep_memory(None)
found["unbounded"] = faults(before=32)
cpu.give_memory_back()
found["given back bytes"] = resident() - beginning
found["given back"] = faults(3 * LARGE)  # more than any gap in the heap

rows, experts = 64, 4
x, weight = torch.randn(rows, 1024), torch.randn(experts, 4096, 1024, requires_grad=True)
offs = torch.full((experts,), rows // experts).cumsum(0).int()

def gradient():
    torch.autograd.grad(ops.grouped_gemm(x, weight, offs).sum(), weight)

gradient()
beginning = resident()
counted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    gradient()
found["gradients"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - counted
ops.release_memory()
found["released bytes"] = beginning - resident()
print(json.dumps(found))
"""
LARGE = 64 << 20

needs_glibc = pytest.mark.skipif(not cpu.can_keep_memory(), reason="the C library is not glibc")


@pytest.fixture(scope="module")
def found():
    return json.loads(subprocess.check_output([sys.executable, "-c", PROGRAM], text=True))


@needs_glibc
def test_large_tensors_cost_page_faults_until_memory_is_kept(found):
    a_step = LARGE >> 21  # pages of 2 MiB, if the system has such
    assert found["default"] >= 4 * a_step and found["given back"] >= 12 * a_step
    assert found["kept"] < a_step / 2 and found["unbounded"] < a_step / 2
    assert found["kept bytes"] >= 0.9 * LARGE
    assert found["bounded bytes"] < 0.75 * LARGE
    assert found["given back bytes"] < LARGE / 4


@needs_glibc
def test_gradient_of_last_step_gives_its_memory_to_the_next(found):
    assert found["gradients"] < LARGE >> 21
    assert found["released bytes"] > 0.9 * LARGE


@pytest.mark.parametrize("max_bytes", [-1, 2**31])
def test_bounds_that_glibc_does_not_take(max_bytes):
    with pytest.raises(ValueError, match=f"max_bytes must be 0 to 2147483647, .* but got {max_bytes}"):
        cpu.keep_memory(max_bytes)


@pytest.mark.parametrize("function", [cpu.keep_memory, cpu.give_memory_back])
def test_another_c_library_is_an_error(monkeypatch, function):
    monkeypatch.setattr(cpu, "can_keep_memory", lambda: False)
    with pytest.raises(NotImplementedError, match="sets glibc's malloc"):
        function()
