"""prune() of a model five times larger than the memory that it may use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fmoe_ext
from tests.compress import planted
from tests.formats.format_models import without_float32

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 44_000_000
ALLOCATOR = 8_000_000  # pages that malloc keeps and objects of Python: no tensor of the model
DEAD, COPIES = [3, 11, 17, 30], {8: 5, 21: 6, 29: 7, 31: 9}
# The first call loads the program: a model in that shape, with fewer and smaller layers.
CHILD = """
import json, sys
from pathlib import Path
import torch
from fmoe_ext.compress import prune
small, model, out, memory = sys.argv[1:]
ids = torch.randint(3, 1009, (2400,), generator=torch.Generator().manual_seed(3))
options = dict(experts=24, seq_len=32, batch=8)
prune(small, out + "_small", ids, **options)
Path("/proc/self/clear_refs").write_text("5")
def status(name):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name))
before = status("VmRSS:")
report = prune(model, out, ids, memory=int(memory), **options)
print(json.dumps({"grown": status("VmHWM:") - before, "layers": report["layers"]}))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc"
)
def test_planted_experts_of_a_large_model_go_within_the_memory(tmp_path):
    sizes = {"experts": 32, "width": 128, "hidden": 160}
    planted.make(tmp_path / "small", DEAD, COPIES, None, layers=1, experts=32)
    folder = planted.make(tmp_path / "model", DEAD, COPIES, None, layers=16, **sizes)
    in_files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert in_files > 5 * MEMORY
    arguments = [str(tmp_path / name) for name in ("small", "model", "out")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, *arguments, str(MEMORY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["grown"] < MEMORY + ALLOCATOR
    gone = sorted(map(str, (*DEAD, *COPIES)))
    assert all(sorted(layer["pruned"]) == gone for layer in found["layers"].values())
    ids = torch.randint(3, 1009, (1, 32), generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), without_float32():  # routers of Transformers round their scores to it
        before, after = (
            fmoe_ext.stream(tmp_path / name, 2**30)(input_ids=ids).logits for name in ("model", "out")
        )
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert before.std() > 0.1
