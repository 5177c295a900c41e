"""Problems that kernels are proved (CASES) and timed (RACES) with, their inputs, and every result that is compared.

results() takes the functions as arguments: ours, with kernels or the portable ones by kernels.switch_on(), or the
references in plain PyTorch's dtype or float64. child.py proves with CASES, races.py times with RACES.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fmoe_ext import ops
from fmoe_ext.frozen import Quantized, frozen_mlp
from fmoe_ext.ops.activations import GATED_ACTIVATIONS

Results: TypeAlias = "dict[str, Tensor]"
_MX_BLOCK = 32  # columns of MXFP4 that share a scale
WEIGHTS = ("w1", "w2")


@dataclass(frozen=True)
class Case:
    """A problem: sizes and options of expert_mlp."""

    T: int  # tokens
    K: int  # choices of a token
    E: int  # experts
    D: int  # width of a token
    H: int  # width of the hidden rows
    activation: str = "swiglu"
    bias: bool = True
    combine: bool = True  # weight and sum the choices of a token
    spread: str = "ragged"  # how the choices fall: even, ragged, one (expert) or none

    def __str__(self) -> str:
        return f"T {self.T}, K {self.K}, E {self.E}, D {self.D}, H {self.H}, {self.activation}, {self.spread}"


CASES = (
    Case(777, 2, 8, 256, 384),  # ragged rows, an expert without any, dropped choices
    Case(4200, 1, 4, 256, 1024, "gelu", combine=False),  # more tiles than multiprocessors
    Case(300, 2, 3, 2048, 64, "silu", bias=False),  # many steps of k
    Case(130, 1, 5, 8, 8, "geglu_tanh"),  # less than a tile wide
    Case(520, 2, 6, 136, 264, "relu", spread="one"),
    Case(260, 2, 4, 136, 136, "relu2"),
    Case(260, 2, 4, 136, 136, "clamped_swiglu"),
    Case(33, 4, 64, 64, 128, bias=False, spread="even"),  # two rows an expert
    Case(9, 2, 4, 64, 64, spread="none"),
    Case(0, 2, 4, 64, 64),
)
RACES = (  # with the regimes of docs/kernels.md: thousands of rows an expert, hundreds, a few
    Case(16384, 2, 8, 2048, 1408, bias=False, spread="even"),
    Case(4096, 8, 64, 2048, 768, bias=False, spread="even"),
    Case(256, 4, 64, 2048, 768, bias=False, spread="even"),
    # no gate, long k of the second product
    Case(16384, 2, 64, 1024, 4096, "gelu", bias=False, spread="even"),
)


@dataclass(frozen=True)
class Inputs:
    """Arguments of expert_mlp, and of grouped_gemm with the rows and w1; the gradients of their results.

    The MXFP4 weights are other values than w1 and w2; they are None if a row is no whole number of blocks.
    """

    x: Tensor  # [T, D]
    w1: Tensor  # [E, F, D], F = 2 H if gated, else H
    b1: Tensor | None  # [E, F]
    w2: Tensor  # [E, D, H]
    b2: Tensor | None  # [E, D]
    topk_weights: Tensor  # [T, K]
    rows: Tensor  # [T * K, D]
    grad: Tensor  # [T, D] or [T * K, D], of expert_mlp's result
    grad_rows: Tensor  # [T * K, F], of grouped_gemm's
    row_idx: Tensor  # [T * K]
    inverse: Tensor  # [T, K]
    offs: Tensor  # [E]
    w1_data: Tensor | None = None  # MXFP4, for frozen_mlp: bytes [E, F, D / 2]
    w1_scale: Tensor | None = None  # [E, F, D / 32]
    w2_data: Tensor | None = None
    w2_scale: Tensor | None = None

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> "Inputs":
        """Draw the inputs of a case."""
        # on the device: a CPU takes seconds for the largest weights
        generator = torch.Generator(device).manual_seed(seed)
        T, K, E, D, H = case.T, case.K, case.E, case.D, case.H
        F = 2 * H if case.activation in GATED_ACTIVATIONS else H
        # 1. The choices, and where they lie in the rows.
        if case.spread == "even":
            topk_idx = torch.arange(T * K, device="cpu").view(T, K) % E  # -1 is a dropped choice
        elif case.spread in ("one", "none"):
            topk_idx = torch.full((T, K), E - 1 if case.spread == "one" else -1, device="cpu")
        else:  # ragged: squares fall on low experts more often, and 0 becomes -1, a dropped choice
            on_cpu = torch.Generator("cpu").manual_seed(seed)
            topk_idx = (torch.rand(T, K, generator=on_cpu, device="cpu").square() * (E + 1)).long() - 1
            topk_idx[topk_idx == 1] = -1  # expert 1 has no rows
        index = ops.sort_tokens_ref(topk_idx, E)

        # 2. Values, scaled so that every result is of about the size of x.
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

        def packed(name: str, out: int, width: int) -> dict[str, Tensor]:
            """Draw MXFP4 weights [E, out, width] whose mean square is about 1 / width, as that of w1 and w2.

            The mean square of MXFP4's 16 values is 8.6, and a scale byte b stands for 2^(b - 127).
            """
            exponent = 127 - round(math.log2(width * 8.6) / 2)
            of = {"dtype": torch.uint8, "generator": generator, "device": device}
            data = torch.randint(0, 256, (E, out, width // 2), **of)  # type: ignore[call-overload]
            scale = torch.randint(exponent - 1, exponent + 2, (E, out, width // 32), **of)  # type: ignore[call-overload]
            return {f"{name}_data": data, f"{name}_scale": scale}

        is_whole = D % _MX_BLOCK == 0 and H % _MX_BLOCK == 0
        return cls(
            x=random(T, D),
            w1=random(E, F, D, scale=D**-0.5),
            b1=random(E, F) if case.bias else None,
            w2=random(E, D, H, scale=H**-0.5),
            b2=random(E, D) if case.bias else None,
            topk_weights=torch.rand(T, K, generator=generator, device=device).to(dtype),
            rows=random(T * K, D),
            grad=random(T if case.combine else T * K, D),
            grad_rows=random(T * K, F),
            row_idx=index.row_idx.to(device),
            inverse=index.inverse.to(device),
            offs=index.offs.to(device),
            **(packed("w1", F, D) | packed("w2", D, H) if is_whole else {}),
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are not None."""
        return [t for t in (getattr(self, f.name) for f in fields(self)) if t is not None]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Cast the floating-point tensors."""
        floats = {
            f.name: t.to(dtype)
            for f in fields(self)
            if (t := getattr(self, f.name)) is not None and t.is_floating_point()
        }
        return replace(self, **floats)

    def copy_(self, other: "Inputs") -> None:
        """Copy the values of other inputs of the case in place, as a CUDA graph reads them."""
        for mine, its in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(its)

    def leaves(self, *names: str) -> dict[str, Tensor]:
        """Return those of these tensors that are not None, as leaves that need a gradient."""
        present = {name: getattr(self, name) for name in names}
        return {name: t.detach().requires_grad_() for name, t in present.items() if t is not None}


MLP_LEAVES = ("x", "w1", "b1", "w2", "b2", "topk_weights")


def mlp(case: Case, inputs: Inputs, leaves: dict[str, Tensor], function: Callable[..., Tensor]) -> Tensor:
    """Call expert_mlp, or a function with its arguments, on leaves."""
    get = leaves.get
    index = (inputs.row_idx, inputs.inverse, inputs.offs)
    weights = (leaves["w1"], get("b1"), leaves["w2"], get("b2"), leaves["topk_weights"])
    return function(leaves["x"], *index, *weights, case.activation, case.combine)


def results(
    case: Case,
    inputs: Inputs,
    expert_mlp: Callable[..., torch.Tensor] = ops.expert_mlp,
    grouped_gemm: Callable[..., torch.Tensor] = ops.grouped_gemm,
    frozen_mlp: Callable[..., torch.Tensor] = frozen_mlp,
) -> Results:
    """Compute every result and gradient of expert_mlp, grouped_gemm and frozen_mlp, by name."""
    # expert_mlp, with the gradients of all its arguments
    leaves = inputs.leaves(*MLP_LEAVES)
    y = mlp(case, inputs, leaves, expert_mlp)
    grads = torch.autograd.grad(y, list(leaves.values()), inputs.grad)
    found = {"expert_mlp": y.detach(), **{f"expert_mlp d{n}": g for n, g in zip(leaves, grads, strict=True)}}
    # grouped_gemm
    leaves = inputs.leaves("rows", "w1", "b1")
    y = grouped_gemm(leaves["rows"], leaves["w1"], inputs.offs, leaves.get("b1"))
    grads = torch.autograd.grad(y, list(leaves.values()), inputs.grad_rows)
    found["grouped_gemm"] = y.detach()
    found |= {f"grouped_gemm d{n}": g for n, g in zip(leaves, grads, strict=True)}
    if inputs.w1_data is not None and inputs.w2_data is not None:
        # frozen_mlp, in MXFP4 as GPT-OSS has it: gate and up rows of a gated activation take turns
        blocks1, blocks2 = (d.unflatten(2, (-1, _MX_BLOCK // 2)) for d in (inputs.w1_data, inputs.w2_data))
        gated = case.activation in GATED_ACTIVATIONS
        w1 = Quantized("mxfp4", blocks1, inputs.w1_scale, interleaved=gated)
        w2 = Quantized("mxfp4", blocks2, inputs.w2_scale)
        leaves = inputs.leaves("x")
        index = (inputs.row_idx, inputs.inverse, inputs.offs)
        arguments = (w1, inputs.b1, w2, inputs.b2, inputs.topk_weights, case.activation, case.combine)
        y = frozen_mlp(leaves["x"], *index, *arguments)
        (grad,) = torch.autograd.grad(y, leaves["x"], inputs.grad)
        found |= {"frozen_mlp": y.detach(), "frozen_mlp dx": grad}
    return found


def main_gradients(case: Case, inputs: Inputs) -> Results:
    """Compute the weight gradients of expert_mlp as added to float32 main gradients of zero, then rounded."""
    parameters = {name: torch.nn.Parameter(getattr(inputs, name)) for name in WEIGHTS}
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    for name, parameter in parameters.items():
        parameter.main_grad = sums[name]  # type: ignore[attr-defined]
    w1, w2 = (ops.MainGrad(parameter) for parameter in parameters.values())
    function = functools.partial(ops.expert_mlp, main_grads=(w1, w2))
    leaves = inputs.leaves("x", "b1", "b2", "topk_weights") | parameters
    torch.autograd.backward(mlp(case, inputs, leaves, function), inputs.grad)
    return {f"main gradient of {name}": t.to(inputs.x.dtype) for name, t in sums.items()}
