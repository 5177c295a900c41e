"""Packed frozen experts against decoding first and against dense weights, on the CPU: products, and steps with LoRA.

    python -m benchmarks.bench_quantized                              into results/quantized.*
    python -m benchmarks.bench_quantized --formats mxfp4 --tokens 1,64 --rounds 2 --quick

If bitsandbytes is installed, NF4 steps have a peer: its Linear4bit of each expert with PEFT's LoRA, expert by expert.

One token reads the packed weights of its experts once; the rate of that is compared with a read of a large tensor in
the same run. "decoded" decodes both weights with torch and then calls frozen_mlp: a peer without packed products.
"""

import argparse
from pathlib import Path

import torch

from benchmarks import common
from fmoe_ext import frozen, ops
from fmoe_ext.adapters import Lora
from fmoe_ext.frozen import FORMATS


def layer(args, name, dtype):
    """(w1, w2) packed, and adapters of both."""
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (
        frozen.quantize(torch.randn(shape, generator=generator) * shape[2] ** -0.5, name)
        for shape in (
            (args.experts, 2 * args.hidden, args.width),
            (args.experts, args.width, args.hidden),
        )
    )
    return w1, w2, [adapter(args.rank, weight.shape, dtype) for weight in (w1, w2)]


def adapter(rank, shape, dtype):
    experts, out, width = shape
    a = torch.randn(experts, rank, width) * width**-0.5
    b = torch.randn(experts, out, rank)
    return Lora(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), 0.5)


def routing(args, tokens, turn):
    """Choices of top_k experts for each token; one token takes others at each turn, so that no cache has them."""
    generator = torch.Generator().manual_seed(tokens)
    if tokens == 1:
        chosen = (torch.arange(args.top_k) + turn * args.top_k)[None] % args.experts
    else:
        chosen = torch.rand(tokens, args.experts, generator=generator).topk(args.top_k).indices
    return ops.sort_tokens(chosen, args.experts)


class Linear4bitExperts(torch.nn.Module):
    """Experts of bitsandbytes' Linear4bit in NF4, one after another."""

    def __init__(self, args, dtype):
        super().__init__()
        from bitsandbytes.nn import Linear4bit

        def linear(width, out):
            return Linear4bit(width, out, bias=False, compute_dtype=dtype, quant_type="nf4").to("cpu")

        self.gate_up = torch.nn.ModuleList(linear(args.width, 2 * args.hidden) for _ in range(args.experts))
        self.down = torch.nn.ModuleList(linear(args.hidden, args.width) for _ in range(args.experts))

    def forward(self, x, row_idx, offs, top_k):
        out = torch.zeros_like(x)
        begin = 0
        for expert, end in enumerate(offs.tolist()):
            if end > begin:
                tokens = row_idx[begin:end].long() // top_k
                gate, up = self.gate_up[expert](x[tokens]).chunk(2, -1)
                rows = self.down[expert](torch.nn.functional.silu(gate) * up)
                out = out.index_add(0, tokens, rows.to(x.dtype))
            begin = end
        return out


def bitsandbytes_step(args, tokens, dtype):
    """A step of bitsandbytes + PEFT; None without bitsandbytes."""
    try:
        import bitsandbytes  # noqa: F401
        import peft
    except ImportError:
        return None
    config = peft.LoraConfig(r=args.rank, target_modules=r".*(gate_up|down)\.\d+")
    model = peft.get_peft_model(Linear4bitExperts(args, dtype), config).to(dtype)
    x, s = torch.randn(tokens, args.width).to(dtype), routing(args, tokens, 0)

    def step():
        model.zero_grad()
        model(x.detach().requires_grad_(), s.row_idx, s.offs, args.top_k).sum().backward()

    return step


class Product:
    """frozen_mlp of some tokens. way: packed, decoded (first) or dense."""

    def __init__(self, args, weights, tokens, dtype, way, adapters=(None, None)):
        self.packed, self.way, self.adapters = weights, way, adapters
        self.dense = [w.dequantize(dtype) for w in weights] if way == "dense" else None
        self.turns = [
            routing(args, tokens, turn) for turn in range(args.experts // args.top_k if tokens == 1 else 1)
        ]
        self.x = torch.randn(tokens, args.width).to(dtype)
        self.calls = 0

    def forward(self, x):
        s = self.turns[self.calls % len(self.turns)]
        self.calls += 1
        weights = self.packed if self.way == "packed" else self.dense
        if self.way == "decoded":
            weights = [w.dequantize(x.dtype) for w in self.packed]
        index = (s.row_idx, s.inverse, s.offs)
        return frozen.frozen_mlp(
            x, *index, weights[0], None, weights[1], None, None, "swiglu", True, *self.adapters
        )

    def __call__(self):
        with torch.no_grad():
            self.forward(self.x)

    def step(self):
        x = self.x.detach().requires_grad_()
        self.forward(x).sum().backward()


def measure(args):
    dtype = getattr(torch, args.dtype)
    large = torch.ones(args.read_bytes // 4)
    rows = []
    for name in args.formats.split(","):
        w1, w2, adapters = layer(args, name, dtype)
        for tokens in map(int, args.tokens.split(",")):
            used = min(args.experts, tokens * args.top_k)
            num_bytes = (w1.nbytes + w2.nbytes) * used / args.experts
            steps = {
                way: Product(args, (w1, w2), tokens, dtype, way) for way in ("packed", "decoded", "dense")
            }
            steps["read"] = large.sum
            if tokens > 1:
                steps["step"] = Product(args, (w1, w2), tokens, dtype, "packed", adapters).step
                steps["dense step"] = Product(args, (w1, w2), tokens, dtype, "dense", adapters).step
                peer = bitsandbytes_step(args, tokens, dtype) if name == "nf4" else None
                if peer is not None:
                    steps["bitsandbytes"] = peer
                steps["decoded step"] = Product(args, (w1, w2), tokens, dtype, "decoded", adapters).step
            seconds = {
                k: common.summary(v) for k, v in common.interleave(steps, args.rounds, slow=10.0).items()
            }
            read = large.numel() * 4 / seconds["read"]["min"]
            rows.append(
                {
                    "format": name,
                    "tokens": tokens,
                    "share_of_read": num_bytes / seconds["packed"]["min"] / read,
                    "gb_per_s": num_bytes / seconds["packed"]["min"] / 1e9,
                    "read_gb_per_s": read / 1e9,
                    **{k: {"median": v["median"], "min": v["min"]} for k, v in seconds.items()},
                }
            )
            print(report(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def ratio(row, above, below):
    return f"{row[above]['median'] / row[below]['median']:.2f}" if above in row else ""


def report(rows):
    head = ["format", "tokens", "packed ms", "decoded / packed", "dense / packed", "GB/s", "of a read"]
    head += ["LoRA step ms", "decoded step / step", "dense step / step", "bitsandbytes / step"]
    lines = [
        [
            row["format"], row["tokens"], f"{row['packed']['median'] * 1e3:.2f}",
            ratio(row, "decoded", "packed"), ratio(row, "dense", "packed"),
            f"{row['gb_per_s']:.1f}", f"{row['share_of_read']:.2f}" if row["tokens"] == 1 else "",
            f"{row['step']['median'] * 1e3:.1f}" if "step" in row else "",
            ratio(row, "decoded step", "step"), ratio(row, "dense step", "step"),
            ratio(row, "bitsandbytes", "step"),
        ]
        for row in rows
    ]  # fmt: skip
    return common.table(head, [[str(cell) for cell in line] for line in lines])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"experts": 32, "top_k": 8, "width": 2048, "hidden": 768, "rank": 4}
    for name, default in {**sizes, "threads": 2, "rounds": 5, "read_bytes": 256 << 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default="1,64,512")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "quantized.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args)
    text = report(rows)
    print(text)
    if not args.quick:
        command = f"python -m benchmarks.bench_quantized --dtype {args.dtype} --rounds {args.rounds}"
        common.write(args.out, command, rows, text)


if __name__ == "__main__":
    main()
