"""Fine-tunes a MoE model whose experts stay in their files, and checks every step (make finetune).

A small model is made, quantised to MXFP4, streamed, adapted, saved, loaded again, merged and compared. --model trains
adapters for a real one: python examples/finetune/finetune.py --model FOLDER --memory 8GiB --text FILE
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import peft
import small
import torch
import transformers

import fmoe_ext
from fmoe_ext.checkpoint.model_folder import Base
from fmoe_ext.checkpoint.packed import decode
from fmoe_ext.finetune.adapters.merge import merge
from fmoe_ext.finetune.adapters.reading import read_adapter

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


class Watch(transformers.TrainerCallback):
    """The loss and the memory at every step: of weights, of adapters with their state, of buffers, of the process."""

    def __init__(self, stream):
        self.stream, self.begun = stream, time.monotonic()
        self.steps, self.losses, self.seconds, self.resident, self.parts = [], [], [], [], []

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.steps.append(state.global_step)
            self.losses.append(float(logs["loss"]))

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        adapters = [p for p in model.parameters() if p.requires_grad]
        frozen = sum(map(num_bytes, self.stream.resident_tensors())) - sum(map(num_bytes, adapters))
        moments = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        grads = [p.grad for p in adapters if p.grad is not None]
        trained = sum(map(num_bytes, adapters + grads + moments))
        self.seconds.append(time.monotonic() - self.begun)
        self.resident.append(resident_bytes())
        self.parts.append((frozen, trained, self.stream.statistics.buffer_bytes))


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def resident_bytes() -> int:
    """Memory of this process, without pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def adapt(model, rank: int):
    """PEFT's adapters on all experts, computed beside the streamed weights."""
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_parameters=EXPERTS)
    return fmoe_ext.lora.fuse(peft.get_peft_model(model, config))


def train(model, ids: torch.Tensor, options: argparse.Namespace, out: Path) -> Watch:
    """Trains the adapters with Transformers' Trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=out / "trainer",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    watch = Watch(model.expert_stream)
    model.train()
    data = [{"input_ids": row, "labels": row} for row in ids]
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[watch]).train()
    model.gradient_checkpointing_disable()
    model.eval()
    return watch


@torch.no_grad()
def loss_of(model, ids: torch.Tensor) -> float:
    """Mean loss of some sequences."""
    return sum(model(input_ids=part, labels=part).loss.item() for part in ids.split(8)) / len(ids.split(8))


@torch.no_grad()
def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.float()


def draw(watch: Watch, before: float, after: float, in_files: int, memory: int, file: Path) -> None:
    """Loss over steps, and memory over time; that of the process where a model is larger than the program."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(watch.steps, watch.losses, color="C0", alpha=0.6, label="training batch")
    left.plot(
        [0, watch.steps[-1]], [before, after], "o--", color="C1", label="held-out text, before and after"
    )
    left.set(xlabel="step", ylabel="loss (nats a token)", title="Adapters on streamed experts")
    left.legend()
    mega = 2**20
    parts = [[value / mega for value in row] for row in zip(*watch.parts, strict=True)]
    labels = ("weights outside of the experts", "adapters, gradients, moments", "buffers for experts")
    right.stackplot(watch.seconds, parts, labels=labels, colors=("#9ecae1", "#fdd0a2", "#a1d99b"))
    right.axhline(in_files / mega, ls=":", color="C3", label="experts in the files")
    right.axhline(memory / mega, ls="--", color="0.4", label="memory= of stream()")
    if memory > 2**30:
        right.plot(watch.seconds, [value / mega for value in watch.resident], color="k", label="the process")
    right.set(xlabel="seconds", ylabel="MiB", title="Memory while training", ylim=(0, None))
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, fontsize=8)
    figure.savefig(file, dpi=120)


class Checks:
    """Comparisons that have to hold; the script's status says if they did."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, holds: bool, text: str) -> None:
        print(f"{'ok    ' if holds else 'FAILED'} {text}", flush=True)
        self.failed += not holds


def small_run(options: argparse.Namespace, out: Path) -> int:
    """The whole story with a small model -> exit status."""
    code, other = small.texts()
    small.make(out / "plain", code, options.making_steps)
    small.quantise(out / "plain", out / "model")
    check = Checks()
    model = fmoe_ext.stream(out / "model", options.memory)
    stream = model.expert_stream
    in_files = sum(layer.num_bytes(layer.num_experts) for layer in stream.pool.layers)
    held_out = small.windows(other, 32, 128, seed=-1)
    before = loss_of(model, held_out)
    model = adapt(model, options.rank)
    stream.reset_statistics()
    watch = train(model, small.windows(other, options.steps * options.batch, 128, seed=1), options, out)
    found = stream.statistics
    hidden = found.hidden_share
    after = loss_of(model, held_out)
    check(after < before - 0.15, f"loss of the held-out text {before:.3f} -> {after:.3f}")
    num_layers = len(stream.pool.layers)
    reads = found.layers_read / options.steps
    check(reads <= 2 * num_layers, f"{reads:.1f} reads of a layer a step, at most {2 * num_layers}")
    check(found.buffer_bytes < in_files / 2, f"buffers {found.buffer_bytes:,} bytes, files {in_files:,}")
    ids = held_out[:4]
    expected = logits_of(model, ids)
    model.save_pretrained(out / "adapter")
    again = peft.PeftModel.from_pretrained(fmoe_ext.stream(out / "model", options.memory), out / "adapter")
    fmoe_ext.lora.fuse(again)
    check(torch.equal(logits_of(again, ids), expected), "saved and loaded again: logits equal to the bit")
    check(*_merged(out, ids, expected))
    prompt, generated = held_out[:1, :32], {"max_new_tokens": 32, "do_sample": False}
    same = torch.equal(model.generate(prompt, **generated), again.generate(prompt, **generated))
    found = again.expert_stream.statistics
    check(same, f"generated the same text twice; {found.bytes_per_token:,.0f} bytes read a token")
    draw(watch, before, after, in_files, stream.memory, out / "finetune.png")
    print(f"picture: {out / 'finetune.png'}; {hidden:.2f} of the time of reading was hidden")
    return 1 if check.failed else 0


def _merged(out: Path, ids: torch.Tensor, expected: torch.Tensor) -> tuple[bool, str]:
    """Merges into bfloat16, loads that without fmoe_ext, and compares logits."""
    base = Base(out / "model")
    decode(base)
    report = merge(read_adapter(out / "adapter"), base, out / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "merged", dtype="auto").eval()
    error = ((logits_of(merged, ids) - expected).norm() / expected.norm()).item()
    lost = report["lost_share_median"]
    return (
        error < 0.03,
        f"merged into bfloat16: logits differ by {error:.4f}, rounding took {lost:.3f} of a change",
    )


def real_run(options: argparse.Namespace, out: Path) -> int:
    """Adapters for the model in a folder, on a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
    ids = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    if len(ids) < 2:
        sys.exit(f"error: {options.text} has fewer than {2 * options.length} tokens")
    model = fmoe_ext.stream(options.model, options.memory)
    stream = model.expert_stream
    in_files = sum(layer.num_bytes(layer.num_experts) for layer in stream.pool.layers)
    held_out = ids[-max(1, len(ids) // 20) :][:4]
    before = loss_of(model, held_out)
    model = adapt(model, options.rank)
    stream.reset_statistics()
    watch = train(model, ids[: -len(held_out)], options, out)
    after = loss_of(model, held_out)
    model.save_pretrained(out / "adapter")
    draw(watch, before, after, in_files, stream.memory, out / "finetune.png")
    found = stream.statistics
    print(
        f"loss of the held-out text {before:.3f} -> {after:.3f}; hidden share of reading {found.hidden_share:.2f}"
    )
    print(f"adapter: {out / 'adapter'}; picture: {out / 'finetune.png'}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a model, else a small one is made")
    parser.add_argument("--memory", help='of stream(), like "8GiB"; "auto" with --model')
    parser.add_argument("--text", help="file to learn, with --model")
    parser.add_argument("--out", default="out/finetune", help="folder to write; what is in it is removed")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence, with --model")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--making-steps", type=int, default=200, help="to make the small model")
    options = parser.parse_args()
    if options.model and not options.text:
        parser.error("--model needs --text FILE")
    options.memory = options.memory or ("auto" if options.model else "6.5MB")
    out = Path(options.out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return real_run(options, out) if options.model else small_run(options, out)


if __name__ == "__main__":
    sys.exit(main())
