"""The NCCL communicator when its peers are gone, on the CPU: csrc/nccl over a fake NCCL and CUDA driver (fake/)."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import emu_build  # it knows where cuda.h is
import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PREAMBLE = """
import ctypes, time
fake = ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)
import _C_nccl
assert _C_nccl.__file__.startswith({folder!r})

def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def exchange(communicator):
    communicator.all_to_all([0], [1, 1], [0], [1, 1], [8], 0)

def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)

def new(timeout):
    fake.fake_bind_context()
    return _C_nccl.Communicator(bytes(128), 2, 0, timeout, 16)
"""


@pytest.fixture(scope="module")
def folder():
    """Both libraries, built once into build/nccl_fake for these sources."""
    if reason := emu_build.missing():
        pytest.skip(f"the communicator cannot be built: {reason}")
    from torch.utils import cpp_extension

    fake, nccl = HERE / "fake", ROOT / "csrc" / "nccl"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    common = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{fake}"]
    common += ["-isystem", str(emu_build.cuda_include())]
    flags = ["-fvisibility=hidden", *(f"-isystem{path}" for path in includes)]
    texts = [path.read_bytes() for path in sorted((*fake.iterdir(), *nccl.iterdir()))]
    digest = hashlib.sha256(repr((torch.__version__, common, flags, texts)).encode()).hexdigest()[:16]
    built = ROOT / "build" / "nccl_fake" / digest
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent.parent / "nccl_fake.lock").open(
        "w"
    ) as lock:  # every worker of pytest-xdist comes here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (built / "_C_nccl.so").exists():
            shutil.rmtree(built.parent)
            built.mkdir(parents=True)
            library = [str(fake / "fake.cpp"), "-Wl,-soname,libcuda.so.1", "-o", str(built / "libcuda.so.1")]
            subprocess.run([*common, *library], check=True)
            module = [
                str(nccl / "communicator.cpp"),
                "-ldl",
                "-Wl,--wrap=nanosleep",
                "-o",
                str(built / "unfinished.so"),
            ]
            subprocess.run([*common, *flags, *module], check=True)
            (built / "unfinished.so").rename(built / "_C_nccl.so")
    return built


def run(folder, script):
    """Output of a fresh interpreter, which must end by itself, without a crash."""
    preamble = PREAMBLE.format(library=str(folder / "libcuda.so.1"), folder=str(folder))
    command, env = [sys.executable, "-c", preamble + script], {**os.environ, "PYTHONPATH": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_peer_that_dies_after_the_exchange_was_enqueued(folder):
    """The exchange is aborted within the timeout, so that what waits for it goes on; then every call says why."""
    said = run(
        folder,
        """
communicator = new(3.0)
exchange(communicator)  # ends
fake.fake_kill_peers()
exchange(communicator)
assert communicator.is_open and error_of(communicator.check) is None
until(lambda: fake.fake_aborts() == 1)
until(lambda: not communicator.is_open)
print(error_of(communicator.check))
print(error_of(lambda: exchange(communicator)))
""",
    )
    assert said[0] == said[1]
    assert "the exchange (ncclSend, ncclRecv) on rank 0 of 2 took more than 3 s: a rank has ended" in said[0]
    assert "a rank has ended or did not reach this call" in said[0]


def test_error_of_the_library_ends_the_exchange_at_once(folder):
    said = run(
        folder,
        """
communicator = new(1000.0)
fake.fake_kill_peers()
exchange(communicator)
fake.fake_remote_error()
until(lambda: fake.fake_aborts() == 1)
print(error_of(communicator.check))
""",
    )
    assert "failed: remote process exited" in said[0]


def test_fault_of_the_device_ends_the_exchange_by_name(folder):
    """An event that cannot be asked is a failure, not the end of the exchange."""
    said = run(
        folder,
        """
communicator = new(1000.0)
fake.fake_kill_peers()
exchange(communicator)
fake.fake_device_fault()
until(lambda: fake.fake_aborts() == 1)
print(error_of(communicator.check))
""",
    )
    assert (
        said[0]
        == "the exchange (ncclSend, ncclRecv) on rank 0 of 2 failed: cuEventQuery failed with CUresult 700"
    )


def test_check_does_not_hold_the_gil_while_it_waits(folder):
    """The watchdog asks the driver under the lock that check() takes; other Python threads go on meanwhile."""
    said = run(
        folder,
        """
import threading
communicator = new(1000.0)
fake.fake_kill_peers()
exchange(communicator)
fake.fake_slow_queries(2000)
time.sleep(0.1)  # the watchdog is in its query now
turns, done = 0, threading.Event()
thread = threading.Thread(target=lambda: (communicator.check(), done.set()))
begin = time.monotonic()
thread.start()
while not done.is_set():
    time.sleep(0.001)
    turns += 1
print(turns > 20 or time.monotonic() - begin < 0.5)
fake.fake_slow_queries(0)
""",
    )
    assert said[0] == "True"


def test_is_open_does_not_hold_the_gil_while_it_waits(folder):
    """An exchange holds the lock that is_open takes; the Python thread that ends it goes on meanwhile."""
    said = run(
        folder,
        """
import sys, threading
communicator = new(3.0)
fake.fake_in_progress(2**31 - 1)
exchanging = threading.Thread(target=lambda: print(error_of(lambda: exchange(communicator))))
asked = threading.Event()
ending = threading.Thread(target=lambda: (asked.wait(), fake.fake_in_progress(0)))
exchanging.start()
ending.start()
until(lambda: fake.fake_groups() == 1)  # the exchange has the lock
sys.setswitchinterval(1000)  # this thread keeps the GIL unless is_open gives it away
asked.set()
print(communicator.is_open)
exchanging.join()
ending.join()
""",
    )
    assert sorted(said) == ["None", "True"]


def test_exchanges_that_end_are_let_be(folder):
    assert run(
        folder,
        """
communicator = new(2.0)
for _ in range(50):
    exchange(communicator)
time.sleep(2.5)  # longer than the timeout: nothing is left to be aborted
print(fake.fake_aborts(), communicator.is_open, error_of(communicator.check))
communicator.destroy()
""",
    ) == ["0 True None"]


def test_takes_no_more_blocks_than_it_is_given(folder):
    assert run(folder, "c = new(10.0)\nprint(fake.fake_max_blocks())") == ["16"]


def test_several_tensors_are_one_group_of_calls(folder):
    said = run(
        folder,
        """
c = new(10.0)
c.all_to_all([0, 64], [3, 0], [0, 128], [1, 2], [8, 4], 0)
print(fake.fake_groups(), fake.fake_messages())
for rows, recv, sizes in (([3], [0, 128], [8, 4]), ([3, 0], [0], [8, 4]), ([3, 0], [0, 128], [8])):
    try:
        c.all_to_all([0, 64], rows, recv, [1, 2], sizes, 0)
    except ValueError as error:
        print(error)
""",
    )
    assert said[0] == "1 2"  # two tensors for one peer
    assert "send_rows and recv_rows must have 2 numbers, but have 1 and 2" in said[1]
    assert "one number for each buffer, but have 2, 1 and 2" in said[2] and "2, 2 and 1" in said[3]


def test_spins_before_it_sleeps(folder):
    """A yield, which may take long on a busy machine, follows the first look; sleeps follow later ones."""
    said = run(
        folder,
        """
c = new(1000.0)
def sleeps(polls):
    fake.fake_in_progress(polls)
    before = fake.fake_sleeps()
    exchange(c)
    return fake.fake_sleeps() - before
print(min(sleeps(1) for _ in range(50)), sleeps(8000))  # a poll takes a system call: more than 0.15 us
""",
    )
    few, many = map(int, said[0].split())
    assert few == 0 and many > 0


def test_deleted_communicator_is_aborted(folder):
    assert run(folder, "c = new(10.0)\ndel c\nprint(fake.fake_aborts())") == ["1"]


def test_end_of_the_interpreter_with_an_exchange_under_way(folder):
    """No abort once CUDA may be gone, no thread left: the process ends."""
    said = run(
        folder,
        """
communicator = new(1000.0)
fake.fake_kill_peers()
exchange(communicator)
class Last:
    def __del__(self):
        print(fake.fake_aborts())
last = Last()
""",
    )
    assert said == ["0"]
