"""Choose the kernels of CUDA tensors by FMOE_GPU_KERNELS and the findings of `python -m fmoe_ext.gpu prove`.

A kernel of cuda/select.h is on or off, for the whole process. Until the first CUDA call on a device all are off.
"""

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fmoe_ext import _env
from fmoe_ext.gpu import background, torch_path
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu.proof import PORTABLE, Proof
from fmoe_ext.ops import chooser

_NEED_PROOF = ("auto", "proved")  # values of FMOE_GPU_KERNELS


def names() -> tuple[str, ...]:
    """Name the kernels of cuda/select.h, in its order, without the portable ones, which are always there."""
    return tuple(torch.ops.fmoe_ext._gpu_kernels())


def switch_on(kernels: Iterable[str]) -> None:
    """Turn these kernels on, all others off; raise RuntimeError for a name that does not exist."""
    torch.ops.fmoe_ext._set_gpu_kernels(list(kernels))


def runs() -> dict[str, int]:
    """Count how often this process has chosen each kernel."""
    return dict(zip(names(), torch.ops.fmoe_ext._gpu_kernel_runs(), strict=True))


def sources() -> dict[str, str]:
    """Return {kernel, PORTABLE among them: digest of what it was built from} (cuda/sources_digest.py)."""
    return dict(zip((PORTABLE, *names()), torch.ops.fmoe_ext._gpu_kernel_sources(), strict=True))


def let_torch_compute(classes: Iterable[str]) -> None:
    """Let torch's grouped_mm compute these classes of products (TorchWin.where), and no others."""
    torch.ops.fmoe_ext._set_gpu_torch_wins(list(classes))


class _SmMargin:
    """SMs that persistent kernels leave free in this process: the largest number that was reserved.

    A thread block of theirs takes an SM for itself, so that a kernel of NCCL finds no room beside it; and a block of
    theirs that has to wait for an SM begins its whole share late.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is collected gives back, at any moment
        self._asked: dict[int, tuple[int, Callable[[], bool]]] = {}
        self._numbers = itertools.count()

    def ask(self, owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
        """For kernels that are started from now on, as long as owner lives or until what is returned is called.

        is_done: asked before each product; where it says True the SMs are given back earlier.
        """
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = sms, is_done
            self._apply()
        give_back = weakref.finalize(owner, self._give_back, number)
        give_back.atexit = False  # CUDA may be gone by then
        return give_back

    def give_back_done(self) -> None:
        """Give back the SMs of what is done."""
        if self._asked:
            with self._lock:
                for number, (_, is_done) in [*self._asked.items()]:
                    if is_done():
                        self._give_back(number)

    def _give_back(self, number: int) -> None:
        with self._lock:
            if self._asked.pop(number, None) is not None:
                self._apply()

    def _apply(self) -> None:
        if SELECTION.is_prepared:  # there are CUDA kernels
            torch.ops.fmoe_ext._set_gpu_sm_margin(max((sms for sms, _ in self._asked.values()), default=0))


SM_MARGIN = _SmMargin()


@dataclass(frozen=True)
class Choice:
    """Kernels that one device uses."""

    kernels: frozenset[str]
    torch: bool = False  # torch_path replaces all our kernels
    torch_wins: frozenset[str] = frozenset()  # classes of products in which torch's replaces ours
    warning: str | None = None


def command(device: int) -> str:
    return "python -m fmoe_ext.gpu prove" + (f" --device {device}" if device else "")


def choose(mode: str, all_kernels: Iterable[str], proof: Proof | None, device: int = 0) -> Choice:
    """Choose the kernels for a device with this proof, by FMOE_GPU_KERNELS:

    auto      those that are proved, and torch's where it was faster; without a proof none, with a warning; torch's
              everywhere, if the portable ones failed
    proved    the same, but RuntimeError without a proof, or if the portable kernels failed
    all       all kernels, proved or not
    portable  the portable kernels
    torch     torch.nn.functional.grouped_mm
    """
    if mode == "all":
        return Choice(frozenset(all_kernels))
    if mode in ("portable", "torch"):
        return Choice(frozenset(), torch=mode == "torch")
    if proof is None:
        text = (
            f"no kernel of fmoe_ext, as it is built here, has been proved on CUDA device {device} or another of its "
            f"compute capability: run `{command(device)}` once (a few minutes)"
        )
        if mode == "proved":
            raise RuntimeError(f"{text}, or unset FMOE_GPU_KERNELS=proved")
        return Choice(frozenset(), warning=f"{text}; until then the slower portable kernels are used")
    portable = proof.verdicts.get(PORTABLE)
    if portable is not None and portable.state == "failed":
        text = f"the portable kernels of fmoe_ext failed on CUDA device {device} ({portable.reason})"
        if mode == "proved":
            raise RuntimeError(f"{text}; FMOE_GPU_KERNELS=torch takes torch's grouped_mm")
        return Choice(frozenset(), torch=True, warning=f"{text}: torch's grouped_mm is used")
    used = {name for state in gpu_proof.USED for name in proof.named(state)}
    wins = frozenset(win.where for win in proof.torch_wins)
    return Choice(frozenset(all_kernels) & used, torch_wins=wins)


class Selection:
    """Makes the choice for each device at its first use: what several devices use is what all of them have proved."""

    def __init__(
        self,
        device_type: str,
        key_of: Callable[[int], gpu_proof.Key],
        race: Callable[[int, gpu_proof.Key], None] = background.race,
    ) -> None:
        self.device_type = device_type
        self.key_of = key_of
        self.race = race  # starts the races of a device that takes another model's proof
        self.is_prepared = False
        self._choices: dict[int, Choice] = {}
        self._torch: torch.library.Library | None = None
        self._products: torch.library.Library | None = None

    def prepare(self) -> None:
        """Turn unproved kernels off as soon as the CUDA module is loaded, before any operator is called."""
        self.is_prepared = True
        if _env.get("FMOE_GPU_KERNELS") in _NEED_PROOF:
            switch_on(())
        else:
            self._use(0)

    def before(self, t: torch.Tensor) -> None:
        """To be called before a product of t, and while one is compiled."""
        if not self.is_prepared or t.device.type != self.device_type:
            return
        # it is not, where a fake tensor is exported
        if self.device_type != "cuda" or torch.cuda.is_initialized():
            self._use(max(t.get_device(), 0))

    def _use(self, device: int) -> None:
        if device in self._choices:
            return
        mode = _env.get("FMOE_GPU_KERNELS")
        key = self.key_of(device) if mode in _NEED_PROOF else None
        proof = gpu_proof.load(key, sources()) if key else None
        choice = self._choices[device] = choose(mode, names(), proof, device)
        choices = self._choices.values()
        switch_on(name for name in names() if all(name in other.kernels for other in choices))
        if choice.torch and self._torch is None:
            self._torch = torch_path.install(self.device_type.upper())
        wins = frozenset.intersection(*(other.torch_wins for other in choices))
        if wins and self._products is None:
            self._products = torch_path.install_products(self.device_type.upper())
        let_torch_compute(wins)
        if choice.warning:
            warnings.warn(choice.warning, stacklevel=5)
        if key and proof and proof.is_of_another:
            self.race(device, key)


def key_of(device: int) -> gpu_proof.Key:
    """Return the key of a proof for a CUDA device; asks the driver, allocates nothing."""
    found = torch.cuda.get_device_properties(device)
    return gpu_proof.Key(found.name, 10 * found.major + found.minor)


SELECTION = Selection("cuda", key_of)


class _Chooser(chooser.Chooser):
    """Chooses the kernels for a tensor's device, if that has not been done, and the SMs that a product may take."""

    def before(self, t: object) -> None:
        if SELECTION.is_prepared and not torch.compiler.is_compiling() and isinstance(t, torch.Tensor):
            SELECTION.before(t)  # while compiling, the fake kernels do
            SM_MARGIN.give_back_done()

    def while_compiling(self, t: object) -> None:
        if isinstance(t, torch.Tensor):
            SELECTION.before(t)

    def reserve(self, owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
        return SM_MARGIN.ask(owner, sms, is_done)


chooser.register(_Chooser())
