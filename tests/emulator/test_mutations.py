"""The committed table of seeded bugs: each can be seeded, and no file is left out (mutate.py runs them)."""

import mutate

BUGS = mutate.read_bugs()


def test_every_bug_can_be_seeded():
    assert len({bug.label for bug in BUGS}) == len(BUGS) >= 100
    for bug in BUGS:
        source = (mutate.CUDA / bug.file).read_text()
        assert bug.old and bug.old in source, f"{bug.label}: {bug.old!r} is not there"
        assert source.replace(bug.old, bug.new, 1) != source, bug.label


def test_every_file_with_code_has_bugs():
    # the last two are tested through their operators
    without = {"ptx.cuh", "common.cuh", "device_info.cu", "decode_packed.cu", "torch_products.cu"}
    files = {path.name for pattern in ("*.cu", "*.cuh") for path in mutate.CUDA.glob(pattern)}
    thin = {name for name in files - without if len((mutate.CUDA / name).read_text().splitlines()) < 40}
    assert {bug.file for bug in BUGS} >= files - without - thin
