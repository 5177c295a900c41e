"""The command line of train.py."""

import argparse
from pathlib import Path

import checkpoint

from fmoe_ext.gates import GATES, find_gate

# What a resumed run may change: where and how it runs and what it writes, and how long the schedule is.
FREE_TO_CHANGE = {"device", "threads", "steps", "save_every", "sample_bytes", "prompt"}

DESCRIPTION = """\
Train a byte-level language model whose MLPs are mixtures of experts.

Written to --out: metrics.jsonl, checkpoint.pt, curve.png, expert_load.png, sample.txt.
Ctrl-C (or SIGTERM) finishes the step, saves, draws and exits with status 130;
--resume continues bit for bit.
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def positive_int(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def non_negative_int(text):
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive_float(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def non_negative_float(text):
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a number >= 0")
    return value


def build_parser():
    parser = argparse.ArgumentParser(prog="train.py", description=DESCRIPTION, formatter_class=HelpFormatter)
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--data", help="text file, folder or WikiText-style files; none: Python's standard library")
    add("--out", type=Path, default=Path("out/lm"), help="folder for everything that is written")
    add("--resume", action="store_true", help="continue the run in --out with its settings")
    add("--dense", action="store_true", help="train the dense model with the same active parameters instead")
    add("--compare", action="store_true", help="train both on the same batches and draw both curves")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 if fast")
    add("--threads", type=positive_int, help="CPU threads (none: PyTorch's choice)")
    add("--seed", type=non_negative_int, default=0, help="of the weights, the batches and the sample")

    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--d-model", type=positive_int, default=128, help="width")
    add("--num-layers", type=positive_int, default=4, help="blocks of attention and MLP")
    add("--num-heads", type=positive_int, default=4, help="attention heads")
    add("--num-experts", type=positive_int, default=16, help="experts in every MLP")
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
        "--steps", type=positive_int, default=1000, help="length of the run and of the learning-rate schedule"
    )
    add("--stop-after", type=positive_int, help="save and exit after this step, as if interrupted there")
    add("--batch-size", type=positive_int, default=8, help="windows in a batch")
    add("--seq-len", type=positive_int, default=256, help="bytes in a window")
    add("--lr", type=positive_float, default=2.5e-3, help="peak learning rate")
    add("--warmup", type=non_negative_int, default=20, help="steps of linear warm-up before the cosine")
    add("--weight-decay", type=non_negative_float, default=0.1, help="on matrices only")
    add("--clip", type=positive_float, default=1.0, help="largest norm of the gradient")
    add("--balance-weight", type=non_negative_float, default=0.03, help="of the gates' balance loss")

    group = parser.add_argument_group("reports")
    add = group.add_argument
    add("--log-every", type=positive_int, default=10, help="steps between lines of metrics.jsonl")
    add("--val-every", type=positive_int, default=50, help="steps between validations, besides the last step")
    add("--val-windows", type=positive_int, default=64, help="windows of --seq-len bytes to validate on")
    add("--save-every", type=positive_int, default=100, help="steps between checkpoints")
    add("--sample-bytes", type=non_negative_int, default=300, help="text to generate at the end")
    add("--prompt", default="def ", help="start of the generated text")
    return parser


def parse(argv):
    """(options, state): the command line, checked, and the checkpoint when resuming (otherwise None).

    A resumed run takes its settings from the checkpoint; changing one that must stay the same is an error.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    state = None
    if options.resume:
        path = options.out / "checkpoint.pt"
        if not path.exists():
            parser.error(f"--resume: there is no {path}; name the run's folder with --out")
        state = checkpoint.load(path)
        parser.set_defaults(**state["settings"])
        options = parser.parse_args(argv)
        for name, saved in state["settings"].items():
            value = getattr(options, name)
            if value != saved and name not in FREE_TO_CHANGE:
                flag = "--" + name.replace("_", "-")
                parser.error(f"--resume: {flag} is {saved} in {path}, it cannot become {value}")
        if options.steps < state["step"]:
            parser.error(f"--resume: {path} is at step {state['step']}, past --steps {options.steps}")
    check(parser, options)
    return options, state


def check(parser, options):
    if options.dense and options.compare:
        parser.error("--dense and --compare exclude each other: --compare trains the dense model as well")
    if options.d_model % (2 * options.num_heads) != 0:
        parser.error(f"--d-model {options.d_model} is not a multiple of 2 * --num-heads {options.num_heads}")
    if options.top_k > options.num_experts:
        parser.error(f"--top-k {options.top_k} is more than --num-experts {options.num_experts}")
    try:
        find_gate(options.gate)(options.d_model, options.num_experts, 1, options.top_k)
    except ValueError as error:
        parser.error(f"--gate {options.gate} --top-k {options.top_k}: {error}")
    if not options.prompt:
        parser.error("--prompt is empty: the model needs at least one byte to continue")


def settings(options):
    """What the checkpoint keeps of the options."""
    of_one_call = ("out", "resume", "stop_after")
    return {name: value for name, value in vars(options).items() if name not in of_one_call}
