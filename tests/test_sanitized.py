"""tests/sanitized.py: a change of a C++ source makes the sanitized programs run in CI."""

import pytest

from tests import sanitized


@pytest.mark.parametrize("folder", sanitized.FOLDERS)
def test_code_counts_and_comments_do_not(folder, tmp_path):
    file = tmp_path / folder / "some.h"
    file.parent.mkdir(parents=True)
    found = []
    for text in ("int a;  // one", "int  a;\n/* two */", "int b;"):
        file.write_text(text)
        found.append(sanitized.digest(tmp_path))
    assert found[0] == found[1] != found[2]


def test_mark_is_slow_once_the_sources_have_passed(tmp_path, monkeypatch):
    record = tmp_path / "passed.txt"
    monkeypatch.setattr(sanitized, "RECORD", record)
    record.write_text("of other sources\n")
    assert sanitized.long_unless_passed().name == "long"
    record.write_text(sanitized.digest() + "\n")
    assert sanitized.long_unless_passed().name == "slow"
