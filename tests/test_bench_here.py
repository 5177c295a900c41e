"""make bench-here on tiny shapes: each way computes the layer, and the row has its ratios."""

import pytest
import torch

from benchmarks import bench_here

TINY = tuple((12, 8, 12, 4, 2, activation) for activation in bench_here.OURS)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case[-1])
def test_every_way_computes_the_same(case):
    inputs, act = bench_here.inputs_of(case, torch.float32), bench_here.THEIRS[case[-1]]
    T, d, h, E, k, activation = case
    expected = bench_here.ours(activation, E, d, h)(*inputs)
    for way in (bench_here.grouped_mm, bench_here.loop_with_index_add, bench_here.loop_over_split):
        torch.testing.assert_close(way(act)(*inputs), expected)


def test_prints_the_row_of_this_processor(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_here, "CASES", (TINY[0], (600, 8, 12, 2, 1, "swiglu")))
    threads = torch.get_num_threads()
    bench_here.main(
        ["--seconds", "20", "--dtypes", "float32", "--threads", "1", "--out", str(tmp_path / "here.json")]
    )
    torch.set_num_threads(threads)
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip().endswith("1 threads")
    worst, median = map(float, row[2].split(","))
    assert 0 < worst <= median
    assert float(row[6]) > 0  # of dense: the second case has 300 rows an expert
    assert (tmp_path / "here.md").read_text().splitlines()[-1].split("|")[2] == row[2]
