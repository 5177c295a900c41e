"""Prunes, merges and heals a small MoE model by several criteria, and checks every step (make compress).

The model is made on the spot. The picture shows the loss on held-out text against the share of experts that are gone.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import peft
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext import compress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "finetune"))
import small

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KEPT = (0.75, 0.5, 0.25)
STYLES = {"merge": "s--", "healed": "^:"}
LABELS = {"merge": "REAP, merged", "healed": "REAP, healed; at 0 the whole model"}
MEMORY = "8MB"  # of the model, its files have 15 MB
SIMILAR = 0.5  # cosine of experts that are merged


class Checks:
    """Comparisons that have to hold; the script's status says if they did."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, holds: bool, text: str) -> None:
        print(f"{'ok    ' if holds else 'FAILED'} {text}", flush=True)
        self.failed += not holds


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def random_scores(file: Path, out: Path) -> Path:
    """The file of scores with random counts, so that pruning by frequency leaves random experts."""
    content = json.loads(file.read_text())
    generator = torch.Generator().manual_seed(0)
    for path, count in content["count"].items():
        content["count"][path] = (torch.randperm(len(count), generator=generator) + 1).tolist()
    out.write_text(json.dumps(content))
    return out


def prune_all(out: Path, tokens: torch.Tensor) -> dict[str, list[dict]]:
    """{curve: reports, one for each share that stays}; the text is read once."""
    scores = out / "scores.json"
    ways = {
        "REAP": {"criterion": "reap", "scores": scores},
        "frequency": {"criterion": "frequency", "scores": scores},
        "random": {"criterion": "frequency", "scores": out / "random.json"},
        "merge": {"criterion": "reap", "scores": scores, "merge": SIMILAR},
    }
    reports: dict[str, list[dict]] = {}
    for name, options in ways.items():
        if name == "random":
            random_scores(scores, out / "random.json")
        for keep in KEPT:
            folder = out / f"{name}_{keep}"
            common = {"keep": keep, "memory": MEMORY, "seq_len": 128, "held_out": 0.25}
            report = compress.prune(out / "model", folder, tokens, **common, **options)
            reports.setdefault(name, []).append(report)
            print(f"{name:10} keep {keep:.2f}: loss {report['loss_after']:.3f}", flush=True)
    return reports


def loss_of(model, ids: torch.Tensor) -> float:
    """Mean loss of sequences."""
    with torch.no_grad():
        return sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in ids) / len(ids)


def heal(folder: Path, adapter: Path, code: bytes, test: torch.Tensor, steps: int) -> float:
    """Trains adapters on a streamed folder, and saves them -> loss on the held-out text."""
    config = peft.LoraConfig(r=8, lora_alpha=16, target_parameters=EXPERTS)
    model = fmoe_ext.lora.fuse(peft.get_peft_model(fmoe_ext.stream(folder, "24MB"), config)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    for step in range(steps):
        ids = small.windows(code, 8, 128, seed=10_000 + step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    model.save_pretrained(adapter)
    return loss_of(model, test)


def draw(losses: dict[str, list[float]], file: Path) -> None:
    """losses: {curve: of the whole model, then of the shares in KEPT}."""
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    removed = [100 * (1 - keep) for keep in (1, *KEPT)]
    for name, values in losses.items():
        axes.plot(removed, values, STYLES.get(name, "o-"), label=LABELS.get(name, name))
    axes.set_title("Experts removed by REAP, by frequency, at random, or merged")
    axes.set(xlabel="experts removed (%)", ylabel="loss on held-out text (nats a token)", xticks=removed)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def check_packed(out: Path, tokens: torch.Tensor, check: Checks) -> None:
    """Prunes the model with experts in MXFP4: the bytes of those that stay are the same."""
    small.quantise(out / "model", out / "mxfp4")
    report = compress.prune(
        out / "mxfp4",
        out / "mxfp4_pruned",
        tokens,
        keep=0.5,
        seq_len=128,
        held_out=0.25,
        criterion="frequency",
    )
    before, after = (load_file(out / name / "model.safetensors") for name in ("mxfp4", "mxfp4_pruned"))
    same = all(
        torch.equal(after[f"{path}.{part}"], before[f"{path}.{part}"][layer["kept"]])
        for path, layer in report["layers"].items()
        for part in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")
    )
    check(same, "MXFP4 experts stay packed, byte for byte")


def run(options: argparse.Namespace, out: Path) -> int:
    code, _ = small.texts()
    small.make(out / "model", code, options.making_steps, alike=True)
    source = contents(out / "model")
    tokens = small.windows(code, 64, 128, seed=-1).flatten()
    reports = prune_all(out, tokens)
    check = Checks()
    check(contents(out / "model") == source, "the model's files are as they were")
    before = reports["REAP"][0]["loss_before"]
    losses = {name: [before, *(report["loss_after"] for report in found)] for name, found in reports.items()}
    for keep, ours, others in zip(KEPT, losses["REAP"][1:], losses["random"][1:], strict=True):
        # With a quarter every token takes all experts that stay: which ones do is chance in so small a model.
        if keep * small.SIZES["num_experts"] > small.SIZES["num_experts_per_tok"]:
            check(ours < others, f"keep {keep}: loss {before:.3f}, REAP {ours:.3f}, random {others:.3f}")
    merged = sum(len(layer["merged"]) for report in reports["merge"] for layer in report["layers"].values())
    check(merged > 0, f"{merged} experts were merged into others")
    test = tokens.view(-1, 128)[48:]
    # the whole model too: the steps that heal also train it further
    folders = [out / "model", *(out / f"REAP_{keep}" for keep in KEPT)]
    losses["healed"] = [
        heal(folder, out / f"adapter_{folder.name}", code, test, options.healing_steps) for folder in folders
    ]
    for keep, pruned, healed in zip((1, *KEPT), losses["REAP"], losses["healed"], strict=True):
        check(healed < pruned, f"keep {keep}: {pruned:.3f} -> healed {healed:.3f}")
    page = (out / "REAP_0.5/prune_report.html").read_text()
    check(all(path in page for path in reports["REAP"][1]["layers"]), "the page names every layer")
    check_packed(out, tokens, check)
    draw(losses, out / "compress.png")
    print(f"\nkeep       {''.join(f'{keep:10.2f}' for keep in (1, *KEPT))}")
    for name, values in losses.items():
        print(f"{name:11}{''.join(f'{value:10.3f}' for value in values)}")
    print(f"picture: {out / 'compress.png'}; page: {out / 'REAP_0.5/prune_report.html'}")
    return 1 if check.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="out/compress", help="folder to write; what is in it is removed")
    parser.add_argument("--making-steps", type=int, default=200, help="to make the small model")
    parser.add_argument("--healing-steps", type=int, default=40, help="of the adapters, for each share")
    options = parser.parse_args()
    out = Path(options.out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return run(options, out)


if __name__ == "__main__":
    sys.exit(main())
