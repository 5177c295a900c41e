"""Save and load what `fmoe gpu prove` found: a small JSON file in the user's cache folder, or one in the package.

    {"format": 4, "key": {"gpu": "NVIDIA H200", "capability": 90}, "taken_with": "driver ..., torch ...", "date": ...,
     "verdicts": {"portable": {"state": "proved", "reason": "", "sources": "<digest>"}, "up.128x256": ...},
     "races": [...], "torch_wins": [...]}

There is one file for each model of GPU. A verdict holds for the sources that the kernel was built from (sources): an
edit voids the verdicts of the kernels that it reaches. A race times an operation with a kernel, without it, and by
torch's grouped_mm. Whether a kernel is right is the same for all GPUs of a compute capability; how fast it is, is known
for one model only. A GPU without a file of its own uses one of its capability until its own races are done (race() of
kernels.py). Driver and torch are recorded for readers and never compared.
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from fmoe_ext import _env

_FORMAT = 4  # of the file; others are not read
SHIPPED = Path(__file__).parent / "proofs"  # made by us; a file in the cache folder has precedence
PORTABLE = "portable"  # the name of the portable kernels among those of a proof
# proved: right, and fastest; beaten: right, but torch is faster; failed: wrong, or it crashed; slow: right, but its
# products are computed faster without it; untested
_STATES = ("proved", "beaten", "failed", "slow", "untested")
USED = ("proved", "beaten")  # a beaten kernel computes what torch's product cannot
# (class of the rows an expert has on average, where it begins), as kRowsClasses in cuda/select.h
ROWS = (
    ("thousands", 1024),
    ("hundreds", 64),
    ("few", 0),
)


@dataclass(frozen=True)
class Key:
    """A model of GPU."""

    gpu: str
    capability: int  # 90 is 9.0

    def name(self) -> str:
        """Return the name of its proof's file."""
        return re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-") + ".json"

    def path(self) -> Path:
        """Return the file in the cache folder, which need not exist."""
        return cache_folder() / self.name()


@dataclass(frozen=True)
class Verdict:
    """The result of a kernel's checks and races."""

    state: str  # one of _STATES
    reason: str = ""
    sources: str = ""  # digest of the kernel's sources (cuda/sources_digest.py)


@dataclass(frozen=True)
class Race:
    """The times of an operation: with the kernel that computes it, without that kernel, and by torch's grouped_mm."""

    operation: str  # a key of races.PRODUCTS
    shape: str
    kernel: str  # that computes it, or PORTABLE
    ms: float  # median on the device
    without_ms: float | None  # None for the portable kernels, which nothing replaces
    torch_ms: float | None


@dataclass(frozen=True)
class TorchWin:
    """A class of problems in which torch's grouped_mm computes a product faster than our kernels, with both times."""

    product: str  # of kTorchProducts in cuda/select.h
    numbers: str  # its precision: "16 bits" (raced in bfloat16) or "tf32"
    rows: str  # of ROWS
    ms: float
    torch_ms: float

    @property
    def where(self) -> str:
        """The name of the class in cuda/select.h."""
        return f"{self.product}/{self.numbers}/{self.rows}"


def rows_class(num_rows: int, num_experts: int) -> str:
    """Return the class of ROWS; the average is all that the host knows without reading from the device."""
    return next(name for name, first in ROWS if num_rows >= first * num_experts)


@dataclass(frozen=True)
class Proof:
    """All that was found on a model of GPU."""

    key: Key
    taken_with: str  # driver and torch
    date: str  # ISO 8601, UTC
    verdicts: Mapping[str, Verdict]  # by kernel, the portable ones among them
    races: tuple[Race, ...] = field(default=())
    torch_wins: tuple[TorchWin, ...] = field(default=())
    # a proof of another model of the capability, used for this one; not in the file
    is_of_another: bool = False

    def about(self, sources: Mapping[str, str]) -> "Proof":
        """Keep what holds for kernels with these digests; others become untested and lose races and torch's wins."""
        is_same = {name: self.verdicts[name].sources == sources.get(name) for name in self.verdicts}
        changed = Verdict("untested", "it changed since it was proved")
        products = {name.split(".")[0] for name, same in is_same.items() if not same}
        return replace(
            self,
            verdicts={name: v if is_same[name] else changed for name, v in self.verdicts.items()},
            races=tuple(race for race in self.races if is_same.get(race.kernel)),
            torch_wins=tuple(
                win
                for win in self.torch_wins
                if not {win.product.replace("main_grad", "grad_weight"), PORTABLE} & products
            ),
        )

    def in_state(self, state: str) -> dict[str, str]:
        """Return {kernel: reason} of the kernels in a state, in the order of cuda/select.h."""
        return {name: v.reason for name, v in self.verdicts.items() if v.state == state}

    def save(self) -> Path:
        """Write the file of the key, completely or not at all -> its path; OSError if it cannot be written."""
        path = self.key.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: value for name, value in asdict(self).items() if name != "is_of_another"}
        text = json.dumps({"format": _FORMAT, **content}, indent=1)
        # under another name first: os.replace() is atomic, so that a reader sees the old file or the new one
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the new name without content
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return path


def load(key: Key, sources: Mapping[str, str]) -> Proof | None:
    """Read the proof for kernels with these digests on a model of GPU; None if nothing is known of them.

    Files are tried in this order: of this model in the cache folder, of this model in the package, of others of its
    compute capability. Warns if one of this model's cannot be read.
    """
    try:
        folders = [cache_folder(), SHIPPED]
    except OSError:  # no home directory
        folders = [SHIPPED]
    own = [folder / key.name() for folder in folders]
    others = (path for folder in folders for path in sorted(folder.glob("*.json")))
    for path in dict.fromkeys((*own, *others)):
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
            verdicts = {str(name): Verdict(**verdict) for name, verdict in content["verdicts"].items()}
            if unknown := {v.state for v in verdicts.values()} - set(_STATES):
                raise ValueError(f"states {sorted(unknown)} are none of {_STATES}")
            races = tuple(Race(**race) for race in content["races"])
            wins = tuple(TorchWin(**win) for win in content["torch_wins"])
            about = Key(**content["key"]), content["taken_with"], content["date"]
            proof = Proof(*about, verdicts, races, wins)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if path in own:
                warnings.warn(
                    f"{path} cannot be read and is taken as absent ({type(error).__name__}: {error}); "
                    "python -m fmoe_ext.gpu prove writes it again",
                    stacklevel=2,
                )
            continue
        if proof.key.capability != key.capability:
            continue
        proof = replace(proof.about(sources), is_of_another=proof.key != key)
        # a file about other sources says nothing; go on to the next
        if any(verdict.state != "untested" for verdict in proof.verdicts.values()):
            return proof
    return None


def cache_folder() -> Path:
    """Return the folder of the files: fmoe_ext/gpu in XDG_CACHE_HOME, or in ~/.cache; OSError without a home."""
    try:
        return Path(_env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fmoe_ext" / "gpu"
    except RuntimeError as error:  # HOME is unset, and the system does not know the user
        raise FileNotFoundError(str(error)) from None


def taken_with() -> str:
    """Name the driver and the torch of this process, for readers."""
    return f"driver {driver_version()}, torch {torch.__version__}"


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the NVIDIA driver's version, "unknown" where Linux does not say."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    except OSError:
        found = None
    return found.group(1) if found else "unknown"


def report(proof: Proof) -> str:
    """Write a proof as text: its verdicts, races and what torch wins."""
    lines = [
        f"{proof.key.gpu}, compute capability {proof.key.capability / 10}, {proof.taken_with}",
        "",
        *_table(
            [("kernel", "state", "reason"), *((n, v.state, v.reason) for n, v in proof.verdicts.items())]
        ),
        "",
    ]
    if proof.races:
        rows: list[tuple[str, ...]] = [("operation", "computed by", "ms", "without", "torch's product")]
        for race in proof.races:
            times = ("" if t is None else f"{t:.3f}" for t in (race.ms, race.without_ms, race.torch_ms))
            rows.append((f"{race.operation} ({race.shape})", race.kernel, *times))
        lines += [*_table(rows), ""]
    lines += [_torch_win(win) for win in proof.torch_wins] + [""] * bool(proof.torch_wins)
    counts = [(state, len(proof.in_state(state))) for state in _STATES]
    lines.append(", ".join(f"{count} {state}" for state, count in counts if count))
    return "\n".join(lines)


def summary(proof: Proof) -> list[str]:
    """Write one line of what is used, and one for each kernel that is not, with the reason."""
    used = ", ".join(name for state in USED for name in proof.in_state(state) if name != PORTABLE)
    if PORTABLE in proof.in_state("failed"):  # as choose() of kernels.py
        used = "torch's grouped_mm alone"
    lines = [f"proved {proof.date} with {proof.taken_with}: {used or 'the portable kernels alone'}"]
    if proof.is_of_another:
        lines.append(f"on another GPU of its compute capability, {proof.key.gpu}: not raced here yet")
    lines += [_torch_win(win) for win in proof.torch_wins]
    for state in _STATES[1:]:
        word = state if state in USED else f"off, {state}"
        lines += [f"{word}: {name} ({reason})" for name, reason in proof.in_state(state).items()]
    return lines


def _torch_win(win: TorchWin) -> str:
    bounds = {"few": "under 64", "hundreds": "64 to 1023", "thousands": "1024 or more"}
    where = f"{win.product}, {win.numbers}, {bounds.get(win.rows, win.rows)} rows per expert"
    return f"torch's product for {where}: {win.torch_ms:.3f} ms, ours {win.ms:.3f}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
