"""Fine-tunes a MoE model whose experts stay in their files, and checks every step (make finetune).

A small model is made, quantised to MXFP4, streamed, adapted, saved, loaded again, merged and compared. --limit 320MiB
makes a larger one and trains it in a process that may not have the memory for its experts. --model trains adapters for
a real one: python examples/finetune/finetune.py --model FOLDER --memory 8GiB --text FILE
"""

import argparse
import multiprocessing
import resource
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
from transformers import Trainer  # is imported when it is asked for: here, its memory is the program's

import fmoe_ext
from fmoe_ext.checkpoint.expert_layers import decode
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.finetune.adapters.merge import merge
from fmoe_ext.finetune.adapters.reading import read_adapter
from fmoe_ext.memory import bytes_of_text

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# Of the model that --limit trains: 361 MB of experts. A dense one learns, and its MLPs are copied into 128 experts.
LARGER = {
    **{"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "num_key_value_heads": 2},
    **{"head_dim": 64, "moe_intermediate_size": 384, "num_experts": 1, "num_experts_per_tok": 1},
}


class Watch(transformers.TrainerCallback):
    """Keep, for draw(), each step's loss and memory: of weights, adapters with their state, buffers and the process.

    program: bytes that the process had before it opened the model.
    """

    def __init__(self, stream, program):
        self.stream, self.program, self.begun = stream, program, time.monotonic()
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
        self.resident.append(bytes_of_process("RssAnon") - self.program)
        self.parts.append((frozen, trained, self.stream.statistics.buffer_bytes))


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bytes_of_process(field: str) -> int:
    """RssAnon is the process's memory without pages of files, VmData what RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def adapt(model, rank: int):
    """PEFT's adapters on all experts, computed beside the streamed weights."""
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_parameters=EXPERTS)
    return fmoe_ext.lora.fuse(peft.get_peft_model(model, config))


def train(model, ids: torch.Tensor, options: argparse.Namespace, out: Path, program: int = 0) -> Watch:
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
    watch = Watch(model.expert_stream, program)
    model.train()
    data = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model, arguments, train_dataset=data, callbacks=[watch]).train()
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


def draw(
    watch: Watch, before: float, after: float, in_files: int, memory: int, file: Path, limit: int = 0
) -> None:
    """Loss over steps, and memory over time; the process's where a model is larger than the program."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    left.plot(watch.steps, watch.losses, color="C0", alpha=0.6, label="training batch")
    ends = [0, watch.steps[-1]]
    left.plot(ends, [before, after], "o--", color="C1", label="held-out text, before and after")
    left.set(xlabel="step", ylabel="loss (nats a token)", title="Adapters learn, experts stay in their files")
    left.legend(frameon=False)
    mega = 1e6
    parts = [[value / mega for value in row] for row in zip(*watch.parts, strict=True)]
    labels = ("weights outside of the experts", "adapters, gradients, moments", "buffers for experts")
    right.stackplot(watch.seconds, parts, labels=labels, colors=("#9ecae1", "#fdd0a2", "#a1d99b"))
    right.axhline(in_files / mega, color="C3", label="experts in the files")
    right.axhline(memory / mega, ls="--", color="0.4", label="memory= of stream()")
    if limit or memory > 2**30:
        grown = [value / mega for value in watch.resident]
        right.plot(watch.seconds, grown, color="k", label="memory that the process took")
    if limit:
        right.axhline(limit / mega, ls=":", color="k", label="limit of the process (RLIMIT_DATA)")
    right.set(xlabel="seconds of training", ylabel="MB", title="Memory while training", ylim=(0, None))
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
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
    base = ModelFolder(out / "model")
    decode(base)
    report = merge(read_adapter(out / "adapter"), base, out / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "merged", dtype="auto").eval()
    error = ((logits_of(merged, ids) - expected).norm() / expected.norm()).item()
    lost = report["lost_share_median"]
    return (
        error < 0.03,
        f"merged into bfloat16: logits differ by {error:.4f}, rounding took {lost:.3f} of a change",
    )


def make_larger(out: Path, steps: int) -> None:
    small.make(out / "plain", small.texts()[0], steps, **LARGER)
    small.upcycle(out / "plain", num_experts=128, top_k=2)
    small.quantise(out / "plain", out / "model")


def limited_run(options: argparse.Namespace, out: Path) -> int:
    """Trains in a process that cannot allocate as many bytes as the experts have in their files -> exit status."""
    # the model is made in another process: this one's memory is counted
    maker = multiprocessing.get_context("fork").Process(target=make_larger, args=(out, options.making_steps))
    maker.start()
    maker.join()
    if maker.exitcode:
        sys.exit("error: the model was not made")
    _, other = small.texts()
    held_out = small.windows(other, 32, 128, seed=-1)
    data = small.windows(other, options.steps * options.batch, 128, seed=1)
    check, limit = Checks(), bytes_of_text(options.limit)
    program = bytes_of_process("RssAnon")
    allowed = bytes_of_process("VmData") + limit
    model = fmoe_ext.stream(out / "model", options.memory)
    stream = model.expert_stream
    # an allocation beyond it fails; not before: stream() maps the file once to read its header, and a map counts too
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    in_files = sum(layer.num_bytes(layer.num_experts) for layer in stream.pool.layers)
    check(limit < in_files, f"the process may take {limit:,} bytes, its experts have {in_files:,} in files")
    before = loss_of(model, held_out)
    model = adapt(model, options.rank)
    stream.reset_statistics()
    watch = train(model, data, options, out, program)
    found = stream.statistics
    after = loss_of(model, held_out)
    model.save_pretrained(out / "adapter")
    check(after < before - 0.15, f"loss of the held-out text {before:.3f} -> {after:.3f}")
    reads, most = found.bytes_read / options.steps, max(watch.resident)
    check(reads <= 2.1 * in_files, f"{reads:,.0f} bytes read a step, at most 2.1 times the experts'")
    check(most < limit, f"the process took {most:,} bytes at most, its buffers {found.buffer_bytes:,}")
    draw(watch, before, after, in_files, stream.memory, out / "finetune.png", limit)
    print(
        f"picture: {out / 'finetune.png'}; {found.hidden_share:.2f} of the time of reading was hidden; "
        f"{watch.seconds[-1]:.0f} s of training"
    )
    return 1 if check.failed else 0


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
    num_held_out = min(4, max(1, len(ids) // 20))
    data, held_out = ids[:-num_held_out], ids[-num_held_out:]
    before = loss_of(model, held_out)
    model = adapt(model, options.rank)
    stream.reset_statistics()
    watch = train(model, data, options, out)
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
    parser.add_argument(
        "--limit", help='makes a larger model, and holds the process to so much memory, like "320MiB"'
    )
    parser.add_argument("--memory", help='of stream(), like "8GiB"; "auto" with --model')
    parser.add_argument("--text", help="file to learn, with --model")
    parser.add_argument("--out", default="out/finetune", help="folder to write; what is in it is removed")
    parser.add_argument("--rank", type=int, help="of the adapters: 4; 1 with --limit")
    parser.add_argument("--steps", type=int, help="60; 30 with --limit")
    parser.add_argument("--batch", type=int, help="sequences of a step: 8; 4 with --limit")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence, with --model")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--making-steps", type=int, help="to make the model: 200; 60 with --limit")
    options = parser.parse_args()
    if options.model and not options.text:
        parser.error("--model needs --text FILE")
    if options.model and options.limit:
        parser.error("--limit is of the model that is made here; --model FOLDER takes --memory")
    options.memory = options.memory or ("auto" if options.model else "160MB" if options.limit else "6.5MB")
    options.rank = options.rank or (1 if options.limit else 4)
    options.batch = options.batch or (4 if options.limit else 8)
    options.steps = options.steps or (30 if options.limit else 60)
    options.making_steps = options.making_steps or (60 if options.limit else 200)
    out = Path(options.out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run = real_run if options.model else limited_run if options.limit else small_run
    return run(options, out)


if __name__ == "__main__":
    sys.exit(main())
