"""The log of a run's choices, and the report that is made of it."""

import base64
import copy
import html.parser
import itertools
import json
import re
import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoE, FMoETransformerMLP, balance
from fmoe_ext.balance import choices
from fmoe_ext.balance.choices import Gate
from fmoe_ext.balance.cli import main
from fmoe_ext.balance.html import figure, png
from fmoe_ext.balance.page import render
from fmoe_ext.balance.report import GateSummary, Summary, summarize_logs
from fmoe_ext.gates import ExpertChoiceGate, SwitchGate, UniformGate
from tests.forked import run_python

D, T = 6, 20


def layer(num_experts=4, gate=None, **options):
    torch.manual_seed(0)
    return FMoETransformerMLP(num_experts, D, 5, gate=gate or "softmax", **options)


def tokens(seed, num=T):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(seed))


def records_of(path, **options):
    return list(balance.read_log(path, **options)[1])


@pytest.mark.parametrize(
    ("num_experts", "gate"),
    [(4, None), (254, None), (255, None), (300, None), (8, ExpertChoiceGate), (4, SwitchGate)],
)
def test_read_back(tmp_path, num_experts, gate):
    model, chosen = layer(num_experts, gate), []
    model.gate_hook = lambda topk_idx, *_: chosen.append(topk_idx.clone())
    ids = torch.arange(2 * T) * 70_000
    with balance.log_choices(model, tmp_path / "new" / "log") as log:
        for step in range(3):
            model(tokens(2 * step))
            model(tokens(2 * step + 1))  # the second microbatch of a step
            log.end_step(10 * step, ids)
    gates, records = balance.read_log(tmp_path / "new" / "log")
    records = list(records)
    assert [(g.name, g.num_experts, g.top_k) for g in gates] == [("gate", num_experts, chosen[0].shape[1])]
    assert [(r.step, r.gate) for r in records] == [
        (s, g) for s in (0, 10, 20) for g in ("gate", "gate", None)
    ]
    ours = [record.topk_idx for record in records if record.gate is not None]
    assert all(torch.equal(a, b) for a, b in zip(ours, chosen, strict=True))
    assert all(torch.equal(record.topk_idx, ids) for record in records if record.gate is None)
    if gate is not None:
        assert any((topk_idx < 0).any() for topk_idx in chosen)


def test_evaluation_and_repeated_forwards_are_left_out(tmp_path):
    model = layer()
    with balance.log_choices(model, tmp_path / "log") as log:
        x = tokens(0).requires_grad_()
        checkpoint(model, x, use_reentrant=False).sum().backward()
        model.eval()(x)
        log.end_step()
        log.end_step()
    assert [record.step for record in records_of(tmp_path / "log")] == [0]
    model.train()(x)
    assert len(records_of(tmp_path / "log")) == 1


def test_it_stays_small_and_spans_the_run(tmp_path):
    model, limit = layer(gate=UniformGate), 3000
    with balance.log_choices(model, tmp_path / "log", every=2, max_bytes=limit) as log:
        for _ in range(200):
            model(tokens(0))
            log.end_step()
            assert not (tmp_path / "log").exists() or (tmp_path / "log").stat().st_size <= limit
        every = log.every
    steps = [record.step for record in records_of(tmp_path / "log")]
    assert steps[0] == 0
    assert every > 2
    assert set(torch.tensor(steps).diff().tolist()) == {every}
    assert steps[-1] >= 200 - every
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_log_full_step_is_reported(tmp_path):
    model = layer()
    with balance.log_choices(model, tmp_path / "log", max_bytes=200) as log:
        model(tokens(0, 500))
        with pytest.warns(UserWarning, match="does not fit into max_bytes=200"):
            log.end_step()


@pytest.fixture
def log_of_three(tmp_path):
    model = layer()
    with balance.log_choices(model, tmp_path / "log") as log:
        for step in range(3):
            model(tokens(step))
            log.end_step()
    return tmp_path / "log"


def test_step_that_ends_after_the_log_is_left_out(tmp_path):
    """It began the file anew."""
    model = layer()
    log = balance.log_choices(model, tmp_path / "log")
    model(tokens(0))
    log.end_step(0)
    written = log.path.read_bytes()
    model(tokens(1))
    log.close()
    log.end_step(1)
    assert log.path.read_bytes() == written


def test_copy_of_a_watched_model_notes_nothing_after_the_log(tmp_path):
    model = layer()
    log = balance.log_choices(model, tmp_path / "log")
    copied = copy.deepcopy(model)  # with the hook, which close() cannot remove there
    log.close()
    copied(tokens(0))
    log.end_step(0)
    assert not log.path.exists() and log._chosen == []


def test_gate_that_skips_the_first_step_and_chooses_another_number_is_left_out(tmp_path):
    """Its records had another K than the header, so that the log could not be read."""
    model = nn.ModuleList([layer(), Fixed([torch.tensor([[0, 1]] * T)], 4)])
    model[1].gate.top_k = None  # a gate need not say it
    with balance.log_choices(model, tmp_path / "log") as log:
        model[0](tokens(0))
        log.end_step(0)
        model[0](tokens(1))
        model[1](torch.zeros(T, D))
        with pytest.warns(UserWarning, match="chose 2 experts for a token, not 1 as the log's first step"):
            log.end_step(1)
    assert [record.step for record in records_of(tmp_path / "log")] == [0, 1]


def test_step_of_more_ids_than_a_record_holds_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "_MAX_CHOICES", 2 * T)
    model = layer()
    with balance.log_choices(model, tmp_path / "log") as log:
        for _ in range(3):  # forwards of T tokens, two choices each
            model(tokens(0))
        with pytest.warns(UserWarning, match=f"a step with {3 * T} choices of a gate, or ids"):
            log.end_step(0, torch.zeros(3 * T, dtype=torch.long))
        with pytest.raises(ValueError, match="step must be 0 or more, but got -1"):
            log.end_step(-1)
    assert not log.path.exists()


def test_full_disk_ends_the_log_and_not_the_training(tmp_path, monkeypatch):
    model, path = layer(), tmp_path / "log"
    with balance.log_choices(model, path) as log:
        for step in range(4):
            if step == 2:
                write = log._file.write
                monkeypatch.setattr(log, "_file", Full(write, log._file))
                with pytest.warns(UserWarning, match="No space left on device; no more choices are logged"):
                    model(tokens(step))
                    log.end_step(step)
            else:
                model(tokens(step))
                log.end_step(step)
    assert [record.step for record in records_of(path)] == [0, 1]


class Full:
    """A file on a disk that takes half of what is written."""

    def __init__(self, write, file):
        self._write, self._file = write, file

    def write(self, data):
        self._write(data[: len(data) // 2])
        self._file.flush()
        raise OSError(28, "No space left on device")

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_every_cut_is_told(log_of_three):
    data, cut = log_of_three.read_bytes(), log_of_three.with_name("cut")
    sizes = []
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        try:
            whole = len(records_of(cut))
        except balance.BadLog:
            whole = None
        if whole is None and size > data.index(b"]}") + 2:
            sizes.append(len(records_of(cut, allow_truncated=True)))
        else:
            assert whole in (None, 0, 1, 2), "a cut between two records is a shorter run"
    assert sorted(set(sizes)) == [0, 1, 2]
    cut.write_bytes(data[:-1])
    with pytest.raises(balance.BadLog, match=r"cut off after \d+ bytes, behind step 1; allow_truncated=True"):
        records_of(cut)


def test_every_changed_byte_is_told(log_of_three):
    data, bad = log_of_three.read_bytes(), log_of_three.with_name("bad")
    begin = data.index(b"]}") + 2
    for place in range(begin, len(data)):
        bad.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with pytest.raises(balance.BadLog):
            records_of(bad)


def test_bad_input(tmp_path, log_of_three):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(balance.BadLog, match="no log of choices"):
        records_of(tmp_path / "text")
    with pytest.raises(ValueError, match="no gate to log"):
        balance.log_choices(torch.nn.Linear(2, 2), tmp_path / "other")
    with pytest.raises(ValueError, match="must be positive"):
        balance.log_choices(layer(), tmp_path / "other", every=0)
    with pytest.raises(ValueError, match=r"max_bytes=5 has no room for one record: .* take 10\d bytes"):
        balance.log_choices(layer(), tmp_path / "other", max_bytes=5)
    model = layer()
    with balance.log_choices(model, tmp_path / "other") as log:
        model(tokens(0))
        with pytest.raises(ValueError, match="3 token_ids, but gate got 20 tokens"):
            log.end_step(0, torch.arange(3))
    assert main(["report", str(tmp_path / "text")]) == 2
    other = layer(5)
    with balance.log_choices(other, tmp_path / "five") as log:
        other(tokens(0))
        log.end_step()
    with pytest.raises(balance.BadLog, match="other gates than"):
        summarize_logs([log_of_three, tmp_path / "five"])
    (tmp_path / "link").symlink_to(log_of_three)
    with pytest.raises(balance.BadLog, match=r"link is .*log again: its choices would count twice"):
        summarize_logs([log_of_three, tmp_path / "link"])


class Fixed(FMoE):
    """A layer whose choices are given."""

    def __init__(self, choices, num_experts):
        from fmoe_ext.gates import BaseGate

        class Given(BaseGate):
            top_k = 2

            def forward(self, x):
                topk_idx = choices.pop(0)
                return topk_idx, torch.full(topk_idx.shape, 0.5)

        gate = Given(num_experts, 1)
        super().__init__(num_experts, D, gate=gate, expert=lambda d: torch.nn.Linear(d, d))


def write_run(path, steps=8):
    """Expert 3 dies after half of the steps; expert 0 gets every token, token 7 above all; 0 and 1 go together."""
    first = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    later = torch.tensor([[0, 1], [0, 2], [0, -1], [0, 1]])
    model = Fixed([first if step < steps // 2 else later for step in range(steps)], 4)
    with balance.log_choices(model, path) as log:
        for step in range(steps):
            model(tokens(0, 4))
            log.end_step(step, torch.tensor([7, 7, 5, 7]))


def test_summary(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    summary = summarize_logs([tmp_path / "a", tmp_path / "b"])
    (gate,) = summary.gates
    assert summary.steps == list(range(8))
    assert gate.load.tolist() == [[8, 4, 2, 2]] * 4 + [[8, 4, 2, 0]] * 4
    assert gate.dropped.tolist() == [0] * 4 + [2] * 4
    assert gate.dead == [3]
    assert gate.overloaded == [0]
    assert gate.feeders[0] == [(7, 0.75), (5, 0.25)]
    assert gate.feeders[3] == [(5, 1.0)]
    assert gate.together.tolist() == [[0, 32, 16, 8], [32, 0, 0, 0], [16, 0, 0, 0], [8, 0, 0, 0]]


def test_summary_counts_dropped_choices_as_integers(tmp_path):
    """bfloat16 stops at 256, and float32 at 2^24."""
    model = Fixed([torch.tensor([[0, -1]]).expand(257, 2)], 4)
    with balance.log_choices(model, tmp_path / "log") as log:
        model(tokens(0, 257))
        log.end_step(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        (gate,) = summarize_logs([tmp_path / "log"]).gates
    finally:
        torch.set_default_dtype(before)
    assert gate.dropped.tolist() == [257]


class Page(html.parser.HTMLParser):
    """Parts of a page, and unclosed tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.images, self.addresses = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        assert tag != "script"
        self.addresses += [values[name] for name in ("src", "href") if name in values]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_page_stands_alone(tmp_path):
    write_run(tmp_path / "run <1>")
    text = render(summarize_logs([tmp_path / "run <1>"]), {7: "the ", 5: "<b>"})
    page = Page(text)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"https?://|@import|url\(", text)
    words = " ".join(page.words)
    for expected in ("run <1>", "the\u2423 75%", "<b> 100%", "overloaded", "dead", "6.25%", "0 + 1 ("):
        assert expected in words, f"{expected!r} is missing"
    assert text.index("Who got what") < text.index("How even") < text.index("Load over the steps")
    assert "most to expert 0 (57.1% of all choices), least to expert 3 (0.0%)" in words
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', text)]
    assert heights == pytest.approx([4 * share / 7 for share in (4, 2, 1, 0)], abs=1e-3)
    dead = re.search(r"<tr>(?:(?!</tr>).)*>dead<.*?</tr>", text)[0]
    assert "last chosen at step" in words and "<td>3</td></tr>" in dead
    assert "bits for each choice" in text[text.index("The log</h2>") :]
    along = re.findall(r'<div class="along">(.*?)</div>', text)
    experts, steps = (re.findall(r">(\d+)<", labels) for labels in (along[-1], along[1]))
    assert experts == ["0", "1", "2", "3"] and steps == ["0", "2", "4", "6"], (
        "other numbers beside the pictures"
    )
    assert 'class="square"' in text and text.count('class="scale"') == 2


def test_pictures():
    pixels = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]], dtype=torch.uint8)
    data = png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert zlib.decompress(data[data.index(b"IDAT") + 4 : -16]) == bytes([0, *range(1, 9)])


@pytest.mark.parametrize("count", range(2, 65))
def test_labels_stand_beside_the_middle_of_their_lines(count):
    names = [f"{i}" for i in range(count)]
    page = figure(torch.ones(count, count + 1), "gate", names, [f"{i}" for i in range(count + 1)])
    height = int(re.search(r'style="height:(\d+)px"', page)[1])
    for side, size, apart in (("top", count, 18 / height), ("left", count + 1, 0.15)):
        labels = re.findall(rf'<span style="{side}:([\d.]+)%">(\d+)</span>', page)
        shares = [float(share) / 100 for share, _ in labels]
        assert shares == pytest.approx([(int(number) + 0.5) / size for _, number in labels], abs=1e-5)
        assert labels[0][1] == "0" and 2 <= len(labels) <= 5
        assert all(b - a >= apart for a, b in itertools.pairwise(shares)), "labels touch each other"


def colours_of(page):
    """The pixels of the last picture of a page [lines, columns, 4]."""
    data = base64.b64decode(re.findall(r"base64,([^\"]*)", page)[-1])
    columns, lines = struct.unpack(">II", data[16:24])
    rows = torch.frombuffer(
        bytearray(zlib.decompress(data[data.index(b"IDAT") + 4 : -16])), dtype=torch.uint8
    )
    return rows.view(lines, -1)[:, 1:].view(lines, columns, 4)


def test_pairs_of_a_dead_expert_have_another_colour_than_expected_ones():
    together = torch.full((4, 4), 50)
    together[3], together[:, 3] = 0, 0
    load = torch.tensor([[100, 100, 100, 0]])
    gate = GateSummary(Gate("gate", 4, 2), load, torch.zeros(1), together.fill_diagonal_(0))
    page = render(Summary([Path("log")], [0], [0], [gate], 8, False))
    pixels = colours_of(page)
    assert pixels[0, 1].tolist()[3] == 0, "a pair that is as expected has a colour"
    assert pixels[0, 3].tolist() == pixels[3, 2].tolist() == [128, 128, 128, 110]
    assert "as of a dead expert" in page


def test_report_names_unreadable_files(tmp_path, capsys):
    write_run(tmp_path / "log")
    (tmp_path / "words").write_text("hello")
    log = str(tmp_path / "log")
    assert main(["report", log, "--vocabulary", str(tmp_path / "words")]) == 2
    assert f"{tmp_path / 'words'} is no JSON" in capsys.readouterr().err
    assert main(["report", log, "-o", str(tmp_path / "nowhere" / "page")]) == 2
    assert "nowhere" in capsys.readouterr().err


GATE = {"name": "gate", "num_experts": 4, "top_k": 2}
FORGED = {  # gates of a header: what the error says
    "has 1099511627776 experts": [{**GATE, "num_experts": 2**40}],
    "has 0 experts": [{**GATE, "num_experts": 0}],
    "has -1 experts": [{**GATE, "num_experts": -1}],
    "not described by a name and two numbers": [{**GATE, "num_experts": float("inf")}],
    "top_k 5 of 4": [{**GATE, "top_k": 5}],
    "top_k 0 of 4": [{**GATE, "top_k": 0}],
    "two gates have one name": [GATE, GATE],
    "more than 131072 experts together": [{**GATE, "name": f"{i}", "num_experts": 60000} for i in range(3)],
    "it has 513 gates; a log holds at most 512": [{**GATE, "name": f"{i}"} for i in range(513)],
}


@pytest.mark.parametrize("text", FORGED)
def test_report_of_impossible_gates_ends_in_one_error(tmp_path, capsys, text):
    header = json.dumps({"gates": FORGED[text]}).encode()
    (tmp_path / "log").write_bytes(b"fmoe choices 2\n" + struct.pack("<I", len(header)) + header)
    assert main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "page")]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


def test_record_that_expands_beyond_all_batches_is_refused(tmp_path):
    """A log of 65 KB took 2.4 GB and 55 s."""
    header = json.dumps({"gates": [{**GATE, "top_k": 1}]}).encode()
    body = zlib.compress(bytes(2**24 + 1))
    record = struct.pack("<IqII", len(body), 0, 0, 2**24 + 1) + body
    path = tmp_path / "log"
    path.write_bytes(b"fmoe choices 2\n" + struct.pack("<I", len(header)) + header)
    with path.open("ab") as file:
        file.write(struct.pack("<I", zlib.crc32(record)) + record)
    assert path.stat().st_size < 20_000
    with pytest.raises(balance.BadLog, match="has more than 16777216 choices"):
        summarize_logs([path])


def test_report_of_other_ids_than_tokens_ends_in_one_error(tmp_path, capsys):
    header = json.dumps({"gates": [GATE]}).encode()
    data = b"fmoe choices 2\n" + struct.pack("<I", len(header)) + header
    for number, count, body in ((0, 5, bytes(10)), (2**32 - 1, 3, bytes(12))):
        packed = zlib.compress(body)
        record = struct.pack("<IQII", len(packed), 7, number, count) + packed
        data += struct.pack("<I", zlib.crc32(record)) + record
    (tmp_path / "log").write_bytes(data)
    assert main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "page")]) == 2
    assert "step 7 has 3 token ids, but gate chose for 5 tokens" in capsys.readouterr().err


def test_report_of_many_gates_leaves_their_pairs_out(tmp_path, monkeypatch):
    monkeypatch.setattr("fmoe_ext.balance.report.MAX_PAIRS", 15)
    write_run(tmp_path / "log")
    summary = summarize_logs([tmp_path / "log"])
    assert [gate.together for gate in summary.gates] == [None] * len(summary.gates)
    assert all(gate.load.sum() > 0 for gate in summary.gates)


def test_report_of_deep_json_ends_in_one_error(tmp_path, capsys):
    header = b"[" * 100_000
    (tmp_path / "log").write_bytes(b"fmoe choices 2\n" + struct.pack("<I", len(header)) + header)
    (tmp_path / "words").write_bytes(header)
    assert main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "page")]) == 2
    assert "damaged or cut off" in capsys.readouterr().err
    write_run(tmp_path / "log")
    assert main(["report", str(tmp_path / "log"), "--vocabulary", str(tmp_path / "words")]) == 2
    assert "is no JSON" in capsys.readouterr().err


def test_log_of_too_many_experts_is_refused(tmp_path):
    """A number of 16 bits for each expert, and one for dropped choices."""
    model = torch.nn.Sequential(UniformGate(1, 2**16, 1, 1))
    with pytest.raises(ValueError, match="has 65536 experts; a log holds 1 to 65535"):
        balance.log_choices(model, tmp_path / "log")


def test_command_line(tmp_path):
    write_run(tmp_path / "log")
    (tmp_path / "vocabulary.json").write_text('{"word": 7}')
    program = "import runpy; runpy.run_module('fmoe_ext.balance', None, '__main__', True)"
    done = run_python(program, "report", "log", "--vocabulary", "vocabulary.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "word 75%" in (tmp_path / "choices.html").read_text()
    (tmp_path / "log").write_bytes((tmp_path / "log").read_bytes()[:-3])
    assert main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "page")]) == 2
    assert main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "page"), "--allow-truncated"]) == 0
