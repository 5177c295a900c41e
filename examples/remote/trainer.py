"""One trainer, started by train.py: a byte-level language model whose experts are on servers, found by --registry.

It writes a JSON line a step to --metrics: time, loss, and how many gradients the servers have acknowledged.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.remote import EtcdDiscovery, RemoteError, RemoteMixtureOfExperts

CONTEXT = 16  # bytes that predict the next one


def load_text():
    """The sources of Python's standard library, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.glob("*.py")) if f.stat().st_size > 0]
    return torch.frombuffer(bytearray(b"\0".join(f.read_bytes() for f in files)), dtype=torch.uint8)


class Model(nn.Module):
    """Embedding and head live here; between them x + mixture(x), whose experts all trainers share."""

    def __init__(self, width, num_experts, discovery, compression):
        super().__init__()
        self.embedding = nn.Embedding(256, width // 4)
        self.read = nn.Linear(CONTEXT * (width // 4), width)
        self.norm = nn.LayerNorm(width)
        self.experts = RemoteMixtureOfExperts(
            *(width, (num_experts,), discovery, "expert"),
            k_best=2,
            forward_timeout=30,
            backward_timeout=30,
            compression=compression,
            patience=20,  # longer than a lease: the next leader is waited for
        )
        self.head = nn.Linear(width, 256)

    def forward(self, context):
        x = F.gelu(self.read(self.embedding(context).flatten(1)))
        return self.head(x + self.experts(self.norm(x)))


def batch(text, step, size, seed):
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    start = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    window = text[start + torch.arange(CONTEXT + 1)].long()
    return window[:, :-1], window[:, -1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--num-experts", type=int, default=4)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    text = load_text()
    model = Model(args.width, args.num_experts, EtcdDiscovery(args.registry), args.compression)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    client = model.experts.client
    with args.metrics.open("w") as metrics:
        for step in range(args.steps):
            context, target = batch(text, step, args.batch_size, args.seed)
            begin, failed = time.monotonic(), ""
            optimizer.zero_grad()
            try:
                loss = F.cross_entropy(model(context), target)
                loss.backward()
                optimizer.step()
                client.loss = f"{loss.item():.3f}"
            except RemoteError as error:  # a step without any expert is a step not made
                failed = str(error)
                time.sleep(0.5)
            record = {
                "step": step,
                "time": time.time(),
                "seconds": time.monotonic() - begin,
                "loss": None if failed else loss.item(),
                "failed": failed,
                "retries": client.counts["retries"],
                "lost": client.counts["gradients lost"],
                "applied": client.counts["gradients applied"],
            }
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()


if __name__ == "__main__":
    main()
