"""Cut layers into consecutive parts whose greatest cost is least."""

from collections.abc import Iterable


def balance_cost(costs: Iterable[float], partitions: int) -> list[int]:
    """Cut a sequence of costs into consecutive parts whose greatest sum is least -> the length of each part.

    Equivalent to: the least max(map(sum, parts)) over all ways to cut costs into that many non-empty parts.
    """
    costs = list(costs)
    if not 1 <= partitions <= len(costs):
        raise ValueError(f"partitions must be between 1 and the {len(costs)} layers, but got {partitions}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # Dynamic programming. best[n]: (greatest sum, lengths) of the first n costs in `parts` parts, from one part fewer
    best: list[tuple[float, list[int]]] = [(total[n], [n]) for n in range(len(costs) + 1)]
    for parts in range(2, partitions + 1):
        best = [
            min(
                ((max(best[m][0], total[n] - total[m]), [*best[m][1], n - m]) for m in range(parts - 1, n)),
                key=lambda candidate: candidate[0],
            )
            if n >= parts
            else (float("inf"), [])
            for n in range(len(costs) + 1)
        ]
    return best[-1][1]
