"""Runs of one program under two default devices, with equal values.

The other default is the meta device, which needs no GPU: a tensor that is made there by mistake has no values.
"""

import contextlib
import hashlib

import torch
from torch import nn


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape, seed=0):
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))


def values(result):
    """Tensors on the CPU and other values in a nest -> a nest that == compares."""
    if isinstance(result, torch.Tensor):
        assert result.device.type == "cpu"
        return result.dtype, result.tolist()
    if isinstance(result, nn.Module):
        return values(result.state_dict())
    if isinstance(result, dict):
        return {key: values(value) for key, value in result.items()}
    return [values(value) for value in result] if isinstance(result, (list, tuple)) else result


def files(folder, suffix=""):
    """{name: digest} of the files of a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name.endswith(suffix)]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def assert_same_under_default(prepare, folder):
    """prepare(folder) makes tensors and models on the CPU -> run(), which gives equal values under both defaults."""
    results = []
    for name in ("cpu", "meta"):
        (folder / name).mkdir()
        torch.manual_seed(0)
        run = prepare(folder / name)
        torch.manual_seed(1)
        with default_device("meta") if name == "meta" else contextlib.nullcontext():
            results.append(run())
    assert values(results[0]) == values(results[1])
