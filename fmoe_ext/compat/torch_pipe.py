"""torch.distributed.pipeline.sync, which torch no longer has, on FairScale's Pipe: only a program's import changes.

What is different from FairScale's: the devices are those of the layers, layers take and return several values, the
result is in a LocalResult in the place of torch's RRef, and the state dict numbers layers by partition.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from fmoe_ext.compat.fairscale import pipe
from fmoe_ext.compat.fairscale.microbatch import NoChunk
from fmoe_ext.compat.fairscale.skip import pop, skippable, stash, verify_skippables
from fmoe_ext.pipeline.microbatch import Values


@dataclass(frozen=True)
class LocalResult:
    """The result of a Pipe, with the methods of torch's RRef; DistributedDataParallel finds the tensors in it."""

    value: Any

    def local_value(self) -> Any:
        """Return the tensor or tuple itself."""
        return self.value

    def to_here(self, timeout: float = -1.0) -> Any:
        """Return the tensor or tuple itself: it never leaves its process."""
        return self.value

    def is_owner(self) -> bool:
        """Return True: the result is in this process."""
        return True


# DistributedDataParallel(static_graph=True) finds the end of a backward by the tensors of a result
register_pytree_node(
    LocalResult, lambda result: ([result.value], None), lambda values, _: LocalResult(*values)
)


class WithDevice(nn.Module):
    """Put a module on a device, for one whose parameters do not show where it is to run."""

    def __init__(self, module: nn.Module, device: torch.device | str | int):
        super().__init__()
        self._module = module
        self._device = torch.device(device)

    @property
    def module(self) -> nn.Module:
        """Return the module."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Return the module's device."""
        return self._device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)


class Pipe(pipe.Pipe):
    """Pipe with the signature of torch.distributed.pipeline.sync.Pipe, which torch no longer has.

    module: children on their devices (module.to, WithDevice). Consecutive ones on one accelerator are a partition; on
    the CPU each is its own, and a child that is an nn.Sequential gives its layers. chunks, checkpoint,
    deferred_batch_norm: as in fmoe_ext.compat.fairscale.Pipe.

    Called with one or several arguments; a layer that returns a tuple gives the next one several. The result is in a
    LocalResult: model(x).local_value(). init_rpc, which torch's Pipe needs, is not needed. Names in the state dict are
    torch's. Raises TypeError for another module, ValueError for a child whose parameters are on several devices, and
    what fmoe_ext.compat.fairscale.Pipe raises.
    Equivalent to: module(*args) on one device.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ):
        nn.Module.__init__(self)
        pipe.check_layers(module)
        layers: list[nn.Module] = []
        balance: list[int] = []
        devices: list[torch.device] = []
        # balance and devices from where the children are: neighbours on one device are a partition
        for name, child in module.named_children():
            if isinstance(child, WithDevice):
                device = child.device
                child = child.module.to(device)
            else:
                found = {p.device for p in child.parameters()}
                if len(found) > 1:
                    places = ", ".join(sorted(map(str, found)))
                    raise ValueError(
                        f"layer {name!r} has parameters on {places}: move it to one device with .to(), or cut it into "
                        "layers"
                    )
                device = found.pop() if found else torch.device("cpu")
            # torch's Pipe counts the layers of an inner nn.Sequential as layers of its own
            inner = list(child) if isinstance(child, nn.Sequential) else [child]
            # a new partition; on the CPU for each child, since one partition would be no pipeline
            if not (devices and devices[-1] == device and device.type != "cpu"):
                balance.append(0)
                devices.append(device)
            balance[-1] += len(inner)
            layers += inner
        self._build(nn.Sequential(*layers), balance, devices, chunks, checkpoint, deferred_batch_norm)

    def _partitions(self, module: nn.Sequential, balance: list[int]) -> "Iterator[_Partition]":
        layers = list(module)
        for number in balance:
            yield _Partition(OrderedDict((str(i), layer) for i, layer in enumerate(layers[:number])))
            layers = layers[number:]

    def forward(self, *inputs: Any) -> LocalResult:
        """One or several arguments of the first layer, cut along their first dimension -> LocalResult."""
        return LocalResult(self._run(inputs[0] if len(inputs) == 1 else inputs))


# torch's layers take the values of a tuple one by one
class _Partition(pipe.Partition):
    def _call(self, layer: nn.Module, values: Values) -> Any:
        return layer(*values) if isinstance(values, tuple) else layer(values)


__all__ = ["LocalResult", "NoChunk", "Pipe", "WithDevice", "pop", "skippable", "stash", "verify_skippables"]
