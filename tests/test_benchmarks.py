"""The GPU benchmark where there is no GPU: its predictions, and every step of it on the CPU with tiny shapes."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import (
    bench_gpu_host,
    bench_gpu_kernels,
    bench_gpu_layer,
    bench_gpu_main_grads,
    bench_host,
    gpu_peers,
    gpu_sentences,
    roofline,
)

H200 = roofline.Ceilings(788e12, 4.3e12)
SHAPES = {shape.name: shape for shape in roofline.MODELS}


@pytest.mark.parametrize(
    ("name", "T", "forward", "backward"),  # milliseconds, computed by hand from FLOPs and bytes
    [
        ("Mixtral-8x7B", 16384, 14.79, 29.43),
        ("Qwen3-30B-A3B", 4096, 0.45, 0.85),
        ("GPT-OSS-20B", 32768, 8.55, 16.82),
        ("FastMoE E96", 4096, 0.45, 0.86),
    ],
)
def test_roofline(name, T, forward, backward):
    ours = roofline.roofline_seconds(SHAPES[name], T, H200)
    assert ours == (pytest.approx(forward * 1e-3, rel=0.02), pytest.approx(backward * 1e-3, rel=0.02))


def test_saved_bytes_are_two_tensors():
    shape = SHAPES["Qwen3-30B-A3B"]
    assert roofline.saved_bytes(shape, 1) == 2 * shape.D + 4 * shape.K * shape.H


def test_committed_predictions_are_current():
    path = roofline.Path(roofline.__file__).parents[1] / "benchmarks" / "kernel_predictions.md"
    assert path.read_text() == roofline.HEAD + roofline.prediction(roofline.H100) + "\n"


def test_dry_run(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    bench_gpu_layer.main(["--dry-run", "--shapes", "Qwen,FastMoE E64", "--out", str(out)])
    rows = json.loads(out.read_text())["results"]["rows"]
    ours = [row for row in rows if row["implementation"] == "fmoe_ext"]
    assert [(row["shape"], row["T"]) for row in ours] == [("Qwen3-30B-A3B", 24), ("FastMoE E64", 24)]
    for row in ours:
        assert row["bitwise_equal"]
        assert row["forward"]["median"] > 0 and row["backward"]["median"] > 0
        # one round here: the sum of its two parts
        assert row["both"]["median"] == pytest.approx(row["forward"]["median"] + row["backward"]["median"])
        # x and h, besides the indices and the weights of the choices
        small = 24 * row["K"] * (8 + 4 + 4 + 4) + 4 * row["E"]
        assert 0 <= row["saved_bytes"] - row["least_saved_bytes"] <= small
    others = [row for row in rows if row["implementation"] != "fmoe_ext"]
    assert {row["shape"] for row in others} == {"Qwen3-30B-A3B", "FastMoE E64"}
    assert all(row["difference"] < 0.05 for row in others)
    assert "FastMoE E64" in capsys.readouterr().out
    assert out.with_suffix(".md").exists()
    bench_gpu_layer.main(["--dry-run", "--shapes", "Qwen", "--routing", "zipf", "--merge", "--out", str(out)])
    merged = json.loads(out.read_text())["results"]["rows"]
    assert merged[: len(rows)] == rows
    assert {(row["shape"], row["routing"]) for row in merged[len(rows) :]} == {("Qwen3-30B-A3B", "zipf")}


def test_host_dry_run(tmp_path):
    out = tmp_path / "host.json"
    bench_gpu_host.main(["--dry-run", "--out", str(out)])
    rows = json.loads(out.read_text())["results"]["rows"]
    assert {row["step"] for row in rows} >= {
        "empty launch",
        "gate, forward",
        "gate, forward and backward",
        "FMoE, forward and backward",
    }
    assert all(row["T"] == 64 and row["seconds"]["runs"] == 3 and row["seconds"]["min"] > 0 for row in rows)


def test_kernels_dry_run_and_report(tmp_path):
    out = tmp_path / "kernels.json"
    bench_gpu_kernels.main(["--dry-run", "--shapes", "Qwen:16384", "--out", str(out)])
    rows = json.loads(out.read_text())["results"]["rows"]
    # A CPU has no kernels to profile.
    assert [row["kernel"] for row in rows] == [
        *(f"grouped_mm, {product}" for product in ("x w1^T", "dh w1", "dh^T x")),
    ] + [
        f"MXFP4 w1, {product}, decoded, {by}"
        for product in ("y", "dx")
        for by in ("grouped_gemm", "grouped_mm")
    ]
    assert all(row["seconds"]["runs"] == 3 and row["tflops"] > 0 and row["roofline"] > 0 for row in rows)
    with pytest.raises(SystemExit, match="Llama is not a part of the name of one shape: Mixtral-8x7B"):
        bench_gpu_kernels.shape_of("Llama:16")
    row = {"shape": "S", "T": 16, "kernel": "F1 up", "seconds": {"median": 2e-3}}
    text = bench_gpu_kernels.report(
        [row | {"tflops": 500.4, "tb_a_second": 1.234, "expected": 1e-3, "roofline": 5e-4}]
    )
    cells = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert cells == ["S", "16", "F1 up", "2.000", "500", "1.23", "1.000", "0.25"]


def test_run_gpu_limits_fit_into_nine_minutes():
    """The limits of the steps of run_gpu.sh without an option, where nothing has to be built."""
    text = (Path(bench_gpu_kernels.__file__).parent / "run_gpu.sh").read_text()
    functions = dict(re.findall(r"^(\w+)\(\) \{(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    limits = [
        int(limit)
        for name in ("build", "prove", "everything", "beside_sonicmoe")
        for step, limit in re.findall(r"(?:step|bench) (\w+) (\d+) ", functions[name])
        if (name, step, limit) not in (("build", "build", "600"), ("prove", "prove", "40"))
    ]
    assert len(limits) == 11 and sum(limits) <= 540


def test_main_grads_dry_run(tmp_path):
    out = tmp_path / "mains.json"
    bench_gpu_main_grads.main(["--dry-run", "--shapes", "Qwen3-30B-A3B", "--out", str(out)])
    ours, peer = json.loads(out.read_text())["results"]["rows"]
    assert ours["bitwise_equal"] and ours["backward"]["median"] > 0
    assert peer["implementation"] == "compiled grouped_mm, then added" and peer["difference"] < 0.05


def write_run(folder, peers):
    """Results as run_gpu.sh leaves them: ours takes 2 ms and 4 ms, the pipeline 3 and 3.8, SonicMoE 2.2 and 3.8."""

    def row(implementation, forward, backward):
        ms = {"forward": forward, "backward": backward, "both": forward + backward}
        parts = {part: {"median": t * 1e-3, "tflops": 500.0, "of_roofline": 0.7} for part, t in ms.items()}
        return {"shape": "Qwen3-30B-A3B", "T": 16384, "implementation": implementation, **parts}

    def write(name, results):
        machine = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"}
        content = {"machine": machine, "date": "2026-11-26", "commit": "0123456789", "results": results}
        (folder / f"{name}.json").write_text(json.dumps(content))

    ours, record = row("fmoe_ext", 2.0, 4.0), row(gpu_peers.RECORD, 3.0, 3.8)
    ceilings = {"flops": 770e12, "bandwidth": 2.99e12}
    write("gpu", {"rows": [ours, record], "ceilings": ceilings, "no_time_for": ["FastMoE E96 16384 random"]})
    write(
        "gpu_kernels",
        {"rows": [{"kernel": "F1 up", "expected": 1e-3, "seconds": {"median": 1.1e-3}}, {"kernel": "rest"}]},
    )
    (folder / "logs").mkdir()
    if peers:
        write("gpu_peers", {"rows": [ours, record, row("SonicMoE", 2.2, 3.8)]})
        (folder / "logs" / "prove.log").write_text("checking up\n\n8 proved, 4 slow\nkept in a.json\n")
    (folder / "logs" / "device.log").write_text("....\n40 passed, 2 skipped in 12.3s\n")


@pytest.mark.parametrize("peers", [True, False])
def test_sentences_of_a_gpu_run_are_written_into_the_pages(tmp_path, peers):
    run, root = tmp_path / "run", tmp_path / "root"
    for folder in (run, root / "docs"):
        folder.mkdir(parents=True)
    write_run(run, peers)
    for name in ("README.md", "docs/measurements.md"):
        (root / name).write_text((roofline.Path(roofline.__file__).parents[1] / name).read_text())
    gpu_sentences.main([str(run), "--root", str(root)])
    readme, measured = ((root / name).read_text() for name in ("README.md", "docs/measurements.md"))
    sonic = (
        "SonicMoE, its tuner restricted to one tile a product, "
        "takes 1.10 times our time forward, 0.95 backward, 1.00 in all (Qwen3-30B-A3B)."
        if peers
        else "SonicMoE was not measured."
    )
    said = (
        "* On an H100 a layer's forward runs at 1.50 times, its backward at 0.95 times the speed of a compiled "
        f"pipeline on grouped_mm (1 models, 16,384 tokens, bfloat16); {sonic}"
    )
    assert said in readme.splitlines() and said in measured.splitlines()
    section = measured.partition("## An H100\n")[2].partition("\n## ")[0]
    assert "\n## An H200\n" not in measured
    assert "Graphs, streams and no synchronisation: 40 passed, 2 skipped." in section
    assert "Two ranks on one GPU over NCCL: not finished." in section
    proved = "`prove`: 8 proved, 4 slow of 12 kernels" if peers else "No proof was finished."
    assert f"* {proved}" in section
    assert "median of the layers: F1 up 1.10" in section and "for want of time: FastMoE E96" in section
    assert ("Beside SonicMoE" in section) == peers
    assert "## A language model" in measured


def test_host_time_with_kernels_that_compute_nothing(tmp_path):
    """Every step runs over the stubs, in a process of its own: they take the place of the operators for good."""
    library = bench_host.build(tmp_path)
    found = bench_host.in_process(bench_host.ROOT, library, repetitions=3)
    assert set(found) >= {"layer", "layer, of 8 in a row", "gate", "experts"}
    assert all(1 < us < 1e6 for us in found.values())


def test_peers_that_tune_themselves_are_named_when_left_out():
    _, missing = gpu_peers.implementations(True, torch.zeros(2, 16, 8), torch.zeros(2, 8, 8), compiled=False)
    assert {name: missing[name] for name in gpu_peers.TUNING} == dict.fromkeys(
        gpu_peers.TUNING, "compiles for a minute and more a shape: --tuning"
    )


def test_needs_a_gpu_otherwise(monkeypatch, capsys):
    monkeypatch.setattr(bench_gpu_layer.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_gpu_layer.main([])
    assert "no CUDA device: use --dry-run" in capsys.readouterr().err
