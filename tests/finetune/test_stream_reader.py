"""Reads of spans of files: past the page cache, through it, and from files that end too early."""

import os
import random
from types import SimpleNamespace

import numpy as np
import pytest

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.expert_files import Span
from fmoe_ext.finetune.streaming import pool, reader

SIZE = 3 * reader.CHUNK + 12345


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name in "ab":
        data = np.random.default_rng(ord(name)).integers(0, 256, SIZE, dtype=np.uint8)
        data.tofile(folder / name)
    return folder


def some_spans(folder, seed):
    """Spans of both files in a random order, packed into a buffer with gaps."""
    draw = random.Random(seed)
    spans, at = [], 0
    for _ in range(40):
        size = draw.choice([1, 7, 4096, 50_000, reader.CHUNK + 3])
        begin = draw.choice([0, SIZE - size, draw.randrange(SIZE - size)])
        at += draw.randrange(3)
        spans.append(Span(folder / draw.choice("ab"), begin, size, at))
        at += size
    return spans, at


@pytest.mark.parametrize("way", ["direct", "dropped", "through_cache"])
@pytest.mark.parametrize("seed", range(3))
def test_spans_equal_the_bytes_of_the_files(files, monkeypatch, way, seed):
    if way == "dropped":
        monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    spans, size = some_spans(files, seed)
    found = np.full(size, 99, dtype=np.uint8)
    num_bytes = reader.Reader((), way == "through_cache").read(spans, found)
    if way == "through_cache":  # no gap is read
        assert num_bytes == sum(span.num_bytes for span in spans)
    expected = np.full(size, 99, dtype=np.uint8)
    for span in spans:
        whole = np.fromfile(span.path, dtype=np.uint8)
        expected[span.at : span.at + span.num_bytes] = whole[span.begin : span.begin + span.num_bytes]
    assert np.array_equal(found, expected)
    assert num_bytes >= SIZE


def test_file_system_without_direct_reads(files, monkeypatch):
    opened = []
    real = os.open

    def refuse(path, flags, *rest):
        opened.append(flags & os.O_DIRECT)
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    found = np.zeros(10, dtype=np.uint8)
    reader.Reader().read([Span(files / "a", 5, 10, 0)], found)
    assert np.array_equal(found, np.fromfile(files / "a", dtype=np.uint8)[5:15])
    assert opened == [os.O_DIRECT, 0]


def test_reads_through_the_cache_leave_it_alone(files, monkeypatch):
    opened, real = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest: opened.append(flags) or real(path, flags, *rest)
    )
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("a range is dropped"))
    reader.Reader([files / "a"], through_cache=True).read(
        [Span(files / "a", 5, 10, 0)], np.zeros(10, np.uint8)
    )
    assert len(opened) == 1 and not opened[0] & os.O_DIRECT


def test_spans_behind_the_end_and_absent_files_are_refused(files):
    with pytest.raises(CheckpointError, match="ends 1 bytes too early"):
        reader.Reader().read([Span(files / "a", SIZE - 9, 10, 0)], np.zeros(10, dtype=np.uint8))
    with pytest.raises(CheckpointError, match="cannot be read"):
        reader.Reader().read([Span(files / "c", 0, 10, 0)], np.zeros(10, dtype=np.uint8))


def test_next_uses_of_layers():
    parts = pool.Parts([SimpleNamespace(num_experts=8)] * 4, size=0)
    order = [
        list(parts.after(1, phase, training))
        for phase, training in [
            (pool.Phase.FORWARD, True),
            (pool.Phase.FORWARD, False),
            (pool.Phase.BACKWARD, True),
        ]
    ]
    assert order == [[2, 3, 3, 2, 1, 0], [2, 3, 0, 1, 2, 3], [0, 0, 1, 2, 3]]


def test_next_uses_of_parts():
    parts = pool.Parts([SimpleNamespace(num_experts=5)] * 3, size=3)
    assert list(map(tuple, parts)) == [(layer, *ends) for layer in range(3) for ends in ((0, 3), (3, 5))]
    assert list(parts.after(4, pool.Phase.FORWARD, True)) == [5, 4, 5, 2, 3, 0, 1]
    assert list(parts.after(2, pool.Phase.REPEATED, True)) == [3, 3, 2, 0, 1, *range(6)]
    assert list(parts.after(3, pool.Phase.BACKWARD, True)) == [2, 0, 1, *range(6)]
