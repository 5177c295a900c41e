"""Findings of `fmoe gpu prove`: a small JSON file in the user's cache folder, or one that came with the package.

One file for each model of GPU and digest of the kernels' sources. Driver and torch are noted, not compared: a proof
holds on another machine of the same kind.
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fmoe_ext import _env

_FORMAT = 3
SHIPPED = Path(__file__).parent / "proofs"  # taken by us; one in the cache folder goes before it
PORTABLE = "portable"  # the name of the portable kernels among those of a proof
STATES = ("proved", "beaten", "failed", "slow", "untested")
USED = ("proved", "beaten")  # beaten: right, but torch is faster; used where torch's product cannot be
# classes of rows an expert, on average, and where they begin
ROWS = (
    ("thousands", 1024),
    ("hundreds", 64),
    ("few", 0),
)


@dataclass(frozen=True)
class Key:
    """Model of GPU and sources of kernels that a proof is valid for."""

    gpu: str
    sources: str  # cuda/sources_digest.py

    def name(self) -> str:
        """The name of its proof's file."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"{slug}-{self.sources}.json"

    def path(self) -> Path:
        """The file in the cache folder, which need not exist."""
        return _cache_folder() / self.name()


@dataclass(frozen=True)
class Verdict:
    """One of STATES, and why."""

    state: str
    reason: str = ""


@dataclass(frozen=True)
class Race:
    """Milliseconds of an operation with the kernel that computes it, without that kernel, and by torch's grouped_mm."""

    operation: str
    shape: str
    kernel: str
    ms: float
    without_ms: float | None
    torch_ms: float | None


@dataclass(frozen=True)
class TorchWin:
    """Torch's grouped_mm is faster than our kernels in a class of problems."""

    operator: str  # of TORCH_OPERATORS in torch_path
    numbers: str  # "16 bits" or "tf32"
    rows: str  # of ROWS
    ms: float
    torch_ms: float

    @property
    def where(self) -> tuple[str, str, str]:
        return self.operator, self.numbers, self.rows


def rows_class(num_rows: int, num_experts: int) -> str:
    """Class of ROWS; what the host knows without reading a device value."""
    return next(name for name, first in ROWS if num_rows >= first * num_experts)


@dataclass(frozen=True)
class Proof:
    key: Key
    taken_with: str  # driver and torch
    date: str  # ISO 8601, UTC
    verdicts: Mapping[str, Verdict]  # by kernel, the portable ones among them
    races: tuple[Race, ...] = field(default=())
    torch_wins: tuple[TorchWin, ...] = field(default=())

    def named(self, state: str) -> dict[str, str]:
        """{kernel: reason} of one state, in the order of cuda/select.h."""
        return {name: v.reason for name, v in self.verdicts.items() if v.state == state}

    def save(self) -> Path:
        """Writes the file of the key: completely or not at all. OSError where that cannot be done."""
        path = self.key.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return path


def load(key: Key) -> Proof | None:
    """The proof for a key, of the cache folder or of the package; None if there is none that can be read.

    Warns of a file that cannot be read.
    """
    for path in (key.path(), SHIPPED / key.name()):
        try:
            return _parse(json.loads(path.read_text()), key)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"{path} cannot be read and is taken as absent ({type(error).__name__}: {error}); "
                "python -m fmoe_ext.gpu prove writes it again",
                stacklevel=2,
            )
    return None


def _parse(content: Any, key: Key) -> Proof:
    """The proof that a file holds; ValueError, KeyError or TypeError if it is none for this key."""
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
    if Key(**content["key"]) != key:
        raise ValueError(f"it is about {content['key']}, not about {asdict(key)}")
    verdicts = {str(name): Verdict(**verdict) for name, verdict in content["verdicts"].items()}
    if unknown := {v.state for v in verdicts.values()} - set(STATES):
        raise ValueError(f"states {sorted(unknown)} are none of {STATES}")
    races, wins = (
        (Race(**race) for race in content["races"]),
        (TorchWin(**win) for win in content["torch_wins"]),
    )
    return Proof(key, content["taken_with"], content["date"], verdicts, tuple(races), tuple(wins))


def _cache_folder() -> Path:
    """Folder of the files: fmoe_ext/gpu in XDG_CACHE_HOME, or in ~/.cache."""
    home = _env.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fmoe_ext" / "gpu"


def taken_with() -> str:
    """Driver and torch of this process, for people."""
    return f"driver {driver_version()}, torch {torch.__version__}"


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The NVIDIA driver's version, "unknown" where Linux does not say it."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    except OSError:
        found = None
    return found.group(1) if found else "unknown"
