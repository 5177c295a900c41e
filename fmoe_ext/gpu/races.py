"""Whether a kernel is worth having: each against what would compute its product without it, and beside torch's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fmoe_ext import ops
from fmoe_ext.gpu.cases import MLP_LEAVES, Case, Inputs, mlp
from fmoe_ext.gpu.target import Target
from fmoe_ext.gpu.tf32 import tf32
from fmoe_ext.ops import gpu_kernels, torch_path
from fmoe_ext.ops.gpu_proof import PORTABLE, Race, Verdict

MARGIN = 1.03  # a kernel is slow if it takes this much longer than what there is without it


@dataclass(frozen=True)
class Start:
    """Before a measurement: what is measured, and which kernels are to blame if it never ends."""

    what: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Lost:
    kernel: str
    verdict: Verdict


Event = Start | Lost | Race


def operations(case: Case, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """What is timed; all but the last two are one product each."""
    leaves = inputs.leaves(*MLP_LEAVES)
    held = inputs.leaves("rows", "w1")
    y = mlp(case, inputs, leaves, ops.expert_mlp)
    product = ops.grouped_gemm(held["rows"], held["w1"], inputs.offs)

    def gradient(of: torch.Tensor, grad: torch.Tensor, *wanted: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(of, wanted, grad, retain_graph=True)

    @torch.no_grad()
    def forward() -> object:
        return mlp(case, inputs, leaves, ops.expert_mlp)

    @torch.no_grad()
    def multiply() -> object:
        return ops.grouped_gemm(inputs.rows, inputs.w1, inputs.offs)

    return {
        "grouped_gemm": multiply,
        "grouped_gemm, gradient of the rows": gradient(product, inputs.grad_rows, held["rows"]),
        "grouped_gemm, gradient of the weight": gradient(product, inputs.grad_rows, held["w1"]),
        "expert_mlp, gradient of the hidden rows": gradient(y, inputs.grad, leaves["topk_weights"]),
        "expert_mlp": forward,
        "expert_mlp, all gradients": gradient(y, inputs.grad, *leaves.values()),
    }


class Races:
    """The races of the kernels that are proved; those that lose are left out from then on."""

    def __init__(self, target: Target, kernels: list[str]) -> None:
        self.target = target
        self.kernels = kernels

    def run(self) -> Iterator[Event]:
        yield from self._races(self.target.dtypes[0])
        if any(map(gpu_kernels.is_tf32, self.kernels)):
            with tf32(True):
                yield from self._races(torch.float32)

    def _races(self, dtype: torch.dtype) -> Iterator[Event]:
        for case in self.target.races:
            shape = f"{case}, float32 as TF32" if dtype == torch.float32 else str(case)
            try:
                inputs = Inputs.of(case, dtype, self.target.device)
                for name, function in operations(case, inputs).items():
                    yield from self._race(name, shape, function)
            except torch.OutOfMemoryError:
                yield Start(f"out of memory: no more races of {shape}", ())

    def _race(self, name: str, shape: str, function: Callable[[], object]) -> Iterator[Event]:
        yield Start(f"{name} by torch ({shape})", ())
        torch_ms = self._torch_milliseconds(function)
        while True:
            computed_by = self._computed_by(function)
            yield Start(f"{name} ({shape})", tuple(computed_by))
            ms = self._milliseconds(function, self.kernels)
            lost = None
            for kernel in computed_by:
                without_ms = self._milliseconds(
                    function, [other for other in self.kernels if other != kernel]
                )
                yield Race(name, shape, kernel, ms, without_ms, torch_ms)
                if ms > MARGIN * without_ms:
                    lost = kernel
                    text = f"{name} ({shape}) takes {ms:.3f} ms, {without_ms:.3f} ms without it"
                    yield Lost(kernel, Verdict("slow", text))
                    break
            if not computed_by:
                yield Race(name, shape, PORTABLE, ms, None, torch_ms)
            if lost is None:
                return
            self.kernels = [kernel for kernel in self.kernels if kernel != lost]

    def _milliseconds(self, function: Callable[[], object], kernels: list[str]) -> float:
        gpu_kernels.switch_on(kernels)
        return self.target.milliseconds(function)

    def _torch_milliseconds(self, function: Callable[[], object]) -> float:
        library = torch_path.install(self.target.device.type.upper())
        try:
            return self.target.milliseconds(function)
        finally:
            del library

    def _computed_by(self, function: Callable[[], object]) -> list[str]:
        gpu_kernels.switch_on(self.kernels)
        before = gpu_kernels.runs()
        function()
        self.target.synchronize()
        return [name for name, count in gpu_kernels.runs().items() if count > before[name]]
