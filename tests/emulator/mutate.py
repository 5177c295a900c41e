"""Seeds the bugs of mutations.txt into the kernels, one at a time: do the plain test programs notice?

    python tests/emulator/mutate.py [part of "file: bug" ...]

Not part of the default tests: one or two seconds of computing a bug. Prints the first words of the program that noticed
each. Fails when fewer than 97 % of them were noticed, or when a program finds fault with kernels without a bug.

Kernels are compiled without optimisation, against headers compiled once, and a program ends at its first failure.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import emu_build

CUDA = emu_build.ROOT / "cuda"
TABLE = emu_build.HERE / "mutations.txt"
SEEDS = "3"
CPU_SECONDS = 60  # the programs need about ten
FLAGS = ["-O0", "-std=c++20", "-fno-strict-aliasing", "-w", "-DFMOE_EMULATOR"]
FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # a CPU allows what a GPU does not
# Compiled once; no kernel changes them.
PREFIX = """#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cfloat>
#include <cmath>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>
"""
MISSED = "not noticed"


@dataclass(frozen=True)
class Bug:
    file: str
    program: str
    # Compiled with the bug; for a header what suffices to notice it: kernels, or the program itself.
    sources: tuple[str, ...]
    name: str
    old: str
    new: str

    @property
    def label(self):
        return f"{self.file}: {self.name}"


def read_bugs():
    bugs = []
    for line in TABLE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            file, program, *sources = line.strip("[]").split()
            continue
        name, *texts = re.fullmatch(r"(.+) @ (.+) @(?: (.*))?", line).groups(default="")
        old, new = (text.replace("\\n", "\n") for text in texts)
        bugs.append(Bug(file, program, tuple(sources or [file]), name, old, new))
    return bugs


def compile_prefix(folder):
    """The header that stands before every source, as g++ options."""
    header = folder / "prefix.h"
    header.write_text(PREFIX)
    cuda = ["-isystem", str(emu_build.cuda_include())]
    compiled = ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(["g++", *FLAGS, *cuda, *compiled], check=True)
    return [*cuda, "-include", str(header)]


def run(bug, prefix):
    """Outcome of the program with the bug in it, in one line; None if it passed."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in CUDA.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
        (folder / bug.file).write_text((CUDA / bug.file).read_text().replace(bug.old, bug.new, 1))
        includes = [*prefix, f"-I{emu_build.HERE}", f"-I{folder}", f"-I{emu_build.ROOT}/csrc"]
        objects = []
        for source in bug.sources:
            objects.append(str(folder / f"{source}.o"))
            path = (folder if (folder / source).exists() else emu_build.HERE) / source
            command = ["g++", *FLAGS, *includes, "-x", "c++", "-c", str(path), "-o", objects[-1]]
            subprocess.run(command, check=True, capture_output=True)
        plain = emu_build.OUT / "plain"
        others = [f"{name}.cpp" for name in [*emu_build.EMULATOR, bug.program]]
        others += [path.name for path in CUDA.glob("*.cu")]
        objects += [str(plain / f"{name}.o") for name in others if name not in bug.sources]
        binary = str(folder / "mutant")
        subprocess.run(["g++", *objects, "-o", binary], check=True)
        result = subprocess.run(
            [binary, SEEDS],
            capture_output=True,
            text=True,
            env={**os.environ, "EMU_FIRST_FAILURE": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS)),
        )
        if result.returncode == 0:
            return None
        words = (result.stdout + result.stderr).strip().splitlines()
        said = words[0] if words else f"exit status {result.returncode}"
        if result.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            said = f"no end within {CPU_SECONDS} s of computing"
        return said.replace(f"{emu_build.ROOT}/", "").replace("|", "/")[:150]


def without_a_bug(bugs):
    """For each program, as a bug that changes nothing, all sources that its bugs compile."""
    sources = {}
    for bug in bugs:
        sources.setdefault(bug.program, {}).update(dict.fromkeys(bug.sources))
    return [Bug("launchers.h", program, tuple(found), "none", "", "") for program, found in sources.items()]


def main(wanted):
    bugs, results = read_bugs(), {}
    chosen = [bug for bug in bugs if not wanted or any(part in bug.label for part in wanted)]
    for bug in chosen:
        if bug.old not in (CUDA / bug.file).read_text():
            sys.exit(f"{bug.label}: the text to change is not there: {bug.old!r}")
    for program in dict.fromkeys(bug.program for bug in chosen):
        emu_build.build("plain", program)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        prefix = compile_prefix(Path(folder))
        for bug in without_a_bug(chosen):
            if said := run(bug, prefix):
                sys.exit(f"{bug.program} fails without a bug: {said}")
        runs = {pool.submit(run, bug, prefix): bug for bug in chosen}
        for finished in as_completed(runs):
            label = runs[finished].label
            results[label] = finished.result() or MISSED
            print(f"{label}  {results[label]}", flush=True)
    caught = sum(results[bug.label] != MISSED for bug in chosen)
    print(f"{caught} of {len(chosen)} noticed")
    return 0 if caught >= 0.97 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
