"""Train a language model with mixture-of-experts layers: `python examples/lm/train.py --help`."""

import json
import math
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import fields

import checkpoint
import options as command_line
import report
import torch
from data import DataError, load_corpus
from model import ModelConfig, generate
from runs import DivergedError, Run
from tqdm import tqdm

import fmoe_ext
from fmoe_ext import cpu


class TrainError(Exception):
    """The run cannot start; the message says why."""


def choose_device(name):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and not fmoe_ext.ops.cuda_module_missing else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise TrainError("--device cuda: PyTorch finds no CUDA device here")
        if fmoe_ext.ops.cuda_module_missing:
            raise TrainError(f"--device cuda: {fmoe_ext.ops.cuda_module_missing}")
    return torch.device(name)


def choose_dtype(name, device):
    """auto: bfloat16 (autocast) where the hardware multiplies bfloat16 matrices."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        can = torch.cpu.get_capabilities()
        fast = any(can.get(feature) for feature in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if fast else torch.float32


@contextmanager
def noted_signals():
    """Yields a list that receives the number of the first SIGINT or SIGTERM; a second one acts at once."""
    received = []

    def note(number, frame):
        received.append(number)
        for other, handler in previous.items():
            signal.signal(other, handler)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def build_runs(options, device, dtype):
    names = ["moe", "dense"] if options.compare else ["dense"] if options.dense else ["moe"]
    shape = {
        field.name: getattr(options, field.name)
        for field in fields(ModelConfig)
        if field.name not in ("dense", "ep_size", "layer_options")
    }
    runs = [Run(name, ModelConfig(**shape, dense=name == "dense"), options, device, dtype) for name in names]
    torch.manual_seed(options.seed)  # what gates draw in training does not depend on which models were built
    return runs


def describe(run):
    total, active = (count / 1e6 for count in run.model.num_parameters())
    if run.name == "dense":
        return f"dense, {total:.1f} M parameters"
    config = run.model.config
    experts = f"top {config.top_k} of {config.num_experts} experts"
    return f"MoE, {experts}, {total:.1f} M parameters, {active:.1f} M active"


def train(options, runs, corpus, first_step, metrics_path):
    """Steps first_step .. --steps of all runs; returns (last step done, signal number or None)."""
    validation = corpus.validation_batches(options.batch_size, options.seq_len, options.val_windows)
    save_path = options.out / "checkpoint.pt"
    kept = command_line.settings(options)
    last = min(options.steps, options.stop_after or options.steps)
    step = first_step - 1
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; few lines where the output goes to a file
    bar = tqdm(total=options.steps, initial=step, unit="step", dynamic_ncols=True, mininterval=interval)
    with bar, noted_signals() as received, metrics_path.open("a") as metrics:
        while step < last and not received:
            step += 1
            inputs, targets = corpus.batch(step, options.batch_size, options.seq_len, options.seed)
            for run in runs:
                run.train_step(step, inputs, targets)
            with_validation = step % options.val_every == 0 or step == options.steps
            if with_validation or step % options.log_every == 0:
                records = [run.report(step) for run in runs]
                for run, record in zip(runs, records, strict=True):
                    if with_validation:
                        record["val_loss"] = run.validate(validation)
                        record["val_bits_per_byte"] = record["val_loss"] / math.log(2)
                    metrics.write(json.dumps(record) + "\n")
                metrics.flush()
                bar.set_postfix_str(progress(records), refresh=False)
            bar.update()
            if step % options.save_every == 0 and step < last:
                checkpoint.save(save_path, step, kept, runs)
        checkpoint.save(save_path, step, kept, runs)
    return step, received[0] if received else None


def progress(records):
    name = (lambda r: r["run"] + " ") if len(records) > 1 else (lambda r: "")
    return ", ".join(
        f"{name(r)}loss {r['loss']:.3f} {r['bits_per_byte']:.3f} bits/byte {r['tokens_per_second']} tokens/s"
        for r in records
    )


def write_pictures(options, runs, source, metrics_path):
    records = report.read_metrics(metrics_path)
    if not records:
        return
    report.draw_curve(records, {run.name: describe(run) for run in runs}, source, options.out / "curve.png")
    if any("expert_load" in record for record in records):
        report.draw_expert_load(records, options.out / "expert_load.png")


def write_samples(options, runs):
    texts = []
    prompt = options.prompt.encode()
    for run in runs:
        with run.autocast():
            text = generate(run.model, prompt, options.sample_bytes, options.seq_len, seed=options.seed)
        heading = f"--- {describe(run)}\n" if len(runs) > 1 else ""
        texts.append(heading + text.decode(errors="replace").replace("\0", "\n"))
    sample = "\n".join(texts) + "\n"
    (options.out / "sample.txt").write_text(sample)
    return sample


def prepare_folder(options, state, metrics_path):
    """A resumed run's metrics end at its checkpoint; a new run puts an earlier one's checkpoint aside."""
    options.out.mkdir(parents=True, exist_ok=True)
    if state is not None:
        checkpoint.cut_metrics(metrics_path, state["step"])
        return
    metrics_path.write_text("")
    earlier = options.out / "checkpoint.pt"
    if earlier.exists():
        os.replace(earlier, options.out / "checkpoint.old.pt")
        print(f"a new run: the earlier checkpoint is now {options.out / 'checkpoint.old.pt'}")


def run_job(options, state):
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    if device.type == "cpu" and cpu.can_keep_memory():
        cpu.keep_memory()
    dtype = choose_dtype(options.dtype, device)
    options.dtype = str(dtype).removeprefix("torch.")  # a resumed run computes with the same
    corpus = load_corpus(options.data, options.seq_len)
    metrics_path = options.out / "metrics.jsonl"
    prepare_folder(options, state, metrics_path)
    runs = build_runs(options, device, dtype)
    first_step = 1 + (checkpoint.restore(state, runs) if state else 0)

    print(f"data: {corpus.source}, {len(corpus.train):,} bytes, {len(corpus.valid):,} more for validation")
    for run in runs:
        print(f"model: {describe(run)}")
    print(f"{device}, {options.dtype}, {torch.get_num_threads()} threads; writing to {options.out}")

    step, interrupted = train(options, runs, corpus, first_step, metrics_path)
    write_pictures(options, runs, corpus.source, metrics_path)
    if step < options.steps:
        print(f"stopped after step {step} of {options.steps}: continue with --resume --out {options.out}")
        return 130 if interrupted else 0

    print("\n" + write_samples(options, runs))
    tokens = options.steps * options.batch_size * options.seq_len
    for record in report.read_metrics(metrics_path):
        if record["step"] == step:
            bits, seconds = record["val_bits_per_byte"], record["seconds"]
            print(
                f"{record['run']}: validation {bits:.4f} bits per byte, {seconds:.0f} s of training, ", end=""
            )
            print(f"{tokens / seconds:.0f} tokens/s")
    return 0


def main(argv=None):
    """Returns the exit status: 0 done, 1 cannot run, 130 interrupted and saved."""
    try:
        return run_job(*command_line.parse(argv))
    except (DataError, DivergedError, TrainError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted before the step was done; the last checkpoint stands", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
