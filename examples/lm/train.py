"""Train a language model with mixture-of-experts layers: `python examples/lm/train.py --help`.

run_job() makes the ranks, the text and the Trainer (trainer.py), and finish() what is written at the end: pictures, a
sample, figures. README.md beside it lists the other files.
"""

import sys
from argparse import Namespace

import metrics
import options as command_line
import saving
import torch
from data import DataError, load_corpus
from job import Job, JobError, choose_device, choose_dtype
from metrics import MetricsError
from model import generate
from runs import DivergedError, Run
from settings_file import SettingsFileError, expand
from trainer import Trainer, TrainerError

from fmoe_ext import checkpoint, cpu
from fmoe_ext.balance.page import render
from fmoe_ext.balance.report import summarize_logs


def describe(run: Run) -> str:
    total, active = (count / 1e6 for count in run.model.whole.num_parameters())
    if run.name == "dense":
        return f"dense, {total:.1f} M parameters"
    config = run.model.whole.config
    experts = f"top {config.top_k} of {config.num_experts} experts"
    return f"MoE, {experts}, {total:.1f} M parameters, {active:.1f} M active"


def describe_ranks(job: Job, options: Namespace) -> str:
    if not job.is_spread:
        return f"{torch.get_num_threads()} threads"
    copies = "sharded (FSDP2)" if options.data_parallel == "fsdp2" else "copied"
    stages = f"layers over {job.num_stages}, " if job.num_stages > 1 else ""
    return f"{job.size} ranks, {stages}experts over {job.ep_size}, the rest {copies}"


def write_pictures(trainer: Trainer) -> None:
    import report  # matplotlib, which a rank that draws nothing need not load

    out, runs = trainer.options.out, trainer.runs
    records = metrics.read(out / "metrics.jsonl")
    if not records:
        return
    report.draw_curve(
        records, {run.name: describe(run) for run in runs}, trainer.corpus.source, out / "curve.png"
    )
    if any("expert_load" in record for record in records):
        report.draw_expert_load(records, out / "expert_load.png")
    if trainer.choices and trainer.choices.path.exists():
        page = render(summarize_logs([trainer.choices.path]), {byte: chr(byte) for byte in range(256)})
        (out / "choices.html").write_text(page, encoding="utf-8")


def make_sample(trainer: Trainer) -> str:
    """A text of every model; all ranks generate it, because the experts may be anywhere."""
    options, texts = trainer.options, []
    for run in trainer.runs:
        text = generate(
            run.model.logits,
            options.prompt.encode(),
            options.sample_bytes,
            options.seq_len,
            trainer.job.device,
            seed=options.seed,
        )
        heading = f"--- {describe(run)}\n" if len(trainer.runs) > 1 else ""
        texts.append(heading + text.decode(errors="replace").replace("\0", "\n"))
    return "\n".join(texts) + "\n"


def print_results(trainer: Trainer) -> None:
    options = trainer.options
    tokens = options.steps * options.batch_size * options.seq_len
    for record in metrics.read(options.out / "metrics.jsonl"):
        if record["step"] == trainer.step:
            bits, seconds = record["val_bits_per_byte"], record["seconds"]
            print(f"{record['run']}: validation {bits:.4f} bits per byte, ", end="")
            print(f"{seconds:.0f} s of training, {tokens / seconds:.0f} tokens/s")


def finish(trainer: Trainer, interrupted: bool) -> int:
    """Pictures, sample and figures -> the exit status."""
    options, is_first = trainer.options, trainer.job.is_first
    is_done = trainer.step == options.steps
    sample = make_sample(trainer) if is_done else ""
    if is_first:
        write_pictures(trainer)
    if trainer.profile:
        trainer.profile.write(options.out)
    if is_first and is_done:
        (options.out / "sample.txt").write_text(sample)
        print("\n" + sample)
        print_results(trainer)
    elif is_first:
        print(
            f"stopped after step {trainer.step} of {options.steps}: continue with --resume --out {options.out}"
        )
    return 130 if interrupted and not is_done else 0


def run_job(options: Namespace, resumes: bool, job: Job) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    job.set_layout(command_line.ep_size_of(options, job), options.pp)
    if job.device.type == "cpu" and cpu.can_keep_memory():
        cpu.keep_memory()
    dtype = choose_dtype(options.dtype, job.device)
    options.dtype = str(dtype).removeprefix("torch.")  # a resumed run computes with the same
    corpus = load_corpus(options.data, options.seq_len)
    job.from_first(lambda: saving.prepare(options.out, command_line.settings(options), resumes))
    trainer = Trainer(options, job, corpus, dtype)
    if resumes:
        trainer.resume()
    if job.is_first:
        print(
            f"data: {corpus.source}, {len(corpus.train):,} bytes, {len(corpus.valid):,} more for validation"
        )
        for run in trainer.runs:
            print(f"model: {describe(run)}")
        print(f"{job.device}, {options.dtype}, {describe_ranks(job, options)}; writing to {options.out}")
    return finish(trainer, bool(trainer.train()))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 cannot run, 130 interrupted and saved."""
    try:
        argv = expand(command_line.build_parser(), sys.argv[1:] if argv is None else argv)
        job = Job(choose_device(command_line.device_of(argv)))
        options, resumes = command_line.parse(argv, job)
        status = run_job(options, resumes, job)
        job.end()
        return status
    except (
        SettingsFileError,
        DataError,
        DivergedError,
        JobError,
        MetricsError,
        OSError,
        saving.SettingsError,
        TrainerError,
        checkpoint.CheckpointError,
    ) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted before the step was done; the last checkpoint stands", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
