"""The expert layer on a GPU: time, memory, launches and host time, against the roofline and against its peers.

    python -m benchmarks.bench_gpu_layer                       every shape; results in benchmarks/results/gpu.json
    python -m benchmarks.bench_gpu_layer --shapes Qwen,OLMoE --tokens 16384
    python -m benchmarks.bench_gpu_layer --dry-run             the same steps on the CPU with tiny shapes

Ceilings (a large product, a copy) are measured first, in the same run. Each implementation's result is compared with
fmoe_ext's before it is timed. Shapes that --budget leaves no time for are named, not dropped silently.
"""

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import common, gpu_peers, gpu_timing, roofline
from benchmarks.bench_layer import saved_bytes

NUM_INPUTS = 3  # sets in rotation, so that none stays in the cache
REPEATS_EQUAL = 5


def make_inputs(device, shape, T, dtype, seed):
    """[(x, topk_idx, topk_weights, w1, w2), ...]: sets of tokens that share the weights, all of them leaves."""
    generator = torch.Generator(device=device.name).manual_seed(seed)

    def random(*size, scale=1.0):
        # filled in place: a float32 copy of the weights would be as large as the rest together
        return torch.empty(size, dtype=dtype, device=device.name).normal_(0, scale, generator=generator)

    w1 = torch.nn.Parameter(random(shape.E, shape.F, shape.D, scale=shape.D**-0.5))
    w2 = torch.nn.Parameter(random(shape.E, shape.D, shape.H, scale=shape.H**-0.5))
    sets = []
    for _ in range(NUM_INPUTS):
        logits = torch.empty(T, shape.E, device=device.name).normal_(generator=generator)
        topk_weights, topk_idx = logits.topk(shape.K, dim=1)
        x = random(T, shape.D).requires_grad_()
        sets.append((x, topk_idx, topk_weights.softmax(1).requires_grad_(), w1, w2))
    return sets


def steps_of(run, sets, grad):
    """[(forward, backward)] of each input set."""

    def forward_of(inputs):
        return lambda: run(*inputs)

    def backward_of(inputs):
        leaves = [t for t in inputs if t.requires_grad]
        return lambda out: torch.autograd.grad(out, leaves, grad)

    return [(forward_of(inputs), backward_of(inputs)) for inputs in sets]


def results_of(run, inputs, grad):
    (forward, backward), *_ = steps_of(run, [inputs], grad)
    out = forward()
    return [out.detach(), *backward(out)]


def largest_difference(ours, theirs):
    """Norm of the difference over the norm, at worst over result and gradients."""
    return max(
        ((a - b).double().norm() / b.double().norm().clamp(min=1e-30)).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def is_deterministic(run, inputs, grad, first):
    """True if repetitions give the same bits."""
    for _ in range(REPEATS_EQUAL - 1):
        if not all(torch.equal(a, b) for a, b in zip(first, results_of(run, inputs, grad), strict=True)):
            return False
    return True


def runs_without_synchronising(device, run, inputs, grad):
    if not device.is_cuda:
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        results_of(run, inputs, grad)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def usable(device, runs, inputs, grad):
    """({name: facts} of what agrees with fmoe_ext, {name: why not})."""
    ours = results_of(runs["fmoe_ext"], inputs, grad)
    facts, left_out = {"fmoe_ext": {}}, {}
    facts["fmoe_ext"]["bitwise_equal"] = is_deterministic(runs["fmoe_ext"], inputs, grad, ours)
    facts["fmoe_ext"]["no_sync"] = runs_without_synchronising(device, runs["fmoe_ext"], inputs, grad)
    for name, run in runs.items():
        if name == "fmoe_ext":
            continue
        try:
            difference = largest_difference(ours, results_of(run, inputs, grad))
        except Exception as error:  # whatever another project raises, it is left out with its words
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if difference > 0.05:
            left_out[name] = f"its results differ from fmoe_ext's by {difference:.3f} of their norm"
        else:
            facts[name] = {"difference": difference}
    return facts, left_out


def measure(device, shape, T, dtype, ceilings, args):
    """(rows of results, {peer: why it was left out}) of one shape."""
    sets = make_inputs(device, shape, T, dtype, seed=T)
    grad = torch.empty_like(sets[0][0]).normal_()
    runs, left_out = gpu_peers.implementations(shape.gated, args.tuning)
    facts, disagreeing = usable(device, runs, sets[0], grad)
    left_out |= disagreeing
    runs = {name: run for name, run in runs.items() if name in facts}
    steps = {name: steps_of(run, sets, grad) for name, run in runs.items()}
    times = gpu_timing.time_interleaved(device, steps, args.seconds_a_round, args.rounds)
    at_best = roofline.roofline_seconds(shape, T, ceilings)
    rows = []
    for name, run in runs.items():

        def step(run=run):
            return results_of(run, sets[0], grad)

        row = {"shape": shape.name, "T": T, "D": shape.D, "H": shape.H, "E": shape.E, "K": shape.K}
        row |= {"gated": shape.gated, "dtype": str(dtype).removeprefix("torch."), "implementation": name}
        for i, (part, factor) in enumerate((("forward", 1), ("backward", 2))):
            seconds = common.summary([measured[i] for measured in times[name]])
            row[part] = seconds | {
                "tflops": factor * roofline.flops(shape, T) / seconds["median"] / 1e12,
                "of_roofline": at_best[i] / seconds["median"],
            }
        row |= facts[name]
        row["saved_bytes"] = saved_bytes(run, sets[0])
        row["least_saved_bytes"] = roofline.saved_bytes(shape, T)
        row["peak_bytes"] = device.peak_bytes(step)
        row["launches"] = device.launches(step)
        row["host_seconds"] = gpu_timing.host_seconds(device, step, args.rounds)
        rows.append(row)
    return rows, left_out


def cases(args):
    """(shape, T), the most telling first: models at 16384 tokens, then more, then fewer, then SonicMoE's shapes."""
    order = {T: i for i, T in enumerate((16384, 32768, 4096))}
    models = [(shape, T) for shape in roofline.MODELS for T in shape.T]
    models.sort(key=lambda case: order[case[1]])
    chosen = models + [(shape, T) for shape in roofline.SONIC for T in shape.T]
    if args.shapes:
        names = [name.strip().lower() for name in args.shapes.split(",")]
        chosen = [case for case in chosen if any(name in case[0].name.lower() for name in names)]
    if args.tokens:
        chosen = [case for case in chosen if case[1] in args.tokens]
    if args.dry_run:
        tiny = {
            (shape.gated, shape.name): (replace(shape, D=32, H=16, E=4, K=min(shape.K, 2)), 24)
            for shape, _ in chosen
        }
        chosen = list(tiny.values())[:1] + [case for case in tiny.values() if not case[0].gated][:1]
    return chosen


def mib(count):
    return "" if count is None else f"{count / 2**20:.0f}"


def report(rows):
    """Markdown table: fmoe_ext's figures, and the best peer's beside them."""
    groups = {}
    for row in rows:
        groups.setdefault((row["shape"], row["T"]), {})[row["implementation"]] = row
    lines = []
    for (name, T), group in groups.items():
        ours = group.pop("fmoe_ext")
        line = [name, T]
        for part in ("forward", "backward"):
            line += [f"{ours[part]['median'] * 1e3:.3f}", f"{ours[part]['tflops']:.0f}"]
            line.append(f"{ours[part]['of_roofline']:.2f}")
            fastest = min(group.values(), key=lambda row: row[part]["median"], default=None)
            ratio = fastest and fastest[part]["median"] / ours[part]["median"]
            line.append(f"{ratio:.2f} ({fastest['implementation']})" if fastest else "")
        least = min((row["saved_bytes"] for row in group.values()), default=None)
        line += [f"{mib(ours['saved_bytes'])} / {mib(least)}", mib(ours["peak_bytes"])]
        line += [ours["launches"] or "", f"{ours['host_seconds'] * 1e6:.0f}"]
        lines.append(line)
    header = ["shape", "T"]
    for part in ("fwd", "bwd"):
        header += [f"{part} ms", "TFLOP/s", "of roofline", "x best peer"]
    header += ["saved MiB: ours / least peer", "peak MiB", "launches", "host us"]
    return common.table(header, lines)


def left_out_text(left_out):
    """A paragraph for each reason and peer, with the shapes that it holds for."""
    shapes = {}
    for what, why in left_out.items():
        shape, peer = what.rsplit(", ", 1)
        shapes.setdefault((peer, why), []).append(shape)
    return "".join(
        f"\n\nleft out: {peer}: {why} ({', '.join(names)})" for (peer, why), names in shapes.items()
    )


def plot(rows, path):
    """Horizontal bars, a group a shape, forward on the left and backward on the right: readable on a phone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys((row["shape"], row["T"]) for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    one_size = len({T for _, T in labels}) == 1
    height = 0.8 / len(names)
    with plt.rc_context({"font.size": 15}):
        size = (8.5, 2 + len(labels) * (0.5 + 0.2 * len(names)))
        figure, axes = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
        for axis, part in zip(axes, ("forward", "backward"), strict=True):
            for i, name in enumerate(names):
                mine = [row for row in rows if row["implementation"] == name]
                places = [
                    labels.index((row["shape"], row["T"])) + (i - len(names) / 2 + 0.5) * height
                    for row in mine
                ]
                color = "#1f77b4" if i == 0 else str(0.25 + 0.55 * i / len(names))
                axis.barh(places, [row[part]["tflops"] for row in mine], height, label=name, color=color)
            axis.set_title(f"{part}, TFLOP/s")
            axis.grid(axis="x", alpha=0.3)
        axes[0].set_yticks(
            range(len(labels)),
            [name.replace(" ", "\n") if one_size else f"{name}\n{T}" for name, T in labels],
        )
        axes[0].invert_yaxis()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(path, dpi=100)
    plt.close(figure)


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shapes", help="parts of shape names, comma-separated; all when left out")
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], help="values of T"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds-a-round", type=float, default=0.1, help="of one implementation")
    parser.add_argument(
        "--budget", type=float, default=240, help="seconds after which no further shape begins"
    )
    parser.add_argument(
        "--tuning", action="store_true", help="peers too that tune themselves for a minute a shape"
    )
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu.json")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU; the figures mean nothing"
    )
    args = parser.parse_args(argv)
    if args.dry_run:
        args.rounds, args.seconds_a_round = 1, 0.0
    elif not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the steps on the CPU")
    return args


def main(argv=None):
    args = parse(argv)
    start = time.monotonic()
    device = gpu_timing.Device("cpu" if args.dry_run else "cuda")
    size, repeats = (64, 2) if args.dry_run else (8192, 20)
    ceilings = gpu_timing.measure_ceilings(device, size, repeats)
    print(f"ceilings: {ceilings.flops / 1e12:.1f} TFLOP/s, {ceilings.bandwidth / 1e12:.3f} TB/s", flush=True)
    rows, left_out, no_time = [], {}, []
    for shape, T in cases(args):
        if time.monotonic() - start > args.budget:
            no_time.append(f"{shape.name} {T}")
            continue
        new_rows, new_left_out = measure(device, shape, T, getattr(torch, args.dtype), ceilings, args)
        rows += new_rows
        left_out |= {f"{shape.name} {T}, {name}": why for name, why in new_left_out.items()}
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
        print(report(new_rows).splitlines()[2], flush=True)
    if not rows:
        sys.exit("no shape was measured: see --shapes, --tokens and --budget")
    text = report(rows) + left_out_text(left_out)
    text += f"\n\nno time was left for: {', '.join(no_time)}" if no_time else ""
    print(text)
    facts = {"ceilings": vars(ceilings), "left_out": left_out, "no_time_for": no_time, "rows": rows}
    command = " ".join(["python -m benchmarks.bench_gpu_layer", *(sys.argv[1:] if argv is None else argv)])
    common.write(args.out, command, facts, text)
    try:
        plot(rows, args.out.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error} (pip install matplotlib)")


if __name__ == "__main__":
    main()
