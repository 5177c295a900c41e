"""Pipe: an nn.Sequential cut over devices, whose microbatches follow one another through them, in one process.

GPipe (Huang et al. 2019): in clock t partition j computes microbatch t - j.

    clock          0    1    2    3    4    5
    partition 0    m0   m1   m2   m3
    partition 1         m0   m1   m2   m3
    partition 2              m0   m1   m2   m3

No threads are needed: work on CUDA devices is only queued, so that starting it clock by clock keeps all devices busy,
and autograd runs the backward in the reverse order by itself. On a CPU it gives the same numbers, without the gain.

Three things in a module would see microbatches where they expect a batch, and are put right: skip connections travel
with their microbatch (skip.py), batch norms may wait for the whole batch (batch_norm.py), and gates give each forward's
balance loss, whose mean by rows becomes the gate's loss. A checkpointed microbatch runs a second time in backward; what
counts forwards must not count that one (Recomputing).
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of

from fmoe_ext.compat.fairscale.batch_norm import DeferredBatchNorm, defer_batch_norm
from fmoe_ext.compat.fairscale.microbatch import check_values, gather, move, scatter
from fmoe_ext.compat.fairscale.skip import SkipKey, Skippable, Skips, keeping, verify_skippables
from fmoe_ext.gates import BaseGate
from fmoe_ext.gates.accumulation import loss_share
from fmoe_ext.gates.base_gate import gates_of
from fmoe_ext.pipeline.batch_norm import Recomputing, batch_norms_of
from fmoe_ext.pipeline.microbatch import Values, map_tensors, num_rows

_TORCHS_PIPE = "fmoe_ext.compat.torch_pipe.Pipe with torch's signature,"
_DENIED = "denied to move parameters and buffers, because Pipe should manage device placement"


class BalanceError(ValueError):
    """A balance that does not fit the module."""


class Pipe(nn.Module):
    """An nn.Sequential whose layers live on several devices; microbatches overlap on them (GPipe, Huang et al. 2019).

    module: the layers. balance: how many consecutive layers each device gets. devices: one an entry of balance, all
    CUDA devices if None, or the CPU where there is none; the same device may serve several. chunks: microbatches that a
    batch is cut into; their rows differ by one at most. checkpoint: which microbatches keep no activations and compute
    them again in backward: "always", "except_last" or "never"; no effect outside of training. deferred_batch_norm:
    running statistics move once a batch (DeferredBatchNorm).

    Losses, hooks, skip connections (skippable) and gates' balance losses work as in the module itself; a gate's loss is
    the mean of its microbatches' losses, weighted by their rows, or inside gates.all_forwards_first and
    gates.WholeBatch the loss of the whole batch.

    Raises TypeError for another module; ValueError for a wrong balance, chunks or checkpoint, and for parameters shared
    between devices; IndexError for too few devices. The interface is torchgpipe's and
    fairscale.nn.Pipe's; fmoe_ext.compat.torch_pipe has torch.distributed.pipeline.sync.Pipe's.
    Equivalent to: module(batch) on one device.

    Example:

        >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> model = Pipe(layers, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
        >>> model(torch.randn(10, 8)).shape
        torch.Size([10, 8])
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: str

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ):
        super().__init__()
        check_layers(module)
        hint = "; fmoe_ext.compat.fairscale.balance_by_time(partitions, module, sample) measures a balance"
        if balance is None:
            raise BalanceError(
                f"balance is required: the number of layers of each partition{hint}; {_TORCHS_PIPE} needs none"
            )
        balance = list(balance)
        if len(module) != sum(balance):
            raise BalanceError(
                "module and sum of balance have different length "
                f"(module: {len(module)}, sum of balance: {sum(balance)}){hint}"
            )
        if any(number < 1 for number in balance):
            raise BalanceError(f"all balance numbers must be positive integer (balance: {balance}){hint}")
        if devices is None:
            num_cuda = torch.cuda.device_count()
            devices = [torch.device("cuda", i) for i in range(num_cuda)] or ["cpu"] * len(balance)
        found = [torch.device(device) for device in devices]
        # more devices than partitions are left alone
        if len(found) < len(balance):
            raise IndexError(
                f"too few devices to hold given partitions (devices: {len(found)}, partitions: {len(balance)})"
            )
        self._build(module, balance, found[: len(balance)], chunks, checkpoint, deferred_batch_norm)

    def _build(
        self,
        module: nn.Sequential,
        balance: list[int],
        devices: list[torch.device],
        chunks: int,
        checkpoint: str,
        deferred_batch_norm: bool,
    ) -> None:
        self.chunks = int(chunks)
        self.checkpoint = str(checkpoint)
        if self.chunks < 1:
            raise ValueError(f"chunks must be at least 1, but got {chunks}")
        if self.checkpoint not in ("always", "except_last", "never"):
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        self.balance, self.devices = balance, devices
        if deferred_batch_norm:
            module = defer_batch_norm(module, self.chunks)  # type: ignore[assignment]
        self.partitions = nn.ModuleList(self._partitions(module, balance))
        # a parameter that two partitions share must have one device
        home: dict[int, tuple[torch.device, str]] = {}
        for number, (partition, device) in enumerate(zip(self.partitions, devices, strict=True)):
            for name, param in partition.named_parameters():
                first_device, first_name = home.setdefault(id(param), (device, f"partitions.{number}.{name}"))
                if first_device != device:
                    raise ValueError(
                        "module with duplicate parameters on distinct devices is not supported: "
                        f"{first_name} on {first_device} is partitions.{number}.{name} on {device}"
                    )
        for partition, device in zip(self.partitions, devices, strict=True):
            partition.to(device)

    def _partitions(self, module: nn.Sequential, balance: list[int]) -> "Iterator[Partition]":
        layers = list(module.named_children())
        for number in balance:
            yield Partition(OrderedDict(layers[:number]))
            layers = layers[number:]

    def forward(self, batch: Values, *others: object) -> Any:
        """batch [B, *], or a tuple of such tensors for a first layer that takes one -> what the last layer returns.

        Among the tensors of a tuple may be other values (None, lists, numbers), which every microbatch gets, and
        NoChunk(tensor), which it gets whole; a value of the result that is no tensor comes back as a list, an entry a
        microbatch. The result is on devices[-1]. Raises TypeError for values without a tensor, and whatever a
        layer raises, with the layer's name.
        """
        if others:
            raise TypeError(
                f"Pipe takes one argument, but got {1 + len(others)}: give a tuple, which the first layer gets as one "
                f"argument, or use {_TORCHS_PIPE} whose layers take several"
            )
        return self._run(batch)

    def _run(self, batch: Values) -> Values:
        check_values(batch, "the input of Pipe")
        if not self.partitions:
            return batch
        parts = scatter(batch, self.chunks)
        # a small batch may have fewer parts than chunks
        for module in self.modules():
            if isinstance(module, DeferredBatchNorm):
                module.begin_batch(len(parts))
        microbatches = [_Microbatch(part, num_rows(part)) for part in parts]
        num_checkpointed = 0
        if self.training and torch.is_grad_enabled():
            # except_last: the backward begins with the last microbatch, whose activations would be freed for no time
            modes = {"always": len(parts), "except_last": len(parts) - 1, "never": 0}
            num_checkpointed = modes[self.checkpoint]
        # gates, norms and skips of each partition, looked for once a batch
        works = [_Work(partition) for partition in self.partitions]
        # a clock at a time, a partition at a time: what may run together is started together
        for clock in range(len(parts) + len(works) - 1):
            for j in range(max(0, clock - len(parts) + 1), min(clock + 1, len(works))):
                i = clock - j
                self._compute(microbatches[i], works[j], self.devices[j], i < num_checkpointed)
        # a gate's loss is the mean of its microbatches' losses by rows, unless the gate waits for the whole batch
        rows = [m.num_rows for m in microbatches]
        for gate in gates_of(self):
            losses = [
                m.losses[gate] * loss_share(gate, number, rows)
                for number, m in enumerate(microbatches)
                if gate in m.losses
            ]
            if losses:
                gate.set_loss(torch.stack(losses).sum(0))
        return gather([m.values for m in microbatches])

    def __len__(self) -> int:
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition  # type: ignore[misc]

    # a module moved as a whole would leave its devices: refused
    def cuda(self, device: Any = None) -> "Pipe":
        raise TypeError(_DENIED)

    def cpu(self) -> "Pipe":
        raise TypeError(_DENIED)

    def to(self, *args: Any, **kwargs: Any) -> "Pipe":
        """Change the dtype; TypeError for a device, which Pipe itself chooses."""
        names_device = "device" in kwargs or "tensor" in kwargs
        if names_device or (args and not isinstance(args[0], torch.dtype)):
            raise TypeError(_DENIED)
        return super().to(*args, **kwargs)

    def _compute(
        self, microbatch: "_Microbatch", work: "_Work", device: torch.device, is_checkpointed: bool
    ) -> None:
        values = move(microbatch.values, device)
        # the skips that this partition pops come to its device; the others stay with the microbatch
        skips: Skips = {}
        for key in work.pop_keys:
            if key in microbatch.skips:
                skip = microbatch.skips.pop(key)
                skips[key] = None if skip is None else skip.to(device, non_blocking=True)
        if is_checkpointed:
            again = Recomputing(work.norms)
            results = checkpoint_of(
                work.run_on_copy,
                values,
                skips,
                use_reentrant=False,
                # (context of the first forward, of the second)
                context_fn=lambda: (nullcontext(), again),
            )
        else:
            results = work.run(values, skips)
        microbatch.values, stashed, losses = results
        microbatch.skips.update(stashed)
        microbatch.losses.update(losses)


class Partition(nn.Sequential):
    """The layers of one device. What a layer raises gets a note with the layer's name."""

    def forward(self, values: Values) -> Values:
        for name, layer in self.named_children():
            try:
                result = self._call(layer, values)
                check_values(result, f"the result of layer {name!r}")
            except Exception as error:
                # written for torch's Pipe, which unpacks tuples: FairScale's gives them whole
                if isinstance(error, TypeError) and _needs_several(layer, values):
                    raise TypeError(
                        f"layer {name!r} of Pipe, a {type(layer).__name__}, must take the tuple of {len(values)} "
                        f"values as one argument: unpack it in forward, or use {_TORCHS_PIPE} which unpacks it"
                    ) from error
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in layer {name!r} of Pipe, a {type(layer).__name__}")
                raise
            values = result
        return values

    def _call(self, layer: nn.Module, values: Values) -> Any:
        return layer(values)


@dataclass
class _Microbatch:
    """Values that travel through the partitions, and all that belongs to them."""

    values: Values
    num_rows: int
    skips: Skips = field(default_factory=dict)  # stashed and not yet popped
    losses: dict[BaseGate, Tensor] = field(default_factory=dict)  # of the gates that it has passed


class _Work:
    """The layers of one partition, and what a search through their modules finds.

    Made once a batch, not once a microbatch: each search visits all modules.
    """

    def __init__(self, partition: nn.Module):
        self.partition = partition
        self.gates = gates_of(partition)
        self.norms = batch_norms_of(partition)
        layers = [layer for layer in partition.children() if isinstance(layer, Skippable)]
        self.pop_keys: list[SkipKey] = [key for layer in layers for key in layer.pop_keys()]

    def run(self, values: Values, skips: Skips) -> tuple[Values, Skips, dict[BaseGate, Tensor]]:
        """Return the layers' result, what they stashed, and their gates' losses; the gates forget theirs."""
        skips = dict(skips)  # a checkpoint runs this again with the same ones
        kept = [gate.get_loss() for gate in self.gates]  # of a forward before this batch, not of a microbatch
        try:
            with keeping(skips):
                values = self.partition(values)
            losses = {gate: loss for gate in self.gates if (loss := gate.get_loss()) is not None}
        finally:
            for gate, loss in zip(self.gates, kept, strict=True):
                gate.set_loss(loss)
        return values, skips, losses

    def run_on_copy(self, values: Values, skips: Skips) -> tuple[Values, Skips, dict[BaseGate, Tensor]]:
        """Run on copies, so that a layer that changes its input in place leaves it for the second forward."""
        copies = {key: None if skip is None else skip.clone() for key, skip in skips.items()}
        return self.run(map_tensors(Tensor.clone, values), copies)


def check_layers(module: object) -> None:
    """Raise TypeError or ValueError unless module is an nn.Sequential of different layers."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, but got {type(module).__name__}: write the steps of its "
            "forward as layers of an nn.Sequential, for example nn.Flatten() for torch.flatten(x, 1)"
        )
    if len(list(module.named_children())) != len(module):  # named_children() lists a module once
        raise ValueError(
            "module with duplicate children is not supported: each layer can be on one device only"
        )
    verify_skippables(module)


def _needs_several(layer: nn.Module, values: Values) -> bool:
    """Return True if a layer takes the values of a tuple one by one, and not as one argument."""
    while isinstance(layer, nn.Sequential) and len(layer):  # its first layer gets them
        layer = layer[0]
    takes = inspect.signature(layer.forward)
    return isinstance(values, tuple) and not _binds(takes, values) and _binds(takes, *values)


def _binds(takes: inspect.Signature, *arguments: Any) -> bool:
    try:
        takes.bind(*arguments)
    except TypeError:
        return False
    return True
