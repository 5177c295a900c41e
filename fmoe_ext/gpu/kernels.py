"""Choose the kernels of CUDA tensors by FMOE_GPU_KERNELS and the findings of `python -m fmoe_ext.gpu prove`.

A kernel of cuda/select.h is on or off, for the whole process. From import until the first product on a device all are
off, unless FMOE_GPU_KERNELS trusts them unproved. Operators ask through ops/chooser.py, before each product:

    ops.expert_mlp(x) -> chooser.before(x) -> SELECTION.before(x) -> proof.load() -> choose() -> switch_on()
                                                                     at the first product on the device of x

Several devices have one set of switches: on is what the proofs of all of them allow. A GPU that has only the proof of
another model of its capability takes it, and is raced in a process of its own, for later processes (race()).
"""

import inspect
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fmoe_ext import _env
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu import torch_path
from fmoe_ext.gpu.proof import PORTABLE, Key, Proof, cache_folder
from fmoe_ext.ops import chooser

_LOG = logging.getLogger(__name__)
_NEED_PROOF = ("auto", "proved")  # values of FMOE_GPU_KERNELS
_RACE_MEMORY = 12 << 30  # bytes of the GPU that must be free: the largest race takes half
_PATIENCE = 600.0  # seconds after which another process may try again, for races that were ended half-way


def names() -> tuple[str, ...]:
    """List the kernels of cuda/select.h by name, in its order, without the portable ones, which are always on."""
    return tuple(torch.ops.fmoe_ext._gpu_kernels())


def switch_on(kernels: Iterable[str]) -> None:
    """Turn these kernels on, all others off; raise RuntimeError for a name that does not exist."""
    torch.ops.fmoe_ext._set_gpu_kernels(list(kernels))


def runs() -> dict[str, int]:
    """Count how often this process has chosen each kernel."""
    return dict(zip(names(), torch.ops.fmoe_ext._gpu_kernel_runs(), strict=True))


def sources() -> dict[str, str]:
    """Return {kernel: digest of the sources it was built from} (cuda/sources_digest.py), PORTABLE among them."""
    return dict(zip((PORTABLE, *names()), torch.ops.fmoe_ext._gpu_kernel_sources(), strict=True))


def let_torch_compute(classes: Iterable[str]) -> None:
    """Let torch's grouped_mm compute these classes of products (TorchWin.where), and no others."""
    torch.ops.fmoe_ext._set_gpu_torch_wins(list(classes))


class _SmMargin:
    """SMs that persistent kernels leave free in this process: the largest of the requests that are in force.

    A thread block of a persistent kernel takes an SM for itself, so that a kernel of NCCL finds no room beside it. And
    if a block has to wait for an SM, its whole share of the work begins late.
    """

    def __init__(self) -> None:
        # guards _asked; reentrant, for garbage collection may run _give_back() on a thread that holds it
        self._lock = threading.RLock()
        self._asked: dict[int, tuple[int, Callable[[], bool]]] = {}  # {number of the request: (SMs, is_done)}
        self._numbers = itertools.count()

    def ask(self, owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
        """Keep SMs free from now on, until owner is collected, is_done() is True, or the result is called.

        Kernels that run already are not changed. is_done is asked before each product.
        """
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = sms, is_done
            self._apply()
        give_back = weakref.finalize(owner, self._give_back, number)
        give_back.atexit = False  # at exit CUDA may be gone
        return give_back

    def give_back_done(self) -> None:
        """Give back the SMs of requests that are done."""
        if self._asked:  # without the lock: a product asks, and mostly there is nothing
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
    """The kernels that one device uses."""

    kernels: frozenset[str]
    torch: bool = False  # torch_path replaces grouped_gemm, expert_mlp and their backwards
    torch_wins: frozenset[str] = frozenset()  # classes of products in which torch's replaces ours
    warning: str | None = None


def command(device: int) -> str:
    """Return the command that proves a device."""
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
    # portable kernels compute what no other one does: without them nothing of ours can be used
    portable = proof.verdicts.get(PORTABLE)
    if portable is not None and portable.state == "failed":
        text = f"the portable kernels of fmoe_ext failed on CUDA device {device} ({portable.reason})"
        if mode == "proved":
            raise RuntimeError(f"{text}; FMOE_GPU_KERNELS=torch takes torch's grouped_mm")
        return Choice(frozenset(), torch=True, warning=f"{text}: torch's grouped_mm is used")
    used = {name for state in gpu_proof.USED for name in proof.in_state(state)}
    wins = frozenset(win.where for win in proof.torch_wins)
    return Choice(frozenset(all_kernels) & used, torch_wins=wins)


def race(device: int, key: Key) -> None:
    """Start `fmoe gpu prove --missing`; later processes use what it finds.

    It runs once for a model of GPU and cache folder; if it saves nothing, again at the earliest after _PATIENCE. This
    process goes on with the kernels that are right on the other model, and shares the GPU for about a minute.
    """
    if torch.cuda.mem_get_info(device)[0] < _RACE_MEMORY or not _is_first(key):
        return
    command = [sys.executable, "-m", "fmoe_ext.gpu", "prove", "--missing", "--device", str(device)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as error:  # no memory, no room for a process: no reason to end a forward
        _LOG.warning("the races of %s could not be started: %s", key.gpu, error)
        return
    _LOG.warning(
        "%s has no races of its own yet: `python %s` runs in the background for about a minute and decides for "
        "later processes",
        key.gpu,
        " ".join(command[1:]),
    )
    # without a wait() the ended process stays a zombie
    threading.Thread(target=process.wait, daemon=True).start()


def _is_first(key: Key) -> bool:
    """Return False if a process started the races less than _PATIENCE ago, or the folder cannot be written."""
    try:
        mark = cache_folder() / f"{key.name()}.racing"
        mark.parent.mkdir(parents=True, exist_ok=True)
        if mark.exists() and time.time() - mark.stat().st_mtime > _PATIENCE:
            mark.unlink(missing_ok=True)
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # O_EXCL: one of many processes wins
    except OSError:
        return False
    return True


class Selection:
    """Makes the choice for each device at its first use, and turns on what the choices of all devices share."""

    def __init__(
        self,
        device_type: str,
        key_of: Callable[[int], Key],
        race: Callable[[int, Key], None] = race,
    ) -> None:
        self.device_type = device_type
        self.key_of = key_of
        self.race = race  # starts the races of a device that takes another model's proof
        self.is_prepared = False  # True once the CUDA module is loaded, until stop()
        self._lock = threading.Lock()  # held while a choice is made
        self._choices: dict[int, Choice] = {}  # by device, once the choice is in force
        # registrations, which end when these are collected
        self._torch: torch.library.Library | None = None
        self._products: torch.library.Library | None = None

    def prepare(self) -> None:
        """Turn unproved kernels off as soon as the CUDA module is loaded, before any operator is called."""
        self.is_prepared = True
        if _env.get("FMOE_GPU_KERNELS") in _NEED_PROOF:
            # no look for a proof yet: key_of() would start CUDA, which an import must not
            switch_on(())
        else:
            self._use(0)

    def stop(self) -> None:
        """Choose nothing from now on, and let no operator be torch's: `prove` switches the kernels itself."""
        self.is_prepared = False
        self._torch = self._products = None

    def before(self, t: torch.Tensor) -> None:
        """Make the choice for the device of t; called before a product of t, and while one is compiled."""
        if not self.is_prepared or t.device.type != self.device_type:
            return
        # a fake tensor on "cuda" is exported without CUDA being used
        if self.device_type != "cuda" or torch.cuda.is_initialized():
            self._use(max(t.get_device(), 0))

    def _use(self, device: int) -> None:
        if device in self._choices:
            return
        with self._lock:
            # another thread has made it meanwhile, as where DataParallel runs a thread for each device
            if device in self._choices:
                return
            mode = _env.get("FMOE_GPU_KERNELS")
            key = self.key_of(device) if mode in _NEED_PROOF else None
            proof = gpu_proof.load(key, sources()) if key else None
            choice = choose(mode, names(), proof, device)
            choices = [*self._choices.values(), choice]
            switch_on(name for name in names() if all(name in other.kernels for other in choices))
            if choice.torch and self._torch is None:
                self._torch = torch_path.install(self.device_type.upper())
            wins = frozenset.intersection(*(other.torch_wins for other in choices))
            if wins and self._products is None:
                self._products = torch_path.install_products(self.device_type.upper())
            let_torch_compute(wins)
            # last: from here on products of this device are computed without the lock
            self._choices[device] = choice
        if choice.warning:
            # at the user's line, which is behind operators, layers and torch's modules
            frame, level = inspect.currentframe(), 1
            while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("fmoe_ext", "torch"):
                frame, level = frame.f_back, level + 1
            warnings.warn(choice.warning, stacklevel=level)
        if key and proof and proof.is_of_another:
            self.race(device, key)


def key_of(device: int) -> Key:
    """Return the key of a proof for a CUDA device; asks the driver, allocates nothing."""
    found = torch.cuda.get_device_properties(device)
    return Key(found.name, 10 * found.major + found.minor)


SELECTION = Selection("cuda", key_of)


class _Chooser(chooser.Chooser):
    """Chooses the kernels for a tensor's device, if that has not been done, and the SMs that a product may take."""

    def before(self, t: object) -> None:
        if (
            SELECTION.is_prepared
            and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
            and isinstance(t, torch.Tensor)
        ):
            SELECTION.before(t)  # in a compiled graph, the fake kernel has done it (while_compiling)
            SM_MARGIN.give_back_done()

    def while_compiling(self, t: object) -> None:
        if isinstance(t, torch.Tensor):
            SELECTION.before(t)

    def reserve(self, owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
        return SM_MARGIN.ask(owner, sms, is_done)


chooser.register(_Chooser())
