"""GPUs for `fmoe_ext.gpu.prove` that need none: one that pretends, with faults on demand, and the emulated one."""

import ctypes
import os
import signal
import time
from types import MappingProxyType

import emu_build
import torch

from fmoe_ext.frozen.frozen_gemm import composed as frozen_gemm
from fmoe_ext.frozen.frozen_mlp import composed as frozen_mlp
from fmoe_ext.frozen.frozen_mlp import composed_backward as frozen_mlp_backward
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu import torch_path
from fmoe_ext.gpu.cases import Case
from fmoe_ext.gpu.target import Target, Unavailable

SMALL = (Case(20, 2, 4, 24, 40), Case(0, 1, 2, 8, 8))
EVEN = (Case(16, 2, 4, 16, 8, bias=False, spread="even"),)
PORTABLE_MS, TORCH_MS = 10.0, 9.6


AS_ON_CUDA = MappingProxyType(
    {
        "frozen_mlp": frozen_mlp,
        "frozen_mlp_backward": frozen_mlp_backward,
        "frozen_gemm": frozen_gemm,
    }
)


class OnCpu(Target):
    """Stand-ins for what needs a GPU."""

    device = torch.device("cpu")
    cases, races = SMALL, EVEN
    dtypes = (torch.bfloat16,)
    rounds = 1
    missing = None

    def synchronize(self):
        pass

    def captured(self, function):
        return function

    def side_by_side(self, functions):
        return [function() for function in functions]

    def disconnect(self):
        self.libraries.clear()  # registrations live as long as these


def define_switches(names, switch, runs, sources=None, let_torch=lambda classes: None):
    """The operators of cuda/ops_select.cpp; sources: a digest for the portable kernels, then one for each name."""
    library = torch.library.Library("fmoe_ext", "FRAGMENT")
    for schema, function in (
        ("_gpu_kernels() -> str[]", names),
        ("_set_gpu_kernels(str[] names) -> ()", switch),
        ("_gpu_kernel_runs() -> int[]", runs),
        ("_gpu_kernel_sources() -> str[]", sources or (lambda: ["0123"] * (1 + len(names())))),
        ("_set_gpu_torch_wins(str[] names) -> ()", let_torch),
    ):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    return library


KERNELS = MappingProxyType(  # of the pretended GPU, with their milliseconds
    {"up.a": 5.0, "rows_by_weight.pairs": 4.0, "rows_by_weight.a": 3.0, "grad_weight.a": 6.0, "odd.a": 1.0}
)


def products_of(name, arguments):
    """The products of a call of an operator, as cuda/select.h names them."""
    if name == "grouped_gemm":
        return ["rows_by_weight"]
    if name == "expert_mlp":
        return ["up", "rows_by_weight"]
    place = next(i for i, a in enumerate(arguments) if isinstance(a, list) and a and isinstance(a[0], bool))
    needs, mains = arguments[place], arguments[place + 1 :]
    weight = "main_grad" if any(main is not None for main in mains) else "grad_weight"
    if name.startswith("grouped_gemm"):
        return ["grad_input"] * needs[0] + [weight] * needs[1]
    of_inputs = [] if name.endswith("weights") else ["grad_hidden"] + ["grad_input"] * needs[0]
    return of_inputs + ([] if name.endswith("inputs") else [weight] * (needs[1] + needs[3]))


class Pretend(OnCpu):
    """Kernels with names of their own, computed by torch; some fast, some slow, some with the fault they are given.

    faults: {kernel: fault}, a fault being one of those of act(), or "races: " and one of those.
    """

    def __init__(self, faults=None, log=None, ms=None, torch_ms=TORCH_MS):
        super().__init__()
        self.faults, self.log, self.ms = faults or {}, log, {**KERNELS, **(ms or {})}
        self.torch_ms = torch_ms
        self.racing, self.cache = False, os.environ.get("XDG_CACHE_HOME")

    def connect(self):
        if self.cache:
            os.environ["XDG_CACHE_HOME"] = self.cache  # the server that forks has an older one
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()}\n")
        if fault := self.faults.get("connect"):
            self.act(fault, ())
        torch.set_num_threads(1)
        self.on, self.counts, self.ran, self.by_torch = (), dict.fromkeys(self.ms, 0), [], set()
        self.libraries = [
            define_switches(
                lambda: list(self.ms),
                lambda names: setattr(self, "on", names),
                lambda: list(self.counts.values()),
                let_torch=lambda classes: setattr(self, "by_torch", {c.split("/")[0] for c in classes}),
            ),
            torch.library.Library("fmoe_ext", "IMPL"),
        ]
        for name in emu_build.OPERATORS[emu_build.OPERATORS.index("grouped_gemm") :]:
            if hasattr(torch_path, name):
                self.libraries[1].impl(name, self.kernel(name), "CPU")
        return gpu_proof.Key("Pretended GPU", 90)

    def kernel(self, name):
        def call(*arguments):
            out = getattr(torch_path, name)(*arguments)
            on = () if arguments[0].dtype == torch.float32 else self.on
            for product in products_of(name, arguments):
                of_kernels = product.replace("main_grad", "grad_weight")
                kernel = next((k for k in on if k.split(".")[0] == of_kernels), None)
                if product in self.by_torch:
                    self.ran.append("torch")
                    continue
                self.ran.append(kernel)
                if kernel:
                    self.counts[kernel] += 1
                fault = self.faults.get(kernel or "portable", "")
                if fault.startswith("races: ") == self.racing:
                    self.act(fault.removeprefix("races: "), out)
            return out

        return call

    def milliseconds(self, function):
        self.racing, self.ran = True, []
        function()
        self.racing = False
        return sum({"torch": self.torch_ms, **self.ms}.get(kernel, PORTABLE_MS) for kernel in self.ran)

    def act(self, fault, out):
        if fault == "hang":
            time.sleep(1000)
        elif fault == "segfault":
            ctypes.string_at(0)
        elif fault == "abort":
            os.abort()
        elif fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exit":
            os._exit(3)
        elif fault == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
        elif fault == "cuda error":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        elif fault == "no gpu":
            raise Unavailable("there is no CUDA device 0: torch sees 0")
        elif fault in ("wrong", "nan"):
            first = (
                out
                if isinstance(out, torch.Tensor)
                else next(t for t in out if t.numel() or not out[-1].numel())
            )
            first[:1] = torch.nan if fault == "nan" else 1.05 * first[:1] + 0.1
        elif fault == "other bits":
            first = out if isinstance(out, torch.Tensor) else out[0]
            if first.numel() and sum(self.counts.values()) % 3 == 0:
                first.view(-1)[:1].nextafter_(torch.tensor(torch.inf, dtype=first.dtype))
        else:
            assert not fault, fault


class Chosen(Pretend):
    """A GPU whose kernels are chosen as where the CUDA module is loaded: by FMOE_GPU_KERNELS and a proof."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def connect(self):
        key = super().connect()
        os.environ["FMOE_GPU_KERNELS"] = self.mode
        gpu_kernels.SELECTION = gpu_kernels.Selection("cpu", lambda device: key)
        gpu_kernels.SELECTION.prepare()
        return key


class Emulated(OnCpu):
    """Kernels of cuda/ themselves, on the emulator, as on a device of compute capability 9.0."""

    cases = (*SMALL, Case(20, 2, 3, 32, 64))
    races = (*EVEN, Case(12, 2, 3, 32, 32, bias=False, spread="even"))

    def __init__(self, kernels):
        super().__init__()
        self.kernels = kernels

    def connect(self):
        torch.set_num_threads(1)
        emulated = emu_build.load_ops()
        emulated.set_device(90, 2)
        library = torch.library.Library("fmoe_ext", "IMPL")
        for name in emu_build.OPERATORS:
            library.impl(name, getattr(emulated, name).default, "CPU")
        for name, function in AS_ON_CUDA.items():
            library.impl(name, function, "CPU")
        every = emulated._gpu_kernels()
        self.libraries = [
            library,
            define_switches(
                lambda: list(self.kernels),
                emulated._set_gpu_kernels,
                lambda: [
                    dict(zip(every, emulated._gpu_kernel_runs(), strict=True))[name] for name in self.kernels
                ],
                let_torch=emulated._set_gpu_torch_wins,
            ),
        ]
        return gpu_proof.Key("Emulated GPU", 90)

    def milliseconds(self, function):
        before = gpu_kernels.runs()
        function()
        chosen = [name for name, count in gpu_kernels.runs().items() if count > before[name]]
        return PORTABLE_MS - len(chosen)
