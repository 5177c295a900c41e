"""The log of a run's choices: ChoiceLog writes it to disk while a model trains, read_log() reads it back.

A file is _MAGIC, the length of the header (uint32), the header (JSON) and records, all numbers little-endian:

    uint32  CRC-32 of the rest of the record
    uint32  bytes of the body
    uint64  step
    uint32  gate: its place in "gates" of the header; 2**32 - 1 (TOKENS): the body has ids of tokens
    uint32  tokens
    body    a zlib stream: topk_idx [tokens, K], uint8 below 255 experts, else uint16; a number that no expert has is a
            dropped choice. Or the ids [tokens], uint32.

A number of several bytes is torn apart: the lowest bytes of all numbers come first, then the next ones, ... High bytes
are nearly all alike and pack well once they stand together.

The file is bounded. If a step does not fit, the file is written anew with every second of its steps, and from then on
half as many are logged: it covers the whole run at any time, evenly.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fmoe_ext.balance.views import GateView, views_of
from fmoe_ext.step import is_counted

_MAGIC = b"fmoe choices 2\n"
TOKENS = 2**32 - 1
_UINT32, _HEAD = struct.Struct("<I"), struct.Struct("<IQII")
_MAX_JSON = 1 << 24  # bytes of the header that are read, whatever length a forged file gives
_MAX_EXPERTS = 2**16 - 1  # of a gate: uint16, less one number for dropped choices
_MAX_EXPERTS_OF_ALL = 2**17  # of all gates together: what a report counts for each stays below 200 MB
_MAX_GATES = 512
_MAX_CHOICES = 2**24  # of a record: a forged one of a few KB could unpack to many more


class BadLog(ValueError):
    """The file is no log of choices, or is damaged or cut off."""


class Choice(NamedTuple):
    """Choices of one forward of a gate, or the ids of a step's tokens."""

    step: int
    gate: str | None  # None for the ids
    topk_idx: torch.Tensor  # [T, K] int64, -1 for dropped choices; the ids [T]


@dataclass(frozen=True)
class Gate:
    """A gate that a log is about."""

    name: str
    num_experts: int
    top_k: int


class ChoiceLog:
    """Writes the choices of a model's gates; made by log_choices().

    every: one of `every` steps is written. Whenever the file would grow over max_bytes, it loses every second of its
    steps, and `every` doubles.
    """

    def __init__(self, model: nn.Module, path: str | Path, every: int, max_bytes: int) -> None:
        if every < 1 or max_bytes < 1:
            raise ValueError(f"every and max_bytes must be positive, but got {every} and {max_bytes}")
        views = views_of(model, "log")
        # A gate that says no top_k shows how many choices it makes at the first step, when the header is written.
        self._gates = {name: Gate(name, view.num_experts, view.top_k or 1) for name, view in views.items()}
        _check_gates(list(self._gates.values()))
        least = len(_header(self._gates)) + _UINT32.size + _HEAD.size
        if max_bytes < least:
            raise ValueError(
                f"max_bytes={max_bytes} has no room for one record: the names of the gates take {least} bytes already"
            )
        self.every = every
        self.max_bytes = max_bytes
        self.path = Path(path)
        self._part = self.path.with_suffix(self.path.suffix + ".part")  # the thinned file while it is written
        self._file: BinaryIO | None = None
        self._num_bytes = 0  # length of the file up to its last whole step
        self._num_ended = 0  # steps that have ended, logged or not
        self._chosen: list[tuple[str, torch.Tensor]] = []  # since the last end_step(), on the gates' devices
        self._is_closed = False
        self._hooks: list[RemovableHandle] = []
        for name, view in views.items():
            # a function, which a deepcopy of the model shares; it would copy a bound method's log with its file
            def note(module: nn.Module, _: Any, output: Any, name: str = name, view: GateView = view) -> None:
                is_wanted = self._num_ended % self.every == 0 and not self._is_closed
                if is_wanted and module.training and is_counted():
                    topk_idx, _ = view.read_real(output)
                    # in few bytes, as the body has them; -1 becomes 255, or as int16 the bits of 65535
                    dtype = torch.uint8 if _width(view.num_experts) == 1 else torch.int16
                    self._chosen.append((name, topk_idx.detach().to(dtype)))

            self._hooks.append(view.module.register_forward_hook(note))

    def end_step(self, step: int | None = None, token_ids: torch.Tensor | None = None) -> None:
        """Write what was chosen since the last call; the only call that waits for the device.

        step: its number; None counts the calls. token_ids: the ids of the tokens, in the order in which the gates got
        them and without padding, so that the report can say which tokens an expert gets. Raises ValueError if some gate
        did not get as many tokens as there are ids and for a negative step, OSError if the file cannot be begun.
        """
        number = self._num_ended if step is None else step
        if not 0 <= number < 2**64:
            raise ValueError(f"step must be 0 or more, but got {number}")
        is_wanted = self._num_ended % self.every == 0
        self._num_ended += 1
        chosen, self._chosen = self._chosen, []
        if not is_wanted or not chosen:
            return
        sizes = [part.numel() for _, part in chosen] + ([] if token_ids is None else [token_ids.numel()])
        if (most := max(sizes)) > _MAX_CHOICES:
            warnings.warn(
                f"{self.path}: a step with {most} choices of a gate, or ids, more than {_MAX_CHOICES}, is left out",
                stacklevel=2,
            )
            return
        if (
            self._file is None
        ):  # the first step that is logged: now the K of each gate that took part is known
            for name, topk_idx in chosen:
                self._gates[name] = replace(self._gates[name], top_k=topk_idx.shape[1])
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
            self._file.write(_header(self._gates))
            self._file.flush()
            self._num_bytes = self._file.tell()
        for name, topk_idx in chosen:
            if topk_idx.shape[1] != self._gates[name].top_k:  # a gate without a forward in the first step
                warnings.warn(
                    f"{self.path}: {name} chose {topk_idx.shape[1]} experts for a token, not "
                    f"{self._gates[name].top_k} as the log's first step says, and is left out",
                    stacklevel=2,
                )
        chosen = [pair for pair in chosen if pair[1].shape[1] == self._gates[pair[0]].top_k]
        numbers = {name: index for index, name in enumerate(self._gates)}
        records = [_record(number, numbers[name], part) for name, part in chosen]
        if token_ids is not None:
            # the ids speak for every gate: each must have had that many tokens, in one or several forwards
            ids = token_ids.detach().flatten().to(torch.int32)
            num_tokens: dict[str, int] = {}
            for name, topk_idx in chosen:
                num_tokens[name] = num_tokens.get(name, 0) + len(topk_idx)
            for name, tokens in num_tokens.items():
                if tokens != len(ids):
                    raise ValueError(
                        f"there are {len(ids)} token_ids, but {name} got {tokens} tokens since the last step"
                    )
            records.append(_record(number, TOKENS, ids))
        try:
            self._write_step(b"".join(records))
        except OSError as error:
            # A full disk must not end the training: the log ends with its last whole step.
            with contextlib.suppress(OSError):
                self.close()
            self._file = None
            with contextlib.suppress(OSError):
                if self.path.stat().st_size > self._num_bytes:
                    os.truncate(self.path, self._num_bytes)
                self._part.unlink(missing_ok=True)
            warnings.warn(f"{self.path}: {error}; no more choices are logged", stacklevel=2)

    def _write_step(self, data: bytes) -> None:
        """Write a step's records; thin the file until they fit, unless that leaves this step out, too."""
        assert self._file is not None
        while self._file.tell() + len(data) > self.max_bytes:
            if not self._thin():
                size = f"{len(data)} bytes does not fit into max_bytes={self.max_bytes}"
                warnings.warn(f"{self.path}: a step of {size} and is left out", stacklevel=3)
                return
            if (self._num_ended - 1) % self.every:  # this step is not among those of the doubled distance
                return
        self._file.write(data)
        self._file.flush()
        self._num_bytes = self._file.tell()

    def _thin(self) -> bool:
        """Rewrite the file with every second of its steps, and double `every` -> False if it has one step at most."""
        assert self._file is not None
        steps = list(dict.fromkeys(record.step for record, _ in _read(self.path, False)[1]))
        if len(steps) < 2:
            return False
        kept = set(steps[::2])
        # beside the old file, then in its place: a crash leaves one of them whole
        with self._part.open("wb") as file:
            file.write(_header(self._gates))
            for record, raw in _read(self.path, False)[1]:
                if record.step in kept:
                    file.write(raw)
        self._file.close()
        os.replace(self._part, self.path)
        self._file = self.path.open("rb+")
        self._num_bytes = self._file.seek(0, os.SEEK_END)
        self.every *= 2
        return True

    def close(self) -> None:
        """Stop watching and close the file; an end_step() that follows writes nothing."""
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._chosen = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> ChoiceLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def log_choices(
    model: nn.Module, path: str | Path, *, every: int = 1, max_bytes: int = 256 << 20
) -> ChoiceLog:
    """Begin to log every choice of a model's gates in training to a file -> ChoiceLog, a context manager.

    The file is begun at the first step that is logged, and replaces one that is there: a resumed run needs a path of
    its own. A rank logs its own tokens: give each a path of its own; the report takes several. Raises ValueError for a
    model without gates or with gates that a log cannot hold (512 gates, 65,535 experts of one, 131,072 of all), for
    every below 1 and for max_bytes that hold no record.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> with log_choices(mlp, "choices.log", every=10) as log:
        ...     for step in range(20):
        ...         y = mlp(torch.randn(10, 8))
        ...         log.end_step(step)
        >>> gates, records = fmoe_ext.balance.read_log("choices.log")
        >>> [record.step for record in records]
        [0, 10]
    """
    return ChoiceLog(model, path, every, max_bytes)


def read_log(path: str | Path, *, allow_truncated: bool = False) -> tuple[list[Gate], Iterator[Choice]]:
    """Read the gates of a log and, one after the other, its records.

    Raises BadLog for a file that is no log and, once the iterator reaches it, for a record that is damaged or cut off.
    allow_truncated: a record that is cut off, as a killed run leaves it, ends the log instead.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> with fmoe_ext.balance.log_choices(mlp, "choices.log") as log:
        ...     y = mlp(torch.randn(10, 8))
        ...     log.end_step(0)
        >>> gates, records = read_log("choices.log")
        >>> [(step, topk_idx.shape) for step, gate, topk_idx in records]
        [(0, torch.Size([10, 2]))]
    """
    gates, records = _read(Path(path), allow_truncated)
    return gates, (record for record, _ in records)


def _read(path: Path, allow_truncated: bool) -> tuple[list[Gate], Iterator[tuple[Choice, bytes]]]:
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise BadLog(f"{path} is no log of choices: it does not begin with {_MAGIC!r}")
        try:
            (size,) = _UINT32.unpack(file.read(4))
            fields = json.loads(file.read(min(size, _MAX_JSON)))
            gates = [Gate(g["name"], g["num_experts"], g["top_k"]) for g in fields["gates"]]
            _check_gates(gates)
        except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadLog(f"{path}: its header is damaged or cut off ({error})") from None
        begin = file.tell()
    return gates, _records(path, begin, gates, allow_truncated)


def _check_gates(gates: list[Gate]) -> None:
    """Raise ValueError for gates that a log cannot hold. Those of a file may be forged: take nothing for granted."""
    for gate in gates:
        if type(gate.name) is not str or type(gate.num_experts) is not int or type(gate.top_k) is not int:
            raise ValueError("a gate is not described by a name and two numbers")
        if not 1 <= gate.num_experts <= _MAX_EXPERTS:
            raise ValueError(
                f"gate {gate.name[:80]!r} has {gate.num_experts} experts; a log holds 1 to {_MAX_EXPERTS}"
            )
        if not 1 <= gate.top_k <= gate.num_experts:
            raise ValueError(f"gate {gate.name[:80]!r} has top_k {gate.top_k} of {gate.num_experts} experts")
    if len(gates) > _MAX_GATES:
        raise ValueError(f"it has {len(gates)} gates; a log holds at most {_MAX_GATES}")
    if len({gate.name for gate in gates}) < len(gates):
        raise ValueError("two gates have one name")
    if sum(gate.num_experts for gate in gates) > _MAX_EXPERTS_OF_ALL:
        raise ValueError(f"its gates have more than {_MAX_EXPERTS_OF_ALL} experts together")


def _records(
    path: Path, begin: int, gates: list[Gate], allow_truncated: bool
) -> Iterator[tuple[Choice, bytes]]:
    """Yield the records from byte `begin` on, each with its bytes; nothing in them is believed before it is checked."""
    step = None
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - begin
        file.seek(begin)
        while left > 0:
            # 1. is it whole? The length is not covered by a check yet: compare it with what is left of the file
            head = file.read(min(left, _UINT32.size + _HEAD.size))
            size = (
                _HEAD.unpack_from(head, _UINT32.size)[0] if len(head) == _UINT32.size + _HEAD.size else left
            )
            if len(head) + size > left:
                if allow_truncated:
                    return
                raise BadLog(
                    f"{path} is cut off after {begin} bytes, behind step {step}; allow_truncated=True "
                    "(--allow-truncated) reads what is whole"
                )
            # 2. its checksum, and the sizes that its head gives
            raw = head + file.read(size)
            (crc,) = _UINT32.unpack_from(raw)
            _, step, number, num_tokens = _HEAD.unpack_from(raw, _UINT32.size)
            if zlib.crc32(raw[_UINT32.size :]) != crc or (number >= len(gates) and number != TOKENS):
                raise BadLog(f"{path}: the record at byte {begin} is damaged")
            gate = None if number == TOKENS else gates[number]
            per_token = 1 if gate is None else gate.top_k  # numbers
            width = 4 if gate is None else _width(gate.num_experts)  # bytes of a number
            if num_tokens * per_token > _MAX_CHOICES:
                raise BadLog(f"{path}: the record at byte {begin} has more than {_MAX_CHOICES} choices")
            # 3. the body; a byte more than expected shows that it is too long, without unpacking the GB that it may be
            expected = num_tokens * per_token * width
            stream = zlib.decompressobj()
            try:
                body = stream.decompress(raw[_UINT32.size + _HEAD.size :], expected + 1)
            except zlib.error as error:
                raise BadLog(f"{path}: the record at byte {begin} is damaged ({error})") from None
            if len(body) != expected:
                raise BadLog(f"{path}: the record at byte {begin} has other than {num_tokens} tokens")
            # 4. the numbers, from their bytes [width, numbers]
            numbers = torch.zeros(num_tokens * per_token, dtype=torch.int64, device="cpu")
            if body:  # frombuffer() takes no empty bytes
                places = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(width, -1)
                for place, part in enumerate(places):
                    numbers += part.long() << 8 * place
            if gate is None:
                record = Choice(step, None, numbers)
            else:
                topk_idx = numbers.view(num_tokens, gate.top_k)
                record = Choice(step, gate.name, torch.where(topk_idx >= gate.num_experts, -1, topk_idx))
            begin, left = begin + len(raw), left - len(raw)
            yield record, raw


def _width(num_experts: int) -> int:
    """Return the bytes of a choice, one below 255 experts: the format's bound. 255 is a dropped choice."""
    return 1 if num_experts < 255 else 2


def _record(step: int, number: int, numbers: torch.Tensor) -> bytes:
    # the lowest byte of all numbers, then the next byte of all, ...: high bytes are alike and compress well
    host = numbers.cpu().numpy()
    little = host.astype(host.dtype.newbyteorder("<"), copy=False)
    places = little.view("u1").reshape(-1, little.itemsize).T.tobytes()
    # Numbers of experts hardly repeat in sequences: a code by frequency has what there is to gain, and is fast. Wide
    # numbers have high bytes that are all alike: runs.
    strategy = zlib.Z_RLE if numbers.itemsize > 1 else zlib.Z_HUFFMAN_ONLY
    coder = zlib.compressobj(1, zlib.DEFLATED, 15, 8, strategy)
    body = coder.compress(places) + coder.flush()
    rest = _HEAD.pack(len(body), step, number, len(numbers)) + body
    return _UINT32.pack(zlib.crc32(rest)) + rest


def _header(gates: Mapping[str, Gate]) -> bytes:
    text = json.dumps({"gates": [vars(gate) for gate in gates.values()]}).encode()
    return _MAGIC + _UINT32.pack(len(text)) + text
