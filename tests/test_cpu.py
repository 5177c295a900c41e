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

def gradient(weight=weight):
    return torch.autograd.grad(ops.grouped_gemm(x, weight, offs).sum(), weight)[0]

def is_mapped(address):
    places = [line.split()[0].split("-") for line in open("/proc/self/maps")]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in places)

address = gradient().data_ptr()
found["kept for the next"] = is_mapped(address)
found["taken again"] = gradient().data_ptr() == address
smaller = weight[:, :1024].detach().requires_grad_()  # a block of its own would have the kept one unmapped
found["taken for less"] = gradient(smaller).data_ptr() == address
grads = [gradient() for _ in range(3)]
found["not twice"] = len({g.data_ptr() for g in grads})
del grads
ops.release_memory()
found["released"] = not is_mapped(address)
print(json.dumps(found))
"""
LARGE = 64 << 20

needs_glibc = pytest.mark.skipif(not cpu.can_keep_memory(), reason="the C library is not glibc")


BOUNDED = """
import json, resource, torch
from fmoe_ext import ops

def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_AS, (2**40, resource.getrlimit(resource.RLIMIT_AS)[1]))
x, offs = torch.randn(16, 1024), torch.tensor([16], dtype=torch.int32)

def gradient(width):
    weight = torch.empty(1, width, 1024, requires_grad=True)
    grad = torch.autograd.grad(ops.grouped_gemm(x, weight, offs), weight, torch.ones(16, width))[0]
    return grad

gradient(2048)
ops.release_memory()
refused, wide = False, torch.zeros(1, 2**20)
try:  # 4 TiB, which are never there
    backward = torch.ops.fmoe_ext.grouped_gemm_backward
    one = torch.tensor([1], dtype=torch.int32)
    with torch.no_grad():
        backward(wide, wide, torch.zeros(()).expand(1, 2**20, 2**20), one, [False, True, False])
except RuntimeError:
    refused = True
begin, kept = mapped(), []
for factor in range(8, 1, -1):  # each much smaller than the block before
    gradient(factor * factor * 256)
    kept.append(mapped() - begin)
print(json.dumps({"largest": max(kept), "at once": 64 * 256 * 1024 * 4, "refused": refused}))
"""


@pytest.fixture(scope="module")
def bounded():
    return json.loads(subprocess.check_output([sys.executable, "-c", BOUNDED], text=True))


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
    """Not by counting page faults: the system may take pages that are kept."""
    assert found["kept for the next"] and found["taken again"] and found["released"]
    assert found["taken for less"]
    assert found["not twice"] == 3


@needs_glibc
def test_kept_memory_is_bounded(bounded):
    """Blocks of ever other sizes, three times as much in all; the C library keeps some memory of its own.

    A gradient that the system had no memory for came before them, and counts for nothing.
    """
    assert bounded["refused"]
    assert bounded["largest"] < 2 * bounded["at once"]


@pytest.mark.parametrize("max_bytes", [-1, 2**31])
def test_bounds_that_glibc_does_not_take(max_bytes):
    with pytest.raises(ValueError, match=f"max_bytes must be 0 to 2147483647, .* but got {max_bytes}"):
        cpu.keep_memory(max_bytes)


@pytest.mark.parametrize("function", [cpu.keep_memory, cpu.give_memory_back])
def test_another_c_library_is_an_error(monkeypatch, function):
    monkeypatch.setattr(cpu, "can_keep_memory", lambda: False)
    with pytest.raises(NotImplementedError, match="sets glibc's malloc"):
        function()
