"""Findings of `python -m fmoe_ext.gpu prove`: a small JSON file in the user's cache folder.

One file for each combination of GPU, driver, torch and build of our CUDA module: what was proved with one is not
proved with another.
"""

import hashlib
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

FORMAT = 2
PORTABLE = "portable"  # the name of the portable kernels among those of a proof
STATES = ("proved", "beaten", "failed", "slow", "untested")
USED = ("proved", "beaten")  # beaten: right, but torch is faster; used where torch's product cannot be
ROWS = (
    ("thousands", 1024),
    ("hundreds", 64),
    ("few", 0),
)  # classes of rows an expert, on average, and where they begin


@dataclass(frozen=True)
class Key:
    """GPU, driver and build that a proof is valid for."""

    gpu: str
    driver: str
    torch: str
    build: str

    def path(self) -> Path:
        """The file of its proof, which need not exist."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        digest = hashlib.sha256("\n".join(asdict(self).values()).encode()).hexdigest()[:12]
        return cache_folder() / f"{slug}-{digest}.json"


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
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
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
    """The proof for a key; None if there is none, or one that cannot be read, with a warning."""
    path = key.path()
    try:
        return parse(json.loads(path.read_text()), key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} cannot be read and is taken as absent ({type(error).__name__}: {error}); "
            "python -m fmoe_ext.gpu prove writes it again",
            stacklevel=2,
        )
        return None


def parse(content: Any, key: Key) -> Proof:
    """The proof that a file holds; ValueError, KeyError or TypeError if it is none for this key."""
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
    if Key(**content["key"]) != key:
        raise ValueError(f"it is about {content['key']}, not about {asdict(key)}")
    verdicts = {str(name): Verdict(**verdict) for name, verdict in content["verdicts"].items()}
    if unknown := {v.state for v in verdicts.values()} - set(STATES):
        raise ValueError(f"states {sorted(unknown)} are none of {STATES}")
    races, wins = (
        (Race(**race) for race in content["races"]),
        (TorchWin(**win) for win in content["torch_wins"]),
    )
    return Proof(key, content["date"], verdicts, tuple(races), tuple(wins))


def cache_folder() -> Path:
    """Folder of the files: fmoe_ext/gpu in XDG_CACHE_HOME, or in ~/.cache."""
    home = _env.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fmoe_ext" / "gpu"


def key_of(device: int, module: Path) -> Key:
    """The key of a CUDA device and the CUDA module at a path; asks the driver, allocates nothing."""
    properties = torch.cuda.get_device_properties(device)
    return Key(properties.name, driver_version(), torch.__version__, build_id(module))


def build_id(module: Path) -> str:
    """Changes with any byte of a native module."""
    return hashlib.sha256(module.read_bytes()).hexdigest()[:16]


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The NVIDIA driver's version, "unknown" where Linux does not say it."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    except OSError:
        found = None
    return found.group(1) if found else "unknown"
