"""The command line of train.py: parse() -> options, checked against each other and against the ranks of the job.

A resumed run takes its options from settings.json; only those in FREE_TO_CHANGE may be given otherwise.
"""

import argparse
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import saving
from job import Job

from fmoe_ext.gates import GATES, find_gate

# What a resumed run may change: where and how it runs and what it writes, and how long the schedule is.
FREE_TO_CHANGE = {
    "threads", "steps", "save_every", "sample_bytes", "prompt",
    "expert_parallel", "data_parallel", "overlap_degree", "pp", "chunks", "accumulate",
    "tensorboard", "profile", "peak_flops",
}  # fmt: skip

# Sizes by name: what they change of the options' defaults. Only tiny was trained for its figures; the others have the
# shapes of published models of their size, and batches and learning rates as usual there.
SIZES = {
    "tiny": {},
    "small": {
        **{"d_model": 384, "num_layers": 8, "num_heads": 6, "num_experts": 32, "d_hidden": 192, "top_k": 4},
        **{"batch_size": 32, "seq_len": 512, "lr": 1e-3, "warmup": 200, "steps": 5000, "moe_every": 1},
    },
    "medium": {
        **{"d_model": 768, "num_layers": 12, "num_heads": 12, "num_experts": 64, "d_hidden": 384, "top_k": 8},
        **{"batch_size": 256, "seq_len": 1024, "lr": 6e-4, "warmup": 1000, "steps": 20000, "moe_every": 1},
    },
    "large": {
        **{
            "d_model": 2048,
            "num_layers": 16,
            "num_heads": 16,
            "num_experts": 64,
            "d_hidden": 1024,
            "top_k": 8,
        },
        **{"batch_size": 512, "seq_len": 2048, "lr": 4e-4, "warmup": 2000, "steps": 100000, "moe_every": 1},
    },
}

DESCRIPTION = """\
Train a byte-level language model with mixtures of experts.

One process, or as many as torchrun starts:

  python examples/lm/train.py
  torchrun --nproc-per-node 8 examples/lm/train.py --data-parallel fsdp2
  torchrun --nproc-per-node 8 --max-restarts 3 examples/lm/train.py --resume auto

Written to --out: metrics.jsonl, checkpoints, curve.png, expert_load.png, sample.txt.
Ctrl-C (or SIGTERM) finishes the step, saves, draws and exits with status 130;
--resume continues: bit for bit on as many ranks, with the same batches on any other number.
"""


DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float64")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def non_negative_int(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def seed(text: str) -> int:
    value = non_negative_int(text)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"{value} is not below 2^32")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a number >= 0")
    return value


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="train.py", description=DESCRIPTION, formatter_class=HelpFormatter, allow_abbrev=False
    )
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML lines `option: value`; the command line wins")
    add("--data", help="text file, folder or WikiText-style files; none: Python's standard library")
    add("--out", type=Path, default=Path("out/lm"), help="folder for everything that is written")
    add(
        "--resume",
        nargs="?",
        choices=("must", "auto"),
        const="must",
        help="continue the run in --out with its settings; auto: begin one where there is no checkpoint",
    )
    add("--dense", action="store_true", help="train the dense model with the same active parameters instead")
    add("--compare", action="store_true", help="train both on the same batches and draw both curves")
    add("--device", choices=DEVICES, default="auto", help="auto: cuda where there is one")
    add("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 if fast; bfloat16 is autocast")
    add("--threads", type=positive_int, help="CPU threads (none: PyTorch's choice)")
    add("--seed", type=seed, default=0, help="of the weights, the batches and the sample")

    group = parser.add_argument_group("ranks")
    add = group.add_argument
    add(
        "--expert-parallel",
        type=auto_or_positive_int,
        default="auto",
        metavar="M",
        help="ranks that share the experts of a layer; auto: as many of a machine's as divide them",
    )
    add(
        "--data-parallel",
        choices=("ddp", "fsdp2"),
        default="ddp",
        help="what is not shared: copied, or sharded with its gradients and optimizer state",
    )
    add("--pp", type=positive_int, default=1, metavar="N", help="stages of a pipeline that share the layers")
    add("--chunks", type=positive_int, default=4, help="microbatches that are under way in a pipeline")
    add(
        "--overlap-degree",
        type=positive_int,
        default=1,
        help="parts of the exchange that overlap with experts",
    )

    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", choices=tuple(SIZES), default="tiny", help="a size by name; the options below change it")
    add("--d-model", type=positive_int, default=64, help="width")
    add("--num-layers", type=positive_int, default=3, help="blocks of attention and MLP")
    add("--num-heads", type=positive_int, default=4, help="attention heads")
    add(
        "--moe-every",
        type=positive_int,
        default=2,
        metavar="N",
        help="blocks N, 2 N, ... have experts, the others a dense MLP (Switch Transformer: 2)",
    )
    add("--num-experts", type=positive_int, default=32, help="experts of a block that has some")
    add("--d-hidden", type=positive_int, default=64, help="hidden width of one expert")
    add("--top-k", type=positive_int, default=2, help="experts that each token visits")
    add(
        "--gate",
        choices=tuple(GATES),
        default="softmax",
        help="how experts are chosen; expert_choice sees later bytes",
    )

    group = parser.add_argument_group("training")
    add = group.add_argument
    add(
        "--steps", type=positive_int, default=2500, help="length of the run and of the learning-rate schedule"
    )
    add("--stop-after", type=positive_int, help="save and exit after this step, as if interrupted there")
    add("--batch-size", type=positive_int, default=16, help="windows in a batch")
    add(
        "--accumulate",
        type=positive_int,
        default=1,
        metavar="N",
        help="microbatches of a batch, one after another: less memory, one more forward",
    )
    add("--seq-len", type=positive_int, default=128, help="bytes in a window")
    add(
        "--data-order",
        choices=("random", "epochs"),
        default="random",
        help="random: each window begins anywhere; epochs: no byte twice before all were read once",
    )
    add("--lr", type=positive_float, default=1e-2, help="peak learning rate")
    add("--warmup", type=non_negative_int, default=50, help="steps of linear warm-up before the cosine")
    add("--weight-decay", type=non_negative_float, default=0.1, help="on matrices only")
    add("--clip", type=positive_float, default=1.0, help="largest norm of the gradient")
    add("--balance-weight", type=non_negative_float, default=0.03, help="of the gates' balance loss")

    group = parser.add_argument_group("reports")
    add = group.add_argument
    add("--log-every", type=positive_int, default=10, help="steps between lines of metrics.jsonl")
    add(
        "--val-every", type=positive_int, default=100, help="steps between validations, besides the last step"
    )
    add("--val-windows", type=positive_int, default=128, help="windows of --seq-len bytes to validate on")
    add("--save-every", type=positive_int, default=100, help="steps between checkpoints")
    add("--tensorboard", action="store_true", help="write the metrics for TensorBoard too")
    add(
        "--choices",
        action="store_true",
        help="log which byte chose which expert: choices.html shows it (docs/telemetry.md)",
    )
    add("--profile", action="store_true", help="profile five steps: profile.png shows where their time goes")
    add(
        "--peak-flops",
        type=positive_float,
        help="FLOP/s of all ranks that mfu refers to; none: those of a matrix product here, measured",
    )
    add("--sample-bytes", type=non_negative_int, default=300, help="text to generate at the end")
    add("--prompt", default="def ", help="start of the generated text")
    return parser


def auto_or_positive_int(text: str) -> str | int:
    return text if text == "auto" else positive_int(text)


def device_of(argv: list[str] | None) -> str:
    """--device, which is asked for first: it decides how the ranks talk."""
    parser = ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    return parser.parse_known_args(argv)[0].device


def parse(argv: list[str] | None, job: Job) -> tuple[Namespace, bool]:
    """(options, whether there is a checkpoint to go on from): the command line, checked.

    A resumed run takes its settings from its folder; changing one that must stay the same is an error.
    """
    parser = build_parser()
    parser.error = error_of(parser, job)
    options = parser.parse_args(argv)
    parser.set_defaults(**SIZES[options.model])
    options = parser.parse_args(argv)
    if not options.resume and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        parser.error(
            "torchrun --max-restarts would begin anew: add --resume auto, which goes on from a checkpoint, if any"
        )
    resumes = options.resume is not None and job.from_first(lambda: saving.exists(options.out))
    if options.resume == "must" and not resumes:
        parser.error(f"--resume: there is no checkpoint in {options.out}; name the run's folder with --out")
    if resumes:
        options = parse_resumed(parser, argv, options.out, job)
    check(parser, options, job)
    return options, resumes


def error_of(parser: ArgumentParser, job: Job) -> Callable[[str], None]:
    """parser.error, said by one rank."""

    def error(message: str) -> None:
        if job.is_first:
            ArgumentParser.error(parser, message)
        sys.exit(2)

    return error


def parse_resumed(parser: ArgumentParser, argv: list[str] | None, out: Path, job: Job) -> Namespace:
    settings = job.from_first(lambda: saving.read_settings(out))
    parser.set_defaults(**settings)
    options = parser.parse_args(argv)
    for name, saved in settings.items():
        value = getattr(options, name)
        if value != saved and name not in FREE_TO_CHANGE:
            flag = "--" + name.replace("_", "-")
            parser.error(f"--resume: {flag} is {saved} in {out}, it cannot become {value}")
    return options


def ep_size_of(options: Namespace, job: Job) -> int:
    """Ranks that share the experts of a layer."""
    if options.dense and not options.compare:
        return 1
    if options.expert_parallel == "auto":
        return job.largest_ep_size(options.num_experts, options.pp)
    return options.expert_parallel


def check(parser: ArgumentParser, options: Namespace, job: Job) -> None:
    if options.dense and options.compare:
        parser.error("--dense and --compare exclude each other: --compare trains the dense model as well")
    if options.choices and (options.dense or job.is_spread):
        parser.error("--choices is for experts on one process: leave out --dense and torchrun")
    if options.d_model % (2 * options.num_heads) != 0:
        parser.error(f"--d-model {options.d_model} is not a multiple of 2 * --num-heads {options.num_heads}")
    if options.moe_every > options.num_layers:
        parser.error(
            f"--moe-every {options.moe_every} of --num-layers {options.num_layers}: no block has experts"
        )
    if options.top_k > options.num_experts:
        parser.error(f"--top-k {options.top_k} is more than --num-experts {options.num_experts}")
    check_ranks(parser, options, job)
    ep_size = ep_size_of(options, job)
    try:
        gate = find_gate(options.gate)(
            options.d_model, options.num_experts // ep_size, ep_size, options.top_k
        )
        in_parts = "in a pipeline (--pp)" if options.pp > 1 else "with --accumulate"
        if (options.pp > 1 or options.accumulate > 1) and gate.depends_on_batch:
            raise ValueError(f"{in_parts} a token's choices must be its own, but {gate.depends_on_batch}")
    except ValueError as error:
        parser.error(f"--gate {options.gate} --top-k {options.top_k}: {error}")
    if not options.prompt:
        parser.error("--prompt is empty: the model needs at least one byte to continue")


def check_ranks(parser: ArgumentParser, options: Namespace, job: Job) -> None:
    check_pipeline(parser, options, job)
    ep_size = ep_size_of(options, job)
    if job.size // options.pp % ep_size:
        stage = " of a stage" if options.pp > 1 else ""
        parser.error(
            f"--expert-parallel {ep_size} does not divide the number of ranks{stage}, {job.size // options.pp}"
        )
    if options.num_experts % ep_size:
        parser.error(f"--expert-parallel {ep_size} does not divide --num-experts {options.num_experts}")
    if options.data_parallel == "fsdp2" and not job.is_spread:
        parser.error(
            "--data-parallel fsdp2 shards over ranks, but this is one process: start it with torchrun"
        )


def check_pipeline(parser: ArgumentParser, options: Namespace, job: Job) -> None:
    if options.pp == 1:
        return
    if job.size % options.pp:
        parser.error(f"--pp {options.pp} does not divide the number of ranks, {job.size}")
    if options.pp > options.num_layers:
        parser.error(f"--pp {options.pp} is more than --num-layers {options.num_layers}")
    if options.chunks < options.pp:
        parser.error(
            f"--chunks {options.chunks} leaves stages of --pp {options.pp} without work: give as many or more"
        )
    refused = {
        "--data-parallel fsdp2 does not go with --pp": options.data_parallel == "fsdp2",
        "--accumulate does not go with --pp, which has --chunks": options.accumulate > 1,
        "--profile sees one stage only: leave out --pp": options.profile,
        "--balance-weight 0 with --pp: the pipeline cannot say what the balance loss is": options.balance_weight
        == 0,
    }
    for message, applies in refused.items():
        if applies:
            parser.error(message)


def settings(options: Namespace) -> dict[str, Any]:
    """Options that a run's folder keeps."""
    of_one_call = ("config", "out", "resume", "stop_after", "device")
    return {name: value for name, value in vars(options).items() if name not in of_one_call}
