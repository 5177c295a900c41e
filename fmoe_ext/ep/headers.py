"""Numbers that every rank sends beside its counts of rows, and other small tensors of known integers.

Ranks that are in different layers, or have tokens of another width, would read each other's rows as their own. So each
message of counts begins with a header, and every rank compares those of all: all raise, or none does.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fmoe_ext.ep.process_groups import find_group


def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return an int64 tensor of these values, the same one at every call; not to be changed."""
    # a compiled graph holds constants of its own; eager would copy to the device in each forward
    return torch.tensor(values, device=device) if torch.compiler.is_compiling() else _kept(values, device)


@functools.lru_cache(maxsize=256)
def _kept(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)


def lookup(table: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """Return table[topk_idx], and -1 for dropped choices."""
    return torch.where(topk_idx < 0, -1, table[topk_idx.clamp(min=0).long()])


# What must be the same on all ranks.
HEADER = (
    "the layer",
    "the dtype of the tokens",
    "the elements of a token",
    "the chunks of experts, of which a compiled graph has one",
)
LENGTH = len(HEADER) + 1  # behind it: 1 for a rank that has tokens, 0 for one that has none
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def make_header(
    layer_index: int, leaves: Sequence[torch.Tensor], num_chunks: int, num_tokens: int, device: torch.device
) -> torch.Tensor:
    """Make the header [LENGTH] int64 of tokens with these leaves [T, *]; TypeError for a dtype of no expert."""
    dtype = leaves[0].dtype
    if dtype not in _DTYPES:
        raise TypeError(f"tokens must be float64, float32, bfloat16 or float16, but got {dtype}")
    width = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    return constant((layer_index, _DTYPES.index(dtype), width, num_chunks, int(num_tokens > 0)), device)


def check_headers(headers: list[list[int]], group_name: str) -> None:
    """Raise RuntimeError if the headers [ranks] differ. Every rank sees every other's, so every rank raises."""
    headers = [header[: len(HEADER)] for header in headers]
    if all(header == headers[0] for header in headers):
        return
    ranks = dist.get_process_group_ranks(find_group(group_name))
    texts = []
    for name, values in zip(HEADER, zip(*headers, strict=True), strict=True):
        if len(set(values)) > 1:
            shown = [_DTYPES[v] if "dtype" in name else v for v in values]
            texts.append(f"{name} ({', '.join(f'rank {r}: {v}' for r, v in zip(ranks, shown, strict=True))})")
    raise RuntimeError(f"ranks {ranks} do not exchange the same tokens; they differ in {'; '.join(texts)}")
