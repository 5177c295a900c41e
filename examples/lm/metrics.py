"""Records of a run: metrics.jsonl and, with --tensorboard, TensorBoard; trainer.py writes on the first rank.

A record is a dict of one run and step (Run.report in runs.py). A resumed run cuts off what came after its checkpoint.
"""

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class MetricsError(Exception):
    """Metrics cannot be written as asked for; the message says why."""


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def cut(path: Path, step: int) -> None:
    """Drops what an interrupted run wrote after its last checkpoint: those steps are done again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_atomically(path, "".join(kept))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Metrics:
    """Writer of the records of the steps after `step`; earlier records stay."""

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        cut(self.path, step)
        self._lines = self.path.open("a")
        self._board = open_tensorboard(folder / "tensorboard", step + 1) if tensorboard else None

    def write(self, records: list[Record]) -> None:
        for record in records:
            self._lines.write(json.dumps(record) + "\n")
            if self._board is not None:
                for key, value in record.items():
                    if key not in ("run", "step") and isinstance(value, (int, float)):
                        self._board.add_scalar(f"{key}/{record['run']}", value, record["step"])
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()


def open_tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MetricsError(f"--tensorboard: {error}; pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=first_step)
