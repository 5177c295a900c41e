"""Race each kernel against what would compute its product without it, and each of our products against torch's.

For the child of `fmoe gpu prove` (child.py), which sends the events on to its parent.

    for each operation on each problem (a Course):
        with all kernels       -> which kernels compute it
        by torch's product     -> torch_ms
        with all kernels       -> ms
        without one of these   -> without_ms, of the kernel that is next in select.h

A kernel keeps its place by the geometric mean of its races, ms / without_ms: it may lose one shape and win the others.
Kernels are dropped one at a time, the slowest first: another one then computes its product, and that is raced again,
until no kernel is slow. Only then is torch compared, with the kernels that are left.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from fmoe_ext import ops
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import torch_path
from fmoe_ext.gpu.cases import MLP_LEAVES, Case, Inputs, mlp
from fmoe_ext.gpu.proof import PORTABLE, Race, TorchWin, Verdict, rows_class
from fmoe_ext.gpu.target import Target

_MARGIN = 1.03  # a kernel is slow if it takes this many times as long as what there is without it
_TORCH_MARGIN = 1.05  # torch computes a product if ours takes this many times as long as its own
# {what is timed: the products in it that torch's replaces, as kTorchProducts in cuda/select.h has them}. Where there is
# one product, its race decides whether torch wins it: whatever else is timed is ours both times. Where there are
# several, nobody knows which one decided, so that these races are only reported.
PRODUCTS = MappingProxyType(
    {
        "grouped_gemm": ("rows_by_weight",),
        "grouped_gemm, gradient of the rows": ("grad_input",),
        "grouped_gemm, gradient of the weight": ("grad_weight",),
        "grouped_gemm, main gradient of the weight": ("main_grad",),
        "expert_mlp, gradient of the hidden rows": ("grad_hidden",),
        "expert_mlp": ("up",),
        "expert_mlp, all gradients": ("grad_hidden", "grad_weight", "grad_input"),
    }
)
OPERATIONS = tuple(PRODUCTS)


@dataclass(frozen=True)
class Start:
    """Sent before a step: what it is, and which kernels are to blame if it never ends or ends the process."""

    what: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """The verdict on a kernel, which replaces an earlier one."""

    kernel: str
    verdict: Verdict


Event = Start | Judged | Race | TorchWin


def _operations(case: Case, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Return {each of OPERATIONS: a function that computes it once}.

    A backward is timed alone: its forward runs here, once, and its graph is kept. Of one product's inputs only the one
    whose gradient is timed is a leaf, so that no other product runs.
    """
    # all gradients of expert_mlp
    leaves = inputs.leaves(*MLP_LEAVES)
    y = mlp(case, inputs, leaves, ops.expert_mlp)
    # one gradient of grouped_gemm each: of the rows, of the weight, of the weight into a main gradient
    rows, weight = inputs.leaves("rows", "w1").values()
    summed = torch.nn.Parameter(inputs.w1)
    summed.main_grad = torch.zeros_like(summed, dtype=torch.float32)  # type: ignore[attr-defined]
    of_rows = ops.grouped_gemm(rows, inputs.w1, inputs.offs)
    of_weight = ops.grouped_gemm(inputs.rows, weight, inputs.offs)
    into_main = ops.grouped_gemm(inputs.rows, summed, inputs.offs, main_grad=ops.MainGrad(summed))
    # the gradient of topk_weights needs grad_hidden, and no other product
    factors = inputs.leaves("topk_weights")
    constants = {name: t.detach() for name, t in leaves.items()}
    of_hidden = mlp(case, inputs, constants | factors, ops.expert_mlp)

    # each graph is kept, to be differentiated many times
    def gradient(of: torch.Tensor, grad: torch.Tensor, *wanted: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(of, wanted, grad, retain_graph=True)

    @torch.no_grad()
    def forward() -> object:
        return mlp(case, inputs, leaves, ops.expert_mlp)

    @torch.no_grad()
    def multiply() -> object:
        return ops.grouped_gemm(inputs.rows, inputs.w1, inputs.offs)

    calls = (  # in the order of OPERATIONS
        multiply,
        gradient(of_rows, inputs.grad_rows, rows),
        gradient(of_weight, inputs.grad_rows, weight),
        lambda: torch.autograd.backward(into_main, inputs.grad_rows, retain_graph=True),
        gradient(of_hidden, inputs.grad, *factors.values()),
        forward,
        gradient(y, inputs.grad, *leaves.values()),
    )
    return dict(zip(OPERATIONS, calls, strict=True))


@dataclass(frozen=True)
class Course:
    """An operation on a problem, to race over."""

    case: Case
    operation: str
    dtype: torch.dtype

    @property
    def rows(self) -> str:
        return rows_class(self.case.T * self.case.K, self.case.E)

    @property
    def numbers(self) -> str:
        return "tf32" if self.dtype == torch.float32 else "16 bits"

    @property
    def classes(self) -> list[str]:
        """The classes of its products in cuda/select.h (TorchWin.where)."""
        return [f"{product}/{self.numbers}/{self.rows}" for product in PRODUCTS[self.operation]]

    @property
    def where(self) -> str | None:
        return self.classes[0] if len(self.classes) == 1 else None

    def is_of(self, product: str) -> bool:
        """Return whether this course times this product alone; grad_weight's kernels compute main_grad too."""
        found = [name.split("/")[0].replace("main_grad", "grad_weight") for name in self.classes]
        return found == [product]

    @property
    def shape(self) -> str:
        return f"{self.case}, float32, TF32 allowed" if self.dtype == torch.float32 else str(self.case)


class Races:
    """The races of the kernels that are proved, on one target."""

    def __init__(self, target: Target, kernels: list[str]) -> None:
        self.target = target
        self.kernels = kernels  # that are left
        self.races: dict[tuple[str, Course], Race] = {}  # by the kernel that computed it
        self.times: dict[Course, tuple[float, float]] = {}  # (with the kernels that are left, by torch) in ms

    def run(self) -> Iterator[Event]:
        """Race until no kernel is slow, then each product against torch's, in bfloat16 (dtypes[0]) and in TF32."""
        # the library unregisters torch's product when it is collected, so it must outlive the races
        held = torch_path.install_products(self.target.device.type.upper())
        courses = [
            Course(case, name, self.target.dtypes[0]) for case in self.target.races for name in OPERATIONS
        ]
        # Drop the slowest kernel and race what it had computed again, until no kernel is slow.
        while courses:
            yield from self._run_all(courses)
            courses = []
            if (slowest := self._slowest()) is not None:
                kernel, verdict = slowest
                yield Judged(kernel, verdict)
                self.kernels = [other for other in self.kernels if other != kernel]
                courses = [course for name, course in self.races if name == kernel]
                self.races = {k: race for k, race in self.races.items() if k[1] not in courses}
        yield from self._compare_with_torch()
        with torch_path.tf32(True):  # our float32 stays whole, torch's is rounded
            yield from self._run_all(
                [
                    Course(case, operation, torch.float32)
                    for case in self.target.races
                    for operation, products in PRODUCTS.items()
                    if len(products) == 1
                ]
            )
        yield from self._compare_with_torch()
        del held

    def _compare_with_torch(self) -> Iterator[Event]:
        """Find the products that torch wins; a kernel that loses all races of its product is beaten.

        Torch wins a class of problems (product, numbers, rows), which select.h can tell apart, not a single shape.
        """
        won: dict[Course, TorchWin] = {}
        for course, (ms, torch_ms) in self.times.items():
            products = PRODUCTS[course.operation]
            if len(products) == 1 and ms > _TORCH_MARGIN * torch_ms:
                won[course] = TorchWin(products[0], course.numbers, course.rows, ms, torch_ms)
        # where two cases of a class disagree, torch has to win in the sum
        for where in dict.fromkeys(win.where for win in won.values()):
            of_class = [course for course in self.times if course.where == where]
            ms, torch_ms = (sum(times) for times in zip(*map(self.times.__getitem__, of_class), strict=True))
            if ms > _TORCH_MARGIN * torch_ms:
                first = next(win for win in won.values() if win.where == where)
                yield replace(first, ms=ms, torch_ms=torch_ms)
            else:
                won = {course: win for course, win in won.items() if win.where != where}
        # "up.128x256" is a kernel of the product "up"
        for kernel in self.kernels:
            product = kernel.split(".")[0]
            mine = [course for name, course in self.races if name == kernel and course.is_of(product)]
            if mine and all(course in won for course in mine):
                worst = max((won[course] for course in mine), key=lambda win: win.ms / win.torch_ms)
                reason = f"torch is faster in all of its races: {worst.product} ({worst.numbers}, {worst.rows}) takes "
                verdict = Verdict("beaten", f"{reason}{worst.ms:.3f} ms, {worst.torch_ms:.3f} ms by torch")
                yield Judged(kernel, verdict)
        self.times.clear()

    def _run_all(self, courses: list[Course]) -> Iterator[Event]:
        """Race over courses of one dtype; inputs are made once a case, since the largest take seconds."""
        for case in dict.fromkeys(course.case for course in courses):
            mine = [course for course in courses if course.case == case]
            try:
                # forwards by the portable kernels: a kernel of ours has its first run at this shape in _race
                yield Start(f"inputs of {mine[0].shape}", ())
                gpu_kernels.switch_on(())
                functions = _operations(case, Inputs.of(case, mine[0].dtype, self.target.device))
                self.target.synchronize()
                for course in mine:
                    yield from self._race(course, functions[course.operation])
            except torch.OutOfMemoryError:  # a small GPU is proved by the races that fit
                yield Start(f"out of memory: no more races of {mine[0].shape}", ())

    def _slowest(self) -> tuple[str, Verdict] | None:
        """Find the kernel with the largest geometric mean of ms / without_ms; None if that is within _MARGIN."""
        logs: dict[str, dict[Course, float]] = {}
        for (kernel, course), race in self.races.items():
            assert race.without_ms is not None
            logs.setdefault(kernel, {})[course] = math.log(race.ms / race.without_ms)
        means = {kernel: sum(mine.values()) / len(mine) for kernel, mine in logs.items()}
        slowest = max(means, key=means.__getitem__, default=None)
        if slowest is None or means[slowest] <= math.log(_MARGIN):
            return None
        mine = logs[slowest]
        race = self.races[slowest, max(mine, key=mine.__getitem__)]
        return slowest, Verdict(
            "slow",
            f"{math.exp(means[slowest]):.2f} times as long as without it in the mean of {len(mine)} races; "
            f"{race.operation} ({race.shape}) takes {race.ms:.3f} ms, {race.without_ms:.3f} ms without it",
        )

    def _race(self, course: Course, function: Callable[[], object]) -> Iterator[Event]:
        """Time one operation by torch, by our kernels, and without each kernel that took part."""
        name, shape = course.operation, course.shape
        # 1. Which kernels compute it: their counts rise at the launch, and a fault shows when it is waited for.
        gpu_kernels.switch_on(self.kernels)
        before = gpu_kernels.runs()
        function()
        computed_by = [kernel for kernel, count in gpu_kernels.runs().items() if count > before[kernel]]
        yield Start(f"{name} ({shape})", tuple(computed_by))
        self.target.synchronize()
        # 2. By torch, and by kernels of ours what is not of its classes: they have run at this shape by now.
        yield Start(f"{name} by torch ({shape})", ())
        gpu_kernels.let_torch_compute(course.classes)
        try:
            torch_ms = self.target.milliseconds(function)
        finally:
            gpu_kernels.let_torch_compute(())
        # 3. With all kernels, and without each of these.
        yield Start(f"{name} ({shape})", tuple(computed_by))
        choices = [self.kernels, *([k for k in self.kernels if k != kernel] for kernel in computed_by)]
        rounds = []
        for _ in range(self.target.rounds):  # the choices take turns, so that drift meets all alike
            times = []
            for kernels in choices:
                gpu_kernels.switch_on(kernels)
                times.append(self.target.milliseconds(function))
            rounds.append(times)
        ms, *without = (statistics.median(times) for times in zip(*rounds, strict=True))
        self.times[course] = (ms, torch_ms)
        for kernel, without_ms in zip(computed_by, without, strict=True):
            race = self.races[kernel, course] = Race(name, shape, kernel, ms, without_ms, torch_ms)
            yield race
        if not computed_by:
            yield Race(name, shape, PORTABLE, ms, None, torch_ms)
