"""The AMX kernel with emulated tile registers: its products, and that every seeded bug in it is noticed."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"),  # every processor with AMX has it
    reason="few rows go by AVX-512's dot products of bfloat16, which are not emulated",
)

BUGS = {  # what is wrong: (in csrc/gemm/amx.h or packing.h, in its place)
    "columns keep what memory held behind them": (
        "(whole_steps(k) - packed) * kAmxColumns * sizeof(BF16)",
        "0",
    ),
    "rows keep what memory held behind them": ("(whole_steps(k) - k) * sizeof(BF16)", "0"),
    "the last block of rows goes on past the last row": (": m - kTileSide", ": row"),
    "few rows are read as sixteen": ("tile < 6 ? rows : kTileSide", "kTileSide"),
    "the second rows are the first": ("add_tile_product<2, 5, 6>", "add_tile_product<2, 4, 6>"),
    "the second columns are the first": ("load_tile<7>(b + 64, kLine)", "load_tile<7>(b, kLine)"),
    "sums of later steps replace the first": ("if (begin > 0) {", "if (false) {"),
    "rows of two blocks get their sums twice": (
        "(done - start) * kAmxColumns, end - done, tile + done",
        "0, end - start, tile + start",
    ),
    "registers are not released": ("release_tiles();", ""),
    "an inner run releases the registers": (
        "--mine.depth > 0 || mine.rows == 0",
        "--mine.depth, mine.rows == 0",
    ),
    "fewer rows keep the configuration of more": (
        "if (mine.rows == rows) return;",
        "if (mine.rows >= rows) return;",
    ),
    "pairs are of one row": (
        "_mm512_permutex2var_epi16(low, turns, high)",
        "_mm512_permutex2var_epi16(low, turns, low)",
    ),
    "packed rows of a panel lie on each other": ("c % kAmxRows * kTileDepth", "0"),
    "an odd row pairs with what follows it": ("i + 1 < k ?", "i < k ?"),
    "turned products add to the first rows alone": (
        "add_rows_of_tile(part, 2 * kTileSide, sums)",
        "add_rows_of_tile(part, kTileSide, sums)",
    ),
    "turned products stay turned": (
        "+ i * kAmxColumns + row);\n      transpose(block);",
        "+ i * kAmxColumns + row);",
    ),
    "turned products take any columns": ("if (!fits) return false;", "if (!columns[31]) return false;"),
    "turned products have one half": ("columns[kTileSide] + begin", "columns[0] + begin"),
}


def build(folder, sources):
    command = ["c++", "-std=c++20", "-O1", "-DFMOE_EMULATE_AMX", f"-I{sources}", f"-I{include_paths()[0]}"]
    program = folder / "products"
    subprocess.run([*command, ROOT / "tests" / "amx" / "products.cpp", "-o", program], check=True)
    return program


def test_products_equal_those_of_float64(tmp_path):
    program = build(tmp_path, ROOT / "csrc")
    result = subprocess.run([program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout.removesuffix(" checks passed\n")) > 100_000
    refused = subprocess.run([program, "unconfigured"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert refused.stderr == "emulated AMX: a tile is used that is not configured\n"


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_seeded_bug_is_noticed(tmp_path, bug):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    right, wrong = BUGS[bug]
    kernels = [tmp_path / "csrc" / "gemm" / name for name in ("amx.h", "packing.h")]
    assert sum(kernel.read_text().count(right) for kernel in kernels) == 1
    for kernel in kernels:
        kernel.write_text(kernel.read_text().replace(right, wrong))
    result = subprocess.run([build(tmp_path, tmp_path / "csrc")], capture_output=True, text=True)
    assert result.returncode != 0
