"""Write what `benchmarks/run_gpu.sh` measured into README.md and docs/measurements.md, whichever way it fell.

    python -m benchmarks.gpu_sentences FOLDER      the run's results, with --peers' where they are

Replaces README's line about a GPU's layers, the same line of docs/measurements.md and its first section that is named
after a GPU ("An H200"). Figures that a run lacks are named as not measured.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

from benchmarks.common import table
from benchmarks.gpu_peers import RECORD

ROOT = Path(__file__).parents[1]
BULLET = re.compile(r"^\* On an? [A-Z]+\d+ a layer's forward .*$", re.MULTILINE)
SECTION = re.compile(r"^## An? [A-Z]+\d+\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
PARTS = ("forward", "backward", "both")


def load(folder, name):
    """The content of FOLDER/NAME.json; None if the run did not come so far."""
    path = Path(folder, f"{name}.json")
    return json.loads(path.read_text()) if path.exists() else None


def ratios(rows, peer, part):
    """{shape: the peer's time over ours}"""
    of = {}
    for row in rows:
        of.setdefault(row["shape"], {})[row["implementation"]] = row[part]["median"]
    return {shape: t[peer] / t["fmoe_ext"] for shape, t in of.items() if peer in t and "fmoe_ext" in t}


def span(values):
    low, high = (f"{bound(values):.2f}" for bound in (min, max))
    return low if low == high else f"{low} to {high}"


def device(layers):
    """The GPU with its article: "an H200"."""
    name = re.search(r"[A-Z]+\d+", layers["machine"]["gpu"].replace("NVIDIA", "")).group()
    return f"{'an' if name[0] in 'AHLR' else 'a'} {name}"


def bullet(layers, peers):
    """README's line."""
    forward, backward = (ratios(layers["results"]["rows"], RECORD, part) for part in PARTS[:2])
    text = (
        f"* On {device(layers)} a layer's forward runs at {span(forward.values())} times, its backward at "
        f"{span(backward.values())} times the speed of a compiled pipeline on grouped_mm ({len(forward)} models, "
        "16,384 tokens, bfloat16); "
    )
    if not peers:
        return text + "SonicMoE was not measured."
    forward, backward, both = (ratios(peers["results"]["rows"], "SonicMoE", part) for part in PARTS)
    return text + (
        f"SonicMoE, its tuner restricted to one tile a product, "
        f"takes {span(forward.values())} times our time forward, {span(backward.values())} backward, "
        f"{span(both.values())} in all ({', '.join(both)})."
    )


def layer_table(rows):
    peers = [name for name in dict.fromkeys(row["implementation"] for row in rows) if name != "fmoe_ext"]
    lines = []
    for row in (row for row in rows if row["implementation"] == "fmoe_ext"):
        line = [row["shape"]]
        for part in PARTS[:2]:
            line += [f"{row[part]['median'] * 1e3:.2f}", f"{row[part]['tflops']:.0f}"]
            of = {peer: ratios(rows, peer, part).get(row["shape"]) for peer in peers}
            line.append(" / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in of.values()))
        lines.append([*line, f"{row['both']['of_roofline']:.2f}"])
    header = ["model"]
    for part in PARTS[:2]:
        header += [f"{part} ms", "TFLOP/s", "times ours"]
    return f'Peers, in the order of the columns "times ours": {"; ".join(peers)}.\n\n' + table(
        [*header, "of roofline"], lines
    )


def kernel_sentence(rows):
    """Times over those of benchmarks/kernel_predictions.md."""
    of = {}
    for row in rows:
        if row.get("expected") and "main gradients" not in row["kernel"]:
            of.setdefault(row["kernel"], []).append(row["seconds"]["median"] / row["expected"])
    parts = [f"{name} {statistics.median(found):.2f}" for name, found in of.items()]
    return f"Time over the prediction, median of the layers: {', '.join(parts)} (`benchmarks/results/gpu_kernels.md`)."


def main_grads_sentence(rows):
    ours = {row["shape"]: row["backward"]["median"] for row in rows if row["implementation"] == "fmoe_ext"}
    others = [row for row in rows if row["implementation"] != "fmoe_ext"]
    said = [
        f"{row['shape']} {ours[row['shape']] * 1e3:.2f} ms, the compiled pipeline that adds afterwards "
        f"{row['backward']['median'] / ours[row['shape']]:.2f} times as long"
        for row in others
    ]
    return f"Backward into float32 main gradients: {'; '.join(said)}."


def host_sentence(rows):
    at = {(row["T"], row["step"]): row["seconds"]["median"] * 1e6 for row in rows if "seconds" in row}
    name = "FMoE, forward and backward"
    said = [f"{us:,.0f} microseconds at {T:,} tokens" for (T, step), us in at.items() if step == name]
    graph = [f"{us:,.0f}" for (_, step), us in at.items() if step == f"{name}, CUDA graph"]
    text = f"The host needs {', '.join(said)} for a step of `FMoE` (OLMoE-1B-7B)"
    return text + (f"; as a CUDA graph {', '.join(graph)}." if graph else ".")


def proof_sentence(folder):
    path = Path(folder, "logs", "prove.log")
    counts = re.findall(r"^\d+ proved.*$", path.read_text(), re.MULTILINE) if path.exists() else []
    if not counts:
        return "No proof was finished."
    number = sum(map(int, re.findall(r"\d+", counts[-1])))
    return f"`prove`: {counts[-1]} of {number} kernels, the portable ones counted as one."


def log_sentence(folder, name, what):
    """The last line of a step's pytest."""
    path = Path(folder, "logs", f"{name}.log")
    found = (
        re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped).*?) in ", path.read_text(), re.MULTILINE)
        if path.exists()
        else []
    )
    return f"{what}: {found[-1]}." if found else f"{what}: not finished."


def section(folder):
    """The section of docs/measurements.md."""
    layers, kernels = load(folder, "gpu"), load(folder, "gpu_kernels")
    mains, host, peers = (load(folder, name) for name in ("gpu_main_grads", "gpu_host", "gpu_peers"))
    machine, ceilings = layers["machine"], layers["results"]["ceilings"]
    lines = [
        f"* {proof_sentence(folder)}",
        f"* {log_sentence(folder, 'device', 'Graphs, streams and no synchronisation')}",
        f"* {log_sentence(folder, 'nccl', 'Two ranks on one GPU over NCCL')}",
        f"* A large product: {ceilings['flops'] / 1e12:.0f} TFLOP/s; a copy: {ceilings['bandwidth'] / 1e12:.2f} TB/s.",
    ]
    for content, sentence in (
        (kernels, kernel_sentence),
        (mains, main_grads_sentence),
        (host, host_sentence),
    ):
        if content:
            lines.append(f"* {sentence(content['results']['rows'])}")
    if missing := layers["results"]["no_time_for"]:
        lines.append(f"* Not measured, for want of time: {', '.join(missing)}.")
    text = [
        f"## A{device(layers)[1:]}",
        "",
        f"`benchmarks/run_gpu.sh`, {machine['gpu']}, torch {machine['torch']}, {layers['date']}, commit "
        f"{layers['commit']}, bfloat16; tokens choose their experts at random.",
        "",
        *lines,
        "",
        "![TFLOP/s of a layer, forward on the left and backward on the right](pictures/gpu.png)",
        "",
        'Routing and experts, 16,384 tokens, medians of three interleaved rounds. "Compiled grouped_mm" has one pass '
        "each for gather, activation and combine, forward and backward (`benchmarks/gpu_peers.py`).",
        "",
        layer_table(layers["results"]["rows"]),
        "",
    ]
    if peers:
        text += [
            "Beside SonicMoE 0.1.2.post1, in a run of its own, its tuner restricted to one tile a product (128 x 192):",
            "",
            layer_table(peers["results"]["rows"]),
            "",
        ]
    return "\n".join(text) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree whose pages are written")
    args = parser.parse_args(argv)
    line = bullet(load(args.folder, "gpu"), load(args.folder, "gpu_peers"))
    for name in ("README.md", "docs/measurements.md"):
        path = args.root / name
        text, count = BULLET.subn(lambda _: line, path.read_text())
        if count != 1:
            raise SystemExit(
                f"{name} has {count} lines that say how fast a layer's forward is on a GPU, not one"
            )
        if name.startswith("docs"):
            text, count = SECTION.subn(lambda _: section(args.folder), text, count=1)
            if count != 1:
                raise SystemExit(f"{name} has no section named after a GPU before another one")
        path.write_text(text)
    print(line)


if __name__ == "__main__":
    main()
