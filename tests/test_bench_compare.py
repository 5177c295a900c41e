"""benchmarks.compare: a tree against itself, what it says of times, and what it leaves."""

import subprocess

import pytest

from benchmarks import compare


def test_summary():
    assert compare.summarise([3e-3, 2e-3, 4e-3], [2e-3, 2e-3, 1e-3]) == [
        "3.000",
        "2.000",
        "1.500",
        "1.00-4.00",
    ]


@pytest.mark.slow
def test_compare_tree_with_itself():
    cases = [["E", "float32", False], ["E", "bfloat16", True]]
    rows = compare.compare(compare.ROOT, compare.ROOT, cases, rounds=2, threads=1)
    assert [row[:3] for row in rows] == [["E", "float32", "fwd"], ["E", "bfloat16", "fwd+bwd"]]
    for *_, old, new, ratio, _ in rows:
        assert 0 < float(old) < 1000 and 0 < float(new) < 1000 and 0.2 < float(ratio) < 5


def test_compare_removes_its_checkout():
    with compare.worktree("HEAD") as folder:
        head = ["git", "-C", str(folder), "show", "HEAD:setup.py"]
        assert (folder / "setup.py").read_text() == subprocess.run(
            head, capture_output=True, text=True
        ).stdout
    assert not folder.exists()
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=compare.ROOT, capture_output=True, text=True
    ).stdout
    assert str(folder) not in listed


def test_compare_unknown_commit_is_refused():
    with (
        pytest.raises(SystemExit, match=r"cannot check out 'no-such-commit': .*no-such-commit"),
        compare.worktree("no-such-commit"),
    ):
        pass
