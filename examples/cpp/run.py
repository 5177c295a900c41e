"""Build the C++ examples, train, generate, and repeat the training in Python: `make train-cpp`.

The C++ program trains on the text of `make train`. Python then starts from its first weights and must have the same
curve to the bit, and from its checkpoint in the middle, with its optimizer's state, the same end.
"""

import argparse
import csv
import math
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fmoe_ext import checkpoint, gates

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "lm"))

from data import load_corpus  # noqa: E402
from model import LanguageModel, ModelConfig  # noqa: E402

# As examples/cpp/model.h and train.cpp have them.
SIZES = {"d_model": 64, "num_layers": 3, "num_heads": 4, "num_experts": 16, "d_hidden": 64, "top_k": 2}
BATCH_SIZE, SEQ_LEN, SAVE_EVERY, WARMUP, PEAK_RATE, BALANCE_WEIGHT = 16, 128, 50, 20, 1e-2, 0.03


def build(folder):
    """The programs, built by CMake against the torch that runs this."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-DFMOE_EXAMPLES=ON", prefix], check=True)
    subprocess.run(["cmake", "--build", folder, "-j2", "--target", "train", "generate"], check=True)
    return folder / "examples" / "cpp"


def learning_rate(step, steps):
    if step <= WARMUP:
        return PEAK_RATE * step / WARMUP
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * ((step - WARMUP) / max(steps - WARMUP, 1))))


def resume(out, step):
    """The model and optimizer of the C++ program after a step."""
    model = LanguageModel(ModelConfig(**SIZES, gate="softmax"))
    folder = out / f"step-{step}"
    checkpoint.load(folder, model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    if step > 0:
        saved = load_file(folder / "optimizer.safetensors")
        for name, parameter in model.named_parameters():
            state = {entry: saved[f"{entry}.{name}"] for entry in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}
    return model, optimizer


def train(out, corpus, begin, end, steps):
    """Steps begin + 1 to end in Python -> (the model, {step: (loss, balance loss)})."""
    model, optimizer = resume(out, begin)
    curve = {}
    for step in range(begin + 1, end + 1):
        inputs, targets = corpus.batch(step, BATCH_SIZE, SEQ_LEN, seed=0)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        balance_loss = gates.total_loss(model)
        (loss + BALANCE_WEIGHT * balance_loss).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        curve[step] = loss.item(), balance_loss.item()
    return model, curve


def read_curve(path):
    with path.open() as file:
        rows = [(int(row["step"]), row["loss"], row["balance_loss"]) for row in csv.DictReader(file)]
    as_float32 = lambda text: torch.tensor(float(text)).item()  # noqa: E731
    return {step: (as_float32(loss), as_float32(balance)) for step, loss, balance in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of the training (default: 200)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/cpp"), help="folder for all files (default: out/cpp)"
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cpp", help="folder of the build")
    options = parser.parse_args()
    programs = build(options.build)
    corpus = load_corpus()
    options.out.mkdir(parents=True, exist_ok=True)
    # checkpoints of an earlier run, perhaps of another number of steps, would be resumed at other learning rates
    for folder in options.out.glob("step-*"):
        shutil.rmtree(folder)
    (options.out / "curve.csv").unlink(missing_ok=True)
    text = options.out / "text.bin"
    text.write_bytes(corpus.train.numpy().tobytes())
    subprocess.run([programs / "train", text, options.out, str(options.steps)], check=True)
    subprocess.run([programs / "generate", options.out / f"step-{options.steps}", "def "], check=True)

    expected = read_curve(options.out / "curve.csv")
    last = load_file(options.out / f"step-{options.steps}" / "model.safetensors")
    middle = options.steps // 2 // SAVE_EVERY * SAVE_EVERY
    for begin in sorted({0, middle}):
        model, curve = train(options.out, corpus, begin, options.steps, options.steps)
        same_curve = all(expected[step] == values for step, values in curve.items())
        same_model = all(torch.equal(last[name], value) for name, value in model.state_dict().items())
        if not (same_curve and same_model):
            different = next((step for step, values in curve.items() if expected[step] != values), None)
            sys.exit(f"Python from step {begin} differs from C++ (first step with another loss: {different})")
        print(f"Python from step {begin}: the same {len(curve)} losses and the same last weights to the bit")


if __name__ == "__main__":
    main()
