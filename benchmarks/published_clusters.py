"""Policies of FasterMoE and SmartMoE on the clusters that their papers publish, by the cost model of fmoe_ext.ep.

python -m benchmarks.published_clusters fastermoe-trevor
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fmoe_ext.ep.cost import Hardware, Layer
from fmoe_ext.planning.simulate import draw_loads, show, simulate


@dataclass(frozen=True)
class Cluster:
    """A published set-up. gains: its speed-ups over the same system without them."""

    ranks: int
    num_experts: int
    tokens: int
    d_model: int
    d_hidden: int
    top_k: int
    bandwidth: float
    throughput: float
    bytes_per_element: int
    gains: str


CLUSTERS = MappingProxyType(
    {
        # FasterMoE, PPoPP 2022. InfiniBand is shared by the GPUs of a node: 8 at 50 Gb/s, 4 at 100 Gb/s.
        "fastermoe-johnny": Cluster(
            16, 16, 8192, 1024, 2048, 2, 50e9 / 8 / 8, 11.5e12, 4,
            gains="FasterMoE on johnny: shadowing up to 1.95x, smart schedule up to 1.40x, both up to 2.20x",
        ),
        "fastermoe-trevor": Cluster(
            64, 64, 8192, 1024, 2048, 2, 100e9 / 8 / 4, 11.5e12, 4,
            gains="FasterMoE on trevor: shadowing up to 4.74x, smart schedule up to 1.40x, both up to 5.72x",
        ),
        # SmartMoE, ATC 2023: its artifact's logs of whole models, 200 iterations.
        "smartmoe-inky": Cluster(
            16, 16, 8192, 2560, 10240, 2, 100e9 / 8, 150e12, 2,
            gains="SmartMoE on inky, whole model: FastMoE 1225 s, FasterMoE 1052 s (1.16x), SmartMoE 560 s (2.19x, "
            "1.88x over FasterMoE)",
        ),
    }
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_clusters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cluster", choices=sorted(CLUSTERS))
    parser.add_argument("--skew", type=float, default=0.6, help="of drawn loads; 0 is even")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    cluster = CLUSTERS[options.cluster]
    layer = Layer(cluster.d_model, cluster.d_hidden, bytes_per_element=cluster.bytes_per_element)
    rows = cluster.ranks * cluster.tokens * cluster.top_k
    loads = draw_loads(options.steps, cluster.num_experts, rows, options.skew)
    hardware = Hardware(cluster.bandwidth, cluster.throughput)
    show(
        f"{options.cluster}, {cluster.ranks} ranks",
        simulate(loads, cluster.ranks, layer, hardware, num_chunks=4, every=20),
    )
    print(f"published: {cluster.gains}")


if __name__ == "__main__":
    main()
