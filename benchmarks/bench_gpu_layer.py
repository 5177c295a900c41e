"""The expert layer on a GPU: time, memory and launches, against the roofline and against its peers.

    python -m benchmarks.bench_gpu_layer                       every shape; results in benchmarks/results/gpu.json
    python -m benchmarks.bench_gpu_layer --shapes Qwen,OLMoE --tokens 16384 --routing random,zipf
    python -m benchmarks.bench_gpu_layer --dry-run             the same steps on the CPU with tiny shapes

Ceilings (a large product, a copy) are measured first, in the same run. Each implementation's result is compared with
fmoe_ext's before it is timed. Shapes that --budget leaves no time for are named, not dropped silently. --merge keeps
the rows of other shapes that the file of results has. Host time is measured by bench_gpu_host, in a process of its own.
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
PARTS = (
    ("forward", 1, (0,)),
    ("backward", 2, (1,)),
    ("both", 3, (0, 1)),
)  # name, times the forward's FLOPs, which times
ROUTINGS = ("random", "zipf")
CASE = ("shape", "T", "routing", "dtype", "implementation")  # what tells a row of results from others


def choice_logits(T, E, routing, generator, device):
    """Logits [T, E] whose largest are the choices: alike for all experts, or with Zipf's law, the first most likely."""
    noise = torch.empty(T, E, device=device).exponential_(generator=generator).log_().neg_()  # Gumbel
    if routing == "zipf":
        noise -= torch.arange(1, E + 1, device=device).log()
    return noise


def make_inputs(device, shape, T, dtype, seed, routing="random"):
    """([(x, topk_idx, topk_weights), ...], w1, w2): sets of tokens, and the weights; all floats are leaves."""
    generator = torch.Generator(device=device.name).manual_seed(seed)

    def random(*size, scale=1.0):
        # filled in place: a float32 copy of the weights would be as large as the rest together
        return torch.empty(size, dtype=dtype, device=device.name).normal_(0, scale, generator=generator)

    w1 = torch.nn.Parameter(random(shape.E, shape.F, shape.D, scale=shape.D**-0.5))
    w2 = torch.nn.Parameter(random(shape.E, shape.D, shape.H, scale=shape.H**-0.5))
    sets = []
    for _ in range(NUM_INPUTS):
        logits = choice_logits(T, shape.E, routing, generator, device.name)
        topk_weights, topk_idx = logits.topk(shape.K, dim=1)
        x = random(T, shape.D).requires_grad_()
        sets.append((x, topk_idx, topk_weights.softmax(1).requires_grad_()))
    return sets, w1, w2


def steps_of(layer, sets, grad):
    """[(forward, backward)] of each input set."""

    def forward_of(inputs):
        return lambda: layer.run(*inputs)

    def backward_of(inputs):
        leaves = [t for t in (*inputs, *layer.weights) if t.requires_grad]
        return lambda out: torch.autograd.grad(out, leaves, grad, allow_unused=True)

    return [(forward_of(inputs), backward_of(inputs)) for inputs in sets]


def step_of(layer, inputs, grad):
    """A forward and backward as training has it -> [out, gradients of x, topk_weights and the layer's weights]."""
    (forward, backward), *_ = steps_of(layer, [inputs], grad)
    out = forward()
    return [out.detach(), *backward(out)]


def results_of(layer, inputs, grad):
    """The same with the gradients in the layout of w1 and w2."""
    out, dx, dweights, *grads = step_of(layer, inputs, grad)
    return [out, dx, dweights, *layer.gradients(*grads)]


def largest_difference(ours, theirs):
    """Norm of the difference over the norm, at worst over result and gradients."""
    return max(
        ((a - b).double().norm() / b.double().norm().clamp(min=1e-30)).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def is_deterministic(layer, inputs, grad, first):
    """True if repetitions give the same bits."""
    for _ in range(REPEATS_EQUAL - 1):
        if not all(torch.equal(a, b) for a, b in zip(first, results_of(layer, inputs, grad), strict=True)):
            return False
    return True


def runs_without_synchronising(device, layer, inputs, grad):
    if not device.is_cuda:
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        step_of(layer, inputs, grad)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def usable(device, layers, inputs, grad):
    """({name: facts} of what agrees with fmoe_ext, {name: why not})."""
    ours = results_of(layers["fmoe_ext"], inputs, grad)
    facts, left_out = {"fmoe_ext": {}}, {}
    facts["fmoe_ext"]["bitwise_equal"] = is_deterministic(layers["fmoe_ext"], inputs, grad, ours)
    facts["fmoe_ext"]["no_sync"] = runs_without_synchronising(device, layers["fmoe_ext"], inputs, grad)
    for name, layer in layers.items():
        if name == "fmoe_ext":
            continue
        try:
            difference = largest_difference(ours, results_of(layer, inputs, grad))
        except Exception as error:  # whatever another project raises, it is left out with its words
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if difference > 0.05:
            left_out[name] = f"its results differ from fmoe_ext's by {difference:.3f} of their norm"
        else:
            facts[name] = {"difference": difference}
    return facts, left_out


def measure(device, shape, T, routing, ceilings, args):
    """(rows of results, {peer: why it was left out}) of one shape."""
    dtype = getattr(torch, args.dtype)
    sets, w1, w2 = make_inputs(device, shape, T, dtype, T, routing)
    grad = torch.empty_like(sets[0][0]).normal_()
    layers, left_out = gpu_peers.implementations(shape.gated, w1, w2, args.tuning, not args.dry_run)
    if args.only:
        layers = {name: layer for name, layer in layers.items() if name in ("fmoe_ext", *args.only)}
    facts, disagreeing = usable(device, layers, sets[0], grad)
    left_out |= disagreeing
    layers = {name: layer for name, layer in layers.items() if name in facts}
    steps = {name: steps_of(layer, sets, grad) for name, layer in layers.items()}
    times = gpu_timing.time_interleaved(device, steps, args.seconds_a_round, args.rounds)
    at_best = roofline.roofline_seconds(shape, T, ceilings)
    rows = []
    for name, layer in layers.items():

        def step(layer=layer):
            return step_of(layer, sets[0], grad)

        row = {"shape": shape.name, "T": T, "D": shape.D, "H": shape.H, "E": shape.E, "K": shape.K}
        row |= {"routing": routing, "gated": shape.gated, "dtype": args.dtype, "implementation": name}
        for part, factor, of in PARTS:
            seconds = common.summary([sum(measured[i] for i in of) for measured in times[name]])
            row[part] = seconds | {
                "tflops": factor * roofline.flops(shape, T) / seconds["median"] / 1e12,
                "of_roofline": sum(at_best[i] for i in of) / seconds["median"],
            }
        row |= facts[name]
        row["saved_bytes"] = saved_bytes(
            lambda *inputs, layer=layer: layer.run(*inputs[:3]), (*sets[0], *layer.weights)
        )
        row["least_saved_bytes"] = roofline.saved_bytes(shape, T)
        row["peak_bytes"] = device.peak_bytes(step)
        row["launches"] = device.launches(step)
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
    """Markdown table: fmoe_ext's forward and backward together, and how many times as fast it is as its peers."""
    groups = {}
    for row in rows:
        groups.setdefault((row["shape"], row["T"], row["routing"]), {})[row["implementation"]] = row
    lines = []
    for (name, T, routing), group in groups.items():
        ours = group.pop("fmoe_ext")
        line = [name, T, routing]
        line += [f"{ours[part]['median'] * 1e3:.3f}" for part in ("forward", "backward", "both")]
        line += [f"{ours['both']['tflops']:.0f}", f"{ours['both']['of_roofline']:.2f}"]
        record = group.get(gpu_peers.RECORD)
        ratios = [
            f"{record[part]['median'] / ours[part]['median']:.2f}" if record else "" for part, _, _ in PARTS
        ]
        line += [ratios[2], " / ".join(ratios[:2]) if record else ""]
        fastest = min(group.values(), key=lambda row: row["both"]["median"], default=None)
        ratio = fastest and fastest["both"]["median"] / ours["both"]["median"]
        line.append(f"{ratio:.2f} ({fastest['implementation']})" if fastest else "")
        least = min((row["saved_bytes"] for row in group.values()), default=None)
        line += [
            f"{mib(ours['saved_bytes'])} / {mib(least)}",
            mib(ours["peak_bytes"]),
            ours["launches"] or "",
        ]
        lines.append(line)
    header = ["shape", "T", "routing", "fwd ms", "bwd ms", "fwd + bwd ms", "TFLOP/s", "of roofline"]
    header += ["x " + gpu_peers.RECORD, "its fwd / bwd", "x best peer"]
    header += ["saved MiB: ours / least peer", "peak MiB", "launches"]
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

    rows = [row for row in rows if row["routing"] == rows[0]["routing"]]
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
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help="peers to measure beside fmoe_ext, by name"
    )
    parser.add_argument(
        "--routing",
        type=lambda text: text.split(","),
        default=["random"],
        help=f"how tokens choose their experts: {', '.join(ROUTINGS)}",
    )
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu.json")
    parser.add_argument("--merge", action="store_true", help="keep the rows of other cases that --out has")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU; the figures mean nothing"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.routing) - set(ROUTINGS):
        parser.error(f"--routing knows {', '.join(ROUTINGS)}, not {', '.join(sorted(unknown))}")
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
    for shape, T, routing in [(*case, routing) for routing in args.routing for case in cases(args)]:
        if time.monotonic() - start > args.budget:
            no_time.append(f"{shape.name} {T} {routing}")
            continue
        new_rows, new_left_out = measure(device, shape, T, routing, ceilings, args)
        rows += new_rows
        left_out |= {f"{shape.name} {T} {routing}, {name}": why for name, why in new_left_out.items()}
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
        print(report(new_rows).splitlines()[2], flush=True)
    if not rows:
        sys.exit("no shape was measured: see --shapes, --tokens and --budget")
    if args.merge:
        rows = common.merged(args.out, rows, CASE)
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
